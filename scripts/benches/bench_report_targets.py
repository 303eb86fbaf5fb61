"""The figures that a report sets beside their targets: the one place where targets are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "FIGURES",
    "MAX_P50_VS_FLOOR",
    "MAX_STEP_TIME_RATIO",
    "MAX_TRAINING_THREAD_SHARE",
    "Figure",
    "Verdict",
    "judge",
]

MAX_STEP_TIME_RATIO = 1.05
MAX_TRAINING_THREAD_SHARE = 0.04
MAX_P50_VS_FLOOR = 5.0

_Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One line of a report's table.

    Attributes:
        name: As in the bench's JSON, with dots for what lies deeper; or a name of its own with `of`.
        target: What it should be; a name for a bound that is another figure; None for none.
        is_least: The figure should be no less than the target, else no more.
        beside: Names of two figures that it is the ratio of, and their unit.
        of: Computes it, where it is not in the JSON.
    """

    name: str
    target: float | str | None = None
    is_least: bool = True
    beside: tuple[str, str, str] | None = None
    of: Callable[[_Figures], float | None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A figure as it was seen.

    Attributes:
        name: Of the figure.
        seen: Its value; None when it was not measured.
        target: What it should be; None for none.
        is_least: The target is the least, else the most.
        is_met: Whether it is met; None without a target or a value.
        beside: The two values that it is the ratio of, and their unit.
    """

    name: str
    seen: float | None
    target: float | None
    is_least: bool
    is_met: bool | None
    beside: tuple[float, float, str] | None


def judge(part: str, figures: _Figures) -> list[Verdict]:
    """Return what a bench's figures are beside their targets, in the table's order.

    Args:
        part: The bench.
        figures: Its JSON.
    """
    return [_judge(figure, figures) for figure in FIGURES.get(part, ())]


def _judge(figure: Figure, figures: _Figures) -> Verdict:
    seen = figure.of(figures) if figure.of else _find(figures, figure.name)
    target = _find(figures, figure.target) if isinstance(figure.target, str) else figure.target
    is_met = None
    if seen is not None and target is not None:
        is_met = seen >= target if figure.is_least else seen <= target
    beside = None
    if figure.beside is not None:
        ours, peer = (_find(figures, name) for name in figure.beside[:2])
        beside = None if ours is None or peer is None else (ours, peer, figure.beside[2])
    return Verdict(name=figure.name, seen=seen, target=target, is_least=figure.is_least, is_met=is_met, beside=beside)


def _find(figures: _Figures, name: str) -> float | None:
    found: Any = figures
    for key in name.split("."):
        if not isinstance(found, dict) or key not in found:
            return None
        found = found[key]
    return found if isinstance(found, int | float) else None


def _growth_of_memory(figures: _Figures) -> float | None:
    few, many = sorted(figures["peak_rss_bytes"].items(), key=lambda item: int(item[0]))
    return float(many[1]) / float(few[1])


def _least_kernel_ratio(figures: _Figures) -> float | None:
    return min(figures["cpu"]["ratios"].values(), default=None)


def _rates(name: str, target: float | None, rates: str, ours: str, peer: str, unit: str = "rows/s") -> Figure:
    """Return the ratio of one rate to another, which should be no less than the target."""
    return Figure(name=name, target=target, beside=(f"{rates}.{ours}", f"{rates}.{peer}", unit))


def _most(name: str, target: float | str, beside: tuple[str, str, str] | None = None) -> Figure:
    """Return a figure that should be no more than the target."""
    return Figure(name=name, target=target, is_least=False, beside=beside)


_GROWTH = Figure(name="peak_rss_growth", target=1.15, is_least=False, of=_growth_of_memory)
_MEDIANS = "median_rows_per_s"

FIGURES: dict[str, tuple[Figure, ...]] = {
    "ingest": (
        _rates("ratio_acked_vs_fsync", 0.5, _MEDIANS, "acked", "fsync"),
        _rates("ratio_uniform_vs_rocksdb", 0.85, _MEDIANS, "headrace_uniform", "rocksdb_uniform"),
        _rates("ratio_zipf_vs_rocksdb", 1.5, _MEDIANS, "headrace_zipf", "rocksdb_zipf"),
        _rates("ratio_uniform_vs_redis", 4, _MEDIANS, "headrace_uniform", "redis_uniform"),
        _rates("ratio_zipf_vs_redis", 8, _MEDIANS, "headrace_zipf", "redis_zipf"),
        _rates("ratio_with_snapshot", 0.9, _MEDIANS, "headrace_snapshot", "headrace_uniform"),
        _most("worst_loop_pause_ms", 20),
        Figure(name="peak_memory_bytes"),
    ),
    "recovery": (Figure(name="ratio_recovery_vs_sustained", target=0.8),),
    "wire": (
        _rates("ratio_vs_loopback", 0.4, "write_bytes_per_s", "headrace", "loopback", "B/s"),
        _rates("ratio_vs_thriftpy2", 4, "write_bytes_per_s", "headrace", "thriftpy2", "B/s"),
        _rates("ratio_vs_grpc", 1.8, "write_bytes_per_s", "headrace", "grpc", "B/s"),
        _rates("ratio_small_vs_thriftpy2", 3, "reads_per_s", "headrace", "thriftpy2", "reads/s"),
        _rates("ratio_small_vs_grpc", None, "reads_per_s", "headrace", "grpc", "reads/s"),
        Figure(name="bytes_per_idle_connection"),
    ),
    "lookup": (
        _rates("ratio_vs_torch", 0.5, _MEDIANS, "headrace", "torch"),
        _rates("ratio_vs_redis", 10, _MEDIANS, "headrace", "redis"),
        _most("swap_p99_ratio", 2, ("p99_swap_ms", "p99_before_ms", "ms")),
        _most("failed_lookups", 0),
        _rates("miss_ratio_vs_rocksdb", 0.85, _MEDIANS, "miss", "rocksdb"),
    ),
    "overhead": (
        _most("step_time_ratio", MAX_STEP_TIME_RATIO, ("step_on_ms", "step_off_ms", "ms")),
        _most("outage_step_time_ratio", MAX_STEP_TIME_RATIO, ("outage_step_ms", "step_off_ms", "ms")),
        _most("training_thread_share", MAX_TRAINING_THREAD_SHARE),
        _most("extra_bytes", "extra_bytes_bound"),
        _most("outage_extra_bytes", "extra_bytes_bound"),
    ),
    "freshness": (
        _most("p50_vs_floor", MAX_P50_VS_FLOOR, ("p50_ms", "floor_p50_ms", "ms")),
        Figure(name="p99_ms"),
    ),
    "backfill": (
        _rates("offline_vs_rocksdb", 1.0, "rows_per_s", "backfill", "rocksdb"),
        _GROWTH,
    ),
    "export": (
        _rates("export_vs_disk", 0.5, "bytes_per_s", "export", "disk", "B/s"),
        _GROWTH,
    ),
    "kernels": (Figure(name="least_ratio_vs_plain", of=_least_kernel_ratio),),
}
"""By part, in the order of its table; docs/benchmarks.md tells what each is."""
