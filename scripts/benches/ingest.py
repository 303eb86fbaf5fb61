"""`headrace bench ingest` and `headrace bench recovery`: how fast a shard takes rows, and applies its log after a kill.

Ingest is compared with the disk, RocksDB and Redis with the same rows.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from headrace.paramserver.reading.link import Dial
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.remote import create_snapshot
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.schemas.errors import HeadraceError
from headrace.schemas.idl import idl
from headrace.scripts.benches.child import peak_memory_bytes
from headrace.scripts.benches.harness import FolderOption, OnStage, Rounds, RoundsOption, bench_command, bench_folder
from headrace.scripts.benches.peers import REDIS_HINT, fsync_rate, has_redis, redis_rate, rocksdb_rate
from headrace.scripts.benches.workload import WIRE_ROW_BYTES, BenchRows, RowsConfig, WriteResult, WriterProcess

__all__ = ["SHARD_STORE", "IngestConfig", "RecoveryConfig", "admin_dial", "ingest", "measure_ingest"]
__all__ += ["measure_recovery", "recovery", "serve"]

_BLOCK_CACHE_BYTES = 256 << 20
_MEMTABLE_BYTES = 192 << 20
_TIMEOUT_S, _POLL_S = 60.0, 0.01
_BATCH_BYTES = 4095 * WIRE_ROW_BYTES  # of uniform ids, about

SHARD_STORE = StoreConfig(block_cache_bytes=_BLOCK_CACHE_BYTES, write_buffer_bytes=_MEMTABLE_BYTES // 3)
"""Options of the store of a shard of `serve`, for RocksDB alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestConfig:
    """How much `headrace bench ingest` measures."""

    num_batches: Annotated[
        int, typer.Option("--batches", min=1, help="Steps of 4096 lookups whose rows are written.")
    ] = 960
    # Fewer than the shard's backlog holds: beyond that an ack waits for the store.
    num_acked_batches: int = 80
    num_redis_batches: int = 100
    num_rounds: RoundsOption = 3
    folder: FolderOption = None


def measure_ingest(config: IngestConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure how fast a shard takes rows of 128 floats and an optimizer state.

    Acked rows are compared with writev and fdatasync of the same bytes without a server; applied rows, with the backlog
    empty again, with a plain loop of RocksDB batches and with a Redis with an append-only file.
    """
    rates, worst_pause_ms, peak_bytes = Rounds(), 0.0, 0
    num_batches, num_acked = config.num_batches, min(config.num_acked_batches, config.num_batches)
    num_redis = min(config.num_redis_batches, config.num_batches)
    configs = {ids: RowsConfig(ids=ids, num_batches=num_batches) for ids in ("uniform", "zipf")}
    rows = {ids: BenchRows(of_ids) for ids, of_ids in configs.items()}

    def write(place: Path, ids: str, num_batches: int, snapshot_at: int | None = None) -> WriteResult:
        nonlocal worst_pause_ms, peak_bytes
        with serve(place / "data") as server, ThreadPoolExecutor(1) as pool:
            snapshot = None
            if snapshot_at is not None:
                snapshot = pool.submit(lambda: asyncio.run(_create_snapshot(server.address, snapshot_at)))
            written = writers[ids].write(server.address, num_batches=num_batches)
            if snapshot is not None:
                snapshot.result()
            worst_pause_ms = max(worst_pause_ms, written.worst_loop_pause_ms)
            peak_bytes = max(peak_bytes, peak_memory_bytes(server.shard_pids[0]))
            server.kill()
        return written

    def acked(place: Path) -> float:
        written = write(place, "uniform", num_acked)
        return written.num_rows / written.acked_s

    def applied(ids: str, place: Path, snapshot_at: int | None = None) -> float:
        written = write(place, ids, num_batches, snapshot_at)
        return written.num_rows / written.applied_s

    fsync = partial(fsync_rate, rows["uniform"], num_batches=num_acked)
    steps: dict[str, Callable[[Path], float]] = {"fsync": fsync, "acked": acked}
    for kind in configs:
        steps[f"rocksdb_{kind}"] = partial(rocksdb_rate, rows[kind], config=SHARD_STORE)
        steps[f"headrace_{kind}"] = partial(applied, kind)
        if has_redis():
            steps[f"redis_{kind}"] = partial(redis_rate, rows[kind], num_batches=num_redis)
    steps["headrace_snapshot"] = partial(applied, "uniform", snapshot_at=num_batches // 2)
    with ExitStack() as stack:
        folder = stack.enter_context(bench_folder(config.folder))
        writers = {ids: stack.enter_context(WriterProcess(of_ids)) for ids, of_ids in configs.items()}
        for number in range(config.num_rounds):
            for name, run in steps.items():
                on_stage(f"round {number + 1}: {name}")
                with tempfile.TemporaryDirectory(dir=folder) as place:
                    rates.add(name, run(Path(place)))
    return {
        "ratio_acked_vs_fsync": rates.ratio("acked", "fsync"),
        "ratio_uniform_vs_rocksdb": rates.ratio("headrace_uniform", "rocksdb_uniform"),
        "ratio_zipf_vs_rocksdb": rates.ratio("headrace_zipf", "rocksdb_zipf"),
        "ratio_uniform_vs_redis": rates.ratio("headrace_uniform", "redis_uniform"),
        "ratio_zipf_vs_redis": rates.ratio("headrace_zipf", "redis_zipf"),
        "ratio_with_snapshot": rates.ratio("headrace_snapshot", "headrace_uniform"),
        "worst_loop_pause_ms": worst_pause_ms,
        "peak_memory_bytes": peak_bytes,
        "row_bytes": WIRE_ROW_BYTES,
        "median_rows_per_s": rates.medians(),
        "median_bytes_per_s": rates.medians(WIRE_ROW_BYTES),
        "rows_per_s": rates,
    }


ingest = bench_command("ingest", IngestConfig, measure_ingest, hints=lambda: [] if has_redis() else [REDIS_HINT])


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig:
    """How much `headrace bench recovery` measures."""

    mebibytes: Annotated[int, typer.Option(min=1, help="Unapplied log at the start of the server, MiB.")] = 1024
    num_rounds: RoundsOption = 3
    folder: FolderOption = None

    @property
    def rows(self) -> RowsConfig:
        """The rows that make a log of that size."""
        return RowsConfig(ids="uniform", num_batches=max(1, (self.mebibytes << 20) // _BATCH_BYTES))


def measure_recovery(config: RecoveryConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure how fast a shard that was killed applies its log to an empty store.

    The rate is compared with that at which the same rows came in: sent, on disk and applied. The store is removed while
    the server is down, so the whole log is unapplied.
    """
    rates, log_bytes, num_batches = Rounds(), 0, config.rows.num_batches
    with bench_folder(config.folder) as folder, WriterProcess(config.rows) as writer:
        for number in range(config.num_rounds):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                data_dir = Path(place) / "data"
                on_stage(f"{config.mebibytes} MiB, round {number + 1}: writing")
                with serve(data_dir) as server:
                    written = writer.write(server.address, num_batches=num_batches)
                    server.kill()
                log_bytes = written.wire_bytes
                rates.add("sustained", written.num_rows / written.applied_s)
                for store in data_dir.glob("shard-*/store"):
                    shutil.rmtree(store)
                on_stage(f"{config.mebibytes} MiB, round {number + 1}: recovering")
                with serve(data_dir, timeout_s=600.0) as server:
                    rates.add("recovered", written.num_rows / _recovery_s(server))
                    server.kill()
    return {
        "ratio_recovery_vs_sustained": rates.ratio("recovered", "sustained"),
        "log_bytes": log_bytes,
        "recovery_s": median([log_bytes / WIRE_ROW_BYTES / rate for rate in rates["recovered"]]),
        "median_rows_per_s": rates.medians(),
        "median_bytes_per_s": rates.medians(WIRE_ROW_BYTES),
        "rows_per_s": rates,
    }


recovery = bench_command("recovery", RecoveryConfig, measure_recovery)


def _recovery_s(server: ServerProcess) -> float:
    """Return the seconds from opening the log until the store has all of it."""
    asyncio.run(_wait_applied(server.address))
    end = time.time()
    for fact in server.read_log():
        if fact.get("message") == "recovered":
            # The server serves as soon as all is in memory, and applies the rest meanwhile.
            return end - datetime.fromisoformat(fact["time"]).timestamp() + float(fact["seconds"])
    raise HeadraceError("the server found nothing to recover; its log has no line about it")


async def _wait_applied(address: str) -> None:
    client, _ = await admin_dial(_TIMEOUT_S).connect(*parse_address(address))
    async with client:
        while (status := await client.status()).applied_seq < status.log_seq:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(_POLL_S)


def admin_dial(timeout_s: float) -> Dial:
    """Return how to connect to a bench's server as an administrator."""
    return Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=timeout_s, role=idl.Role.ADMIN)


async def _create_snapshot(address: str, at_seq: int) -> None:
    """Create a snapshot once this many records are in the log."""
    dial = admin_dial(_TIMEOUT_S)
    client, _ = await dial.connect(*parse_address(address))
    async with client:
        while (await client.status()).log_seq < at_seq:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(_POLL_S)
    await create_snapshot(address, dial=dial, at_step=False, timeout_s=_TIMEOUT_S)


@contextmanager
def serve(data_dir: Path, *, shards: int = 1, **settings: Any) -> Iterator[ServerProcess]:
    """Run a server with the benches' settings; kill it at the end if it still runs."""
    settings = {"block_cache_bytes": _BLOCK_CACHE_BYTES, "memtable_bytes": _MEMTABLE_BYTES, **settings}
    server = ServerProcess.start(data_dir, shards=shards, **settings)
    try:
        yield server
    finally:
        server.close()
