"""A replica's table on disk: in the copy's RocksDBs, behind a cache of its hot rows."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from headrace.paramserver.replica.tables.base import Bools, Found, Ids, Located, Rows, default_row
from headrace.paramserver.replica.tables.disk_stores import DiskStores
from headrace.paramserver.replica.tables.hot_rows import HotRows, HotRowStats, capacity_for
from headrace.paramserver.replica.tables.slot_rows import opaque_rows
from headrace.paramserver.store.coalescing import SortedRun, coalesce
from headrace.paramserver.store.deltas import Batch, Part, RowDelta
from headrace.paramserver.store.memtable import ShardSource
from headrace.paramserver.store.row_reader import read_rows
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import HeadraceError, UnavailableError
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.row_records import FLAG_DELETED, MISSING, PRESENT, RECORD_VERSION, RecordLayout, encode_keys
from headrace.schemas.tables import ColumnShard, TableSpec

__all__ = ["DiskTable"]

_log = logging.getLogger(__name__)

_Array = npt.NDArray[Any]

# Rows of one multi-get. Its results become Python objects under the GIL, about 1 µs a row.
_ROWS_PER_GET = 2048
# Fewer rows are read by the caller alone: handing rows to other threads costs as much as reading a few hundred.
_ROWS_TO_SPLIT = 8192
# Ids that may wait for a prefetch: 8 MiB.
_MAX_PREFETCHING = 1 << 20
# A row that is being written cannot be admitted; the next attempt comes after the write.
_PIN_ATTEMPTS = 8


class DiskTable:
    """Rows of one table as lookups see them; see `ReplicaTable`.

    An update goes to the disk, then to the hot rows that it changes. Hot rows are never ahead of the disk and never
    written back to it; during the update, reads of them go to the disk. A reader that overlaps with an update may see
    each row before or after it, but never an old row again once it has seen the new one, and the rows it reads from the
    disk are not admitted as hot. The table set's `SeqLock` makes it read again.
    """

    def __init__(
        self,
        spec: TableSpec,
        stores: DiskStores,
        *,
        hot_bytes: int,
        cache_bytes: int = 0,
        default: Rows | None = None,
    ) -> None:
        """Open a table in a copy's stores; `cache_bytes` is its share of their memory, for `size_bytes`."""
        self.spec = spec
        self.is_loaded = stores.has(spec.fqn)  # the stores had its rows from the start
        self._stores = stores
        self._table_ids = stores.table_ids(spec)
        self._seed = spec.seed
        # In a snapshot's stores rows lie as the shards wrote them; our own stores have only what lookups need.
        self._spec = spec if stores.is_linked else dataclasses.replace(spec, states=(), has_identities=False)
        self._whole = RecordLayout(self._spec, spec.whole)
        self._default = default_row(spec, default)
        self._row_bytes = spec.dim * spec.dtype.size_bytes
        self._hot_bytes = hot_bytes
        self._hot = HotRows(capacity_for(hot_bytes, self._row_bytes, spec.num_rows), self._row_bytes)
        self._cache_bytes = cache_bytes
        self._counting = threading.Lock()
        self._num_prefetching = self._num_dropped = 0

    @property
    def num_present(self) -> int:
        """Approximate number of present rows: overwritten rows may count more than once, deleted rows count."""
        with self._stores.in_use():
            pairs = zip(self._stores.stores, self._table_ids, strict=True)
            number = sum(store.num_rows_estimate(table_id) for store, table_id in pairs)
        return min(number, self.spec.num_rows) if self.spec.num_rows else number

    @property
    def size_bytes(self) -> int:
        """Memory of the hot rows plus the table's share of the stores' caches."""
        return self._hot.size_bytes + self._cache_bytes

    @property
    def stats(self) -> HotRowStats:
        """Counts of lookups so far."""
        return dataclasses.replace(self._hot.stats, dropped=self._num_dropped)

    def gather(self, ids: Ids) -> Found:
        """Return rows and which of them are missing; raise if the copy is closed or the disk failed."""
        return self._gather(ids, is_use=True)

    def inspect(self, ids: Ids) -> Found:
        """Return what `gather` returns without a trace; see `ReplicaTable.inspect`."""
        return self._gather(ids, is_use=False)

    def _gather(self, ids: Ids, *, is_use: bool) -> Found:
        found = np.empty((ids.size, self.spec.dim), self._default.dtype)
        rows = opaque_rows(found)
        with self._stores.in_use():
            is_here, is_present = self._hot.gather(ids, rows, is_use=is_use)
            if not is_here.all():
                at = np.flatnonzero(~is_here)
                missed, where = np.unique(ids[at], return_inverse=True)
                read, is_read_present = self._fetch(missed)[:2] if is_use else self._read(missed)
                rows[at] = read[where]
                is_present[at] = is_read_present[where]
        return found, ~is_present

    def locate(self, ids: Ids) -> Located:
        """Return a copy of the rows, in the order of the ids; see `ReplicaTable.locate`."""
        rows, missing = self.gather(ids)
        return rows, np.arange(ids.size), missing

    def prefetch(self, ids: Ids) -> Future[int]:
        """Read int64[n] rows into the hot rows in the background, and return the number of rows read, as a future.

        If more than a million ids wait already, these are dropped and counted, and the result is 0 at once.
        """
        with self._counting:
            if self._num_prefetching + ids.size > _MAX_PREFETCHING:
                self._num_dropped += ids.size
                dropped: Future[int] = Future()
                dropped.set_result(0)
                return dropped
            self._num_prefetching += ids.size
        try:
            reading = self._stores.submit(partial(self._read_ahead, ids.copy()))
        except UnavailableError:
            self._end_prefetch(ids.size)
            raise
        reading.add_done_callback(lambda done: self._prefetched(done, ids.size))
        return reading

    @contextlib.contextmanager
    def pinned(self, ids: Ids) -> Iterator[int]:
        """Keep int64[n] rows hot for the block, reading those that are not, and yield how many of them are kept.

        Not all are kept if a set of the cache cannot pin more rows, which begins at about a fourth of the capacity.
        """
        left = np.unique(ids)
        kept: list[Ids] = []
        try:
            for _ in range(_PIN_ATTEMPTS):
                has = self._hot.pin(left)
                kept.append(left[has])
                left = left[~has]
                if not left.size:
                    break
                with self._stores.in_use():
                    _, _, entered = self._fetch(left, is_wanted=True, is_pinned=True)
                kept.append(left[entered])
                left = left[~entered]
            yield sum(some.size for some in kept)
        finally:
            for some in kept:
                self._hot.unpin(some)

    def apply(self, delta: RowDelta, *, epoch: int, step: int) -> None:
        """Apply a delta's rows and deletions; after a `StorageError` all lookups in this copy fail."""
        layout = RecordLayout(self._spec, delta.layout.shard)
        delta = dataclasses.replace(
            delta, layout=layout, identities=delta.identities if self._spec.has_identities else None
        )
        batch = Batch(seq=0, epoch=epoch, step=step, time_us=0)
        parts = [Part.of_delta(delta, batch)]
        if layout.shard == self.spec.whole and delta.deleted_row_ids is not None:  # in every layout, as in the store
            pairs = zip(self._stores.stores, self._table_ids, strict=True)
            known = {shard for store, table_id in pairs for shard in store.layouts(table_id)}
            if known and layout.shard not in known and not delta.row_ids.size:
                parts.clear()
            others = [RecordLayout(self._spec, shard) for shard in known - {layout.shard}]
            parts += [Part(other, delta.deleted_row_ids, {}, batch) for other in others]
        for part in parts:
            if part.ids.size:
                self._write(coalesce(0, [part]).copied())

    def load(self, row_ids: Ids, weights: Any, presence: Any, epochs: Any, steps: Any, shard: ColumnShard) -> None:
        """Load rows that were read from a store; see `ReplicaTable.load`."""
        layout = RecordLayout(self._spec, shard)
        at = np.flatnonzero(presence == PRESENT)
        if not at.size:
            return
        at = at[np.argsort(row_ids[at])]
        records = np.zeros(at.size, layout.dtype)
        # Below every version: a record of some columns that follows in the log counts, also at the version of the read.
        layout.set_header(records, ..., epoch=0, step=0, time_us=0)
        records["weights"] = np.frombuffer(weights, layout.dtype["weights"])[at]
        self._write(SortedRun(0, layout, row_ids[at], records))

    def grow(self, spec: TableSpec) -> None:
        """Take a spec with more rows, and room for them in memory within `hot_bytes`; see `ReplicaTable.grow`."""
        assert spec.is_growth_of(self.spec), "callers compare"
        self._hot.grow(capacity_for(self._hot_bytes, self._row_bytes, spec.num_rows) // self._hot.capacity)
        self.spec, self._spec = spec, dataclasses.replace(self._spec, num_rows=spec.num_rows)

    def close(self) -> None:
        """Close the copy's stores and remove them; raise `StorageError` if a file stays. Idempotent."""
        self._stores.close()

    def _write(self, run: SortedRun) -> None:
        """Write a run to the stores, then to the hot rows."""
        with self._stores.in_use():
            self._write_through(run)

    def _write_through(self, run: SortedRun) -> None:
        self._hot.begin_write(run.row_ids)
        written: list[SortedRun] = []
        try:
            for number, at in self._dealt(run.row_ids):
                store = self._stores.stores[number]
                part = run if at is None else run.take(at)
                part = dataclasses.replace(part, table_id=self._table_ids[number])
                store.write_runs([part], meta={}, applied_seq=store.applied_seq)
                written.append(part)
            changed, rows, is_present = self._hot_rows_of(written)
        except HeadraceError as exc:
            self._stores.failure = exc
            raise
        self._hot.end_write(run.row_ids, rows, changed, is_present)

    def _hot_rows_of(self, written: list[SortedRun]) -> tuple[Ids, _Array, Bools]:
        """Return the written rows that are hot, as they are now."""
        ids = np.concatenate([run.row_ids for run in written])
        is_hot = self._hot.has(ids)
        if not all(self._is_whole(number) for number in range(len(self._table_ids))):
            changed = np.sort(ids[is_hot])
            return changed, *self._read(changed)
        records = np.concatenate([run.records for run in written])[is_hot]
        is_present = (records["flags"] & FLAG_DELETED) == 0
        rows = np.ascontiguousarray(records["weights"])
        rows[~is_present] = self._default_row
        return ids[is_hot], rows, is_present

    def _fetch(self, ids: Ids, *, is_wanted: bool = False, is_pinned: bool = False) -> tuple[_Array, Bools, Bools]:
        """Read ascending unique rows from the disk; return them, which are present, and which became hot."""
        ticket = self._hot.ticket(ids)
        rows, is_present = self._read(ids)
        entered = self._hot.admit(ids, rows, is_present, ticket, is_wanted=is_wanted, is_pinned=is_pinned)
        return rows, is_present, entered

    def _read(self, ids: Ids) -> tuple[_Array, Bools]:
        """Return ascending rows as they are on the disk, and which of them are present."""
        rows = np.empty(ids.size, f"V{self._row_bytes}")
        is_present = np.zeros(ids.size, bool)
        works: list[Callable[[], None]] = []
        for number, at in self._dealt(ids):
            for start in range(0, ids.size if at is None else at.size, _ROWS_PER_GET):
                part = slice(start, start + _ROWS_PER_GET)
                some = part if at is None else at[part]
                works.append(partial(self._read_some, number, ids[some], some, rows, is_present))
        if ids.size >= _ROWS_TO_SPLIT:
            self._stores.run_all(works)
        else:
            for work in works:
                work()
        rows[~is_present] = self._default_row
        return rows, is_present

    def _read_some(self, number: int, ids: Ids, at: Ids | slice, rows: _Array, is_present: Bools) -> None:
        store, table_id = self._stores.stores[number], self._table_ids[number]
        if self._is_whole(number):
            records, presence = self._decoded(store.get(encode_keys(table_id, self.spec.whole, ids)))
            rows[at] = records["weights"]
        else:
            sources = [ShardSource(RecordLayout(self._spec, s), None, True) for s in store.layouts(table_id)]
            read = read_rows(table_id, self._spec, sources, ids, store.get, seq=0)
            rows[at] = np.ascontiguousarray(read.weights).view(f"V{self._row_bytes}")[:, 0]
            presence = read.presence
        is_present[at] = presence == PRESENT

    def _decoded(self, values: list[bytes | None]) -> tuple[_Array, _Array]:
        """Return (records, presence) as `RecordLayout.decode` does, in half the time if all rows are there."""
        size = self._whole.size_bytes
        if None not in values and set(map(len, cast("list[bytes]", values))) == {size}:
            records = np.frombuffer(b"".join(cast("list[bytes]", values)), self._whole.dtype)
            if (records["version"] == RECORD_VERSION).all():
                return records, np.where(records["flags"] & FLAG_DELETED, MISSING, PRESENT)
        return self._whole.decode(values)

    def _is_whole(self, number: int) -> bool:
        """Return whether a store has only ever got whole rows."""
        store: RowStore = self._stores.stores[number]
        return store.layouts(self._table_ids[number]) in ((), (self.spec.whole,))

    def _dealt(self, ids: Ids) -> Iterator[tuple[int, Ids | None]]:
        """Yield each store that has some of the rows, with their positions; None for all."""
        if len(self._table_ids) == 1:
            yield 0, None
            return
        owners = shards_of_rows(self._seed, ids, len(self._table_ids))
        for number in range(len(self._table_ids)):
            at = np.flatnonzero(owners == number)
            if at.size:
                yield number, at

    def _read_ahead(self, ids: Ids) -> int:
        wanted = np.unique(ids)
        wanted = wanted[~self._hot.has(wanted)]
        for start in range(0, wanted.size, _ROWS_PER_GET):
            with self._stores.in_use():
                self._fetch(wanted[start : start + _ROWS_PER_GET], is_wanted=True)
        return int(wanted.size)

    def _prefetched(self, done: Future[int], number: int) -> None:
        self._end_prefetch(number)
        if not done.cancelled():
            error = done.exception()
            if error is not None and not isinstance(error, UnavailableError):  # closed meanwhile: nobody needs them
                _log.warning("table %r: prefetch failed: %s", self.spec.fqn, error)

    def _end_prefetch(self, number: int) -> None:
        with self._counting:
            self._num_prefetching -= number

    @property
    def _default_row(self) -> Any:
        return opaque_rows(self._default[None])[0]
