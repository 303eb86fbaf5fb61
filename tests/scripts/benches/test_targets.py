"""The targets: how a figure is judged, and that the documentation names the same ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.scripts.benches.suite import PARTS
from headrace.scripts.benches.targets import TARGETS, Target, judge

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
