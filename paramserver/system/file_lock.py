"""Lock files and directories between processes with `flock`."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self

from headrace.schemas.errors import ConfigError

__all__ = ["FileLock"]


class FileLock:
    """An open file that `flock` can lock.

    The lock belongs to the open file description, which child processes inherit and share. `release` unlocks it for
    all of them; `close` leaves it to the children that still have it open. With `with`, the end of the block releases.

    Thread: any; methods block only as long as the file system does.

    Attributes:
        path: The file or directory.
        fd: Its descriptor, read-write for a file; a program that is started gets it only where it is passed on.
    """

    def __init__(
        self, path: Path, *, creates: bool = True, is_directory: bool = False, is_read_only: bool = False
    ) -> None:
        """Open the file, not locked yet.

        Args:
            path: The file or directory.
            creates: Create a missing file, empty; a directory is never created.
            is_directory: The path must be a directory.
            is_read_only: Open an existing file for shared locks only, on a read-only file system too.

        Raises:
            OSError: It cannot be opened. A file must be writable: NFS grants exclusive locks only on those.
        """
        self.path = path
        flags = os.O_RDONLY if is_read_only else os.O_RDWR | (os.O_CREAT if creates else 0)
        flags = os.O_RDONLY | os.O_DIRECTORY if is_directory else flags
        self.fd = os.open(path, flags | os.O_CLOEXEC, 0o644)

    @classmethod
    def acquire(cls, path: Path, *, busy: str, is_directory: bool = False) -> Self:
        """Open and lock a file or directory exclusively, without waiting.

        Raises:
            ConfigError: Another process holds the lock, or has removed the file meanwhile; `busy` is the message.
            OSError: The file cannot be opened, or its file system has no locks.
        """
        lock = cls(path, is_directory=is_directory)
        try:
            # The last holder may have removed the file after it was opened here: then the lock excludes nobody.
            if lock.try_lock() and lock.is_in_place():
                return lock
        except BaseException:
            lock.close()
            raise
        lock.close()
        raise ConfigError(busy)

    def try_lock(self, *, is_shared: bool = False) -> bool:
        """Return whether it could be locked, exclusively or shared, without waiting. `OSError`: no lock support."""
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise OSError(exc.errno, exc.strerror, str(self.path)) from exc
        return True

    def is_in_place(self) -> bool:
        """Return whether the path still names the file that was opened."""
        try:
            return os.path.samestat(os.fstat(self.fd), self.path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Unlock, also for child processes that share the file, and close. Idempotent."""
        if self.fd >= 0:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_UN)
            finally:
                self.close()

    def close(self) -> None:
        """Close the file; children that have it open keep the lock until the last of them ends. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()
