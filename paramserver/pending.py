"""Acked rows that are not in RocksDB yet: coalesced for the applier, and an overlay for readers.

The rows of a column shard pend in one of two forms, in the log's order:

- *parts*, the rows of one delta of one batch, still in the request's own frame;
- *runs*, what coalescing made of a window of parts: each row once, sorted by row id, copied out of the frames.

Runs are older than parts. A reader takes a `snapshot` and sees both; it asks RocksDB only for what it does not find.
Rows leave the overlay after RocksDB has them, so a reader that takes its snapshot first misses none.

A *conditional* row (of a replay or a backfill) counts only where nothing newer by (epoch, step) is already there. It
stays conditional until something older in the overlay, or RocksDB, settles it. So an entry is a version and a flag, and
coalescing is one rule: from the last unconditional entry of a row on, the newest (epoch, step) wins, and the later one
of equals; without an unconditional one the winner stays conditional. Reducing any split of a sequence of entries, then
reducing what is left, gives the same result as reducing them all.

Thread: `PendingRows` belongs to the loop's thread; snapshots, parts and runs may be used in any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.record_pool import RecordPool
from headrace.schemas.row_records import FLAG_DELETED, RecordLayout
from headrace.schemas.tables import DType, TableSpec

__all__ = ["Batch", "MergedRun", "Part", "PendingRows", "PendingSnapshot", "RowDelta", "Run", "coalesce", "merge"]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]


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
    """The rows of one delta, deleted ones after the others, as views of the request's frame.

    Attributes:
        layout: Records that the rows become.
        ids: int64[n + k].
        epoch: Version of all rows, first half.
        step: Version of all rows, second half.
        is_conditional: See `Batch`.
    """

    __slots__ = (
        "_columns",
        "_identities",
        "_num_present",
        "epoch",
        "ids",
        "is_conditional",
        "layout",
        "step",
        "time_us",
    )

    def __init__(self, delta: RowDelta, batch: Batch) -> None:
        """Take the views of a delta."""
        self.layout = delta.layout
        self.epoch, self.step, self.time_us = batch.epoch, batch.step, batch.time_us
        self.is_conditional = batch.is_conditional
        self._num_present = len(delta.row_ids)
        self._columns = delta.layout.views(delta.columns) if self._num_present else {}
        self._identities = delta.identities
        self.ids = np.ascontiguousarray(delta.row_ids, np.int64)
        if delta.deleted_row_ids is not None and len(delta.deleted_row_ids):
            self.ids = np.concatenate((self.ids, delta.deleted_row_ids))

    def gather(self, rows: _Array, out: _Array, at: _Array) -> None:
        """Write the records of some rows.

        Args:
            rows: intp[m], positions in `ids`.
            out: Records, `layout.dtype[any]`.
            at: intp[m], where in `out` each goes.
        """
        version = {"epoch": self.epoch, "step": self.step, "time_us": self.time_us}
        is_present = rows < self._num_present
        if not is_present.all():
            blank = np.zeros(1, self.layout.dtype)
            self.layout.set_header(blank, ..., flags=FLAG_DELETED, **version)
            out[at[~is_present]] = blank
            rows, at = rows[is_present], at[is_present]
        if not rows.size:
            return
        self.layout.set_header(out, at, **version)
        if self._identities is not None:
            out["identity"][at] = self._identities[rows]
        for name, column in self._columns.items():
            out[name][at] = column[rows]


@dataclass(slots=True, eq=False)
class Run:
    """Coalesced rows of one column shard: each once, sorted.

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
        """Memory that it holds."""
        return self.row_ids.nbytes + self.records.nbytes

    def records_between(self, start: int, end: int) -> _Array:
        """Return the records of rows `start` to `end`, contiguous, not to be written to."""
        return self.records[start:end]

    def take(self, keep: npt.NDArray[np.bool_]) -> Run:
        """Return a run of some of the rows, none of them conditional any more."""
        return Run(self.table_id, self.layout, self.row_ids[keep], self.records[keep], None)


@dataclass(slots=True, eq=False)
class MergedRun:
    """Rows of several runs of one column shard, each once, sorted, none conditional; the records stay in the runs.

    Attributes:
        table_id: Number of the table.
        layout: Of the records.
        row_ids: int64[n], ascending.
    """

    table_id: int
    layout: RecordLayout
    row_ids: _Ids
    _runs: Sequence[Run]
    _index: _Index

    @property
    def size_bytes(self) -> int:
        """Memory that it would hold if it were a run."""
        return self.row_ids.nbytes + self.row_ids.size * self.layout.dtype.itemsize

    def records_between(self, start: int, end: int) -> _Array:
        """Return the records of rows `start` to `end`, copied together."""
        records = np.empty(end - start, self.layout.dtype)
        ordinals, rows = self._index.parts[start:end], self._index.rows[start:end]
        for ordinal, run in enumerate(self._runs):
            at = np.flatnonzero(ordinals == ordinal)
            records[at] = run.records[rows[at]]
        return records

    def copied(self) -> Run:
        """Return a run of its own."""
        return Run(self.table_id, self.layout, self.row_ids, self.records_between(0, self.row_ids.size), None)


class _Index:
    """Which entry of each row counts, among some consecutive parts: one an id, ids ascending.

    `parts` holds ordinals of parts and `rows` positions in them. The versions are there only where an entry is
    conditional; all others need none.
    """

    __slots__ = ("epochs", "ids", "is_conditional", "parts", "rows", "steps")

    def __init__(self, ids: _Ids, parts: _Ids, rows: _Ids, conditional: tuple[_Array, _Array, _Array] | None) -> None:
        self.ids, self.parts, self.rows = ids, parts, rows
        self.is_conditional: _Array | None = None
        self.epochs: _Array | None = None
        self.steps: _Array | None = None
        if conditional is not None:
            self.is_conditional, self.epochs, self.steps = conditional

    @classmethod
    def of_part(cls, part: Part, ordinal: int) -> _Index:
        order = np.argsort(part.ids)
        return cls(
            part.ids[order], np.full(order.size, ordinal, np.int64), order, _versions_of(part, part.is_conditional)
        )

    def versions(self, parts: dict[int, Part]) -> tuple[_Array, _Array, _Array]:
        """Return (is conditional, epochs, steps) of all entries."""
        if self.is_conditional is not None and self.epochs is not None and self.steps is not None:
            return self.is_conditional, self.epochs, self.steps
        ordinals, which = np.unique(self.parts, return_inverse=True)
        epochs = np.array([parts[ordinal].epoch for ordinal in ordinals.tolist()], np.int64)
        steps = np.array([parts[ordinal].step for ordinal in ordinals.tolist()], np.int64)
        return np.zeros(self.ids.size, bool), epochs[which], steps[which]

    @classmethod
    def of_run(cls, run: Run, ordinal: int, *, with_versions: bool) -> _Index:
        size = run.row_ids.size
        conditional: tuple[_Array, _Array, _Array] | None = None
        if with_versions:
            is_conditional = np.zeros(size, bool) if run.is_conditional is None else run.is_conditional
            conditional = is_conditional, run.records["epoch"].astype(np.int64), run.records["step"].astype(np.int64)
        return cls(run.row_ids, np.full(size, ordinal, np.int64), np.arange(size), conditional)


def _versions_of(part: Part, is_conditional: bool) -> tuple[_Array, _Array, _Array] | None:
    if not is_conditional:
        return None
    size = part.ids.size
    return np.ones(size, bool), np.full(size, part.epoch, np.int64), np.full(size, part.step, np.int64)


def _reduce(indexes: Sequence[_Index], parts: dict[int, Part]) -> _Index:
    """Return the index of all entries of some indexes, given oldest first."""
    if len(indexes) == 1:
        return indexes[0]
    ids = np.concatenate([index.ids for index in indexes])
    ordinals = np.concatenate([index.parts for index in indexes])
    rows = np.concatenate([index.rows for index in indexes])
    if all(index.is_conditional is None for index in indexes):
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        order = order[_last_of_group(ids)]
        return _Index(ids[_last_of_group(ids)], ordinals[order], rows[order], None)
    conditional, epochs, steps = (
        np.concatenate(arrays) for arrays in zip(*(index.versions(parts) for index in indexes), strict=True)
    )
    age = np.arange(ids.size)
    # The position of each row's last unconditional entry, -1 where it has none, at each of its entries.
    unique, group = np.unique(ids, return_inverse=True)
    last = np.full(unique.size, -1, np.int64)
    np.maximum.at(last, group, np.where(conditional, -1, age))
    counts = age >= last[group]
    order = np.lexsort((age, steps, epochs, counts, ids))
    order = order[_last_of_group(ids[order])]
    versions = (last[group[order]] < 0, epochs[order], steps[order])
    return _Index(ids[order], ordinals[order], rows[order], versions if versions[0].any() else None)


def _last_of_group(ids: _Array) -> npt.NDArray[np.bool_]:
    is_last = np.ones(ids.size, bool)
    np.not_equal(ids[1:], ids[:-1], out=is_last[:-1])
    return is_last


def coalesce(table_id: int, parts: Sequence[Part], pool: RecordPool | None = None) -> Run:
    """Return the run of some parts of one column shard.

    Args:
        table_id: Number of the table.
        parts: One at least, oldest first.
        pool: Where memory for the records comes from.
    """
    layout = parts[0].layout
    by_ordinal = dict(enumerate(parts))
    index = _reduce([_Index.of_part(part, ordinal) for ordinal, part in by_ordinal.items()], by_ordinal)
    records = (np if pool is None else pool).empty(index.ids.size, layout.dtype)
    _gather(by_ordinal, index.parts, index.rows, records, np.arange(index.ids.size))
    return Run(table_id, layout, index.ids, records, index.is_conditional)


def merge(runs: Sequence[Run]) -> Run | MergedRun:
    """Return what several runs of one column shard come to.

    Args:
        runs: One at least, oldest first.
    """
    first = runs[0]
    if len(runs) == 1:
        return first
    is_any_conditional = any(run.is_conditional is not None for run in runs)
    index = _reduce(
        [_Index.of_run(run, ordinal, with_versions=is_any_conditional) for ordinal, run in enumerate(runs)], {}
    )
    merged = MergedRun(first.table_id, first.layout, index.ids, runs, index)
    if index.is_conditional is None:
        return merged
    return replace(merged.copied(), is_conditional=index.is_conditional)


def _gather(parts: dict[int, Part], ordinals: _Ids, rows: _Ids, out: _Array, at: _Array) -> None:
    """Write the records of entries of several parts, a part at a time."""
    order = np.argsort(ordinals, kind="stable")
    ordinals, rows, at = ordinals[order], rows[order], at[order]
    # The first of each part's entries, and the end of the last one's.
    bounds = np.flatnonzero(np.diff(ordinals, prepend=-1, append=-1)).tolist()
    for start, end in pairwise(bounds):
        parts[int(ordinals[start])].gather(rows[start:end], out, at[start:end])


@dataclass(frozen=True, slots=True, eq=False)
class PendingSnapshot:
    """What pends in a column shard at one moment.

    Attributes:
        runs: Oldest first.
    """

    runs: tuple[Run, ...]
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
        by_ordinal = dict(enumerate(self._parts, self._first))
        for index in self._indexes(by_ordinal):
            at, where = _lookup(index.ids, ids)
            if at.size:
                layout = self._parts[0].layout
                records = np.empty(at.size, layout.dtype)
                _gather(by_ordinal, index.parts[where], index.rows[where], records, np.arange(at.size))
                yield at, records, None if index.is_conditional is None else index.is_conditional[where]
        for run in reversed(self.runs):
            at, where = _lookup(run.row_ids, ids)
            if at.size:
                yield at, run.records[where], None if run.is_conditional is None else run.is_conditional[where]

    def _indexes(self, parts: dict[int, Part]) -> Iterator[_Index]:
        """Yield indexes that cover all parts, newest first.

        Parts are the leaves of binary trees by their ordinal, and a tree is built once and kept while all its leaves
        pend. So a read looks at about 2 log₂(parts) indexes, and building them costs nothing until somebody reads.
        """
        end = self._first + len(self._parts)
        while end > self._first:
            level = 0
            while end % (2 << level) == 0 and end - (2 << level) >= self._first:
                level += 1
            yield self._node(level, (end >> level) - 1, parts)
            end -= 1 << level

    def _node(self, level: int, number: int, parts: dict[int, Part]) -> _Index:
        node = self._nodes.get((level, number))
        if node is None:
            if level == 0:
                node = _Index.of_part(parts[number], number)
            else:
                older, newer = (self._node(level - 1, 2 * number + child, parts) for child in (0, 1))
                node = _reduce([older, newer], parts)
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
        self._runs: tuple[Run, ...] = ()
        self._nodes: dict[tuple[int, int], _Index] = {}

    def add(self, part: Part) -> None:
        """Add the newest part."""
        self._parts.append(part)

    def oldest(self, count: int) -> list[Part]:
        """Return the `count` oldest parts."""
        return [self._parts[i] for i in range(count)]

    def coalesced(self, run: Run, num_parts: int) -> None:
        """Put a run in the place of the oldest parts, from which it was made."""
        for _ in range(num_parts):
            self._parts.popleft()
        self._first += num_parts
        # Readers may still add nodes of parts that are gone; the next call sweeps them out.
        for level, number in list(self._nodes):
            if number << level < self._first:
                del self._nodes[level, number]
        self._runs = (*self._runs, run)

    def applied(self, run: Run) -> None:
        """Forget a run: RocksDB has it."""
        self._runs = tuple(other for other in self._runs if other is not run)

    def snapshot(self) -> PendingSnapshot | None:
        """Return what pends; None when nothing does."""
        if not self._parts and not self._runs:
            return None
        return PendingSnapshot(self._runs, self._first, tuple(self._parts), self._nodes)
