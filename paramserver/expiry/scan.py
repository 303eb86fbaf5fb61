"""Scan the stored rows of a table in the order of their ids, a bounded piece at a time.

Each piece opens its own iterators, so a scan that takes hours keeps no old files and sees later writes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.expiry.policy import RowFacts
from headrace.paramserver.store.catalog import Table
from headrace.paramserver.store.memtable import ShardSource
from headrace.paramserver.store.row_reader import read_rows
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import CorruptionError
from headrace.schemas.row_records import (
    FLAG_DELETED,
    PRESENT,
    RECORD_VERSION,
    RecordLayout,
    decode_row_ids,
    key_prefix,
)
from headrace.schemas.tables import DType

__all__ = ["HeaderScanner", "Pace", "Piece", "RowScanner", "concatenate"]

_Ids = npt.NDArray[np.int64]
_Array = npt.NDArray[Any]
_LAST_ROW = 2**63 - 1
# rocksdict makes the objects of this many rows at once with the GIL held, about 1 µs each.
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1024, 1 << 20
_PIECE_ROWS, _PIECE_BYTES = 8192, 16 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a table: the number read, and facts about live ones."""

    num_rows: int
    facts: RowFacts


class RowScanner:
    """Scans a table once; `with_norms` reads the weights too.

    Thread: any, one at a time; `next_piece` blocks, and lets other threads run about every millisecond.
    """

    def __init__(
        self, store: RowStore, table: Table, *, with_norms: bool = False, piece_rows: int = _PIECE_ROWS
    ) -> None:
        self._store, self._table = store, table
        self._with_norms = with_norms
        self._piece_rows = piece_rows
        self._next_row = 0

    def next_piece(self) -> Piece | None:
        """Return the next rows; None after the last. Raises StorageError, or CorruptionError for a bad record."""
        layouts = [self._table.layout_of(shard) for shard in self._store.layouts(self._table.table_id)]
        if not layouts or self._next_row > _LAST_ROW:
            return None
        if len(layouts) == 1 and layouts[0].shard == self._table.spec.whole:
            return self._piece_of_whole_rows(layouts[0])
        return self._piece_of_parts(layouts)

    def _piece_of_whole_rows(self, layout: RecordLayout) -> Piece | None:
        parts, num_rows = [], 0
        for ids, pairs in self._chunks(layout, self._piece_rows):
            num_rows += ids.size
            parts.append(self._facts_of(layout, ids, [value for _, value in pairs]))
            self._next_row = int(ids[-1]) + 1
        if not num_rows:
            return None
        return Piece(num_rows, concatenate(parts))

    def _facts_of(self, layout: RecordLayout, ids: _Ids, values: list[bytes]) -> RowFacts:
        if self._with_norms:
            records, _ = layout.decode(values)
        else:
            records = _headers_of(self._table, layout, values)
        is_live = (records["flags"] & FLAG_DELETED) == 0
        if not is_live.all():
            ids, records = ids[is_live], records[is_live]
        norms = None
        if self._with_norms:
            column = layout.columns["weights"]
            weights = np.ascontiguousarray(records["weights"]).view(column.dtype.numpy).reshape(ids.size, column.width)
            norms = _norms(self._table.spec.dtype, weights)
        epochs, steps, times_us = (records[name].astype(np.int64) for name in ("epoch", "step", "time_us"))
        return RowFacts(row_ids=ids, epochs=epochs, steps=steps, times_us=times_us, norms=norms)

    def _piece_of_parts(self, layouts: list[RecordLayout]) -> Piece | None:
        """Assemble rows as a read does: each column's newest record counts, and the newest gives the version."""
        spec, table_id = self._table.spec, self._table.table_id
        found = [
            self._read_ahead(layout, min(self._piece_rows, _PIECE_BYTES // layout.size_bytes + 1)) for layout in layouts
        ]
        last_row = min(last for _, _, last in found)
        ids = np.unique(np.concatenate([ids for ids, _, _ in found]))
        ids = ids[ids <= last_row]
        if not ids.size:
            return None
        self._next_row = last_row + 1
        values = dict(itertools.chain.from_iterable(pairs for _, pairs, _ in found))
        sources = [ShardSource(layout, None, True) for layout in layouts]
        rows = read_rows(table_id, spec, sources, ids, lambda keys: [*map(values.get, keys)], seq=0)
        is_live = rows.presence == PRESENT
        facts = RowFacts(
            row_ids=ids[is_live],
            epochs=rows.epochs[is_live],
            steps=rows.steps[is_live],
            times_us=rows.times_us[is_live],
            norms=_norms(spec.dtype, rows.weights[is_live]) if self._with_norms else None,
        )
        return Piece(ids.size, facts)

    def _read_ahead(self, layout: RecordLayout, num_rows: int) -> tuple[_Ids, list[tuple[bytes, bytes]], int]:
        """Return the next records of a column shard, and the row up to which they are complete."""
        chunks = list(self._chunks(layout, num_rows))
        ids = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in chunks)])
        pairs = [*itertools.chain.from_iterable(pairs for _, pairs in chunks)]
        return ids, pairs, int(ids[-1]) if ids.size >= num_rows else _LAST_ROW

    def _chunks(self, layout: RecordLayout, num_rows: int) -> Iterator[tuple[_Ids, list[tuple[bytes, bytes]]]]:
        """Yield the next `num_rows` records of a column shard in chunks, none of them empty."""
        prefix = key_prefix(self._table.table_id, layout.shard)
        start = prefix + self._next_row.to_bytes(8, "big")
        most = max(min(_ROWS_AT_ONCE, _BYTES_AT_ONCE // layout.size_bytes), 1)
        sizes = [min(most, num_rows - before) for before in range(0, num_rows, most)]
        for chunk in self._store.scan_chunks(prefix, start=start, sizes=sizes):
            yield decode_row_ids([key for key, _ in chunk]), chunk
            time.sleep(0)  # releases the GIL to waiting threads now, not after 5 ms


class HeaderScanner:
    """Scans the ids and headers of one column shard's records, deleted ones too, once.

    Thread: as `RowScanner`.
    """

    def __init__(self, store: RowStore, table: Table, layout: RecordLayout, *, piece_rows: int) -> None:
        self._store, self._table, self._layout = store, table, layout
        self._sizes = [min(_ROWS_AT_ONCE, piece_rows - start) for start in range(0, piece_rows, _ROWS_AT_ONCE)]
        self._prefix = self._start = key_prefix(table.table_id, layout.shard)

    def next_piece(self) -> tuple[_Ids, _Array] | None:
        """Return the next int64[n] ids with their headers; None after the last.

        Raises StorageError, or CorruptionError for a bad record.
        """
        ids, headers = [], []
        for chunk in self._store.scan_chunks(self._prefix, start=self._start, sizes=self._sizes):
            ids.append(decode_row_ids([key for key, _ in chunk]))
            values = [value for _, value in chunk]
            headers.append(_headers_of(self._table, self._layout, values))
            self._start = chunk[-1][0] + b"\0"
            time.sleep(0)  # releases the GIL to waiting threads now, not after 5 ms
        return (np.concatenate(ids), np.concatenate(headers)) if ids else None


class Pace:
    """Limits how many rows are read in a second; 0 sets no limit."""

    def __init__(self, rows_per_s: int, sleep: Callable[[float], Awaitable[None]]) -> None:
        self._rows_per_s, self._sleep = rows_per_s, sleep
        self._due_s = time.monotonic()

    async def wait(self) -> None:
        """Wait until more rows may be read."""
        if (wait_s := self._due_s - time.monotonic()) > 0:
            await self._sleep(wait_s)

    def count(self, num_rows: int) -> None:
        """Note that rows were read."""
        if self._rows_per_s:
            self._due_s = max(self._due_s, time.monotonic() - 1) + num_rows / self._rows_per_s


def _headers_of(table: Table, layout: RecordLayout, values: list[bytes]) -> _Array:
    header_bytes = layout.header_dtype.itemsize
    if min(map(len, values)) < header_bytes:
        raise CorruptionError(f"a stored row of table {table.spec.fqn!r} is shorter than its header")
    records: _Array = np.frombuffer(b"".join([value[:header_bytes] for value in values]), layout.header_dtype)
    if np.any(records["version"] != RECORD_VERSION):
        raise CorruptionError(f"a stored row has a record version other than {RECORD_VERSION}")
    return records


def concatenate(parts: list[RowFacts]) -> RowFacts:
    """Return facts about the rows of all parts, at least one, in order; without frequencies."""
    norms = [part.norms for part in parts if part.norms is not None]
    return RowFacts(
        row_ids=np.concatenate([part.row_ids for part in parts]),
        epochs=np.concatenate([part.epochs for part in parts]),
        steps=np.concatenate([part.steps for part in parts]),
        times_us=np.concatenate([part.times_us for part in parts]),
        norms=np.concatenate(norms) if norms else None,
    )


def _norms(dtype: DType, weights: _Array) -> npt.NDArray[np.float64]:
    """Return the Euclidean norm of each row of `weights`, `dtype.numpy`[n, dim]."""
    if dtype is DType.BFLOAT16:
        weights = (weights.astype(np.uint32) << np.uint32(16)).view(np.float32)
    wide = weights.astype(np.float64)
    norms: npt.NDArray[np.float64] = np.sqrt(np.einsum("ij,ij->i", wide, wide))
    return norms
