"""What the demo found: a small table on the terminal, `report.json`, and the plot `hit-rate.png`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table
from rich.text import Text

from headrace.scripts.demo_ranking import NUM_PARTS, NUM_RIVALS, TOP, Replay

__all__ = [
    "COPIES",
    "PLOT_NAME",
    "REPORT_NAME",
    "DemoReport",
    "HitLog",
    "Lag",
    "make_plot",
    "make_table",
    "write_report",
]

COPIES = ("live", "streamed", "frozen")
PLOT_NAME = "hit-rate.png"
REPORT_NAME = "report.json"

_Floats = npt.NDArray[np.float64]

# Points a part in the plot: enough to see the frozen copy decay, few enough that chance does not hide it.
_POINTS_PER_PART = 5
# Colours that readers with any colour vision tell apart (Okabe and Ito, "Color Universal Design", 2008).
_BLUE, _VERMILION, _GREY, _INK = "#0072B2", "#D55E00", "#B5B5B5", "#222222"
# Height of a curve's label of two lines, in percent of the vertical axis.
_LABEL_GAP = 11.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Lag:
    """How late something was, after the optimizer's update.

    Attributes:
        p50_ms: Median, milliseconds.
        p99_ms: 99th percentile, milliseconds.
        count: Measurements.
    """

    p50_ms: float
    p99_ms: float
    count: int

    @classmethod
    def of(cls, lags_s: Sequence[float]) -> Lag:
        """Return the percentiles of lags given in seconds; NaN when there are none."""
        if not lags_s:
            return cls(p50_ms=float("nan"), p99_ms=float("nan"), count=0)
        p50_s, p99_s = np.percentile(lags_s, [50, 99])
        return cls(p50_ms=float(p50_s) * 1000, p99_ms=float(p99_s) * 1000, count=len(lags_s))

    def __str__(self) -> str:
        return f"{self.p50_ms:.1f} ms / {self.p99_ms:.1f} ms"


class HitLog:
    """Hits of each copy, batch by batch, and the rates that follow."""

    def __init__(self, replay: Replay) -> None:
        """Begin with no batch."""
        self._replay = replay
        self._hits: dict[str, list[int]] = {copy: [] for copy in COPIES}

    def add(self, **num_hits: int) -> None:
        """Append the hits of the next batch, by copy."""
        assert set(num_hits) == set(COPIES)
        for copy, count in num_hits.items():
            self._hits[copy].append(count)

    def rate(self, copy: str, *, first_batch: int = 0) -> float:
        """Return the share of events that a copy ranked as a hit, 0 to 1; NaN before any.

        Args:
            copy: One of COPIES.
            first_batch: Leave out the batches before this one.
        """
        hits = self._hits[copy]
        num_events = self._ends(len(hits)) - self._ends(first_batch)
        return sum(hits[first_batch:]) / num_events if num_events > 0 else float("nan")

    def rates(self, *, first_part: int = 1) -> dict[str, float]:
        """Return each copy's rate from a part on.

        Args:
            first_part: 0 to NUM_PARTS - 1. During part 0 the frozen copy is the untrained one, and says nothing.
        """
        return {copy: self.rate(copy, first_batch=self._replay.part_starts[first_part]) for copy in COPIES}

    def curve(self, copy: str) -> tuple[_Floats, _Floats]:
        """Return (events, rate): rates over consecutive groups of batches, none across the start of a part.

        Returns:
            events: float64[m], the middle of each group, in events from the log's start.
            rate: float64[m], 0 to 1.
        """
        hits = np.array(self._hits[copy])
        edges = self._group_edges()
        ends = np.array([self._ends(edge) for edge in edges])
        rates = np.add.reduceat(hits, edges[:-1]) / np.diff(ends)
        return (ends[1:] + ends[:-1]) / 2, rates

    def _group_edges(self) -> list[int]:
        """Return the first batch of each group, and the number of batches."""
        starts = [*self._replay.part_starts, self._replay.num_batches]
        edges: set[int] = set()
        for first, end in itertools.pairwise(starts):
            edges.update(np.linspace(first, end, min(_POINTS_PER_PART, end - first) + 1).astype(int).tolist())
        return sorted(edges)

    def _ends(self, batch: int) -> int:
        """Events in the batches before this one."""
        return min(batch * self._replay.batch_events, self._replay.log.num_events)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReport:
    """The demo's result, as `report.json` has it.

    Attributes:
        num_events: Events trained on.
        num_users: Rows of the user table.
        num_items: Rows of the item table.
        num_batches: Batches, each scored and then trained on.
        num_shards: Shards of the server.
        seed: Seed of the run.
        num_rows_compared: Rows of trainer and server that were compared, weights and optimizer state.
        num_rows_different: Rows that are not equal bit for bit.
        num_replica_rows_different: Rows that the replica serves with other bits than the trainer's weights.
        num_rows_streamed: Rows that were acked, each as often as it was sent.
        streaming_s: From the first update to the last ack, seconds.
        ack_lag: From the update to durable on the server.
        arrival_lag: From the update to visible in the replica, in another process.
        num_missing_rows: Rows that the reader did not find in its replica.
        hit_rate: hit@10 by copy, without the first tenth of the log.
        hit_rate_whole_log: hit@10 by copy, with it.
        duration_s: The whole demo, seconds.
    """

    num_events: int
    num_users: int
    num_items: int
    num_batches: int
    num_shards: int
    seed: int
    num_rows_compared: int
    num_rows_different: int
    num_replica_rows_different: int
    num_rows_streamed: int
    streaming_s: float
    ack_lag: Lag
    arrival_lag: Lag
    num_missing_rows: int
    hit_rate: dict[str, float]
    hit_rate_whole_log: dict[str, float]
    duration_s: float

    @property
    def rows_per_s(self) -> float:
        """Rows acked a second, as fast as this training made them."""
        return self.num_rows_streamed / self.streaming_s


def make_table(report: DemoReport) -> Table:
    """Return the report as a table of a dozen lines."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    rates, num_rows = report.hit_rate, f"of {report.num_rows_compared:,}"
    table.add_row("trainer = server", _verdict(report.num_rows_different), f"{num_rows}: weights and states")
    table.add_row("trainer = replica", _verdict(report.num_replica_rows_different), f"{num_rows}: weights, as served")
    table.add_row("rows streamed", f"{report.num_rows_streamed:,}", "acked when durable on disk")
    table.add_row("rows/s", f"{report.rows_per_s:,.0f}", "as this small model makes them")
    table.add_row("lag p50 / p99", str(report.ack_lag), "update → durable on the server")
    table.add_row("lag p50 / p99", str(report.arrival_lag), "update → visible in the replica")
    table.add_section()
    table.add_row(f"hit@{TOP}, streamed copy", f"{rates['streamed']:.1%}", "from the replica, batch by batch")
    table.add_row(f"hit@{TOP}, frozen copy", f"{rates['frozen']:.1%}", f"read at {NUM_PARTS - 1} moments of the log")
    table.add_row(f"hit@{TOP}, live tables", f"{rates['live']:.1%}", "in the trainer, to compare")
    return table


def _verdict(num_different: int) -> Text:
    return Text(f"{num_different:,} different", style="bold red" if num_different else "bold green")


def write_report(report: DemoReport, path: Path) -> None:
    """Write the report as JSON."""
    content = {**asdict(report), "rows_per_s": report.rows_per_s}
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def make_plot(hits: HitLog, report: DemoReport, replay: Replay) -> Any:
    """Return a matplotlib `Figure` of the hit rates over the log."""
    # Here, not at the top: it takes a second, and only the end of the demo needs it. Without pyplot, so that neither a
    # display nor a program's own figures have a part in it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.07, 0.125, 0.745, 0.69))
    _draw_titles(figure, report)
    _draw_axes(axes, replay)
    # The trainer's own curve broad and below: where the streamed one keeps up, it lies inside.
    styles: dict[str, dict[str, Any]] = {
        "live": {"color": _GREY, "linewidth": 5.0, "solid_capstyle": "round"},
        "streamed": {"color": _BLUE, "linewidth": 2.0},
        "frozen": {"color": _VERMILION, "linewidth": 2.0},
    }
    for copy, style in styles.items():
        events, rate = hits.curve(copy)
        axes.plot(events / 1000, rate * 100, **style)
    _label_curves(axes, hits, report)
    return figure


def _draw_titles(figure: Any, report: DemoReport) -> None:
    rates = report.hit_rate
    title = (
        f"Read from the streamed copy, {rates['streamed']:.0%} of events are hits; "
        f"from a frozen one, {rates['frozen']:.0%}"
    )
    subtitle = (
        f"Hit: the event's item ranks in the top {TOP} among {NUM_RIVALS} random ones before it is trained on. "
        "Percentages leave out the first tenth."
    )
    figure.text(0.022, 0.935, title, fontsize=12.5, fontweight="bold", color=_INK)
    figure.text(0.022, 0.885, subtitle, fontsize=9.5, color="#555555")


def _draw_axes(axes: Any, replay: Replay) -> None:
    for part_start in replay.part_starts:
        axes.axvline(part_start * replay.batch_events / 1000, color="#E4E4E4", linewidth=0.8, zorder=0)
    axes.set_xlim(0, replay.log.num_events / 1000)
    axes.set_ylim(0, 100)
    axes.set_xlabel("events so far (thousands)", color=_INK)
    second_part = replay.part_starts[1] * replay.batch_events / 1000
    note = {"xytext": (4, 0), "textcoords": "offset points", "color": _VERMILION, "fontsize": 8.5, "va": "center"}
    axes.annotate("the frozen copy is taken anew at each line", (second_part, 96), **note)
    axes.set_ylabel(f"hit@{TOP} (% of events)", color=_INK)
    axes.grid(axis="y", color="#EEEEEE", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors="#555555", length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")


def _label_curves(axes: Any, hits: HitLog, report: DemoReport) -> None:
    """Name each curve at its right end, moved apart where they would overlap."""
    names = {
        "live": ("trainer's own tables", "#7A7A7A"),
        "streamed": ("streamed copy", _BLUE),
        "frozen": ("frozen copy", _VERMILION),
    }
    ends = {copy: float(hits.curve(copy)[1][-3:].mean()) * 100 for copy in names}
    copies = sorted(names, key=lambda copy: ends[copy])
    heights = _spread([ends[copy] for copy in copies])
    for copy, height in zip(copies, heights, strict=True):
        name, color = names[copy]
        label = f"{name}\n{report.hit_rate[copy]:.1%}"
        axes.annotate(
            label,
            (1.0, height),
            xycoords=("axes fraction", "data"),
            xytext=(8, 0),
            textcoords="offset points",
            color=color,
            fontsize=10,
            fontweight="bold",
            va="center",
            annotation_clip=False,
        )


def _spread(heights: list[float]) -> list[float]:
    """Return ascending heights moved apart to _LABEL_GAP at least, and none above the axis."""
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + _LABEL_GAP)
    ceiling = 100.0
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], ceiling)
        ceiling = heights[i] - _LABEL_GAP
    return heights
