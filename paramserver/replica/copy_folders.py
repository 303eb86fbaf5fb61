"""The directory in which a replica keeps its copies that are on disk, one folder each.

    DIR/LOCK           flock held by the replica
    DIR/copy-000001/   RocksDBs of one copy; two exist while it is switched, or while the previous one is kept

A copy is of no use to anybody but the replica that made it: folders that are there at the beginning were left by one
that was killed, and are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from headrace.schemas.errors import ConfigError

__all__ = ["CopyFolders"]

# ON DISK: leftovers are known by it.
_PREFIX = "copy-"
_LOCK_NAME = "LOCK"


class CopyFolders:
    """A directory claimed by this replica.

    Thread: any.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: Path | None) -> None:
        """Claim a directory and remove what a killed replica has left in it.

        Args:
            path: Directory, made when it is not there; None makes a temporary one, which `close`
                removes, or the end of this process without it.

        Raises:
            ConfigError: It cannot be used, or another replica uses it.
        """
        try:
            self.path = Path(tempfile.mkdtemp(prefix="headrace-replica-")) if path is None else path
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(self.path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            raise ConfigError(f"replica: disk_dir {path} cannot be used: {exc.strerror}") from exc
        # A finalizer also runs when the interpreter ends.
        self._removal = weakref.finalize(self, _remove, self.path, os.getpid()) if path is None else None
        self._numbers = itertools.count(1)
        self._is_closed = False
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for leftover in self.path.glob(f"{_PREFIX}*"):
                shutil.rmtree(leftover)
        except OSError as exc:
            os.close(self._lock_fd)
            if isinstance(exc, BlockingIOError):
                raise ConfigError(f"replica: disk_dir {self.path} is in use by another replica") from exc
            raise ConfigError(f"replica: disk_dir {self.path} cannot be used: {exc.strerror}") from exc

    def new(self) -> Path:
        """Return the folder of a new copy; it is not made."""
        return self.path / f"{_PREFIX}{next(self._numbers):06d}"

    def close(self) -> None:
        """Give the directory up; copies are removed by those who made them. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._removal is not None:
            self._removal()
        fcntl.flock(self._lock_fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open, too
        os.close(self._lock_fd)


def _remove(path: Path, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child that ends; the copies are its parent's
    # Aside first: a RocksDB that is open yet, at the end of the interpreter, makes no more files in it.
    aside = path.with_name(f"{path.name}-removed")
    with contextlib.suppress(OSError):
        path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
