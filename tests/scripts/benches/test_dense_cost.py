"""`headrace bench dense`, with a small model: that it measures, not what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.scripts.benches.dense_cost import make_figures
from headrace.scripts.benches.harness import Rounds


def test_figures() -> None:
    """The ratio is the median of the rounds' own ratios, each to the blocks before and after: drift does not count."""
    step_s = Rounds({"dense": [1.1, 6.0, 20.0], "rows": [0.5, 1.5, 8.5, 1.5]})
    figures = make_figures(step_s, [0.1, 0.3, 7.0], 100)
    assert figures["dense_step_ratio"] == 1.2
    assert figures["dense_visible_extra_p50_s"] == 0.3


def test_a_small_run(bench: Callable[..., Any]) -> None:
    """Each dense step of each block becomes visible."""
    sizes = ["--layers=1", "--width=64", "--batch=8", "--rows=1000", "--interval-s=0.2", "--rounds=2"]
    figures, exit_code = bench("dense", *sizes, "--intervals=2")
    is_met = figures["dense_step_ratio"] <= 1.01 and figures["dense_visible_extra_p50_s"] <= 0.5
    assert exit_code == (0 if is_met else 1)
    assert len(figures["delays_s"]) == 4 and all(delay > 0 for delay in figures["delays_s"])
    row_ids = 4 + 1 + 4 + 1 + 1 + 1  # a row has up to 1,024 elements
    assert figures["dense_bytes"] == 4 * (64 * 64 + 64 + 64 * 64 + 64 + 64 + 1) + 8 * row_ids
