"""The memtable: acked rows that RocksDB does not have yet.

The rows of a column shard pend as *parts*, one for each delta, in the request's own frame. A reader first takes a
`snapshot` of them, then asks RocksDB for the rows that it does not find there. Rows leave the memtable only after
RocksDB has them, so this order misses none.

Thread: the loop's; snapshots, sources and parts may be used in any thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.store.coalescing import EntryIndex, PartRecords
from headrace.paramserver.store.deltas import Batch, Part
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.row_tally import RowTally
from headrace.schemas.tables import ColumnShard, TableSpec

__all__ = ["EpochReclaimer", "Memtable", "PendingRows", "PendingSnapshot", "ShardSource"]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PendingSnapshot:
    """The pending rows of a column shard at one moment."""

    _first: int
    _parts: tuple[Part, ...]
    _nodes: dict[tuple[int, int], EntryIndex]

    def find(self, ids: _Ids) -> Iterator[tuple[_Array, _Array]]:
        """Yield the pending records of some rows, newest first.

        Args:
            ids: int64[m], any order; ascending is faster.

        Yields:
            (at, records): ascending positions in `ids`, and a record for each. A row may be yielded again with older
            records.
        """
        layout = self._parts[0].layout
        for index in self._indexes():
            at, where = _lookup(index.ids, ids)
            if at.size:
                used, which = np.unique(index.ordinals[where] - self._first, return_inverse=True)
                records = PartRecords(layout, [self._parts[i] for i in used.tolist()])
                yield at, records.take(which, index.rows[where])

    def _indexes(self) -> Iterator[EntryIndex]:
        """Yield indexes that cover all parts, newest first.

        Parts are the leaves of binary trees, numbered by ordinal. A tree is built once and kept while all its leaves
        pend, so a read looks at about 2 log₂(parts) indexes, and trees cost nothing until somebody reads.
        """
        end = self._first + len(self._parts)
        while end > self._first:
            level = 0
            while end % (2 << level) == 0 and end - (2 << level) >= self._first:
                level += 1
            yield self._node(level, (end >> level) - 1)
            end -= 1 << level

    def _node(self, level: int, number: int) -> EntryIndex:
        node = self._nodes.get((level, number))
        if node is None:
            children = [(level - 1, 2 * number), (level - 1, 2 * number + 1)]
            if any(child in self._nodes for child in children):
                older, newer = (self._node(*child) for child in children)
                node = EntryIndex.of_both(older, newer)
            else:  # climbing from each of thousands of small parts takes 20 times as long
                first, end = number << level, (number + 1) << level
                node = EntryIndex.of_parts(self._parts[first - self._first : end - self._first], first)
            # Two readers may both build it: the results are equal, and the later one stays.
            self._nodes[level, number] = node
        return node


def _lookup(sorted_ids: _Ids, ids: _Ids) -> tuple[_Array, _Array]:
    """Return the positions in `ids` of ids that are in `sorted_ids`, and their places there."""
    where = np.searchsorted(sorted_ids, ids)
    where[where == sorted_ids.size] = 0
    at = np.flatnonzero(sorted_ids[where] == ids) if sorted_ids.size else np.empty(0, np.intp)
    return at, where[at]


class PendingRows:
    """The pending parts of one column shard of one table."""

    def __init__(self, table_id: int, layout: RecordLayout) -> None:
        self.table_id = table_id
        self.layout = layout
        self._parts: deque[Part] = deque()
        self._first = 0  # ordinal of the oldest part
        self._nodes: dict[tuple[int, int], EntryIndex] = {}

    def add(self, part: Part) -> None:
        """Add the newest part."""
        self._parts.append(part)

    def applied(self, num_parts: int) -> None:
        """Forget the oldest parts: RocksDB has them."""
        for _ in range(num_parts):
            self._parts.popleft()
        self._first += num_parts
        # Readers may still add nodes of parts that are gone; the next call removes those.
        for level, number in list(self._nodes):
            if number << level < self._first:
                del self._nodes[level, number]

    def snapshot(self) -> PendingSnapshot | None:
        """Return the pending rows; None when there are none."""
        return PendingSnapshot(self._first, tuple(self._parts), self._nodes) if self._parts else None


@dataclass(frozen=True, slots=True)
class ShardSource:
    """The places to look for rows of one column shard: a snapshot, taken first, then RocksDB if `is_stored`."""

    layout: RecordLayout
    snapshot: PendingSnapshot | None
    is_stored: bool


class Memtable:
    """The pending rows of all tables."""

    def __init__(self, stored: Callable[[int], Iterable[ColumnShard]] = lambda _: ()) -> None:
        """Create an empty one; `stored` returns the column shards of which RocksDB may have rows of a table."""
        self._stored = stored
        self._rows: dict[int, dict[ColumnShard, PendingRows]] = {}

    def add(self, batch: Batch) -> list[tuple[PendingRows, Part]]:
        """Make a batch readable; return its parts, each with the column shard in which it pends.

        Rows that are deleted in all columns are deleted in every layout of columns that has some.

        Raises:
            InvariantError: They are not the rows of the record; none can be read.
        """
        parts = [(delta, part) for delta in batch.deltas if (part := Part.of_delta(delta, batch)).ids.size]
        if batch.tally is not None:
            batch.tally.check(RowTally.of(part.ids for _, part in parts), f"log record {batch.seq} → memtable")
        placed: list[tuple[PendingRows, Part]] = []
        for delta, part in parts:
            known: set[ColumnShard] = set()
            if delta.layout.shard == delta.spec.whole and part.num_present < part.ids.size:
                known = {*self._stored(delta.table_id), *self._rows.get(delta.table_id, ())}
            if part.num_present or not known or delta.layout.shard in known:
                placed.append((self._rows_of(delta.table_id, delta.layout), part))
            for shard in sorted(known - {delta.layout.shard}):
                rows = self._rows_of(delta.table_id, RecordLayout(delta.spec, shard))
                placed.append((rows, Part(rows.layout, part.ids[part.num_present :], {}, batch)))
        for rows, part in placed:
            rows.add(part)
        return placed

    def sources_of(self, table_id: int, spec: TableSpec, stored: Iterable[ColumnShard]) -> list[ShardSource]:
        """Return a source for each column shard of a table, as of now; RocksDB may have rows of those in `stored`."""
        pending = self._rows.get(table_id, {})
        shards = dict.fromkeys(stored, True)
        for shard in pending:
            shards.setdefault(shard, False)
        sources = []
        for shard in shards or {spec.whole: False}:
            rows = pending.get(shard)
            layout = rows.layout if rows else RecordLayout(spec, shard)
            # A shard that is first applied after this moment has all its rows in the snapshot.
            sources.append(ShardSource(layout, rows.snapshot() if rows else None, shards.get(shard, False)))
        return sources

    def _rows_of(self, table_id: int, layout: RecordLayout) -> PendingRows:
        of_table = self._rows.setdefault(table_id, {})
        rows = of_table.get(layout.shard)
        if rows is None:
            rows = of_table[layout.shard] = PendingRows(table_id, layout)
        return rows


class EpochReclaimer:
    """Delays callbacks until every reader that had begun before has ended: then nobody looks at the old buffers."""

    def __init__(self) -> None:
        self._next = 0
        self._active: dict[int, None] = {}
        self._deferred: deque[tuple[int, Callable[[], None]]] = deque()

    def begin(self) -> int:
        """Begin a read; return the ticket for `end`."""
        ticket = self._next
        self._active[ticket] = None
        self._next += 1
        return ticket

    def end(self, ticket: int) -> None:
        """End a read, and make the calls that waited for it."""
        del self._active[ticket]
        oldest = next(iter(self._active), self._next)
        while self._deferred and self._deferred[0][0] <= oldest:
            self._deferred.popleft()[1]()

    def when_none_older(self, callback: Callable[[], None]) -> None:
        """Call back, in the order of these calls, when all readers that have begun have ended."""
        if self._active:
            self._deferred.append((self._next, callback))
        else:
            callback()
