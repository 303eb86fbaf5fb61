"""Files and directories that are there whole or not at all: written aside, synced, renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from headrace.paramserver.snapshot_files import fsync_path
from headrace.schemas.errors import ConfigError, HeadraceError, StorageError

__all__ = ["check_place", "written_aside"]

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
    aside = target.parent / f".{target.name}.export"
    try:
        check_place(target)
        _remove(aside)
        yield aside
        for path in [*sorted(aside.rglob("*")), aside] if aside.is_dir() else [aside]:
            fsync_path(path)
        check_place(target)
        aside.rename(target)
        fsync_path(target.parent)
    except HeadraceError:
        raise
    except PermissionError as exc:
        raise ConfigError(f"--to {target}: {exc.filename or target.parent} is not writable") from exc
    except OSError as exc:
        full = "the disk is full: " if exc.errno in _FULL else ""
        raise StorageError(f"{target}: {full}{exc.strerror or exc}; nothing was made") from exc
    finally:
        with contextlib.suppress(OSError):  # it is in the way of nobody
            _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
