"""The charts of the sweeps: medians as lines, every round as a dot, limits gray and dashed.

matplotlib is imported when a chart is drawn: it takes a second. pyplot is not used, so neither a display nor a
program's own figures can interfere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["draw_charts"]

_Figures = dict[str, Any]
_INK, _GRAY = "#222222", "#6E6E6E"
_PEERS = ("fsync", "rocksdb", "redis", "grpc", "thriftpy2")
# Label, color, marker and dash: one style for a contender in all charts. The colors are Okabe and Ito's, which readers
# with any color vision tell apart.
_STYLES = {
    "applied": ("Headrace, applied", "#0072B2", "o", "-"),
    "acked": ("Headrace, acked", "#56B4E9", "P", "-"),
    "fsync": ("disk alone (limit)", _GRAY, "x", "--"),
    "rocksdb": ("RocksDB loop", "#009E73", "s", "-."),
    "redis": ("Redis", "#D55E00", "^", "-."),
    "grpc": ("gRPC, keeps nothing", "#CC79A7", "D", ":"),
    "thriftpy2": ("thriftpy2, keeps nothing", "#B07A00", "v", ":"),
    "mark_us": ("trainer: mark", "#009E73", "s", "-."),
    "flush_us": ("trainer: take, gather", "#D55E00", "^", "-."),
    "send_us": ("trainer: send", "#CC79A7", "D", ":"),
    "shard_us": ("shard, all threads", "#0072B2", "o", "-"),
    "recovery_s": ("recovery", "#0072B2", "o", ""),
    "sustained_s": ("sending, logging, applying the same", _INK, "P", "--"),
    "rocksdb_s": ("RocksDB loop", "#009E73", "s", "-."),
    "acked_p50_ms": ("on disk (acked), p50", "#56B4E9", "P", "-"),
    "p50_ms": ("visible in a replica, p50", "#0072B2", "o", "-"),
    "p99_ms": ("visible in a replica, p99", "#00344F", "^", "--"),
    "first_target": ("freshness_s", "#0072B2", "o", "-"),
    "second_target": ("freshness_s", "#D55E00", "^", "-."),
    "rarely": ("everything, more rarely", "#D55E00", "^", "-."),
    "share": ("send_share of both tables", "#56B4E9", "P", "-"),
    "share_of_items": ("send_share of the items", "#0072B2", "o", "-"),
    "bytes_ratio": ("all bytes", "#0072B2", "o", "-"),
    "released_ratio": ("of these in releases", "#009E73", "s", "-."),
    "floor_p50_ms": ("floor, p50", _GRAY, "", "--"),
    "floor_p99_ms": ("floor, p99", _GRAY, "", ":"),
}


def _draw_shards(figures: _Figures, panels: Any) -> None:
    sweep, at, (axes,) = figures["shards"], figures["width"]["x"].index(figures["shard_dim"]), panels
    for name in ("applied", "acked"):
        _draw_line(axes, sweep["x"], sweep["rows_per_s"][name], name)
    for name in _PEERS:
        if rates := figures["width"]["rows_per_s"].get(name):
            _draw_level(axes, median(rates[at]), name)
    axes.set(xticks=sweep["x"], ylim=(0, None), xlabel="shards, a process each (peers: one process)")
    axes.set_ylabel(f"rows of {figures['shard_dim']} float32 a second")


def _draw_width(figures: _Figures, panels: Any) -> None:
    sweep = figures["width"]
    for name in ("applied", "acked", *_PEERS):
        if rates := sweep["rows_per_s"].get(name):
            _draw_line(panels[0], sweep["x"], rates, name)
            in_mb = [
                [rate * size / 1e6 for rate in of_x] for of_x, size in zip(rates, figures["row_bytes"], strict=True)
            ]
            _draw_line(panels[1], sweep["x"], in_mb, name)
    for axes, unit in zip(panels, ("rows a second", "MB a second"), strict=True):
        _use_log_scales(axes, sweep["x"], xlabel="columns of a row, float32", ylabel=unit)


def _draw_lag(figures: _Figures, panels: Any) -> None:
    percents, knee, (axes,) = [100 * load for load in figures["x"]], figures["knee"], panels
    for name in ("acked_p50_ms", "p50_ms", "p99_ms"):
        _draw_line(axes, percents, figures[name], name)
    for name in ("floor_p50_ms", "floor_p99_ms"):
        _draw_level(axes, figures[name], name)
    rows_per_s = median(figures["capacity_rows_per_s"])
    lines = {f"capacity: {rows_per_s:,.0f} rows a second": 100} | ({} if knee is None else {"knee": 100 * knee})
    for text, x in lines.items():
        axes.axvline(x, color=_INK, linewidth=1.0, linestyle=":")
        axes.text(x, 0.99, text, rotation=90, ha="right", va="top", transform=axes.get_xaxis_transform())
    axes.set(yscale="log", xlabel="offered load, % of the capacity; open loop")
    axes.set_ylabel("lag from the scheduled write, ms")


def _draw_recovery(figures: _Figures, panels: Any) -> None:
    sizes, slope, begin_s, (axes,) = figures["x"], figures["seconds_per_byte"], figures["intercept_s"], panels
    for name in ("recovery_s", "sustained_s", "rocksdb_s"):
        _draw_line(axes, [size / 2**20 for size in sizes], figures[name], name)
    label = f"recovery: {begin_s:.2f} s + {slope * 2**30:.2f} s a GiB"
    axes.plot([0, sizes[-1] / 2**20], [begin_s, begin_s + slope * sizes[-1]], color="#0072B2", label=label)
    axes.set(xlim=(0, None), ylim=(0, None), xlabel="rows in the unapplied log, MiB", ylabel="seconds")


def _draw_cost(figures: _Figures, panels: Any) -> None:
    for axes, name in zip(panels, ("tables", "rows", "connections"), strict=True):
        x, series = figures[name]["x"], figures[name]["series"]
        for key in ("mark_us", "flush_us", "send_us", "shard_us"):
            if key in series:
                _draw_line(axes, x, series[key], key)
        _use_log_scales(axes, x, xlabel=name, ylabel="processor time of a row, µs")


def _draw_pace(figures: _Figures, panels: Any) -> None:
    lag, step = panels
    for target, name in zip(figures["targets"], ("first_target", "second_target"), strict=True):
        suffix = f" = {target['freshness_s']:g}"
        _draw_line(lag, figures["x"], target["lag_p50_s"], name, suffix)
        ratios = [[100 * (ratio - 1) for ratio in of_x] for of_x in target["step_ratio"]]
        _draw_line(step, figures["x"], ratios, name, suffix)
    step.plot(figures["x"], figures["x"], color=_GRAY, linestyle="--", linewidth=1.4, label="what is allowed")
    for axes, unit in zip(panels, ("median lag until durable, s", "longer steps, %"), strict=True):
        axes.set(xscale="log", ylim=(0, None), xlabel="max_cost_percent", ylabel=unit)
        axes.set_xticks(figures["x"], [f"{value:g}" for value in figures["x"]])
        axes.minorticks_off()
    step.set(ylim=(0, 30))


def _draw_importance(figures: _Figures, panels: Any) -> None:
    loss, staleness = panels
    for name in ("rarely", "share", "share_of_items"):
        curve = figures["curves"][name]
        _draw_line(loss, [median(of_x) for of_x in curve["bytes_ratio"]], curve["loss_points"], name)
    loss.axhline(figures["max_loss_points"], color=_GRAY, linestyle="--", linewidth=1.4)
    loss.set(xlim=(0, 0.7), ylim=(-0.2, 6), xlabel="bytes, of everything sent", ylabel="loss of hit@10, points")
    curve = figures["curves"]["staleness"]
    for name in ("bytes_ratio", "released_ratio"):
        _draw_line(staleness, curve["x"], curve[name], name)
    label = f"max_staleness_s; send_share={figures['staleness_share']:g} of the items"
    staleness.set(xscale="log", ylim=(0, None), xlabel=label, ylabel="bytes, of everything sent")
    staleness.set_xticks(curve["x"], [f"{value:g}" for value in curve["x"]])
    staleness.minorticks_off()


_CHARTS: tuple[tuple[str, str, str, int, Callable[[_Figures, Any], None]], ...] = (
    ("throughput", "throughput-shards", "Throughput against shards", 1, _draw_shards),
    ("throughput", "throughput-width", "Throughput against the width of a row", 2, _draw_width),
    ("lag", "lag-load", "Lag against load", 1, _draw_lag),
    ("recovery-size", "recovery-size", "Recovery time against the size of the log", 1, _draw_recovery),
    ("pace", "pace", "Lag and step time against the two settings", 2, _draw_pace),
    ("importance", "importance", "Bytes and hit rate where rows wait", 2, _draw_importance),
    ("cost", "cost", "Processor time against tables, rows and connections", 3, _draw_cost),
)


def draw_charts(part: str, figures: _Figures, folder: Path) -> list[tuple[str, str]]:
    """Draw the charts of a part into `figures/` in a folder; return (title, path in the folder) of each."""
    from matplotlib.figure import Figure

    drawn = []
    for of_part, name, title, num_panels, draw in _CHARTS:
        if of_part != part:
            continue
        # 800 pixels wide: what a page of documentation shows without scaling.
        figure = Figure(figsize=(8.0, 4.2), dpi=100, layout="constrained")
        panels = list(figure.subplots(1, num_panels, squeeze=False)[0])
        draw(figures, panels)
        entries: dict[str, Any] = {}
        for axes in panels:
            axes.grid(color="#E8E8E8", linewidth=0.8)
            handles, labels = axes.get_legend_handles_labels()
            entries |= dict(zip(labels, handles, strict=True))
        columns = min(4, len(entries))
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False)
        path = f"figures/{name}.png"
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / path, metadata={"Software": None})
        drawn.append((title, path))
    return drawn


def _draw_line(axes: Any, x: Sequence[float], rounds: Sequence[Sequence[float]], name: str, suffix: str = "") -> None:
    label, color, marker, dash = _STYLES[name]
    label += suffix
    points = [(at, value) for at, of_x in zip(x, rounds, strict=True) for value in of_x]
    axes.plot(x, [median(of_x) for of_x in rounds], color=color, marker=marker, linestyle=dash, label=label)
    axes.plot(*zip(*points, strict=True), linestyle="", marker=".", markersize=4, color=color, alpha=0.45)


def _draw_level(axes: Any, value: float, name: str) -> None:
    """Draw a value that does not depend on x."""
    label, color, _, dash = _STYLES[name]
    axes.axhline(value, color=color, linestyle=dash, linewidth=1.4, label=label)


def _use_log_scales(axes: Any, x: Sequence[float], **labels: str) -> None:
    axes.set(xscale="log", yscale="log", **labels)
    axes.set_xticks(x, [f"{value:g}" for value in x])
    axes.minorticks_off()
