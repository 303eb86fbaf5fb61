"""When a training step is over, seen from hooks on its optimizers or on the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headrace.streamer.module_hook import ModuleHook

__all__ = ["StepBoundary"]


class StepBoundary:
    """Calls `on_step` once between two training steps.

    With optimizers, the step is over when each has stepped, or when one is about to step again (the others have a
    slower rhythm, or their step was skipped for an infinite gradient). Without, the updates are part of `backward()`
    (fused optimizers), and the step is over when the model's next forward in training mode begins.

    Thread: the training thread's.
    """

    def __init__(
        self,
        on_step: Callable[[], None],
        *,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        sweep: Callable[[], None],
    ) -> None:
        """Register hooks.

        Args:
            on_step: Called at each boundary.
            model: Called once a step; hooked only if there are no optimizers.
            optimizers: Those that step once a training step, unwrapped. Hooks that mark rows after their step must
                be registered before: hooks run in that order.
            sweep: Called before each boundary is judged or told, to mark what no hook saw.
        """
        self._on_step = on_step
        self._sweep = sweep
        self._has_updates = False
        self._stepped: set[int] = set()
        self._handles: list[RemovableHandle] = []
        optimizers = list(optimizers)
        self._num_optimizers = len(optimizers)
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        if not optimizers:
            self._handles.append(model.register_forward_pre_hook(ModuleHook(self._before_forward)))

    def note_update(self) -> None:
        """Say that rows were marked since the last boundary."""
        self._has_updates = True

    def end_step(self) -> bool:
        """Tell the boundary now if there were updates since the last; return whether it was told."""
        self._sweep()
        if self._has_updates:
            self._tell()
            return True
        return False

    def close(self) -> None:
        """Remove the hooks; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) in self._stepped:
            self._sweep()
            self._tell()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped.add(id(optimizer))
        if len(self._stepped) == self._num_optimizers:
            self._sweep()
            self._tell()

    def _before_forward(self, model: nn.Module, *_: Any) -> None:
        if model.training:
            self.end_step()

    def _tell(self) -> None:
        self._has_updates = False
        self._stepped.clear()
        self._on_step()
