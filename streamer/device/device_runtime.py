"""The device calls that streaming from a GPU needs, behind one small protocol: streams, events, pinned memory.

A test's fake keeps CUDA's rules on CPU tensors: what is queued has not run yet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from headrace.kernels.capture_modes import beside_captures
from headrace.kernels.cuda_module import KernelsUnavailableError
from headrace.kernels.dispatch import gpu_module
from headrace.schemas.errors import ConfigError

__all__ = ["CudaRuntime", "DeviceEvent", "DeviceRuntime", "cuda_runtime"]

# Of `cuda_module.FAMILIES`: without these a cut waits for the device. Compiled here, and not in the first step.
_FAMILIES = ("bitmap", "dirty_cut", "row_packing")


class DeviceEvent(Protocol):
    """A place in a stream's work."""

    def synchronize(self) -> None:
        """Wait until all before it has run; another thread runs meanwhile.

        Raises:
            RuntimeError: The device has failed.
        """


class DeviceRuntime(Protocol):
    """One device, the stream on which training runs, and a side stream for copies to the host.

    Nothing here waits but `read` and `DeviceEvent.synchronize`.

    Attributes:
        device: Where the tensors are.
    """

    device: torch.device

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor's memory is the device's own."""

    def pinned(self, size_bytes: int) -> Tensor:
        """Return uint8[size_bytes] of host memory that the device copies to by itself.

        Raises:
            ConfigError: There is no such memory left.
        """

    def enqueue(self, work: Callable[[], object]) -> None:
        """Call what queues work on the current stream."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device; a copy from the host may wait for the current stream."""

    def copy_to_host(self, source: Tensor, target: Tensor) -> None:
        """Queue a copy to pinned memory on the current stream."""

    def record(self) -> DeviceEvent:
        """Return the place in the current stream behind all that is queued."""

    def copy_aside(self, source: Tensor, target: Tensor) -> DeviceEvent:
        """Queue a copy to pinned memory on the side stream, and return the place behind it.

        REQUIRES: what writes the source has run, and nothing writes it before the event.

        Thread: any.
        """

    def read(self, tensor: Tensor) -> Tensor:
        """Return a copy on the CPU, after all that is queued on the current stream: waits for the device."""

    def is_capturing(self) -> bool:
        """Return whether the current stream's work is being captured into a graph, not run."""


class _CudaEvent:
    """An event that was recorded on a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking: a thread that waits sleeps, instead of taking a core from training.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def synchronize(self) -> None:
        """Wait; the training thread may capture a graph meanwhile."""
        with beside_captures():
            self._event.synchronize()


class CudaRuntime:
    """A CUDA device; on ROCm's build of torch, AMD's."""

    def __init__(self, device: torch.device) -> None:
        """Make the side stream.

        Args:
            device: A CUDA device with its index.
        """
        self.device = device
        # Of a priority that graphs are not captured at by default: torch deals out the 32 streams of each by turns, and
        # a copy on the stream of a capture would become a part of its graph.
        self._side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the device's memory, not in managed memory of FBGEMM (UVM)."""
        return tensor.device == self.device and not _is_managed(tensor)

    def pinned(self, size_bytes: int) -> Tensor:
        """Return pinned memory."""
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as exc:
            raise ConfigError(
                f"device_pipeline: no {size_bytes} bytes of pinned memory ({_first_line(exc)}): lower staging_bytes"
            ) from exc

    def enqueue(self, work: Callable[[], object]) -> None:
        """Call it: kernels queue themselves."""
        work()

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or a copy on the device."""
        # To ask torch for a copy that is none takes it four times as long, for each table of a step.
        return tensor if tensor.device == self.device else tensor.to(self.device, non_blocking=True)

    def copy_to_host(self, source: Tensor, target: Tensor) -> None:
        """Queue the copy."""
        target.copy_(source, non_blocking=True)

    def record(self) -> DeviceEvent:
        """Return an event recorded on the current stream."""
        return _CudaEvent(torch.cuda.current_stream(self.device))

    def copy_aside(self, source: Tensor, target: Tensor) -> DeviceEvent:
        """Queue the copy on the side stream."""
        # The device, too: at its end the stream's block would set the one that a new thread has, the first, and so take
        # memory for a context there, in each of the processes whose GPU is another.
        with beside_captures(), torch.cuda.device(self.device), torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
            # Or the allocator could give the memory away while the copy runs, if the owner ends meanwhile.
            source.record_stream(self._side)
            return _CudaEvent(self._side)

    def read(self, tensor: Tensor) -> Tensor:
        """Return a copy; waits."""
        return tensor.cpu()

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is being captured."""
        return torch.cuda.is_current_stream_capturing()


def cuda_runtime(device: torch.device) -> CudaRuntime | str:
    """Return the runtime of a device, or why there is none.

    Args:
        device: Of a table's weights.
    """
    if device.type != "cuda":
        return f"there are no kernels for {device.type}"
    try:
        for family in _FAMILIES:
            gpu_module(family, device)
    except KernelsUnavailableError as exc:
        return str(exc)
    return CudaRuntime(device)


def _is_managed(tensor: Tensor) -> bool:
    # FBGEMM says it of its own tensors; it is loaded where there are any. To look for an operator that is not there
    # takes torch 4 µs, for each column at each cut.
    if "fbgemm_gpu" not in sys.modules:
        return False
    is_uvm = getattr(torch.ops.fbgemm, "is_uvm_tensor", None)
    try:
        return is_uvm is not None and bool(is_uvm(tensor))
    except NotImplementedError:  # a build of FBGEMM for the CPU, beside a torch for GPUs: there is no such memory
        return False


def _first_line(exc: BaseException) -> str:
    return str(exc).partition("\n")[0]
