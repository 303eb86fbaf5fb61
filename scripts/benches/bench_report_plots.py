"""The charts of a report: of each part's figures which are drawn, and the sentence that tells what is seen.

Every number in a sentence comes from the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.scripts.benches.bench_report_charts import (
    INK,
    STYLES,
    Values,
    draw_dots,
    draw_level,
    draw_line,
    make_panels,
    save_chart,
    show_short,
    use_log_scale,
)

__all__ = ["PLOTS", "Plot"]

_MIB = 2**20
_PEERS = ("fsync", "rocksdb", "redis", "grpc", "thriftpy2")

_Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plot:
    """One chart.

    Attributes:
        name: Of its file, without the ending.
        title: In words.
        draw: Draws a part's figures into a file and returns the sentence.
    """

    name: str
    title: str
    draw: Callable[[_Figures, Path], str]


def _ingest(figures: _Figures, path: Path) -> str:
    styles = {"headrace": "applied", "rocksdb": "rocksdb", "redis": "redis", "acked": "acked", "fsync": "fsync"}
    labels = {"fsync": "disk alone, writev and fdatasync", "acked": "Headrace, acked"}
    rows = []
    for name, values in figures["rows_per_s"].items():
        kind, _, how = name.partition("_")
        style = STYLES[styles[kind]]
        suffix = "while a snapshot is made" if how == "snapshot" else f"{how} ids"
        rows.append((labels.get(name, f"{style.label}, {suffix}"), values, style))
    figure, panels = make_panels(height_in=0.9 + 0.34 * len(rows))
    draw_dots(panels[0], rows)
    panels[0].set_xlabel("rows of 524 bytes a second (log)")
    save_chart(figure, panels, path, has_legend=False)
    applied = figures["median_rows_per_s"]
    return (
        f"Acked, on disk: {figures['ratio_acked_vs_fsync']:.2f} of what the disk alone takes; applied, uniform ids: "
        f"{_thousands(applied['headrace_uniform'])} rows a second, {figures['ratio_uniform_vs_rocksdb']:.2f} of the "
        "RocksDB loop."
    )


def _wire(figures: _Figures, path: Path) -> str:
    labels = {"headrace": "Headrace", "loopback": "bare loopback", "thriftpy2": "thriftpy2", "grpc": "gRPC"}
    styles = {"headrace": "applied"}
    figure, panels = make_panels(2, height_in=2.6)
    rounds = figures["rounds"]
    for axes, key, unit in (
        (panels[0], "write_bytes_per_s", "writes of 4 MiB, bytes a second (log)"),
        (panels[1], "reads_per_s", "reads of 32 rows a second (log)"),
    ):
        draw_dots(axes, [(labels[name], rates, STYLES[styles.get(name, name)]) for name, rates in rounds[key].items()])
        axes.set_xlabel(unit)
    save_chart(figure, panels, path, has_legend=False)
    against = [
        f"{figures[key]:.1f} times {peer}'s"
        for peer, key in (("thriftpy2", "ratio_vs_thriftpy2"), ("gRPC", "ratio_vs_grpc"))
        if figures[key] is not None
    ]
    return f"Long writes run at {figures['ratio_vs_loopback']:.2f} of a bare loopback's rate, {' and '.join(against)}."


def _lookup(figures: _Figures, path: Path) -> str:
    rates = figures["median_rows_per_s"]
    wanted = (
        ("torch", "torch, with updates", "torch"),
        ("headrace", "replica, with updates", "applied"),
        ("torch_idle", "torch, no updates", "torch"),
        ("headrace_idle", "replica, no updates", "applied"),
        ("redis", "Redis, pipelined MGET", "redis"),
        ("miss", "replica on disk, misses", "acked"),
        ("rocksdb", "RocksDB, the same rows", "rocksdb"),
    )
    rows = [(label, [rates[name]], STYLES[style]) for name, label, style in wanted if name in rates]
    figure, panels = make_panels(height_in=0.9 + 0.34 * len(rows))
    draw_dots(panels[0], rows)
    panels[0].set_xlabel("rows a second (log)")
    save_chart(figure, panels, path, has_legend=False)
    redis = figures["ratio_vs_redis"]
    beside = "" if redis is None else f" and {redis:.0f} times what Redis gives"
    return (
        f"While updates arrive a replica looks up {figures['ratio_vs_torch']:.2f} of the rows that a plain tensor gives"
        f"{beside}."
    )


def _shards(figures: _Figures, path: Path) -> str:
    sweep, at = figures["shards"], figures["width"]["x"].index(figures["shard_dim"])
    figure, panels = make_panels()
    axes = panels[0]
    for name in ("applied", "acked"):
        draw_line(axes, sweep["x"], _scaled(sweep["rows_per_s"][name], 1e-3), STYLES[name])
    for name in _PEERS:
        if rates := figures["width"]["rows_per_s"].get(name):
            draw_level(axes, float(np.median(rates[at])) / 1e3, STYLES[name], linewidth=1.4)
    axes.set_xticks(sweep["x"])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("shards, a process each (peers: one process)")
    axes.set_ylabel(f"thousand rows of {figures['shard_dim']} float32 a second")
    save_chart(figure, panels, path)
    medians = [float(np.median(rates)) for rates in sweep["rows_per_s"]["applied"]]
    rates = ", ".join(f"{_thousands(rate)} with {n}" for n, rate in zip(sweep["x"], medians, strict=True))
    return f"Rows applied a second, by shards: {rates}; {medians[-1] / medians[0]:.2f} times as many with the most."


def _width(figures: _Figures, path: Path) -> str:
    sweep, row_bytes = figures["width"], figures["row_bytes"]
    figure, panels = make_panels(2, height_in=4.4)
    for name in ("applied", "acked", *_PEERS):
        if not (rates := sweep["rows_per_s"].get(name)):
            continue
        draw_line(panels[0], sweep["x"], rates, STYLES[name])
        in_mb = [[rate * size / 1e6 for rate in of_x] for of_x, size in zip(rates, row_bytes, strict=True)]
        draw_line(panels[1], sweep["x"], in_mb, STYLES[name])
    for axes, unit in zip(panels, ("rows a second (log)", "MB a second (log)"), strict=True):
        _log_axes(axes, sweep["x"], "columns of a row, float32 (log)", unit)
    save_chart(figure, panels, path)
    applied = [float(np.median(rates)) for rates in sweep["rows_per_s"]["applied"]]
    first, last = (
        f"{_thousands(applied[at])} rows a second ({applied[at] * row_bytes[at] / 1e6:.0f} MB/s) of "
        f"{sweep['x'][at]} columns"
        for at in (0, -1)
    )
    return f"Headrace applies {first} and {last}."


def _lag(figures: _Figures, path: Path) -> str:
    percents = [100 * load for load in figures["x"]]
    figure, panels = make_panels()
    axes = panels[0]
    for name, key, label, changes in (
        ("acked", "acked_p50_ms", "on disk (acked), p50", {}),
        ("applied", "p50_ms", "visible in a replica, p50", {}),
        ("applied", "p99_ms", "visible in a replica, p99", {"linestyle": "--", "marker": "^", "color": "#00344F"}),
    ):
        draw_line(axes, percents, figures[key], STYLES[name]._replace(label=label), **changes)
    draw_level(axes, figures["floor_p50_ms"], STYLES["floor"]._replace(label="floor, p50"))
    draw_level(axes, figures["floor_p99_ms"], STYLES["floor"]._replace(label="floor, p99", dash=":"))
    use_log_scale(axes.yaxis)
    axes.axvspan(100, max([*percents, 100]) * 1.03, color="#F0F0F0", zorder=0)
    _say_upright(axes, 100, "capacity")
    knee = figures["knee"]
    if knee is not None and knee != 1:
        _say_upright(axes, 100 * knee, "knee")
    axes.set_xlim(0, max([*percents, 100]) * 1.03)
    axes.set_xlabel("offered load, % of the capacity; open loop")
    axes.set_ylabel("lag from the scheduled write, ms (log)")
    save_chart(figure, panels, path)
    medians = {key: [float(np.median(of_x)) for of_x in figures[key]] for key in ("p50_ms", "p99_ms")}
    best = int(np.argmin(medians["p50_ms"]))
    where = (
        f"the median stays within {figures['knee_factor']:g} times that up to {100 * knee:.0f} % of the capacity"
        if knee is not None
        else f"the median stays within {figures['knee_factor']:g} times that at every load"
    )
    return (
        f"At {percents[best]:.0f} % of {_thousands(float(np.median(figures['capacity_rows_per_s'])))} rows a second a "
        f"write is visible after {medians['p50_ms'][best]:.1f} ms in the median, {medians['p99_ms'][best]:.0f} ms at "
        f"the 99th percentile (floor: {figures['floor_p50_ms']:.1f} ms); {where}."
    )


def _recovery(figures: _Figures, path: Path) -> str:
    sizes = [size / _MIB for size in figures["x"]]
    figure, panels = make_panels()
    axes = panels[0]
    plain = STYLES["applied"]._replace(label="recovery", dash="")
    draw_line(axes, sizes, figures["recovery_s"], plain)
    ends = [0.0, max(sizes)]
    slope = figures["seconds_per_byte"] * _MIB
    fit = [figures["intercept_s"] + slope * end for end in ends]
    axes.plot(ends, fit, color=STYLES["applied"].color, linewidth=1.6, label="its linear fit")
    draw_line(axes, sizes, figures["sustained_s"], STYLES["sustained"])
    draw_line(axes, sizes, figures["rocksdb_s"], STYLES["rocksdb"])
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows in the unapplied log, MiB")
    axes.set_ylabel("seconds")
    save_chart(figure, panels, path)
    return (
        f"Recovery takes {slope * 1024:.2f} s for each GiB of log ({1 / slope * _MIB / 1e6:.0f} MB/s); the line begins "
        f"at {figures['intercept_s']:.2f} s."
    )


def _cost(figures: _Figures, path: Path) -> str:
    figure, panels = make_panels(3, height_in=3.8)
    names = (("mark", "mark_us"), ("flush", "flush_us"), ("send", "send_us"), ("shard", "shard_us"))
    for axes, sweep, what in zip(
        panels, ("tables", "rows", "connections"), ("tables", "rows of the table", "connections"), strict=True
    ):
        x, series = figures[sweep]["x"], figures[sweep]["series"]
        for name, key in names:
            if values := series.get(key):
                draw_line(axes, x, values, STYLES[name])
        _log_axes(axes, x, f"{what} (log)", "")
    panels[0].set_ylabel("processor time of a row, µs (log)")
    save_chart(figure, panels, path)
    return " ".join(_cost_sentence(figures[sweep], sweep) for sweep in ("tables", "rows", "connections"))


def _cost_sentence(sweep: _Figures, what: str) -> str:
    first, last = (sum(_median_at(sweep, key, at) for key in sweep["series"] if key.endswith("_us")) for at in (0, -1))
    ends = f"From {sweep['x'][0]:,} to {sweep['x'][-1]:,} {what}"
    return f"{ends} a row's processor time, all that is drawn together, goes from {first:.1f} to {last:.1f} µs."


def _median_at(sweep: _Figures, key: str, at: int) -> float:
    return float(np.median(sweep["series"][key][at]))


def _log_axes(axes: Any, x: Sequence[float], x_label: str, y_label: str) -> None:
    use_log_scale(axes.xaxis)
    use_log_scale(axes.yaxis)
    axes.set_xticks(x, [show_short(value) for value in x])
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)


def _say_upright(axes: Any, x: float, text: str) -> None:
    """Mark a place of the x axis by a line and words along it."""
    axes.axvline(x, color=INK, linewidth=1.0, linestyle=(0, (1, 2)))
    place = {"xycoords": ("data", "axes fraction"), "xytext": (-3, -2), "textcoords": "offset points"}
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the lines, which may be just there
    axes.annotate(text, (x, 1.0), rotation=90, ha="right", va="top", fontsize=9, color=INK, bbox=box, zorder=5, **place)


def _scaled(values: Values, scale: float) -> list[list[float]]:
    return [[value * scale for value in of_x] for of_x in values]


def _thousands(value: float) -> str:
    return f"{round(value, -3):,.0f}" if value >= 10_000 else f"{value:,.0f}"


PLOTS: dict[str, tuple[Plot, ...]] = {
    "ingest": (Plot("ingest", "Rates: a dot a round, a bar the median", _ingest),),
    "wire": (Plot("wire", "Rates: a dot a round, a bar the median", _wire),),
    "lookup": (Plot("lookup", "Rates: medians", _lookup),),
    "throughput": (
        Plot("throughput-shards", "Throughput against shards", _shards),
        Plot("throughput-width", "Throughput against the width of a row", _width),
    ),
    "lag": (Plot("lag-load", "Lag against load", _lag),),
    "recovery-size": (Plot("recovery-size", "Recovery time against the size of the log", _recovery),),
    "cost": (Plot("cost", "Processor time against tables, rows and connections", _cost),),
}
"""By part."""
