"""Warn about embedding tables of a model that are not streamed; otherwise a failed lookup is the first sign."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from headrace.kernels.module_walk import named_modules
from headrace.paramserver.system.text import first_of
from headrace.streamer.taps.hooks import hook_step
from headrace.streamer.taps.local_parts import is_dtensor, local_tensor
from headrace.streamer.taps.optimizer_rules import changed_rows

__all__ = ["UntappedTables", "bare_parameters", "warn_frozen"]

_log = logging.getLogger(__name__)

# With fewer rows, or a larger share of them with a gradient, it may be a dense layer with idle units or inputs.
_MIN_ROWS = 64
_MIN_ROWS_PER_CHANGED_ROW = 8

# Modules of torch that compute nothing: the user's code computes with their parameters.
_PLAIN_MODULES = ("torch.nn.modules.module", "torch.nn.modules.container")


def warn_frozen(names: list[str]) -> None:
    """Warn that tables are not streamed because nothing trains them."""
    if names:
        _log.warning(
            "frozen tables (requires_grad is False) are not streamed, so the store gets none of their rows: %s; write "
            "them with `headrace backfill`, or name the tables to stream with attach(tables=[...])",
            first_of(names),
        )


def bare_parameters(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], table_paths: Collection[str]
) -> dict[str, nn.Parameter]:
    """Return, by name, the trained matrices of a model that are in no module of `table_paths` and no layer of torch."""
    trained = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    return {name: each for name, each in _user_parameters(model, table_paths) if id(each) in trained}


def _user_parameters(model: nn.Module, table_paths: Collection[str]) -> Iterator[tuple[str, nn.Parameter]]:
    tapped = tuple(f"{path}." if path else "" for path in table_paths)
    for found in named_modules(model):
        prefix = f"{found.path}." if found.path else ""
        if prefix.startswith(tapped) or _is_layer_of_torch(found.module):
            continue
        for name, parameter in found.module._parameters.items():
            if parameter is None or not parameter.requires_grad:
                continue
            # An uninitialized parameter has no shape yet.
            if not isinstance(parameter, UninitializedParameter) and parameter.ndim == 2:
                yield prefix + name, parameter


def _is_layer_of_torch(module: nn.Module) -> bool:
    origins = [base.__module__ for base in type(module).__mro__]
    return any(origin.startswith("torch.nn.modules.") and origin not in _PLAIN_MODULES for origin in origins)


class UntappedTables:
    """Warns once about each parameter that trains like an embedding table but cannot be tapped.

    An example is an `nn.Parameter` that `F.embedding` or an index looks up. Only its gradient gives it away: it is
    sparse, or a few scattered rows of it are nonzero. A layer's gradient covers all rows; that of positions cut off a
    longer list covers consecutive rows. The first nonzero gradient decides, so a table of which one batch uses many
    rows is missed.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Observe steps until each of the `bare_parameters` is classified. REQUIRES: all other hooks are set."""
        self._unclassified = {name: each for name, each in parameters.items() if each.shape[0] >= _MIN_ROWS}
        self.found: dict[str, str] = {}  # those that train by rows, and why they are not streamed
        # Post-hooks, because `StepHooks` takes a pre-hook after its own for one that may write tables.
        self._handles: list[RemovableHandle] = (
            [hook_step(optimizer.register_step_post_hook, self._after_step) for optimizer in optimizers]
            if self._unclassified
            else []
        )

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _after_step(self, *_: object) -> None:
        # The hook stays when nothing is left to do: removing it here would break the optimizer's loop over its hooks.
        for name, parameter in list(self._unclassified.items()):
            gradient = parameter.grad
            if gradient is None or (gradient.is_cuda and torch.cuda.is_current_stream_capturing()):
                continue  # a captured step runs later, and reading the gradient now would fail the capture
            num_changed = _num_scattered_rows(gradient, parameter)
            if num_changed is None:
                continue
            del self._unclassified[name]
            if num_changed:
                self.found[name] = "it is no embedding module's weight and trains by rows, like a table"
                _log.warning(
                    "parameter %r trains by rows, like an embedding table (%d of %d in this step), and is not "
                    "streamed: only the weights of nn.Embedding, nn.EmbeddingBag and sharded TorchRec modules are; "
                    "make it the weight of an nn.Embedding, or if it is no table, name those to stream with "
                    "attach(tables=[...])",
                    name,
                    num_changed,
                    local_tensor(parameter).shape[0],
                )


def _num_scattered_rows(gradient: torch.Tensor, parameter: nn.Parameter) -> int | None:
    """Return how many rows have a gradient if it looks like a table's, 0 if like a layer's, None if it is all zero.

    Of a DTensor only the local part counts, so that no rank waits for another.
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
    return 0 if is_one_run or num_changed * _MIN_ROWS_PER_CHANGED_ROW > gradient.shape[0] else num_changed
