"""Rows of one table that are looked up often, in memory, in front of a disk. Every operation is numpy's on a batch.

    id ── hash ──▶ set of 8 ways ──▶ slot = set × 8 + way

A set is a row of `keys[sets, 8]`: a look-up compares eight keys, an eviction takes the way that was used the longest
ago, and that is all: no chains to walk or to mend, and a batch costs the same whatever was evicted before it.

A row that would push another out is let in when it was missed before, within about the last `2 × capacity` misses of
others (a doorkeeper): ids that come once do not wash out those that come again. A free way is taken at once.

Never dirty: an update goes to the disk and then, where the row is here, into the row. What a reader has fetched from
the disk is let in only when nobody has begun to write the row since before the reader asked: `ticket`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.replica.version_gate import VersionGate

__all__ = ["HotRowStats", "HotRows", "capacity_for", "size_of_hot_rows"]

_Array = npt.NDArray[Any]
_Bools = npt.NDArray[np.bool_]
_Ids = npt.NDArray[np.int64]
_Hashes = npt.NDArray[np.uint64]

_WAYS = 8
_NO_ID = -1
_FREE_SINCE, _PINNED = -1, np.iinfo(np.int64).max
# Rows whose writes are told apart. Of two rows that share a counter, a write of one keeps the other out for once.
_NUM_TICKETS = 1 << 14
# A slot's key, time of use, pins and presence, and two cells of the doorkeeper.
_SLOT_BYTES = 8 + 8 + 4 + 1 + 16
_MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, kw_only=True, slots=True)
class HotRowStats:
    """What has become of look-ups so far; ids, repeated ones counted each time.

    Attributes:
        capacity: Rows that there is place for.
        hits: Found.
        misses: Read from the disk.
        admitted: Rows that were let in.
        evicted: Rows that were pushed out by them.
        dropped: Ids announced to `prefetch` that were not read because too many were waiting.
    """

    capacity: int
    hits: int
    misses: int
    admitted: int
    evicted: int
    dropped: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits of all look-ups, 0 to 1; 0 before the first."""
        return self.hits / max(self.hits + self.misses, 1)


def capacity_for(memory_bytes: int, row_bytes: int, num_rows: int) -> int:
    """Return how many rows some memory has place for, what is kept about them counted; at least one set.

    Args:
        memory_bytes: Memory.
        row_bytes: Of a row.
        num_rows: Rows of the table, 0 when it has any number: sets for twice as many are never all full.
    """
    capacity = memory_bytes // (row_bytes + _SLOT_BYTES)
    if num_rows:
        capacity = min(capacity, 2 * num_rows)
    return int(max(capacity // _WAYS, 1) * _WAYS)


def size_of_hot_rows(capacity: int, row_bytes: int) -> int:
    """Return the memory that some hot rows take once all of it has been used, bytes."""
    return capacity * (row_bytes + _SLOT_BYTES) + capacity // _WAYS + _NUM_TICKETS * 4


class HotRows:
    """A write-through cache of rows; see above.

    Thread: any number look up, let in and pin; one at a time writes.

    Attributes:
        capacity: Rows that there is place for.
    """

    def __init__(self, capacity: int, row_bytes: int) -> None:
        """Begin with no rows.

        Args:
            capacity: A multiple of eight (`capacity_for`).
            row_bytes: Of a row.
        """
        assert capacity % _WAYS == 0 and capacity >= _WAYS, "whole sets"
        self.capacity = capacity
        self._num_sets = capacity // _WAYS
        self._keys = np.full((self._num_sets, _WAYS), _NO_ID, np.int64)
        self._used = np.full((self._num_sets, _WAYS), _FREE_SINCE, np.int64)
        self._num_free = np.full(self._num_sets, _WAYS, np.uint8)
        self._pins = np.zeros(capacity, np.int32)
        self._rows = np.empty(capacity, f"V{row_bytes}")
        self._is_present = np.zeros(capacity, bool)
        self._seen = np.full(2 * capacity, _NO_ID, np.int64)
        self._writes = np.zeros(_NUM_TICKETS, np.uint32)  # odd while one goes on
        self._clock = 0
        self._gate = VersionGate()
        self._hits = self._misses = self._admitted = self._evicted = 0

    @property
    def size_bytes(self) -> int:
        """Memory that it takes once all of it has been used."""
        return size_of_hot_rows(self.capacity, self._rows.itemsize)

    @property
    def stats(self) -> HotRowStats:
        """Counters. They may be a little less than the truth: threads that count at once are not kept apart."""
        return HotRowStats(
            capacity=self.capacity,
            hits=self._hits,
            misses=self._misses,
            admitted=self._admitted,
            evicted=self._evicted,
        )

    # Readers.

    def gather(self, ids: _Ids, out: _Array, *, is_use: bool = True) -> tuple[_Bools, _Bools]:
        """Copy the rows that are here.

        Args:
            ids: int64[n], any order, also repeated.
            out: Opaque rows `[n]`; those that are not here stay as they are.
            is_use: They count as used, and as found.

        Returns:
            bool[n] each: which are here and not being written, and which of those are present in the table.
        """
        tickets = _tickets_of(_hash(ids))

        def look() -> tuple[_Bools, _Bools, _Ids]:
            slots, is_here = self._find(ids)
            # What is being written is already newer on the disk, where a reader may have seen it.
            is_here &= self._writes[tickets] & 1 == 0
            if is_here.all():
                np.take(self._rows, slots, out=out, mode="clip")
                return is_here, self._is_present[slots], slots
            slots = slots[is_here]
            out[is_here] = self._rows[slots]
            is_present = np.zeros(ids.size, bool)
            is_present[is_here] = self._is_present[slots]
            return is_here, is_present, slots

        is_here, is_present, slots = self._gate.read(look)
        if not is_use:
            return is_here, is_present
        self._clock += 1
        # Not under the gate: where a row has just gone, its successor looks a little younger, and nothing else happens.
        self._used.reshape(-1)[slots] = self._clock
        self._hits += slots.size
        self._misses += ids.size - slots.size
        return is_here, is_present

    def has(self, ids: _Ids) -> _Bools:
        """Return bool[n]: which rows are here. They do not count as used."""
        return self._gate.read(lambda: self._find(ids)[1])

    def ticket(self, ids: _Ids) -> npt.NDArray[np.uint32]:
        """Return what `admit` wants to know of rows; to be taken before they are read from the disk.

        Args:
            ids: int64[n].
        """
        return self._writes[_tickets_of(_hash(ids))]

    def admit(
        self,
        ids: _Ids,
        rows: _Array,
        is_present: _Bools,
        ticket: npt.NDArray[np.uint32],
        *,
        is_wanted: bool = False,
        is_pinned: bool = False,
    ) -> _Bools:
        """Let rows in that were read from the disk; return bool[n], which were.

        Args:
            ids: int64[n], each once.
            rows: Opaque rows `[n]`.
            is_present: bool[n]; also that a row is missing is worth to be known.
            ticket: Of the ids, from before the rows were read.
            is_wanted: Somebody has asked for just these: the doorkeeper is passed over.
            is_pinned: Pin those that are let in.
        """
        hashes = _hash(ids)
        sets, cells, tickets = self._sets_of(hashes), _scale(hashes & _LOW, self._seen.size), _tickets_of(hashes)
        entered = np.zeros(ids.size, bool)
        with self._gate.write():
            is_known = self._seen[cells] == ids
            self._seen[cells] = ids
            if is_wanted:
                is_known[:] = True
            is_fresh = (ticket & 1 == 0) & (ticket == self._writes[tickets])
            # Of most rows this is all that is looked at: the cells of sets are in no cache of the processor.
            at = np.flatnonzero(is_fresh & (is_known | (self._num_free[sets] > 0)))
            at = at[~(self._keys[sets[at]] == ids[at, None]).any(axis=1)]
            if at.size:
                at, slots = self._make_place(at[np.lexsort((~is_known[at], sets[at]))], sets, is_known)
                # No key until its row is there: an interrupt or a lack of memory must leave no other row under it.
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

    def _make_place(self, at: _Array, sets: _Array, is_known: _Bools) -> tuple[_Array, _Array]:
        """Return those of some rows that get a place, and their slots.

        Args:
            at: Positions of the rows, ordered by set; in a set those that the doorkeeper knows first.
            sets: By position.
            is_known: By position: may push others out.
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
        # The n-th of a set's rows gets the n-th oldest of its ways, of which the free ones are the oldest.
        ways = np.take_along_axis(np.argsort(ages, axis=1, kind="stable"), rank[:, None], axis=1)
        age = np.take_along_axis(ages, ways, axis=1)[:, 0]
        is_free = age == _FREE_SINCE
        gets = is_free | (is_known[at] & (age != _PINNED))
        self._evicted += int(np.count_nonzero(gets & ~is_free))
        return at[gets], (mine * _WAYS + ways[:, 0])[gets]

    def pin(self, ids: _Ids) -> _Bools:
        """Keep rows here until `unpin`; return bool[n], which are here and so are kept.

        Args:
            ids: int64[n], each once.
        """
        with self._gate.write():
            slots, is_here = self._find(ids)
            self._pins[slots[is_here]] += 1
            return is_here

    def unpin(self, ids: _Ids) -> None:
        """Undo a pin of rows.

        Args:
            ids: int64[n], each once, each of them pinned.
        """
        with self._gate.write():
            slots, is_here = self._find(ids)
            assert is_here.all(), "a pinned row stays"
            self._pins[slots] -= 1

    # The writer.

    def begin_write(self, ids: _Ids) -> None:
        """Say that rows are about to change on the disk: from now on nothing that was read of them is let in.

        Args:
            ids: int64[n].
        """
        self._writes[np.unique(_tickets_of(_hash(ids)))] += np.uint32(1)

    def end_write(self, ids: _Ids, rows: _Array, at: _Ids, is_present: _Bools) -> None:
        """Say that rows have changed on the disk, and change those that are here.

        Args:
            ids: As for `begin_write`.
            rows: Opaque rows `[m]`, what has been written.
            at: int64[m]: the row of each, each once, some of `ids`.
            is_present: bool[m].
        """
        with self._gate.write():
            slots, is_here = self._find(at)
            slots = slots[is_here]
            self._rows[slots] = rows[is_here]
            self._is_present[slots] = is_present[is_here]
            self._writes[np.unique(_tickets_of(_hash(ids)))] += np.uint32(1)

    def _find(self, ids: _Ids) -> tuple[_Ids, _Bools]:
        """Return the slot of each id, any where it is not here, and whether it is."""
        sets = self._sets_of(_hash(ids))
        matches = self._keys[sets] == ids[:, None]
        ways = matches.argmax(axis=1)
        return sets * _WAYS + ways, matches[np.arange(ids.size), ways]

    def _sets_of(self, hashes: _Hashes) -> _Ids:
        return _scale(hashes >> _HALF, self._num_sets)


def _hash(ids: _Ids) -> _Hashes:
    """Return 64 mixed bits; others than those by which rows are dealt to shards."""
    mixed = ids.view(np.uint64) * _MIX_1
    mixed ^= mixed >> _HALF
    mixed *= _MIX_2
    mixed ^= mixed >> _HALF
    return mixed


def _scale(halves: _Hashes, limit: int) -> _Ids:
    """Return 32 random bits each as a number below `limit`, without a division."""
    return ((halves * np.uint64(limit)) >> _HALF).view(np.int64)


def _tickets_of(hashes: _Hashes) -> _Ids:
    return (hashes & np.uint64(_NUM_TICKETS - 1)).view(np.int64)
