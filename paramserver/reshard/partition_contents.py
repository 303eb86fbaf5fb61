"""What a store has of some partitions: copied out of it, digested, purged.

Copies and digests are of the store as it was at one record of its log. A purge writes in the applier's thread, some
thousand rows at a time, so the shard goes on. What it removes is of partitions that the shard does not own: nothing
serves that, and nothing else writes it.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.paramserver.ingest.partitions import ShardPartitions
from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.reshard.measuring import measure_scan
from headrace.paramserver.reshard.partition_digest import PartitionDigest
from headrace.paramserver.reshard.store_view import PartitionFilter, StoreView
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.catalog import Catalog, Table
from headrace.paramserver.store.copy_chunks import CopyRun, encode_runs, grouped
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.store.shared_state import pack_shared_state
from headrace.paramserver.system.event_loop import run_bulk_to_end, run_in_thread_to_end
from headrace.schemas.errors import GoneError, StorageError
from headrace.schemas.row_records import encode_keys

__all__ = ["CopiedChunk", "PartitionContents", "PartitionCopy"]

_Ids = npt.NDArray[np.int64]

_CHUNK_BYTES = 4 << 20
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
        data: About 4 MiB; chunk 0 is the shared state, the others are of `store/copy_chunks.py`.
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

        Chunk 0 is the shard's shared state as of `seq` (`store/shared_state.py`).

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
                await run_bulk_to_end(self._advance)
            return self._chunk

    def _advance(self) -> None:
        # Here, and not from what the thread returns: a cancelled caller would lose the chunk.
        group = self._next_group or next(self._groups, [])
        self._next_group = next(self._groups, None)
        num_rows, is_last = sum(run.ids.size for run in group), self._next_group is None
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
    """Copies, digests and purges partitions of one shard's store. Thread: the loop's, for every method."""

    def __init__(self, ingest: _Ingest, applier: Applier, store: RowStore, folder: Path) -> None:
        """Work on `store`, also while `ingest` recovers or follows the log.

        `folder` is for checkpoints: on the store's file system, nobody else's. What it holds is removed.
        """
        self._ingest, self._applier, self._store, self._folder = ingest, applier, store, folder
        self._turn = asyncio.Lock()
        self._numbers = itertools.count()
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as exc:
            raise StorageError(f"{folder}: {exc.strerror}") from exc

    async def copy(self, partitions: Sequence[int]) -> PartitionCopy:
        """Begin a copy of partitions as of the last accepted record (`Ingest.accepted_seq` when this is called).

        First comes what is the whole shard's: tables, floors, scalars, fences, sessions. Then rows with states,
        versions and identities, and tombstones, table by table.

        Cancellation: nothing is left.

        Raises:
            StorageError: The disk failed.
            UnavailableError: The store is closing.
        """
        shared = pack_shared_state(self._ingest.catalog, self._ingest.sessions)
        wanted = self._filter(partitions)
        seq, view = await self._view()
        return PartitionCopy(seq, shared, view, wanted)

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
            await run_bulk_to_end(partial(found.add_view, view, wanted))
        finally:
            await run_in_thread_to_end(view.close)
        return seq, found.encode()

    async def measure(self) -> tuple[float, float]:
        """Return how many bytes a second a copy would read, 0 if there are too few; and seconds to open the store.

        Cancellation, errors: as `copy`.
        """
        partitions = self._ingest.partitions
        began_s = time.monotonic()
        _, view = await self._view()
        opened_s = time.monotonic()
        try:
            wanted = self._filter(partitions.logged.partitions_of(partitions.shard).tolist())
            bytes_s = await run_bulk_to_end(partial(measure_scan, view, wanted))
        finally:
            await run_in_thread_to_end(view.close)
        return bytes_s, opened_s - began_s

    async def purge(self) -> None:
        """Remove all rows, tombstones and claims that moves have left (`Moves.unpurged`).

        The store's metadata keeps what is left until it is removed. So call this after each record that leaves some,
        and at start: it returns at once if there is nothing. In bounded batches; nothing in RocksDB or in the log tells
        later that the rows were there. One purge runs at a time.

        Cancellation: the next call, or the next start, goes on.

        Raises:
            StorageError: The disk failed.
            UnavailableError: The store is closing.
        """
        async with self._turn:
            moves, shard = self._ingest.partitions.moves, self._ingest.partitions.shard
            if not (unpurged := dict(moves.unpurged)):
                return
            left = set(itertools.chain.from_iterable(unpurged.values()))
            if left := left.difference(self._ingest.partitions.logged.partitions_of(shard).tolist()):
                await self._remove(sorted(left))
            meta = {key: value for move_id in unpurged for key, value in moves.purged(move_id).items()}
            await self._run(lambda: self._store.write([], [], meta=meta))

    async def _remove(self, partitions: Sequence[int]) -> None:
        wanted = self._filter(partitions)
        _, view = await self._view()
        try:
            batches = _removals(self._store, view, wanted)
            while (remove := await run_bulk_to_end(lambda: next(batches, None))) is not None:
                await self._run(remove)
        finally:
            await run_in_thread_to_end(view.close)

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


def _removals(store: RowStore, view: StoreView, wanted: PartitionFilter) -> Iterator[Callable[[], None]]:
    """Yield functions that remove some of the rows and claims of partitions that a view has."""
    for table in view.tables:
        for layout in view.layouts(table):
            for ids, _ in view.records(table, layout, wanted):
                for start in range(0, ids.size, _PURGE_ROWS):
                    keys = encode_keys(table.table_id, layout.shard, ids[start : start + _PURGE_ROWS])
                    yield partial(_remove, store, table, keys)


def _remove(store: RowStore, table: Table, keys: Sequence[bytes]) -> None:
    for start in range(0, len(keys), _ROWS_PER_WRITE):
        store.remove(table.table_id, keys[start : start + _ROWS_PER_WRITE])
