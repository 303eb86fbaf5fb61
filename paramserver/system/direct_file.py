"""Write files, or read them once, with direct I/O, past the page cache, where the file system supports it.

Rows are written once and then read only by compactions, which bypass the cache too. Cached, they would push out what
lookups read, and each cache page costs more processor time than the bytes in it.

All calls block and raise `OSError` if the disk fails.
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
"""Direct I/O starts and ends at multiples of this, in memory and file; a multiple of every disk's block."""

_BUFFER_BYTES = 4 << 20
# For less, holding the GIL some microseconds costs other threads less than getting it back costs this one.
_RELEASE_GIL_BYTES = 32 * 1024


def supports_direct_io(folder: Path) -> bool:
    """Return whether files in a folder can be written with direct I/O; a file system in memory cannot."""
    path = folder / f".direct-{os.getpid()}"
    try:
        with DirectFileWriter(path, write_buffer()) as file:
            try:
                file.write(bytes(BLOCK_BYTES))
                file.sync()
            except OSError as exc:
                if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise  # a full disk accepted the block's alignment; writing the next file reports the full disk
            return file.is_direct
    finally:
        path.unlink(missing_ok=True)


def write_buffer() -> memoryview:
    """Return a page-aligned buffer for a `DirectFileWriter`; it can serve one file after another."""
    return page_memory(_BUFFER_BYTES)


def page_memory(size_bytes: int) -> memoryview:
    """Return zeroed, page-aligned memory, which costs nothing before it is used."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)  # the first touch then takes a sixth of the time
    return memoryview(memory)


def block_memory(size_bytes: int) -> memoryview:
    """Return uninitialized, page-aligned memory of whole blocks, at least `size_bytes` long.

    It comes from the heap, where freed memory is reused with its pages present; `page_memory` always faults new ones.
    """
    size_bytes = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
    memory = np.empty(size_bytes + BLOCK_BYTES, np.uint8)
    first = -memory.ctypes.data % BLOCK_BYTES
    return memory[first : first + size_bytes].data


def read_direct(path: Path) -> Iterator[memoryview]:
    """Yield a file's bytes in pieces; each piece is overwritten by the next. REQUIRES: nobody writes to the file.

    Thread: any one at a time.
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
    """Copy bytes to memory of the same length; long copies release the GIL."""
    if len(data) < _RELEASE_GIL_BYTES:
        target[:] = data
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))


def open_direct(path: Path, flags: int, opener: Callable[[Path, int], int] | None = None) -> int:
    """Return a file descriptor for `try_direct`, with direct I/O if the file system takes the flag.

    Args:
        path: Of the file.
        flags: For `open`.
        opener: Opens the file; None for `os.open`.
    """
    opener = opener or _open
    try:
        return opener(path, flags | os.O_DIRECT)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return opener(path, flags)


def try_direct(call: Callable[..., int], fd: int, *args: object) -> int:
    """Read or write whole blocks, with direct I/O if the file allows it, and return what the call returns.

    Some file systems open a file for direct I/O and then refuse the call, such as on disks with blocks larger than
    `BLOCK_BYTES`. Then this call and all later ones use the cache, as does the rest after a call that ended in a block.

    Args:
        call: `os.write` or another call that takes `fd` and `args`.
        fd: From `open_direct`.
        args: Further arguments.
    """
    try:
        return call(fd, *args)
    except OSError as exc:
        if exc.errno != errno.EINVAL or not _is_direct(fd):
            raise
        # The call did nothing: its arguments were refused.
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return call(fd, *args)


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o644)


class DirectFileWriter:
    """Writes a new file from beginning to end. Use it with `with`.

    Thread: any one at a time; it blocks.

    Attributes:
        size_bytes: Written so far.
    """

    def __init__(self, path: Path, buffer: memoryview) -> None:
        """Create the file, or empty an existing one.

        Args:
            path: Of the file.
            buffer: From `write_buffer`; for this writer alone until the file is closed.
        """
        self.size_bytes = 0
        self._buffer = buffer
        self._used = 0
        self._fd = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    @property
    def is_direct(self) -> bool:
        """Whether it uses direct I/O; a first write may still turn that off. REQUIRES: it is open."""
        return _is_direct(self._fd)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
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
        """Write the rest and make the file survive a crash; nothing can be appended afterwards."""
        if self._used:
            end = -(-self._used // BLOCK_BYTES) * BLOCK_BYTES
            self._put(end)  # the truncation removes old bytes of the buffer after the last byte
            os.ftruncate(self._fd, self.size_bytes)
        os.fsync(self._fd)

    def _put(self, size_bytes: int) -> None:
        left = self._buffer[:size_bytes]
        while left:
            written = try_direct(os.write, self._fd, left)
            if not written:
                raise OSError(errno.EIO, "the file system accepts no more bytes")
            left = left[written:]
        if not self.is_direct:
            # One large sync at the end would delay the update log's syncs.
            os.fdatasync(self._fd)
        self._used = 0

    def close(self) -> None:
        """Close the file as it is. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
