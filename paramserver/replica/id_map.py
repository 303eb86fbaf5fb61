"""Row ids to slots 0, 1, 2 …: an open-addressing hash table whose operations are numpy's, never a row at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["IdMap"]

_Ids = npt.NDArray[np.int64]
_EMPTY = -1
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
# Longer chains cost more probes; 16 bytes a cell make half-empty cheap.
_MAX_LOAD = 0.5


class IdMap:
    """Maps ids ≥ 0 to slots in the order in which they came. Ids are never removed.

    Thread: one may insert while others find; a find that overlaps with an insert may miss what is being inserted, and
    has to be repeated by who cares.
    """

    def __init__(self, *, capacity: int = 1024) -> None:
        """Make room for `capacity` ids; it grows."""
        self._num_ids = 0
        self._cells = self._new_cells(capacity)

    def __len__(self) -> int:
        return self._num_ids

    @property
    def size_bytes(self) -> int:
        """Memory of the cells."""
        keys, slots = self._cells
        return keys.nbytes + slots.nbytes

    def find(self, ids: _Ids) -> _Ids:
        """Return the slot of each id, int64[n]; -1 where there is none."""
        keys, slots = self._cells  # once: an insert may put others in their place
        mask = keys.size - 1
        found = np.full(ids.size, -1, np.int64)
        at = _hash(ids) & mask
        left = np.arange(ids.size)
        for _ in range(keys.size):
            here = keys[at]
            hit = here == ids[left]
            found[left[hit]] = slots[at[hit]]
            go_on = ~hit & (here != _EMPTY)
            left = left[go_on]
            if not left.size:
                break
            at = (at[go_on] + 1) & mask
        return found

    def insert(self, ids: _Ids) -> _Ids:
        """Return the slot of each id, giving new ids the next ones.

        Args:
            ids: int64[n], ≥ 0, each once.
        """
        slots = self.find(ids)
        new = np.flatnonzero(slots < 0)
        if new.size:
            fresh = np.arange(self._num_ids, self._num_ids + new.size, dtype=np.int64)
            self._reserve(self._num_ids + new.size)
            _place(*self._cells, ids[new], fresh)
            slots[new] = fresh
            self._num_ids += new.size
        return slots

    def _reserve(self, num_ids: int) -> None:
        keys, slots = self._cells
        if num_ids <= keys.size * _MAX_LOAD:
            return
        cells = self._new_cells(num_ids)
        used = keys != _EMPTY
        _place(*cells, keys[used], slots[used])
        self._cells = cells

    @staticmethod
    def _new_cells(num_ids: int) -> tuple[_Ids, _Ids]:
        size = 1 << max(int(np.ceil(num_ids / _MAX_LOAD)) - 1, 15).bit_length()
        return np.full(size, _EMPTY, np.int64), np.zeros(size, np.int64)


def _place(keys: _Ids, slots: _Ids, ids: _Ids, new_slots: _Ids) -> None:
    """Put ids that are not there, each once, into the first free cell of their chains."""
    mask = keys.size - 1
    at = _hash(ids) & mask
    while ids.size:
        is_free = keys[at] == _EMPTY
        # Of several that want a cell the last one written gets it; the others see that and move on.
        keys[at[is_free]] = ids[is_free]
        won = keys[at] == ids
        slots[at[won]] = new_slots[won]
        ids, new_slots = ids[~won], new_slots[~won]
        at = (at[~won] + 1) & mask


def _hash(ids: _Ids) -> _Ids:
    """Return hashes ≥ 0: the finalizer of splitmix64, as ids often come in runs."""
    mixed = ids.view(np.uint64) ^ (ids.view(np.uint64) >> np.uint64(30))
    mixed *= _MIX_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(1)).view(np.int64)
