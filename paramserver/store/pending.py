"""Acked rows that are not in RocksDB yet: coalesced for the applier, and an overlay for readers.

The rows of a column shard pend in *parts*, the rows of one delta of one batch, where they came in: in the request's own
frame. A reader takes a `snapshot` of them; it asks RocksDB only for what it does not find. Rows leave the overlay after
RocksDB has them, so a reader that takes its snapshot first misses none.

Coalescing decides by indexes alone which entry of each row counts. The rows stay in their frames until they are written
or read: then they are copied once, from wherever they lie (`scattered_rows.py`).

A *conditional* row (of a replay or a backfill) counts only where nothing newer by (epoch, step) is already there. It
stays conditional until something older in the overlay, or RocksDB, settles it. So an entry is a version and a flag, and
coalescing is one rule: from the last unconditional entry of a row on, the newest (epoch, step) wins, and the later one
of equals; without an unconditional one the winner stays conditional. Reducing any split of a sequence of entries, then
reducing what is left, gives the same result as reducing them all.

Thread: `PendingRows` belongs to the loop's thread; snapshots, parts and runs may be used in any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from headrace.paramserver.store.scattered_rows import ScatteredRows
from headrace.schemas.row_records import FLAG_DELETED, HEADER_FIELDS, RecordLayout
from headrace.schemas.tables import DType, TableSpec

__all__ = [
    "Batch",
    "CoalescedRun",
    "Part",
    "PendingRows",
    "PendingSnapshot",
    "RowDelta",
    "Run",
    "coalesce",
    "coalesce_all",
    "records_of",
]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]
_HEADER = {name for name, _ in HEADER_FIELDS}
# A column shard with fewer entries than this is coalesced together with others: by itself, what numpy is asked costs
# more than the rows. With more, sorting them together costs more than that.
_FEW_ENTRIES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class RowDelta:
    """Rows of one column shard of one table, decoded and validated.

    Attributes:
        table_id: Number of the table in the shard's catalog, ≥ 1.
        spec: What the table is.
        layout: Records of the column shard that the delta holds.
        row_ids: int64[n], each once.
        columns: `n × width` elements by field of the layout: `weights` and each `state:NAME`; bytes-like, contiguous.
        identities: int64[n] where the table has identities.
        deleted_row_ids: int64[k], each once, disjoint from `row_ids`.
        scalars: Values that the table has once, by name: element type and its bytes.
    """

    table_id: int
    spec: TableSpec
    layout: RecordLayout
    row_ids: _Ids
    columns: dict[str, Any]
    identities: _Ids | None = None
    deleted_row_ids: _Ids | None = None
    scalars: tuple[tuple[str, DType, bytes], ...] = ()


def _release_nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one durable record of the update log changes.

    Attributes:
        seq: Its position in the log, ≥ 1.
        epoch: Version of all its rows, first half: 1 to 2³² − 1.
        step: Version of all its rows, second half: ≥ 0.
        time_us: The trainer's wall clock at that step, microseconds since 1970.
        deltas: Rows; the buffers stay unchanged until `release`.
        meta: Metadata to store in the same atomic write, keys without `META_PREFIX`.
        size_bytes: What the batch holds in memory.
        release: Called once on the loop's thread when the buffers are not needed any more.
        is_conditional: The rows do not come in the log's own order (replay, backfill): one whose (epoch, step) is older
            than the row's present version is dropped.
    """

    seq: int
    epoch: int
    step: int
    time_us: int
    deltas: tuple[RowDelta, ...] = ()
    meta: dict[bytes, bytes] = field(default_factory=dict)
    size_bytes: int = 0
    release: Callable[[], None] = _release_nothing
    is_conditional: bool = False


class Part:
    """Rows of one batch for one column shard, deleted ones after the others, as views of the request's frame.

    Attributes:
        layout: Records that the rows become.
        ids: int64[n + k].
        num_present: n, how many are not deleted.
        columns: By field of the record behind its header, `layout.dtype[field]`[n]; all fields where n is not 0.
        epoch: Version of all rows, first half.
        step: Version of all rows, second half.
        time_us: Wall clock of all rows, microseconds since 1970.
        is_conditional: See `Batch`.
    """

    __slots__ = ("columns", "epoch", "ids", "is_conditional", "layout", "num_present", "step", "time_us")

    def __init__(self, layout: RecordLayout, ids: _Ids, columns: Mapping[str, _Array], batch: Batch) -> None:
        """Take views.

        Args:
            layout: Records that the rows become.
            ids: int64[n + k], contiguous, each once.
            columns: See `Part`; those ids that have no column are deleted.
            batch: What the rows are of.
        """
        self.layout, self.ids, self.columns = layout, ids, columns
        self.epoch, self.step, self.time_us = batch.epoch, batch.step, batch.time_us
        self.is_conditional = batch.is_conditional
        self.num_present = next(iter(columns.values())).size if columns else 0

    @classmethod
    def of_delta(cls, delta: RowDelta, batch: Batch) -> Part:
        """Return the rows of a delta."""
        ids = np.ascontiguousarray(delta.row_ids, np.int64)
        columns = delta.layout.views(delta.columns) if ids.size else {}
        if ids.size and delta.identities is not None:
            columns["identity"] = np.ascontiguousarray(delta.identities, "<i8")
        if delta.deleted_row_ids is not None and len(delta.deleted_row_ids):
            ids = np.concatenate((ids, delta.deleted_row_ids))
        return cls(delta.layout, ids, columns, batch)


class _PartRecords:
    """The records that rows of some parts become, made when they are asked for."""

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

    def take(self, ordinals: _Ids, rows: _Ids) -> _Array:
        """Return the records of rows, given by their part and their position in it."""
        is_deleted = None if self._num_present is None else rows >= self._num_present[ordinals]
        if is_deleted is None or not is_deleted.any():
            records, at = np.empty(rows.size, self._layout.dtype), None
        else:
            records, at = np.zeros(rows.size, self._layout.dtype), np.flatnonzero(~is_deleted)
        self._layout.set_header(
            records,
            ...,
            epoch=self._epochs[ordinals],
            step=self._steps[ordinals],
            time_us=self._times_us[ordinals],
            flags=0 if at is None or is_deleted is None else is_deleted * np.uint8(FLAG_DELETED),
        )
        for name, column in self._columns.items():
            if at is None:
                records[name] = column.take(ordinals, rows)
            else:
                records[name][at] = column.take(ordinals[at], rows[at])
        return records


@dataclass(slots=True, eq=False)
class Run:
    """Rows of one column shard: each once, sorted, in memory of their own.

    Attributes:
        table_id: Number of the table.
        layout: Of the records.
        row_ids: int64[n], ascending.
        records: `layout.dtype[n]`.
        is_conditional: bool[n], or None where no row is.
    """

    table_id: int
    layout: RecordLayout
    row_ids: _Ids
    records: _Array
    is_conditional: npt.NDArray[np.bool_] | None

    @property
    def size_bytes(self) -> int:
        """Of the records and their row ids."""
        return self.row_ids.size * (8 + self.layout.dtype.itemsize)

    def records_at(self, at: slice | _Array) -> _Array:
        """Return the records of some rows, contiguous, not to be written to."""
        return self.records[at]

    def take(self, at: _Array) -> Run:
        """Return a run of some of the rows, none of them conditional any more, in the order of `at`."""
        return Run(self.table_id, self.layout, self.row_ids[at], self.records[at], None)


@dataclass(slots=True, eq=False)
class CoalescedRun:
    """What parts of one column shard come to: each row once, sorted. The rows stay in the parts' frames.

    Attributes:
        table_id: Number of the table.
        layout: Of the records.
        row_ids: int64[n], ascending.
        is_conditional: bool[n], or None where no row is.
    """

    table_id: int
    layout: RecordLayout
    row_ids: _Ids
    is_conditional: npt.NDArray[np.bool_] | None
    _records: _PartRecords
    _ordinals: _Ids
    _rows: _Ids

    @property
    def size_bytes(self) -> int:
        """Of the records and their row ids."""
        return self.row_ids.size * (8 + self.layout.dtype.itemsize)

    def records_at(self, at: slice | _Array) -> _Array:
        """Return the records of some rows, copied together."""
        return self._records.take(self._ordinals[at], self._rows[at])

    def take(self, at: _Array) -> CoalescedRun:
        """Return a run of some of the rows, none of them conditional any more, in the order of `at`."""
        return CoalescedRun(
            self.table_id, self.layout, self.row_ids[at], None, self._records, self._ordinals[at], self._rows[at]
        )

    def copied(self) -> Run:
        """Return the same in memory of its own."""
        return Run(self.table_id, self.layout, self.row_ids, self.records_at(slice(None)), self.is_conditional)


def records_of(pieces: Sequence[tuple[Run | CoalescedRun, slice]]) -> Iterator[tuple[RecordLayout, _Array]]:
    """Yield the records of some rows of runs, contiguous, in their order; of runs that were coalesced together at once.

    Args:
        pieces: Runs and which of their rows.
    """

    def source_of(piece: tuple[Run | CoalescedRun, slice]) -> object:
        return piece[0]._records if isinstance(piece[0], CoalescedRun) else piece[0]

    for source, group in groupby(pieces, key=source_of):
        if isinstance(source, _PartRecords):
            alike = cast("list[tuple[CoalescedRun, slice]]", list(group))
            ordinals = np.concatenate([run._ordinals[some] for run, some in alike])
            rows = np.concatenate([run._rows[some] for run, some in alike])
            yield alike[0][0].layout, source.take(ordinals, rows)
        else:
            yield from ((run.layout, run.records_at(some)) for run, some in group)


@dataclass(frozen=True, slots=True)
class _Index:
    """Which entry of each row counts, among some consecutive parts: one an id, ids ascending.

    `ordinals` are of parts and `rows` positions in them. `is_conditional` is None where no entry is.
    """

    ids: _Ids
    ordinals: _Ids
    rows: _Ids
    is_conditional: npt.NDArray[np.bool_] | None

    @classmethod
    def of_parts(cls, parts: Sequence[Part], first: int) -> _Index:
        """Return the index of parts, oldest first; `first` is the ordinal of the oldest."""
        ids, which, rows = _entries_of(parts)
        conditional = np.array([part.is_conditional for part in parts])
        flags = conditional[which] if conditional.any() else None
        return cls(ids, which + first, rows, flags)._reduced(parts, first)

    @classmethod
    def of_both(cls, older: _Index, newer: _Index, parts: Sequence[Part], first: int) -> _Index:
        """Return the index of all entries of two; `first` is the ordinal of the first of `parts`."""
        conditional = None
        if older.is_conditional is not None or newer.is_conditional is not None:
            conditional = np.concatenate((older._flags(), newer._flags()))
        entries = cls(
            np.concatenate((older.ids, newer.ids)),
            np.concatenate((older.ordinals, newer.ordinals)),
            np.concatenate((older.rows, newer.rows)),
            conditional,
        )
        return entries._reduced(parts, first)

    def _flags(self) -> npt.NDArray[np.bool_]:
        return np.zeros(self.ids.size, bool) if self.is_conditional is None else self.is_conditional

    def _reduced(self, parts: Sequence[Part], first: int) -> _Index:
        """Return what counts of entries that are in the log's order."""
        if self.is_conditional is None:
            order = np.argsort(self.ids, kind="stable")
            order = order[_last_of_group(self.ids[order])]
            return _Index(self.ids[order], self.ordinals[order], self.rows[order], None)
        which = self.ordinals - first
        epochs = np.array([part.epoch for part in parts], np.int64)[which]
        steps = np.array([part.step for part in parts], np.int64)[which]
        age = np.arange(self.ids.size)
        # The position of each row's last unconditional entry, -1 where it has none, at each of its entries.
        unique, group = np.unique(self.ids, return_inverse=True)
        last = np.full(unique.size, -1, np.int64)
        np.maximum.at(last, group, np.where(self.is_conditional, -1, age))
        counts = age >= last[group]
        order = np.lexsort((age, steps, epochs, counts, self.ids))
        order = order[_last_of_group(self.ids[order])]
        conditional = last[group[order]] < 0
        return _Index(
            self.ids[order], self.ordinals[order], self.rows[order], conditional if conditional.any() else None
        )


def _entries_of(parts: Sequence[Part]) -> tuple[_Ids, _Ids, _Ids]:
    """Return of all rows of some parts, one part behind the other, their ids, their parts and their positions there."""
    sizes = np.array([part.ids.size for part in parts])
    starts = np.cumsum(sizes) - sizes
    ids = np.concatenate([part.ids for part in parts])
    which = np.repeat(np.arange(len(parts)), sizes)
    return ids, which, np.arange(ids.size) - starts[which]


def _last_of_group(ids: _Array) -> npt.NDArray[np.bool_]:
    is_last = np.ones(ids.size, bool)
    np.not_equal(ids[1:], ids[:-1], out=is_last[:-1])
    return is_last


def coalesce(table_id: int, parts: Sequence[Part]) -> CoalescedRun:
    """Return what some parts of one column shard come to.

    Args:
        table_id: Number of the table.
        parts: One at least, oldest first. Their frames stay as they are for as long as the run is used.
    """
    layout = parts[0].layout
    index = _Index.of_parts(parts, 0)
    records = _PartRecords(layout, parts)
    return CoalescedRun(table_id, layout, index.ids, index.is_conditional, records, index.ordinals, index.rows)


def coalesce_all(pending: Mapping[PendingRows, Sequence[Part]]) -> list[CoalescedRun]:
    """Return what some parts of many column shards come to, a run each, in no order.

    Args:
        pending: Of each column shard one part at least, oldest first; see `coalesce`.
    """
    runs = []
    few: dict[np.dtype[Any], dict[PendingRows, Sequence[Part]]] = {}
    for rows, parts in pending.items():
        if sum(part.ids.size for part in parts) >= _FEW_ENTRIES or any(part.is_conditional for part in parts):
            runs.append(coalesce(rows.table_id, parts))
        else:
            few.setdefault(rows.layout.dtype, {})[rows] = parts
    for alike in few.values():
        runs += _coalesce_together(alike)
    return runs


def _coalesce_together(pending: Mapping[PendingRows, Sequence[Part]]) -> Iterator[CoalescedRun]:
    """Yield the runs of column shards whose records are laid out alike, none of them conditional."""
    parts = [part for of_rows in pending.values() for part in of_rows]
    ids, which, rows = _entries_of(parts)
    shards = np.repeat(np.arange(len(pending)), [len(of_rows) for of_rows in pending.values()])[which]
    order = np.lexsort((ids, shards))
    order = order[_last_of_group(ids[order]) | _last_of_group(shards[order])]
    ids, which, rows = ids[order], which[order], rows[order]
    ends = np.cumsum(np.bincount(shards[order], minlength=len(pending))).tolist()
    records = _PartRecords(parts[0].layout, parts)
    start = 0
    for of, end in zip(pending, ends, strict=True):
        some = slice(start, end)
        yield CoalescedRun(of.table_id, of.layout, ids[some], None, records, which[some], rows[some])
        start = end


@dataclass(frozen=True, slots=True, eq=False)
class PendingSnapshot:
    """What pends in a column shard at one moment."""

    _first: int
    _parts: tuple[Part, ...]
    _nodes: dict[tuple[int, int], _Index]

    def find(self, ids: _Ids) -> Iterator[tuple[_Array, _Array, _Array | None]]:
        """Yield what pends of some rows, newest first.

        Args:
            ids: int64[m], any order; ascending is faster.

        Yields:
            (at, records, is_conditional): positions in `ids`, ascending, with the record and whether it is conditional.
            A row that a newer source had is yielded again by older ones.
        """
        layout = self._parts[0].layout
        for index in self._indexes():
            at, where = _lookup(index.ids, ids)
            if at.size:
                used, which = np.unique(index.ordinals[where] - self._first, return_inverse=True)
                records = _PartRecords(layout, [self._parts[i] for i in used.tolist()])
                conditional = None if index.is_conditional is None else index.is_conditional[where]
                yield at, records.take(which, index.rows[where]), conditional

    def _indexes(self) -> Iterator[_Index]:
        """Yield indexes that cover all parts, newest first.

        Parts are the leaves of binary trees by their ordinal, and a tree is built once and kept while all its leaves
        pend. So a read looks at about 2 log₂(parts) indexes, and building them costs nothing until somebody reads.
        """
        end = self._first + len(self._parts)
        while end > self._first:
            level = 0
            while end % (2 << level) == 0 and end - (2 << level) >= self._first:
                level += 1
            yield self._node(level, (end >> level) - 1)
            end -= 1 << level

    def _node(self, level: int, number: int) -> _Index:
        node = self._nodes.get((level, number))
        if node is None:
            children = [(level - 1, 2 * number), (level - 1, 2 * number + 1)]
            if any(child in self._nodes for child in children):
                older, newer = (self._node(*child) for child in children)
                node = _Index.of_both(older, newer, self._parts, self._first)
            else:  # of thousands of small parts: to go up from each of them would take twenty times as long
                first, end = number << level, (number + 1) << level
                node = _Index.of_parts(self._parts[first - self._first : end - self._first], first)
            # Two readers may both build it: the results are equal, and the later one stays.
            self._nodes[level, number] = node
        return node


def _lookup(sorted_ids: _Ids, ids: _Ids) -> tuple[_Array, _Array]:
    """Return the positions in `ids` of those that are in `sorted_ids`, and where they are in it."""
    where = np.searchsorted(sorted_ids, ids)
    where[where == sorted_ids.size] = 0
    at = np.flatnonzero(sorted_ids[where] == ids) if sorted_ids.size else np.empty(0, np.intp)
    return at, where[at]


class PendingRows:
    """What pends in one column shard of one table."""

    def __init__(self, table_id: int, layout: RecordLayout) -> None:
        self.table_id = table_id
        self.layout = layout
        self._parts: deque[Part] = deque()
        self._first = 0  # ordinal of the oldest part
        self._nodes: dict[tuple[int, int], _Index] = {}

    def add(self, part: Part) -> None:
        """Add the newest part."""
        self._parts.append(part)

    def applied(self, num_parts: int) -> None:
        """Forget the oldest parts: RocksDB has them."""
        for _ in range(num_parts):
            self._parts.popleft()
        self._first += num_parts
        # Readers may still add nodes of parts that are gone; the next call sweeps them out.
        for level, number in list(self._nodes):
            if number << level < self._first:
                del self._nodes[level, number]

    def snapshot(self) -> PendingSnapshot | None:
        """Return what pends; None when nothing does."""
        return PendingSnapshot(self._first, tuple(self._parts), self._nodes) if self._parts else None
