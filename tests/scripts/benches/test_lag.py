"""The sweep of lag: its arithmetic, and that a small one measures every load."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.scripts.benches.lag import LagConfig, find_knee, measure


def test_the_knee_is_the_last_load_before_the_lag_rises() -> None:
    """Counted from the least lag; a high lag at a low load is not a knee."""
    loads = [0.1, 0.5, 0.9, 1.1]
    assert find_knee(loads, [2.0, 2.0, 6.0, 50.0]) == 0.9
    assert find_knee(loads, [2.0, 2.0, 6.1, 50.0]) == 0.5
    assert find_knee(loads, [9.0, 2.0, 3.0, 50.0]) == 0.9
    assert find_knee(loads, [2.0, 2.0, 3.0, 4.0]) is None
    assert find_knee(loads, [2.0, 2.5, 3.0, 4.0], factor=1.4) == 0.5


def test_a_load_lasts_until_it_has_its_batches() -> None:
    """A small load takes longer than the block, a large one has more batches."""
    config = LagConfig(block_s=2.0, min_batches=50, num_lookups=100)
    assert (config.num_batches(1000.0), config.num_batches(10_000.0)) == (50, 200)


@pytest.mark.slow
def test_a_small_sweep(tmp_path: Path) -> None:
    """Each load has its percentiles, of what is seen and of what is acked, and capacity is what was shown."""
    config = LagConfig(
        loads=(0.2, 0.5),
        block_s=0.1,
        min_batches=8,
        capacity_batches=16,
        num_rows=5000,
        dim=4,
        num_lookups=100,
        num_rounds=1,
        folder=tmp_path,
    )
    found = measure(config, lambda stage: None)
    (capacity,) = found["capacity_rows_per_s"]
    assert [of_load[0] for of_load in found["offered_rows_per_s"]] == [0.2 * capacity, 0.5 * capacity]
    for p50, p99, acked in zip(found["p50_ms"], found["p99_ms"], found["acked_p50_ms"], strict=True):
        # A batch is acked first; but the ack is seen by another process, which may have been held up.
        assert 0 < p50[0] <= p99[0] and acked[0] > 0
    assert 0 < found["floor_p50_ms"] <= found["floor_p99_ms"]
    assert list(tmp_path.iterdir()) == []
