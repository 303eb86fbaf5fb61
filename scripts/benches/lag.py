"""The sweep of lag: how late a replica shows a write, against the offered load, to beyond what the server can take.

The load is an open loop (`writer.py`): the lag of a batch counts from the moment at which it is due until its step is
visible in a replica in another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.scripts.benches.child import Child
from headrace.scripts.benches.freshness import Floor
from headrace.scripts.benches.harness import OnStage, bench_folder
from headrace.scripts.benches.ingest import serve
from headrace.scripts.benches.observer import delays_of, observed_replica
from headrace.scripts.benches.workload import RowsConfig
from headrace.scripts.benches.writer import WriteResult, WriterProcess

__all__ = ["LagConfig", "find_knee", "measure"]

_KNEE_FACTOR = 3.0
_FLOOR_INTERVAL_S = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class LagConfig:
    """How much the sweep measures."""

    loads: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.25)  # shares of the capacity
    block_s: float = 4.0  # duration of each load; longer until it has `min_batches`
    min_batches: int = 200  # of each load, enough for its percentiles
    capacity_batches: int = 2000  # written as fast as they are acked, to find the capacity
    num_rows: int = 1_000_000
    dim: int = 64
    num_lookups: int = 1000  # ids that a batch draws
    num_rounds: int = 2
    folder: Path | None = None

    @property
    def rows(self) -> RowsConfig:
        """The rows that are written again and again."""
        return RowsConfig(
            ids="uniform", num_batches=64, dim=self.dim, num_rows=self.num_rows, num_lookups=self.num_lookups
        )

    def num_batches(self, rows_per_s: float) -> int:
        """Return the batches of a load."""
        return max(self.min_batches, round(self.block_s * rows_per_s / self.num_lookups))


def find_knee(loads: Sequence[float], lags_ms: Sequence[float], *, factor: float = _KNEE_FACTOR) -> float | None:
    """Return the highest load up to which the lag stays within `factor` times the lowest lag; None if it always does.

    A small load may have more lag than a larger one, because idle processes have to wake up.
    """
    least_ms = min(lags_ms)
    for at in range(list(lags_ms).index(least_ms), len(loads)):
        if lags_ms[at] > factor * least_ms:
            return loads[at - 1]
    return None


def measure(config: LagConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure the capacity, then the lag at each load.

    Returns:
        `knee`; `capacity_rows_per_s` of each round; `x`, the loads; `offered_rows_per_s`, `seen_rows_per_s`, `p50_ms`,
        `p99_ms`, `acked_p50_ms` and `late_p50_ms`: for each load, of all rounds; and `floor_p50_ms`, `floor_p99_ms`.
    """
    names = ("offered_rows_per_s", "seen_rows_per_s", "p50_ms", "p99_ms", "acked_p50_ms", "late_p50_ms")
    points: dict[str, list[list[float]]] = {name: [[] for _ in config.loads] for name in names}
    capacities = []
    batch_bytes = config.num_lookups * config.rows.row_bytes
    with ExitStack() as stack:
        folder = stack.enter_context(bench_folder(config.folder))
        on_stage("floor: a round trip that syncs, and one that does not")
        with Floor(folder, batch_bytes) as floor:
            floor_ms = floor.measure(config.min_batches, interval_s=_FLOOR_INTERVAL_S)
        on_stage("starting server, writer and replica")
        server = stack.enter_context(serve(folder / "data"))
        writer = stack.enter_context(WriterProcess(config.rows))
        replica = stack.enter_context(observed_replica(server.address, consistency="latest"))
        pipe = _Pipe(server.address, writer, replica)
        pipe.push(config.min_batches)  # creates the table, opens connections, touches memory
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
    floor_p50_ms, floor_p99_ms = np.percentile(floor_ms, [50, 99]).tolist()
    return {
        "knee": find_knee(config.loads, [float(np.median(of_load)) for of_load in points["p50_ms"]]),
        "knee_factor": _KNEE_FACTOR,
        "capacity_rows_per_s": capacities,
        "x": list(config.loads),
        **points,
        "floor_p50_ms": floor_p50_ms,
        "floor_p99_ms": floor_p99_ms,
        "block_s": config.block_s,
        "batch_bytes": batch_bytes,
    }


@dataclass(frozen=True, slots=True)
class _Pipe:
    """From the writer through the server to the replica."""

    address: str
    writer: WriterProcess
    replica: Child

    def push(self, num_batches: int, rows_per_s: float | None = None) -> tuple[float, WriteResult, list[float]]:
        """Return the rows a second that became visible, what the writer saw, and the lag of each scheduled batch."""
        written = self.writer.write(self.address, num_batches=num_batches, rows_per_s=rows_per_s)
        seen = self.replica.ask(step=written.first_step + num_batches - 1)["seen"]
        lags_ms = delays_of(range(written.first_step, written.first_step + len(written.due_ns)), written.due_ns, seen)
        return written.num_rows / ((seen[-1][1] - written.begin_ns) / 1e9), written, lags_ms
