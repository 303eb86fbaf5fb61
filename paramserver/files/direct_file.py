"""Files that are written, or read once, past the page cache, where the file system can.

Rows are written once and read, if at all, by compactions, which go past the cache too: cached, they would only push out
what lookups read, and each page of the cache costs more processor time than the bytes in it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import numpy as np

__all__ = [
    "BLOCK_BYTES",
    "DirectFileWriter",
    "block_memory",
    "copy_bytes",
    "open_direct",
    "page_memory",
    "read_direct",
    "supports_direct_io",
    "try_direct",
    "write_buffer",
]

BLOCK_BYTES = 4096
"""What goes past the page cache begins and ends at a multiple of this in memory and file; one of every disk's block."""

_BUFFER_BYTES = 4 << 20
# Below, holding the GIL for some microseconds costs the other threads less than getting it back costs this one.
_RELEASE_GIL_BYTES = 32 * 1024


def supports_direct_io(folder: Path) -> bool:
    """Return whether files in a folder can be written past the page cache; a file system in memory has no other place.

    Raises:
        OSError: No file can be made in the folder.
    """
    path = folder / f".direct-{os.getpid()}"
    try:
        with DirectFileWriter(path, write_buffer()) as file:
            try:
                file.write(bytes(BLOCK_BYTES))
                file.sync()
            except OSError as exc:
                if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise  # where only room is missing the block was right, and the next file says what is wrong
            return file.is_direct
    finally:
        path.unlink(missing_ok=True)


def write_buffer() -> memoryview:
    """Return memory for a `DirectFileWriter`, on a page boundary; it can be used for one file after the other."""
    return page_memory(_BUFFER_BYTES)


def page_memory(size_bytes: int) -> memoryview:
    """Return memory of zeros on a page boundary, which costs nothing before it is used.

    Raises:
        OSError: There is not so much.
    """
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)  # the first touch of as much takes a sixth of the time
    return memoryview(memory)


def block_memory(size_bytes: int) -> memoryview:
    """Return memory for whole blocks, on a page boundary, with anything in it.

    Of the heap: memory that was freed serves the next one, and its pages are there already, as those of `page_memory`
    are not.

    Args:
        size_bytes: At least so many bytes.
    """
    size_bytes = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
    memory = np.empty(size_bytes + BLOCK_BYTES, np.uint8)
    first = -memory.ctypes.data % BLOCK_BYTES
    return memory[first : first + size_bytes].data


def read_direct(path: Path) -> Iterator[memoryview]:
    """Yield a file's bytes in pieces, in memory that the next piece is read into.

    Args:
        path: What nobody writes to meanwhile.

    Raises:
        OSError: It cannot be read.

    Thread: any one at a time; it blocks.
    """
    fd = open_direct(path, os.O_RDONLY)
    with open(fd, "rb", buffering=0) as file:
        left, buffer = os.fstat(fd).st_size, write_buffer()
        while left:
            size = try_direct(os.readv, fd, [buffer])
            if not size:
                raise OSError(errno.EIO, "the file is shorter than it was", file.name)
            yield buffer[:size]
            left -= size


def copy_bytes(target: memoryview, data: memoryview) -> None:
    """Copy bytes to where as many are, many of them without the GIL."""
    if len(data) < _RELEASE_GIL_BYTES:
        target[:] = data
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))


def open_direct(path: Path, flags: int, opener: Callable[[Path, int], int] | None = None) -> int:
    """Return a file descriptor for `try_direct`.

    Args:
        path: Of the file.
        flags: For `open`.
        opener: What opens it; None for `os.open`.

    Raises:
        OSError: It cannot be opened.
    """
    opener = opener or _open
    try:
        return opener(path, flags | os.O_DIRECT)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return opener(path, flags)


def try_direct(call: Callable[..., int], fd: int, *args: object) -> int:
    """Return what a read or write of whole blocks returns; it goes past the page cache where the file can.

    Some file systems open a file for that and then refuse the call, as those of a disk with blocks larger than
    `BLOCK_BYTES`: it, and all later ones, go through the cache. So does what is left where a call ended amid a block.

    Args:
        call: `os.write` or another one that is given `fd` and `args`.
        fd: From `open_direct`.
        args: More of them.

    Raises:
        OSError: The disk failed.
    """
    try:
        return call(fd, *args)
    except OSError as exc:
        if exc.errno != errno.EINVAL or not _is_direct(fd):
            raise
        # Nothing has been done: the arguments were refused.
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return call(fd, *args)


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o644)


class DirectFileWriter:
    """A new file, written from its beginning to its end. Use it with `with`.

    Attributes:
        size_bytes: Written so far.

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
        self._fd = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    @property
    def is_direct(self) -> bool:
        """Whether it goes past the page cache, as far as is known before the first write. REQUIRES: it is open."""
        return _is_direct(self._fd)

    def write(self, data: bytes | memoryview) -> None:
        """Add bytes.

        Raises:
            OSError: The disk failed.
        """
        left = memoryview(data).cast("B")
        self.size_bytes += len(left)
        while left:
            piece = left[: len(self._buffer) - self._used]
            copy_bytes(self._buffer[self._used : self._used + len(piece)], piece)
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
            end = -(-self._used // BLOCK_BYTES) * BLOCK_BYTES
            self._put(end)  # what an earlier file has left behind the last byte is cut off
            os.ftruncate(self._fd, self.size_bytes)
        os.fsync(self._fd)

    def _put(self, size_bytes: int) -> None:
        left = self._buffer[:size_bytes]
        while left:
            written = try_direct(os.write, self._fd, left)
            if not written:
                raise OSError(errno.EIO, "the file system takes no more of what is written to it")
            left = left[written:]
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

    def __exit__(self, *exc_info: object) -> None:
        self.close()
