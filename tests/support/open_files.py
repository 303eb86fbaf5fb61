"""Which files this process has open in a folder: whatever else it opens and closes meanwhile is another's."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def files_open_in(folder: Path) -> list[str]:
    """Return the paths, as often as they are open, directories and removed files included."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since, by another thread or with the list itself
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(path for path in found if Path(path).is_relative_to(folder.resolve()))
