"""Hooks on modules and optimizers, and `StepBoundary`, which derives from them when a training step is over."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headrace.kernels.plain_context import in_plain_context

__all__ = [
    "ModuleHook",
    "Override",
    "StepBoundary",
    "StepHooks",
    "hook_step",
    "hook_sync",
    "is_stepping",
    "prepend",
]

# Backward passes without the end of a step; nobody accumulates over so many.
_MANY_BACKWARDS = 256


class ModuleHook:
    """Calls a function as a module's hook, and does nothing in a deep copy or pickle of the module.

    A module copies its hooks with its `__dict__`. With a plain function as the hook, a copied model (averaged weights,
    a snapshot for evaluation) would mark rows of the tap's tables, and pickling it would pickle the whole streamer.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Wrap a hook function; a compiled module calls it outside of its graphs, so it is not traced."""
        self._function = torch.compiler.disable(in_plain_context(function))  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, in a plain context."""
        return self._function(*args, **kwargs)

    @property
    def __name__(self) -> str:
        """Explain why `torch.jit.script`, which asks each hook for its name, cannot script the module."""
        raise AttributeError(
            "a streamed module, or a copy of one, has hooks that torch.jit.script cannot compile: script the model "
            "before attach() or after the streamer's close()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return ModuleHook(_do_nothing)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[Callable[..., None]]]:
        return ModuleHook, (_do_nothing,)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


# Pre-hooks of all taps. They write no table, so one may run between another one and its update.
_tap_hook_ids: set[int] = set()


def hook_step(register: Callable[[Any], RemovableHandle], hook: Callable[..., Any]) -> RemovableHandle:
    """Register a step hook, in a plain context, and untraced: it may read numpy arrays and version counters."""
    return register(torch.compiler.disable(in_plain_context(hook)))  # type: ignore[no-untyped-call]


# What torch puts around `step` to call its hooks.
_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


def is_stepping(optimizer: torch.optim.Optimizer, *, least: int = 1) -> bool:
    """Return whether at least so many steps of an optimizer, one inside the other, run on this thread.

    It looks at the stack: a count would be wrong after a step that raised.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and least > 0:
        if frame.f_code is _HOOKED_STEP and frame.f_locals["self"] is optimizer:
            least -= 1
        frame = frame.f_back
    return least == 0


def _of_outer_steps(optimizer: torch.optim.Optimizer, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return the hook, without its calls for the inner step of a derived class that calls `super().step()`."""
    steps = [kind.__dict__["step"] for kind in type(optimizer).__mro__ if "step" in kind.__dict__]
    if len({inspect.unwrap(step) for step in steps}) <= 2:  # its own, and that of `Optimizer`
        return hook

    def hook_of_outer(*args: Any) -> Any:
        return None if is_stepping(optimizer, least=2) else hook(*args)

    return hook_of_outer


def prepend(handle: RemovableHandle) -> None:
    """Move a hook before those that were registered earlier."""
    _hooks_of(handle).move_to_end(handle.id, last=False)


class StepHooks:
    """Calls `before` immediately before an optimizer's update, and `after` immediately after it.

    Other hooks may write the tables (a clamp, a decay) or take the gradients away (`zero_grad`). So `after` is the
    first post-hook and `before` the last pre-hook. A pre-hook registered later runs after `before` for one step, in
    which `after` gets False; then `before` is last again.

    The update first runs the closure, which may write the tables too: `before` is called again when it returns.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, before: Callable[[], None], after: Callable[[bool], None]
    ) -> None:
        """Register the hooks; `after` gets False if others may have written since `before`."""
        self._before, self._after = before, after
        before_step, after_step = (_of_outer_steps(optimizer, hook) for hook in (self._before_step, self._after_step))
        self._pre = hook_step(optimizer.register_step_pre_hook, before_step)
        self._post = hook_step(optimizer.register_step_post_hook, after_step)
        prepend(self._post)
        _tap_hook_ids.add(self._pre.id)

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        _tap_hook_ids.discard(self._pre.id)
        self._pre.remove()
        self._post.remove()

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._before()
        if len(args) > 1 and args[1] is not None:
            return (args[0], self._watched(args[1]), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._watched(kwargs["closure"])}
        return None

    def _watched(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        before = in_plain_context(self._before)

        @functools.wraps(closure)
        def watched() -> Any:
            result = closure()
            before()
            return result

        return watched

    def _after_step(self, *_: Any) -> None:
        is_last = True
        hooks = _hooks_of(self._pre)
        for hook_id in reversed(hooks):
            if hook_id == self._pre.id:
                break
            if hook_id not in _tap_hook_ids:
                is_last = False
                hooks.move_to_end(self._pre.id)
                break
        self._after(is_last)


def _hooks_of(handle: RemovableHandle) -> OrderedDict[int, Any]:
    hooks: OrderedDict[int, Any] | None = handle.hooks_dict_ref()
    assert hooks is not None, "the optimizer is alive: it is stepping, or was just hooked"
    return hooks


class Override:
    """Stands in for a module's method; a deep copy or pickle of the module has its own method again."""

    def __init__(self, module: Any, name: str, function: Callable[..., Any]) -> None:
        """Have `function` called with the method and its arguments; it is not traced."""
        self._module, self._name = module, name
        self._own = vars(module).get(name)  # what others have put in the method's place
        self._method = getattr(module, name)
        self._function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(self._method, *args, **kwargs)

    def remove(self) -> None:
        """Give the module its method back. Idempotent."""
        if vars(self._module).get(self._name) is self:
            delattr(self._module, self._name)
            if self._own is not None:
                setattr(self._module, self._name, self._own)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        return types.MethodType(getattr(type(self._module), self._name), memo[id(self._module)])

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, self._name)


def hook_sync(model: Any, after: Callable[[], None]) -> Override:
    """Have `after` called when a `sync` of a `DMPCollection` has written the tables, also in part, on its thread."""

    def synced(sync: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return sync(*args, **kwargs)
        finally:
            in_plain_context(after)()

    return Override(model, "sync", synced)


class StepBoundary:
    """Calls `on_step` once between two training steps.

    With optimizers, the step is over when each has stepped, or when one is about to step again (the others step less
    often, or skipped a step for an infinite gradient). Without optimizers, the updates are part of `backward()` (fused
    optimizers): a forward of the model in training mode, with gradients on, opens a step, and the next one ends it.

    Ranks compare their progress by step numbers, so the end of a step must not depend on what a rank streams. Forwards
    and optimizer steps are the same on all ranks, because these communicate within them. An early `end_step` (a flush
    on one rank only) ends the open step and takes no number of its own.
    """

    def __init__(
        self,
        on_step: Callable[[], None],
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        sweep: Callable[[], None],
        is_alone: bool = True,
    ) -> None:
        """Register hooks. REQUIRES: the hooks that mark rows after a step are registered, because hooks run in order.

        `sweep` is called before each boundary, to mark what no hook has seen. If the run has one rank (`is_alone`),
        `end_step` may number a step for updates without a forward of the model. On several ranks those join the last
        step, and only `RawEmbeddingStreamer.step` numbers them.
        """
        self._on_step = on_step
        self._model = model
        self._sweeps = [sweep]
        self._is_alone = is_alone
        self._has_updates = False
        self._is_step_open = False
        self._stepped: set[int] = set()
        self._last_backward = -1
        self._num_backwards = 0
        self._handles: list[RemovableHandle] = []
        self._optimizers = list(optimizers)
        self._is_closed = False
        self._hook()

    def join(self, optimizers: Iterable[torch.optim.Optimizer], *, sweep: Callable[[], None]) -> Callable[[], None]:
        """Have the steps of more optimizers count too, and call another `sweep`; return what undoes it, idempotent.

        REQUIRES: as for the constructor, for the hooks that mark rows after a step of these.
        """
        known = set(map(id, self._optimizers))
        added = [optimizer for optimizer in optimizers if id(optimizer) not in known]
        self._optimizers += added
        self._sweeps.append(sweep)
        self._hook()

        def leave() -> None:
            if sweep in self._sweeps:
                self._sweeps.remove(sweep)
                self._optimizers = [each for each in self._optimizers if not any(each is other for other in added)]
                self._hook()

        return leave

    def _hook(self) -> None:
        """Set the hooks anew: the last of all."""
        self._unhook()
        if self._is_closed:
            return
        for optimizer in self._optimizers:
            before_step, after_step = (
                _of_outer_steps(optimizer, hook) for hook in (self._before_step, self._after_step)
            )
            self._handles.append(hook_step(optimizer.register_step_pre_hook, before_step))
            prepend(self._handles[-1])  # `StepHooks` must stay next to the update
            self._handles.append(hook_step(optimizer.register_step_post_hook, after_step))
        if not self._optimizers:
            self._handles.append(self._model.register_forward_pre_hook(ModuleHook(self._before_forward)))

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _sweep(self) -> None:
        for sweep in self._sweeps:
            sweep()

    def note_update(self) -> None:
        """Record that rows were marked since the last boundary; warn when very many backwards saw no boundary."""
        self._has_updates = True
        backward = torch._C._current_graph_task_id()
        if backward in (-1, self._last_backward):
            return
        self._last_backward = backward
        self._num_backwards += 1
        if self._num_backwards == _MANY_BACKWARDS:
            warnings.warn(
                f"{_MANY_BACKWARDS} backward passes have changed tables and no step has ended, so their rows were not "
                "sent: call the attached model itself and not a part of it, give attach() the optimizer that the "
                "training loop steps, or call streamer.step()",
                RuntimeWarning,
                stacklevel=2,
            )

    def end_step(self) -> bool:
        """End the step if one is open or there were updates since the last; return whether `on_step` was called."""
        self._sweep()
        self._num_backwards = 0  # the caller sends the rows even without a boundary
        if self._is_step_open or (self._has_updates and self._is_alone):
            self.finish()
            return True
        return False

    def finish(self) -> None:
        """End the step now. REQUIRES: all changes are marked."""
        self._has_updates = False
        self._is_step_open = False
        self._num_backwards = 0
        self._stepped.clear()
        self._on_step()

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        self._is_closed = True
        self._unhook()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) in self._stepped:
            self._sweep()
            self.finish()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self._sweep()
            self.finish()

    def _before_forward(self, model: nn.Module, *_: Any) -> None:
        # A forward within a backward (activation checkpointing) belongs to a step that is open already.
        if not model.training or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        if self._is_step_open:
            self._sweep()
            self.finish()
        self._is_step_open = True
