"""Row ids to slots 1, 2, 3 …: an open-addressing hash table whose operations are numpy's, never a row at a time.

A lookup of some thousand ids costs a few passes over them, so few passes are what counts. Id and slot are one cell of
16 bytes, fetched together. Most ids are in the cell where they are looked for first, many others in the next one; the
few that are not are looked for in the next stretch of cells at once, not in cell after cell.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["IdMap"]

_Ids = npt.NDArray[np.int64]
# A cell is (id, slot) for those who look at its halves, and one complex number for numpy, which moves items of that
# type as fast as those of eight bytes; as numbers they are never looked at.
_Cells = npt.NDArray[np.complex128]

# What an empty cell holds: no id, and the slot of none.
_EMPTY = (-1, 0)
# Fibonacci hashing: ids of a run lie far apart. The fold before it lets the high half of an id count.
_MIX = np.uint64(0x9E3779B97F4A7C15)
_FOLD = np.uint64(32)
# Longer chains cost more probes; 16 bytes a cell make half-empty cheap.
_MAX_LOAD = 0.5
# Cells behind the first one that are looked at together, in turn; the last of them again and again.
_STRETCHES = (np.arange(1, 2), np.arange(1, 9), np.arange(1, 33))


class IdMap:
    """Maps ids ≥ 0 to slots from 1 on, in the order in which they came. Ids are never removed.

    Thread: one may insert while others find; a find that overlaps with an insert may miss what is being inserted, and
    has to be repeated by who cares.
    """

    def __init__(self, *, capacity: int = 1024) -> None:
        """Make room for `capacity` ids; it grows."""
        self._num_ids = 0
        self._cells = _new_cells(capacity)

    def __len__(self) -> int:
        return self._num_ids

    @property
    def size_bytes(self) -> int:
        """Memory of the cells."""
        return self._cells.nbytes

    def find(self, ids: _Ids) -> _Ids:
        """Return the slot of each id, int64[n]; 0 where there is none.

        Args:
            ids: int64[n], ≥ 0, any order, also repeated.
        """
        cells = self._cells  # once: an insert may put others in their place
        at = _first_cells(ids, cells)
        keys, slots = _halves(cells[at])
        found = slots.copy()
        left = np.flatnonzero(keys != ids)
        if left.size:
            left = left[found[left] != _EMPTY[1]]  # an empty cell ends the search
            if left.size:
                found[left] = _find_behind(cells, ids[left], at[left])
        return found

    def insert(self, ids: _Ids) -> _Ids:
        """Return the slot of each id, giving new ids the next ones.

        Args:
            ids: int64[n], ≥ 0, each once.
        """
        slots = self.find(ids)
        new = np.flatnonzero(slots == _EMPTY[1])
        if new.size:
            fresh = np.arange(self._num_ids + 1, self._num_ids + 1 + new.size, dtype=np.int64)
            self._reserve(self._num_ids + new.size)
            _place(self._cells, ids[new], fresh)
            slots[new] = fresh
            self._num_ids += new.size
        return slots

    def _reserve(self, num_ids: int) -> None:
        if num_ids <= self._cells.size * _MAX_LOAD:
            return
        cells = _new_cells(num_ids)
        keys, slots = _halves(self._cells)
        used = np.flatnonzero(slots != _EMPTY[1])
        _place(cells, keys[used], slots[used])
        self._cells = cells


def _new_cells(num_ids: int) -> _Cells:
    size = 1 << max(int(np.ceil(num_ids / _MAX_LOAD)) - 1, 15).bit_length()
    cells = np.empty((size, 2), np.int64)
    cells[:] = _EMPTY
    return cells.view(np.complex128)[:, 0]


def _halves(cells: _Cells) -> tuple[_Ids, _Ids]:
    """Return ids and slots of contiguous cells, `[n]`, as views."""
    halves = cells.view(np.int64)
    return halves[::2], halves[1::2]


def _first_cells(ids: _Ids, cells: _Cells) -> _Ids:
    """Return where the search for each id begins."""
    mixed = ids.view(np.uint64) >> _FOLD
    mixed ^= ids.view(np.uint64)
    mixed *= _MIX
    mixed >>= np.uint64(65 - cells.size.bit_length())  # the highest bits: all others of the product count in them
    return mixed.view(np.int64)


def _find_behind(cells: _Cells, ids: _Ids, at: _Ids) -> _Ids:
    """Return slots of ids that are not in their first cell; 0 for those that are nowhere."""
    found = np.full(ids.size, _EMPTY[1], np.int64)
    left = np.arange(ids.size)
    for number in range(cells.size):
        stretch = _STRETCHES[min(number, len(_STRETCHES) - 1)]
        window = cells[(at[:, None] + stretch) & (cells.size - 1)].reshape(-1)
        keys, slots = (half.reshape(-1, stretch.size) for half in _halves(window))
        rows, columns = np.divmod(np.flatnonzero(keys == ids[left, None]), stretch.size)
        found[left[rows]] = slots[rows, columns]
        is_open = np.ones(left.size, np.bool_)
        is_open[rows] = False
        rest = np.flatnonzero(is_open)
        # An empty cell ends a search, wherever in the stretch it is.
        rest = rest[(slots[rest] != _EMPTY[1]).all(axis=1)]
        if not rest.size:
            break
        left, at = left[rest], at[rest] + stretch[-1]
    return found


def _place(cells: _Cells, ids: _Ids, new_slots: _Ids) -> None:
    """Put ids that are not there, each once, into the first free cell of their chains."""
    keys, slots = _halves(cells)
    at = _first_cells(ids, cells)
    while ids.size:
        free = np.flatnonzero(slots[at] == _EMPTY[1])
        # Of several that want a cell the last one written gets it; the others see that and move on.
        keys[at[free]], slots[at[free]] = ids[free], new_slots[free]
        left = np.flatnonzero(slots[at] != new_slots)
        ids, new_slots, at = ids[left], new_slots[left], (at[left] + 1) & (cells.size - 1)
