"""Which way an operation takes: CPU code, a CUDA kernel, or torch's own operations; and says so, once."""

from __future__ import annotations

import logging
import threading

import torch

from headrace.kernels.cuda_module import KernelsUnavailableError, Launcher, cuda_module

__all__ = ["launcher_for"]

_logger = logging.getLogger(__name__)
_lock = threading.Lock()
# Ways that were said already; and families that cannot be had, so that compiling is not tried at each call.
_said: set[tuple[str, torch.device]] = set()
_missing: dict[tuple[str, torch.device], str] = {}


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
                launcher = cuda_module(family, device)
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
