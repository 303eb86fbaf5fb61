"""A hash table from row ids to slots 1, 2, 3 …, with open addressing. Every operation is one numpy call on a batch.

A lookup of a few thousand ids costs a few passes over them, so passes are what counts. An id and its slot share a cell
of 16 bytes and are fetched together. Most ids are in the first cell of their chain, and many others in the second. The
rest are searched in a window of cells at a time, not cell by cell.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["IdMap"]

_Ids = npt.NDArray[np.int64]
# int64[size, 2]: id and slot. `take` along axis 0 moves whole cells, 10 times as fast as an index array.
_Cells = npt.NDArray[np.int64]

# Id and slot of an empty cell.
_NO_ID, _NO_SLOT = -1, 0
# Fibonacci hashing spreads consecutive ids. The fold before it lets the high half of an id count.
_MIX = np.uint64(0x9E3779B97F4A7C15)
_FOLD = np.uint64(32)
# A higher load means longer chains and more probes; at 16 bytes a cell, half-empty is cheap.
_MAX_LOAD = 0.5
# Offsets of the cells that one probe compares, by probe; the last entry repeats.
_WINDOWS = (np.arange(1, 2), np.arange(1, 9), np.arange(1, 33))


class IdMap:
    """Maps ids ≥ 0 to slots 1, 2, … in order of insertion. Ids are never removed.

    Thread: one thread may insert while others find. A find that overlaps with an insert may miss the new ids; the
    caller must repeat it.
    """

    def __init__(self, *, capacity: int = 1024) -> None:
        self._num_ids = 0
        self._cells = _new_cells(capacity)

    def __len__(self) -> int:
        return self._num_ids

    @property
    def size_bytes(self) -> int:
        """Memory of the cells."""
        return self._cells.nbytes

    def find(self, ids: _Ids) -> _Ids:
        """Return the slot of each of int64[n] ids ≥ 0, in any order; 0 for unknown ids."""
        cells = self._cells  # read once: an insert may replace it
        first = _first_cells(ids, cells)
        fetched = cells.take(first, axis=0)
        found = fetched[:, 1].copy()
        left = np.flatnonzero(fetched[:, 0] != ids)
        if left.size:
            left = left[found[left] != _NO_SLOT]  # an empty cell ends a chain
            if left.size:
                found[left] = _find_in_chains(cells, ids[left], first[left])
        return found

    def insert(self, ids: _Ids) -> _Ids:
        """Return the slot of each of int64[n] unique ids ≥ 0, after giving new ids the next slots."""
        slots = self.find(ids)
        new = np.flatnonzero(slots == _NO_SLOT)
        if new.size:
            fresh = np.arange(self._num_ids + 1, self._num_ids + 1 + new.size, dtype=np.int64)
            self._reserve(self._num_ids + new.size)
            _place(self._cells, ids[new], fresh)
            slots[new] = fresh
            self._num_ids += new.size
        return slots

    def _reserve(self, num_ids: int) -> None:
        if num_ids <= len(self._cells) * _MAX_LOAD:
            return
        cells = _new_cells(num_ids)
        used = self._cells.take(np.flatnonzero(self._cells[:, 1] != _NO_SLOT), axis=0)
        _place(cells, np.ascontiguousarray(used[:, 0]), np.ascontiguousarray(used[:, 1]))
        self._cells = cells


def _new_cells(num_ids: int) -> _Cells:
    size = 1 << max(int(np.ceil(num_ids / _MAX_LOAD)) - 1, 15).bit_length()
    cells = np.empty((size, 2), np.int64)
    cells[:] = _NO_ID, _NO_SLOT
    return cells


def _first_cells(ids: _Ids, cells: _Cells) -> _Ids:
    """Return the position of the cell in which each id's chain begins."""
    bits = ids.view(np.uint64)
    mixed = bits >> _FOLD
    mixed ^= bits
    mixed *= _MIX
    mixed >>= np.uint64(65 - len(cells).bit_length())  # the highest bits: all lower bits of the product count in them
    return mixed.view(np.int64)


def _find_in_chains(cells: _Cells, ids: _Ids, first: _Ids) -> _Ids:
    """Return the slots of ids that are not in the first cell of their chain; 0 for unknown ids."""
    found = np.full(ids.size, _NO_SLOT, np.int64)
    left = np.arange(ids.size)
    for probe in range(len(cells)):
        window = _WINDOWS[min(probe, len(_WINDOWS) - 1)]
        fetched = cells.take((first[:, None] + window) & (len(cells) - 1), axis=0)
        keys, slots = fetched[..., 0], fetched[..., 1]
        rows, columns = np.divmod(np.flatnonzero(keys == ids[left, None]), window.size)
        found[left[rows]] = slots[rows, columns]
        is_open = np.ones(left.size, np.bool_)
        is_open[rows] = False
        rest = np.flatnonzero(is_open)
        # An empty cell anywhere in the window ends the chain.
        rest = rest[(slots[rest] != _NO_SLOT).all(axis=1)]
        if not rest.size:
            break
        left, first = left[rest], first[rest] + window[-1]
    return found


def _place(cells: _Cells, ids: _Ids, new_slots: _Ids) -> None:
    """Put unique new ids into the first free cell of their chains."""
    keys, slots = cells[:, 0], cells[:, 1]
    at = _first_cells(ids, cells)
    while ids.size:
        free = np.flatnonzero(slots[at] == _NO_SLOT)
        # If several ids want a cell, the last one written gets it; the others see that and move on.
        keys[at[free]], slots[at[free]] = ids[free], new_slots[free]
        left = np.flatnonzero(slots[at] != new_slots)
        ids, new_slots, at = ids[left], new_slots[left], (at[left] + 1) & (len(cells) - 1)
