"""Files that are written, or read once, past the page cache, where the file system can.

Rows are written once and read, if at all, by compactions, which go past the cache too: cached, they would only push out
what lookups read, and each page of the cache costs more processor time than the bytes in it.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["DirectFileWriter", "read_direct", "supports_direct_io", "write_buffer"]

# A multiple of every disk's block.
_ALIGNMENT = 4096
_BUFFER_BYTES = 4 << 20


def supports_direct_io(folder: Path) -> bool:
    """Return whether files in a folder can be written past the page cache; a file system in memory has no other place.

    Raises:
        OSError: No file can be made in the folder.
    """
    path = folder / f".direct-{os.getpid()}"
    try:
        with DirectFileWriter(path, write_buffer()) as file:
            return file.is_direct
    finally:
        path.unlink(missing_ok=True)


def write_buffer() -> memoryview:
    """Return memory for a `DirectFileWriter`, on a page boundary; it can be used for one file after the other."""
    return memoryview(mmap.mmap(-1, _BUFFER_BYTES))


def read_direct(path: Path) -> Iterator[memoryview]:
    """Yield a file's bytes in pieces, in memory that the next piece is read into.

    Args:
        path: What nobody writes to meanwhile.

    Raises:
        OSError: It cannot be read.

    Thread: any one at a time; it blocks.
    """
    fd, _ = _open_direct(path, os.O_RDONLY)
    with open(fd, "rb", buffering=0) as file:
        left, buffer = os.fstat(fd).st_size, write_buffer()
        while left:
            size = os.readv(fd, [buffer])
            if not size or (size < left and size % _ALIGNMENT):
                # It is shorter by now; or what is left lies on no boundary, and the next call would be refused.
                raise OSError(errno.EIO, "the file system gave only part of what is in the file", file.name)
            yield buffer[:size]
            left -= size


def _open_direct(path: Path, flags: int) -> tuple[int, bool]:
    """Return (a file descriptor, whether it goes past the page cache)."""
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT, 0o644), True
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o644), False


class DirectFileWriter:
    """A new file, written from its beginning to its end. Use it with `with`.

    Attributes:
        size_bytes: Written so far.
        is_direct: Whether it goes past the page cache.

    Thread: any one at a time; it blocks.
    """

    def __init__(self, path: Path, buffer: memoryview) -> None:
        """Make the file, or empty the one that is there.

        Args:
            path: Where.
            buffer: From `write_buffer`; nobody else's until the file is closed.

        Raises:
            OSError: It cannot be made.
        """
        self.size_bytes = 0
        self._buffer = buffer
        self._used = 0
        self._fd, self.is_direct = _open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def write(self, data: bytes | memoryview) -> None:
        """Add bytes.

        Raises:
            OSError: The disk failed.
        """
        left = memoryview(data).cast("B")
        self.size_bytes += len(left)
        while left:
            piece = left[: len(self._buffer) - self._used]
            self._buffer[self._used : self._used + len(piece)] = piece
            self._used += len(piece)
            left = left[len(piece) :]
            if self._used == len(self._buffer):
                self._put(self._used)

    def sync(self) -> None:
        """Write the rest and make the file survive a crash; nothing can be added afterwards.

        Raises:
            OSError: The disk failed.
        """
        if self._used:
            end = -(-self._used // _ALIGNMENT) * _ALIGNMENT
            self._put(end)  # what an earlier file has left behind the last byte is cut off
            os.ftruncate(self._fd, self.size_bytes)
        os.fsync(self._fd)

    def _put(self, size_bytes: int) -> None:
        left = self._buffer[:size_bytes]
        while left:
            written = os.write(self._fd, left)
            left = left[written:]
            if left and written % _ALIGNMENT:
                # What is left lies on no boundary any more: the next call would be refused.
                raise OSError(errno.EIO, "the file system took only part of what was written to it")
        if not self.is_direct:
            # A large sync at the end would hold up the update log's.
            os.fdatasync(self._fd)
        self._used = 0

    def close(self) -> None:
        """Close the file as it is; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
