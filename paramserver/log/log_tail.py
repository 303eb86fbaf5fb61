"""The newest bytes of an update log in memory: what the disk is written from, past the page cache, and followers read.

The page cache would cost several times the processor time of the copy that is made here, would push out what lookups
read, and would leave it to the kernel when the disk gets to work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from headrace.paramserver.files.direct_file import BLOCK_BYTES, copy_bytes, page_memory
from headrace.schemas.messages import Segment

__all__ = ["LogTail"]

# The disk gets to work before all of a large group is copied.
_PIECE_BYTES = 4 << 20


class LogTail:
    """A ring in which the byte at offset `n` of the segment that is being written lies at `n` modulo its size.

    Thread: `begin` and `put` the log's writer; `read` any.
    """

    def __init__(self, size_bytes: int) -> None:
        """Take memory, which costs nothing before it is used.

        Args:
            size_bytes: A multiple of `BLOCK_BYTES`, at least two of them.
        """
        self._size_bytes = size_bytes
        self._view = page_memory(size_bytes)
        self._piece_bytes = min(_PIECE_BYTES, size_bytes - BLOCK_BYTES)
        self._segment: object = None
        self._first = 0

    def begin(self, segment: object) -> None:
        """Hold the bytes of another segment from now on, from its offset 0."""
        self._segment = segment
        self._first = 0

    def put(self, buffers: Sequence[Segment], offset: int) -> Iterator[tuple[int, list[memoryview]]]:
        """Copy buffers to an offset, piece by piece, and yield what to write where, in whole blocks.

        Zeros follow up to the end of the last block. The bytes from the beginning of the first block up to `offset` are
        those that were put there before.

        Args:
            buffers: Contiguous, one after the other.
            offset: At most where the last `put` ended.
        """
        begin = offset - offset % BLOCK_BYTES
        for buffer in buffers:
            left = memoryview(buffer)
            left = left.cast("B") if left.nbytes else left  # nothing is no bytes, whatever its shape
            while left.nbytes:
                size = min(len(left), begin + self._piece_bytes - offset)
                self._copy(left[:size], offset)
                offset, left = offset + size, left[size:]
                if offset - begin == self._piece_bytes:
                    yield begin, self._views(begin, offset)
                    begin = offset
        if offset > begin:
            end = -(-offset // BLOCK_BYTES) * BLOCK_BYTES
            self._copy(memoryview(bytes(end - offset)), offset)
            yield begin, self._views(begin, end)

    def read(self, segment: object, offset: int, size_bytes: int) -> memoryview | None:
        """Return a copy of bytes that were put, read-only, or None if they are not, or not all, here any more.

        Args:
            segment: Whose.
            offset: Where they begin.
            size_bytes: How many. What has been put of them is right, what has not been is anything.
        """
        if size_bytes > self._size_bytes or not self._has(segment, offset):
            return None
        data = memoryview(np.empty(size_bytes, np.uint8).data)
        done = 0
        for view in self._views(offset, offset + size_bytes):
            copy_bytes(data[done : done + len(view)], view)
            done += len(view)
        # The writer says what it takes the place of before it does so: what is still here now was here throughout.
        return data.toreadonly() if self._has(segment, offset) else None

    def _has(self, segment: object, offset: int) -> bool:
        return self._segment is segment and offset >= self._first

    def _copy(self, data: memoryview, offset: int) -> None:
        """REQUIRES: `data` is smaller than the ring."""
        self._first = max(self._first, offset + len(data) - self._size_bytes)
        done = 0
        for view in self._views(offset, offset + len(data)):
            copy_bytes(view, data[done : done + len(view)])
            done += len(view)

    def _views(self, begin: int, end: int) -> list[memoryview]:
        """Return the places of a range, in one piece or two. REQUIRES: it is no longer than the ring."""
        first, size = begin % self._size_bytes, end - begin
        until = min(first + size, self._size_bytes)
        views = [self._view[first:until]]
        if until - first < size:
            views.append(self._view[: size - (until - first)])
        return views
