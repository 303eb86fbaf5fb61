"""`headrace bench ingest`: how fast a shard takes rows, beside what disk, RocksDB and Redis make of the same ones."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from headrace.paramserver.config.server_config import DEFAULT_PORT
from headrace.paramserver.reading.shard_link import Dial
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.snapshots.snapshot_client import create_snapshot
from headrace.paramserver.store.store_config import StoreConfig
from headrace.paramserver.supervisor.launch import ServerProcess
from headrace.schemas.idl import idl
from headrace.scripts.benches.bench_child import peak_memory_bytes
from headrace.scripts.benches.bench_peers import REDIS_HINT, has_redis, time_fsync, time_redis, time_rocksdb
from headrace.scripts.benches.bench_report import (
    FolderOption,
    JsonOption,
    OnStage,
    RoundsOption,
    bench_folder,
    check_folder,
    check_json,
    conclude,
    say,
    show_progress,
)
from headrace.scripts.benches.bench_rows import WIRE_ROW_BYTES, BenchRows, RowsConfig
from headrace.scripts.benches.bench_writer import WriteResult, WriterProcess

__all__ = ["SHARD_STORE", "IngestConfig", "IngestResult", "ingest", "run", "serve"]

_BLOCK_CACHE_BYTES = 256 << 20
_MEMTABLE_BYTES = 192 << 20
_KINDS = ("uniform", "zipf")
_TIMEOUT_S, _POLL_S = 60.0, 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestConfig:
    """How much is measured.

    Attributes:
        num_batches: Batches (of 4096 lookups) that are written for the sustained rates.
        num_acked_batches: Batches that are written for the acked rate, fewer than the shard's backlog holds: beyond
            that an ack waits for the store.
        num_redis_batches: Batches that Redis gets.
        num_rounds: All is measured so often, in turn; the medians count.
        folder: Where files go; None for the system's temporary folder.
    """

    num_batches: int = 960
    num_acked_batches: int = 80
    num_redis_batches: int = 100
    num_rounds: int = 3
    folder: Path | None = None

    @property
    def num_stages(self) -> int:
        """How often `on_stage` is called."""
        return self.num_rounds * (3 + len(_KINDS) * (3 if has_redis() else 2))


@dataclass(kw_only=True, slots=True)
class IngestResult:
    """What was measured: rows a second of each round, by what was done.

    Attributes:
        rates: `fsync`, `acked`; `rocksdb_`, `headrace_` and `redis_` with `uniform` and `zipf`; `headrace_snapshot`, as
            `headrace_uniform` while a snapshot is made.
        worst_loop_pause_ms: Of the shard, over all rounds.
        peak_memory_bytes: Of the shard's process, over all rounds.
    """

    rates: dict[str, list[float]] = field(default_factory=dict)
    worst_loop_pause_ms: float = 0.0
    peak_memory_bytes: int = 0

    def add(self, name: str, num_rows: int, seconds: float) -> None:
        """Note one round."""
        self.rates.setdefault(name, []).append(num_rows / seconds)

    def ratio(self, name: str, limit: str) -> float | None:
        """Return one median over another; None when one was not measured."""
        if name not in self.rates or limit not in self.rates:
            return None
        return median(self.rates[name]) / median(self.rates[limit])

    def to_json(self) -> dict[str, Any]:
        """Return the figures, the ratios of the medians first."""
        return {
            "ratio_acked_vs_fsync": self.ratio("acked", "fsync"),
            "ratio_uniform_vs_rocksdb": self.ratio("headrace_uniform", "rocksdb_uniform"),
            "ratio_zipf_vs_rocksdb": self.ratio("headrace_zipf", "rocksdb_zipf"),
            "ratio_uniform_vs_redis": self.ratio("headrace_uniform", "redis_uniform"),
            "ratio_zipf_vs_redis": self.ratio("headrace_zipf", "redis_zipf"),
            "ratio_with_snapshot": self.ratio("headrace_snapshot", "headrace_uniform"),
            "worst_loop_pause_ms": self.worst_loop_pause_ms,
            "peak_memory_bytes": self.peak_memory_bytes,
            "row_bytes": WIRE_ROW_BYTES,
            "median_rows_per_s": {name: median(values) for name, values in self.rates.items()},
            "median_bytes_per_s": {name: median(values) * WIRE_ROW_BYTES for name, values in self.rates.items()},
            "rows_per_s": self.rates,
        }


def ingest(
    *,
    json_path: JsonOption = None,
    folder: FolderOption = None,
    rounds: RoundsOption = 3,
    batches: Annotated[int, typer.Option(min=1, help="Steps of 4096 lookups whose rows are written.")] = 960,
) -> None:
    """Measure how fast a shard takes rows of 128 floats and an optimizer state.

    What it acks is held against writev and fdatasync of the same bytes without a server; what it has applied, with its
    backlog empty again, against a plain loop of RocksDB batches and against a Redis with an append-only file.

    Raises:
        ConfigError: A path cannot be written.
        UnavailableError: A process has ended or does not start.
    """
    check_json(json_path)
    config = IngestConfig(
        num_batches=batches,
        num_acked_batches=min(batches, 80),
        num_redis_batches=min(batches, 100),
        num_rounds=rounds,
        folder=check_folder(folder),
    )
    if not has_redis():
        say(REDIS_HINT)
    with show_progress("ingest", config.num_stages) as on_stage:
        result = run(config, on_stage=on_stage)
    conclude(result.to_json(), json_path)


def run(config: IngestConfig, *, on_stage: OnStage) -> IngestResult:
    """Measure; processes and files are gone when this returns or raises.

    Args:
        config: How much.
        on_stage: Told in a few words what begins.

    Raises:
        UnavailableError: A process has ended or does not start.
    """
    result = IngestResult()
    with ExitStack() as stack:
        folder = stack.enter_context(bench_folder(config.folder))
        configs = {ids: RowsConfig(ids=ids, num_batches=config.num_batches) for ids in _KINDS}
        rows = {ids: BenchRows(of_ids) for ids, of_ids in configs.items()}
        writers = {ids: stack.enter_context(WriterProcess(of_ids)) for ids, of_ids in configs.items()}
        for number in range(config.num_rounds):
            for step in _steps(config, rows, writers, result):
                on_stage(f"round {number + 1}: {step.what}")
                with tempfile.TemporaryDirectory(dir=folder) as place:
                    step.do(Path(place))
    return result


@dataclass(frozen=True, slots=True)
class _Step:
    what: str
    do: Callable[[Path], None]


def _steps(
    config: IngestConfig, rows: dict[str, BenchRows], writers: dict[str, WriterProcess], result: IngestResult
) -> Iterator[_Step]:
    uniform, num_acked = rows["uniform"], config.num_acked_batches

    def fsync(place: Path) -> None:
        num_rows = sum(ids.size for ids in uniform.ids[:num_acked])
        result.add("fsync", num_rows, time_fsync(uniform, place, num_batches=num_acked))

    def acked(place: Path) -> None:
        written = _write(writers["uniform"], place, num_acked, result)
        result.add("acked", written.num_rows, written.acked_s)

    def with_snapshot(place: Path) -> None:
        written = _write(writers["uniform"], place, config.num_batches, result, snapshot_at=config.num_batches // 2)
        result.add("headrace_snapshot", written.num_rows, written.applied_s)

    yield _Step("writev and fdatasync alone", fsync)
    yield _Step("acked by Headrace", acked)
    for ids in _KINDS:
        yield from _steps_of(ids, config, rows[ids], writers[ids], result)
    yield _Step("applied by Headrace while a snapshot is made, uniform ids", with_snapshot)


def _steps_of(
    ids: str, config: IngestConfig, rows: BenchRows, writer: WriterProcess, result: IngestResult
) -> Iterator[_Step]:
    def rocksdb(place: Path) -> None:
        result.add(f"rocksdb_{ids}", rows.num_rows, time_rocksdb(rows, place, SHARD_STORE))

    def headrace(place: Path) -> None:
        written = _write(writer, place, config.num_batches, result)
        result.add(f"headrace_{ids}", written.num_rows, written.applied_s)

    def redis(place: Path) -> None:
        result.add(f"redis_{ids}", *time_redis(rows, place, num_batches=config.num_redis_batches))

    yield _Step(f"RocksDB alone, {ids} ids", rocksdb)
    yield _Step(f"applied by Headrace, {ids} ids", headrace)
    if has_redis():
        yield _Step(f"Redis, {ids} ids", redis)


SHARD_STORE = StoreConfig(block_cache_bytes=_BLOCK_CACHE_BYTES, write_buffer_bytes=_MEMTABLE_BYTES // 3)
"""The options of the store of a shard of `serve`, for RocksDB by itself."""


def _write(
    writer: WriterProcess, place: Path, num_batches: int, result: IngestResult, *, snapshot_at: int | None = None
) -> WriteResult:
    with serve(place / "data") as server, ThreadPoolExecutor(1) as pool:
        snapshot = None
        if snapshot_at is not None:
            snapshot = pool.submit(lambda: asyncio.run(_snapshot(server.address, snapshot_at)))
        written = writer.write(server.address, num_batches=num_batches)
        if snapshot is not None:
            snapshot.result()
        result.worst_loop_pause_ms = max(result.worst_loop_pause_ms, written.worst_loop_pause_ms)
        result.peak_memory_bytes = max(result.peak_memory_bytes, peak_memory_bytes(server.shard_pids[0]))
        server.kill()
        return written


async def _snapshot(address: str, at_seq: int) -> None:
    """Make a snapshot once so many records are in the log."""
    dial = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=_TIMEOUT_S, role=idl.Role.ADMIN)
    host, port = parse_address(address, default_port=DEFAULT_PORT)
    client, _ = await dial.connect(host, port)
    async with client:
        while (await client.status()).log_seq < at_seq:  # noqa: ASYNC110 (it is far away)
            await asyncio.sleep(_POLL_S)
    await create_snapshot(address, dial=dial, at_step=False, timeout_s=_TIMEOUT_S)


@contextmanager
def serve(data_dir: Path, *, shards: int = 1, **settings: Any) -> Iterator[ServerProcess]:
    """Run a server as the benches measure it; it is gone at the end, killed if it was not stopped."""
    settings = {"block_cache_bytes": _BLOCK_CACHE_BYTES, "memtable_bytes": _MEMTABLE_BYTES, **settings}
    server = ServerProcess.start(data_dir, shards=shards, **settings)
    try:
        yield server
    finally:
        server.close()
