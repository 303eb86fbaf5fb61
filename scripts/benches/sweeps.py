"""The sweeps of `headrace bench all`: throughput, lag, recovery time and cost, each against what it depends on.

All contenders of the sweep of throughput move the same bytes: Headrace, the disk alone, RocksDB alone, Redis, and two
servers that keep nothing, gRPC's and thriftpy2's own. The last one is what a service generated from the IDL would be
before it did anything.

The load of the sweep of lag is an open loop (`workload.py`): the lag of a batch counts from the moment at which it is
due until its step is visible in a replica in another process.

The sweep of cost measures processor time, which says more than the clock on a machine with shared processors: that of
the training thread, of the process that sends, and of all threads of a shard. The trainer's tables have no memory of
their own: one row of values stands for all. So the figures do not include the cache misses of a gather (`headrace bench
overhead` does), and a table may have more rows than fit into memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from headrace.scripts.benches.freshness import Floor
from headrace.scripts.benches.harness import OnStage, bench_folder, one_torch_thread
from headrace.scripts.benches.ingest import SHARD_STORE, RecoveryConfig, measure_recovery, serve
from headrace.scripts.benches.observer import delays_of, observed_replica
from headrace.scripts.benches.peers import fsync_rate, has_redis, redis_rate, rocksdb_rate
from headrace.scripts.benches.wire import contenders, wire_pair
from headrace.scripts.benches.wire_peers import WriteShape
from headrace.scripts.benches.workload import WIRE_ROW_BYTES, BenchRows, RowsConfig, WriteResult, WriterProcess

__all__ = ["CostConfig", "LagConfig", "SweepConfig", "ThroughputConfig", "find_knee", "fit_line"]
__all__ += ["measure_cost", "measure_lag", "measure_sizes", "measure_throughput", "measure_trainer"]
__all__ += ["process_cpu_s"]

_LOOKUPS = 4096
# Slower peers get fewer batches, which suffice for a rate.
_SHARE_OF_REDIS, _SHARE_OF_THRIFTPY2 = 6, 4
_KNEE_FACTOR = 3.0
_FLOOR_INTERVAL_S = 0.005
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NUM_DRAWS = 4


class _Series(dict[str, list[list[float]]]):
    """By what was measured, for each x of a sweep, the values of all rounds."""

    def add(self, x: Sequence[float], at: int, found: Mapping[str, float]) -> None:
        """Add what one round found at `x[at]`."""
        for name, value in found.items():
            self.setdefault(name, [[] for _ in x])[at].append(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputConfig:
    """How much the sweep of throughput measures."""

    dims: tuple[int, ...] = (16, 64, 128, 256, 512)  # columns of a row, float32
    shards: tuple[int, ...] = (1, 2, 4)  # with rows of `shard_dim` columns
    shard_dim: int = 128  # one of `dims`
    run_bytes: int = 256 << 20  # bytes on the wire of each run
    max_batches: int = 240  # of 4096 lookups, in a run
    num_rounds: int = 3
    folder: Path | None = None

    def rows(self, dim: int) -> RowsConfig:
        """Return the rows of a width."""
        row_bytes = RowsConfig(ids="uniform", num_batches=1, dim=dim).row_bytes
        num_batches = max(2, min(self.run_bytes // (_LOOKUPS * row_bytes), self.max_batches))
        return RowsConfig(ids="uniform", num_batches=num_batches, dim=dim)


def measure_throughput(config: ThroughputConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure all contenders at each width, and Headrace with each number of shards.

    Returns:
        `width` and `shards`, each with `x` and `rows_per_s`: by contender, for each x, the rates of all rounds.
    """
    width, shards = _Series(), _Series()
    for number in range(config.num_rounds):
        for at, dim in enumerate(config.dims):
            on_stage(f"round {number + 1}: rows of {dim} columns")
            rows = config.rows(dim)
            width.add(config.dims, at, _headrace_rates(rows, config.folder) | _peer_rates(rows, config.folder))
        for at, num_shards in enumerate(config.shards):
            on_stage(f"round {number + 1}: {num_shards} shards")
            rows = config.rows(config.shard_dim)
            shards.add(config.shards, at, _headrace_rates(rows, config.folder, num_shards=num_shards))
    return {
        "width": {"x": list(config.dims), "rows_per_s": width},
        "shards": {"x": list(config.shards), "rows_per_s": shards},
        "shard_dim": config.shard_dim,
        "row_bytes": [config.rows(dim).row_bytes for dim in config.dims],
    }


def _headrace_rates(config: RowsConfig, folder: Path | None, *, num_shards: int = 1) -> dict[str, float]:
    written, _ = _write(config, folder, num_shards=num_shards)
    return {"acked": written.num_rows / written.acked_s, "applied": written.num_rows / written.applied_s}


def _write(
    config: RowsConfig, folder: Path | None, *, num_shards: int = 1, num_clients: int = 1
) -> tuple[WriteResult, float]:
    """Write all rows to a new server; return what the writers saw, and the processor time of the shards."""
    with (
        bench_folder(folder) as place,
        WriterProcess(config, num_clients=num_clients) as writer,
        serve(place / "data", shards=num_shards) as server,
    ):
        before_s = sum(map(process_cpu_s, server.shard_pids))
        written = writer.write(server.address, num_batches=config.num_batches)
        used_s = sum(map(process_cpu_s, server.shard_pids)) - before_s
        server.kill()
    return written, used_s


def process_cpu_s(pid: int) -> float:
    """Return the processor time that all threads of a process have used, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _peer_rates(config: RowsConfig, folder: Path | None) -> dict[str, float]:
    rows, rates = BenchRows(config), {}
    with bench_folder(folder) as place:
        rates["fsync"] = fsync_rate(rows, place, num_batches=config.num_batches)
        rates["rocksdb"] = rocksdb_rate(rows, place, SHARD_STORE)
        if has_redis():
            rates["redis"] = redis_rate(rows, place, num_batches=max(1, config.num_batches // _SHARE_OF_REDIS))
    # These messages have as many bytes, but their rows have no optimizer state, so they have a few more rows.
    shape = WriteShape(_LOOKUPS * config.row_bytes // (8 + 4 * config.dim), config.dim)
    for name in contenders():
        if name not in ("grpc", "thriftpy2"):
            continue
        num_calls = max(4, config.num_batches // (_SHARE_OF_THRIFTPY2 if name == "thriftpy2" else 1)) // 4 * 4
        with wire_pair(name, shape) as pair:
            pair.write(4)  # connections, pools, caches
            seconds, _ = pair.write(num_calls)
        rates[name] = num_calls * shape.message_bytes / config.row_bytes / seconds
    return rates


@dataclass(frozen=True, kw_only=True, slots=True)
class LagConfig:
    """How much the sweep of lag measures."""

    loads: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.25)  # shares of the capacity
    block_s: float = 4.0  # duration of each load; longer until it has `min_batches`
    min_batches: int = 200  # of each load, enough for its percentiles
    capacity_batches: int = 2000  # written as fast as they are acked, to find the capacity
    num_rows: int = 1_000_000
    dim: int = 64
    num_lookups: int = 1000  # ids that a batch draws
    num_rounds: int = 2
    folder: Path | None = None

    def num_batches(self, rows_per_s: float) -> int:
        """Return the batches of a load."""
        return max(self.min_batches, round(self.block_s * rows_per_s / self.num_lookups))


def measure_lag(config: LagConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure the capacity, then the lag at each load.

    Returns:
        `knee`; `capacity_rows_per_s` of each round; `x`, the loads; `offered_rows_per_s`, `seen_rows_per_s`, `p50_ms`,
        `p99_ms`, `acked_p50_ms` and `late_p50_ms`: for each load, of all rounds; and `floor_p50_ms`, `floor_p99_ms`.
    """
    points, capacities = _Series(), []
    rows = RowsConfig(
        ids="uniform", num_batches=64, dim=config.dim, num_rows=config.num_rows, num_lookups=config.num_lookups
    )
    batch_bytes = config.num_lookups * rows.row_bytes
    with ExitStack() as stack:
        folder = stack.enter_context(bench_folder(config.folder))
        on_stage("floor: a round trip that syncs, and one that does not")
        with Floor(folder, batch_bytes) as floor:
            floor_ms = floor.measure(config.min_batches, interval_s=_FLOOR_INTERVAL_S)
        on_stage("starting server, writer and replica")
        server = stack.enter_context(serve(folder / "data"))
        writer = stack.enter_context(WriterProcess(rows))
        replica = stack.enter_context(observed_replica(server.address, consistency="latest"))

        def push(num_batches: int, rows_per_s: float | None = None) -> tuple[float, WriteResult, list[float]]:
            """Return the rows a second that became visible, what the writer saw, and each scheduled batch's lag."""
            written = writer.write(server.address, num_batches=num_batches, rows_per_s=rows_per_s)
            first = written.first_step
            seen = replica.ask(step=first + num_batches - 1)["seen"]
            lags_ms = delays_of(range(first, first + len(written.due_ns)), written.due_ns, seen)
            return written.num_rows / ((seen[-1][1] - written.begin_ns) / 1e9), written, lags_ms

        push(config.min_batches)  # creates the table, opens connections, touches memory
        for number in range(config.num_rounds):
            on_stage(f"round {number + 1}: capacity")
            capacities.append(push(config.capacity_batches)[0])
            for at, load in enumerate(config.loads):
                on_stage(f"round {number + 1}: {load:.0%} of it")
                rate = load * capacities[0]
                seen_rows_per_s, written, lags_ms = push(config.num_batches(rate), rate)
                p50_ms, p99_ms = np.percentile(lags_ms, [50, 99]).tolist()
                found = {
                    "offered_rows_per_s": rate,
                    "seen_rows_per_s": seen_rows_per_s,
                    "p50_ms": p50_ms,
                    "p99_ms": p99_ms,
                    "acked_p50_ms": median(written.ack_delays_ms),
                    "late_p50_ms": written.late_ms,
                }
                points.add(config.loads, at, found)
        server.kill()
    floor_p50_ms, floor_p99_ms = np.percentile(floor_ms, [50, 99]).tolist()
    return {
        "knee": find_knee(config.loads, [median(of_load) for of_load in points["p50_ms"]]),
        "knee_factor": _KNEE_FACTOR,
        "capacity_rows_per_s": capacities,
        "x": list(config.loads),
        **points,
        "floor_p50_ms": floor_p50_ms,
        "floor_p99_ms": floor_p99_ms,
        "block_s": config.block_s,
        "batch_bytes": batch_bytes,
    }


def find_knee(loads: Sequence[float], lags_ms: Sequence[float]) -> float | None:
    """Return the highest load up to which the lag stays within three times the lowest lag; None if it always does.

    A small load may have more lag than a larger one, because idle processes have to wake up.
    """
    least_ms = min(lags_ms)
    for at in range(list(lags_ms).index(least_ms), len(loads)):
        if lags_ms[at] > _KNEE_FACTOR * least_ms:
            return loads[at - 1]
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepConfig:
    """How much the sweep of recovery measures, for each of several sizes of the log (MiB, ascending)."""

    mebibytes: tuple[int, ...] = (64, 128, 256, 512, 1024)
    num_rounds: int = 2
    folder: Path | None = None


def measure_sizes(config: SweepConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure recovery for several sizes of the log.

    Returns:
        `x`, the bytes of the rows in the log; `recovery_s`, `sustained_s` and `rocksdb_s`: for each size, the seconds
        of all rounds to recover, to send, log and apply before, and to write the rows with RocksDB alone; and
        `seconds_per_byte` and `intercept_s` of the line through all recoveries.
    """
    sizes: list[int] = []
    seconds: dict[str, list[list[float]]] = {"recovery_s": [], "sustained_s": [], "rocksdb_s": []}
    for mebibytes in config.mebibytes:
        of_size = RecoveryConfig(mebibytes=mebibytes, num_rounds=config.num_rounds, folder=config.folder)
        figures = measure_recovery(of_size, on_stage)
        on_stage(f"{mebibytes} MiB: RocksDB alone")
        sizes.append(figures["log_bytes"])
        for name, rates in (("recovery_s", "recovered"), ("sustained_s", "sustained")):
            seconds[name].append([sizes[-1] / WIRE_ROW_BYTES / rate for rate in figures["rows_per_s"][rates]])
        with bench_folder(config.folder) as place:
            rows = BenchRows(of_size.rows)
            seconds["rocksdb_s"].append([rows.num_rows / rocksdb_rate(rows, place, SHARD_STORE)])
    points = [(size, value) for size, values in zip(sizes, seconds["recovery_s"], strict=True) for value in values]
    slope, intercept_s = fit_line(*zip(*points, strict=True))
    return {"seconds_per_byte": slope, "intercept_s": intercept_s, "x": sizes, **seconds}


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return (slope, intercept) of the least-squares line; for a single x, of the line from the origin."""
    if len(set(x)) < 2:
        return float(np.mean(y)) / x[0], 0.0
    slope, intercept = np.polyfit(x, y, 1)
    return float(slope), float(intercept)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostConfig:
    """How much the sweep of cost measures."""

    tables: tuple[int, ...] = (1, 10, 100, 1000)  # numbers of tables, of `table_rows` rows each
    rows: tuple[int, ...] = (10**5, 10**6, 10**7, 10**8)  # of one table
    connections: tuple[int, ...] = (1, 4, 16, 64)  # to one shard
    table_rows: int = 1_000_000
    dim: int = 64
    num_batches: int = 128  # of 4096 lookups, for a shard
    step_lookups: int = 65_536  # ids that a trainer's step looks up in all tables together
    num_steps: int = 8  # of the trainer
    num_rounds: int = 2
    folder: Path | None = None


def measure_cost(config: CostConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure trainer and shard for each number of tables, rows and connections.

    Returns:
        `tables`, `rows` and `connections`, each with `x` and `series`: by what was measured, for each x, the values of
        all rounds: `mark_us`, `flush_us`, `send_us` and `shard_us`, processor time of a row; `rows_per_s`;
        `bitmap_bytes`.
    """
    plain = RowsConfig(ids="uniform", num_batches=config.num_batches, dim=config.dim, num_rows=config.table_rows)
    results: dict[str, dict[str, Any]] = {
        name: {"x": list(getattr(config, name)), "series": _Series()} for name in ("tables", "rows", "connections")
    }
    for number in range(config.num_rounds):
        for name, result in results.items():
            for at, x in enumerate(result["x"]):
                on_stage(f"round {number + 1}: {x:,} {name}")
                if name == "connections":
                    found = _shard_cost(plain, config.folder, num_clients=x)
                else:
                    rows = replace(plain, **{"num_tables" if name == "tables" else "num_rows": x})
                    steps = replace(rows, num_lookups=config.step_lookups)
                    found = measure_trainer(steps, num_steps=config.num_steps) | _shard_cost(rows, config.folder)
                result["series"].add(result["x"], at, found)
    return results


def _shard_cost(rows: RowsConfig, folder: Path | None, *, num_clients: int = 1) -> dict[str, float]:
    written, used_s = _write(rows, folder, num_clients=num_clients)
    return {
        "send_us": written.cpu_s / written.num_rows * 1e6,
        "shard_us": used_s / written.num_rows * 1e6,
        "rows_per_s": written.num_rows / written.applied_s,
    }


def measure_trainer(rows: RowsConfig, *, num_steps: int) -> dict[str, float]:
    """Return the training thread's `mark_us` and `flush_us`, processor time of a row, and all tables' `bitmap_bytes`.

    A step looks up the ids of a batch in all tables together; the median of the steps after the first one counts.
    """
    import torch

    from headrace.streamer.config import StreamerConfig
    from headrace.streamer.flush.flusher import Flusher
    from headrace.streamer.flush.layout import Flush
    from headrace.streamer.flush.staging import StagingPool
    from headrace.streamer.taps.tapped_table import TappedTable

    weights = torch.ones(1, rows.dim).expand(rows.num_rows, rows.dim)
    states = {"momentum1": torch.ones(1, 1).expand(rows.num_rows, 1)}
    tables = [
        TappedTable(spec=spec, num_local_rows=rows.num_rows, weights=lambda: weights, states=lambda: states)
        for spec in rows.specs
    ]
    config = StreamerConfig.load(environ={}, freshness_s=0, max_cost_percent=100)
    pool = StagingPool(config.staging_bytes)
    num_flushed = 0

    def submit(flush: Flush) -> None:
        nonlocal num_flushed
        num_flushed += flush.num_rows
        assert flush.staging is not None
        pool.release(flush.staging)

    flusher = Flusher(config=config, num_shards=1, pool=pool, submit=submit, describe_delay=lambda: "nothing is late")
    flusher.add_tables(tables)
    rng = np.random.default_rng(0)
    draws = [
        np.array_split(rng.integers(0, rows.num_rows, rows.num_lookups), rows.num_tables) for _ in range(_NUM_DRAWS)
    ]
    steps = [[torch.from_numpy(ids) for ids in of_tables] for of_tables in draws]
    marks_us, flushes_us = [], []
    with one_torch_thread():
        for step in range(1 + num_steps):
            begin_s = time.thread_time()
            for table, ids in zip(tables, steps[step % _NUM_DRAWS], strict=True):
                table.dirty.mark(ids)
            marked_s, before = time.thread_time(), num_flushed
            flusher.flush_all(step, timeout_s=1.0)
            num_rows = num_flushed - before
            flushes_us.append((time.thread_time() - marked_s) / num_rows * 1e6)
            marks_us.append((marked_s - begin_s) / num_rows * 1e6)
    return {
        "mark_us": median(marks_us[1:]),
        "flush_us": median(flushes_us[1:]),
        "bitmap_bytes": float(sum(table.dirty.size_bytes for table in tables)),
    }
