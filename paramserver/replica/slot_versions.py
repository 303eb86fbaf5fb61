"""Versions and presence of a table's rows in memory, by slot, for whatever columns are written together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.row_records import DELETED, MISSING, PRESENT
from headrace.schemas.tables import ColumnShard

__all__ = ["DELETED", "MISSING", "PRESENT", "VERSION_SIZE_BYTES", "PartVersions", "SlotVersions"]

_Slots = npt.NDArray[np.int64]

VERSION_SIZE_BYTES = 13
"""What a row takes, for each part of its columns."""


@dataclass(slots=True)
class PartVersions:
    """(epoch, step) and presence of each slot, of some columns.

    Attributes:
        shard: The columns.
        epochs: uint32[slots].
        steps: int64[slots].
        presence: uint8[slots].
    """

    shard: ColumnShard
    epochs: npt.NDArray[np.uint32]
    steps: npt.NDArray[np.int64]
    presence: npt.NDArray[np.uint8]

    @property
    def size_bytes(self) -> int:
        """Memory that they take."""
        return self.epochs.nbytes + self.steps.nbytes + self.presence.nbytes

    def is_older(self, slots: _Slots, epoch: Any, step: Any) -> npt.NDArray[np.bool_]:
        """Return bool[n]: which of some slots have no newer version than the given one, or ones."""
        epochs, steps = self.epochs[slots], self.steps[slots]
        older: npt.NDArray[np.bool_] = (epochs < epoch) | ((epochs == epoch) & (steps <= step))
        return older

    def write(self, slots: _Slots, presence: int, epoch: Any, step: Any) -> None:
        """Note what was written into slots."""
        self.epochs[slots], self.steps[slots], self.presence[slots] = epoch, step, presence


class SlotVersions:
    """Versions of all columns, in parts: columns that were always written together are one.

    Attributes:
        presence: uint8[slots]: a row is present where any of its parts is.
        num_present: Rows that are.
    """

    def __init__(self, num_slots: int, whole: ColumnShard) -> None:
        """Begin with all rows missing."""
        self.num_present = 0
        self._parts = [_new_part(whole, num_slots)]
        self.presence = self._parts[0].presence

    @property
    def size_bytes(self) -> int:
        """Memory that they take."""
        extra = self.presence.nbytes if len(self._parts) > 1 else 0
        return extra + sum(part.size_bytes for part in self._parts)

    def parts_of(self, shard: ColumnShard) -> list[PartVersions]:
        """Return the parts that together are some columns, after splitting those that are more."""
        end = shard.offset + shard.width
        for cut in (shard.offset, end):
            self._split(cut)
        return [part for part in self._parts if shard.offset <= part.shard.offset < end]

    def write(self, part: PartVersions, slots: _Slots, presence: int, epoch: Any, step: Any) -> None:
        """Note what was written into slots of a part.

        Args:
            part: One of `parts_of`.
            slots: int64[n], each once.
            presence: `PRESENT` or `DELETED`.
            epoch: Of all, or one a slot.
            step: Of all, or one a slot.
        """
        before = np.count_nonzero(self.presence[slots] == PRESENT)
        part.write(slots, presence, epoch, step)
        if len(self._parts) > 1:
            of_parts = np.stack([one.presence[slots] for one in self._parts])
            self.presence[slots] = np.where((of_parts == PRESENT).any(axis=0), PRESENT, of_parts.max(axis=0))
        self.num_present += int(np.count_nonzero(self.presence[slots] == PRESENT) - before)

    def grow(self, num_slots: int) -> None:
        """Make room for so many slots, more than there are."""
        size = self.presence.size
        parts = [_new_part(part.shard, num_slots) for part in self._parts]
        for new, old in zip(parts, self._parts, strict=True):
            new.epochs[:size], new.steps[:size], new.presence[:size] = old.epochs, old.steps, old.presence
        presence = parts[0].presence
        if len(parts) > 1:
            presence = np.zeros(num_slots, np.uint8)
            presence[:size] = self.presence
        self._parts, self.presence = parts, presence

    def _split(self, cut: int) -> None:
        for number, part in enumerate(self._parts):
            first, end = part.shard.offset, part.shard.offset + part.shard.width
            if first < cut < end:
                if len(self._parts) == 1:
                    self.presence = part.presence.copy()
                left = ColumnShard(offset=first, width=cut - first)
                right = ColumnShard(offset=cut, width=end - cut)
                copied = PartVersions(right, part.epochs.copy(), part.steps.copy(), part.presence.copy())
                part.shard = left
                self._parts.insert(number + 1, copied)
                return


def _new_part(shard: ColumnShard, num_slots: int) -> PartVersions:
    return PartVersions(
        shard, np.zeros(num_slots, np.uint32), np.zeros(num_slots, np.int64), np.zeros(num_slots, np.uint8)
    )
