"""`headrace bench reshard`, with few rows: that it measures, not what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.timeout(400)
def test_a_small_run(bench: Callable[..., Any]) -> None:
    """Every target has a figure; the copies have just the rows that must move, and no lookup fails."""
    figures, exit_code = bench("reshard", "--rows=20000", "--rounds=1")
    assert exit_code in (0, 1)
    for name in ("write_pause_p99_s", "copy_vs_scan_and_load", "ingest_during_ratio", "lookup_p99_during_ratio"):
        assert figures[name] > 0, name
    assert figures["write_pause_p50_s"] <= figures["write_pause_p99_s"] <= max(figures["reshards"]["longest_s"])
    assert 1 <= figures["bytes_vs_least"] < 1.1
    assert 0 < figures["planned_vs_measured_s"]["least"] <= figures["planned_vs_measured_s"]["most"]
    assert figures["plan_1000_shards_s"] > 0
    assert figures["step_during_ratio"] > 0
    assert figures["num_lookups"] > 100
    assert figures["failed_lookups"] == 0
    for way in ("2→3", "3→2", "2→4", "4→8", "8→4", "4→2"):
        (took_s,) = figures["reshards"][f"reshard_s {way}"]
        assert took_s > 0
    assert figures["num_switches"] >= 2 + 2 + 2 + 4 + 4 + 2
