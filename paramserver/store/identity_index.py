"""Which row has an identity: an index over the rows of tables that have identities, kept beside them in the store.

Every update of a row writes a claim (`schemas/identity_claims.py`): this row has this identity, since this version.
Claims pend, coalesce and settle by the same rules as rows, with the identity in the place of the row id; they reach
RocksDB in the same window, and replaying the log makes them again. So an identity belongs to the row that was last
written with it. When that row has been given to another identity since, or deleted, the identity has no row.

Nobody takes a claim back: a look-up reads the claim, then the row, and believes both only when they agree.
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

from headrace.paramserver.process.log_format import fact
from headrace.paramserver.store.catalog import INDEXED_PREFIX, Catalog, Table
from headrace.paramserver.store.pending import Batch, CoalescedRun, Part, RowDelta, Run
from headrace.paramserver.store.row_reader import GetValues, ShardSource, read_records, read_rows, settle
from headrace.paramserver.store.row_store import RowStore
from headrace.schemas.identity_claims import CLAIMS, NO_IDENTITY, in_key_order
from headrace.schemas.row_keys import decode_row_ids, key_prefix
from headrace.schemas.row_records import FLAG_DELETED, PRESENT
from headrace.schemas.tables import TableSpec

__all__ = ["FoundRows", "IdentitySearch", "claims_of", "in_store_order", "index_in_thread", "index_stored_rows"]

_log = logging.getLogger(__name__)

# Whole rows are read to learn their identities; so many at a time take little memory.
_ROWS_AT_ONCE = 8192

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]


def claims_of(delta: RowDelta, batch: Batch) -> Part | None:
    """Return the claims of a delta's rows, by their identities; None when it has none."""
    if delta.identities is None or not delta.identities.size:
        return None
    is_one = delta.identities != NO_IDENTITY
    identities, row_ids = delta.identities[is_one], delta.row_ids[is_one]
    ordered = np.sort(identities)
    if (ordered[1:] == ordered[:-1]).any():  # no trainer of ours sends that; the later row has it then
        _, last = np.unique(identities[::-1], return_index=True)
        last = identities.size - 1 - last
        identities, row_ids = identities[last], row_ids[last]
    return Part(CLAIMS, identities, {"row": row_ids}, batch) if identities.size else None


def in_store_order(run: Run | CoalescedRun) -> Run | CoalescedRun:
    """Return a settled run as the store takes it, in the order of its keys: claims for negative identities go last."""
    if run.layout is not CLAIMS or (order := in_key_order(run.row_ids)) is None:
        return run
    return run.take(order)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundRows:
    """Where identities are, in the order asked for.

    Attributes:
        row_ids: int64[n]; -1 where no row has the identity.
        epochs: int64[n], version of the last update that wrote a row with the identity, also when the row has it no
            more; 0 where none did.
        steps: int64[n], second half of that version.
        seq: Every batch up to this position of the log is in the answer.
    """

    row_ids: _Ids
    epochs: _Ids
    steps: _Ids
    seq: int


class IdentitySearch:
    """A look-up of identities in one shard, in one attempt or, while rows change hands meanwhile, in several.

    An attempt reads claims and then rows. Between the two an identity may move to another row, which looks as if it had
    none. So an identity has no row only when a second attempt, with views taken after the first, finds the same claim.

    Thread: one at a time, any.

    Attributes:
        has_ended: No attempt is needed any more.
    """

    def __init__(self, identities: _Ids, *, seq: int) -> None:
        """Look for identities.

        Args:
            identities: int64[n], any order, may repeat; `NO_IDENTITY` has no row.
            seq: Position in the log that the first attempt's views are from.
        """
        self.has_ended = False
        self._identities = identities
        self._seq = seq
        self._has_begun = False

    @property
    def num_open(self) -> int:
        """Identities that the next attempt looks at."""
        return int(self._open.size if self._has_begun else self._identities.size)

    def _begin(self) -> None:
        # In the attempt's thread: a request may have some million identities.
        self._has_begun = True
        self._unique, self._back = np.unique(self._identities, return_inverse=True)
        self._rows = np.full(self._unique.size, -1, np.int64)
        self._claims = np.zeros(self._unique.size, CLAIMS.dtype)
        self._open = np.flatnonzero(self._unique != NO_IDENTITY)

    def attempt(
        self, table_id: int, spec: TableSpec, claims: ShardSource, rows: Sequence[ShardSource], get: GetValues
    ) -> None:
        """Look for what has not been settled.

        Args:
            table_id: Number of the table.
            spec: What the table is.
            claims: Where its claims are.
            rows: Each column shard that its rows may be in; of the same moment as `claims`.
            get: Reads values from RocksDB.

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
        """Return what was found. REQUIRES: `has_ended`."""
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
    """Write claims for rows that were stored before there was an index; return how many tables had such rows.

    Once a table: a mark among the metadata says that it has been done, and until then another one how far it is. Of
    several rows with one identity the newest has it.

    Args:
        store: Nobody writes to it meanwhile.
        tables: Those that the store knows.
        is_stopping: Asked every some thousand rows; once it says so this ends, and the next time it goes on from there.

    Raises:
        StorageError: The disk failed; the next time it goes on from about there.

    Thread: any; it blocks, some microseconds a row.
    """
    meta, num_tables = store.read_meta(), 0
    for table in tables:
        mark, place = (INDEXED_PREFIX + b"%d" % table.table_id + end for end in (b"", b"/last_key"))
        if table.spec.has_identities and mark not in meta:
            num_rows = store.num_rows_estimate(table.table_id)
            if num_rows:
                fact(_log, logging.INFO, "identities of stored rows are indexed", table=table.spec.fqn, rows=num_rows)
            found = False
            for last_key, run in _stored_claims(store, table, after_key=meta.get(place, b"")):
                if is_stopping():
                    return num_tables
                found = True
                claims = [in_store_order(settle(run, store.get))] if run.row_ids.size else []
                store.write_runs([], claims=claims, meta={place: last_key}, applied_seq=store.applied_seq)
            num_tables += found
            store.write([], [], meta={mark: b"1", place: b""})
    return num_tables


async def index_in_thread(store: RowStore) -> int:
    """Do `index_stored_rows` for all tables of a store. For a table of a billion rows it takes an hour.

    Cancellation: it ends soon, and goes on from there the next time.
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
            _log.error("indexing of identities has failed while it was stopped: %s", error)
        raise


def _stored_claims(store: RowStore, table: Table, *, after_key: bytes) -> Iterator[tuple[bytes, Run]]:
    """Yield (last key looked at, claims) for the rows of a table, conditional, so that newer ones stay."""
    # Column shards are never taken from the list, so those before that of the key are done.
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
            run = Run(table.table_id, CLAIMS, identities[is_newest], claims[is_newest], is_conditional)
            yield chunk[-1][0], run
