"""What of a model is an embedding table and is not streamed: told in the log, where it would else show at a look-up."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from headrace.schemas.near_names import first_of
from headrace.streamer.taps.local_parts import is_dtensor, local_tensor
from headrace.streamer.taps.model_tree import named_modules
from headrace.streamer.taps.nonzero_rows import changed_rows
from headrace.streamer.taps.step_hooks import hook_step

__all__ = ["LeftOut", "bare_parameters", "tell_frozen"]

_log = logging.getLogger(__name__)


# Of fewer rows, or where more of them have a gradient, it may be a dense layer that has idle units or inputs.
_MIN_ROWS = 64
_MIN_ROWS_TO_A_CHANGED_ONE = 8

# Where torch defines the modules that compute nothing themselves: the user's code does, with what they hold.
_PLAIN_MODULES = ("torch.nn.modules.module", "torch.nn.modules.container")


def tell_frozen(names: list[str]) -> None:
    """Say that tables are not streamed because nothing trains them."""
    if names:
        _log.warning(
            "frozen tables (requires_grad is False) are not streamed, so the store gets no rows of them: %s; put them "
            "there with `headrace backfill`, or name the tables to stream with attach(tables=[...])",
            first_of(names),
        )


def bare_parameters(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], table_paths: Collection[str]
) -> dict[str, nn.Parameter]:
    """Return the matrices that optimizers train and that are held by neither a table's module nor a layer of torch.

    Args:
        model: As it was attached.
        optimizers: Unwrapped.
        table_paths: Modules that hold tables; what is in them is left out.
    """
    trained = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    return {name: each for name, each in _user_parameters(model, table_paths) if id(each) in trained}


def _user_parameters(model: nn.Module, table_paths: Collection[str]) -> Iterator[tuple[str, nn.Parameter]]:
    inside = tuple(f"{path}." if path else "" for path in table_paths)
    for found in named_modules(model):
        prefix = f"{found.path}." if found.path else ""
        if prefix.startswith(inside) or _is_layer_of_torch(found.module):
            continue
        for name, parameter in found.module._parameters.items():
            if parameter is None or not parameter.requires_grad:
                continue
            if not isinstance(parameter, UninitializedParameter) and parameter.ndim == 2:  # that has no shape yet
                yield prefix + name, parameter


def _is_layer_of_torch(module: nn.Module) -> bool:
    origins = [base.__module__ for base in type(module).__mro__]
    return any(origin.startswith("torch.nn.modules.") and origin not in _PLAIN_MODULES for origin in origins)


class LeftOut:
    """Tells once of a parameter that is trained as an embedding table is, and is none that can be tapped.

    Such as an `nn.Parameter` that `F.embedding` or an index looks up. Only its gradient shows that: it is sparse, or
    few rows of it, here and there, are not zero. A gradient of a layer is of all its rows; one of positions that are
    cut off a longer list is of rows that follow one another. Each parameter is judged by its first gradient that is not
    all zero, so a table of which one batch uses many rows is not told.

    Thread: the training thread's.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Look at the steps of optimizers until each parameter is judged.

        Args:
            parameters: By name; see `bare_parameters`.
            optimizers: Unwrapped. What else hooks them must be hooked before.
        """
        self._waiting = {name: each for name, each in parameters.items() if each.shape[0] >= _MIN_ROWS}
        # Post-hooks: a pre-hook behind those of `StepHooks` would pass for one that may write tables.
        self._handles: list[RemovableHandle] = (
            [hook_step(optimizer.register_step_post_hook, self._after_step) for optimizer in optimizers]
            if self._waiting
            else []
        )

    def close(self) -> None:
        """Remove the hooks; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _after_step(self, *_: object) -> None:
        # The hook stays when all are judged: to remove it from within would break the optimizer's loop over its hooks.
        for name, parameter in list(self._waiting.items()):
            gradient = parameter.grad
            if gradient is None or (gradient.is_cuda and torch.cuda.is_current_stream_capturing()):
                continue  # a captured step runs later, and a look at it would fail the capture
            num_changed = _num_scattered_rows(gradient, parameter)
            if num_changed is None:
                continue
            del self._waiting[name]
            if num_changed:
                _log.warning(
                    "parameter %r is trained by rows, as an embedding table is (%d of %d in this step), and is not "
                    "streamed: only those are that an nn.Embedding, an nn.EmbeddingBag or a sharded TorchRec module "
                    "holds; make it the weight of an nn.Embedding, or if it is no table, name those to stream with "
                    "attach(tables=[...])",
                    name,
                    num_changed,
                    local_tensor(parameter).shape[0],
                )


def _num_scattered_rows(gradient: torch.Tensor, parameter: nn.Parameter) -> int | None:
    """Return how many rows have a gradient if they are a table's, 0 if they are a layer's; None if there are none.

    Args:
        gradient: Of the parameter; of a DTensor, the rank's own part is judged, so that no rank waits for another.
        parameter: `[rows, columns]`.
    """
    if is_dtensor(gradient):
        if not is_dtensor(parameter) or gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            return 0
        gradient = local_tensor(gradient)
    if gradient.is_sparse:
        return torch.unique(gradient._indices()[0]).numel() or None
    if gradient.layout is not torch.strided:
        return 0
    row_ids = changed_rows(gradient, parameter, waits=True)
    num_changed = row_ids.numel()
    if not num_changed:
        return None
    is_one_run = int(row_ids[-1]) - int(row_ids[0]) + 1 == num_changed
    return 0 if is_one_run or num_changed * _MIN_ROWS_TO_A_CHANGED_ONE > gradient.shape[0] else num_changed
