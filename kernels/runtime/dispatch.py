"""The choice of how an operation runs: CPU code, a GPU's kernels, or torch's own operations. The log says it once."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from headrace.kernels.runtime import cuda_module, hip_module
from headrace.kernels.runtime.cuda_module import BinaryCache, CudaModule, KernelsUnavailableError, Launcher
from headrace.kernels.runtime.hip_module import HipModule

__all__ = ["beside_captures", "check_vector", "gpu_module", "implementation_of", "launcher_for", "runs_eagerly"]

_logger = logging.getLogger(__name__)
# CU_STREAM_CAPTURE_MODE_RELAXED; HIP uses the same number.
_RELAXED = 2
_lock = threading.Lock()
# What was logged already, and families that are unavailable, so that compiling is not tried at each call.
_logged: set[tuple[str, torch.device]] = set()
_missing: dict[tuple[str, torch.device], str] = {}
_modules: dict[tuple[str, torch.device], Launcher] = {}
_modules_lock = threading.Lock()


def gpu_module(family: str, device: torch.device) -> Launcher:
    """Return a family's kernels for an NVIDIA or AMD GPU; the first call compiles and loads them.

    Args:
        family: One of `cuda_module.FAMILIES`.
        device: A device that torch calls `cuda`, with its index.

    Raises:
        KernelsUnavailableError: They cannot be compiled or loaded.
    """
    module = CudaModule if torch.version.hip is None else HipModule
    with _modules_lock:
        if (family, device) not in _modules:
            _modules[family, device] = module(family, device, BinaryCache())
        return _modules[family, device]


def runs_eagerly(*tensors: torch.Tensor) -> bool:
    """Return whether a call with these tensors is not traced, so that it may bypass torch's operator.

    An operator written in Python takes torch 30 µs on the host, and one with 52 columns 230 µs: several times what the
    launches take, in each training step. Subclasses of `Tensor`, such as a tracer's, must reach the operator.
    """
    # The dispatch stack in C++ is this thread's; torch's Python wrappers of it are the process's.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return all(type(tensor) is torch.Tensor for tensor in tensors)


def check_vector(name: str, tensor: torch.Tensor, dtype: torch.dtype, length: int | None = None) -> None:
    """Raise ValueError unless a tensor is contiguous `dtype[length]`, of any length for None."""
    is_vector = tensor.dtype == dtype and tensor.dim() == 1 and tensor.is_contiguous()
    if not is_vector or (length is not None and tensor.numel() != length):
        needed = f"contiguous {str(dtype).removeprefix('torch.')}[{'n' if length is None else length}]"
        raise ValueError(f"{name} is {tensor.dtype}{list(tensor.shape)}: {needed} is needed")


def implementation_of(
    operation: str,
    family: str,
    device: torch.device,
    on_cpu: Callable[..., Any],
    launch: Callable[..., Any],
    reference: Callable[..., Any],
) -> Callable[..., Any]:
    """Return `on_cpu` for the CPU; else `launch` with a family's launcher as its first argument, or `reference`.

    The reference runs where `launcher_for`, with the other arguments, has no launcher.
    """
    if device.type == "cpu":
        return on_cpu
    launcher = launcher_for(operation, family, device)
    return reference if launcher is None else functools.partial(launch, launcher)


def launcher_for(operation: str, family: str, device: torch.device) -> Launcher | None:
    """Return the launcher of a family's kernels, or None if torch's own operations must do.

    The first call for each operation and device logs the choice: kernels at INFO, torch's operations at WARNING with
    the reason.

    The device is the tensors' one, not the CPU.
    """
    with _lock:
        reason = _missing.get((family, device))
        launcher: Launcher | None = None
        if reason is None:
            try:
                if device.type != "cuda":
                    raise KernelsUnavailableError(f"there are none for {device.type}")
                launcher = gpu_module(family, device)
            except KernelsUnavailableError as exc:
                reason = _missing[family, device] = str(exc)
        if (operation, device) not in _logged:
            _logged.add((operation, device))
            if reason is None:
                _logger.info("%s on %s: kernels of %s.cu", operation, device, family)
            else:
                _logger.warning(
                    "%s on %s: torch's own operations, which are slower; no kernels: %s", operation, device, reason
                )
    return launcher


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread wait for a GPU, and copy from it, while another thread captures a CUDA graph.

    torch captures in the mode "global": a wait or a query on any thread of the process is then an error, which also
    ends the capture, even if it has nothing to do with the captured work. Here the thread declares that it stays apart.

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
