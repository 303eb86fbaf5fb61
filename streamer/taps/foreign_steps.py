"""Steps of optimizers that are not a table's own, as of one that was made anew for another phase or at a resume.

Every optimizer of the process is looked at: who trains a table now need not have been there at `attach`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from headrace.streamer.taps.step_hooks import hook_step

__all__ = ["ForeignSteps", "Stepped"]


class Stepped(Protocol):
    """A table that one optimizer is to train."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """That one, unwrapped."""

    @property
    def parameter(self) -> torch.nn.Parameter:
        """What it trains."""

    def is_written(self) -> bool:
        """Return whether somebody has written to the parameter since the last sweep."""


_Table = TypeVar("_Table", bound=Stepped)


class ForeignSteps(Generic[_Table]):
    """Notices tables that another optimizer trains than their own. A step costs a look at one number a table.

    A wrapper around a table's own optimizer is none, though it may write the table too: within its step that one steps.

    Thread: the training thread's.
    """

    def __init__(
        self, tables: Sequence[_Table], *, sweep: Callable[[_Table], None], tell: Callable[[list[_Table], str], None]
    ) -> None:
        """Begin to look at all steps, until `close` or until nobody refers to this any more.

        Args:
            tables: All that are followed.
            sweep: Marks what was written to one.
            tell: Gets the tables that a step of another optimizer has just written, and the name of its type.
        """
        self._tables, self._sweep, self._tell = tables, sweep, tell
        self._num_own_steps = 0
        # Their number when a step began, by optimizer: wrappers and what they wrap are in their steps together.
        self._began: dict[int, int] = {}
        key = id(self)
        _watchers[key] = weakref.ref(self, lambda _: _watchers.pop(key, None))
        if not _hooks:
            # They stay: to remove one while another thread's optimizer steps would break that step.
            _hooks.append(hook_step(register_optimizer_step_pre_hook, _before_step))
            _hooks.append(hook_step(register_optimizer_step_post_hook, _after_step))

    def note_own_step(self) -> None:
        """Learn that an optimizer has stepped whose tables it knows of."""
        self._num_own_steps += 1

    def close(self) -> None:
        """Look no more; idempotent."""
        _watchers.pop(id(self), None)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        for table in self._written_beside(optimizer):
            self._sweep(table)  # what is written after this, the step writes
        self._began[id(optimizer)] = self._num_own_steps

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._began.pop(id(optimizer), None) != self._num_own_steps:
            return
        if written := self._written_beside(optimizer):
            self._tell(written, type(optimizer).__name__)

    def _written_beside(self, optimizer: torch.optim.Optimizer) -> list[_Table]:
        """Return the tables of others that an optimizer trains too, and that were written since the last sweep."""
        others = [table for table in self._tables if table.optimizer is not optimizer]
        if not others:
            return []
        # No look at the rest: the optimizer may be another thread's, while these tables are amid a step or a flush.
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [table for table in others if id(table.parameter) in trained and table.is_written()]


# A copy of the values is one atomic operation: others may come and go in other threads.
_watchers: dict[int, weakref.ref[ForeignSteps[Any]]] = {}
_hooks: list[Any] = []


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for watcher in tuple(_watchers.values()):
        if (steps := watcher()) is not None:
            steps._before_step(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for watcher in tuple(_watchers.values()):
        if (steps := watcher()) is not None:
            steps._after_step(optimizer)
