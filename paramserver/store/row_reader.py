"""Whole rows out of the overlay and RocksDB, whatever column shards they were written in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.store.pending import CoalescedRun, PendingSnapshot, Run
from headrace.schemas.row_keys import encode_keys
from headrace.schemas.row_records import DELETED, FLAG_DELETED, PRESENT, RecordLayout
from headrace.schemas.tables import StateKind, TableSpec

__all__ = ["GetValues", "RowsRead", "ShardSource", "read_records", "read_rows", "settle"]

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]

# Rows of one multi-get: what it returns becomes Python objects with the GIL held, about 1 µs a row.
_ROWS_PER_GET = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsRead:
    """The newest acked values of some rows, in the order asked for.

    Attributes:
        presence: uint8[n], `RowPresence`.
        weights: `spec.dtype.numpy`[n, dim], contiguous; zero where the row is not present.
        states: `[n, width]` by name, contiguous, each in its own dtype; zero where the row is not present.
        epochs: int64[n]; 0 where missing.
        steps: int64[n]; 0 where missing.
        times_us: int64[n], microseconds since 1970; 0 where missing.
        identities: int64[n] where the table has identities; 0 where the row is not present.
        seq: Every batch up to this position of the log is in the answer.
    """

    presence: npt.NDArray[np.uint8]
    weights: _Array
    states: dict[str, _Array]
    epochs: _Ids
    steps: _Ids
    times_us: _Ids
    identities: _Ids | None
    seq: int = 0


@dataclass(frozen=True, slots=True)
class ShardSource:
    """Where a reader looks for the rows of one column shard.

    Attributes:
        layout: Of the shard's records.
        snapshot: What pends; taken before RocksDB is read.
        is_stored: RocksDB may have rows of this shard.
    """

    layout: RecordLayout
    snapshot: PendingSnapshot | None
    is_stored: bool


GetValues = Callable[[list[bytes]], list[bytes | None]]
"""Reads the value of each key; None where there is none."""


def read_rows(
    table_id: int, spec: TableSpec, sources: Sequence[ShardSource], row_ids: _Ids, get: GetValues, *, seq: int
) -> RowsRead:
    """Return rows of a table.

    Args:
        table_id: Number of the table.
        spec: What the table is.
        sources: Each column shard that rows of the table may have been written in.
        row_ids: int64[n], any order, may repeat.
        get: Reads values from RocksDB.
        seq: Position in the log that the snapshots are from.

    Raises:
        StorageError: RocksDB could not be read.
        CorruptionError: It holds something else than records of this table.

    Thread: any; blocking.
    """
    # Neighbours share blocks, and sorted searches are kind to the caches.
    order = np.argsort(row_ids, kind="stable")
    sorted_ids = np.ascontiguousarray(row_ids[order])
    shards = [(source.layout, _read_shard(table_id, source, sorted_ids, get)) for source in sources]
    back = np.empty_like(order)
    back[order] = np.arange(order.size)
    if len(shards) == 1 and shards[0][0].shard == spec.whole:
        return _from_whole(spec, *shards[0], back, seq)
    return _assemble(spec, shards, back, seq)


def read_records(table_id: int, source: ShardSource, ids: _Ids, get: GetValues) -> tuple[_Array, npt.NDArray[np.bool_]]:
    """Return (records, whether there is one) of ids of one column shard.

    Args:
        table_id: Number of the table.
        source: Where the records are.
        ids: int64[n], ascending, each once.
        get: Reads values from RocksDB.

    Raises:
        StorageError: RocksDB could not be read.
        CorruptionError: It holds something else than records of this layout.

    Thread: any; blocking.
    """
    pick = _read_shard(table_id, source, ids, get)
    return pick.records, pick.has


def settle(run: Run | CoalescedRun, get: GetValues) -> Run | CoalescedRun:
    """Return a run without the conditional rows that RocksDB has newer versions of.

    Args:
        run: The oldest that is not in RocksDB.
        get: Reads values from RocksDB.

    Raises:
        StorageError: RocksDB could not be read.

    Thread: any; blocking.
    """
    if run.is_conditional is None:
        return run
    rows = np.flatnonzero(run.is_conditional)
    keep = np.ones(run.row_ids.size, bool)
    for start in range(0, rows.size, _ROWS_PER_GET):
        some = rows[start : start + _ROWS_PER_GET]
        stored, _ = run.layout.decode(get(encode_keys(run.table_id, run.layout.shard, run.row_ids[some])))
        # What is missing decodes as version (0, 0), which nothing is older than.
        keep[some] = ~_is_newer(stored, run.records_at(some))
    return run.take(keep)


class _Pick:
    """The record of each row that counts so far, while sources are gone through from the newest to the oldest."""

    def __init__(self, layout: RecordLayout, size: int) -> None:
        self.records = np.zeros(size, layout.dtype)
        self.has = np.zeros(size, bool)
        self.open = np.arange(size)

    def offer(self, at: _Array, records: _Array, is_conditional: _Array | None) -> None:
        """Take what an older source has.

        Args:
            at: Positions in `open`.
            records: One a position.
            is_conditional: Whether a row's record leaves it open; None where none does.
        """
        self.take(self.open[at], records)
        closed = at if is_conditional is None else at[~is_conditional]
        self.open = np.delete(self.open, closed)

    def take(self, rows: _Array, records: _Array) -> None:
        """Take what a source has, and close nothing: of the oldest one, after which none is asked.

        Args:
            rows: Which, open ones.
            records: One a row.
        """
        # A record of the same version that came later stays.
        wins = ~self.has[rows] | _is_newer(records, self.records[rows])
        self.records[rows[wins]] = records[wins]
        self.has[rows] = True


def _is_newer(records: _Array, others: _Array) -> npt.NDArray[np.bool_]:
    epochs, other_epochs = records["epoch"], others["epoch"]
    newer: npt.NDArray[np.bool_] = (epochs > other_epochs) | (
        (epochs == other_epochs) & (records["step"] > others["step"])
    )
    return newer


def _read_shard(table_id: int, source: ShardSource, ids: _Ids, get: GetValues) -> _Pick:
    pick = _Pick(source.layout, ids.size)
    if source.snapshot is not None:
        # `find` looks for all rows in each source: what has been found is dropped here, before it is compared.
        for at, records, is_conditional in source.snapshot.find(ids):
            where = np.searchsorted(pick.open, at)
            where[where == pick.open.size] = 0
            keep = pick.open[where] == at if pick.open.size else np.zeros(at.size, bool)
            pick.offer(where[keep], records[keep], None if is_conditional is None else is_conditional[keep])
            if not pick.open.size:
                return pick
    if source.is_stored:
        wanted = pick.open
        for start in range(0, wanted.size, _ROWS_PER_GET):
            rows = wanted[start : start + _ROWS_PER_GET]
            records, presence = source.layout.decode(get(encode_keys(table_id, source.layout.shard, ids[rows])))
            found = np.flatnonzero(presence)
            # To close rows takes a look at all that are open: of many rows, once for each 2,048 of them.
            pick.take(rows[found], records[found])
    return pick


def _presence(pick: _Pick) -> npt.NDArray[np.uint8]:
    presence = pick.has.astype(np.uint8) * np.uint8(PRESENT)
    presence[(pick.records["flags"] & FLAG_DELETED) != 0] = DELETED
    return presence


def _from_whole(spec: TableSpec, layout: RecordLayout, pick: _Pick, back: _Array, seq: int) -> RowsRead:
    records = pick.records

    def column(name: str) -> _Array:
        # The same `take` that undoes the sorting makes the column contiguous.
        of = layout.columns[name]
        return records[name][back].view(of.dtype.numpy).reshape(back.size, of.width)

    return RowsRead(
        presence=_presence(pick)[back],
        weights=column("weights"),
        states={state.name: column(f"state:{state.name}") for state in spec.states},
        epochs=records["epoch"][back].astype(np.int64),
        steps=records["step"][back].astype(np.int64),
        times_us=records["time_us"][back].astype(np.int64),
        identities=records["identity"][back].astype(np.int64) if spec.has_identities else None,
        seq=seq,
    )


def _assemble(spec: TableSpec, shards: Sequence[tuple[RecordLayout, _Pick]], back: _Array, seq: int) -> RowsRead:
    """Put rows together from several column shards: in each column the newest record of the row wins.

    What a row has once (version, identity) comes from its newest record; of equals, from the one of the lowest columns.
    Rowwise states, of which each column shard has a copy of its own, come with the row's first column: the shards of a
    run reach the store at different steps, and an answer that went from copy to copy would be none. A row is present
    where any column's newest record is.
    """
    size = back.size
    pointwise = [state.name for state in spec.states if state.kind is StateKind.POINTWISE]
    split = {"weights", *(f"state:{name}" for name in pointwise)}
    whole = RecordLayout(spec, spec.whole)
    columns = {name: np.zeros((size, column.width), column.dtype.numpy) for name, column in whole.columns.items()}
    header = np.zeros(size, whole.header_dtype)
    has = np.zeros(size, bool)
    is_live = np.zeros((size, spec.dim), bool)
    lowest = np.full(size, spec.dim)
    for layout, pick in shards:
        lowest[pick.has] = np.minimum(lowest[pick.has], layout.shard.offset)
    for layout, pick, rows in _oldest_first(shards):
        records = pick.records[rows]
        first, end = layout.shard.offset, layout.shard.offset + layout.shard.width
        for name, column in layout.columns.items():
            values = np.ascontiguousarray(records[name]).view(column.dtype.numpy).reshape(rows.size, column.width)
            if name in split:
                columns[name][rows, first:end] = values
            else:
                has_first = lowest[rows] == first
                columns[name][rows[has_first]] = values[has_first]
        for field in whole.header_dtype.names or ():
            header[field][rows] = records[field]
        has[rows] = True
        is_live[rows, first:end] = ((records["flags"] & FLAG_DELETED) == 0)[:, None]
    presence = np.where(is_live.any(axis=1), PRESENT, np.where(has, DELETED, 0)).astype(np.uint8)
    return RowsRead(
        presence=presence[back],
        weights=columns["weights"][back],
        states={state.name: columns[f"state:{state.name}"][back] for state in spec.states},
        epochs=header["epoch"][back].astype(np.int64),
        steps=header["step"][back].astype(np.int64),
        times_us=header["time_us"][back].astype(np.int64),
        identities=header["identity"][back].astype(np.int64) if spec.has_identities else None,
        seq=seq,
    )


def _oldest_first(shards: Sequence[tuple[RecordLayout, _Pick]]) -> Iterator[tuple[RecordLayout, _Pick, _Array]]:
    """Yield (layout, pick, rows): each row's records, oldest first; of equals, the one of the lowest columns last."""
    shards = sorted(shards, key=lambda shard: shard[0].shard, reverse=True)
    steps = np.stack([pick.records["step"] for _, pick in shards])
    epochs = np.stack([pick.records["epoch"] for _, pick in shards])
    # Stable, so of equals the later one, of lower columns, is painted over the other.
    order = np.lexsort((steps, epochs), axis=0)
    for turn in order:
        for number, (layout, pick) in enumerate(shards):
            rows = np.flatnonzero((turn == number) & pick.has)
            if rows.size:
                yield layout, pick, rows
