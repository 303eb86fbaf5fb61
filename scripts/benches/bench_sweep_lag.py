"""The sweep of lag: how late a replica shows a write, against the offered load, to beyond what the server can do.

The load is an open loop (`bench_writer.py`): every batch has its moment, and its lag counts from there to its step
being visible in a replica in another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.scripts.benches.bench_child import BenchChild
from headrace.scripts.benches.bench_freshness import delays_of, observed_replica
from headrace.scripts.benches.bench_freshness_floor import Floor
from headrace.scripts.benches.bench_ingest import serve
from headrace.scripts.benches.bench_report import OnStage, bench_folder
from headrace.scripts.benches.bench_rows import RowsConfig
from headrace.scripts.benches.bench_writer import WriteResult, WriterProcess

__all__ = ["LagConfig", "find_knee", "run"]

_KNEE_FACTOR = 3.0
_FLOOR_INTERVAL_S = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class LagConfig:
    """How much is measured.

    Attributes:
        loads: Offered rows as shares of the capacity, ascending.
        block_s: Each load lasts so long, or longer until it has `min_batches`, seconds.
        min_batches: Batches of each load, at least: the percentiles come of them.
        capacity_batches: Batches, as fast as they are acked, that find out the capacity.
        num_rows: Rows of the table.
        dim: Columns of it, float32.
        num_lookups: Ids that a batch draws.
        num_rounds: All loads are measured so often, in turn.
        folder: Where files go; None for the system's temporary folder.
    """

    loads: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.25)
    block_s: float = 4.0
    min_batches: int = 200
    capacity_batches: int = 2000
    num_rows: int = 1_000_000
    dim: int = 64
    num_lookups: int = 1000
    num_rounds: int = 2
    folder: Path | None = None

    @property
    def num_stages(self) -> int:
        """How often `on_stage` is called."""
        return 2 + self.num_rounds * (1 + len(self.loads))

    @property
    def rows(self) -> RowsConfig:
        """What is written, again and again."""
        return RowsConfig(
            ids="uniform", num_batches=64, dim=self.dim, num_rows=self.num_rows, num_lookups=self.num_lookups
        )

    def num_batches(self, rows_per_s: float) -> int:
        """Return the batches of a load."""
        return max(self.min_batches, round(self.block_s * rows_per_s / self.num_lookups))


def find_knee(loads: Sequence[float], lags_ms: Sequence[float], *, factor: float = _KNEE_FACTOR) -> float | None:
    """Return the highest load up to which the lag stays within `factor` times the lowest lag.

    Args:
        loads: Ascending.
        lags_ms: Of each. That of a small load may be above that of a larger one: what waits has to wake up.
        factor: Above 1.

    Returns:
        The load; None when it is the highest of all, so that the knee lies beyond what was offered.
    """
    least_ms = min(lags_ms)
    for at in range(list(lags_ms).index(least_ms), len(loads)):
        if lags_ms[at] > factor * least_ms:
            return loads[at - 1]
    return None


def run(config: LagConfig, *, on_stage: OnStage) -> dict[str, Any]:
    """Measure; processes and files are gone when this returns or raises.

    Args:
        config: How much.
        on_stage: Told in a few words what begins.

    Returns:
        `knee`; `capacity_rows_per_s` of each round; `x`, the loads; `offered_rows_per_s`, `seen_rows_per_s`, `p50_ms`,
        `p99_ms`, `acked_p50_ms` and `late_p50_ms`: for each load, of all rounds; and `floor_p50_ms`, `floor_p99_ms`.

    Raises:
        UnavailableError: A process has ended or does not start.
    """
    names = ("offered_rows_per_s", "seen_rows_per_s", "p50_ms", "p99_ms", "acked_p50_ms", "late_p50_ms")
    points: dict[str, list[list[float]]] = {name: [[] for _ in config.loads] for name in names}
    capacities = []
    with ExitStack() as stack:
        folder = stack.enter_context(bench_folder(config.folder))
        on_stage("floor: a round trip that syncs, and one that does not")
        floor_ms = _measure_floor(config, folder)
        on_stage("starting server, writer and replica")
        server = stack.enter_context(serve(folder / "data"))
        writer = stack.enter_context(WriterProcess(config.rows))
        replica = stack.enter_context(observed_replica(server.address, consistency="latest"))
        pipe = _Pipe(server.address, writer, replica)
        pipe.push(config.min_batches)  # what is done once: the table, connections, memory
        for number in range(config.num_rounds):
            on_stage(f"round {number + 1}: capacity")
            capacities.append(pipe.push(config.capacity_batches)[0])
            for at, load in enumerate(config.loads):
                on_stage(f"round {number + 1}: {load:.0%} of it")
                rate = load * capacities[0]
                seen, written, lags_ms = pipe.push(config.num_batches(rate), rate)
                p50_ms, p99_ms = np.percentile(lags_ms, [50, 99])
                values = (rate, seen, p50_ms, p99_ms, np.median(written.ack_delays_ms), written.late_ms)
                for name, value in zip(names, values, strict=True):
                    points[name][at].append(float(value))
        server.kill()
    p50s_ms = [float(np.median(of_load)) for of_load in points["p50_ms"]]
    return {
        "knee": find_knee(config.loads, p50s_ms),
        "knee_factor": _KNEE_FACTOR,
        "capacity_rows_per_s": capacities,
        "x": list(config.loads),
        **points,
        "floor_p50_ms": float(np.percentile(floor_ms, 50)),
        "floor_p99_ms": float(np.percentile(floor_ms, 99)),
        "block_s": config.block_s,
        "batch_bytes": config.num_lookups * config.rows.row_bytes,
    }


@dataclass(frozen=True, slots=True)
class _Pipe:
    """From the writer through the server to the replica."""

    address: str
    writer: WriterProcess
    replica: BenchChild

    def push(self, num_batches: int, rows_per_s: float | None = None) -> tuple[float, WriteResult, list[float]]:
        """Return the rows a second that became visible, what the writer saw, and the lag of each scheduled batch."""
        written = self.writer.write(self.address, num_batches=num_batches, rows_per_s=rows_per_s)
        seen = self.replica.ask({"step": written.first_step + num_batches - 1})["seen"]
        lags_ms = delays_of(written.first_step, written.due_ns, seen) if written.due_ns else []
        return written.num_rows / ((seen[-1][1] - written.begin_ns) / 1e9), written, lags_ms


def _measure_floor(config: LagConfig, folder: Path) -> list[float]:
    with Floor(folder, config.num_lookups * config.rows.row_bytes) as floor:
        found_s = floor.measure(config.min_batches, interval_s=_FLOOR_INTERVAL_S)
    return [seconds * 1000 for seconds in found_s]
