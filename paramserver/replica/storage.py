"""Where the tables of one copy live: each is made as the settings say, those on disk in stores that they share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from headrace.paramserver.replica.config import DiskStorage, ReplicaConfig
from headrace.paramserver.replica.copy_folders import CopyFolders
from headrace.paramserver.replica.disk_stores import DiskStores
from headrace.paramserver.replica.disk_table import DiskTable
from headrace.paramserver.replica.hot_rows import capacity_for, size_of_hot_rows
from headrace.paramserver.replica.identity_map import size_of_identity_map
from headrace.paramserver.replica.memory_table import MemoryTable, size_of_table
from headrace.paramserver.replica.table import ReplicaTable
from headrace.schemas.errors import UnavailableError
from headrace.schemas.snapshot_manifest import SnapshotManifest
from headrace.schemas.tables import TableSpec

__all__ = ["Storage", "memory_needed"]


def memory_needed(config: ReplicaConfig, specs: Iterable[TableSpec], snapshot_bytes: int) -> int:
    """Return the memory that a copy takes, about, bytes.

    Args:
        config: Settings.
        specs: Tables of the server.
        snapshot_bytes: Of the snapshot that it is to begin from. Tables in memory whose number of rows is not known are
            in there, and more.
    """
    wanted = [spec for spec in specs if config.wants(spec.fqn)]
    needed, has_sparse = 0, False
    for spec in wanted:
        storage = config.storage_of(spec.fqn)
        if isinstance(storage, DiskStorage):
            needed += _hot_bytes(spec, storage) + storage.cache_bytes
        else:
            needed += size_of_table(spec, config.precision_of(spec.fqn))
            has_sparse = has_sparse or not spec.num_rows
        needed += size_of_identity_map(spec)
    return needed + (snapshot_bytes if has_sparse else 0)


class Storage:
    """Makes the tables of one copy.

    Thread: any.
    """

    def __init__(self, config: ReplicaConfig, folders: CopyFolders | None, specs: Collection[TableSpec]) -> None:
        """Make nothing yet.

        Args:
            config: Settings.
            folders: Where copies on disk go; None where no table is to be on disk.
            specs: Tables that are known: what they give to the stores' caches is what these have. A table that comes
                later brings hot rows only.
        """
        self._config = config
        self._folders = folders
        on_disk = [config.storage_of(spec.fqn) for spec in specs if config.wants(spec.fqn)]
        self._cache_bytes = sum(storage.cache_bytes for storage in on_disk if isinstance(storage, DiskStorage))
        self._known = {spec.fqn for spec in specs}
        self._lock = threading.Lock()
        self._stores: DiskStores | None = None
        self._is_closed = False

    def make(self, spec: TableSpec) -> ReplicaTable | None:
        """Return an empty table, or the snapshot's (`DiskTable.is_loaded`); None when it is not wanted.

        Raises:
            ConfigError: Its default is of another shape, or the disk's directory cannot be used.
            StorageError: The disk failed.
        """
        if not self._config.wants(spec.fqn):
            return None
        default = self._config.defaults.get(spec.fqn)
        storage = self._config.storage_of(spec.fqn)
        if not isinstance(storage, DiskStorage):
            return MemoryTable(spec, default=default, precision=self._config.precision_of(spec.fqn))
        return DiskTable(
            spec,
            self._open_stores(),
            hot_bytes=storage.hot_bytes,
            cache_bytes=storage.cache_bytes if spec.fqn in self._known else 0,
            default=default,
        )

    def link(self, snapshot: Path, manifest: SnapshotManifest, *, check_wanted: Callable[[], None]) -> None:
        """Take the tables that are to be on disk from a snapshot, as they lie in it.

        Args:
            snapshot: Its directory; the files are taken to be what the manifest says (`verify_snapshot`).
            manifest: Its manifest.
            check_wanted: Called before each file, which may have to be copied; what it raises ends the linking.

        Raises:
            ConfigError: The disk's directory cannot be used.
            CorruptionError: A part cannot be opened.
            StorageError: The disk failed.
            UnavailableError: The storage is closed.
        """
        config = self._config
        if any(config.wants(fqn) and isinstance(config.storage_of(fqn), DiskStorage) for fqn in manifest.tables):
            self._open_stores(
                lambda folder: DiskStores.link(
                    folder,
                    snapshot,
                    manifest,
                    memory_bytes=self._cache_bytes,
                    num_threads=config.disk_threads,
                    check_wanted=check_wanted,
                )
            )

    def check_open(self) -> None:
        """Check that somebody still wants the copy.

        Raises:
            UnavailableError: The storage is closed.
        """
        if self._is_closed:
            raise UnavailableError("the replica's copy is closed")

    def close(self) -> None:
        """Close the stores and remove them. Idempotent.

        Raises:
            StorageError: A file could not be removed.
        """
        self._is_closed = True  # first: who links files holds the lock, and looks
        with self._lock:
            stores = self._stores
        if stores is not None:
            stores.close()

    def _open_stores(self, link: Callable[[Path], DiskStores] | None = None) -> DiskStores:
        with self._lock:
            self.check_open()
            if self._stores is None:
                assert self._folders is not None, "a table on disk has a directory"
                self._stores = (link or self._create_stores)(self._folders.new())
            return self._stores

    def _create_stores(self, folder: Path) -> DiskStores:
        return DiskStores.create(folder, memory_bytes=self._cache_bytes, num_threads=self._config.disk_threads)


def _hot_bytes(spec: TableSpec, storage: DiskStorage) -> int:
    row_bytes = spec.dim * spec.dtype.size_bytes
    return size_of_hot_rows(capacity_for(storage.hot_bytes, row_bytes, spec.num_rows), row_bytes)
