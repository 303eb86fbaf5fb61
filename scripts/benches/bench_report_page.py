"""The page of a report: Markdown out of results and charts. Nothing here measures or draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.scripts.benches.bench_report_results import FAILED, MEASURED
from headrace.scripts.benches.bench_report_targets import Verdict, judge

__all__ = ["Chart", "render_page"]

_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart of a part.

    Attributes:
        title: In words.
        path: Of the PNG, relative to the page.
        sentence: What is seen.
    """

    title: str
    path: str
    sentence: str


def render_page(
    content: Mapping[str, Any], titles: Mapping[str, str], charts: Mapping[str, Sequence[Chart]], hints: Sequence[str]
) -> str:
    """Return the Markdown.

    Args:
        content: Of the results' file.
        titles: Of all parts, by name, in their order.
        charts: By part.
        hints: A line for each peer that is not installed.
    """
    lines = ["# Headrace on this machine", "", *_machine(content), ""]
    if hints:
        lines += ["Not measured, because it is not installed:", "", *(f"- {hint}" for hint in hints), ""]
    lines += [*_summary(content, titles), ""]
    for name, title in titles.items():
        if name in content["parts"]:
            lines += _part(name, title, content["parts"][name], charts.get(name, ()))
    return "\n".join(lines).rstrip() + "\n"


def _machine(content: Mapping[str, Any]) -> list[str]:
    machine = content["machine"]
    rounds = "each bench's own rounds" if content["rounds"] is None else f"{content['rounds']} rounds"
    packages = ", ".join(f"{name} {version}" for name, version in content["packages"].items())
    return [
        f"- {machine['cores']} processors, {content['processor']}, {machine['memory_bytes'] / _GIB:.1f} GiB; "
        f"{machine['system']}; Python {machine['python']}",
        f"- {packages}",
        f"- {content['begun']} to {content.get('ended', 'now')}; load average (1, 5, 15 minutes) at the start "
        f"{_loads(content['load_at_start'])}, at the end {_loads(content.get('load_at_end', []))}",
        f"- scale {content['scale']:g}, {rounds}; each part's own load is below its table",
    ]


def _summary(content: Mapping[str, Any], titles: Mapping[str, str]) -> list[str]:
    lines = ["| | figures with a target | met | missed |", "|---|---|---|---|"]
    for name, title in titles.items():
        if (part := content["parts"].get(name)) is None:
            continue
        if part["status"] != MEASURED:
            lines.append(f"| {title} | **{part['status']}** | | |")
            continue
        verdicts = [verdict for verdict in judge(name, part["figures"]) if verdict.is_met is not None]
        missed = [f"`{verdict.name}`" for verdict in verdicts if not verdict.is_met]
        lines.append(f"| {title} | {len(verdicts)} | {len(verdicts) - len(missed)} | {', '.join(missed)} |")
    return lines


def _part(name: str, title: str, part: Mapping[str, Any], charts: Sequence[Chart]) -> list[str]:
    lines = [f"## {title}", ""]
    if part["status"] != MEASURED:
        word = "**Failed**" if part["status"] == FAILED else "Not measured"
        return [*lines, f"{word}: {part['reason']}", ""]
    verdicts = judge(name, part["figures"])
    if verdicts:
        lines += ["| figure | seen | target | met | of |", "|---|---|---|---|---|", *map(_row, verdicts), ""]
    lines += [
        f"`{name}` took {part['seconds']:.0f} s; load before {_loads(part['load_before'])}, after "
        f"{_loads(part['load_after'])}.",
        "",
    ]
    for chart in charts:
        lines += [f"### {chart.title}", "", chart.sentence, "", f"![{chart.title}]({chart.path})", ""]
    return lines


def _row(verdict: Verdict) -> str:
    target = ""
    if verdict.target is not None:
        target = f"{'≥' if verdict.is_least else '≤'} {_show(verdict.target)}"
    met = {True: "yes", False: "**no**", None: ""}[verdict.is_met]
    beside = ""
    if verdict.beside is not None:
        ours, peer, unit = verdict.beside
        beside = f"{_show(ours)} of {_show(peer)} {unit}"
    seen = "not measured" if verdict.seen is None else _show(verdict.seen)
    return f"| `{verdict.name}` | {seen} | {target} | {met} | {beside} |"


def _show(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _loads(loads: Sequence[float]) -> str:
    return ", ".join(f"{load:.1f}" for load in loads)
