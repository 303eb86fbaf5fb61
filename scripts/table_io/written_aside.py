"""Create files and directories whole or not at all: write them aside, sync, rename."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from headrace.paramserver.system.durable import fsync_tree, move_into_place
from headrace.paramserver.system.file_lock import FileLock
from headrace.schemas.errors import ConfigError, HeadraceError, StorageError

__all__ = ["check_place", "work_folder", "written_aside"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def check_place(target: Path) -> None:
    """Raise ConfigError if a target already exists or its directory does not."""
    if target.exists() or target.is_symlink():
        raise ConfigError(f"--to {target}: there is something already; nothing is written over, name another place")
    if not target.parent.is_dir():
        raise ConfigError(f"--to {target}: there is no directory {target.parent}")


@contextlib.contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """Yield a path for a new file or directory, and rename it to `target` if the block succeeds.

    A failure leaves nothing behind; the next attempt removes what a killed process left.

    Raises:
        ConfigError: The target exists already, or its place is not writable.
        StorageError: The disk failed; nothing was made.
    """
    target = target.absolute()
    check_place(target)
    with work_folder(target, "export") as folder, _mapped_errors(target):
        made = folder / target.name
        yield made
        fsync_tree(made)
        check_place(target)
        move_into_place(made, target)


@contextlib.contextmanager
def work_folder(target: Path, work: str) -> Iterator[Path]:
    """Yield `.NAME.WORK` beside a target: an empty directory for this process only, removed at the end.

    Args:
        target: Absolute path.
        work: Suffix that names the work.

    Raises:
        ConfigError: Another process uses it, or its place is not writable.
        StorageError: The disk failed.
    """
    folder = target.parent / f".{target.name}.{work}"
    with _mapped_errors(target):
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        folder.mkdir(exist_ok=True)  # a killed process may have left it
        busy = f"--to {target}: another export is making it just now"
        lock = FileLock.acquire(folder, busy=busy, is_directory=True)
    try:
        with _mapped_errors(target):
            for path in folder.iterdir():
                _remove(path)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # leftovers do no harm
        lock.close()


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
