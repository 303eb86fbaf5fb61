"""Figures of a streamer: a snapshot of its state, and a sample of its lags."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["LagReservoir", "StreamerStats"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamerStats:
    """State of a streamer at one moment.

    Attributes:
        step: Number of the last step that has ended.
        acked_step: Last step of which every change is durable on every shard; -1 before the first.
        num_dirty_rows: Changed rows that are in no flush yet. For tables on a device (`device_pipeline`), the rows that
            the last flush has left, plus one if rows have changed since.
        num_inflight_flushes: Flushes handed over to delivery and not durable on every shard yet.
        inflight_bytes: Size of their rows.
        spooled_bytes: The part of it that is in the spool, bytes on disk.
        num_flushes: Flushes that are durable on every shard.
        num_rows_sent: Rows in those flushes.
        num_reconnects: Times that a connection to a shard was replaced.
        num_connected: Shards with an open session.
        lag_p50_s: Median time from an update until it is durable on every shard, seconds, over a sample of the flushes,
            each measured from its oldest change; None before the first flush.
        lag_p99_s: 99th percentile of the same.
        last_error: Why streaming has stopped, or what keeps a shard from acking; None if all is well.
    """

    step: int
    acked_step: int
    num_dirty_rows: int
    num_inflight_flushes: int
    inflight_bytes: int
    spooled_bytes: int
    num_flushes: int
    num_rows_sent: int
    num_reconnects: int
    num_connected: int
    lag_p50_s: float | None
    lag_p99_s: float | None
    last_error: str | None


class LagReservoir:
    """A uniform sample of bounded size of all added lags. Not thread-safe.

    Source: J. S. Vitter, "Random Sampling with a Reservoir", ACM TOMS 11 (1985), algorithm R.
    """

    def __init__(self, max_samples: int = 4096, *, seed: int = 0) -> None:
        self._max_samples = max_samples
        self._samples: list[float] = []
        self._num_added = 0
        self._random = random.Random(seed)

    def add(self, lag_s: float) -> None:
        """Add a lag, seconds."""
        self._num_added += 1
        if len(self._samples) < self._max_samples:
            self._samples.append(lag_s)
        else:
            place = self._random.randrange(self._num_added)
            if place < self._max_samples:
                self._samples[place] = lag_s

    def percentile_s(self, percent: float) -> float | None:
        """Return the smallest sample that `percent` of the samples do not exceed; None without samples."""
        ordered = sorted(self._samples)
        return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))] if ordered else None
