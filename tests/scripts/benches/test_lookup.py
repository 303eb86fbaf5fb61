"""`headrace bench lookup`, with a small table: that it measures, not what."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.errors import ConfigError
from headrace.scripts.benches.lookup import LookupConfig, LookupResult, measure_disk
from headrace.scripts.benches.peers import has_redis


def test_a_small_lookup_bench(bench: Callable[..., Any]) -> None:
    """All figures are there, no lookup failed, no row was missing, and updates came."""
    sizes = ["--rows=20000", "--dim=8", "--redis-rows=5000", "--disk-rows=8192", "--lookups=20", "--rounds=1"]
    figures, _ = bench("lookup", *sizes)
    ratios = ["ratio_vs_torch", "swap_p99_ratio", "miss_ratio_vs_rocksdb", "ratio_cpu_vs_torch", "ratio_idle_vs_torch"]
    for name in ratios:
        assert 0 < figures[name] < math.inf
    assert (figures["ratio_vs_redis"] is not None) == has_redis()
    assert figures["failed_lookups"] == figures["missing_ids"] == 0
    assert figures["updates_rows_per_s"] > 0
    assert figures["config"]["num_rows"] == 20_000


def test_figures_come_from_medians_and_percentiles() -> None:
    """Ratios are of medians, that of the switch of 99th percentiles; without Redis its ratio is None."""
    result = LookupResult()
    result.before_ms, result.during_ms = [1.0] * 100, [1.0] * 90 + [3.0] * 10
    result.disk = {"miss": 2.0, "rocksdb": 4.0}
    for name, seconds in (("headrace", 2.0), ("torch", 1.0), ("headrace_idle", 4.0), ("torch_idle", 1.0)):
        for factor in (1, 1, 9):
            result.add(name, 10, seconds * factor, seconds)
    figures = result.figures(LookupConfig())
    assert figures["ratio_vs_torch"] == 0.5
    assert figures["ratio_idle_vs_torch"] == 0.25
    assert figures["swap_p99_ratio"] == 3.0
    assert figures["miss_ratio_vs_rocksdb"] == 0.5
    assert figures["ratio_vs_redis"] is None


def test_a_table_on_disk_misses_what_was_never_looked_up(tmp_path: Path) -> None:
    """Both sides read the rows."""
    rates = measure_disk(tmp_path, 20_000, 4, num_batches=2)
    assert rates["miss"] > 0 and rates["rocksdb"] > 0


def test_a_table_smaller_than_a_batch_is_refused() -> None:
    """The message names the flag."""
    with pytest.raises(ConfigError, match="--rows: 100"):
        LookupConfig(num_rows=100)
