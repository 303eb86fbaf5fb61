"""The targets, which the documentation names as well, and the page that is made of results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headrace.scripts.benches.report import TARGETS, Target, judge, render_page
from headrace.scripts.benches.suite import PARTS

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks.md"


def test_figures_are_judged_against_their_targets() -> None:
    """At the limit a target is met, on either side; without a value or a limit there is no verdict."""
    figures = {
        "ratio_vs_torch": 0.5,
        "ratio_vs_redis": None,
        "swap_p99_ratio": 2.01,
        "failed_lookups": 0,
        "median_rows_per_s": {"headrace": 5.0, "torch": 10.0},
    }
    found = {verdict.name: verdict for verdict in judge("lookup", figures)}
    assert (found["ratio_vs_torch"].is_met, found["swap_p99_ratio"].is_met) == (True, False)
    assert (found["failed_lookups"].is_met, found["ratio_vs_redis"].is_met) == (True, None)
    assert (found["ratio_vs_torch"].ratio_of, found["ratio_vs_redis"].ratio_of) == ("5 of 10 rows/s", "")
    assert (found["swap_p99_ratio"].value, found["swap_p99_ratio"].target) == ("2.01", "≤ 2")
    assert found["miss_ratio_vs_rocksdb"].value == "not measured"


def test_computed_figures_and_limits() -> None:
    """Memory that streaming adds has the bench's own bound; that of files is judged by its growth with the table."""
    verdicts = judge("overhead", {"extra_bytes": 11, "outage_extra_bytes": 9, "extra_bytes_bound": 10})
    found = {verdict.name: verdict.is_met for verdict in verdicts}
    assert (found["extra_bytes"], found["outage_extra_bytes"]) == (False, True)
    for peaks in ({"1000": 100.0, "5000": 116.0}, {"5000": 116.0, "1000": 100.0}):
        growth = judge("export", {"peak_rss_bytes": peaks})[1]
        assert (growth.name, growth.value, growth.is_met) == ("peak_rss_growth", "1.16", False)


def test_targets_are_of_parts() -> None:
    """Every target belongs to a part that can run, and none is there twice."""
    assert TARGETS.keys() <= {part.name for part in PARTS}
    for targets in TARGETS.values():
        assert len({target.name for target in targets}) == len(targets)


@pytest.mark.parametrize(
    ("part", "target"),
    [
        pytest.param(part, target, id=f"{part}-{target.name}")
        for part, targets in TARGETS.items()
        for target in targets
        if isinstance(target.limit, int | float)
    ],
)
def test_the_documentation_has_the_same_targets(part: str, target: Target) -> None:
    """The table of targets in docs/benchmarks.md and the one in the code do not differ."""
    sign = "≥" if target.is_least else "≤"
    row = rf"^\| {part} \| `{target.name}` \| {sign} {target.limit:g} \|"
    assert re.search(row, PAGE.read_text(), re.MULTILINE), row


CONTENT: dict[str, Any] = {
    "scale": 0.5,
    "rounds": None,
    "machine": {"cores": 2, "memory_bytes": 24 * 2**30, "system": "Linux", "python": "3.11"},
    "processor": "A processor",
    "packages": {"headrace": "0.1.0"},
    "begun": "2026-01-01 10:00:00 UTC",
    "ended": "2026-01-01 10:20:00 UTC",
    "load_at_start": [0.5, 1.0, 1.5],
    "load_at_end": [2.0, 1.0, 1.5],
    "parts": {
        "freshness": {
            "status": "measured",
            "seconds": 61.4,
            "load_before": [0.5, 1, 1],
            "load_after": [2.5, 1, 1],
            "figures": {"p50_vs_floor": 5.5, "p50_ms": 11.0, "floor_p50_ms": 2.0, "p99_ms": 1234.5},
        },
        "lag": {"status": "failed", "seconds": 1.0, "load_before": [], "load_after": [], "reason": "no disk"},
    },
}
TITLES = {"lag": "Lag", "freshness": "Freshness", "cost": "Cost"}


def test_the_whole_page() -> None:
    """Machine, versions, dates and loads; a summary; then each part, with its table and its charts."""
    charts = {"freshness": [("A chart", "figures/a.png")]}
    page = render_page(CONTENT, TITLES, charts, ["Redis is left out: do this"])
    lines = page.splitlines()
    assert lines[0] == "# Headrace on this machine"
    assert "- 2 processors, A processor, 24.0 GiB; Linux; Python 3.11" in lines
    assert "- headrace 0.1.0" in lines
    assert "at the start 0.5, 1.0, 1.5, at the end 2.0, 1.0, 1.5" in page
    assert "- scale 0.5, each bench's own rounds; each part's own load is below its table" in lines
    assert "- Redis is left out: do this" in lines
    assert "| Lag | **failed** | | |" in lines
    assert "| Freshness | 1 | 0 | `p50_vs_floor` |" in lines
    assert "| `p50_vs_floor` | 5.5 | ≤ 5 | **no** | 11 of 2 ms |" in lines
    assert "| `p99_ms` | 1,234 |  |  |  |" in lines
    assert "`freshness` took 61 s; load before 0.5, 1.0, 1.0, after 2.5, 1.0, 1.0." in lines
    assert "**Failed**: no disk" in lines
    assert lines[-1] == "![A chart](figures/a.png)"
    assert lines.index("## Lag") < lines.index("## Freshness")
    assert "Cost" not in page
    page = render_page({**CONTENT, "rounds": 2}, TITLES, {}, [])
    assert "- scale 0.5, 2 rounds;" in page and "not installed" not in page
