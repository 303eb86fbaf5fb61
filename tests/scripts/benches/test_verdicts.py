"""The targets, which the documentation names as well."""

from __future__ import annotations

import re
from pathlib import Path

from headrace.scripts.benches.verdicts import TARGETS, judge
from headrace.scripts.commands.bench import _BENCHES

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks.md"


def test_figures_are_judged_against_their_targets() -> None:
    """At the limit a target is met, on either side; a limit may be a figure; without a value there is no verdict."""
    figures = {"ratio_vs_torch": 0.5, "ratio_vs_redis": None, "swap_p99_ratio": 2.01}
    found = {verdict.name: verdict for verdict in judge("lookup", figures)}
    assert (found["ratio_vs_torch"].is_met, found["swap_p99_ratio"].is_met) == (True, False)
    assert (found["swap_p99_ratio"].value, found["swap_p99_ratio"].target) == ("2.01", "≤ 2")
    assert (found["ratio_vs_redis"].value, found["ratio_vs_redis"].is_met) == ("not measured", None)
    figures = {"acked_vs_publish": 0.6, "recovery_vs_direct_get": 0.4, "ack_p50_ms": 4.0, "ack_p50_bound_ms": 4.0}
    assert [verdict.is_met for verdict in judge("replicated", figures)] == [True, True, False]


def test_the_documentation_has_the_same_targets() -> None:
    """The table of targets in docs/benchmarks.md and the one in the code do not differ."""
    assert TARGETS.keys() == {name for name, _ in _BENCHES}
    page = PAGE.read_text()
    for bench, targets in TARGETS.items():
        for target in targets:
            limit = "" if isinstance(target.limit, str) else f"{target.limit:g} \\|"
            row = rf"^\| {bench} \| `{target.name}` \| {'≥' if target.is_least else '≤'} {limit}"
            assert re.search(row, page, re.MULTILINE), row
