"""The targets of all benches, and how their figures compare.

The targets are here and in the table in docs/benchmarks.md, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["TARGETS", "Target", "Verdict", "judge"]


class Target(NamedTuple):
    """A figure of a bench's JSON, and what it should be."""

    name: str
    limit: float | str  # a number, or the name of the figure that is the bound
    is_least: bool = True  # the figure should be at least the limit; otherwise at most


class Verdict(NamedTuple):
    """A figure next to its target, as text."""

    name: str
    value: str
    target: str
    is_met: bool | None  # None without a value


def judge(bench: str, figures: Mapping[str, Any]) -> Iterator[Verdict]:
    """Compare a bench's figures with its targets, in the order of the table."""
    for name, bound, is_least in TARGETS[bench]:
        value, limit = figures[name], figures[bound] if isinstance(bound, str) else bound
        is_met = None if value is None else value >= limit if is_least else value <= limit
        shown = "not measured" if value is None else _show(value)
        yield Verdict(name, shown, f"{'≥' if is_least else '≤'} {_show(limit)}", is_met)


def _show(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


TARGETS = {
    "ingest": (
        Target("ratio_acked_vs_fsync", 0.5),
        Target("ratio_uniform_vs_rocksdb", 0.85),
        Target("ratio_zipf_vs_rocksdb", 1.5),
        Target("ratio_uniform_vs_redis", 4),
        Target("ratio_zipf_vs_redis", 8),
        Target("ratio_recovery_vs_sustained", 0.8),
        Target("worst_loop_pause_ms", 20, is_least=False),
    ),
    "wire": (
        Target("ratio_vs_loopback", 0.4),
        Target("ratio_vs_thriftpy2", 4),
        Target("ratio_vs_grpc", 1.8),
        Target("ratio_small_vs_thriftpy2", 3),
    ),
    "overhead": (
        Target("step_time_ratio", 1.05, is_least=False),
        Target("outage_step_time_ratio", 1.05, is_least=False),
        Target("training_thread_share", 0.04, is_least=False),
        Target("extra_bytes", "extra_bytes_bound", is_least=False),
        Target("outage_extra_bytes", "extra_bytes_bound", is_least=False),
    ),
    "freshness": (Target("p50_vs_floor", 5, is_least=False),),
    "lookup": (
        Target("ratio_vs_torch", 0.5),
        Target("ratio_vs_redis", 10),
        Target("swap_p99_ratio", 2, is_least=False),
    ),
    "kernels": (Target("num_gpu_failures", 0, is_least=False),),
    "follow": (
        Target("acked_with_follower_ratio", 0.8),
        Target("follower_lag_p99_ms", 50, is_least=False),
        Target("promote_pause_p99_s", 1, is_least=False),
        Target("reshard_pause_p99_s", 5, is_least=False),
        Target("build_vs_scan_and_load", 0.6),
    ),
    "replicated": (
        Target("acked_vs_publish", 0.6),
        Target("ack_p50_ms", "ack_p50_bound_ms", is_least=False),
        Target("recovery_vs_direct_get", 0.5),
    ),
}
"""By bench, in the order of its table. docs/benchmarks.md explains each."""
