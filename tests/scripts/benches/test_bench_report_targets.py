"""The targets: how a figure is judged, and that the documentation names the same ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.scripts.benches.bench_all_parts import PARTS
from headrace.scripts.benches.bench_report_targets import FIGURES, Figure, judge

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks.md"


def test_figures_are_judged_against_their_targets() -> None:
    """At the target it is met, on either side; without a value or a target nothing is said."""
    at = {
        "ratio_vs_torch": 0.5,
        "ratio_vs_redis": None,
        "swap_p99_ratio": 2.01,
        "failed_lookups": 0,
        "median_rows_per_s": {"headrace": 5.0, "torch": 10.0},
    }
    found = {verdict.name: verdict for verdict in judge("lookup", at)}
    assert (found["ratio_vs_torch"].is_met, found["swap_p99_ratio"].is_met) == (True, False)
    assert (found["failed_lookups"].is_met, found["ratio_vs_redis"].is_met) == (True, None)
    assert found["ratio_vs_torch"].beside == (5.0, 10.0, "rows/s")
    assert found["ratio_vs_redis"].beside is None
    assert found["miss_ratio_vs_rocksdb"].seen is None


def test_a_target_can_be_another_figure() -> None:
    """The memory that streaming may add is the bound that the bench computes."""
    found = {
        v.name: v for v in judge("overhead", {"extra_bytes": 11, "outage_extra_bytes": 9, "extra_bytes_bound": 10})
    }
    assert (found["extra_bytes"].is_met, found["outage_extra_bytes"].is_met) == (False, True)


def test_memory_of_files_is_judged_by_its_growth() -> None:
    """The whole table's peak over that of a fifth, whichever comes first."""
    for peaks in ({"1000": 100.0, "5000": 116.0}, {"5000": 116.0, "1000": 100.0}):
        (growth,) = [v for v in judge("export", {"peak_rss_bytes": peaks}) if v.name == "peak_rss_growth"]
        assert (growth.seen, growth.is_met) == (pytest.approx(1.16), False)


def test_figures_are_of_parts() -> None:
    """Every figure belongs to a part that can run, and none is there twice."""
    assert FIGURES.keys() <= {part.name for part in PARTS}
    for figures in FIGURES.values():
        assert len({figure.name for figure in figures}) == len(figures)


@pytest.mark.parametrize(
    ("part", "figure"),
    [
        pytest.param(part, figure, id=f"{part}-{figure.name}")
        for part, figures in FIGURES.items()
        for figure in figures
        if isinstance(figure.target, int | float)
    ],
)
def test_the_documentation_has_the_same_targets(part: str, figure: Figure) -> None:
    """The table of targets in docs/benchmarks.md and the one in the code do not differ."""
    sign = "≥" if figure.is_least else "≤"
    row = rf"^\| {part} \| `{figure.name}` \| {sign} {figure.target:g} \|"
    assert re.search(row, PAGE.read_text(), re.MULTILINE), row
