"""How a report's charts look: one style a contender in all of them, told apart by marker and dash in grey too.

Drawn without pyplot, so that neither a display nor a program's own figures have a part in it. matplotlib is imported
when a chart is made: it takes a second.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "INK",
    "STYLES",
    "Style",
    "Values",
    "draw_dots",
    "draw_level",
    "draw_line",
    "make_panels",
    "save_chart",
    "show_short",
    "use_log_scale",
]

Values = Sequence[Sequence[float]]
"""For each x, the values of all rounds."""

INK = "#222222"
_GREY = "#6E6E6E"
# 800 pixels wide: what a page of documentation shows without scaling.
_WIDTH_IN, _DPI = 8.0, 100


class Style(NamedTuple):
    """How a contender is drawn.

    Attributes:
        label: In the legend.
        color: Of Okabe and Ito's, which readers with any colour vision tell apart ("Color Universal Design", 2008).
        marker: Of matplotlib.
        dash: Of matplotlib.
    """

    label: str
    color: str
    marker: str
    dash: str


STYLES: dict[str, Style] = {
    "applied": Style("Headrace, applied", "#0072B2", "o", "-"),
    "acked": Style("Headrace, acked", "#56B4E9", "P", "-"),
    "fsync": Style("disk alone (limit)", _GREY, "x", "--"),
    "loopback": Style("bare loopback (limit)", _GREY, "x", "--"),
    "floor": Style("floor (limit)", _GREY, "x", "--"),
    "torch": Style("torch (limit)", _GREY, "x", "--"),
    "rocksdb": Style("RocksDB loop", "#009E73", "s", "-."),
    "redis": Style("Redis", "#D55E00", "^", "-."),
    "grpc": Style("gRPC, keeps nothing", "#CC79A7", "D", ":"),
    "thriftpy2": Style("thriftpy2, keeps nothing", "#B07A00", "v", ":"),
    "mark": Style("trainer: mark", "#009E73", "s", "-."),
    "flush": Style("trainer: take, gather", "#D55E00", "^", "-."),
    "send": Style("trainer: send", "#CC79A7", "D", ":"),
    "sustained": Style("sending, logging, applying the same", INK, "P", "--"),
    "shard": Style("shard, all threads", "#0072B2", "o", "-"),
}


def make_panels(num_panels: int = 1, *, height_in: float = 4.2) -> tuple[Any, list[Any]]:
    """Return a matplotlib `Figure` and its axes, side by side, with nothing drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, num_panels, squeeze=False)[0])
    for axes in panels:
        axes.grid(color="#E8E8E8", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors="#444444", length=3, labelsize=9)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color("#999999")
    return figure, panels


def draw_line(axes: Any, x: Sequence[float], values: Values, style: Style, **changes: Any) -> None:
    """Draw the medians as a line and every round as a dot.

    Args:
        axes: Where.
        x: Of the points; those without a value are left out.
        values: For each x, of all rounds.
        style: How.
        changes: Other settings of the line.
    """
    points = [(at, of_x) for at, of_x in zip(x, values, strict=True) if of_x]
    settings = {
        "color": style.color,
        "marker": style.marker,
        "linestyle": style.dash,
        "label": style.label,
        "linewidth": 1.8,
        "markersize": 6,
        **changes,
    }
    axes.plot([at for at, _ in points], [float(np.median(of_x)) for _, of_x in points], **settings)
    rounds = [(at, value) for at, of_x in points for value in of_x]
    axes.plot(*zip(*rounds, strict=True), linestyle="", marker=".", markersize=4, color=settings["color"], alpha=0.45)


def draw_level(axes: Any, value: float, style: Style, **changes: Any) -> None:
    """Draw a value that does not depend on x."""
    axes.axhline(value, **{"color": style.color, "linestyle": style.dash, "label": style.label, **changes})


def draw_dots(axes: Any, rows: Sequence[tuple[str, Sequence[float], Style]]) -> None:
    """Draw contenders below each other: every round a dot, the median a tick, its value beside it.

    Args:
        axes: Where; x becomes logarithmic.
        rows: Of each contender its name, values and style, from the top.
    """
    use_log_scale(axes.xaxis)
    for place, (_, values, style) in enumerate(rows):
        middle = float(np.median(values))
        axes.plot(
            list(values), [place] * len(values), linestyle="", marker=style.marker, color=style.color, markersize=8
        )
        axes.plot([middle], [place], linestyle="", marker="|", markersize=16, markeredgewidth=2, color=INK)
        axes.annotate(
            show_short(middle),
            (1.0, place),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
            annotation_clip=False,
        )
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    least, most = min(min(values) for _, values, _ in rows), max(max(values) for _, values, _ in rows)
    axes.set_xlim(least / 1.5, most * 1.5)


def use_log_scale(axis: Any) -> None:
    """Make an axis logarithmic, with its numbers written out at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=9))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: show_short(value)))


def save_chart(figure: Any, panels: Sequence[Any], path: Path, *, has_legend: bool = True) -> None:
    """Put one legend of all panels below them, and write the PNG."""
    from PIL import Image  # comes with matplotlib

    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if has_legend and entries:
        columns = min(4, len(entries))
        figure.legend(
            entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # In 256 colours, which halves the file, the rare ones kept; without a date: the same figures give the same file.
    drawn = io.BytesIO()
    figure.savefig(drawn)
    image = Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(path, optimize=True)


def show_short(value: float) -> str:
    """Return a number in three digits, with `k`, `M` or `G` for thousands, millions and billions."""
    for scale, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"
