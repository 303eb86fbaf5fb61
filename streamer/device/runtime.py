"""The device calls that streaming from a GPU needs, as one small protocol: streams, events, pinned memory.

A fake in the tests keeps CUDA's rules on CPU tensors, where queued work has not run yet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from headrace.kernels.runtime.cuda_module import KernelsUnavailableError
from headrace.kernels.runtime.dispatch import beside_captures, gpu_module
from headrace.schemas.errors import ConfigError

__all__ = ["CudaRuntime", "DeviceEvent", "DeviceRuntime", "RuntimeOf", "cuda_runtime"]

# Of `cuda_module.FAMILIES`: without these a drain waits for the device. Compiled here rather than in the first step.
_FAMILIES = ("bitmap", "dirty_drain", "row_packing")


class DeviceEvent(Protocol):
    """A place in a stream's work."""

    def synchronize(self) -> None:
        """Wait until all work before it has run, or raise RuntimeError if the device failed; other threads run."""


class DeviceRuntime(Protocol):
    """One device, the stream on which training runs, and a side stream for copies to the host.

    Only `read` and `DeviceEvent.synchronize` wait.

    Attributes:
        device: The device.
    """

    device: torch.device

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the device's own memory."""

    def pinned(self, size_bytes: int) -> Tensor:
        """Return uint8[size_bytes] of pinned host memory, or raise ConfigError if none is left."""

    def enqueue(self, work: Callable[[], object]) -> None:
        """Call a function that queues work on the current stream."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device; a copy from the host may wait for the current stream."""

    def copy_to_host(self, source: Tensor, target: Tensor) -> None:
        """Queue a copy to pinned memory on the current stream."""

    def record(self) -> DeviceEvent:
        """Return an event behind everything queued on the current stream."""

    def copy_aside(self, source: Tensor, target: Tensor) -> DeviceEvent:
        """Queue a copy to pinned memory on the side stream, and return an event behind it.

        REQUIRES: the source's writes have run, and nothing writes it before the event.

        Thread: any.
        """

    def read(self, tensor: Tensor) -> Tensor:
        """Wait for everything queued on the current stream, and return a copy on the CPU."""

    def is_capturing(self) -> bool:
        """Return whether the current stream's work is being captured into a graph instead of run."""


RuntimeOf = Callable[[torch.device], DeviceRuntime | str | None]
"""Returns a device's runtime, or why it has none; None for the host, which is no such device."""


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking: a waiting thread sleeps instead of taking a core from training.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def synchronize(self) -> None:
        # The training thread may capture a graph meanwhile.
        with beside_captures():
            self._event.synchronize()


class CudaRuntime:
    """A CUDA device, or an AMD one with ROCm's build of torch; see `DeviceRuntime`."""

    def __init__(self, device: torch.device) -> None:
        """Make the side stream of a CUDA device with its index."""
        self.device = device
        # With a priority that captures do not use by default. torch hands out the 32 streams of each priority in turn,
        # and a copy on a capturing stream would become part of the graph.
        self._side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the device's memory, and not in FBGEMM's managed memory (UVM)."""
        return tensor.device == self.device and not _is_managed(tensor)

    def pinned(self, size_bytes: int) -> Tensor:
        """Return pinned memory."""
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        except RuntimeError as exc:
            reason = str(exc).partition("\n")[0]
            raise ConfigError(
                f"device_pipeline: no {size_bytes} bytes of pinned memory ({reason}): lower staging_bytes, or set "
                f"device_pipeline=False"
            ) from exc

    def enqueue(self, work: Callable[[], object]) -> None:
        """Call the function; kernels queue themselves."""
        work()

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or a copy on the device."""
        # Without the check torch takes four times as long to return the same tensor, for each table of a step.
        return tensor if tensor.device == self.device else tensor.to(self.device, non_blocking=True)

    def copy_to_host(self, source: Tensor, target: Tensor) -> None:
        """Queue the copy."""
        target.copy_(source, non_blocking=True)

    def record(self) -> DeviceEvent:
        """Record an event on the current stream."""
        return _CudaEvent(torch.cuda.current_stream(self.device))

    def copy_aside(self, source: Tensor, target: Tensor) -> DeviceEvent:
        """Queue the copy on the side stream."""
        # The stream's block ends by setting the device that was current before, which for a new thread is the first
        # one. Without the device's block, every process with another GPU would take memory for a context there.
        with beside_captures(), torch.cuda.device(self.device), torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
            # Keeps the allocator from reusing the memory during the copy if its owner goes away.
            source.record_stream(self._side)
            return _CudaEvent(self._side)

    def read(self, tensor: Tensor) -> Tensor:
        """Wait, and return a copy."""
        return tensor.cpu()

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is being captured."""
        return torch.cuda.is_current_stream_capturing()


def cuda_runtime(device: torch.device) -> CudaRuntime | str | None:
    """Return the runtime of the device of a table's weights, or why it has none; None for the host."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"there are no kernels for {device.type}"
    try:
        for family in _FAMILIES:
            gpu_module(family, device)
    except KernelsUnavailableError as exc:
        return str(exc)
    return CudaRuntime(device)


def _is_managed(tensor: Tensor) -> bool:
    # Only FBGEMM has such tensors. Without this check, torch takes 4 µs to look for an operator that does not exist,
    # for each column of each drain.
    if "fbgemm_gpu" not in sys.modules:
        return False
    is_uvm = getattr(torch.ops.fbgemm, "is_uvm_tensor", None)
    try:
        return is_uvm is not None and bool(is_uvm(tensor))
    except NotImplementedError:  # FBGEMM built for the CPU, with a torch for GPUs: there is no such memory
        return False
