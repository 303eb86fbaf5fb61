"""Run Headrace's own tensor code as if the program around it had set no mode, default device or autocast.

A tensor that is made in `torch.inference_mode()` can never be updated outside of it, and one that is made under another
default device is on that device. Callers enter a training loop's thread in whatever mode it has: public methods and
hooks therefore run in a plain context. Their allocations name device and dtype all the same, which a test holds: a
default dtype and `torch.set_default_tensor_type` are the process's, not a mode's.

Source: `torch/overrides.py` (function modes, of which `torch.set_default_device` is one),
`torch/autograd/grad_mode.py` (inference mode), torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from headrace.schemas.errors import ConfigError

__all__ = ["check_has_values", "in_plain_context", "plain_context"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_AUTOCAST_DEVICES = ("cpu", "cuda")
_FAKE: Any = torch._C._TorchDispatchModeKey.FAKE


@contextlib.contextmanager
def plain_context() -> Iterator[None]:
    """Leave inference mode (with gradients off), function modes (a default device is one) and autocast."""
    with contextlib.ExitStack() as stack:
        if torch._C._len_torch_function_stack():
            stack.enter_context(torch._C.DisableTorchFunction())
        for device in _AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())  # leaving inference mode has turned gradients on
        yield


def in_plain_context(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have a function, method or hook run in a `plain_context`; where the context is plain, it costs a microsecond."""

    @functools.wraps(function)
    def in_context(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not _is_altered():
            return function(*args, **kwargs)
        with plain_context():
            return function(*args, **kwargs)

    return in_context


def check_has_values() -> None:
    """Refuse a `FakeTensorMode` and the transforms of `torch.func`, in which new tensors have no values of their own.

    Raises:
        ConfigError: One is on.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise ConfigError("a transform of torch.func runs, which wraps each tensor: call this outside of it")
    if torch._C._len_torch_dispatch_stack() and torch._C._get_dispatch_mode(_FAKE) is not None:
        raise ConfigError("a FakeTensorMode is on, in which tensors have no values: call this outside of it")


def _is_altered() -> bool:
    return (
        torch.is_inference_mode_enabled()
        or torch._C._len_torch_function_stack() > 0
        or any(map(torch.is_autocast_enabled, _AUTOCAST_DEVICES))
    )
