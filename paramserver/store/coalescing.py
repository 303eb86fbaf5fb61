"""Coalesce the parts of many batches into sorted runs for RocksDB, in which each row stands once.

Coalescing works on indexes only: it decides which entry of each row counts. The rows stay in their frames until they
are written or read; then each is copied once, from wherever it lies (`ScatteredRows`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from headrace.paramserver.store.deltas import Part
from headrace.schemas.row_records import FLAG_DELETED, HEADER_FIELDS, RecordLayout, encode_keys_of, key_prefix
from headrace.schemas.row_tally import RowTally

__all__ = [
    "CoalescedRows",
    "EntryIndex",
    "PartRecords",
    "ScatteredRows",
    "SortedRun",
    "coalesce",
    "coalesce_all",
    "entries_of",
    "keep_last",
]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]
_HEADER = {name for name, _ in HEADER_FIELDS}
# Column shards with fewer entries are coalesced together: numpy's calls cost more than the rows. With more entries,
# sorting them together costs more than the calls.
_FEW_ENTRIES = 1024
# numpy accepts no buffer at address 0. Linux maps nothing above 2**47 unless a process asks for it.
_FIRST, _END = 4096, 2**48
_SPACE = memoryview((ctypes.c_ubyte * (_END - _FIRST)).from_address(_FIRST))
# Arrays this short, as in batches of many tables, are copied together: finding the address of each takes longer.
_SHORT_BYTES = 2048
# With longer rows the array would exceed numpy's size limit; they are few, so they are copied one by one.
_MAX_ROW_BYTES = 2**14


class PartRecords:
    """The records that rows of some parts become, made on request."""

    def __init__(self, layout: RecordLayout, parts: Sequence[Part]) -> None:
        self._layout = layout
        self._epochs = np.array([part.epoch for part in parts], np.int64)
        self._steps = np.array([part.step for part in parts], np.int64)
        self._times_us = np.array([part.time_us for part in parts], np.int64)
        self._num_present: _Ids | None = None
        if any(part.num_present < part.ids.size for part in parts):
            self._num_present = np.array([part.num_present for part in parts], np.int64)
        self._columns: dict[str, ScatteredRows] = {}
        for name in layout.dtype.names or ():
            if name not in _HEADER:
                dtype = layout.dtype[name]
                none = np.empty(0, dtype)
                self._columns[name] = ScatteredRows([part.columns.get(name, none) for part in parts], dtype)

    def are_deleted(self, ordinals: _Ids, rows: _Ids) -> npt.NDArray[np.bool_] | None:
        """Return which rows are deleted, bool[n], given as for `take`; None if none is."""
        if self._num_present is None or not (is_deleted := rows >= self._num_present[ordinals]).any():
            return None
        return is_deleted

    def take(self, ordinals: _Ids, rows: _Ids) -> _Array:
        """Return the records of rows, each given by its part's ordinal and its position there; int64[n] both."""
        present: Any = slice(None)
        flags: Any = 0
        if (is_deleted := self.are_deleted(ordinals, rows)) is not None:
            present, flags = np.flatnonzero(~is_deleted), is_deleted * np.uint8(FLAG_DELETED)
            records = np.zeros(rows.size, self._layout.dtype)
        else:
            records = np.empty(rows.size, self._layout.dtype)
        self._layout.set_header(
            records,
            ...,
            epoch=self._epochs[ordinals],
            step=self._steps[ordinals],
            time_us=self._times_us[ordinals],
            flags=flags,
        )
        for name, column in self._columns.items():
            records[name][present] = column.take(ordinals[present], rows[present])
        return records


@dataclass(slots=True, eq=False)
class _Rows:
    table_id: int
    layout: RecordLayout
    row_ids: _Ids

    @property
    def size_bytes(self) -> int:
        """Size of the records and their row ids."""
        return self.row_ids.size * (8 + self.layout.dtype.itemsize)


@dataclass(slots=True, eq=False)
class SortedRun(_Rows):
    """Rows of one column shard, each once, in memory of their own.

    `row_ids` is int64[n], ascending, and `records` is `layout.dtype[n]`.
    """

    records: _Array

    @property
    def is_deleted(self) -> npt.NDArray[np.bool_] | None:
        """Which rows are deleted, bool[n]; None if none is."""
        flags = (self.records["flags"] & FLAG_DELETED) != 0
        return flags if flags.any() else None

    def records_at(self, at: slice | _Array) -> _Array:
        """Return the records of some rows, contiguous, read-only."""
        return self.records[at]

    def take(self, at: _Array) -> SortedRun:
        """Return a run of the rows `at`, in that order."""
        return SortedRun(self.table_id, self.layout, self.row_ids[at], self.records[at])


@dataclass(slots=True, eq=False)
class CoalescedRows(_Rows):
    """A sorted run whose rows still lie in the parts' frames; fields as in `SortedRun`."""

    _records: PartRecords
    _ordinals: _Ids
    _rows: _Ids

    @property
    def is_deleted(self) -> npt.NDArray[np.bool_] | None:
        """Which rows are deleted, bool[n]; None if none is."""
        return self._records.are_deleted(self._ordinals, self._rows)

    def records_at(self, at: slice | _Array) -> _Array:
        """Return copies of the records of some rows."""
        return self._records.take(self._ordinals[at], self._rows[at])

    def take(self, at: _Array) -> CoalescedRows:
        """Return a run of the rows `at`, in that order."""
        return CoalescedRows(
            self.table_id, self.layout, self.row_ids[at], self._records, self._ordinals[at], self._rows[at]
        )

    def copied(self) -> SortedRun:
        """Return the same rows in memory of their own."""
        return SortedRun(self.table_id, self.layout, self.row_ids, self.records_at(slice(None)))


@dataclass(frozen=True, slots=True)
class EntryIndex:
    """The entry of each row that counts, among some consecutive parts; one for each id, ids ascending.

    `ordinals` number the parts and `rows` are positions in them.
    """

    ids: _Ids
    ordinals: _Ids
    rows: _Ids

    @classmethod
    def of_parts(cls, parts: Sequence[Part], first: int) -> EntryIndex:
        """Return the index of parts, oldest first; `first` is the ordinal of the oldest."""
        ids, which, rows = _entries_of(parts)
        return cls(ids, which + first, rows)._reduced()

    @classmethod
    def of_both(cls, older: EntryIndex, newer: EntryIndex) -> EntryIndex:
        """Return the index of all entries of two indexes."""
        entries = cls(
            np.concatenate((older.ids, newer.ids)),
            np.concatenate((older.ordinals, newer.ordinals)),
            np.concatenate((older.rows, newer.rows)),
        )
        return entries._reduced()

    def _reduced(self) -> EntryIndex:
        """Return the last entry of each row, from entries in the log's order."""
        order = np.argsort(self.ids, kind="stable")
        in_order = self.ids[order]
        order, ids = keep_last(self.ids, order, in_order, _last_of_group(in_order))
        return EntryIndex(ids, self.ordinals[order], self.rows[order])


def _entries_of(parts: Sequence[Part]) -> tuple[_Ids, _Ids, _Ids]:
    """Return the ids of all rows of some parts, one part after the other, with their part and position."""
    sizes = np.array([part.ids.size for part in parts])
    starts = np.cumsum(sizes) - sizes
    ids = np.concatenate([part.ids for part in parts])
    which = np.repeat(np.arange(len(parts)), sizes)
    return ids, which, np.arange(ids.size) - starts[which]


def _last_of_group(ids: _Array) -> npt.NDArray[np.bool_]:
    is_last = np.ones(ids.size, bool)
    np.not_equal(ids[1:], ids[:-1], out=is_last[:-1])
    return is_last


def keep_last(ids: _Ids, order: _Ids, in_order: _Ids, is_last: npt.NDArray[np.bool_]) -> tuple[_Ids, _Ids]:
    """Return the entries of `order` that count, and their ids: the last one of each group, which `is_last` marks.

    `in_order` is `ids[order]`. Each entry stands for as many as its group has, of the same id: rows kept and coalesced
    away are the rows taken.

    Raises:
        InvariantError: They are not.
    """
    at = np.flatnonzero(is_last)
    kept = in_order[at]
    if at.size:
        # The sum of each id times its group's size, at[k] - at[k - 1] or at[0] + 1, without an array of the sizes.
        by_id, by_place = kept.view(np.uint64), at.view(np.uint64)
        id_sum = int(np.dot(by_id, by_place)) - int(np.dot(by_id[1:], by_place[:-1])) + int(by_id[0])
        stood_for = RowTally(int(at[-1]) + 1, id_sum % 2**64)
    else:
        stood_for = RowTally()
    RowTally.of([ids]).check(stood_for, "memtable → store, coalescing")
    return order[at], kept


def coalesce(table_id: int, parts: Sequence[Part]) -> CoalescedRows:
    """Coalesce the parts of one column shard, oldest first, at least one.

    The parts' frames must stay unchanged while the result is used.
    """
    layout = parts[0].layout
    index = EntryIndex.of_parts(parts, 0)
    records = PartRecords(layout, parts)
    return CoalescedRows(table_id, layout, index.ids, records, index.ordinals, index.rows)


def coalesce_all(pending: Iterable[tuple[int, Sequence[Part]]]) -> list[CoalescedRows]:
    """Coalesce the parts of many column shards; return one run for each, in any order.

    Args:
        pending: For each column shard its table's number and its parts, oldest first, at least one.
    """
    runs = []
    small: dict[np.dtype[Any], list[tuple[int, Sequence[Part]]]] = {}
    for table_id, parts in pending:
        if sum(part.ids.size for part in parts) >= _FEW_ENTRIES:
            runs.append(coalesce(table_id, parts))
        else:
            small.setdefault(parts[0].layout.dtype, []).append((table_id, parts))
    for alike in small.values():
        runs += _coalesce_together(alike)
    return runs


def _coalesce_together(pending: Sequence[tuple[int, Sequence[Part]]]) -> Iterator[CoalescedRows]:
    """Yield the runs of column shards with one record layout."""
    parts = [part for _, of_shard in pending for part in of_shard]
    ids, which, rows = _entries_of(parts)
    shards = np.repeat(np.arange(len(pending)), [len(of_shard) for _, of_shard in pending])[which]
    order = np.lexsort((ids, shards))
    in_order = ids[order]
    order, ids = keep_last(ids, order, in_order, _last_of_group(in_order) | _last_of_group(shards[order]))
    which, rows = which[order], rows[order]
    ends = np.cumsum(np.bincount(shards[order], minlength=len(pending))).tolist()
    records = PartRecords(parts[0].layout, parts)
    start = 0
    for (table_id, of_shard), end in zip(pending, ends, strict=True):
        some = slice(start, end)
        yield CoalescedRows(table_id, of_shard[0].layout, ids[some], records, which[some], rows[some])
        start = end


_Piece = tuple[SortedRun | CoalescedRows, slice]


def entries_of(runs: Sequence[SortedRun | CoalescedRows], num_rows: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Yield keys and values of all rows, `num_rows` at a time, in the order of the runs.

    With many small tables, numpy's calls cost more than the rows. So each write takes rows of many runs and makes their
    keys together, and their records where the runs were coalesced together.
    """
    for pieces in _writes_of(runs, num_rows):
        prefixes = [key_prefix(run.table_id, run.layout.shard) for run, _ in pieces]
        row_ids = [run.row_ids[some] for run, some in pieces]
        keys = encode_keys_of(prefixes, [ids.size for ids in row_ids], np.concatenate(row_ids))
        values: list[bytes] = []
        for layout, records in _records_of(pieces):
            values += layout.values_of(records)
        yield keys, values


def _writes_of(runs: Sequence[SortedRun | CoalescedRows], num_rows: int) -> Iterator[list[_Piece]]:
    pieces: list[_Piece] = []
    left = num_rows
    for run in runs:
        start = 0
        while start < run.row_ids.size:
            some = slice(start, min(start + left, run.row_ids.size))
            pieces.append((run, some))
            left -= some.stop - start
            start = some.stop
            if not left:
                yield pieces
                pieces, left = [], num_rows
    if pieces:
        yield pieces


def _records_of(pieces: Sequence[tuple[SortedRun | CoalescedRows, slice]]) -> Iterator[tuple[RecordLayout, _Array]]:
    """Yield the records of slices of runs, in order; runs that were coalesced together yield theirs at once."""

    def source_of(piece: tuple[SortedRun | CoalescedRows, slice]) -> object:
        return piece[0]._records if isinstance(piece[0], CoalescedRows) else piece[0]

    for source, group in groupby(pieces, key=source_of):
        if isinstance(source, PartRecords):
            alike = cast("list[tuple[CoalescedRows, slice]]", list(group))
            ordinals = np.concatenate([run._ordinals[some] for run, some in alike])
            rows = np.concatenate([run._rows[some] for run, some in alike])
            yield alike[0][0].layout, source.take(ordinals, rows)
        else:
            yield from ((run.layout, run.records_at(some)) for run, some in group)


class ScatteredRows:
    """The rows of several buffers as if they were one array; keeps the buffers, or copies of short ones, alive.

    Rows that wait to be written lie in the hundreds of frames in which they came, and numpy indexes one array. So here
    that array is the process's whole address space, in which a row may begin at any byte: at its buffer's address plus
    its offset. `take` first checks every index against the buffers. That costs 0.08 ms for 100,000 rows, 2 % of a
    gather of 128-byte rows from 64 buffers.

    Thread: any.
    """

    def __init__(self, arrays: Sequence[_Array], dtype: np.dtype[Any]) -> None:
        """Take arrays `dtype[n]`, contiguous, at any alignment; `dtype` holds no Python objects."""
        assert all(array.dtype == dtype and array.flags.c_contiguous for array in arrays)
        self._arrays = arrays
        self._dtype = dtype
        self._sizes = np.array([array.size for array in arrays], np.int64)
        row_bytes = dtype.itemsize
        if (
            len(arrays) > 1
            and row_bytes <= _MAX_ROW_BYTES
            and self._sizes.sum() * row_bytes <= _SHORT_BYTES * len(arrays)
        ):
            self._arrays = [np.concatenate(arrays)]
            self._places = _place_of(self._arrays[0]) + (np.cumsum(self._sizes) - self._sizes) * row_bytes
        else:
            self._places = np.array([_place_of(array) for array in arrays], np.int64)

    def take(self, which: _Ids, rows: _Ids) -> _Array:
        """Return copies of rows, `dtype[m]`.

        Args:
            which: int64[m], the array of each row.
            rows: int64[m], its position in that array.

        Raises:
            IndexError: An array or a row does not exist; no memory outside the arrays is touched.
        """
        # As unsigned numbers, negative positions are beyond the end too.
        if np.any(rows.view(np.uint64) >= self._sizes[which].view(np.uint64)):
            raise IndexError("a row index is outside its buffer")
        size_bytes = self._dtype.itemsize
        if size_bytes > _MAX_ROW_BYTES:
            copies = np.empty(rows.size, self._dtype)
            for at, (array, row) in enumerate(zip(which.tolist(), rows.tolist(), strict=True)):
                copies[at] = self._arrays[array][row]
            return copies
        space = np.ndarray((_END - _FIRST - size_bytes,), self._dtype, _SPACE, 0, (1,))
        found: _Array = space[self._places[which] + rows * size_bytes]
        return found


def _place_of(array: _Array) -> int:
    place: int = array.__array_interface__["data"][0] - _FIRST
    return place
