"""The sample of lags."""

from __future__ import annotations

from headrace.streamer.stats import LagReservoir


def test_percentiles_of_few() -> None:
    """Of few lags the percentiles are exact; of none there are none."""
    lags = LagReservoir()
    assert lags.percentile_s(50) is None
    for lag_s in range(1, 101):
        lags.add(float(lag_s))
    assert (lags.percentile_s(0), lags.percentile_s(50), lags.percentile_s(99)) == (1, 51, 100)


def test_sample_is_bounded_and_fair() -> None:
    """Of many lags a bounded sample is kept whose median is near the true one."""
    lags = LagReservoir(max_samples=500, seed=7)
    for number in range(100_000):
        lags.add(float(number))
    assert len(lags._samples) == 500
    median = lags.percentile_s(50)
    assert median is not None
    assert 40_000 < median < 60_000
