"""Write files and directories so that a crash or power loss leaves them whole or absent.

POSIX makes a rename atomic, but durable only once the directory is synced. So: write under another name, sync the
content, rename, sync the directory. Functions raise `OSError` if the disk fails.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from headrace.schemas.errors import ConfigError, StorageError

__all__ = [
    *("ADVICE_WHEN_FULL", "FULL_DISK", "ReadyFile", "disk_error", "fsync_path", "fsync_tree"),
    *("move_into_place", "owner_only", "write_file"),
]

FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Numbers of the errors of a full disk, or quota."""

ADVICE_WHEN_FULL = "; make room (docs/operations.md)"


def disk_error(message: str, error: OSError) -> StorageError:
    """Return the error for an `OSError`, with what to do at the message's end if the disk is full."""
    is_full = error.errno in FULL_DISK
    return StorageError(message + ADVICE_WHEN_FULL * is_full, is_disk_full=is_full)


def fsync_path(path: Path) -> None:
    """Make a file's content, or the names in a directory, survive power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(path: Path) -> None:
    """Sync a file, or a directory and everything below it, contents before names."""
    if path.is_dir():
        for below in sorted(path.rglob("*"), reverse=True):
            fsync_path(below)
    fsync_path(path)


def move_into_place(source: Path, target: Path) -> None:
    """Rename a finished file or directory, durably; a directory replaces only an empty one.

    REQUIRES: the content of `source` is synced.
    """
    os.replace(source, target)
    fsync_path(target.parent)


def write_file(
    path: Path, content: bytes | Callable[[BinaryIO], object], *, aside: Path | None = None, is_durable: bool = True
) -> None:
    """Create or replace a file; readers and crashes see the old content or the new one. REQUIRES: one writer at a time.

    Args:
        path: The file; its directory exists.
        content: The bytes, or a function that writes them to the open file.
        aside: Where to write first, in the same file system, by default `path` with `.tmp`; removed on failure.
        is_durable: False skips the syncs, for files that mean nothing after a power loss.
    """
    aside = path.with_name(f"{path.name}.tmp") if aside is None else aside
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        with open(fd, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            if is_durable:
                os.fsync(fd)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    if is_durable:
        fsync_path(path.parent)


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """Make files and directories for this process's user alone, whatever the umask: 0600 and 0700.

    What is there keeps its mode. The umask is the process's: for commands, not for a user's program.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


class ReadyFile:
    """A file that exists while a process is ready.

    Thread: any; methods block.
    """

    def __init__(self, path: Path) -> None:
        """Remove the file of an earlier process, which would be wrong now.

        Raises:
            ConfigError: The file cannot be written there.
        """
        self._path = path
        # A disk may delay one write until the next one comes, or until the process ends.
        self._lock = threading.Lock()
        self._is_over = False
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            raise ConfigError(f"--ready-file {path}: {exc.strerror}") from exc
        if not os.access(path.parent, os.W_OK):
            raise ConfigError(f"--ready-file {path}: its directory is not there or not writable")

    def write(self, facts: Mapping[str, Any]) -> None:
        """Report that the process is ready; readers see all of the facts or no file. Does nothing after `remove`.

        Raises:
            StorageError: The file cannot be written.
        """
        with self._lock:
            if self._is_over:
                return
            try:
                write_file(self._path, json.dumps(facts).encode() + b"\n", is_durable=False)
            except OSError as exc:
                raise StorageError(f"--ready-file {self._path} cannot be written: {exc.strerror}") from exc

    def remove(self) -> None:
        """Report that the process is no longer ready, for good. Idempotent."""
        with self._lock:
            self._is_over = True
            self._path.unlink(missing_ok=True)
