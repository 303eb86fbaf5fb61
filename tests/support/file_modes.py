"""Which files and directories other users of the machine may reach."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["open_to_others", "open_umask"]


@contextlib.contextmanager
def open_umask() -> Iterator[None]:
    """Let this process, and those that it starts, make what others may write, unless they say otherwise."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """Return the mode and path of each directory and file that is not its owner's alone, from the folder down."""
    paths = [folder, *folder.rglob("*")]
    assert len(paths) > 1
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    return [f"{mode:04o} {path}" for path, mode in modes.items() if mode & 0o077]
