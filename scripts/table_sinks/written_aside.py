"""Files and directories that are there whole or not at all: written aside, synced, renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from headrace.paramserver.files.durable_files import fsync_path
from headrace.schemas.errors import ConfigError, HeadraceError, StorageError

__all__ = ["check_place", "work_folder", "written_aside"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def check_place(target: Path) -> None:
    """Check that something can be made of that name.

    Raises:
        ConfigError: There is something already, or nowhere to make it.
    """
    if target.exists() or target.is_symlink():
        raise ConfigError(f"--to {target}: there is something already; nothing is written over, name another place")
    if not target.parent.is_dir():
        raise ConfigError(f"--to {target}: there is no directory {target.parent}")


@contextlib.contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """Yield where to make a file or a directory, and give it its name when the block ends well.

    When it does not, nothing is left; what a kill has left is removed by the next attempt.

    Args:
        target: Its name.

    Raises:
        ConfigError: There is something already, or the place cannot be written to.
        StorageError: The disk failed; nothing was made.
    """
    target = target.absolute()
    check_place(target)
    with work_folder(target, "export") as folder, _mapped_errors(target):
        made = folder / target.name
        yield made
        for path in [*sorted(made.rglob("*")), made] if made.is_dir() else [made]:
            fsync_path(path)
        check_place(target)
        made.rename(target)
        fsync_path(target.parent)


@contextlib.contextmanager
def work_folder(target: Path, work: str) -> Iterator[Path]:
    """Yield `.NAME.WORK` beside a target: an empty directory of this process alone, which is gone at the end.

    Args:
        target: Absolute.
        work: What is done there, in a word.

    Raises:
        ConfigError: Another process is at it, or the place cannot be written to.
        StorageError: The disk failed.
    """
    folder = target.parent / f".{target.name}.{work}"
    with _mapped_errors(target):
        lock_fd = _claim(folder, target)
    try:
        with _mapped_errors(target):
            for path in folder.iterdir():  # of one that was killed
                _remove(path)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # it is in the way of nobody
        os.close(lock_fd)


def _claim(folder: Path, target: Path) -> int:
    """Make the directory, unless a kill has left it; return what holds its lock."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    folder.mkdir(exist_ok=True)
    lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever held the lock until now has removed the directory at the end.
        is_ours = os.path.samestat(os.fstat(lock_fd), folder.stat())
    except (BlockingIOError, FileNotFoundError):
        is_ours = False
    if not is_ours:
        os.close(lock_fd)
        raise ConfigError(f"--to {target}: another export is making it just now")
    return lock_fd


@contextlib.contextmanager
def _mapped_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except HeadraceError:
        raise
    except PermissionError as exc:
        raise ConfigError(f"--to {target}: {exc.filename or target.parent} is not writable") from exc
    except OSError as exc:
        full = "the disk is full: " if exc.errno in _FULL else ""
        raise StorageError(f"{target}: {full}{exc.strerror or exc}; nothing was made") from exc


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
