"""The RocksDBs under the disk tables of one copy: the shards' own as a snapshot has them, or one that begins empty.

A snapshot's part is a RocksDB already. It is opened as it is, in a directory of its own with hard links to the files of
rows, which RocksDB never changes: what is written here goes to other files, and the snapshot stays whole. So a copy of
any size begins in the time that it takes to open it. Rows lie in it as the shard wrote them, optimizer states included.

Nothing here is meant to outlive the copy: no log, no syncs, and the directory goes when the copy is closed.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from headrace.paramserver.process.open_files import files_for_store
from headrace.paramserver.snapshots.snapshot_files import link_or_copy, part_folder
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.store.row_store import RowStore
from headrace.paramserver.store.store_config import StoreConfig
from headrace.schemas.errors import HeadraceError, StorageError, UnavailableError
from headrace.schemas.snapshot_manifest import SnapshotManifest, shard_folder
from headrace.schemas.tables import TableSpec

__all__ = ["DiskStores", "disk_store_config"]

_T = TypeVar("_T")

# Of the memory of the stores, what their memtables may take; up to three exist of each.
_MEMTABLE_SHARE, _NUM_MEMTABLES = 0.25, 3
_SMALLEST_MEMTABLE_BYTES, _LARGEST_MEMTABLE_BYTES = 256 << 10, 64 << 20
_SMALLEST_CACHE_BYTES = 1 << 20


class DiskStores:
    """RocksDBs of one copy, and the threads that read them. Use `create` or `link`.

    Rows are dealt to the stores as to the server's shards: with one store, all are in it.

    Thread: any number read; one at a time writes, which is the caller's affair.

    Attributes:
        folder: Directory; removed by `close`.
        stores: By shard.
        is_linked: They began from a snapshot: its tables are in them.
        failure: Why a write has failed. Rows may be of different moments since: nothing is read any more.
    """

    def __init__(self, folder: Path, stores: Sequence[RowStore], *, is_linked: bool, num_threads: int) -> None:
        """Take over open stores."""
        self.folder = folder
        self.stores = tuple(stores)
        self.is_linked = is_linked
        self.failure: HeadraceError | None = None
        self._catalogs = [Catalog(store.read_meta()) for store in stores]
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="headrace-disk")
        self._closing = threading.Lock()
        self._idle = threading.Condition()
        self._num_users = 0
        self._is_closed = False

    @classmethod
    def create(cls, folder: Path, *, memory_bytes: int, num_threads: int) -> DiskStores:
        """Make an empty store.

        Args:
            folder: Directory, made.
            memory_bytes: For blocks and memtables.
            num_threads: That read for prefetches and large misses.

        Raises:
            ConfigError: The directory cannot be used.
            StorageError: The disk failed.
        """
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
        """Open a snapshot as it is, to be written to without changing it.

        Args:
            folder: Directory, made. On another file system than the snapshot the files are copied.
            snapshot: Directory of the snapshot, whose files are taken to be what the manifest says.
            manifest: Its manifest.
            memory_bytes: For blocks and memtables of all shards.
            num_threads: See `create`.
            check_wanted: Called before each file; what it raises ends it, and nothing stays.

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
                store.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def has(self, fqn: str) -> bool:
        """Return whether a table's rows were there from the beginning."""
        return self.is_linked and any(table.spec.fqn == fqn for catalog in self._catalogs for table in catalog)

    def table_ids(self, spec: TableSpec) -> list[int]:
        """Return the number of a table in each store's row keys; one that is new gets the next."""
        for catalog in self._catalogs:
            catalog.add([spec])
        return [catalog.find(spec.fqn).table_id for catalog in self._catalogs]

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold the stores open meanwhile.

        Raises:
            UnavailableError: They are closed.
            StorageError: A write has failed before.
        """
        with self._idle:
            if self.failure is not None:
                raise StorageError(f"replica: the tables on disk are not whole any more: {self.failure}")
            if self._is_closed:
                raise UnavailableError(f"replica: {self.folder} is closed")
            self._num_users += 1
        try:
            yield
        finally:
            with self._idle:
                self._num_users -= 1
                self._idle.notify_all()

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Have one of the threads do something.

        Raises:
            UnavailableError: They are closed.
        """
        try:
            return self._threads.submit(work)
        except RuntimeError as exc:
            raise UnavailableError(f"replica: {self.folder} is closed") from exc

    def run_all(self, works: Sequence[Callable[[], None]]) -> None:
        """Do several things, some of them in other threads; return when all are done.

        The caller does those that no thread has begun, so one that is itself called by one of the threads cannot wait
        for ever.
        """
        others = [self.submit(work) for work in works[1:]]
        try:
            works[0]()
            for future, work in zip(others, works[1:], strict=True):
                if future.cancel():
                    work()
        finally:
            wait([future for future in others if not future.cancel()])  # what they write to is used until then
        for future in others:
            if not future.cancelled():
                future.result()

    def close(self) -> None:
        """Wait for readers, close, and remove the directory. Idempotent: a second caller waits for the first.

        Raises:
            StorageError: A file could not be removed.
        """
        with self._closing:
            if self._is_closed:
                return
            with self._idle:
                self._is_closed = True
            self._threads.shutdown(wait=True, cancel_futures=True)
            with self._idle:
                self._idle.wait_for(lambda: not self._num_users)
            for store in self.stores:
                # A full disk may have no room for its last rows, and one that failed may take none any more. They are
                # not wanted, and the store lets go of its files.
                with contextlib.suppress(HeadraceError):
                    store.close()
            try:
                shutil.rmtree(self.folder)
            except OSError as exc:
                raise StorageError(f"replica: {self.folder} cannot be removed: {exc.strerror}") from exc


def disk_store_config(memory_bytes: int, *, num_stores: int = 1) -> StoreConfig:
    """Return the settings of each of some stores that share memory for blocks and memtables."""
    memtables = int(memory_bytes * _MEMTABLE_SHARE) // (_NUM_MEMTABLES * num_stores)
    memtables = min(max(memtables, _SMALLEST_MEMTABLE_BYTES), _LARGEST_MEMTABLE_BYTES)
    cache = memory_bytes // num_stores - _NUM_MEMTABLES * memtables
    return StoreConfig(
        block_cache_bytes=max(cache, _SMALLEST_CACHE_BYTES),
        write_buffer_bytes=memtables,
        max_open_files=files_for_store(num_stores),
    )


def _link_files(source: Path, target: Path, check_wanted: Callable[[], None]) -> None:
    """Make a directory with the files of another, which is not changed whatever is done in the new one.

    Raises:
        StorageError: The disk failed, or a file is not there.
    """
    try:
        target.mkdir(parents=True)
        for path in source.iterdir():
            check_wanted()
            link_or_copy(path, target / path.name)
    except OSError as exc:
        raise StorageError(f"replica: linking {source} to {target}: {exc.strerror}") from exc
