"""What a store has of some partitions: copied out of it, loaded into another one, digested, purged.

Copies and digests are of the store as it was at one record of its log. A load and a purge write in the applier's
thread, some megabytes at a time, so the shard goes on. Rows that are loaded, and those that are left to purge, are of
partitions that the shard does not own: nothing serves them, and nothing else writes them.

What a store has loaded is in no log. Its metadata says it, so a checkpoint has rows and word of them together.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgpack
import numpy as np
import numpy.typing as npt

from headrace.paramserver.ingest.partitions import ShardPartitions
from headrace.paramserver.ingest.shared_state import catalog_of_shared_state, pack_shared_state
from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.reshard.copy_chunks import CopyRun, decode_runs, encode_runs, grouped
from headrace.paramserver.reshard.partition_digest import PartitionDigest
from headrace.paramserver.reshard.store_view import PartitionFilter, StoreView
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.catalog import Catalog, Table
from headrace.paramserver.store.coalescing import SortedRun
from headrace.paramserver.store.row_reader import settle
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.system.event_loop import run_in_thread_to_end
from headrace.schemas.errors import CorruptionError, GoneError, RequestError, StorageError
from headrace.schemas.move_records import Move
from headrace.schemas.row_records import CLAIMS, CLAIMS_SHARD, MISSING, encode_keys

__all__ = ["CopiedChunk", "PartitionContents", "PartitionCopy"]

_Ids = npt.NDArray[np.int64]

# ON DISK: never rename. In the store's metadata, by move id: seq of the COPY record, whether all of the copy is there,
# and the partitions.
_META_LOADED = b"reshard/loaded/"
_CHUNK_BYTES = 1 << 20
# Written at once: long enough to go to RocksDB as a file (`StoreConfig.file_bytes`), in about a tenth of a second.
_LOAD_BYTES = 24 << 20
# Claims are compared with those that the store has, some microseconds each.
_LOAD_CLAIMS = 1 << 15
# Removed at once, and in one write: no other Python thread runs during a write.
_PURGE_ROWS, _ROWS_PER_WRITE = 8192, 2048


class _Ingest(Protocol):
    """What is needed of ingest."""

    catalog: Catalog
    sessions: Sessions
    partitions: ShardPartitions

    @property
    def accepted_seq(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedChunk:
    """A piece of a copy.

    Attributes:
        data: About a MiB; what `PartitionContents.load` takes.
        num_rows: Rows and tombstones in it, counted once for each column shard.
        is_last: No chunk follows.
    """

    data: bytes
    num_rows: int
    is_last: bool


class PartitionCopy:
    """A copy that is being read. Thread: the loop's; the work is done in a thread.

    Attributes:
        seq: c: the copy has what the records up to here have made of the partitions. They are durable.
    """

    def __init__(self, seq: int, shared: bytes, view: StoreView, wanted: PartitionFilter) -> None:
        """Read `view`, which `close` closes."""
        self.seq = seq
        self._view: StoreView | None = view
        self._groups = grouped(_runs_of(view, wanted), _CHUNK_BYTES)
        self._next_group: list[CopyRun] | None = None
        self._chunk, self._number = CopiedChunk(data=shared, num_rows=0, is_last=False), 0
        self._turn = asyncio.Lock()

    async def chunk(self, number: int) -> CopiedChunk:
        """Return a chunk, from 0: the one after the last, or the last once more.

        Chunk 0 is the shard's shared state as of `seq` (`ingest/shared_state.py`).

        Cancellation: repeat the call.

        Raises:
            GoneError: Another chunk than these, or the copy is closed: copy anew.
            CorruptionError: A file of the store is damaged.
            StorageError: The disk failed.
        """
        async with self._turn:
            if self._view is None or not self._number <= number <= self._number + (not self._chunk.is_last):
                raise GoneError(f"chunk {number} of a copy of partitions is not there any more: copy anew")
            if number > self._number:
                await run_in_thread_to_end(self._advance)
            return self._chunk

    def _advance(self) -> None:
        # Here, and not from what the thread returns: a cancelled caller would lose the chunk.
        group = self._next_group or next(self._groups, [])
        self._next_group = next(self._groups, None)
        num_rows, is_last = sum(run.num_rows for run in group), self._next_group is None
        self._chunk = CopiedChunk(data=encode_runs(group), num_rows=num_rows, is_last=is_last)
        self._number += 1

    async def close(self) -> None:
        """End the copy and free its files. Idempotent."""
        async with self._turn:
            view, self._view = self._view, None
            if view is not None:
                self._groups = iter(())
                await run_in_thread_to_end(view.close)


class PartitionContents:
    """Copies, loads, digests and purges partitions of one shard's store. Thread: the loop's, for every method."""

    def __init__(
        self, ingest: _Ingest, applier: Applier, store: RowStore, folder: Path, meta: Mapping[bytes, bytes]
    ) -> None:
        """Work on `store`, whose metadata is `meta`, once the log is recovered.

        `folder` is for checkpoints: on the store's file system, nobody else's. What it holds is removed.
        """
        self._ingest, self._applier, self._store, self._folder = ingest, applier, store, folder
        self._turn = asyncio.Lock()  # of loads and purges
        self._numbers = itertools.count()
        self._loaded: dict[bytes, tuple[int, bool, list[int]]] = {}
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as exc:
            raise StorageError(f"{folder}: {exc.strerror}") from exc
        for key, value in meta.items():
            if key.startswith(_META_LOADED):
                try:
                    seq, is_complete, partitions = msgpack.unpackb(value)
                except (ValueError, TypeError) as exc:
                    raise CorruptionError(f"store metadata {key!r} is not of a loaded copy: {exc}") from exc
                self._loaded[key] = seq, is_complete, partitions

    async def copy(self, partitions: Sequence[int]) -> PartitionCopy:
        """Begin a copy of partitions as of the last accepted record (`Ingest.accepted_seq` when this is called).

        First comes what is the whole shard's: tables, floors, scalars, fences, sessions. Then rows with states,
        versions and identities, tombstones, and identity claims, table by table.

        Cancellation: nothing is left.

        Raises:
            StorageError: The disk failed.
            UnavailableError: The store is closing.
        """
        shared = pack_shared_state(self._ingest.catalog, self._ingest.sessions)
        wanted = self._filter(partitions)
        seq, view = await self._view()
        return PartitionCopy(seq, shared, view, wanted)

    async def load(self, move: Move, copy_seq: int, chunks: AsyncIterable[bytes | memoryview]) -> None:
        """Put all chunks of a copy into the store, after removing what is there of the move's partitions.

        `copy_seq` is the seq of the COPY record; it and the shared state of chunk 0 are durable, and no record behind
        it writes the partitions before this returns. Then everything is durable, and `is_loaded`. Rows of tables that
        were dropped here are left out. One load or purge runs at a time.

        Cancellation, or an error of `chunks`: the next load begins anew.

        Raises:
            RequestError: Chunk 0 is none.
            CorruptionError: A chunk is damaged, or of a table that was never here.
            StorageError: The disk failed.
            UnavailableError: The store is closing.
        """
        async with self._turn:
            await self._empty(set(move.partitions))
            await self._note_loaded(move, copy_seq, is_complete=False)
            loader: _Loader | None = None
            async for data in chunks:
                if loader is None:
                    loader = _Loader(self._ingest.catalog, self._store, data)
                    continue
                loader.add(await asyncio.to_thread(decode_runs, data))
                if loader.is_full:
                    await self._run(loader.take())
            if loader is None:
                raise RequestError(f"move {move.move_id!r}: a copy without chunks")
            await self._run(loader.take())
            await self._note_loaded(move, copy_seq, is_complete=True)

    def is_loaded(self, move: Move, copy_seq: int) -> bool:
        """Return whether the store has all of the copy that was loaded at record `copy_seq`."""
        return self._loaded.get(_META_LOADED + move.move_id.encode(), ())[:2] == (copy_seq, True)

    async def digest(self, partitions: Sequence[int], *, like: bytes | None = None) -> tuple[int, bytes]:
        """Return the last accepted record, by now durable, and a digest of the partitions as of that record.

        The source's digest says which tables and floors it has; with that for `like`, the destination's is the same
        bytes if and only if (but for chance) rows are the same, with values, states, versions, times and identities,
        and tombstones above the source's floors: those below mean nothing, and go at any time. Claims follow from the
        same records; they are not compared, because claims of rows that stay hide some at the source only.

        Cancellation, errors: as `copy`; RequestError if `like` is no digest.
        """
        catalog = Catalog(self._ingest.catalog.packed())
        wanted = self._filter(partitions)
        seq, view = await self._view()
        try:
            found = PartitionDigest(catalog, like)
            await run_in_thread_to_end(partial(found.add_view, view, wanted))
        finally:
            await run_in_thread_to_end(view.close)
        return seq, found.encode()

    async def purge(self) -> None:
        """Remove all rows, tombstones and claims of the partitions that are left to purge (`Moves.unpurged`).

        A PURGE record leaves its partitions to purge; the store's metadata keeps that until they are removed. So call
        this after each such record, and at start: it returns at once if nothing is left. In bounded batches; nothing
        in RocksDB or in the log tells later that the rows were there.

        Cancellation: the next call, or the next start, goes on.

        Raises:
            StorageError: The disk failed.
            UnavailableError: The store is closing.
        """
        async with self._turn:
            if left := set(itertools.chain.from_iterable(self._ingest.partitions.moves.unpurged.values())):
                await self._empty(left)

    async def _empty(self, partitions: set[int]) -> None:
        """Remove what moves have left of partitions; nothing else is there of those that the shard does not own."""
        moves = self._ingest.partitions.moves
        unpurged = {name: each for name, each in moves.unpurged.items() if not partitions.isdisjoint(each)}
        loaded = {key: each for key, each in self._loaded.items() if not partitions.isdisjoint(each[2])}
        left = set(itertools.chain(*unpurged.values(), *(each[2] for each in loaded.values())))
        # Of several moves, those whose partitions are not asked for may be under way.
        left &= partitions | set(itertools.chain.from_iterable(unpurged.values()))
        left -= set(self._ingest.partitions.logged.partitions_of(self._ingest.partitions.shard).tolist())
        if left:
            await self._remove(sorted(left))
        meta: dict[bytes, bytes] = {}
        for key, (seq, is_complete, of_move) in loaded.items():
            rest = [each for each in of_move if each not in left]
            meta[key] = msgpack.packb([seq, is_complete, rest]) if rest else b""
            if rest:
                self._loaded[key] = seq, is_complete, rest
            else:
                del self._loaded[key]
        for move_id in unpurged:
            meta |= moves.purged(move_id)
        if meta:
            await self._run(lambda: self._store.write([], [], meta=meta))

    async def _remove(self, partitions: Sequence[int]) -> None:
        wanted = self._filter(partitions)
        _, view = await self._view()
        try:
            batches = _removals(self._store, view, wanted)
            while (remove := await run_in_thread_to_end(lambda: next(batches, None))) is not None:
                await self._run(remove)
        finally:
            await run_in_thread_to_end(view.close)

    async def _note_loaded(self, move: Move, copy_seq: int, *, is_complete: bool) -> None:
        """Note durably what of a copy is there: before the first of its rows, and once all are there."""
        key, value = _META_LOADED + move.move_id.encode(), (copy_seq, is_complete, list(move.partitions))
        if not is_complete:
            self._loaded[key] = value
        await self._run(lambda: self._store.write([], [], meta={key: msgpack.packb(value)}))
        await run_in_thread_to_end(self._store.flush)
        self._loaded[key] = value

    async def _view(self) -> tuple[int, StoreView]:
        """Return a view of the store as of the last accepted record when this is called, and that record."""
        seq, path = self._ingest.accepted_seq, self._folder / str(next(self._numbers))
        copied = self._applier.run_at(seq, lambda: self._store.checkpoint(path))
        try:
            await asyncio.shield(copied)
            return seq, await run_in_thread_to_end(lambda: StoreView(path))
        except BaseException:
            await asyncio.wait([copied])
            await run_in_thread_to_end(lambda: shutil.rmtree(path, ignore_errors=True))
            raise

    async def _run(self, work: Callable[[], None]) -> None:
        """Call `work` in the applier's thread; a cancelled caller waits until it has returned."""
        done = self._applier.run_at(self._ingest.accepted_seq, work)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.wait([done])
            raise

    def _filter(self, partitions: Sequence[int]) -> PartitionFilter:
        return PartitionFilter(self._ingest.partitions.known, partitions)


def _runs_of(view: StoreView, wanted: PartitionFilter) -> Iterator[CopyRun]:
    for table in view.tables:
        for layout in view.layouts(table):
            for ids, records in view.records(table, layout, wanted):
                yield CopyRun(table.table_id, layout.shard, ids, records.view(f"V{layout.dtype.itemsize}"))
        if table.spec.has_identities:
            for identities, claims in view.claims(table, wanted):
                yield CopyRun(table.table_id, CLAIMS_SHARD, identities, claims.view(f"V{CLAIMS.dtype.itemsize}"))


class _Loader:
    """Gathers runs for a write. Thread: the loop's; what `take` returns runs in the applier's."""

    def __init__(self, catalog: Catalog, store: RowStore, shared: bytes | memoryview) -> None:
        # Once: a table that is dropped and made anew meanwhile is another one.
        theirs = catalog_of_shared_state(shared)
        self._tables = {table.table_id: catalog.table_here(table, theirs) for table in theirs}
        self._catalog, self._store = catalog, store
        self._runs: list[SortedRun] = []
        self._size_bytes = self._num_claims = 0

    @property
    def is_full(self) -> bool:
        return self._size_bytes >= _LOAD_BYTES or self._num_claims >= _LOAD_CLAIMS

    def add(self, runs: Sequence[CopyRun]) -> None:
        for run in runs:
            if run.table_id not in self._tables:
                raise CorruptionError(f"a copy of partitions has rows of table {run.table_id}, which it does not name")
            if (table := self._tables[run.table_id]) is None:
                continue
            layout = CLAIMS if run.shard == CLAIMS_SHARD else table.layout_of(run.shard)
            if run.records.itemsize != layout.dtype.itemsize:
                raise CorruptionError(f"table {table.spec.fqn!r}: copied records of {run.records.itemsize} bytes")
            self._runs.append(SortedRun(table.table_id, layout, run.ids, run.records.view(layout.dtype), None))
            self._size_bytes += run.size_bytes
            self._num_claims += run.ids.size if layout is CLAIMS else 0

    def take(self) -> Callable[[], None]:
        """Return what writes the gathered runs. REQUIRES: it goes to the applier before anything is awaited."""
        gone = set(self._catalog.dropped)
        runs = [run for run in self._runs if run.table_id not in gone]
        self._runs, self._size_bytes, self._num_claims = [], 0, 0
        return partial(self._write, runs)

    def _write(self, runs: Sequence[SortedRun]) -> None:
        store = self._store
        rows = [run for run in runs if run.layout is not CLAIMS]
        claims = []
        for run in runs:
            if run.layout is CLAIMS:
                # A row that stays may have taken the identity later. These are in the order of their keys already.
                run.is_conditional = np.ones(run.row_ids.size, bool)
                claims.append(settle(run, store.get))
        if runs:
            store.write_runs(rows, claims=claims, meta={}, applied_seq=store.applied_seq)


def _removals(store: RowStore, view: StoreView, wanted: PartitionFilter) -> Iterator[Callable[[], None]]:
    """Yield functions that remove some of the rows and claims of partitions that a view has."""
    for table in view.tables:
        for layout in view.layouts(table):
            for ids, _ in view.records(table, layout, wanted):
                for start in range(0, ids.size, _PURGE_ROWS):
                    keys = encode_keys(table.table_id, layout.shard, ids[start : start + _PURGE_ROWS])
                    yield partial(_remove, store, table, keys)
        if table.spec.has_identities:
            for identities, _ in view.claims(table, wanted):
                for start in range(0, identities.size, _PURGE_ROWS):
                    yield partial(_remove_claims, store, table, identities[start : start + _PURGE_ROWS], wanted)


def _remove(store: RowStore, table: Table, keys: Sequence[bytes]) -> None:
    for start in range(0, len(keys), _ROWS_PER_WRITE):
        store.remove(table.table_id, keys[start : start + _ROWS_PER_WRITE])


def _remove_claims(store: RowStore, table: Table, identities: _Ids, wanted: PartitionFilter) -> None:
    """Remove claims unless a row that stays has taken the identity since."""
    keys = encode_keys(table.table_id, CLAIMS_SHARD, identities)
    claims, presence = CLAIMS.decode(store.get(keys))
    is_gone: npt.NDArray[Any] = (presence != MISSING) & wanted.has(table.spec, claims["row"].astype(np.int64))
    _remove(store, table, list(itertools.compress(keys, is_gone)))
