"""The directory in which replicas put the snapshots that they fetch; several replicas may share one.

    DIR/.lock            flock, exclusive: of who fetches or removes
    DIR/NAME/.fetched    made with the folder; flock, shared: of who reads the snapshot

Once a copy is loaded it needs no file of its snapshot. The one that was fetched last stays, so that a replica that
starts again need not fetch it. Only folders with the mark `.fetched` are ever removed: what somebody else has put into
the directory is not a replica's to judge.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from headrace.paramserver.snapshots.snapshot_files import SnapshotFiles
from headrace.schemas.errors import ConfigError, GoneError, StorageError
from headrace.schemas.snapshot_manifest import SnapshotManifest

__all__ = ["FetchedSnapshots", "snapshot_in_use"]

# ON DISK: says that a replica has fetched a snapshot, and removes it.
_MARK = ".fetched"
_LOCK_NAME = ".lock"
_GONE = ".gone-"
_POLL_S = 0.2


class FetchedSnapshots:
    """One directory of fetched snapshots.

    Thread: any; all but `alone` blocks.

    Attributes:
        files: The snapshots.
    """

    def __init__(self, directory: Path) -> None:
        """Look into a directory, which need not be there."""
        self.files = SnapshotFiles(directory)

    @contextlib.asynccontextmanager
    async def alone(self, check_wanted: Callable[[], None]) -> AsyncIterator[None]:
        """Be the only one that fetches into the directory or removes from it; wait for whoever does.

        Args:
            check_wanted: Called while it waits; what it raises ends the waiting.

        Raises:
            ConfigError: The directory cannot be used.
            StorageError: Its file system has no locks.

        Cancellation: harmless.
        """
        with self._locked() as fd:
            while not _try_lock(fd, fcntl.LOCK_EX):
                check_wanted()
                await asyncio.sleep(_POLL_S)
            yield

    def prepare(self, manifest: SnapshotManifest) -> None:
        """Mark a snapshot that will be fetched, and remove what interrupted fetches have left of others; when `alone`.

        What has come of the same one stays: fetching goes on there. A snapshot that is there or half there without a
        mark is somebody else's, and gets none.

        Args:
            manifest: The server's; another snapshot of its name that was fetched before goes, unless it is read.

        Raises:
            CorruptionError: The manifest of one of its name is damaged.
            StorageError: The disk failed.
        """
        new, published = self.files.new_folder(manifest.name), self.files.folder_of(manifest.name)
        with self._mapped_errors():
            for path in self._marked():
                if path.name.startswith(".") and path != new:
                    _remove_unread(path)
            if (published / _MARK).exists() and self.files.manifest_of(manifest.name) != manifest:
                _remove_unread(published)
            if not published.exists():
                new.mkdir(exist_ok=True)
                if not any(new.iterdir()):
                    (new / _MARK).touch()

    def remove_others(self, name: str) -> None:
        """Remove what replicas have fetched here but one snapshot, where no process reads it.

        Nothing is removed while another process fetches or removes; it does so itself when it is ready.

        Args:
            name: The one that stays.

        Raises:
            ConfigError: The directory cannot be used.
            StorageError: A file could not be removed.
        """
        with self._locked() as fd:
            if not _try_lock(fd, fcntl.LOCK_EX):
                return
            with self._mapped_errors():
                for path in self._marked():
                    if path.name != name:
                        _remove_unread(path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Open the file of the lock; closing it lets go of the lock."""
        path = self.files.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            fd = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            raise ConfigError(f"replica: snapshot_dir {path} cannot be used: {exc.strerror}") from exc
        with _closing(fd):
            yield fd

    @contextlib.contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise StorageError(f"{exc.filename or self.files.path}: {exc.strerror or exc}") from exc

    def _marked(self) -> list[Path]:
        return [path for path in self.files.path.iterdir() if (path / _MARK).is_file()]


@contextlib.contextmanager
def snapshot_in_use(folder: Path) -> Iterator[None]:
    """Have no replica remove a snapshot meanwhile, wherever it lies.

    Args:
        folder: Directory of the snapshot.

    Raises:
        GoneError: It is being removed, or was.
        StorageError: It cannot be read.
    """
    try:
        fd = os.open(folder / _MARK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield  # without the mark no replica removes it
        return
    except OSError as exc:
        raise StorageError(f"{folder / _MARK}: {exc.strerror or exc}") from exc
    with _closing(fd):
        if not _try_lock(fd, fcntl.LOCK_SH) or not (folder / _MARK).exists():
            raise GoneError(f"snapshot {folder} is being removed: a replica has fetched a newer one")
        yield


def _remove_unread(folder: Path) -> None:
    """Remove a marked folder that nobody reads; it is gone under its name before its first file is."""
    fd = os.open(folder / _MARK, os.O_RDWR | os.O_CLOEXEC)  # NFS locks nothing alone that is opened for reading
    with _closing(fd):
        if not _try_lock(fd, fcntl.LOCK_EX):
            return
        gone = folder.with_name(f"{_GONE}{folder.name.removeprefix(_GONE)}")
        if gone != folder:
            folder.rename(gone)
    # The mark last: who is killed here leaves what the next one knows.
    for path in gone.iterdir():
        if path.name != _MARK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(gone)


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[None]:
    """Let go of a lock and close its file: a child that was forked meanwhile has it open, too, and would keep it."""
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:
        path = os.readlink(f"/proc/self/fd/{fd}")
        raise StorageError(f"{path} cannot be locked: {exc.strerror}; name a snapshot_dir on a local disk") from exc
    return True
