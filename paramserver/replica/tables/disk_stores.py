"""The RocksDBs under the disk tables of one copy: those of a snapshot's shards, or one that starts empty.

A part of a snapshot is a RocksDB already. It is opened as it is, in its own directory with hard links to the files of
rows. RocksDB never changes those: new writes go to other files, and the snapshot stays whole. So a copy of any size
starts in the time that opening takes. Rows lie in it as the shards wrote them, optimizer states included.

Nothing here outlives the copy: there is no write-ahead log and no sync, and closing the copy removes the directory.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from headrace.paramserver.snapshots.directory import link_or_copy, part_folder
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.system.limits import files_for_store
from headrace.schemas.errors import HeadraceError, StorageError, UnavailableError
from headrace.schemas.snapshot_manifest import SnapshotManifest, shard_folder
from headrace.schemas.tables import TableSpec

__all__ = ["DiskStores", "disk_store_config"]

_T = TypeVar("_T")

# Share of the stores' memory for memtables; up to three of a store exist at a time.
_MEMTABLE_SHARE, _NUM_MEMTABLES = 0.25, 3
_SMALLEST_MEMTABLE_BYTES, _LARGEST_MEMTABLE_BYTES = 256 << 10, 64 << 20
_SMALLEST_CACHE_BYTES = 1 << 20


class DiskStores:
    """RocksDBs of one copy, by shard, and the threads that read them. Use `create` or `link`.

    Rows are dealt to the stores as to the server's shards; with one store, all rows are in it.

    Thread: any number read; the caller allows one writer at a time.
    """

    def __init__(self, folder: Path, stores: Sequence[RowStore], *, is_linked: bool, num_threads: int) -> None:
        self.folder = folder
        self.stores = tuple(stores)
        self.is_linked = is_linked  # the stores started from a snapshot and have its tables
        # The error of a failed write. Rows may belong to different moments since then, so all reads fail.
        self.failure: HeadraceError | None = None
        self._catalogs = [Catalog(store.read_meta()) for store in stores]
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="headrace-disk")
        self._closing = threading.Lock()
        self._idle = threading.Condition()
        self._num_users = 0
        self._is_closed = False

    @classmethod
    def create(cls, folder: Path, *, memory_bytes: int, num_threads: int) -> DiskStores:
        """Create a directory with one empty store; `num_threads` threads read for prefetches and large misses."""
        try:
            store = RowStore.open(folder / shard_folder(0), config=disk_store_config(memory_bytes))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(folder, [store], is_linked=False, num_threads=num_threads)

    @classmethod
    def link(
        cls,
        folder: Path,
        snapshot: Path,
        manifest: SnapshotManifest,
        *,
        memory_bytes: int,
        num_threads: int,
        check_wanted: Callable[[], None] = lambda: None,
    ) -> DiskStores:
        """Open a snapshot, whose files match the manifest, for writes that leave the snapshot unchanged.

        On another file system than the snapshot's, `folder` gets copies of the files. `check_wanted` is called before
        each file; if it raises, the folder is removed again.

        Raises:
            ConfigError: The directory cannot be used.
            CorruptionError: A part cannot be opened.
            StorageError: The disk failed.
        """
        config = disk_store_config(memory_bytes, num_stores=len(manifest.parts))
        stores: list[RowStore] = []
        try:
            for part in manifest.parts:
                _link_files(part_folder(snapshot, part), folder / shard_folder(part.shard), check_wanted)
                stores.append(RowStore.open(folder / shard_folder(part.shard), config=config))
            return cls(folder, stores, is_linked=True, num_threads=num_threads)
        except BaseException:
            for store in stores:
                with contextlib.suppress(HeadraceError):  # or it would hide the error, and the folder stay
                    store.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def has(self, fqn: str) -> bool:
        """Return whether a table's rows came with the snapshot."""
        return self.is_linked and any(table.spec.fqn == fqn for catalog in self._catalogs for table in catalog)

    def table_ids(self, spec: TableSpec) -> list[int]:
        """Return a table's number in each store's row keys; a new table gets the next number."""
        for catalog in self._catalogs:
            catalog.add([spec])
        return [catalog.find(spec.fqn).table_id for catalog in self._catalogs]

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the stores open for the block; raise if they are closed, or if a write has failed before."""
        with self._idle:
            if self.failure is not None:
                raise StorageError(f"replica: the tables on disk are not whole any more: {self.failure}")
            if self._is_closed:
                raise UnavailableError("the replica's tables on disk are closed")
            self._num_users += 1
        try:
            yield
        finally:
            with self._idle:
                self._num_users -= 1
                self._idle.notify_all()

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Run a function in one of the threads; raise `UnavailableError` if the stores are closed."""
        try:
            return self._threads.submit(work)
        except RuntimeError as exc:
            raise UnavailableError("the replica's tables on disk are closed") from exc

    def run_all(self, works: Sequence[Callable[[], None]]) -> None:
        """Run functions, some of them in other threads, and return when all are done.

        The caller runs those that no thread has started, so a caller in one of the threads cannot deadlock.
        """
        others = [self.submit(work) for work in works[1:]]
        try:
            works[0]()
            for future, work in zip(others, works[1:], strict=True):
                if future.cancel():
                    work()
        finally:
            wait([future for future in others if not future.cancel()])  # they write to the caller's buffers until then
        for future in others:
            if not future.cancelled():
                future.result()

    def close(self) -> None:
        """Wait for readers, close, and remove the directory. Idempotent: a second caller waits for the first."""
        with self._closing:
            if self._is_closed:
                return
            with self._idle:
                self._is_closed = True
            self._threads.shutdown(wait=True, cancel_futures=True)
            with self._idle:
                self._idle.wait_for(lambda: not self._num_users)
            for store in self.stores:
                # A full or failed disk may refuse the last rows. Nobody needs them, and the store closes its files.
                with contextlib.suppress(HeadraceError):
                    store.close()
            try:
                shutil.rmtree(self.folder)
            except OSError as exc:
                raise StorageError(f"replica: cannot remove {self.folder}: {exc.strerror}") from exc


def disk_store_config(memory_bytes: int, *, num_stores: int = 1) -> StoreConfig:
    """Return the settings of each of `num_stores` stores that share memory for blocks and memtables."""
    memtables = int(memory_bytes * _MEMTABLE_SHARE) // (_NUM_MEMTABLES * num_stores)
    memtables = min(max(memtables, _SMALLEST_MEMTABLE_BYTES), _LARGEST_MEMTABLE_BYTES)
    cache = memory_bytes // num_stores - _NUM_MEMTABLES * memtables
    return StoreConfig(
        block_cache_bytes=max(cache, _SMALLEST_CACHE_BYTES),
        write_buffer_bytes=memtables,
        max_open_files=files_for_store(num_stores),
    )


def _link_files(source: Path, target: Path, check_wanted: Callable[[], None]) -> None:
    try:
        target.mkdir(parents=True)
        for path in source.iterdir():
            check_wanted()
            link_or_copy(path, target / path.name)
    except OSError as exc:
        raise StorageError(f"replica: cannot link {source} to {target}: {exc.strerror}") from exc
