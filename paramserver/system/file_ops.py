"""The file system calls of the update log, in one place, so that tests can make each of them fail.

Only calls that change files, or make a change durable, go through here. Reading cannot lose anything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from headrace.paramserver.system.durable import fsync_path
from headrace.schemas.messages import Segment

__all__ = ["FileOps"]


class FileOps:
    """The operating system's calls that change files; tests override them. Each may raise `OSError`.

    Thread: any; methods block.
    """

    def open(self, path: Path, flags: int) -> int:
        """Return a file descriptor, not inherited by child processes; new files get mode 0o644."""
        return os.open(path, flags, 0o644)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def pwritev(self, fd: int, buffers: Sequence[Segment], offset: int) -> int:
        """Write buffers one after the other from `offset` on; return the number of bytes written.

        REQUIRES: at most IOV_MAX buffers.
        """
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, size_bytes: int) -> None:
        """Reserve blocks for a range, which reads as zeros, and grow the file to its end."""
        os.posix_fallocate(fd, offset, size_bytes)

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Set the file's size."""
        os.ftruncate(fd, size_bytes)

    def fdatasync(self, fd: int) -> None:
        """Make the file's data and size survive power loss."""
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        """Make the file and all of its metadata survive power loss."""
        os.fsync(fd)

    def fsync_dir(self, path: Path) -> None:
        """Make creations, renames and removals in a directory survive power loss."""
        fsync_path(path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file, replacing any file at the target."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def drop_cache(self, fd: int) -> None:
        """Ask that later reads of synced data come from the disk; a hint, which may have no effect."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
