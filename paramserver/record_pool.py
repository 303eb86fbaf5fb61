"""Memory for runs of records, used again when nothing refers to it any more.

Fresh memory of a run's size comes from the system page by page, which costs as much as filling it does; on a virtual
machine that gives free memory back to its host, ten times as much.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.buffer_pool import BufferPool

__all__ = ["RecordPool"]

# Less comes from the allocator's own heap, which keeps it.
_MIN_BYTES = 1 << 20


class RecordPool:
    """Lends arrays, and lends their memory again when the last view of one is gone: nobody gives anything back.

    Thread: any.
    """

    def __init__(self, *, max_array_bytes: int, max_idle_bytes: int, poison: int | None = None) -> None:
        """Start with nothing.

        Args:
            max_array_bytes: Longer arrays are made as numpy makes them.
            max_idle_bytes: Memory to keep for later.
            poison: See `BufferPool`.
        """
        self._max_array_bytes = max_array_bytes
        self._buffers = BufferPool(max_buffer_bytes=max_array_bytes, max_idle_bytes=max_idle_bytes, poison=poison)
        # A view may go, and so give its memory back, amid anything this thread does, also in here.
        self._lock = threading.RLock()

    @property
    def idle_bytes(self) -> int:
        """Memory that waits to be lent."""
        return self._buffers.idle_bytes

    def empty(self, size: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return `dtype[size]` with anything in it.

        Args:
            size: ≥ 0.
            dtype: Of the elements; no Python objects.
        """
        size_bytes = size * dtype.itemsize
        if not _MIN_BYTES <= size_bytes <= self._max_array_bytes:
            return np.empty(size, dtype)
        with self._lock:
            buffer = self._buffers.take(size_bytes)
        # All views of what is made of it refer to this object; numpy would see through one of its own.
        owner = (ctypes.c_ubyte * size_bytes).from_buffer(buffer)
        weakref.finalize(owner, self._give, buffer).atexit = False
        array: npt.NDArray[Any] = np.frombuffer(memoryview(owner), dtype)
        return array

    def _give(self, buffer: memoryview) -> None:
        with self._lock:
            self._buffers.give(buffer)
