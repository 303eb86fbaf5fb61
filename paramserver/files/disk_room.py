"""Whether a file system has room for what is to be written to it, before hours are spent on the part that fits."""

from __future__ import annotations

import shutil
from pathlib import Path

from headrace.schemas.errors import StorageError

__all__ = ["check_room"]


def check_room(directory: Path, needed_bytes: int, *, what: str) -> None:
    """Check that there is room. It may be gone before all is written: then writing fails.

    Args:
        directory: Where it is to be, or the nearest one that there is above it.
        needed_bytes: Of files, at least.
        what: What it is, for the message.

    Raises:
        StorageError: There is less; nothing was written. Or the file system cannot be asked.
    """
    directory = directory.absolute()
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        free_bytes = shutil.disk_usage(directory).free
    except OSError as exc:
        raise StorageError(f"{directory}: {exc.strerror or exc}") from exc
    if needed_bytes > free_bytes:
        raise StorageError(
            f"{directory}: {what} takes {_gib(needed_bytes)}, and {_gib(free_bytes)} are free; nothing was written"
        )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:,.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:,.1f} MiB"
