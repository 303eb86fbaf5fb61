"""Reusable buffers for frames: a fresh buffer of megabytes costs a page fault for every 4 KiB received."""

from __future__ import annotations

import numpy as np

__all__ = ["BufferPool"]

# Capacities per doubling: a buffer is at most a quarter longer than requested.
_STEPS = 4


class BufferPool:
    """Lends buffers, and keeps returned ones for the next frame of about their size.

    Idle buffers are bounded by `max_idle_bytes`; the borrower bounds lent ones. Fresh buffers are not zeroed, so they
    take memory only as they are filled. After `give`, the contents belong to the next borrower.

    Thread: one at a time.
    """

    def __init__(self, *, max_buffer_bytes: int, max_idle_bytes: int, poison: int | None = None) -> None:
        """Start with no buffer; `poison` fills returned buffers, so that tests notice a use after the return."""
        self._max_buffer_bytes, self._max_idle_bytes, self._poison = max_buffer_bytes, max_idle_bytes, poison
        # By capacity; the least recently used capacity first.
        self._idle: dict[int, list[memoryview]] = {}
        self.idle_bytes = self.lent_bytes = 0  # capacity of idle and of lent buffers

    def capacity_of(self, size_bytes: int) -> int:
        """Return the length of the buffer that `take` lends for `size_bytes`, 1 to `max_buffer_bytes`."""
        step = max((1 << (size_bytes - 1).bit_length()) // (2 * _STEPS), 1)
        return min(-(-size_bytes // step) * step, self._max_buffer_bytes)

    def take(self, size_bytes: int) -> memoryview:
        """Lend an uninitialized, writable buffer, uint8[`capacity_of(size_bytes)`]; give this very view back."""
        assert 0 < size_bytes <= self._max_buffer_bytes
        capacity = self.capacity_of(size_bytes)
        self.lent_bytes += capacity
        idle = self._idle.pop(capacity, None)
        if idle is None:
            return np.empty(capacity, np.uint8).data
        buffer = idle.pop()
        if idle:
            self._idle[capacity] = idle
        self.idle_bytes -= capacity
        return buffer

    def give(self, buffer: memoryview) -> None:
        """Take back a lent buffer; keep it if it fits, and drop buffers of the least recently used capacities."""
        capacity = buffer.nbytes
        self.lent_bytes -= capacity
        if self._poison is not None:
            buffer[:] = bytes([self._poison]) * capacity
        if capacity > self._max_idle_bytes:
            return
        self._idle[capacity] = [*self._idle.pop(capacity, ()), buffer]
        self.idle_bytes += capacity
        while self.idle_bytes > self._max_idle_bytes:
            oldest = next(iter(self._idle))
            self._idle[oldest].pop()
            self.idle_bytes -= oldest
            if not self._idle[oldest]:
                del self._idle[oldest]
