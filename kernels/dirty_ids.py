"""Which rows changed, where ids are too many for a bit each: a set whose memory goes by the ids that are in it.

For tables with virtual ids (any int64 ≥ 0), and for tables so long that even a bitmap is much. Ids are kept sorted;
what was marked since is a list beside them, no longer than they are, that is sorted into them when it is full. Sorting
many ids at once takes numpy some 10 ns each, an open-addressing hash table made of numpy's operations more than 100.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.dirty_rows import DirtyRows, distinct, ids_of

__all__ = ["VIRTUAL_ROWS", "DirtyIds", "DirtySet", "bitmap_bytes", "dirty_set"]

VIRTUAL_ROWS = 2**63
"""`num_rows` of a set that takes any id."""

# The list's length while few ids, but some, are in the set: 64 KiB.
_MIN_LISTED = 8192

_Ids = npt.NDArray[np.int64]


class DirtyIds:
    """The set of changed rows of one table, by id; does all that `DirtyRows` does but `mark_all`.

    Takes at most 16 bytes an id and 64 KiB, and three times that while it sorts. Not thread-safe: marked and taken on
    the training thread.

    Attributes:
        num_rows: Ids are below it.
    """

    def __init__(self, num_rows: int = VIRTUAL_ROWS) -> None:
        """Start with no id dirty.

        Args:
            num_rows: Ids are below it, ≥ 0; `VIRTUAL_ROWS` takes any.
        """
        if num_rows < 0:
            raise ValueError(f"num_rows {num_rows} is negative")
        self.num_rows = num_rows
        self._sorted: _Ids = np.empty(0, np.int64)
        # Marked since, `_num_listed` of them: in any order, may repeat, may be in `_sorted` too.
        self._list: _Ids = np.empty(0, np.int64)
        self._num_listed = 0

    def mark(self, row_ids: torch.Tensor) -> None:
        """Add ids; negative ones are skipped, and an id may be named many times.

        Args:
            row_ids: int32 or int64, any shape, order and device; not kept. On a GPU this waits for the device.

        Raises:
            IndexError: An id is not below `num_rows`; nothing is marked.
        """
        ids = ids_of(row_ids, self.num_rows)
        if not ids.size:
            return
        end = self._num_listed + ids.size
        if end > self._list.size:
            self._merge(ids)
        else:
            self._list[self._num_listed : end] = ids
            self._num_listed = end

    def add(self, other: DirtySet) -> None:
        """Add every row of another set, of the same table.

        Raises:
            ValueError: The other is of a table with another number of rows.
        """
        if other.num_rows != self.num_rows:
            raise ValueError(f"rows of a table of {other.num_rows} cannot be added to one of {self.num_rows}")
        for part in other.parts():
            self.mark(part)

    def discard(self, row_ids: torch.Tensor) -> None:
        """Remove ids, dirty or not; negative ones are skipped. Costs in proportion to all that are dirty.

        Args:
            row_ids: As for `mark`.

        Raises:
            IndexError: An id is not below `num_rows`; nothing is removed.
        """
        ids = ids_of(row_ids, self.num_rows)
        if ids.size and not self.is_empty:
            self._merge()
            self._sorted = self._sorted[~_is_in(self._sorted, distinct(ids))]

    def contains(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return bool[n] on the CPU: which of some ids are dirty.

        Args:
            row_ids: int64[n], each ≥ 0.
        """
        self._merge()
        return torch.from_numpy(_is_in(row_ids.cpu().numpy(), self._sorted))

    def take(
        self, max_rows: int | None = None, *, first_row: int = 0, note: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """Remove and return the lowest dirty ids from `first_row` on; costs in proportion to all that are dirty.

        Args:
            max_rows: At most so many, ≥ 0; None takes all.
            first_row: Ids below it stay, ≥ 0.
            note: Called with the ids before they are removed, so that whoever is interrupted (Ctrl-C) can mark them
                again: no id is neither here nor noted.

        Returns:
            int64[n] on the CPU, ascending, unique, contiguous, owned by the caller.
        """
        self._merge()
        ids = self._sorted
        first = int(np.searchsorted(ids, first_row))
        end = ids.size if max_rows is None else min(ids.size, first + max_rows)
        # Copies, of a part: a view would keep all of the memory.
        taken = torch.from_numpy(ids if end - first == ids.size else ids[first:end].copy())
        if note is not None:
            note(taken)
        if end - first == ids.size:
            self.clear()
        else:
            self._sorted = np.concatenate((ids[:first], ids[end:]))
        return taken

    def parts(self) -> Iterator[torch.Tensor]:
        """Yield the dirty ids, which stay dirty: int64 on the CPU, ascending. Not to be marked meanwhile."""
        self._merge()
        if self._sorted.size:
            yield torch.from_numpy(self._sorted.copy())

    def clear(self) -> None:
        """Remove every id, and give the memory back."""
        self._sorted, self._list, self._num_listed = np.empty(0, np.int64), np.empty(0, np.int64), 0

    @property
    def is_empty(self) -> bool:
        """Whether no id is dirty."""
        return not self._num_listed and not self._sorted.size

    @property
    def count(self) -> int:
        """Number of dirty ids; costs in proportion to it.

        Thread: any; of what is marked or taken meanwhile some may count.
        """
        ids = self._sorted
        listed = distinct(self._list[: self._num_listed])
        return int(ids.size + listed.size - _is_in(listed, ids).sum())

    @property
    def size_bytes(self) -> int:
        """Memory taken, bytes."""
        return self._sorted.nbytes + self._list.nbytes

    def _merge(self, more: _Ids | None = None) -> None:
        """Sort what was marked, and more, into the sorted ids."""
        listed = self._list[: self._num_listed]
        ids = np.sort(listed if more is None else np.concatenate((listed, more)))
        if not ids.size:
            return
        if self._sorted.size:
            ids = np.concatenate((self._sorted, ids))
            ids.sort(kind="stable")  # two runs: a merge
        self._sorted = ids[np.concatenate(([True], ids[1:] != ids[:-1]))]
        # As long as what is sorted: then sorting in costs each id about as much as the sorting itself.
        self._list, self._num_listed = np.empty(max(_MIN_LISTED, self._sorted.size), np.int64), 0


DirtySet = DirtyRows | DirtyIds
"""Either kind of set of changed rows."""


def bitmap_bytes(num_rows: int) -> int:
    """Return about how many bytes a `DirtyRows` of so many rows takes."""
    return num_rows // 8


def dirty_set(num_rows: int, *, max_bitmap_bytes: int) -> DirtySet:
    """Return an empty set for a table: a bitmap, or one of ids where a bitmap would be too large.

    Args:
        num_rows: Rows of the table; `VIRTUAL_ROWS` for any id.
        max_bitmap_bytes: Largest bitmap.
    """
    return DirtyRows(num_rows) if bitmap_bytes(num_rows) <= max_bitmap_bytes else DirtyIds(num_rows)


def _is_in(ids: _Ids, ascending: _Ids) -> npt.NDArray[np.bool_]:
    """Return which ids are in an array that ascends."""
    if not ascending.size:
        return np.zeros(ids.size, np.bool_)
    at = np.minimum(np.searchsorted(ascending, ids), ascending.size - 1)
    is_in: npt.NDArray[np.bool_] = ascending[at] == ids
    return is_in
