"""Detect steps by an optimizer that trains a table but was not attached for it.

Such an optimizer is typically created for another phase or when a run resumes, so it may not exist at `attach`. Hence
all optimizers of the process are observed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from headrace.streamer.taps.hooks import hook_step, is_stepping

if TYPE_CHECKING:
    from headrace.streamer.taps.torch_optim import TrackedParameter

__all__ = ["UnattachedSteps"]


class UnattachedSteps:
    """Reports tables that another optimizer than the attached one has trained.

    Each step costs one integer comparison per table. A wrapper around the attached optimizer is not reported, although
    it may write the table too: the attached optimizer steps within the wrapper's step. Nor is one inside of an attached
    wrapper.
    """

    def __init__(
        self,
        tables: Sequence[TrackedParameter],
        *,
        sweep: Callable[[TrackedParameter], None],
        on_step: Callable[[list[TrackedParameter], str], None],
    ) -> None:
        """Observe all optimizer steps until `close`, or until this object is garbage.

        Args:
            tables: The tables of one tap.
            sweep: Marks all writes to a table so far.
            on_step: Called with the tables that an unattached optimizer has just written, and its type's name.
        """
        self._tables, self._sweep, self._on_step = tables, sweep, on_step
        self._num_attached_steps = 0
        # `_num_attached_steps` when a step began, by optimizer: a wrapper and the optimizer inside it step at once.
        self._began: dict[int, int] = {}
        key = id(self)
        _watchers[key] = weakref.ref(self, lambda _: _watchers.pop(key, None))
        if not _hooks:
            # Never removed: removing a hook while another thread's optimizer steps would break that step.
            _hooks.append(hook_step(register_optimizer_step_pre_hook, _before_step))
            _hooks.append(hook_step(register_optimizer_step_post_hook, _after_step))

    def note_attached_step(self) -> None:
        """Record that an attached optimizer has stepped."""
        self._num_attached_steps += 1

    def close(self) -> None:
        """Stop observing. Idempotent."""
        _watchers.pop(id(self), None)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        for table in self._written_unattached(optimizer):
            self._sweep(table)  # later writes are then this step's
        self._began[id(optimizer)] = self._num_attached_steps

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._began.pop(id(optimizer), None) != self._num_attached_steps:
            return
        written = [table for table in self._written_unattached(optimizer) if not is_stepping(table.optimizer)]
        if written:
            self._on_step(written, type(optimizer).__name__)

    def _written_unattached(self, optimizer: torch.optim.Optimizer) -> list[TrackedParameter]:
        """Return the tables that `optimizer` holds, is not attached for, and that were written since the last sweep."""
        others = [table for table in self._tables if table.optimizer is not optimizer]
        if not others:
            return []
        # Look at no other table: `optimizer` may run on another thread while those tables are in a step or a flush.
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [table for table in others if id(table.parameter) in trained and table.is_written()]


# Copy the values with list(): it allocates before it iterates, so no other thread and no garbage collection (which runs
# the weak references' callbacks) changes the dict meanwhile. tuple() allocates in between, and then fails.
_watchers: dict[int, weakref.ref[UnattachedSteps]] = {}
_hooks: list[Any] = []


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for watcher in list(_watchers.values()):
        if (steps := watcher()) is not None:
            steps._before_step(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for watcher in list(_watchers.values()):
        if (steps := watcher()) is not None:
            steps._after_step(optimizer)
