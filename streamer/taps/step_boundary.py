"""When a training step is over, seen from hooks on its optimizers or on the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headrace.streamer.taps.module_hook import ModuleHook
from headrace.streamer.taps.step_hooks import hook_step, prepend

__all__ = ["StepBoundary"]

# Backward passes without the end of a step; nobody accumulates over so many.
_MANY_BACKWARDS = 256


class StepBoundary:
    """Calls `on_step` once between two training steps.

    With optimizers, the step is over when each has stepped, or when one is about to step again (the others have a
    slower rhythm, or their step was skipped for an infinite gradient). Without, the updates are part of `backward()`
    (fused optimizers): a forward of the model in training mode, with gradients on, opens a step, and the next one ends
    it.

    The ranks of a run compare their progress by the steps' numbers, so what ends a step must not depend on what a rank
    has to stream: a rank without tables, or one that no row of the batch belongs to, ends each step as the others do.
    Forwards and optimizer steps are the same on all ranks, because these talk to each other within them. An early
    `end_step` (a flush on one rank only) ends the open step and takes no number of its own.

    Thread: the training thread's.
    """

    def __init__(
        self,
        on_step: Callable[[], None],
        *,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        sweep: Callable[[], None],
        is_alone: bool = True,
    ) -> None:
        """Register hooks.

        Args:
            on_step: Called at each boundary.
            model: Called once a step; hooked only if there are no optimizers.
            optimizers: Those that step once a training step, unwrapped. Hooks that mark rows after their step must
                be registered before: hooks run in that order.
            sweep: Called before each boundary is judged or told, to mark what no hook saw.
            is_alone: The run has one rank, so `end_step` may number a step for updates that no forward of the model
                led to. On several ranks those go with the last step, and only `RawEmbeddingStreamer.step` numbers them.
        """
        self._on_step = on_step
        self._sweep = sweep
        self._is_alone = is_alone
        self._has_updates = False
        self._is_step_open = False
        self._stepped: set[int] = set()
        self._last_backward = -1
        self._num_backwards = 0
        self._handles: list[RemovableHandle] = []
        optimizers = list(optimizers)
        self._num_optimizers = len(optimizers)
        for optimizer in optimizers:
            self._handles.append(hook_step(optimizer.register_step_pre_hook, self._before_step))
            prepend(self._handles[-1])  # out of the way of `StepHooks`, which lie next to the update
            self._handles.append(hook_step(optimizer.register_step_post_hook, self._after_step))
        if not optimizers:
            self._handles.append(model.register_forward_pre_hook(ModuleHook(self._before_forward)))

    def note_update(self) -> None:
        """Say that rows were marked since the last boundary; warns when none has come for very long."""
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
        """Tell the boundary now if a step is open or there were updates since the last; return whether it was told."""
        self._sweep()
        self._num_backwards = 0  # what is asked for here is sent without a boundary, too
        if self._is_step_open or (self._has_updates and self._is_alone):
            self.tell()
            return True
        return False

    def tell(self) -> None:
        """Tell the boundary now. REQUIRES: what has changed is marked."""
        self._has_updates = False
        self._is_step_open = False
        self._num_backwards = 0
        self._stepped.clear()
        self._on_step()

    def close(self) -> None:
        """Remove the hooks; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) in self._stepped:
            self._sweep()
            self.tell()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped.add(id(optimizer))
        if len(self._stepped) == self._num_optimizers:
            self._sweep()
            self.tell()

    def _before_forward(self, model: nn.Module, *_: Any) -> None:
        # A forward within a backward (activation checkpointing) is part of a step that has begun.
        if not model.training or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        if self._is_step_open:
            self._sweep()
            self.tell()
        self._is_step_open = True
