"""Hooks that lie next to an optimizer's update, so that nobody else's code runs between them and it."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["StepHooks", "hook_step", "prepend"]

# Pre-hooks of all taps: these write no table, so one may lie behind another.
_own_ids: set[int] = set()


def hook_step(register: Callable[[Any], RemovableHandle], hook: Callable[..., Any]) -> RemovableHandle:
    """Register a hook on an optimizer's step that is not traced where the step is compiled.

    Args:
        register: The optimizer's `register_step_pre_hook` or `register_step_post_hook`.
        hook: Reads what no graph holds: numpy's arrays, the counters of writes.
    """
    return register(torch.compiler.disable(hook))  # type: ignore[no-untyped-call]


def prepend(handle: RemovableHandle) -> None:
    """Have a hook called before those that were registered earlier."""
    _hooks_of(handle).move_to_end(handle.id, last=False)


class StepHooks:
    """Calls `before` right before an optimizer's update, and `after` right after it.

    Others have hooks too, and theirs may write the tables (a clamp, a decay) or take the gradients away (`zero_grad`).
    So `after` is the first of the post-hooks, and `before` the last of the pre-hooks. Where a pre-hook is registered
    later than this, it comes behind `before` for one step, and `after` is told so.

    A closure, which the update begins with, may write the tables as well: `before` is called again when it returns.

    Thread: the training thread's.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, before: Callable[[], None], after: Callable[[bool], None]
    ) -> None:
        """Register the hooks.

        Args:
            optimizer: Unwrapped.
            before: Looks at the tables.
            after: Learns what the update has changed; False says that others may have written since `before`.
        """
        self._before, self._after = before, after
        self._pre = hook_step(optimizer.register_step_pre_hook, self._before_step)
        self._post = hook_step(optimizer.register_step_post_hook, self._after_step)
        prepend(self._post)
        _own_ids.add(self._pre.id)

    def remove(self) -> None:
        """Remove the hooks; idempotent."""
        _own_ids.discard(self._pre.id)
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
        @functools.wraps(closure)
        def watched() -> Any:
            result = closure()
            self._before()
            return result

        return watched

    def _after_step(self, *_: Any) -> None:
        is_next = True
        hooks = _hooks_of(self._pre)
        for hook_id in reversed(hooks):
            if hook_id == self._pre.id:
                break
            if hook_id not in _own_ids:
                is_next = False
                hooks.move_to_end(self._pre.id)
                break
        self._after(is_next)


def _hooks_of(handle: RemovableHandle) -> OrderedDict[int, Any]:
    hooks: OrderedDict[int, Any] | None = handle.hooks_dict_ref()
    assert hooks is not None, "the optimizer is alive: it is stepping, or was just hooked"
    return hooks
