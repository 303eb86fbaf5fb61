"""Staging: the two buffers that hold a flush between the training thread and the last shard's ack."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NamedTuple

import torch

from headrace.kernels.torch_dtypes import TORCH_DTYPES
from headrace.schemas.tables import DType

__all__ = ["ALIGNMENT_BYTES", "NUM_STAGING_BUFFERS", "Carved", "StagingBuffer", "StagingPool"]

ALIGNMENT_BYTES = 64
# One is filled while the other is on its way; a third would only add lag.
NUM_STAGING_BUFFERS = 2


class Carved(NamedTuple):
    """A column's place in a staging buffer.

    Attributes:
        tensor: dtype[num_rows, width], CPU, contiguous; to be filled.
        data: The same bytes, for the wire.
    """

    tensor: torch.Tensor
    data: memoryview


class StagingBuffer:
    """Memory of a fixed size, out of which the columns of one flush are carved. Not thread-safe: it has one owner.

    Attributes:
        size_bytes: Its size.
        used_bytes: What is carved.
    """

    def __init__(self, size_bytes: int) -> None:
        """Allocate; pages are not touched before they are used."""
        # Whole elements of every type, so that the buffer can be viewed as any of them.
        self.size_bytes = size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.used_bytes = 0
        storage = torch.empty(self.size_bytes + ALIGNMENT_BYTES, dtype=torch.uint8)
        # torch aligns by itself on every platform known; the offset keeps the promise if it ever does not.
        self._bytes = storage[-storage.data_ptr() % ALIGNMENT_BYTES :][: self.size_bytes]
        self._view = self._bytes.numpy().data
        self._typed = {dtype: self._bytes.view(torch_dtype) for dtype, torch_dtype in TORCH_DTYPES.items()}

    @property
    def free_bytes(self) -> int:
        """What can still be carved."""
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

    def clear(self) -> None:
        """Take everything back. REQUIRES: nothing carved is in use any more."""
        self.used_bytes = 0


class StagingPool:
    """The staging buffers that are free.

    Thread: any.
    """

    def __init__(self, size_bytes: int, *, num_buffers: int = NUM_STAGING_BUFFERS) -> None:
        """Allocate all buffers."""
        self._free = deque(StagingBuffer(size_bytes) for _ in range(num_buffers))
        self._changed = threading.Condition()
        self._is_closed = False
        self.buffer_bytes = self._free[0].size_bytes

    @property
    def num_free(self) -> int:
        """Buffers that nobody holds."""
        return len(self._free)

    def reserve(self, timeout_s: float = 0.0) -> StagingBuffer | None:
        """Return an empty buffer; None when none becomes free in time, or when the pool is closed.

        It stays in the pool until `remove`, so whoever is interrupted (Ctrl-C) while filling it has not lost it.

        Thread: one alone, which fills one buffer at a time.

        Args:
            timeout_s: How long to wait; 0 does not wait.
        """
        if timeout_s <= 0:
            # One atomic operation, because a step takes this path and finds no buffer as often as not.
            try:
                # The last one given back: where the server keeps up, the memory of the other is never touched.
                return self._cleared(self._free[-1])
            except IndexError:
                return None
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._is_closed:
                if self._free:
                    return self._cleared(self._free[-1])
                if not self._changed.wait(deadline_s - time.monotonic()):
                    return None
        return None

    def remove(self, buffer: StagingBuffer) -> None:
        """Take a buffer that is reserved out of the pool: whoever gets it gives it back."""
        self._free.remove(buffer)

    def release(self, buffer: StagingBuffer) -> None:
        """Give a buffer back; one that was not removed stays. REQUIRES: nothing carved out of it is in use any more."""
        buffer.clear()
        with self._changed:
            if buffer not in self._free:
                self._free.append(buffer)
            self._changed.notify()

    @staticmethod
    def _cleared(buffer: StagingBuffer) -> StagingBuffer:
        buffer.clear()
        return buffer

    def close(self) -> None:
        """Wake whoever waits: there will be no more free buffers."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
