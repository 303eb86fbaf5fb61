"""Run Headrace's own tensor code as if the program around it had set no mode, default device or autocast.

A tensor that is made in `torch.inference_mode()` can never be updated outside of it, and one that is made under another
default device is on that device. Callers enter a training loop's thread in whatever mode it has: public methods and
hooks therefore run in a plain context. Their allocations name device and dtype all the same, which a test holds: a
default dtype and `torch.set_default_tensor_type` are the process's, not a mode's. The user's code that they call, such
as a model, a source or a hook, runs in `users_context`, in the modes that it would have without Headrace.

Source: `torch/overrides.py` (function modes, of which `torch.set_default_device` is one),
`torch/autograd/grad_mode.py` (inference mode), torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch

from headrace.schemas.errors import ConfigError, HeadraceError

__all__ = ["check_has_values", "in_plain_context", "plain_context", "users_context", "without_autocast"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_AUTOCAST_DEVICES = ("cpu", "cuda")
_FAKE: Any = torch._C._TorchDispatchModeKey.FAKE

_Contexts = tuple[Callable[[], contextlib.AbstractContextManager[Any]], ...]


class _Left(threading.local):
    """What a thread's plain contexts have left, in the order in which to enter it again."""

    contexts: _Contexts = ()


_left = _Left()


@contextlib.contextmanager
def plain_context() -> Iterator[None]:
    """Leave inference mode (with gradients off), function modes (a default device is one) and autocast."""
    left = list(_left.contexts)
    with contextlib.ExitStack() as stack:
        if torch._C._len_torch_function_stack():
            stack.enter_context(torch._C.DisableTorchFunction())
            left.append(torch._C._EnableTorchFunction)
        for device in filter(torch.is_autocast_enabled, _AUTOCAST_DEVICES):
            dtype, caches = torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
            left.append(partial(torch.autocast, device, dtype=dtype, cache_enabled=caches))
        stack.enter_context(without_autocast())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())  # leaving inference mode has turned gradients on
            left.append(torch.inference_mode)
        stack.enter_context(_leaving(tuple(left)))
        yield


@contextlib.contextmanager
def users_context() -> Iterator[None]:
    """Enter again what the thread's `plain_context` has left; nothing outside of one."""
    with contextlib.ExitStack() as stack:
        for context in _left.contexts:
            stack.enter_context(context())
        stack.enter_context(_leaving(()))
        yield


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Leave autocast."""
    with contextlib.ExitStack() as stack:
        for device in filter(torch.is_autocast_enabled, _AUTOCAST_DEVICES):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def in_plain_context(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have a function, method or hook run in a `plain_context`; where the context is plain, it costs a microsecond.

    Of errors of ours the traceback ends here: the caller's lines say where, and the message says what.
    """

    @functools.wraps(function)
    def in_context(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            if not _is_altered():
                return function(*args, **kwargs)
            with plain_context():
                return function(*args, **kwargs)
        except HeadraceError as exc:
            raise exc.with_traceback(None)  # noqa: B904 - its cause stays

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


@contextlib.contextmanager
def _leaving(contexts: _Contexts) -> Iterator[None]:
    before, _left.contexts = _left.contexts, contexts
    try:
        yield
    finally:
        _left.contexts = before


def _is_altered() -> bool:
    return (
        torch.is_inference_mode_enabled()
        or torch._C._len_torch_function_stack() > 0
        or any(map(torch.is_autocast_enabled, _AUTOCAST_DEVICES))
    )
