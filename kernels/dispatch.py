"""Which way an operation takes: CPU code, a GPU's kernel, or torch's own operations; and says so, once."""

from __future__ import annotations

import logging
import threading

import torch

from headrace.kernels.binary_cache import BinaryCache
from headrace.kernels.cuda_module import CudaModule, KernelsUnavailableError, Launcher
from headrace.kernels.hip_module import HipModule

__all__ = ["gpu_module", "launcher_for", "runs_eagerly"]

_logger = logging.getLogger(__name__)
_lock = threading.Lock()
# Ways that were said already; and families that cannot be had, so that compiling is not tried at each call.
_said: set[tuple[str, torch.device]] = set()
_missing: dict[tuple[str, torch.device], str] = {}
_modules: dict[tuple[str, torch.device], Launcher] = {}
_modules_lock = threading.Lock()


def gpu_module(family: str, device: torch.device) -> Launcher:
    """Return a family's kernels on a GPU of NVIDIA's or AMD's, compiled and loaded at the first call.

    Args:
        family: One of `cuda_module.FAMILIES`.
        device: A device that torch calls `cuda`, with its index, as a tensor's `device` is.

    Raises:
        KernelsUnavailableError: They cannot be compiled or loaded.
    """
    module = CudaModule if torch.version.hip is None else HipModule
    with _modules_lock:
        if (family, device) not in _modules:
            _modules[family, device] = module(family, device, BinaryCache())
        return _modules[family, device]


def runs_eagerly(*tensors: torch.Tensor) -> bool:
    """Return whether a call is to be done now, and not traced: then it may go past torch's operator.

    An operator that is written in Python takes torch 30 µs on the host, and one with 52 columns 230 µs: several times
    what the launches take, in each step of training.

    Args:
        tensors: What the call is given. A subclass of `Tensor`, such as a tracer's, has to come to the operator.
    """
    # Of this thread; what torch has in Python of it is of the process.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return all(type(tensor) is torch.Tensor for tensor in tensors)


def launcher_for(operation: str, family: str, device: torch.device) -> Launcher | None:
    """Return what launches the kernels of a family, or None where torch's own operations have to do.

    The first call for each operation and device logs the way that it takes: a kernel at INFO, torch's operations on a
    GPU at WARNING, with the reason.

    Args:
        operation: Its name, for the log.
        family: One of `cuda_module.FAMILIES`.
        device: Where the tensors are; not the CPU.
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
        if (operation, device) not in _said:
            _said.add((operation, device))
            if reason is None:
                _logger.info("%s on %s: kernels of %s.cu", operation, device, family)
            else:
                _logger.warning(
                    "%s on %s: torch's own operations, which are slower; no kernels: %s", operation, device, reason
                )
    return launcher
