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
        part: The bench.
        name: As in the bench's JSON, with dots for what lies deeper; or a name of its own with `of`.
        target: What it should be; a name for a bound that is another figure; None for none.
        is_least: The figure should be no less than the target, else no more.
        beside: Names of two figures that it is the ratio of, and their unit.
        of: Computes it, where it is not in the JSON.
    """

    part: str
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
    return [_judge(figure, figures) for figure in FIGURES if figure.part == part]


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


def _ingest(name: str, target: float, ours: str, peer: str) -> Figure:
    rates = (f"median_rows_per_s.{ours}", f"median_rows_per_s.{peer}", "rows/s")
    return Figure(part="ingest", name=name, target=target, beside=rates)


def _wire(name: str, target: float | None, rates: str, peer: str, unit: str) -> Figure:
    return Figure(part="wire", name=name, target=target, beside=(f"{rates}.headrace", f"{rates}.{peer}", unit))


def _overhead(name: str, target: float | str, beside: tuple[str, str, str] | None = None) -> Figure:
    return Figure(part="overhead", name=name, target=target, is_least=False, beside=beside)


FIGURES: tuple[Figure, ...] = (
    _ingest("ratio_acked_vs_fsync", 0.5, "acked", "fsync"),
    _ingest("ratio_uniform_vs_rocksdb", 0.85, "headrace_uniform", "rocksdb_uniform"),
    _ingest("ratio_zipf_vs_rocksdb", 1.5, "headrace_zipf", "rocksdb_zipf"),
    _ingest("ratio_uniform_vs_redis", 4, "headrace_uniform", "redis_uniform"),
    _ingest("ratio_zipf_vs_redis", 8, "headrace_zipf", "redis_zipf"),
    _ingest("ratio_with_snapshot", 0.9, "headrace_snapshot", "headrace_uniform"),
    Figure(part="ingest", name="worst_loop_pause_ms", target=20, is_least=False),
    Figure(part="ingest", name="peak_memory_bytes"),
    Figure(part="recovery", name="ratio_recovery_vs_sustained", target=0.8),
    _wire("ratio_vs_loopback", 0.4, "write_bytes_per_s", "loopback", "B/s"),
    _wire("ratio_vs_thriftpy2", 4, "write_bytes_per_s", "thriftpy2", "B/s"),
    _wire("ratio_vs_grpc", 1.8, "write_bytes_per_s", "grpc", "B/s"),
    _wire("ratio_small_vs_thriftpy2", 3, "reads_per_s", "thriftpy2", "reads/s"),
    _wire("ratio_small_vs_grpc", None, "reads_per_s", "grpc", "reads/s"),
    Figure(part="wire", name="bytes_per_idle_connection"),
    Figure(
        part="lookup",
        name="ratio_vs_torch",
        target=0.5,
        beside=("median_rows_per_s.headrace", "median_rows_per_s.torch", "rows/s"),
    ),
    Figure(
        part="lookup",
        name="ratio_vs_redis",
        target=10,
        beside=("median_rows_per_s.headrace", "median_rows_per_s.redis", "rows/s"),
    ),
    Figure(
        part="lookup", name="swap_p99_ratio", target=2, is_least=False, beside=("p99_swap_ms", "p99_before_ms", "ms")
    ),
    Figure(part="lookup", name="failed_lookups", target=0, is_least=False),
    Figure(
        part="lookup",
        name="miss_ratio_vs_rocksdb",
        target=0.85,
        beside=("median_rows_per_s.miss", "median_rows_per_s.rocksdb", "rows/s"),
    ),
    _overhead("step_time_ratio", MAX_STEP_TIME_RATIO, ("step_on_ms", "step_off_ms", "ms")),
    _overhead("outage_step_time_ratio", MAX_STEP_TIME_RATIO, ("outage_step_ms", "step_off_ms", "ms")),
    _overhead("training_thread_share", MAX_TRAINING_THREAD_SHARE),
    _overhead("extra_bytes", "extra_bytes_bound"),
    _overhead("outage_extra_bytes", "extra_bytes_bound"),
    Figure(
        part="freshness",
        name="p50_vs_floor",
        target=MAX_P50_VS_FLOOR,
        is_least=False,
        beside=("p50_ms", "floor_p50_ms", "ms"),
    ),
    Figure(part="freshness", name="p99_ms"),
    Figure(
        part="backfill",
        name="offline_vs_rocksdb",
        target=1.0,
        beside=("rows_per_s.backfill", "rows_per_s.rocksdb", "rows/s"),
    ),
    Figure(part="backfill", name="peak_rss_growth", target=1.15, is_least=False, of=_growth_of_memory),
    Figure(part="export", name="export_vs_disk", target=0.5, beside=("bytes_per_s.export", "bytes_per_s.disk", "B/s")),
    Figure(part="export", name="peak_rss_growth", target=1.15, is_least=False, of=_growth_of_memory),
    Figure(part="kernels", name="least_ratio_vs_plain", of=_least_kernel_ratio),
)
"""All of them; docs/benchmarks.md tells what each is."""
