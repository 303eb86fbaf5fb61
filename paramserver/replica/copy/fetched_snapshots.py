"""The directory into which replicas fetch snapshots; several replicas may share it.

    DIR/.lock            flock, exclusive: held while fetching or removing
    DIR/NAME/.fetched    created with the folder; flock, shared: held while reading the snapshot

A loaded copy needs no file of its snapshot. The last fetched snapshot stays, so that a restarted replica need not fetch
it again. Only folders with the marker `.fetched` are ever removed: all else in the directory belongs to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from headrace.paramserver.snapshots.directory import SnapshotFiles
from headrace.paramserver.system.file_lock import FileLock
from headrace.schemas.errors import ConfigError, GoneError, StorageError
from headrace.schemas.snapshot_manifest import SnapshotManifest

__all__ = ["FetchedSnapshots", "snapshot_in_use"]

# ON DISK: marks a snapshot that a replica fetched and may remove.
_MARKER = ".fetched"
_LOCK_NAME = ".lock"
_GONE = ".gone-"
_POLL_S = 0.2


class FetchedSnapshots:
    """One directory of fetched snapshots. Thread: any; all methods but `alone` block."""

    def __init__(self, directory: Path) -> None:
        self.files = SnapshotFiles(directory)

    @contextlib.asynccontextmanager
    async def alone(self, check_wanted: Callable[[], None]) -> AsyncIterator[None]:
        """Exclude other processes that fetch into the directory or remove from it, after waiting for them.

        An exception of `check_wanted` ends the wait. Raise `ConfigError` if the directory cannot be used,
        `StorageError` if its file system has no locks. Cancellation: safe; the lock is released.
        """
        with self._open_lock() as lock:
            while not _try_lock(lock):
                check_wanted()
                await asyncio.sleep(_POLL_S)
            yield

    def prepare(self, manifest: SnapshotManifest) -> None:
        """Mark a snapshot that will be fetched, and remove the leftovers of other interrupted fetches.

        REQUIRES: the caller is `alone`. Files of the same snapshot stay; the fetch continues with them. Another fetched
        snapshot of its name is removed, unless a process reads it. A snapshot that is here, whole or in part, without a
        marker belongs to somebody else and gets none.
        """
        new, published = self.files.new_folder(manifest.name), self.files.folder_of(manifest.name)
        with self._mapped_errors():
            for path in self._marked():
                if path.name.startswith(".") and path != new:
                    _remove_unread(path)
            if (published / _MARKER).exists() and self.files.manifest_of(manifest.name) != manifest:
                _remove_unread(published)
            if not published.exists():
                new.mkdir(exist_ok=True)
                if not any(new.iterdir()):
                    (new / _MARKER).touch()

    def remove_others(self, name: str) -> None:
        """Remove all fetched snapshots but one, except those that a process reads.

        Do nothing while another process fetches or removes; it cleans up itself when it is done.
        """
        with self._open_lock() as lock:
            if not _try_lock(lock):
                return
            with self._mapped_errors():
                for path in self._marked():
                    if path.name != name:
                        _remove_unread(path)

    def _open_lock(self) -> FileLock:
        path = self.files.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            return FileLock(path / _LOCK_NAME)
        except OSError as exc:
            raise ConfigError(f"replica: snapshot_dir {path} cannot be used: {exc.strerror}") from exc

    @contextlib.contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise StorageError(f"{exc.filename or self.files.path}: {exc.strerror or exc}") from exc

    def _marked(self) -> list[Path]:
        return [path for path in self.files.path.iterdir() if (path / _MARKER).is_file()]


@contextlib.contextmanager
def snapshot_in_use(folder: Path) -> Iterator[None]:
    """Keep replicas from removing a snapshot for the block; `GoneError` if it is being removed or is gone."""
    marker = folder / _MARKER
    try:
        lock = FileLock(marker, is_read_only=True)
    except FileNotFoundError:
        yield  # replicas do not remove a snapshot without the marker
        return
    except OSError as exc:
        raise StorageError(f"{marker}: {exc.strerror or exc}") from exc
    with lock:
        if not _try_lock(lock, is_shared=True) or not marker.exists():
            raise GoneError(f"snapshot {folder} is being removed: a replica has fetched a newer one")
        yield


def _remove_unread(folder: Path) -> None:
    """Remove a marked folder that nobody reads; rename it before its first file goes."""
    with FileLock(folder / _MARKER, creates=False) as lock:
        if not _try_lock(lock):
            return
        gone = folder.with_name(f"{_GONE}{folder.name.removeprefix(_GONE)}")
        if gone != folder:
            folder.rename(gone)
    # The marker goes last: after a kill here, the next replica still recognizes the folder.
    for path in gone.iterdir():
        if path.name != _MARKER:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(gone)


def _try_lock(lock: FileLock, *, is_shared: bool = False) -> bool:
    try:
        return lock.try_lock(is_shared=is_shared)
    except OSError as exc:
        raise StorageError(f"{lock.path} cannot be locked: {exc.strerror}; use a snapshot_dir on a local disk") from exc
