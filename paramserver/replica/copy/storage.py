"""Where the tables of a replica's copies live: in memory, or in a directory with one folder per copy.

    DIR/LOCK           flock held by the replica
    DIR/copy-000001/   RocksDBs of one copy; two exist during a switch

A copy serves only the replica that made it. Folders found at the start were left by a killed replica, and are removed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from headrace.paramserver.replica.api.config import DiskStorage, ReplicaConfig
from headrace.paramserver.replica.tables.base import ReplicaTable
from headrace.paramserver.replica.tables.dense import memory_of_dense
from headrace.paramserver.replica.tables.disk_stores import DiskStores
from headrace.paramserver.replica.tables.hot_rows import capacity_for, size_of_hot_rows
from headrace.paramserver.replica.tables.identity_map import size_of_identity_map
from headrace.paramserver.replica.tables.in_memory import MemoryTable, size_of_table
from headrace.paramserver.replica.tables.on_disk import DiskTable
from headrace.paramserver.system.file_lock import FileLock
from headrace.schemas.errors import ConfigError, UnavailableError
from headrace.schemas.snapshot_manifest import SnapshotManifest
from headrace.schemas.tables import TableSpec

__all__ = ["CopyFolders", "CopyStorage", "memory_needed"]

# ON DISK: leftovers are recognized by it.
_PREFIX = "copy-"
_LOCK_NAME = "LOCK"


def memory_needed(config: ReplicaConfig, specs: Iterable[TableSpec], snapshot_bytes: int) -> int:
    """Estimate the memory of a copy of the server's tables, bytes.

    The size of the snapshot that the copy starts from bounds sparse tables in memory.
    """
    wanted = [spec for spec in specs if config.wants(spec.fqn)]
    needed, has_sparse = memory_of_dense(spec for spec in wanted if spec.is_dense), False
    for spec in wanted:
        if spec.is_dense:
            continue
        storage = config.storage_of(spec.fqn)
        if isinstance(storage, DiskStorage):
            row_bytes = spec.dim * spec.dtype.size_bytes
            capacity = capacity_for(storage.hot_bytes, row_bytes, spec.num_rows)
            needed += size_of_hot_rows(capacity, row_bytes) + storage.cache_bytes
        else:
            needed += size_of_table(spec, config.precision_of(spec.fqn))
            has_sparse = has_sparse or not spec.num_rows
        needed += size_of_identity_map(spec)
    return needed + (snapshot_bytes if has_sparse else 0)


class CopyFolders:
    """A directory that this replica has locked for its copies on disk. Thread: any."""

    def __init__(self, path: Path | None) -> None:
        """Lock a directory, created if missing, and remove what a killed replica has left in it.

        None creates a temporary one, removed by `close` or when the process exits.

        Raises:
            ConfigError: It cannot be used, or another replica uses it.
        """
        try:
            self.path = Path(tempfile.mkdtemp(prefix="headrace-replica-")) if path is None else path
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A finalizer also runs when the interpreter ends.
            self._removal = weakref.finalize(self, _remove, self.path, os.getpid()) if path is None else None
            busy = f"replica: disk_dir {self.path} is in use by another replica"
            self._lock = FileLock.acquire(self.path / _LOCK_NAME, busy=busy)
        except OSError as exc:
            raise ConfigError(f"replica: disk_dir {path} cannot be used: {exc.strerror}") from exc
        self._numbers = itertools.count(1)
        try:
            for leftover in self.path.glob(f"{_PREFIX}*"):
                shutil.rmtree(leftover)
        except OSError as exc:
            self._lock.release()
            raise ConfigError(f"replica: disk_dir {self.path} cannot be used: {exc.strerror}") from exc

    def new(self) -> Path:
        """Return the folder of a new copy, not created yet."""
        return self.path / f"{_PREFIX}{next(self._numbers):06d}"

    def close(self) -> None:
        """Release the directory; each copy removes its own folder. Idempotent."""
        if self._removal is not None:
            self._removal()
        self._lock.release()


class CopyStorage:
    """Creates the tables of one copy; those on disk share its RocksDBs. Thread: any."""

    def __init__(
        self,
        config: ReplicaConfig,
        folders: CopyFolders | None,
        specs: Collection[TableSpec],
        *,
        wants: Callable[[str], bool] | None = None,
    ) -> None:
        """Prepare; nothing is created yet. `wants` returns whether the copy has a table; None asks the settings.

        The stores' caches get the memory of the tables known now, `specs`; a later table adds hot rows only.
        """
        self._config = config
        self._folders = folders
        self._wants = wants = wants or config.wants
        on_disk = [config.storage_of(spec.fqn) for spec in specs if wants(spec.fqn) and not spec.is_dense]
        self._cache_bytes = sum(storage.cache_bytes for storage in on_disk if isinstance(storage, DiskStorage))
        self._known = {spec.fqn for spec in specs}
        self._lock = threading.Lock()
        self._stores: DiskStores | None = None
        self._is_closed = False

    def make(self, spec: TableSpec) -> ReplicaTable | None:
        """Return an empty table, or the snapshot's (`DiskTable.is_loaded`); None for a table that is not wanted."""
        if not self._wants(spec.fqn):
            return None
        default = self._config.default_of(spec)
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
        """Link a snapshot's files, which match the manifest, for the tables that live on disk, if any do.

        `check_wanted` is called before each file, which may have to be copied; an exception ends the linking.
        """
        config = self._config
        tables = [fqn for fqn, spec in manifest.tables.items() if self._wants(fqn) and not spec.is_dense]
        if any(isinstance(config.storage_of(fqn), DiskStorage) for fqn in tables):
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
        """Raise `UnavailableError` if the storage is closed."""
        if self._is_closed:
            raise UnavailableError("the replica's copy is closed")

    def close(self) -> None:
        """Close the stores and remove them; raise `StorageError` if a file stays. Idempotent."""
        self._is_closed = True  # first: `link` holds the lock, and checks this
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


def _remove(path: Path, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child exits; the copies belong to its parent
    # Rename first: a RocksDB that is still open when the interpreter ends then creates no files in it.
    aside = path.with_name(f"{path.name}-removed")
    with contextlib.suppress(OSError):
        path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
