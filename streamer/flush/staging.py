"""Staging buffers: they hold a flush from the training thread until the last shard's ack."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from headrace.kernels.dtypes import TORCH_DTYPES
from headrace.schemas.tables import DType

__all__ = ["ALIGNMENT_BYTES", "NUM_STAGING_BUFFERS", "Carved", "StagingBuffer", "StagingPool"]

ALIGNMENT_BYTES = 64
# One is filled while the other is on its way; a third would only add lag.
NUM_STAGING_BUFFERS = 2


class Carved(NamedTuple):
    """A column's place in a staging buffer: a contiguous tensor to be filled, and the same bytes for the wire."""

    tensor: torch.Tensor
    data: memoryview


class StagingBuffer:
    """Memory of a fixed size from which the columns of one flush are carved. Not thread-safe: it has one owner."""

    def __init__(self, size_bytes: int, *, is_pinned: bool = False) -> None:
        """Allocate; pages are not touched before they are used, unless the memory is pinned for a GPU."""
        # Whole elements of every type, so that the buffer can be viewed as any of them.
        self.size_bytes = size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.used_bytes = 0
        # What else is free once the flush in this buffer is done with: the memory of the dense part.
        self.on_cleared: Callable[[], None] | None = None
        storage = torch.empty(self.size_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, pin_memory=is_pinned, device="cpu")
        # torch aligns on every known platform; the offset keeps the promise if it ever does not.
        self._bytes = storage[-storage.data_ptr() % ALIGNMENT_BYTES :][: self.size_bytes]
        self._view = self._bytes.numpy().data
        self._typed = {dtype: self._bytes.view(torch_dtype) for dtype, torch_dtype in TORCH_DTYPES.items()}

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be carved."""
        return self.size_bytes - self.used_bytes

    def carve(self, dtype: DType, num_rows: int, width: int) -> Carved:
        """Return the next `num_rows × width` elements, aligned to 64 bytes.

        Raises:
            MemoryError: They do not fit.
        """
        start, item_bytes = self.used_bytes, dtype.size_bytes
        end = start + num_rows * width * item_bytes
        if end > self.size_bytes:
            raise MemoryError(f"{end - start} bytes do not fit into the {self.free_bytes} left of a staging buffer")
        self.used_bytes = min(self.size_bytes, -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        tensor = self._typed[dtype].narrow(0, start // item_bytes, num_rows * width).view(num_rows, width)
        return Carved(tensor, self._view[start:end])

    def used(self) -> memoryview:
        """Return the bytes carved so far."""
        return self._view[: self.used_bytes]

    def cleared(self) -> StagingBuffer:
        """Make all bytes free, and return the buffer. REQUIRES: nothing carved is in use any more."""
        self.used_bytes = 0
        on_cleared, self.on_cleared = self.on_cleared, None
        if on_cleared is not None:
            on_cleared()
        return self


class StagingPool:
    """The free staging buffers. Thread: any."""

    def __init__(self, size_bytes: int) -> None:
        """Allocate all buffers."""
        self._free = deque(StagingBuffer(size_bytes) for _ in range(NUM_STAGING_BUFFERS))
        self._changed = threading.Condition()
        self._is_closed, self._keeps_buffers = False, True
        self.buffer_bytes = self._free[0].size_bytes

    @property
    def num_free(self) -> int:
        """Number of free buffers."""
        return len(self._free)

    def reserve(self, timeout_s: float = 0.0) -> StagingBuffer | None:
        """Return an empty buffer; None if none becomes free in time, or if the pool is closed.

        It stays in the pool until `remove`, so a caller that is interrupted (Ctrl-C) while filling it does not lose it.
        The timeout is in seconds; 0 does not wait. Thread: one alone, which fills one buffer at a time.
        """
        if timeout_s <= 0:
            # One atomic operation, because every step comes here and often finds no buffer. Take the last one given
            # back: if the server keeps up, the other one's memory is never touched.
            try:
                return self._free[-1].cleared()
            except IndexError:
                return None
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._is_closed:
                if self._free:
                    return self._free[-1].cleared()
                if not self._changed.wait(deadline_s - time.monotonic()):
                    return None
        return None

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for what the release of a buffer makes true; return whether it is, in time and before the pool closes.

        Thread: as `reserve`.
        """
        with self._changed:
            return self._changed.wait_for(lambda: is_so() or self._is_closed, max(0.0, timeout_s)) and is_so()

    def remove(self, buffer: StagingBuffer) -> None:
        """Take a reserved buffer out of the pool; its owner releases it."""
        if self._keeps_buffers or buffer in self._free:  # else the pool was discarded while it was filled
            self._free.remove(buffer)

    def release(self, buffer: StagingBuffer) -> None:
        """Return a buffer, removed or not, to the pool. REQUIRES: nothing carved from it is in use any more."""
        buffer.cleared()
        with self._changed:
            if self._keeps_buffers and buffer not in self._free:
                self._free.append(buffer)
            self._changed.notify()

    def close(self) -> None:
        """Wake all waiting threads: no buffer becomes free any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def discard(self) -> None:
        """Close, and give up the memory of the free buffers; that of others goes with their release."""
        self.close()
        with self._changed:
            self._keeps_buffers = False
            self._free.clear()
