"""Whether a file system has room for what is to be written to it, before hours are spent on the part that fits."""

from __future__ import annotations

import shutil
from pathlib import Path

from headrace.schemas.errors import StorageError
from headrace.schemas.sizes import format_size

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
        needed, free = format_size(needed_bytes), format_size(free_bytes)
        raise StorageError(f"{directory}: {what} takes {needed}, and {free} are free; nothing was written")
