"""What the demo found: a small table on the terminal, `report.json`, and the plot `hit-rate.png`."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table

from headrace.scripts.ranking_demo.events import NUM_PARTS, NUM_RIVALS, TOP, Replay

__all__ = ["COPIES", "DemoReport", "HitLog", "make_plot", "make_table"]

COPIES = ("live", "streamed", "frozen")
# Points a part in the plot: enough to see the frozen copy decay, few enough to average out chance.
_POINTS_PER_PART = 5
# Okabe and Ito's colors, for any color vision. The trainer's curve is broad: a served model that keeps up lies inside.
_CURVES = {
    "live": ("trainer's own model", "#999999", 5.0),
    "streamed": ("served model", "#0072B2", 2.0),
    "frozen": ("frozen copy", "#D55E00", 2.0),
}


class HitLog:
    """Hits of each copy, batch by batch, and the rates that follow."""

    def __init__(self, replay: Replay) -> None:
        """Begin with no batch."""
        self._replay = replay
        self._hits: dict[str, list[int]] = {copy: [] for copy in COPIES}

    def add(self, **num_hits: int) -> None:
        """Append the hits of the next batch, by copy."""
        for copy in COPIES:
            self._hits[copy].append(num_hits[copy])

    def rate(self, copy: str, *, first_batch: int = 0) -> float:
        """Return the share of events from a batch on that a copy ranked as a hit; NaN before any."""
        hits = self._hits[copy]
        num_events = self._num_events(len(hits)) - self._num_events(first_batch)
        return sum(hits[first_batch:]) / num_events if num_events > 0 else float("nan")

    def rates(self, *, first_part: int = 1) -> dict[str, float]:
        """Return each copy's rate from a part on. In part 0 the frozen copy is untrained, and says nothing."""
        return {copy: self.rate(copy, first_batch=self._replay.part_starts[first_part]) for copy in COPIES}

    def curve(self, copy: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return float64[m] twice: the middle of each group of batches, in events, and its rate; five groups a part."""
        edges: set[int] = set()
        for first, end in itertools.pairwise([*self._replay.part_starts, self._replay.num_batches]):
            edges.update(np.linspace(first, end, min(_POINTS_PER_PART, end - first) + 1).astype(int).tolist())
        ends = np.array([self._num_events(edge) for edge in sorted(edges)])
        rates = np.add.reduceat(np.array(self._hits[copy]), sorted(edges)[:-1]) / np.diff(ends)
        return (ends[1:] + ends[:-1]) / 2, rates

    def _num_events(self, batch: int) -> int:
        """Return the events in the batches before one."""
        return min(batch * self._replay.batch_events, self._replay.log.users.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReport:
    """The demo's result, as `report.json` has it."""

    num_events: int  # trained on
    num_users: int
    num_items: int
    num_batches: int
    num_shards: int
    seed: int
    num_rows_compared: int  # between trainer and server, weights and optimizer state
    num_rows_different: int  # not equal bit for bit
    num_replica_rows_different: int  # served with other bits than the trainer's weights; the dense part is one more row
    num_answers_compared: int  # batches that the trainer recorded and the served model answered at the same step
    num_answers_different: int  # other than the trained model, in any bit
    num_rows_streamed: int  # acked, each as often as it was sent
    streaming_s: float  # from the first update to the last ack
    # From the update to durable on the server, and to visible in the replica: `p50_ms`, `p99_ms` and their `count`.
    ack_lag: dict[str, float]
    arrival_lag: dict[str, float]
    num_missing_rows: int  # not found by the reader in its replica
    hit_rate: dict[str, float]  # hit@10 by copy, without the first tenth of the log
    hit_rate_whole_log: dict[str, float]
    duration_s: float

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and the rows acked a second, as fast as this training made them."""
        return {**asdict(self), "rows_per_s": self.num_rows_streamed / self.streaming_s}


def make_table(report: DemoReport) -> Table:
    """Return the report as a table of a dozen lines."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")

    def verdict(num_different: int) -> str:
        return f"[bold {'red' if num_different else 'green'}]{num_different:,} different"

    def show(lag: dict[str, float]) -> str:
        return f"{lag['p50_ms']:.1f} ms / {lag['p99_ms']:.1f} ms"

    rates, num_rows = report.hit_rate, f"of {report.num_rows_compared:,}"
    table.add_row("trainer = server", verdict(report.num_rows_different), f"{num_rows}: weights and states")
    table.add_row("trainer = replica", verdict(report.num_replica_rows_different), f"{num_rows} and the dense part")
    of_batches = f"of {report.num_answers_compared:,} recorded batches"
    table.add_row("trained = served", verdict(report.num_answers_different), of_batches)
    table.add_row("rows streamed", f"{report.num_rows_streamed:,}", "acked when durable on disk")
    table.add_row("rows/s", f"{report.to_json()['rows_per_s']:,.0f}", "as this small model makes them")
    table.add_row("freshness_s", "0", "sends each step; default 1")
    table.add_row("lag p50 / p99", show(report.ack_lag), "update → durable on the server")
    table.add_row("lag p50 / p99", show(report.arrival_lag), "update → visible in the replica")
    table.add_section()
    table.add_row(f"hit@{TOP}, served model", f"{rates['streamed']:.1%}", "from the replica, batch by batch")
    table.add_row(f"hit@{TOP}, frozen copy", f"{rates['frozen']:.1%}", f"read at {NUM_PARTS - 1} moments of the log")
    table.add_row(f"hit@{TOP}, live model", f"{rates['live']:.1%}", "in the trainer, to compare")
    return table


def make_plot(hits: HitLog, report: DemoReport, replay: Replay) -> Any:
    """Return a matplotlib `Figure` of the hit rates over the log."""
    from matplotlib.figure import Figure  # takes a second; pyplot could interfere with a display or a program's figures

    rates = report.hit_rate
    figure = Figure(figsize=(10, 5), dpi=160, facecolor="white", layout="constrained")
    axes = figure.subplots()
    for part_start in replay.part_starts:
        axes.axvline(part_start * replay.batch_events / 1000, color="#E4E4E4", linewidth=0.8, zorder=0)
    for copy, (name, color, width) in _CURVES.items():
        events, rate = hits.curve(copy)
        axes.plot(events / 1000, rate * 100, color=color, linewidth=width, label=f"{name}: {rates[copy]:.1%}")
    figure.legend(loc="outside lower center", ncols=3, title="the frozen copy is made anew at each vertical line")
    axes.set(xlim=(0, replay.log.users.size / 1000), ylim=(0, 100), xlabel="events so far (thousands)")
    axes.set_ylabel(f"hit@{TOP} (% of events)")
    axes.grid(axis="y", color="#EEEEEE", linewidth=0.8)
    streamed = f"With the served model, {rates['streamed']:.0%} of events are hits"
    figure.suptitle(f"{streamed}; with a frozen copy, {rates['frozen']:.0%}", fontweight="bold")
    title = f"Hit: the event's item ranks in the top {TOP} among {NUM_RIVALS} random ones before it is trained on."
    axes.set_title(f"{title} Percentages leave out the first tenth.", fontsize=9.5, color="#555555")
    return figure
