"""`headrace bench lookup`: how fast a replica answers lookups while updates arrive, next to torch, Redis and RocksDB.

A second part reads a table on disk past its hot rows, next to RocksDB alone.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
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
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.snapshots.remote import create_snapshot
from headrace.paramserver.store.rocksdb import rocks_options
from headrace.paramserver.system.direct_file import supports_direct_io
from headrace.schemas.errors import ConfigError, HeadraceError, UnavailableError
from headrace.schemas.row_records import encode_keys
from headrace.schemas.tables import DType, TableSpec
from headrace.scripts.benches.child import AsyncWorker, Child
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
from headrace.scripts.benches.workload import hello_request, make_delta, make_request, zipf_ranks

__all__ = ["LookupConfig", "LookupResult", "ZipfIds", "lookup", "make_spec", "measure", "measure_disk"]

_TIMEOUT_S, _CALL_TIMEOUT_S = 600.0, 120.0
_NUM_BATCHES = 64
BATCH_ROWS = 4096
_FILL_ROWS = 16_384
_WINDOW = 4
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
    disk_rows: Annotated[int, typer.Option(min=BATCH_ROWS, help="Rows of the table on disk, at most.")] = 1_000_000
    num_lookups: Annotated[int, typer.Option("--lookups", min=1, help="Batches of 4096 ids in a block.")] = 500
    num_rounds: RoundsOption = 3
    folder: FolderOption = None

    def __post_init__(self) -> None:
        if self.num_rows < BATCH_ROWS:
            raise ConfigError(f"--rows: {self.num_rows} is less than a batch, {BATCH_ROWS}")


@dataclass(kw_only=True, slots=True)
class LookupResult:
    """What was measured."""

    rates: Rounds = field(default_factory=Rounds)  # rows a second: `torch`, `headrace`, `…_idle` of both, `redis`
    cpu_us: Rounds = field(default_factory=Rounds)  # of this thread for a batch, microseconds
    before_ms: list[float] = field(default_factory=list)  # of each lookup before the switch to a snapshot
    during_ms: list[float] = field(default_factory=list)  # of each lookup while it is loaded and switched to
    num_failed: int = 0  # lookups that raised
    num_missing: int = 0  # ids that were not found
    disk: dict[str, float] = field(default_factory=dict)  # rows a second; see `measure_disk`
    rows_per_s: float = 0.0  # updates that arrived

    def add(self, name: str, num_batches: int, seconds: float, cpu_s: float) -> None:
        """Add a block."""
        self.rates.add(name, num_batches * BATCH_ROWS / seconds)
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
    table: dict[str, Any] = {"num_rows": config.num_rows, "dim": config.dim}
    with one_torch_thread():
        with bench_folder(config.folder) as folder, serve(folder / "data") as server, ExitStack() as stack:
            worker = Child(f"{__name__}:_write", "the bench's writer", address=server.address, **table)
            writer = stack.enter_context(worker)
            on_stage("filling the table")
            writer.ask(fill=True)
            on_stage("loading a snapshot")
            manifest = asyncio.run(create_snapshot(server.address, dial=dial, timeout_s=_TIMEOUT_S))
            snapshot = server.data_dir / "snapshots" / manifest.name
            replica = EmbeddingReplica(server.address, snapshot=snapshot, open_timeout_s=_TIMEOUT_S)
            stack.enter_context(replica)
            _measure_memory(config, folder, replica, writer, result, on_stage)
            on_stage("switching to a snapshot")
            with _updates(writer, config, result):
                _measure_switch(config, replica, snapshot, result)
            result.num_missing = sum(replica.num_missing.values())
        with bench_folder(config.folder) as folder:
            on_stage("a table on disk")
            spec = make_spec(min(config.disk_rows, config.num_rows), config.dim)
            result.disk = measure_disk(folder, spec, num_batches=_NUM_BATCHES)
    return result.figures(config)


lookup = bench_command("lookup", LookupConfig, measure, hints=lambda: [] if has_redis() else [REDIS_HINT])


def _measure_memory(
    config: LookupConfig,
    folder: Path,
    replica: EmbeddingReplica,
    writer: Child,
    result: LookupResult,
    on_stage: OnStage,
) -> None:
    """Let torch, the replica and Redis take turns, first without updates."""
    draw = ZipfIds(config.num_rows, seed=2)
    batches = [draw.draw(BATCH_ROWS) for _ in range(_NUM_BATCHES)]
    tensors = [torch.from_numpy(ids) for ids in batches]
    plain = torch.ones(config.num_rows, config.dim)

    def ask_torch(number: int) -> None:
        torch.nn.functional.embedding(tensors[number % _NUM_BATCHES], plain)

    def ask_replica(number: int) -> None:
        _look_up(replica, tensors[number % _NUM_BATCHES], result)

    def measure_block(name: str, ask: Callable[[int], None]) -> None:
        begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
        for number in range(config.num_lookups):
            ask(number)
        seconds, cpu_s = time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s
        result.add(name, config.num_lookups, seconds, cpu_s)

    with ExitStack() as stack:
        on_stage("lookups without updates")
        time_mget = None
        if has_redis():
            (place := folder / "redis").mkdir()
            time_mget = stack.enter_context(_fill_redis(place, min(config.redis_rows, config.num_rows), config.dim))
        for _ in range(config.num_rounds):
            measure_block("torch_idle", ask_torch)
            measure_block("headrace_idle", ask_replica)
        stack.enter_context(_updates(writer, config, result))
        for number in range(config.num_rounds):
            on_stage(f"round {number + 1}: lookups while updates arrive")
            measure_block("torch", ask_torch)
            measure_block("headrace", ask_replica)
            if time_mget is not None:
                asked = [batches[at % _NUM_BATCHES] for at in range(max(config.num_lookups // 20, 4))]
                begin_cpu_s = time.thread_time()
                seconds = time_mget(asked)
                result.add("redis", len(asked), seconds, time.thread_time() - begin_cpu_s)


def _measure_switch(config: LookupConfig, replica: EmbeddingReplica, snapshot: Path, result: LookupResult) -> None:
    """Time each lookup before a switch to a snapshot and during it."""
    draw = ZipfIds(config.num_rows, seed=5)
    tensors = [torch.from_numpy(draw.draw(BATCH_ROWS)) for _ in range(_NUM_BATCHES)]

    def ask(number: int, times_ms: list[float]) -> None:
        begin_s = time.perf_counter()
        _look_up(replica, tensors[number % _NUM_BATCHES], result)
        times_ms.append((time.perf_counter() - begin_s) * 1e3)

    for number in range(2 * config.num_lookups):
        ask(number, result.before_ms)
    with ThreadPoolExecutor(1, "switch") as pool:
        switch = pool.submit(replica.load_snapshot, snapshot, keep_previous=False, timeout_s=_TIMEOUT_S)
        number = 0
        while not switch.done() or not number:
            ask(number, result.during_ms)
            number += 1
        switch.result()


def _look_up(replica: EmbeddingReplica, ids: torch.Tensor, result: LookupResult) -> None:
    try:
        replica.lookup("bench.weight", ids)
    except HeadraceError:
        result.num_failed += 1


@contextmanager
def _updates(writer: Child, config: LookupConfig, result: LookupResult) -> Iterator[None]:
    """Have rows written at the pace meanwhile."""
    writer.ask(rows_per_s=config.rows_per_s)
    yield
    result.rows_per_s = writer.ask(stop=True)["rows_per_s"]


async def _write(address: str, num_rows: int, dim: int) -> AsyncWorker:
    """Write every row once when asked to `fill`; then Zipf rows at `rows_per_s`, until the next order."""
    host, port = parse_address(address)
    async with await ParamServerClient.connect(host, port) as client:
        writer = _Writer(client, num_rows, dim)
        await client.hello(hello_request([writer.spec]))
        ids = ZipfIds(num_rows, seed=1)
        answer: dict[str, Any] = {}
        while True:
            order = yield answer
            if "fill" in order:
                await writer.fill()
                answer = {}
            else:
                stop = asyncio.Event()
                pacing = asyncio.create_task(writer.pace(order["rows_per_s"], ids, stop))
                yield {}
                stop.set()
                answer = {"rows_per_s": await pacing}


def make_spec(num_rows: int, dim: int) -> TableSpec:
    """Return the bench's table, without optimizer states."""
    return TableSpec(fqn="bench.weight", num_rows=num_rows, dim=dim, dtype=DType.FLOAT32)


class ZipfIds:
    """Zipf-distributed row ids; hot rows lie anywhere in the table, at the same places for all seeds."""

    def __init__(self, num_rows: int, seed: int) -> None:
        """Prepare."""
        self._rng = np.random.default_rng(seed)
        self._rows = np.random.default_rng(0).permutation(num_rows)

    def draw(self, number: int) -> _Ids:
        """Return int64[number], with repeats."""
        ids: _Ids = self._rows[zipf_ranks(self._rng, self._rows.size, number)]
        return ids


class _Writer:
    def __init__(self, client: ParamServerClient, num_rows: int, dim: int) -> None:
        self._client = client
        self.spec = make_spec(num_rows, dim)
        self._values = np.random.default_rng(1).standard_normal((2 * _FILL_ROWS, dim), np.float32)
        self._seq = 0
        self._slots = asyncio.Semaphore(_WINDOW)

    async def fill(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for first in range(0, self.spec.num_rows, _FILL_ROWS):
                ids = np.arange(first, min(first + _FILL_ROWS, self.spec.num_rows), dtype=np.int64)
                await self._slots.acquire()
                tasks.create_task(self._send(self._request(ids)))

    async def pace(self, rows_per_s: float, ids: ZipfIds, stop: asyncio.Event) -> float:
        """Write batches of rows at a rate and return the rate reached; late batches are not made up for."""
        batches = [np.unique(ids.draw(BATCH_ROWS)) for _ in range(_NUM_BATCHES)]
        num_rows, begin_s = 0, time.perf_counter()
        next_s = begin_s
        async with asyncio.TaskGroup() as tasks:
            while not stop.is_set():
                batch = batches[self._seq % len(batches)]
                await self._slots.acquire()
                tasks.create_task(self._send(self._request(batch)))
                num_rows += batch.size
                next_s = max(next_s + batch.size / rows_per_s, time.perf_counter())
                await asyncio.sleep(max(next_s - time.perf_counter(), 0.0))
        return num_rows / (time.perf_counter() - begin_s)

    async def _send(self, request: Any) -> None:
        try:
            await self._client.set_embeddings(request, timeout_s=_CALL_TIMEOUT_S)
        finally:
            self._slots.release()

    def _request(self, ids: _Ids) -> Any:
        first = self._seq * 977 % (self._values.shape[0] - ids.size)
        self._seq += 1
        weights = self._values[first : first + ids.size].reshape(-1).view(np.uint8).data
        return make_request([make_delta(self.spec, ids, weights)], client_seq=self._seq, time_us=time.time_ns() // 1000)


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


def measure_disk(folder: Path, spec: TableSpec, *, num_batches: int) -> dict[str, float]:
    """Return `miss`, the rows a second of a table on disk that are not among its hot rows, a tenth of it.

    And `rocksdb`, of sorted multi-gets of the same rows from a RocksDB with the same options and memory. Both take
    turns, once they have compacted what they were filled with; half of the batches warm up.
    """
    hot_bytes = spec.num_rows * 4 * spec.dim * _CACHED_PERCENT // 100
    stores = DiskStores.create(folder / "table", memory_bytes=hot_bytes, num_threads=1)
    disk = DiskTable(spec, stores, hot_bytes=hot_bytes)
    options = rocks_options(disk_store_config(hot_bytes), is_direct=supports_direct_io(folder))
    plain = rocksdict.Rdict(str(folder / "plain"), options)
    try:
        _fill(disk, plain, spec)
        (store,) = stores.stores
        store.flush()
        _wait_compacted(store.rocksdb_property)
        _wait_compacted(plain.property_value)
        draw, is_seen = ZipfIds(spec.num_rows, seed=4), np.zeros(spec.num_rows, np.bool_)
        spent = {"miss": 0.0, "rocksdb": 0.0}
        num_rows = 0
        for number in range(2 * num_batches):
            looked_up = draw.draw(BATCH_ROWS)
            # Rows that were never looked up are not hot, and neither side can have cached them.
            ids = np.unique(looked_up[~is_seen[looked_up]])
            is_seen[looked_up] = True
            is_warm = number >= num_batches
            sides = ("miss", "rocksdb") if number % 2 else ("rocksdb", "miss")
            for side in sides:
                took_s = _time_miss(disk, ids) if side == "miss" else _time_rocksdb(plain, spec, ids)
                spent[side] += took_s * is_warm
            num_rows += ids.size * is_warm
            disk.gather(looked_up)
        return {side: num_rows / seconds for side, seconds in spent.items()}
    finally:
        plain.close()
        disk.close()


def _time_miss(disk: DiskTable, ids: _Ids) -> float:
    before = disk.stats.misses
    begin_s = time.perf_counter()
    disk.gather(ids)
    took_s = time.perf_counter() - begin_s
    assert disk.stats.misses - before == ids.size, "none of them was hot"
    return took_s


def _time_rocksdb(plain: Any, spec: TableSpec, ids: _Ids) -> float:
    begin_s = time.perf_counter()
    rows = plain[encode_keys(1, spec.whole, ids)]
    np.frombuffer(b"".join(rows), np.float32).reshape(ids.size, spec.dim)
    return time.perf_counter() - begin_s


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
