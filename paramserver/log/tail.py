"""The newest bytes of an update log in memory. The disk is written from here, and followers read here.

Direct writes from this ring avoid the page cache: it would cost several times the processor time of the copy, evict
what lookups read, and leave it to the kernel when the disk starts writing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from headrace.paramserver.system.direct_file import BLOCK_BYTES, copy_bytes, page_memory
from headrace.schemas.messages import Segment

__all__ = ["LogTail"]

# The disk starts writing before all of a large group is copied.
_PIECE_BYTES = 4 << 20


class LogTail:
    """A ring: the byte at offset `n` of the segment being written lies at `n` modulo the ring's size.

    Thread: `begin` and `put` the log's writer; `read` any.
    """

    def __init__(self, size_bytes: int) -> None:
        """Reserve memory, a multiple of `BLOCK_BYTES` and at least two; pages cost nothing before they are used."""
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
        """Copy buffers to an offset piece by piece; yield (offset, whole blocks) to write.

        The first block begins with the bytes that were put before `offset`; the last one is filled up with zeros.

        Args:
            buffers: Contiguous, one after the other.
            offset: At most the end of the last `put`.
        """
        begin = offset - offset % BLOCK_BYTES
        for buffer in buffers:
            left = memoryview(buffer)
            left = left.cast("B") if left.nbytes else left  # an empty view of some shapes cannot be cast
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
        """Return a read-only copy of a segment's bytes, or None if they are not all here any more.

        Bytes in the range that were never put are undefined.
        """
        if size_bytes > self._size_bytes or not self._has(segment, offset):
            return None
        data = memoryview(np.empty(size_bytes, np.uint8).data)
        done = 0
        for view in self._views(offset, offset + size_bytes):
            copy_bytes(data[done : done + len(view)], view)
            done += len(view)
        # The writer raises `_first` before it overwrites: bytes that are still here now were here during the copy.
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
        """Return one or two views of a range. REQUIRES: the range is no longer than the ring."""
        first, size = begin % self._size_bytes, end - begin
        until = min(first + size, self._size_bytes)
        views = [self._view[first:until]]
        if until - first < size:
            views.append(self._view[: size - (until - first)])
        return views
