"""`headrace bench restore`, with a small table: that it measures, not what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.scripts.benches.harness import Rounds
from headrace.scripts.benches.restore import RestoreConfig, make_figures


def test_figures() -> None:
    """The ratio is of the medians: a restore that takes longer than a read is below one."""
    took_s = Rounds({"scan": [1.0, 9.0, 1.0], "restore": [2.0, 2.0, 0.5]})
    figures = make_figures(RestoreConfig(num_rows=1000), took_s)
    assert figures["restore_vs_scan"] == 0.5
    assert figures["rows_per_s"] == {"scan": 1000, "restore": 500}


def test_a_small_run(bench: Callable[..., Any]) -> None:
    """Every row is restored and read in each round."""
    figures, exit_code = bench("restore", "--rows=1000", "--dim=8", "--rounds=2")
    assert exit_code == (0 if figures["restore_vs_scan"] >= 0.7 else 1)
    assert {kind: len(rounds) for kind, rounds in figures["took_s"].items()} == {"scan": 2, "restore": 2}
