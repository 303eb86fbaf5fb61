"""The targets of all benches, and the page that `headrace bench all` makes of its results.

The targets are here and in the table in docs/benchmarks.md, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["FAILED", "MEASURED", "NOT_MEASURED", "TARGETS", "Target", "Verdict", "judge", "render_page"]

MEASURED, FAILED, NOT_MEASURED = "measured", "failed", "not measured"

_Figures = dict[str, Any]


class Target(NamedTuple):
    """A figure of a bench, and what it should be."""

    name: str  # as in the bench's JSON, or a new name with `of`
    limit: float | str | None = None  # a number, or the name of the figure that is the bound
    is_least: bool = True  # the figure should be at least the limit; otherwise at most
    ratio_of: tuple[str, str, str] | None = None  # the two figures whose ratio it is, and their unit
    of: Callable[[_Figures], float | None] | None = None  # computes a figure that the JSON does not have


class Verdict(NamedTuple):
    """A measured figure next to its target, as text."""

    name: str
    value: str
    target: str
    is_met: bool | None  # None without a target or a value
    ratio_of: str


def judge(part: str, figures: _Figures) -> list[Verdict]:
    """Compare a bench's figures with its targets, in the order of the table."""
    return [_judge(target, figures) for target in TARGETS.get(part, ())]


def _judge(target: Target, figures: _Figures) -> Verdict:
    value = target.of(figures) if target.of else _find(figures, target.name)
    limit = _find(figures, target.limit) if isinstance(target.limit, str) else target.limit
    is_met = None
    if value is not None and limit is not None:
        is_met = value >= limit if target.is_least else value <= limit
    sides = [_find(figures, name) for name in target.ratio_of[:2]] if target.ratio_of else [None]
    return Verdict(
        target.name,
        "not measured" if value is None else _show(value),
        "" if limit is None else f"{'≥' if target.is_least else '≤'} {_show(limit)}",
        is_met,
        "" if None in sides or target.ratio_of is None else f"{' of '.join(map(_show, sides))} {target.ratio_of[2]}",
    )


def _show(value: Any) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _find(figures: _Figures, name: str) -> float | None:
    found: Any = figures
    for key in name.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, int | float) else None


def _memory_growth(figures: _Figures) -> float | None:
    few, many = sorted(figures["peak_rss_bytes"].items(), key=lambda item: int(item[0]))
    return float(many[1]) / float(few[1])


def _least_kernel_ratio(figures: _Figures) -> float | None:
    return min(figures["cpu"]["ratios"].values(), default=None)


def _least(name: str, limit: float | None, key: str, ours: str, peer: str, unit: str = "rows/s") -> Target:
    return Target(name, limit, ratio_of=(f"{key}.{ours}", f"{key}.{peer}", unit))


def _most(name: str, limit: float | str, ratio_of: tuple[str, str, str] | None = None) -> Target:
    return Target(name, limit, is_least=False, ratio_of=ratio_of)


_GROWTH = Target("peak_rss_growth", 1.15, is_least=False, of=_memory_growth)
_VISIBLE = "dense_visible_extra_p50_s"
_MEDIANS, _WRITES, _READS = "median_rows_per_s", "write_bytes_per_s", "reads_per_s"

TARGETS: dict[str, tuple[Target, ...]] = {
    "ingest": (
        _least("ratio_acked_vs_fsync", 0.5, _MEDIANS, "acked", "fsync"),
        _least("ratio_uniform_vs_rocksdb", 0.85, _MEDIANS, "headrace_uniform", "rocksdb_uniform"),
        _least("ratio_zipf_vs_rocksdb", 1.5, _MEDIANS, "headrace_zipf", "rocksdb_zipf"),
        _least("ratio_uniform_vs_redis", 4, _MEDIANS, "headrace_uniform", "redis_uniform"),
        _least("ratio_zipf_vs_redis", 8, _MEDIANS, "headrace_zipf", "redis_zipf"),
        _least("ratio_with_snapshot", 0.9, _MEDIANS, "headrace_snapshot", "headrace_uniform"),
        _most("worst_loop_pause_ms", 20),
        Target("peak_memory_bytes"),
    ),
    "recovery": (Target("ratio_recovery_vs_sustained", 0.8),),
    "wire": (
        _least("ratio_vs_loopback", 0.4, _WRITES, "headrace", "loopback", "B/s"),
        _least("ratio_vs_thriftpy2", 4, _WRITES, "headrace", "thriftpy2", "B/s"),
        _least("ratio_vs_grpc", 1.8, _WRITES, "headrace", "grpc", "B/s"),
        _least("ratio_small_vs_thriftpy2", 3, _READS, "headrace", "thriftpy2", "reads/s"),
        _least("ratio_small_vs_grpc", None, _READS, "headrace", "grpc", "reads/s"),
        Target("bytes_per_idle_connection"),
    ),
    "lookup": (
        _least("ratio_vs_torch", 0.5, _MEDIANS, "headrace", "torch"),
        _least("ratio_vs_redis", 10, _MEDIANS, "headrace", "redis"),
        _most("swap_p99_ratio", 2, ("p99_swap_ms", "p99_before_ms", "ms")),
        _most("failed_lookups", 0),
        _least("miss_ratio_vs_rocksdb", 0.85, _MEDIANS, "miss", "rocksdb"),
    ),
    "overhead": (
        _most("step_time_ratio", 1.05, ("step_on_ms", "step_off_ms", "ms")),
        _most("outage_step_time_ratio", 1.05, ("outage_step_ms", "step_off_ms", "ms")),
        _most("training_thread_share", 0.04),
        _most("extra_bytes", "extra_bytes_bound"),
        _most("outage_extra_bytes", "extra_bytes_bound"),
    ),
    "freshness": (_most("p50_vs_floor", 5, ("p50_ms", "floor_p50_ms", "ms")), Target("p99_ms")),
    "relay": (_most("relay_64_upstream_ratio", 1.1), _most("relay_hop_p50_ms", 10), _most("relay_fast_hop_p50_ms", 10)),
    "archive": (
        _least("ingest_with_archive", 0.9, "ingest_rows_per_s", "with", "without"),
        _most("archive_lag_p99_s", 12),
        _most("archive_lag_80_p99_s", 60),
        _most("second_snapshot_bytes_ratio", 0.15, ("second_snapshot_bytes", "first_snapshot_bytes", "B")),
        _least("restore_vs_get", 0.5, "bytes_per_s", "restore", "get", "B/s"),
        _least("restore_vs_get_bounded", 0.5, "bytes_per_s", "restore_bounded", "get_bounded", "B/s"),
        _GROWTH,
    ),
    "replicated": (
        _least("acked_vs_publish", 0.6, "bytes_per_s", "acked", "publish", "B/s"),
        _most("ack_p50_ms", "ack_p50_bound_ms", ("ack_p50_ms", "publish_p50_ms", "ms")),
        _least("recovery_vs_direct_get", 0.5, "bytes_per_s", "recovery", "direct_get", "B/s"),
        _most("failover_planned_p99_s", 1),
        _most("failover_node_p99_s", 6),
        _most("failover_leader_p99_s", 15),
        _most("step_during_failover_ratio", 1.05, ("step_during_failover_ms", "step_before_failover_ms", "ms")),
        _most("failed_lookups", 0),
    ),
    "reshard": (
        _most("write_pause_p99_s", 1),
        _most("bytes_vs_least", 1.1),
        _least("copy_vs_scan_and_load", 0.6, "bytes_per_s", "copy", "plain", "B/s"),
        _least("ingest_during_ratio", 0.7, "rows_per_s", "during", "calm"),
        _most("lookup_p99_during_ratio", 2, ("lookup_p99_during_ms", "lookup_p99_before_ms", "ms")),
        Target("planned_vs_measured_s.least", 0.5),
        _most("planned_vs_measured_s.most", 2),
        _most("plan_1000_shards_s", 10),
        _most("step_during_ratio", 1.05, ("step_during_ms", "step_before_ms", "ms")),
        _most("failed_lookups", 0),
    ),
    "dense": (_most("dense_step_ratio", 1.01, ("step_ms.dense", "step_ms.rows", "ms")), _most(_VISIBLE, 0.5)),
    "importance": (_most("bytes_ratio.share", 0.3), _most("bytes_ratio.share_of_items", 0.3)),
    "restore": (_least("restore_vs_scan", 0.7, "rows_per_s", "restore", "scan"),),
    "backfill": (_least("offline_vs_rocksdb", 1, "rows_per_s", "backfill", "rocksdb"), _GROWTH),
    "export": (_least("export_vs_disk", 0.5, "bytes_per_s", "export", "disk", "B/s"), _GROWTH),
    "kernels": (Target("least_ratio_vs_plain", of=_least_kernel_ratio),),
}
"""By part, in the order of its table. docs/benchmarks.md explains each."""


def render_page(
    content: Mapping[str, Any],
    titles: Mapping[str, str],
    charts: Mapping[str, Sequence[tuple[str, str]]],
    hints: Sequence[str],
) -> str:
    """Return the results' content as Markdown, in the order of `titles`, with (title, path) of each part's charts."""
    machine = content["machine"]
    rounds = "each bench's own rounds" if content["rounds"] is None else f"{content['rounds']} rounds"
    lines = [
        "# Headrace on this machine",
        "",
        f"- {machine['cores']} processors, {content['processor']}, {machine['memory_bytes'] / 2**30:.1f} GiB; "
        f"{machine['system']}; Python {machine['python']}",
        f"- {', '.join(f'{name} {version}' for name, version in content['packages'].items())}",
        f"- {content['begun']} to {content.get('ended', 'now')}; load average (1, 5, 15 minutes) at the start "
        f"{_loads(content['load_at_start'])}, at the end {_loads(content.get('load_at_end', []))}",
        f"- scale {content['scale']:g}, {rounds}; each part's own load is below its table",
        "",
    ]
    if hints:
        lines += ["Not measured, because it is not installed:", "", *(f"- {hint}" for hint in hints), ""]
    parts = {name: content["parts"][name] for name in titles if name in content["parts"]}
    lines += ["| | figures with a target | met | missed |", "|---|---|---|---|"]
    lines += [_summary(name, titles[name], part) for name, part in parts.items()]
    for name, part in parts.items():
        lines += ["", f"## {titles[name]}", "", *_section(name, part, charts.get(name, ()))]
    return "\n".join(lines).rstrip() + "\n"


def _summary(name: str, title: str, part: Mapping[str, Any]) -> str:
    if part["status"] != MEASURED:
        return f"| {title} | **{part['status']}** | | |"
    verdicts = [verdict for verdict in judge(name, part["figures"]) if verdict.is_met is not None]
    missed = [f"`{verdict.name}`" for verdict in verdicts if not verdict.is_met]
    return f"| {title} | {len(verdicts)} | {len(verdicts) - len(missed)} | {', '.join(missed)} |"


def _section(name: str, part: Mapping[str, Any], charts: Sequence[tuple[str, str]]) -> Iterator[str]:
    if part["status"] != MEASURED:
        yield f"{'**Failed**' if part['status'] == FAILED else 'Not measured'}: {part['reason']}"
        return
    if verdicts := judge(name, part["figures"]):
        yield from ("| figure | seen | target | met | of |", "|---|---|---|---|---|")
        for verdict in verdicts:
            met = {True: "yes", False: "**no**", None: ""}[verdict.is_met]
            yield f"| `{verdict.name}` | {verdict.value} | {verdict.target} | {met} | {verdict.ratio_of} |"
        yield ""
    before, after = _loads(part["load_before"]), _loads(part["load_after"])
    yield f"`{name}` took {part['seconds']:.0f} s; load before {before}, after {after}."
    for title, path in charts:
        yield from ("", f"![{title}]({path})")


def _loads(loads: Sequence[float]) -> str:
    return ", ".join(f"{load:.1f}" for load in loads)
