"""Read whole rows from the memtable and RocksDB, whatever column shards they were written in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.paramserver.store.memtable import ShardSource
from headrace.schemas.row_records import FLAG_DELETED, PRESENT, RecordLayout, encode_keys
from headrace.schemas.tables import StateKind, TableSpec

__all__ = ["GetValues", "RowsRead", "read_rows"]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]

# Rows of one multi-get: its results become Python objects with the GIL held, about 1 µs each.
_ROWS_PER_GET = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsRead:
    """The newest acked values of n rows, in the order asked for; each batch up to log position `seq` is included.

    `presence` is uint8[n], `RowPresence`. `weights`, `spec.dtype.numpy`[n, dim], and `states`, [n, width] each in its
    own dtype, are contiguous. They and `identities`, int64[n] where the table has them, are zero where the row is not
    present, and so are `epochs`, `steps` and `times_us` (microseconds since 1970), int64[n].

    `may_be_torn`, bool[n], are present rows of which columns are deleted or missing, or a record is: a deletion in all
    columns may have reached some layouts of columns between their reads. None if the table has one layout.
    """

    presence: npt.NDArray[np.uint8]
    weights: _Array
    states: dict[str, _Array]
    epochs: _Ids
    steps: _Ids
    times_us: _Ids
    identities: _Ids | None
    seq: int = 0
    may_be_torn: npt.NDArray[np.bool_] | None = None

    def replace(self, at: _Ids, others: RowsRead) -> None:
        """Take the rows at int64[m] places from others, m rows of the same table."""
        for ours, theirs in zip(self._columns(), others._columns(), strict=True):
            ours[at] = theirs

    def _columns(self) -> list[_Array]:
        columns = [self.presence, self.weights, *self.states.values(), self.epochs, self.steps, self.times_us]
        return columns if self.identities is None else [*columns, self.identities]


GetValues = Callable[[list[bytes]], list[bytes | None]]
"""Returns the value of each key; None where there is none."""


def read_rows(
    table_id: int, spec: TableSpec, sources: Sequence[ShardSource], row_ids: _Ids, get: GetValues, *, seq: int
) -> RowsRead:
    """Return rows of a table.

    Args:
        table_id: Number of the table.
        spec: The table's spec.
        sources: A source for each column shard in which rows of the table may have been written.
        row_ids: int64[n], any order, may repeat.
        get: Reads values from RocksDB.
        seq: Log position of the snapshots.

    Raises:
        StorageError: RocksDB could not be read.
        CorruptionError: It holds something other than records of this table.

    Thread: any; blocking.
    """
    # Neighbors share blocks, and sorted searches use the caches well.
    order = np.argsort(row_ids, kind="stable")
    sorted_ids = np.ascontiguousarray(row_ids[order])
    shards = [(source.layout, _read_shard(table_id, source, sorted_ids, get)) for source in sources]
    back = np.empty_like(order)
    back[order] = np.arange(order.size)
    if len(shards) == 1 and shards[0][0].shard == spec.whole:
        layout, found = shards[0]
        is_deleted = (found.records["flags"] & FLAG_DELETED) != 0
        presence = (found.has & ~is_deleted).astype(np.uint8) * np.uint8(PRESENT)
        found.records[is_deleted] = np.zeros((), found.records.dtype)
        return _rows_read(spec, layout, presence, found.records, found.records, back, seq)
    return _assemble(spec, shards, back, seq)


class _Records(NamedTuple):
    records: _Array
    has: npt.NDArray[np.bool_]  # whether there is one


def _read_shard(table_id: int, source: ShardSource, ids: _Ids, get: GetValues) -> _Records:
    """Return the records of ascending ids of one column shard: pending ones, or else RocksDB's."""
    records, has = np.zeros(ids.size, source.layout.dtype), np.zeros(ids.size, bool)
    wanted = np.arange(ids.size)
    if source.snapshot is not None:
        # `find` looks for all rows in each source, newest first.
        for at, found in source.snapshot.find(ids):
            is_new = ~has[at]
            records[at[is_new]], has[at[is_new]] = found[is_new], True
            if has.all():
                return _Records(records, has)
        wanted = np.flatnonzero(~has)
    if source.is_stored:
        for start in range(0, wanted.size, _ROWS_PER_GET):
            rows = wanted[start : start + _ROWS_PER_GET]
            found, presence = source.layout.decode(get(encode_keys(table_id, source.layout.shard, ids[rows])))
            there = np.flatnonzero(presence)
            records[rows[there]], has[rows[there]] = found[there], True
    return _Records(records, has)


def _rows_read(
    spec: TableSpec, layout: RecordLayout, presence: _Array, header: _Array, columns: Any, back: _Array, seq: int
) -> RowsRead:
    def column(name: str) -> _Array:
        # The same indexing that undoes the sort makes the column contiguous.
        of = layout.columns[name]
        values: _Array = columns[name][back].view(of.dtype.numpy).reshape(back.size, of.width)
        return values

    return RowsRead(
        presence=presence[back],
        weights=column("weights"),
        states={state.name: column(f"state:{state.name}") for state in spec.states},
        epochs=header["epoch"][back].astype(np.int64),
        steps=header["step"][back].astype(np.int64),
        times_us=header["time_us"][back].astype(np.int64),
        identities=header["identity"][back].astype(np.int64) if spec.has_identities else None,
        seq=seq,
    )


def _assemble(spec: TableSpec, shards: Sequence[tuple[RecordLayout, _Records]], back: _Array, seq: int) -> RowsRead:
    """Assemble rows from several column shards: in each column the row's newest record wins.

    Version and identity come from the row's newest record that is live in a column; of equal ones, from the lowest
    columns. Each column shard has its own copy of rowwise states; the copy of the row's first live column counts,
    because ranks' shards reach the store at different steps and an answer must not switch between copies. A row is
    present where any column's newest record is. So version and states are the same with a mark and without it.
    """
    size = back.size
    pointwise = [state.name for state in spec.states if state.kind is StateKind.POINTWISE]
    split = {"weights", *(f"state:{name}" for name in pointwise)}
    whole = RecordLayout(spec, spec.whole)
    columns = {name: np.zeros((size, column.width), column.dtype.numpy) for name, column in whole.columns.items()}
    header = np.zeros(size, whole.header_dtype)
    live = np.full((size, spec.dim), -1, np.int16)  # number of the record that counts in each column; −1 for none
    has_mark = np.zeros(size, bool)
    for number, layout, found, rows in _oldest_first(shards):
        records = found.records[rows]
        first, end = layout.shard.offset, layout.shard.offset + layout.shard.width
        for name in split:
            columns[name][rows, first:end] = _values(layout, records, name)
        is_deleted = (records["flags"] & FLAG_DELETED) != 0
        live[rows, first:end] = np.where(is_deleted, -1, number)[:, None]
        has_mark[rows[is_deleted]] = True
    is_live = live >= 0
    is_present = is_live.any(axis=1)
    first_live = live[np.arange(size), is_live.argmax(axis=1)]
    for number, layout, found, rows in _oldest_first(shards):
        first, end = layout.shard.offset, layout.shard.offset + layout.shard.width
        counting = rows[(live[rows, first:end] == number).any(axis=1)]
        for field in whole.header_dtype.names or ():
            header[field][counting] = found.records[field][counting]
        own = rows[first_live[rows] == number]
        for name in columns.keys() - split:
            columns[name][own] = _values(layout, found.records[own], name)
    for absent in columns.values():
        absent[~is_present] = np.zeros((), absent.dtype)
    presence = np.where(is_present, np.uint8(PRESENT), np.uint8(0))
    found_rows = _rows_read(spec, whole, presence, header, columns, back, seq)
    may_be_torn = is_present & (has_mark | ~is_live.all(axis=1))
    return dataclasses.replace(found_rows, may_be_torn=may_be_torn[back])


def _values(layout: RecordLayout, records: _Array, name: str) -> _Array:
    """Return a column of records, [n, width]."""
    column = layout.columns[name]
    values: _Array = np.ascontiguousarray(records[name]).view(column.dtype.numpy).reshape(records.size, column.width)
    return values


def _oldest_first(
    shards: Sequence[tuple[RecordLayout, _Records]],
) -> Iterator[tuple[int, RecordLayout, _Records, _Array]]:
    """Yield (number, layout, found, rows): each row's records, oldest first; of equals, that of lowest columns last."""
    shards = sorted(shards, key=lambda shard: shard[0].shard, reverse=True)
    steps = np.stack([found.records["step"] for _, found in shards])
    epochs = np.stack([found.records["epoch"] for _, found in shards])
    # Stable: of equals the later one, of lower columns, overwrites the other.
    order = np.lexsort((steps, epochs), axis=0)
    for turn in order:
        for number, (layout, found) in enumerate(shards):
            rows = np.flatnonzero((turn == number) & found.has)
            if rows.size:
                yield number, layout, found, rows
