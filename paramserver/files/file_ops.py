"""What the update log asks of the file system, in one place, so that tests can make each of it fail.

Only calls that change files, or that make a change last, go through here. Reading does not: it cannot lose anything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from headrace.schemas.messages import Segment

__all__ = ["FileOps", "SystemFileOps"]


class FileOps(Protocol):
    """Calls that change files. Each raises `OSError`. Thread: any; they block."""

    def open(self, path: Path, flags: int) -> int:
        """Return a file descriptor, not inherited by child processes; new files get mode 0o644."""
        ...

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        ...

    def pwritev(self, fd: int, buffers: Sequence[Segment], offset: int) -> int:
        """Write the buffers one after the other from `offset` on; return the number of bytes written.

        REQUIRES: at most IOV_MAX buffers.
        """
        ...

    def allocate(self, fd: int, offset: int, size_bytes: int) -> None:
        """Reserve blocks for a range, which reads as zeros, and grow the file to its end."""
        ...

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Cut the file to a size."""
        ...

    def fdatasync(self, fd: int) -> None:
        """Make what was written, and the size, survive power loss."""
        ...

    def fsync(self, fd: int) -> None:
        """Make the file and all of its metadata survive power loss."""
        ...

    def fsync_dir(self, path: Path) -> None:
        """Make creations, renames and removals in a directory survive power loss."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, replacing what has it."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        ...

    def drop_cache(self, fd: int) -> None:
        """Let later reads of the file come from the disk.

        Only what is synced; a hint, which never fails for want of support.
        """
        ...


class SystemFileOps:
    """The operating system's own calls."""

    def open(self, path: Path, flags: int) -> int:
        """See `FileOps`."""
        return os.open(path, flags, 0o644)

    def close(self, fd: int) -> None:
        """See `FileOps`."""
        os.close(fd)

    def pwritev(self, fd: int, buffers: Sequence[Segment], offset: int) -> int:
        """See `FileOps`."""
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, size_bytes: int) -> None:
        """See `FileOps`."""
        os.posix_fallocate(fd, offset, size_bytes)

    def truncate(self, fd: int, size_bytes: int) -> None:
        """See `FileOps`."""
        os.ftruncate(fd, size_bytes)

    def fdatasync(self, fd: int) -> None:
        """See `FileOps`."""
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        """See `FileOps`."""
        os.fsync(fd)

    def fsync_dir(self, path: Path) -> None:
        """See `FileOps`."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """See `FileOps`."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """See `FileOps`."""
        os.unlink(path)

    def drop_cache(self, fd: int) -> None:
        """See `FileOps`."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
