"""A cache in memory of one table's most used rows, in front of a disk. Every operation is numpy's on a batch.

    id ── hash ──▶ set of 8 ways ──▶ slot = set × 8 + way

A set is a row of `keys[sets, 8]`. A lookup compares eight keys; an eviction takes the least recently used way. There
are no chains to walk or repair, and a batch costs the same whatever was evicted before.

A row may evict another one only if it was missed before, within about the last `2 × capacity` misses (a doorkeeper). So
ids that come once do not displace ids that come again. A free way is taken at once.

Rows are never dirty: an update goes to the disk first, then into the row if it is here. A row read from the disk is
admitted only if no write to it has begun since before it was read; the reader's *ticket* shows that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.replica.tables.base import Bools, Ids, SeqLock

__all__ = ["HotRowStats", "HotRows", "capacity_for", "size_of_hot_rows"]

_Array = npt.NDArray[Any]
_Hashes = npt.NDArray[np.uint64]

_WAYS = 8
_NO_ID = -1
_FREE_SINCE, _PINNED = -1, np.iinfo(np.int64).max
# Write counters. Two rows may share one; then a write to one row keeps the other from being admitted once.
_NUM_TICKETS = 1 << 14
# Key, time of use, pins and presence of a slot, and two cells of the doorkeeper.
_SLOT_BYTES = 8 + 8 + 4 + 1 + 16
_MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, kw_only=True, slots=True)
class HotRowStats:
    """Counts of a table's lookups so far, in ids; a repeated id counts each time."""

    capacity: int  # rows that the cache has room for
    hits: int  # ids found in the cache
    misses: int  # ids read from the disk
    admitted: int  # rows that entered the cache
    evicted: int  # rows that left it to make room
    dropped: int = 0  # ids passed to `prefetch` and not read, because too many were waiting

    @property
    def hit_rate(self) -> float:
        """Share of hits in all lookups, 0 to 1; 0 before the first lookup."""
        return self.hits / max(self.hits + self.misses, 1)


def capacity_for(memory_bytes: int, row_bytes: int, num_rows: int) -> int:
    """Return how many rows fit into some memory with their bookkeeping; at least one set.

    `num_rows` is the table's size, 0 if unlimited: sets for twice as many rows never all fill up.
    """
    capacity = memory_bytes // (row_bytes + _SLOT_BYTES)
    if num_rows:
        capacity = min(capacity, 2 * num_rows)
    return int(max(capacity // _WAYS, 1) * _WAYS)


def size_of_hot_rows(capacity: int, row_bytes: int) -> int:
    """Return the memory of a cache once all of it has been used, bytes."""
    return capacity * (row_bytes + _SLOT_BYTES) + capacity // _WAYS + _NUM_TICKETS * 4


class HotRows:
    """A write-through cache of rows.

    Thread: any number look up, admit and pin; one at a time writes.
    """

    def __init__(self, capacity: int, row_bytes: int) -> None:
        """Create an empty cache for `capacity` rows, a multiple of eight (`capacity_for`)."""
        assert capacity % _WAYS == 0 and capacity >= _WAYS, "whole sets"
        self.capacity = capacity
        self._num_sets = capacity // _WAYS
        self._keys = np.full((self._num_sets, _WAYS), _NO_ID, np.int64)
        self._used = np.full((self._num_sets, _WAYS), _FREE_SINCE, np.int64)
        self._num_free = np.full(self._num_sets, _WAYS, np.uint8)
        self._pins = np.zeros(capacity, np.int32)
        self._rows = np.empty(capacity, f"V{row_bytes}")
        self._is_present = np.zeros(capacity, bool)
        self._seen = np.full(2 * capacity, _NO_ID, np.int64)  # the doorkeeper
        self._writes = np.zeros(_NUM_TICKETS, np.uint32)  # odd during a write
        self._clock = 0
        self._seqlock = SeqLock()
        self._hits = self._misses = self._admitted = self._evicted = 0

    @property
    def size_bytes(self) -> int:
        """Memory of the cache once all of it has been used."""
        return size_of_hot_rows(self.capacity, self._rows.itemsize)

    @property
    def stats(self) -> HotRowStats:
        """Counters. They may be slightly low: threads that count at the same time are not synchronized."""
        hits, misses, admitted, evicted = self._hits, self._misses, self._admitted, self._evicted
        return HotRowStats(capacity=self.capacity, hits=hits, misses=misses, admitted=admitted, evicted=evicted)

    # Readers.

    def gather(self, ids: Ids, out: _Array, *, is_use: bool = True) -> tuple[Bools, Bools]:
        """Copy the rows of int64[n] ids that are here into `out`, opaque rows `[n]`, leaving the others unchanged.

        Return bool[n] twice: which rows are here and not being written, and which of those are present in the table.
        """
        tickets = _tickets_of(_hash(ids))

        def look() -> tuple[Bools, Bools, Ids]:
            slots, is_here = self._find(ids)
            # A row that is being written is already newer on the disk, where a reader may have seen it.
            is_here &= self._writes[tickets] & 1 == 0
            if is_here.all():
                np.take(self._rows, slots, out=out, mode="clip")
                return is_here, self._is_present[slots], slots
            slots = slots[is_here]
            out[is_here] = self._rows[slots]
            is_present = np.zeros(ids.size, bool)
            is_present[is_here] = self._is_present[slots]
            return is_here, is_present, slots

        is_here, is_present, slots = self._seqlock.read(look)
        if not is_use:
            return is_here, is_present
        self._clock += 1
        # Outside the seqlock: if a row has just left, its successor looks a little younger, and nothing else happens.
        self._used.reshape(-1)[slots] = self._clock
        self._hits += slots.size
        self._misses += ids.size - slots.size
        return is_here, is_present

    def has(self, ids: Ids) -> Bools:
        """Return bool[n]: which rows are here. They do not count as used."""
        return self._seqlock.read(lambda: self._find(ids)[1])

    def ticket(self, ids: Ids) -> npt.NDArray[np.uint32]:
        """Return the ticket that `admit` needs for int64[n] ids; take it before reading them from the disk."""
        return self._writes[_tickets_of(_hash(ids))]

    def admit(
        self,
        ids: Ids,
        rows: _Array,
        is_present: Bools,
        ticket: npt.NDArray[np.uint32],
        *,
        is_wanted: bool = False,
        is_pinned: bool = False,
    ) -> Bools:
        """Admit unique rows that were read from the disk after taking their ticket; return bool[n], which entered.

        That a row is missing is worth caching too. `is_wanted` skips the doorkeeper: a caller asked for exactly these
        rows. `is_pinned` pins the rows that enter.
        """
        hashes = _hash(ids)
        tickets, entered = _tickets_of(hashes), np.zeros(ids.size, bool)
        with self._seqlock.write():
            sets, cells = self._sets_of(hashes), _scale(hashes & _LOW, self._seen.size)
            is_known = self._seen[cells] == ids
            self._seen[cells] = ids
            if is_wanted:
                is_known[:] = True
            is_fresh = (ticket & 1 == 0) & (ticket == self._writes[tickets])
            # For most rows the search ends here, before the sets' cells, which are in no cache of the processor.
            at = np.flatnonzero(is_fresh & (is_known | (self._num_free[sets] > 0)))
            at = at[~(self._keys[sets[at]] == ids[at, None]).any(axis=1)]
            if at.size:
                at, slots = self._make_room(at[np.lexsort((~is_known[at], sets[at]))], sets, is_known)
                # Write the key last: an interrupt or a lack of memory must not leave another row under it.
                keys = self._keys.reshape(-1)
                filled = sets[at[keys[slots] == _NO_ID]]
                keys[slots] = _NO_ID
                self._rows[slots] = rows[at]
                self._is_present[slots] = is_present[at]
                self._pins[slots] = int(is_pinned)
                self._clock += 1
                self._used.reshape(-1)[slots] = self._clock
                keys[slots] = ids[at]
                self._num_free[filled] = np.count_nonzero(self._keys[filled] == _NO_ID, axis=1)
                self._admitted += at.size
                entered[at] = True
        return entered

    def _make_room(self, at: _Array, sets: _Array, is_known: Bools) -> tuple[_Array, _Array]:
        """Return the positions of the rows that get a slot, and their slots.

        `at` has positions ordered by set, in each set those first that the doorkeeper knows and that may thus evict
        others.
        """
        mine = sets[at]
        is_first = np.ones(at.size, bool)
        np.not_equal(mine[1:], mine[:-1], out=is_first[1:])
        rank = np.arange(at.size) - np.maximum.accumulate(np.where(is_first, np.arange(at.size), 0))
        fits = rank < _WAYS
        at, mine, rank = at[fits], mine[fits], rank[fits]
        ages = self._used[mine]
        ages[self._keys[mine] == _NO_ID] = _FREE_SINCE
        ages[self._pins.reshape(-1, _WAYS)[mine] > 0] = _PINNED
        # The n-th row of a set gets the n-th oldest way; free ways are the oldest.
        ways = np.take_along_axis(np.argsort(ages, axis=1, kind="stable"), rank[:, None], axis=1)
        age = np.take_along_axis(ages, ways, axis=1)[:, 0]
        is_free = age == _FREE_SINCE
        gets = is_free | (is_known[at] & (age != _PINNED))
        self._evicted += int(np.count_nonzero(gets & ~is_free))
        return at[gets], (mine * _WAYS + ways[:, 0])[gets]

    def pin(self, ids: Ids) -> Bools:
        """Keep int64[n] unique rows here until `unpin`; return bool[n], which are here and thus pinned."""
        with self._seqlock.write():
            slots, is_here = self._find(ids)
            self._pins[slots[is_here]] += 1
            return is_here

    def unpin(self, ids: Ids) -> None:
        """Undo one pin of each of int64[n] unique rows, all pinned."""
        with self._seqlock.write():
            slots, is_here = self._find(ids)
            assert is_here.all(), "a pinned row stays"
            self._pins[slots] -= 1

    # The writer.

    def grow(self, factor: int) -> None:
        """Multiply the capacity; all rows stay, with their pins. The doorkeeper begins anew."""
        if factor <= 1:
            return
        with self._seqlock.write():
            old = np.flatnonzero(self._keys.reshape(-1) != _NO_ID)
            ids = self._keys.reshape(-1)[old]
            # A set's rows share `factor` sets now and keep their ways, so no two want one slot.
            slots = _scale(_hash(ids) >> _HALF, self._num_sets * factor) * _WAYS + old % _WAYS
            shape = self._num_sets * factor, _WAYS

            def moved(array: _Array, fill: Any) -> _Array:
                grown = np.full(shape, fill, array.dtype)
                grown.reshape(-1)[slots] = array.reshape(-1)[old]
                return grown

            keys, used, pins = moved(self._keys, _NO_ID), moved(self._used, _FREE_SINCE), moved(self._pins, 0)
            is_present, rows = moved(self._is_present, False), np.empty(self.capacity * factor, self._rows.dtype)
            rows[slots] = self._rows[old]
            self._seen = np.full(2 * self.capacity * factor, _NO_ID, np.int64)
            self._keys, self._used, self._pins, self._rows = keys, used, pins.reshape(-1), rows
            self._is_present = is_present.reshape(-1)
            self._num_free = np.count_nonzero(keys == _NO_ID, axis=1).astype(np.uint8)
            self._num_sets, self.capacity = self._num_sets * factor, self.capacity * factor

    def begin_write(self, ids: Ids) -> None:
        """Announce that int64[n] rows will change on the disk: from now on nothing read before is admitted."""
        self._writes[np.unique(_tickets_of(_hash(ids)))] += np.uint32(1)

    def end_write(self, ids: Ids, rows: _Array, at: Ids, is_present: Bools) -> None:
        """Update the rows that are here after int64[n] `ids` have changed on the disk.

        `rows` are the opaque rows of int64[m] `at`, unique and a subset of `ids`, as written.
        """
        with self._seqlock.write():
            slots, is_here = self._find(at)
            slots = slots[is_here]
            self._rows[slots] = rows[is_here]
            self._is_present[slots] = is_present[is_here]
            self._writes[np.unique(_tickets_of(_hash(ids)))] += np.uint32(1)

    def _find(self, ids: Ids) -> tuple[Ids, Bools]:
        """Return the slot of each id, arbitrary for ids that are not here, and which ids are here."""
        sets = self._sets_of(_hash(ids))
        matches = self._keys[sets] == ids[:, None]
        ways = matches.argmax(axis=1)
        return sets * _WAYS + ways, matches[np.arange(ids.size), ways]

    def _sets_of(self, hashes: _Hashes) -> Ids:
        return _scale(hashes >> _HALF, self._num_sets)


def _hash(ids: Ids) -> _Hashes:
    """Return 64 mixed bits, independent of the hash that deals rows to shards."""
    mixed = ids.view(np.uint64) * _MIX_1
    mixed ^= mixed >> _HALF
    mixed *= _MIX_2
    mixed ^= mixed >> _HALF
    return mixed


def _scale(halves: _Hashes, limit: int) -> Ids:
    """Return numbers below `limit` from 32 random bits each, without a division."""
    return ((halves * np.uint64(limit)) >> _HALF).view(np.int64)


def _tickets_of(hashes: _Hashes) -> Ids:
    return (hashes & np.uint64(_NUM_TICKETS - 1)).view(np.int64)
