"""What a streamer tells of itself."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["LagReservoir", "StreamerStats"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamerStats:
    """A streamer at one moment.

    Attributes:
        step: Last step boundary.
        acked_step: Last step of which every change is durable on every shard; -1 before the first.
        num_dirty_rows: Rows that have changed and are not in any flush yet; with `device_pipeline`, of tables on a
            device, those that the last flush has left, and one more if rows have changed since.
        num_inflight_flushes: Flushes that are handed over and not durable on every shard.
        inflight_bytes: Their rows, bytes.
        spooled_bytes: What of it lies in the spool, bytes on disk.
        num_flushes: Flushes that are durable on every shard.
        num_rows_sent: Their rows.
        num_reconnects: Connections made anew, of all shards.
        num_connected: Shards with an open session.
        lag_p50_s: Median time from an update to durable on every shard, of a sample of the flushes, each by its oldest
            change; None before the first.
        lag_p99_s: The same, 99th percentile.
        last_error: Why streaming has stopped, or else what keeps a shard from acking; None when all is well.
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
    """A uniform sample of bounded size of all that was added. Not thread-safe.

    Source: J. S. Vitter, "Random Sampling with a Reservoir", ACM TOMS 11 (1985), algorithm R.
    """

    def __init__(self, max_samples: int = 4096, *, seed: int = 0) -> None:
        """Begin empty.

        Args:
            max_samples: Size of the sample.
            seed: Of the generator that chooses what is kept.
        """
        self._max_samples = max_samples
        self._samples: list[float] = []
        self._num_added = 0
        self._random = random.Random(seed)

    def add(self, lag_s: float) -> None:
        """Take a lag, seconds, into account."""
        self._num_added += 1
        if len(self._samples) < self._max_samples:
            self._samples.append(lag_s)
        else:
            place = self._random.randrange(self._num_added)
            if place < self._max_samples:
                self._samples[place] = lag_s

    def percentile_s(self, percent: float) -> float | None:
        """Return the smallest sample that `percent` of the samples do not exceed; None when there are none."""
        ordered = sorted(self._samples)
        return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))] if ordered else None
