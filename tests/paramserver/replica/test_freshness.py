"""Durations counted in buckets of fixed bounds."""

from __future__ import annotations

import math
import random

import pytest

from headrace.paramserver.replica.freshness import Histogram


@pytest.mark.parametrize("seed", range(5))
def test_cumulative_counts_are_those_of_the_durations(seed: int) -> None:
    """Each bound has the number of durations that are not above it, and the last has all."""
    generator = random.Random(seed)
    durations = [10 ** generator.uniform(-5, 7) for _ in range(500)] + [0.0, -1.0, 1e9]
    histogram = Histogram()
    for duration_s in durations:
        histogram.add(duration_s)
    told = histogram.cumulative()
    assert told == [(bound_s, sum(duration_s <= bound_s for duration_s in durations)) for bound_s, _ in told]
    assert told[-1] == (math.inf, histogram.count)


def test_bounds_are_always_the_same() -> None:
    """Bounds double from 0.8 ms to 210 s, counts or not, so that histograms of several replicas can be added up."""
    bounds = [bound_s for bound_s, count in Histogram().cumulative() if count == 0]
    assert bounds[:-1] == pytest.approx([0.0008 * 2**i for i in range(19)])
    assert (bounds[-2], bounds[-1]) == (pytest.approx(209.7, rel=1e-3), math.inf)
