"""Reusable buffers for frames: a fresh one of megabytes costs a page fault for every 4 KiB that arrive in it."""

from __future__ import annotations

import numpy as np

__all__ = ["BufferPool"]

# Steps a doubling: a buffer is at most a quarter longer than what was asked for.
_STEPS = 4


class BufferPool:
    """Buffers that are lent, given back, and kept for the next frame of about their size.

    Bounded: idle buffers take `max_idle_bytes`; lent ones are the borrower's to bound. Fresh buffers are not zeroed, so
    one takes memory only as it is filled. The contents of a returned buffer are the next borrower's: whoever gives one
    back must not look at it again.

    Thread: none of its own; one at a time.

    Attributes:
        idle_bytes: Capacity of the buffers that wait to be used.
        lent_bytes: Capacity of the buffers that were taken and not given back.
    """

    def __init__(self, *, max_buffer_bytes: int, max_idle_bytes: int, poison: int | None = None) -> None:
        """Start with no buffer.

        Args:
            max_buffer_bytes: Longest buffer that is ever taken, > 0.
            max_idle_bytes: Capacity to keep for later, ≥ 0.
            poison: A byte to fill returned buffers with, which makes a use after the return visible; for tests.
        """
        self._max_buffer_bytes = max_buffer_bytes
        self._max_idle_bytes = max_idle_bytes
        self._poison = poison
        # By capacity; the least recently used capacity first.
        self._idle: dict[int, list[memoryview]] = {}
        self.idle_bytes = 0
        self.lent_bytes = 0

    def capacity_of(self, size_bytes: int) -> int:
        """Return how long a buffer is that `take` lends for `size_bytes`, 1 to `max_buffer_bytes`."""
        step = max((1 << (size_bytes - 1).bit_length()) // (2 * _STEPS), 1)
        return min(-(-size_bytes // step) * step, self._max_buffer_bytes)

    def take(self, size_bytes: int) -> memoryview:
        """Lend a buffer of at least `size_bytes`, 1 to `max_buffer_bytes`, with anything in it.

        Returns:
            uint8[`capacity_of(size_bytes)`], writable, contiguous. Give this very view back.
        """
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
        """Take back a buffer that was lent; keep it when there is room, at the cost of others used longer ago."""
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
