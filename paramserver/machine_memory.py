"""How much memory this process may have."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["machine_memory_bytes"]

# A container's limit, by cgroup version 2 and 1. As seen from inside the container its own group is the root.
_LIMIT_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def machine_memory_bytes(limit_files: tuple[Path, ...] = _LIMIT_FILES) -> int:
    """Return the machine's memory, or a container's limit when that is less, in bytes.

    Args:
        limit_files: Files that may hold a limit; one that is absent or holds a word sets none.
    """
    size_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in limit_files:
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue  # this machine counts in another way, or not at all
        if text.isdigit():
            size_bytes = min(size_bytes, int(text))
    return size_bytes
