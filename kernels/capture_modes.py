"""What a thread may call while another one captures a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from headrace.kernels import cuda_module, hip_module

__all__ = ["beside_captures"]

# CU_STREAM_CAPTURE_MODE_RELAXED; HIP has the same number for it.
_RELAXED = 2


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread wait for a GPU, and copy from it, while another thread captures a CUDA graph.

    torch captures in the mode "global": a wait or a query on any thread of the process is then an error, which ends
    the capture too, although it has nothing to do with what is captured. A thread can say that it keeps away from it.

    REQUIRES: the thread captures nothing, and waits for no event that was recorded in a capture.

    Raises:
        RuntimeError: The driver refuses.
    """
    exchange = cuda_module.exchange_capture_mode if torch.version.hip is None else hip_module.exchange_capture_mode
    before = exchange(_RELAXED)
    try:
        yield
    finally:
        exchange(before)
