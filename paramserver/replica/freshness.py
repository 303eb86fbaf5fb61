"""How old an update is when it becomes visible: a histogram of fixed size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Freshness", "Histogram"]

# Buckets from 0.1 ms on, four to each doubling, up to 13 days.
_FIRST_S = 1e-4
_PER_DOUBLING = 4
_NUM_BUCKETS = 136
# Of these, the bounds that metrics tell: doublings, from 0.8 ms to 210 s.
_TOLD_DOUBLINGS = range(3, 22)


class Histogram:
    """Counts of durations. One thread adds; others may read, and see a moment's counts about right.

    Attributes:
        count: Durations added.
        sum_s: Of all, seconds.
        max_s: Longest, seconds.
    """

    def __init__(self) -> None:
        """Count nothing yet."""
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0
        self._buckets = [0] * _NUM_BUCKETS

    def add(self, duration_s: float, weight: int = 1) -> None:
        """Count a duration `weight` times; one below zero (another machine's clock) counts as zero."""
        duration_s = max(duration_s, 0.0)
        place = 0 if duration_s <= _FIRST_S else math.ceil(_PER_DOUBLING * math.log2(duration_s / _FIRST_S))
        self._buckets[min(place, _NUM_BUCKETS - 1)] += weight
        self.count += weight
        self.sum_s += duration_s * weight
        self.max_s = max(self.max_s, duration_s)

    def cumulative(self) -> list[tuple[float, int]]:
        """Return (bound in seconds, durations that are not above it) of rising bounds, each twice the one before.

        They are always the same ones: 0.8 ms to 210 s, then infinity.
        """
        sums = [0, *accumulate(self._buckets)]
        told = [(_FIRST_S * 2**doubling, sums[_PER_DOUBLING * doubling + 1]) for doubling in _TOLD_DOUBLINGS]
        return [*told, (math.inf, sums[-1])]

    def percentile(self, percent: float) -> float:
        """Return a duration that `percent` of all are not above, seconds, up to a fifth too high; 0 without any."""
        wanted = self.count * percent / 100
        seen = 0
        for place, count in enumerate(self._buckets):
            seen += count
            if count and seen >= wanted:
                return min(_FIRST_S * 2 ** (place / _PER_DOUBLING), self.max_s)
        return self.max_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Freshness:
    """How far behind one shard's part of a replica is.

    Attributes:
        shard: Index.
        visible_seq: Last record of the shard's log that lookups see.
        last_seq: Last durable record, as the shard last told.
        is_behind: Rows are known to be there that lookups do not see yet.
        lag_s: Age of the newest visible update while `is_behind`; else 0: an idle shard is not stale. Seconds.
        lag_steps: Steps that have been fetched from this shard and are not visible.
        delay: From the trainer's clock at an update to its being visible here, of each record.
        pending_bytes: Memory of what has been fetched from this shard and is not visible.
    """

    shard: int
    visible_seq: int
    last_seq: int
    is_behind: bool
    lag_s: float
    lag_steps: int
    delay: Histogram
    pending_bytes: int = 0
