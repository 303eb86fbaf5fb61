"""Digests of a shard's rows at one position of the log, for audits."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.ingest.pipeline import Ingest
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.catalog import Table
from headrace.paramserver.store.memtable import ShardSource
from headrace.paramserver.store.row_reader import read_rows
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import RequestError
from headrace.schemas.row_digest import BUCKET_ROWS, TableDigest, bucket_digests, digest_rows
from headrace.schemas.row_records import PRESENT, RecordLayout, decode_row_ids, key_prefix
from headrace.schemas.tables import ColumnShard, StateKind, TableSpec

__all__ = ["Digester"]

# Rows per read. rocksdict holds the GIL while it creates their objects, about 1 µs a row.
_ROWS_AT_ONCE = 2048
# The first read is small: rows of the next table follow a small table's, and reading them is wasted.
_FIRST_ROWS_AT_ONCE = 64
_MAX_BUCKETS = 256
# A longer scan stops here and answers in part. Auditors give up after a minute, replicas after 15 s, and repeat the
# same request: without a limit a slow disk or long rows would never be answered. Two queued scans still fit into 15 s.
_MAX_SCAN_S = 5.0
_MAX_ROW = 2**63 - 1

_Ids = npt.NDArray[np.int64]
_Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Query:
    table: Table
    columns: ColumnShard
    first_row: int
    end_row: int
    max_buckets: int
    with_presence: bool
    only_weights: bool


class Digester:
    """Answers `digestRows`. Thread: the loop's."""

    def __init__(self, ingest: Ingest, applier: Applier, store: RowStore) -> None:
        """Digest the rows of `store`; `applier` knows its position in the log."""
        self._ingest, self._applier, self._store = ingest, applier, store
        self._turn = asyncio.Lock()  # one scan at a time: audits may be slow, and lookups need the disk

    async def digest(self, request: Any) -> Any:
        """Answer a `DigestRowsRequest`. Cancellation: harmless.

        Raises:
            RequestError: The request names columns that the table does not have, or no rows.
            StorageError: RocksDB could not be read.
        """
        query = self._check(request)
        async with self._turn:
            seq = self._ingest.accepted_seq
            chunks: list[_Scan] = []
            # The applier pauses only while the iterators are created; they keep seeing the store of that moment.
            await self._applier.run_at(seq, lambda: chunks.append(_Scan(self._store, query)))
            return await asyncio.to_thread(chunks[0].run, seq)

    def _check(self, request: Any) -> _Query:
        table = self._ingest.catalog.find(request.fqn)
        spec = table.spec
        end_row = min(request.end_row, spec.num_rows or _MAX_ROW)
        columns = ColumnShard(offset=request.column_offset, width=request.width)
        if not request.first_row >= 0 or request.max_buckets < 1:
            raise RequestError(f"rows from {request.first_row} on in {request.max_buckets} buckets: out of range")
        if columns.offset < 0 or columns.width < 1 or columns.offset + columns.width > spec.dim:
            raise RequestError(
                f"table {spec.fqn!r} has {spec.dim} columns, not {columns.offset} to {columns.offset + columns.width}"
            )
        max_buckets = min(request.max_buckets, _MAX_BUCKETS)
        only_weights = bool(request.only_weights)
        return _Query(table, columns, request.first_row, end_row, max_buckets, request.with_presence, only_weights)


class _Scan:
    """One pass over a table, from the first requested row on."""

    def __init__(self, store: RowStore, query: _Query, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._query, self._clock, self._reached_row = query, clock, query.first_row
        self._streams: list[_Stream] = []
        for shard in store.layouts(query.table.table_id):
            prefix, source = (
                key_prefix(query.table.table_id, shard),
                ShardSource(query.table.layout_of(shard), None, True),
            )
            self._streams.append(_Stream(store, prefix, query.first_row, query.end_row, source))

    def run(self, seq: int) -> Any:
        """Return the reply. Thread: any; blocking."""
        query, spec = self._query, self._query.table.spec
        buckets: dict[int, tuple[int, int]] = {}
        presence: dict[int, npt.NDArray[np.uint8]] = {}
        next_row, ends_s = query.end_row, self._clock() + _MAX_SCAN_S
        for ids, weights, states in self._chunks(seq):
            states = {} if query.only_weights else states
            digests = digest_rows(ids, list(_columns(spec, weights, states, query.columns)))
            is_late = self._clock() > ends_s
            for bucket, digest, count in zip(*(part.tolist() for part in bucket_digests(ids, digests)), strict=True):
                if bucket not in buckets and (len(buckets) == query.max_buckets or (is_late and buckets)):
                    next_row = bucket * BUCKET_ROWS
                    break
                known = buckets.get(bucket, (0, 0))
                buckets[bucket] = ((known[0] + digest) % 2**64, known[1] + count)
                if query.with_presence:
                    flags = presence.setdefault(bucket, np.zeros(BUCKET_ROWS, np.uint8))
                    flags[ids[ids // BUCKET_ROWS == bucket] % BUCKET_ROWS] = 1
            if is_late and self._reached_row // BUCKET_ROWS > max(buckets, default=query.first_row // BUCKET_ROWS):
                next_row = min(next_row, self._reached_row // BUCKET_ROWS * BUCKET_ROWS)  # among deleted rows
            if next_row < query.end_row:
                break
        bits = {bucket: np.packbits(flags, bitorder="little") for bucket, flags in presence.items()}
        found = TableDigest(spec=spec, columns=query.columns, buckets=buckets, presence=bits)
        return found.to_idl(next_row=next_row, seq=seq, with_presence=query.with_presence)

    def _chunks(self, seq: int) -> Iterator[tuple[_Ids, _Array, dict[str, _Array]]]:
        """Yield ascending unique row ids with weights and states of whole rows, without deleted rows."""
        query, streams = self._query, self._streams
        spec, sources = query.table.spec, [stream.source for stream in streams]
        while any([stream.fill() for stream in streams]):  # a list, because every stream must be filled
            # Every stream has all its rows up to here.
            last_row = self._reached_row = min(stream.last_row for stream in streams)
            taken = [stream.take_up_to(last_row) for stream in streams]
            if len(sources) == 1 and sources[0].layout.shard == spec.whole:
                yield _whole_rows(spec, sources[0].layout, *taken[0])
                continue
            ids = np.unique(np.concatenate([ids for ids, _ in taken]))
            values = dict(itertools.chain.from_iterable(pairs for _, pairs in taken))
            # `read_rows` joins the column shards; it looks the scanned values up by key.
            get = functools.partial(_get_all, values)
            rows = read_rows(query.table.table_id, spec, sources, ids, get, seq=seq)
            is_there = rows.presence == PRESENT
            yield ids[is_there], rows.weights[is_there], {name: state[is_there] for name, state in rows.states.items()}


def _get_all(values: dict[bytes, bytes], keys: list[bytes]) -> list[bytes | None]:
    return [*map(values.get, keys)]


def _whole_rows(
    spec: TableSpec, layout: RecordLayout, ids: _Ids, pairs: list[tuple[bytes, bytes]]
) -> tuple[_Ids, _Array, dict[str, _Array]]:
    """Return ids, weights and states of records that hold all columns, without deleted rows."""
    records, presence = layout.decode([value for _, value in pairs])
    if not (is_there := presence == PRESENT).all():
        ids, records = ids[is_there], records[is_there]

    def column(name: str) -> _Array:
        of = layout.columns[name]
        return np.ascontiguousarray(records[name]).view(of.dtype.numpy).reshape(ids.size, of.width)

    return ids, column("weights"), {state.name: column(f"state:{state.name}") for state in spec.states}


def _sizes() -> Iterator[int]:
    size = _FIRST_ROWS_AT_ONCE
    while True:
        yield size
        size = min(2 * size, _ROWS_AT_ONCE)


class _Stream:
    """The records of one column shard, in the order of their rows."""

    def __init__(self, store: RowStore, prefix: bytes, first_row: int, end_row: int, source: ShardSource) -> None:
        self.source = source
        self._end_row = end_row
        self._chunks = store.scan_chunks(prefix, start=prefix + first_row.to_bytes(8, "big"), sizes=_sizes())
        self._rows: list[tuple[bytes, bytes]] = []
        self._ids: _Ids = np.empty(0, np.int64)
        self._has_ended = False

    @property
    def last_row(self) -> int:
        """Last row id up to which all rows have been read."""
        return _MAX_ROW if self._has_ended else int(self._ids[-1])

    def fill(self) -> bool:
        """Read more rows if none is left; return False at the end."""
        if not self._rows and not self._has_ended:
            rows = next(self._chunks, [])
            ids = decode_row_ids([key for key, _ in rows])
            num_wanted = int(np.searchsorted(ids, self._end_row))
            self._has_ended = not rows or num_wanted < ids.size
            self._rows, self._ids = rows[:num_wanted], ids[:num_wanted]
        return bool(self._rows)

    def take_up_to(self, last_row: int) -> tuple[_Ids, list[tuple[bytes, bytes]]]:
        """Return the rows up to one and drop them."""
        count = int(np.searchsorted(self._ids, last_row, side="right"))
        taken = self._ids[:count], self._rows[:count]
        self._ids, self._rows = self._ids[count:], self._rows[count:]
        return taken


def _columns(spec: TableSpec, weights: _Array, states: dict[str, _Array], columns: ColumnShard) -> Iterator[_Array]:
    """Yield the columns to digest as the trainer of this column shard holds them; only states that are given."""
    part = slice(columns.offset, columns.offset + columns.width)
    yield weights[:, part]
    for state in spec.states:
        if state.name not in states:
            continue
        if state.kind is StateKind.POINTWISE:
            yield states[state.name][:, part]
        elif columns == spec.whole:
            yield states[state.name]
