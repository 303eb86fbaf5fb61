"""`headrace bench lookup`: how fast a replica answers lookups while updates arrive, beside torch, Redis and RocksDB."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer

from headrace.paramserver.reading.shard_link import Dial
from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.snapshots.snapshot_client import create_snapshot
from headrace.schemas.errors import ConfigError, HeadraceError
from headrace.schemas.idl import idl
from headrace.scripts.benches.bench_child import BenchChild
from headrace.scripts.benches.bench_ingest import serve
from headrace.scripts.benches.bench_lookup_peers import RedisRows, measure_disk, redis_rows
from headrace.scripts.benches.bench_lookup_writer import BATCH_ROWS, TableConfig, ZipfIds
from headrace.scripts.benches.bench_peers import REDIS_HINT, has_redis
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
from headrace.scripts.one_torch_thread import one_torch_thread

__all__ = ["LookupConfig", "LookupResult", "lookup", "run"]

_OPEN_TIMEOUT_S = 600.0
_NUM_BATCHES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class LookupConfig:
    """How much is measured.

    Attributes:
        num_rows: Rows of the table; the process holds it three times during the switch: two copies and torch's.
        dim: Columns, float32.
        rows_per_s: Pace of the updates.
        redis_rows: Rows that Redis gets, at most.
        disk_rows: Rows of the table on disk, at most.
        num_lookups: Batches of 4096 in a block.
        num_rounds: Blocks of each contender, in turn.
        folder: Where files go; None for the system's temporary folder.
    """

    num_rows: int = 10_000_000
    dim: int = 64
    rows_per_s: int = 100_000
    redis_rows: int = 1_000_000
    disk_rows: int = 1_000_000
    num_lookups: int = 500
    num_rounds: int = 3
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.num_rows < BATCH_ROWS:
            raise ConfigError(f"--rows: {self.num_rows} is less than a batch, {BATCH_ROWS}")

    @property
    def num_stages(self) -> int:
        """How often `on_stage` is called."""
        return 5 + self.num_rounds

    def table(self, most_rows: int | None = None) -> TableConfig:
        """Return the table, or its beginning."""
        return TableConfig(num_rows=min(self.num_rows, most_rows or self.num_rows), dim=self.dim)


@dataclass(kw_only=True, slots=True)
class LookupResult:
    """What was measured.

    Attributes:
        rates: Rows a second of each block: `torch`, `headrace`, `headrace_idle`, `redis`.
        cpu_us: Processor time of this thread for a batch, of each block, microseconds.
        before_ms: Of each lookup before the switch.
        during_ms: Of each lookup while a snapshot was loaded and changed over to.
        num_failed: Lookups that raised.
        num_missing: Ids that were not there.
        disk: Rows a second; see `measure_disk`.
        rows_per_s: Updates that came.
        load: Load average at the end.
    """

    rates: dict[str, list[float]] = field(default_factory=dict)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    before_ms: list[float] = field(default_factory=list)
    during_ms: list[float] = field(default_factory=list)
    num_failed: int = 0
    num_missing: int = 0
    disk: dict[str, float] = field(default_factory=dict)
    rows_per_s: float = 0.0
    load: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def add(self, name: str, num_batches: int, seconds: float, cpu_s: float) -> None:
        """Note a block."""
        self.rates.setdefault(name, []).append(num_batches * BATCH_ROWS / seconds)
        self.cpu_us.setdefault(name, []).append(cpu_s / num_batches * 1e6)

    def ratio(self, peer: str) -> float | None:
        """Return the median rate of the replica over a peer's; None when that was not measured."""
        return median(self.rates["headrace"]) / median(self.rates[peer]) if peer in self.rates else None

    def to_json(self, config: LookupConfig) -> dict[str, Any]:
        """Return the figures, the ratios first."""
        before_ms, during_ms = _p99(self.before_ms), _p99(self.during_ms)
        return {
            "ratio_vs_torch": self.ratio("torch"),
            "ratio_vs_redis": self.ratio("redis"),
            "swap_p99_ratio": during_ms / before_ms,
            "failed_lookups": self.num_failed,
            "miss_ratio_vs_rocksdb": self.disk["miss"] / self.disk["rocksdb"],
            "ratio_cpu_vs_torch": median(self.cpu_us["torch"]) / median(self.cpu_us["headrace"]),
            "ratio_idle_vs_torch": median(self.rates["headrace_idle"]) / median(self.rates["torch_idle"]),
            "p99_before_ms": before_ms,
            "p99_swap_ms": during_ms,
            "worst_before_ms": max(self.before_ms),
            "worst_swap_ms": max(self.during_ms),
            "num_lookups_during_swap": len(self.during_ms),
            "missing_ids": self.num_missing,
            "updates_rows_per_s": self.rows_per_s,
            "median_rows_per_s": {name: median(values) for name, values in self.rates.items()} | self.disk,
            "median_cpu_us": {name: median(values) for name, values in self.cpu_us.items()},
            "load_average": list(self.load),
            "config": {name: value for name, value in asdict(config).items() if name != "folder"},
        }


def lookup(
    *,
    json_path: JsonOption = None,
    folder: FolderOption = None,
    rounds: RoundsOption = 3,
    rows: Annotated[int, typer.Option(help="Rows of the table in memory, of 64 float32 by default.")] = 10_000_000,
    dim: Annotated[int, typer.Option(min=1, max=4096, help="Columns of it, float32.")] = 64,
    rows_per_s: Annotated[int, typer.Option(min=1, help="Pace of the updates.")] = 100_000,
    redis_rows: Annotated[int, typer.Option(min=1, help="Rows that Redis gets, at most.")] = 1_000_000,
    disk_rows: Annotated[int, typer.Option(min=BATCH_ROWS, help="Rows of the table on disk, at most.")] = 1_000_000,
    lookups: Annotated[int, typer.Option(min=1, help="Batches of 4096 ids in a block.")] = 500,
) -> None:
    """Measure how fast a replica answers lookups while updates arrive, beside torch, Redis and RocksDB.

    A table in memory and Zipf ids in batches of 4096, which torch.nn.functional.embedding and pipelined MGETs get too;
    then the slowest percent while a snapshot is changed over to; then what a table on disk reads past its hot rows.

    Raises:
        ConfigError: A path cannot be written, a size is wrong, or there is not enough memory.
        UnavailableError: A process has ended or does not start.
    """
    check_json(json_path)
    config = LookupConfig(
        num_rows=rows,
        dim=dim,
        rows_per_s=rows_per_s,
        redis_rows=redis_rows,
        disk_rows=disk_rows,
        num_lookups=lookups,
        num_rounds=rounds,
        folder=check_folder(folder),
    )
    if not has_redis():
        say(REDIS_HINT)
    with show_progress("lookup", config.num_stages) as on_stage:
        result = run(config, on_stage=on_stage)
    conclude(result.to_json(config), json_path)


def run(config: LookupConfig, *, on_stage: OnStage) -> LookupResult:
    """Measure; processes and files are gone when this returns or raises.

    Args:
        config: How much.
        on_stage: Told in a few words what begins.

    Raises:
        ConfigError: There is not enough memory.
        UnavailableError: A process has ended or does not start.
    """
    result, table = LookupResult(), config.table()
    with one_torch_thread():
        with ExitStack() as stack:
            folder = stack.enter_context(bench_folder(config.folder))
            server = stack.enter_context(serve(folder / "data"))
            first = {"address": server.address, "table": asdict(table)}
            writer = stack.enter_context(BenchChild("headrace.scripts.benches.bench_lookup_writer", "writer", first))
            on_stage("filling the table")
            writer.ask({"fill": True})
            on_stage("loading a snapshot")
            snapshot = _snapshot(server.address, server.data_dir)
            replica = stack.enter_context(
                EmbeddingReplica(server.address, snapshot=snapshot, open_timeout_s=_OPEN_TIMEOUT_S)
            )
            _measure_memory(config, folder, replica, writer, result, on_stage)
            on_stage("switching to a snapshot")
            with _updates(writer, config, result):
                _measure_switch(config, replica, snapshot, result)
            result.num_missing = sum(replica.num_missing.values())
        with bench_folder(config.folder) as folder:
            on_stage("a table on disk")
            result.disk = measure_disk(folder, config.table(config.disk_rows), num_batches=_NUM_BATCHES)
    result.load = os.getloadavg()
    return result


def _measure_memory(
    config: LookupConfig,
    folder: Path,
    replica: EmbeddingReplica,
    writer: BenchChild,
    result: LookupResult,
    on_stage: OnStage,
) -> None:
    """Let torch, the replica and Redis take turns, first with no updates."""
    table = config.table()
    fqn = table.spec.fqn
    draw = ZipfIds(table.num_rows, seed=2)
    batches = [draw.draw(BATCH_ROWS) for _ in range(_NUM_BATCHES)]
    tensors = [torch.from_numpy(ids) for ids in batches]
    plain = torch.ones(table.num_rows, table.dim)

    def ask_torch(number: int) -> None:
        torch.nn.functional.embedding(tensors[number % _NUM_BATCHES], plain)

    def ask_replica(number: int) -> None:
        result.num_failed += not _answers(replica, fqn, tensors[number % _NUM_BATCHES])

    def block(suffix: str = "") -> None:
        for name, ask in (("torch", ask_torch), ("headrace", ask_replica)):
            begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
            for number in range(config.num_lookups):
                ask(number)
            seconds, cpu_s = time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s
            result.add(name + suffix, config.num_lookups, seconds, cpu_s)

    def ask_redis(rows: RedisRows) -> None:
        asked = [batches[number % _NUM_BATCHES] for number in range(max(config.num_lookups // 20, 4))]
        begin_cpu_s = time.thread_time()
        seconds = rows.time_mget(asked)
        result.add("redis", len(asked), seconds, time.thread_time() - begin_cpu_s)

    with ExitStack() as stack:
        on_stage("lookups without updates")
        redis = None
        if has_redis():
            (place := folder / "redis").mkdir()
            redis = stack.enter_context(redis_rows(place, config.table(config.redis_rows)))
        for _ in range(config.num_rounds):
            block("_idle")
        stack.enter_context(_updates(writer, config, result))
        for number in range(config.num_rounds):
            on_stage(f"round {number + 1}: lookups while updates arrive")
            block()
            if redis is not None:
                ask_redis(redis)


def _measure_switch(config: LookupConfig, replica: EmbeddingReplica, snapshot: Path, result: LookupResult) -> None:
    """Time each lookup before a switch and during it."""
    table = config.table()
    fqn = table.spec.fqn
    draw = ZipfIds(table.num_rows, seed=5)
    tensors = [torch.from_numpy(draw.draw(BATCH_ROWS)) for _ in range(_NUM_BATCHES)]

    def ask(number: int, times_ms: list[float]) -> None:
        begin_s = time.perf_counter()
        result.num_failed += not _answers(replica, fqn, tensors[number % _NUM_BATCHES])
        times_ms.append((time.perf_counter() - begin_s) * 1e3)

    for number in range(2 * config.num_lookups):
        ask(number, result.before_ms)
    with ThreadPoolExecutor(1, "switch") as pool:
        switch = pool.submit(replica.load_snapshot, snapshot, keep_previous=False, timeout_s=_OPEN_TIMEOUT_S)
        number = 0
        while not switch.done() or not number:
            ask(number, result.during_ms)
            number += 1
        switch.result()


def _answers(replica: EmbeddingReplica, fqn: str, ids: torch.Tensor) -> bool:
    try:
        replica.lookup(fqn, ids)
    except HeadraceError:
        return False  # counted
    return True


@contextmanager
def _updates(writer: BenchChild, config: LookupConfig, result: LookupResult) -> Iterator[None]:
    """Have rows written at the pace meanwhile."""
    writer.ask({"rows_per_s": config.rows_per_s})
    yield
    result.rows_per_s = writer.ask({"stop": True})["rows_per_s"]


def _snapshot(address: str, data_dir: Path) -> Path:
    dial = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=_OPEN_TIMEOUT_S, role=idl.Role.ADMIN)
    manifest = asyncio.run(create_snapshot(address, dial=dial, timeout_s=_OPEN_TIMEOUT_S))
    return data_dir / "snapshots" / manifest.name


def _p99(values: list[float]) -> float:
    return float(np.percentile(values, 99))
