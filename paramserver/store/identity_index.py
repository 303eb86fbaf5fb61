"""The identity index: which row has an identity, kept beside the rows of tables with identities.

Every update of a row writes an identity claim (`schemas/row_records.py`): this row has this identity, since this
version. Claims pend, coalesce and settle by the rules of rows, with the identity as the id. They reach RocksDB in the
same window, and a replay of the log makes them again. So an identity belongs to the row that was last written with it.
If that row has since been deleted or given another identity, the identity has no row.

Claims are never withdrawn: a lookup reads the claim, then the row, and believes them only if they agree.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.store.catalog import INDEXED_PREFIX, Catalog, Table
from headrace.paramserver.store.coalescing import CoalescedRows, SortedRun
from headrace.paramserver.store.memtable import ShardSource
from headrace.paramserver.store.row_reader import GetValues, read_records, read_rows, settle
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.system.log_lines import fact
from headrace.schemas.row_records import (
    CLAIMS,
    FLAG_DELETED,
    NO_IDENTITY,
    PRESENT,
    decode_row_ids,
    in_key_order,
    key_prefix,
)
from headrace.schemas.tables import TableSpec

__all__ = ["FoundRows", "IdentitySearch", "in_store_order", "index_in_thread", "index_stored_rows"]

_log = logging.getLogger(__name__)

# Whole rows are read for their identities; this bounds the memory.
_ROWS_AT_ONCE = 8192

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]


def in_store_order(run: SortedRun | CoalescedRows) -> SortedRun | CoalescedRows:
    """Return a settled run in the order of its keys, in which claims of negative identities come last."""
    if run.layout is not CLAIMS or (order := in_key_order(run.row_ids)) is None:
        return run
    return run.take(order)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundRows:
    """The rows of identities, in the order asked for; each batch up to log position `seq` is included.

    `row_ids` are int64[n], -1 where no row has the identity. `epochs` and `steps` are the version of the last update
    that wrote a row with the identity, even if it has moved since; 0 where none did.
    """

    row_ids: _Ids
    epochs: _Ids
    steps: _Ids
    seq: int


class IdentitySearch:
    """A lookup of identities, int64[n], in one shard, repeated while they move between rows.

    An attempt reads claims, then rows. An identity that moves in between looks as if it had no row. So an identity
    counts as absent only when a second attempt, with views taken after the first, finds the same claim. `has_ended`
    says that no further attempt is needed. `seq` is the log position of the first attempt's views.

    Thread: any, one at a time.
    """

    def __init__(self, identities: _Ids, *, seq: int) -> None:
        self.has_ended = False
        self._identities = identities
        self._seq = seq
        self._has_begun = False

    @property
    def num_open(self) -> int:
        """Identities that the next attempt looks at."""
        return int(self._open.size if self._has_begun else self._identities.size)

    def _begin(self) -> None:
        # In the attempt's thread, because a request may have a million identities.
        self._has_begun = True
        self._unique, self._back = np.unique(self._identities, return_inverse=True)
        self._rows = np.full(self._unique.size, -1, np.int64)
        self._claims = np.zeros(self._unique.size, CLAIMS.dtype)
        self._open = np.flatnonzero(self._unique != NO_IDENTITY)

    def attempt(
        self, table_id: int, spec: TableSpec, claims: ShardSource, rows: Sequence[ShardSource], get: GetValues
    ) -> None:
        """Look for the identities that are not settled yet, in sources of claims and rows of one moment.

        Raises:
            StorageError: RocksDB could not be read.
        """
        if not self._has_begun:
            self._begin()
        records, has_claim = read_records(table_id, claims, self._unique[self._open], get)
        self._open, records = self._open[has_claim], records[has_claim]
        is_known = self._claims[self._open] == records
        self._claims[self._open] = records
        of_claims = records["row"].astype(np.int64)
        agrees = np.zeros(self._open.size, bool)
        for first in range(0, self._open.size, _ROWS_AT_ONCE):
            some = slice(first, first + _ROWS_AT_ONCE)
            found = read_rows(table_id, spec, rows, of_claims[some], get, seq=self._seq)
            assert found.identities is not None
            agrees[some] = (found.presence == PRESENT) & (found.identities == self._unique[self._open[some]])
        self._rows[self._open[agrees]] = of_claims[agrees]
        self._open = self._open[~agrees & ~is_known]
        self.has_ended = not self._open.size

    def result(self) -> FoundRows:
        """Return the rows found. REQUIRES: `has_ended`."""
        claims = self._claims[self._back]
        return FoundRows(
            row_ids=self._rows[self._back],
            epochs=claims["epoch"].astype(np.int64),
            steps=claims["step"].astype(np.int64),
            seq=self._seq,
        )


def index_stored_rows(
    store: RowStore, tables: Sequence[Table], *, is_stopping: Callable[[], bool] = lambda: False
) -> int:
    """Write claims for rows stored before the index existed; return how many tables had such rows.

    Metadata records that a table is done, and until then how far it is: after `is_stopping` or an error, the next call
    goes on from about there. The newest of several rows with one identity gets it. Nobody else writes to the store
    meanwhile.

    Raises:
        StorageError: The disk failed.

    Thread: any; it blocks, some microseconds for each row.
    """
    meta, num_tables = store.read_meta(), 0
    for table in tables:
        done_key, place_key = (INDEXED_PREFIX + b"%d" % table.table_id + end for end in (b"", b"/last_key"))
        if table.spec.has_identities and done_key not in meta:
            num_rows = store.num_rows_estimate(table.table_id)
            if num_rows:
                fact(_log, logging.INFO, "identities of stored rows are indexed", table=table.spec.fqn, rows=num_rows)
            found = False
            for last_key, run in _stored_claims(store, table, after_key=meta.get(place_key, b"")):
                if is_stopping():
                    return num_tables
                found = True
                claims = [in_store_order(settle(run, store.get))] if run.row_ids.size else []
                store.write_runs([], claims=claims, meta={place_key: last_key}, applied_seq=store.applied_seq)
            num_tables += found
            store.write([], [], meta={done_key: b"1", place_key: b""})
    return num_tables


async def index_in_thread(store: RowStore) -> int:
    """Run `index_stored_rows` for all tables of a store. A table of a billion rows takes an hour.

    Cancellation: indexing ends soon, and goes on from there the next time.
    """
    stopping = threading.Event()
    work = asyncio.to_thread(index_stored_rows, store, list(Catalog(store.read_meta())), is_stopping=stopping.is_set)
    indexing = asyncio.create_task(work)
    try:
        return await asyncio.shield(indexing)
    except asyncio.CancelledError:
        stopping.set()
        await asyncio.wait([indexing])  # the store is closed next
        if (error := indexing.exception()) is not None:
            _log.error("indexing identities failed while it was being stopped: %s", error)
        raise


def _stored_claims(store: RowStore, table: Table, *, after_key: bytes) -> Iterator[tuple[bytes, SortedRun]]:
    """Yield (last key read, conditional claims) for a table's rows; being conditional, they replace no newer claim."""
    # Column shards are never removed from the list, so those before the key's are done.
    prefixes = [key_prefix(table.table_id, shard) for shard in store.layouts(table.table_id)]
    done = prefixes.index(after_key[: len(prefixes[0])]) if after_key else 0
    for shard, prefix in list(zip(store.layouts(table.table_id), prefixes, strict=True))[done:]:
        layout = table.layout_of(shard)
        pairs = store.scan(prefix, start=after_key + b"\0" if after_key.startswith(prefix) else None)
        while chunk := list(islice(pairs, _ROWS_AT_ONCE)):
            records, _ = layout.decode([value for _, value in chunk])
            counts = ((records["flags"] & FLAG_DELETED) == 0) & (records["identity"] != NO_IDENTITY)
            records, row_ids = records[counts], decode_row_ids([key for key, _ in chunk])[counts]
            order = np.lexsort((records["step"], records["epoch"], records["identity"]))
            records, row_ids = records[order], row_ids[order]
            identities = records["identity"].astype(np.int64)
            is_newest = np.append(identities[1:] != identities[:-1], [True] * bool(identities.size))
            claims = np.zeros(identities.size, CLAIMS.dtype)
            for field in CLAIMS.header_dtype.names or ():
                claims[field] = records[field]
            claims["row"] = row_ids
            is_conditional = np.ones(np.count_nonzero(is_newest), bool)
            run = SortedRun(table.table_id, CLAIMS, identities[is_newest], claims[is_newest], is_conditional)
            yield chunk[-1][0], run
