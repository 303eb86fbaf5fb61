"""`headrace bench lookup`: how fast a replica answers lookups while updates arrive, next to torch, Redis and RocksDB.

A second part reads a table on disk past its hot rows, next to RocksDB alone.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import rocksdict
import torch
import typer

from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.replica.tables.disk_stores import DiskStores, disk_store_config
from headrace.paramserver.replica.tables.on_disk import DiskTable
from headrace.paramserver.snapshots.remote import create_snapshot
from headrace.paramserver.store.rocksdb import rocks_options
from headrace.paramserver.system.direct_file import supports_direct_io
from headrace.schemas.errors import ConfigError, HeadraceError, UnavailableError
from headrace.schemas.row_records import encode_keys
from headrace.schemas.tables import DType, TableSpec
from headrace.scripts.benches.harness import (
    FolderOption,
    OnStage,
    Rounds,
    RoundsOption,
    bench_command,
    bench_folder,
    one_torch_thread,
)
from headrace.scripts.benches.ingest import admin_dial, serve
from headrace.scripts.benches.peers import REDIS_HINT, has_redis, redis_server
from headrace.scripts.benches.workload import RowsConfig, WriterProcess, draw_ids

__all__ = ["LookupConfig", "LookupResult", "lookup", "measure", "measure_disk"]

_TIMEOUT_S = 600.0
_NUM_BATCHES, _BATCH_ROWS, _FILL_ROWS = 64, 4096, 16_384
_UPDATE_S = 8.0  # at most; updates are written in blocks, and between them the pace has a short gap
_PIPELINED_BATCHES = 4
_CACHED_PERCENT = 10
_COMPACTED_S, _POLL_S = 120.0, 0.05

_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class LookupConfig:
    """How much `headrace bench lookup` measures."""

    # The process holds the table three times during the switch: two copies and torch's.
    num_rows: Annotated[int, typer.Option("--rows", help="Rows of the table in memory, of 64 float32 by default.")] = (
        10_000_000
    )
    dim: Annotated[int, typer.Option(min=1, max=4096, help="Its columns, float32.")] = 64
    rows_per_s: Annotated[int, typer.Option(min=1, help="Pace of the updates.")] = 100_000
    redis_rows: Annotated[int, typer.Option(min=1, help="Rows that Redis gets, at most.")] = 1_000_000
    disk_rows: Annotated[int, typer.Option(min=_BATCH_ROWS, help="Rows of the table on disk, at most.")] = 1_000_000
    num_lookups: Annotated[int, typer.Option("--lookups", min=1, help="Batches of 4096 ids in a block.")] = 500
    num_rounds: RoundsOption = 3
    folder: FolderOption = None

    def __post_init__(self) -> None:
        if self.num_rows < _BATCH_ROWS:
            raise ConfigError(f"--rows: {self.num_rows} is less than a batch, {_BATCH_ROWS}")


class LookupResult:
    """What was measured."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.rates = Rounds()  # rows a second: `torch`, `headrace`, `…_idle` of both, `redis`
        self.cpu_us = Rounds()  # of this thread for a batch, microseconds
        self.before_ms: list[float] = []  # of each lookup before the switch to a snapshot
        self.during_ms: list[float] = []  # of each lookup while it is loaded and switched to
        self.num_failed = 0  # lookups that raised
        self.num_missing = 0  # ids that were not found
        self.disk: dict[str, float] = {}  # rows a second; see `measure_disk`
        self.rows_per_s = 0.0  # updates that arrived

    def add(self, name: str, num_batches: int, seconds: float, cpu_s: float) -> None:
        """Add a block."""
        self.rates.add(name, num_batches * _BATCH_ROWS / seconds)
        self.cpu_us.add(name, cpu_s / num_batches * 1e6)

    def figures(self, config: LookupConfig) -> dict[str, Any]:
        """Return the figures, the ratios first."""
        before_ms, during_ms = (float(np.percentile(values, 99)) for values in (self.before_ms, self.during_ms))
        return {
            "ratio_vs_torch": self.rates.ratio("headrace", "torch"),
            "ratio_vs_redis": self.rates.ratio("headrace", "redis"),
            "swap_p99_ratio": during_ms / before_ms,
            "failed_lookups": self.num_failed,
            "miss_ratio_vs_rocksdb": self.disk["miss"] / self.disk["rocksdb"],
            "ratio_cpu_vs_torch": self.cpu_us.ratio("torch", "headrace"),
            "ratio_idle_vs_torch": self.rates.ratio("headrace_idle", "torch_idle"),
            "p99_before_ms": before_ms,
            "p99_swap_ms": during_ms,
            "worst_before_ms": max(self.before_ms),
            "worst_swap_ms": max(self.during_ms),
            "num_lookups_during_swap": len(self.during_ms),
            "missing_ids": self.num_missing,
            "updates_rows_per_s": self.rows_per_s,
            "median_rows_per_s": self.rates.medians() | self.disk,
            "median_cpu_us": self.cpu_us.medians(),
            "load_average": list(os.getloadavg()),
            "config": {name: value for name, value in asdict(config).items() if name != "folder"},
        }


def measure(config: LookupConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure how fast a replica answers lookups while updates arrive, next to torch, Redis and RocksDB.

    First a table in memory and Zipf ids in batches of 4096, the same for torch.nn.functional.embedding and pipelined
    MGETs; then the slowest percent while the replica switches to a snapshot; then a table on disk past its hot rows.
    """
    result, dial = LookupResult(), admin_dial(_TIMEOUT_S)
    zipf = RowsConfig(ids="zipf", num_batches=_NUM_BATCHES, seed=1, dim=config.dim, num_rows=config.num_rows)
    num_batches = -(-config.num_rows // _BATCH_ROWS)
    each = RowsConfig(ids="each", num_batches=num_batches, dim=config.dim, num_rows=config.num_rows)
    with one_torch_thread():
        with bench_folder(config.folder) as folder, serve(folder / "data") as server, ExitStack() as stack:
            on_stage("filling the table")
            with WriterProcess(each) as filler:
                filler.write(server.address, num_batches=num_batches)
            on_stage("loading a snapshot")
            manifest = asyncio.run(create_snapshot(server.address, dial=dial, timeout_s=_TIMEOUT_S))
            snapshot = server.data_dir / "snapshots" / manifest.name
            replica = EmbeddingReplica(server.address, snapshot=snapshot, open_timeout_s=_TIMEOUT_S)
            stack.enter_context(replica)
            writer = stack.enter_context(WriterProcess(zipf))

            @contextmanager
            def updates() -> Iterator[None]:
                """Have rows written at the pace meanwhile."""
                is_over = threading.Event()
                num_batches = max(round(_UPDATE_S * config.rows_per_s / _BATCH_ROWS), 1)

                def write() -> float:
                    num_rows, begin_s = 0, time.perf_counter()
                    while not is_over.is_set():
                        written = writer.write(server.address, num_batches=num_batches, rows_per_s=config.rows_per_s)
                        num_rows += written.num_rows
                    return num_rows / (time.perf_counter() - begin_s)

                with ThreadPoolExecutor(1, "updates") as pool:
                    writing = pool.submit(write)
                    try:
                        yield
                    finally:
                        is_over.set()
                result.rows_per_s = writing.result()

            _measure_memory(config, folder, replica, updates, result, on_stage)
            on_stage("switching to a snapshot")
            with updates():
                _measure_switch(config, replica, snapshot, result)
            result.num_missing = sum(replica.num_missing.values())
        with bench_folder(config.folder) as folder:
            on_stage("a table on disk")
            num_rows = min(config.disk_rows, config.num_rows)
            result.disk = measure_disk(folder, num_rows, config.dim, num_batches=_NUM_BATCHES)
    return result.figures(config)


lookup = bench_command("lookup", LookupConfig, measure, hints=lambda: [] if has_redis() else [REDIS_HINT])


def _measure_memory(
    config: LookupConfig,
    folder: Path,
    replica: EmbeddingReplica,
    updates: Callable[[], Any],
    result: LookupResult,
    on_stage: OnStage,
) -> None:
    """Let torch, the replica and Redis take turns, first without updates."""
    batches = _draw_batches(config.num_rows, seed=2)
    tensors = [torch.from_numpy(ids) for ids in batches]
    plain = torch.ones(config.num_rows, config.dim)

    def measure_block(name: str, ask: Callable[[torch.Tensor], object]) -> None:
        begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
        for number in range(config.num_lookups):
            ask(tensors[number % _NUM_BATCHES])
        seconds, cpu_s = time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s
        result.add(name, config.num_lookups, seconds, cpu_s)

    def measure_both(suffix: str = "") -> None:
        measure_block(f"torch{suffix}", lambda ids: torch.nn.functional.embedding(ids, plain))
        measure_block(f"headrace{suffix}", lambda ids: _look_up(replica, ids, result))

    with ExitStack() as stack:
        on_stage("lookups without updates")
        time_mget = None
        if has_redis():
            (place := folder / "redis").mkdir()
            time_mget = stack.enter_context(_fill_redis(place, min(config.redis_rows, config.num_rows), config.dim))
        for _ in range(config.num_rounds):
            measure_both("_idle")
        stack.enter_context(updates())
        for number in range(config.num_rounds):
            on_stage(f"round {number + 1}: lookups while updates arrive")
            measure_both()
            if time_mget is not None:
                asked = [batches[at % _NUM_BATCHES] for at in range(max(config.num_lookups // 20, 4))]
                begin_cpu_s = time.thread_time()
                seconds = time_mget(asked)
                result.add("redis", len(asked), seconds, time.thread_time() - begin_cpu_s)


def _measure_switch(config: LookupConfig, replica: EmbeddingReplica, snapshot: Path, result: LookupResult) -> None:
    """Time each lookup before a switch to a snapshot and during it."""
    tensors = [torch.from_numpy(ids) for ids in _draw_batches(config.num_rows, seed=5)]

    def ask(times_ms: list[float]) -> None:
        begin_s = time.perf_counter()
        _look_up(replica, tensors[len(times_ms) % _NUM_BATCHES], result)
        times_ms.append((time.perf_counter() - begin_s) * 1e3)

    for _ in range(2 * config.num_lookups):
        ask(result.before_ms)
    with ThreadPoolExecutor(1, "switch") as pool:
        switch = pool.submit(replica.load_snapshot, snapshot, timeout_s=_TIMEOUT_S)
        while not switch.done() or not result.during_ms:
            ask(result.during_ms)
        switch.result()


def _look_up(replica: EmbeddingReplica, ids: torch.Tensor, result: LookupResult) -> None:
    try:
        replica.lookup("bench.weight", ids)
    except HeadraceError:
        result.num_failed += 1


def _draw_batches(num_rows: int, *, seed: int, num_batches: int = _NUM_BATCHES) -> list[_Ids]:
    """Return batches of Zipf ids, with repeats; hot rows are the same for all seeds."""
    rng = np.random.default_rng(seed)
    return [draw_ids(rng, "zipf", num_rows, _BATCH_ROWS) for _ in range(num_batches)]


@contextmanager
def _fill_redis(folder: Path, num_rows: int, dim: int) -> Iterator[Callable[[list[_Ids]], float]]:
    """Run a Redis with rows as strings of their bytes; yield a function that times pipelined MGETs, one a batch.

    Ids beyond Redis's rows wrap around. Keys are made before the clock starts, and values stay a list of bytes: the
    least that a client gets.
    """
    import redis

    with redis_server(folder) as port, redis.Redis("127.0.0.1", port) as client:
        width = 4 * dim
        values = np.random.default_rng(3).bytes(_FILL_ROWS * width)
        for first in range(0, num_rows, _FILL_ROWS):
            rows = range(min(_FILL_ROWS, num_rows - first))
            client.mset({b"%d" % (first + row): values[row * width : (row + 1) * width] for row in rows})

        def time_mget(batches: list[_Ids]) -> float:
            keys = [[b"%d" % row for row in (ids % num_rows).tolist()] for ids in batches]
            begin_s = time.perf_counter()
            for first in range(0, len(keys), _PIPELINED_BATCHES):
                pipeline = client.pipeline(transaction=False)
                for batch in keys[first : first + _PIPELINED_BATCHES]:
                    pipeline.mget(batch)
                pipeline.execute()
            return time.perf_counter() - begin_s

        yield time_mget


def measure_disk(folder: Path, num_rows: int, dim: int, *, num_batches: int) -> dict[str, float]:
    """Return `miss`, the rows a second of a table on disk that are not among its hot rows, a tenth of it.

    And `rocksdb`, of sorted multi-gets of the same rows from a RocksDB with the same options and memory. Both take
    turns, once they have compacted what they were filled with; half of the batches warm up.
    """
    spec = TableSpec(fqn="bench.weight", num_rows=num_rows, dim=dim, dtype=DType.FLOAT32)
    hot_bytes = num_rows * 4 * dim * _CACHED_PERCENT // 100
    stores = DiskStores.create(folder / "table", memory_bytes=hot_bytes, num_threads=1)
    disk = DiskTable(spec, stores, hot_bytes=hot_bytes)
    options = rocks_options(disk_store_config(hot_bytes), is_direct=supports_direct_io(folder))
    plain: Any = rocksdict.Rdict(str(folder / "plain"), options)

    def get_plain(ids: _Ids) -> None:
        rows = plain[encode_keys(1, spec.whole, ids)]
        np.frombuffer(b"".join(rows), np.float32).reshape(ids.size, dim)

    try:
        _fill(disk, plain, spec)
        (store,) = stores.stores
        store.flush()
        _wait_compacted(store.rocksdb_property)
        _wait_compacted(plain.property_value)
        is_seen = np.zeros(num_rows, np.bool_)
        spent_s = {"miss": 0.0, "rocksdb": 0.0}
        num_timed = 0
        for number, looked_up in enumerate(_draw_batches(num_rows, seed=4, num_batches=2 * num_batches)):
            # Rows that were never looked up are not hot, and neither side can have cached them.
            ids = np.unique(looked_up[~is_seen[looked_up]])
            is_seen[looked_up] = True
            is_warm, num_misses = number >= num_batches, disk.stats.misses
            sides: list[tuple[str, Callable[[_Ids], object]]] = [("rocksdb", get_plain), ("miss", disk.gather)]
            for side, get in reversed(sides) if number % 2 else sides:
                begin_s = time.perf_counter()
                get(ids)
                spent_s[side] += (time.perf_counter() - begin_s) * is_warm
            assert disk.stats.misses - num_misses == ids.size, "none of them was hot"
            num_timed += ids.size * is_warm
            disk.gather(looked_up)
        return {side: num_timed / seconds for side, seconds in spent_s.items()}
    finally:
        plain.close()
        disk.close()


def _wait_compacted(property_of: Callable[[str], str | None]) -> None:
    """Wait until a RocksDB has nothing to do in the background."""
    deadline_s = time.monotonic() + _COMPACTED_S
    while any(property_of(f"rocksdb.{name}") != "0" for name in ("num-running-compactions", "compaction-pending")):
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"RocksDB still compacts, {_COMPACTED_S:.0f} s after it was filled")
        time.sleep(_POLL_S)


def _fill(disk: DiskTable, plain: Any, spec: TableSpec) -> None:
    rng = np.random.default_rng(5)
    options: Any = rocksdict.WriteOptions()
    options.disable_wal = True
    for first in range(0, spec.num_rows, _FILL_ROWS):
        ids = np.arange(first, min(first + _FILL_ROWS, spec.num_rows), dtype=np.int64)
        weights = rng.standard_normal((ids.size, spec.dim), np.float32)
        ones = np.ones(ids.size, np.int64)
        disk.load(ids, weights, ones.astype(np.uint8), ones, ones, spec.whole)
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, row in zip(encode_keys(1, spec.whole, ids), weights, strict=True):
            batch[key] = row.tobytes()
        plain.write(batch, options)
    plain.flush()
