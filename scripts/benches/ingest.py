"""`headrace bench ingest`: how fast a shard takes rows, next to disk, RocksDB and Redis, and applies its log again."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.paramserver.reading.link import Dial
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.schemas.errors import HeadraceError
from headrace.schemas.idl import idl
from headrace.scripts.benches.child import peak_memory_bytes
from headrace.scripts.benches.harness import OnStage, Rounds, RoundsOption, bench_command, bench_folder
from headrace.scripts.benches.peers import fsync_rate, has_redis, redis_hints, redis_rate, rocksdb_rate
from headrace.scripts.benches.workload import WIRE_ROW_BYTES, BenchRows, RowsConfig, WriterProcess

__all__ = ["SHARD_STORE", "admin_dial", "ingest", "measure", "serve"]

_BLOCK_CACHE_BYTES = 256 << 20
_MEMTABLE_BYTES = 192 << 20
_TIMEOUT_S, _RECOVERY_TIMEOUT_S, _POLL_S = 60.0, 600.0, 0.01
# Fewer than the shard's backlog holds: beyond that an ack waits for the store.
_NUM_ACKED_BATCHES = 80
_NUM_REDIS_BATCHES = 100

SHARD_STORE = StoreConfig(block_cache_bytes=_BLOCK_CACHE_BYTES, write_buffer_bytes=_MEMTABLE_BYTES // 3)
"""Options of the store of a shard of `serve`, for RocksDB alone."""


def measure(
    on_stage: OnStage,
    *,
    num_batches: Annotated[
        int, typer.Option("--batches", min=1, help="Steps of 4096 lookups whose rows are written.")
    ] = 960,
    num_rounds: RoundsOption = 3,
) -> dict[str, Any]:
    """Measure how fast a shard takes rows of 128 floats and an optimizer state, and applies its log after a kill.

    Acked rows are compared with writev and fdatasync of the same bytes without a server; applied rows, with the backlog
    empty again, with a plain loop of RocksDB batches and with a Redis with an append-only file. After the uniform rows
    the server is killed and its store removed: the next start applies the whole log.
    """
    rates, worst_pause_ms, peak_bytes = Rounds(), 0.0, 0
    num_acked, num_redis = (min(num_batches, most) for most in (_NUM_ACKED_BATCHES, _NUM_REDIS_BATCHES))
    configs = {ids: RowsConfig(ids=ids, num_batches=num_batches) for ids in ("uniform", "zipf")}
    rows = {ids: BenchRows(of_ids) for ids, of_ids in configs.items()}

    def write(place: Path, name: str, *, ids: str, num_batches: int = num_batches) -> None:
        nonlocal worst_pause_ms, peak_bytes
        with serve(place / "data") as server:
            written = writers[ids].write(server.address, num_batches=num_batches)
            worst_pause_ms = max(worst_pause_ms, written.worst_loop_pause_ms)
            peak_bytes = max(peak_bytes, peak_memory_bytes(server.shard_pids[0]))
            server.kill()
        rates.add(name, written.num_rows / (written.acked_s if name == "acked" else written.applied_s))
        if name == "headrace_uniform":
            rates.add("recovered", written.num_rows / _recovery_s(place / "data"))

    def peer(name: str, rate: Callable[..., float], place: Path, **settings: Any) -> None:
        rates.add(name, rate(folder=place, **settings))

    steps: dict[str, Callable[..., None]] = {
        "fsync": partial(peer, rate=partial(fsync_rate, rows["uniform"], num_batches=num_acked)),
        "acked": partial(write, ids="uniform", num_batches=num_acked),
    }
    for kind in configs:
        steps[f"rocksdb_{kind}"] = partial(peer, rate=partial(rocksdb_rate, rows[kind], config=SHARD_STORE))
        steps[f"headrace_{kind}"] = partial(write, ids=kind)
        if has_redis():
            of_redis = partial(redis_rate, rows[kind], num_batches=num_redis)
            steps[f"redis_{kind}"] = partial(peer, rate=of_redis)
    with ExitStack() as stack:
        folder = stack.enter_context(bench_folder())
        writers = {ids: stack.enter_context(WriterProcess(of_ids)) for ids, of_ids in configs.items()}
        for number in range(num_rounds):
            for name, run in steps.items():
                on_stage(f"round {number + 1}: {name}")
                with tempfile.TemporaryDirectory(dir=folder) as place:
                    run(place=Path(place), name=name)
    return {
        "ratio_acked_vs_fsync": rates.ratio("acked", "fsync"),
        "ratio_uniform_vs_rocksdb": rates.ratio("headrace_uniform", "rocksdb_uniform"),
        "ratio_zipf_vs_rocksdb": rates.ratio("headrace_zipf", "rocksdb_zipf"),
        "ratio_uniform_vs_redis": rates.ratio("headrace_uniform", "redis_uniform"),
        "ratio_zipf_vs_redis": rates.ratio("headrace_zipf", "redis_zipf"),
        "ratio_recovery_vs_sustained": rates.ratio("recovered", "headrace_uniform"),
        "worst_loop_pause_ms": worst_pause_ms,
        "peak_memory_bytes": peak_bytes,
        "row_bytes": WIRE_ROW_BYTES,
        "median_rows_per_s": rates.medians(),
        "rows_per_s": rates,
    }


ingest = bench_command("ingest", measure, hints=redis_hints)


def _recovery_s(data_dir: Path) -> float:
    """Return the seconds from opening the log of a killed server until a new store has all of it."""
    for store in data_dir.glob("shard-*/store"):
        shutil.rmtree(store)
    with serve(data_dir, timeout_s=_RECOVERY_TIMEOUT_S) as server:
        asyncio.run(_wait_applied(server.address))
        end_s = time.time()
        for fact in server.read_log():
            if fact.get("message") == "recovered":
                # The server serves as soon as all is in memory, and applies the rest meanwhile.
                server.kill()
                return end_s - datetime.fromisoformat(fact["time"]).timestamp() + float(fact["seconds"])
    raise HeadraceError("the server found nothing to recover; its log has no line about it")


async def _wait_applied(address: str) -> None:
    client, _ = await admin_dial(_TIMEOUT_S).connect(*parse_address(address))
    async with client:
        while (status := await client.status()).applied_seq < status.log_seq:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(_POLL_S)


def admin_dial(timeout_s: float) -> Dial:
    """Return how to connect to a bench's server as an administrator."""
    return Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=timeout_s, role=idl.Role.ADMIN)


@contextmanager
def serve(data_dir: Path, **settings: Any) -> Iterator[ServerProcess]:
    """Run a server of one shard with the benches' settings; kill it at the end if it still runs."""
    settings = {"block_cache_bytes": _BLOCK_CACHE_BYTES, "memtable_bytes": _MEMTABLE_BYTES, **settings}
    server = ServerProcess.start(data_dir, shards=1, **settings)
    try:
        yield server
    finally:
        server.close()
