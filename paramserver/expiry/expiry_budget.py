"""A table's row budget: the cut that leaves so many rows, the least recently updated going first.

Exact, with bounded memory: rows are counted by version, and where versions are too many, by ranges of steps, which one
more pass over the rows takes apart. Ties, rows of one version, go by row id, the lowest first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["BudgetCut", "Recency", "StepRange"]

_Ids = npt.NDArray[np.int64]
_MAX_BUCKETS = 65_536


@dataclass(frozen=True, slots=True, order=True)
class StepRange:
    """The steps `first` to `end` - 1 of an epoch."""

    epoch: int
    first: int
    end: int


class BudgetCut:
    """Which rows go: all below a version, and the first so many of that version."""

    def __init__(self, epoch: int, step: int, num_left: int) -> None:
        """Cut at (epoch, step).

        Args:
            epoch: First half of the version.
            step: Second half.
            num_left: Rows of exactly this version that go, too.
        """
        self.epoch, self.step, self.num_left = epoch, step, num_left

    def take(self, epochs: _Ids, steps: _Ids, may_go: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return which of some rows go, bool[n]; to be called for all rows in the order of their ids.

        Args:
            epochs: int64[n].
            steps: int64[n].
            may_go: bool[n]: which of them the cut was counted over.
        """
        below: npt.NDArray[np.bool_] = (epochs < self.epoch) | ((epochs == self.epoch) & (steps < self.step))
        ties = np.flatnonzero((epochs == self.epoch) & (steps == self.step) & may_go)[: self.num_left]
        self.num_left -= ties.size
        below &= may_go
        below[ties] = True
        return below


class Recency:
    """Counts rows by version, in a bounded number of buckets."""

    def __init__(self, within: StepRange | None = None, *, max_buckets: int = _MAX_BUCKETS) -> None:
        """Count nothing yet.

        Args:
            within: Count only rows of these versions.
            max_buckets: Beyond it, twice as many steps share one. An epoch has one at least.
        """
        self._within = within
        self._max_buckets = max_buckets
        self._shift = 0
        self._counts: dict[tuple[int, int], int] = {}

    @property
    def num_rows(self) -> int:
        """Rows counted."""
        return sum(self._counts.values())

    def add(self, epochs: _Ids, steps: _Ids) -> None:
        """Count rows, int64[n] each."""
        if self._within is not None:
            some = (epochs == self._within.epoch) & (steps >= self._within.first) & (steps < self._within.end)
            epochs, steps = epochs[some], steps[some]
        for epoch in np.unique(epochs).tolist():
            buckets, counts = np.unique(steps[epochs == epoch] >> self._shift, return_counts=True)
            self._count(epoch, buckets.tolist(), counts.tolist())

    def _count(self, epoch: int, buckets: list[int], counts: list[int]) -> None:
        for bucket, count in zip(buckets, counts, strict=True):
            self._counts[epoch, bucket] = self._counts.get((epoch, bucket), 0) + count
        while len(self._counts) > self._max_buckets and self._shift < 63:
            self._shift += 1
            coarser: dict[tuple[int, int], int] = {}
            for (of, bucket), count in self._counts.items():
                coarser[of, bucket >> 1] = coarser.get((of, bucket >> 1), 0) + count
            self._counts = coarser

    def cut(self, num_rows: int) -> tuple[BudgetCut, None] | tuple[StepRange, int]:
        """Return where the `num_rows` least recently updated rows end.

        Returns:
            The cut and None; or a range of steps that has to be counted on its own, and how many rows of it go.
        """
        left = num_rows
        for (epoch, bucket), count in sorted(self._counts.items()):
            if left <= count:
                if self._shift == 0:
                    return BudgetCut(epoch, bucket, left), None
                return StepRange(epoch, bucket << self._shift, (bucket + 1) << self._shift), left
            left -= count
        last_epoch, last = max(self._counts, default=(0, 0))
        return BudgetCut(last_epoch, (last + 1) << self._shift, 0), None
