"""Find the tables that a model has got since it was attached, and that are trained."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from headrace.kernels.module_walk import named_modules
from headrace.streamer.taps.fbgemm import is_table_batched, table_parts
from headrace.streamer.taps.model_tree import Selection
from headrace.streamer.taps.torchrec import is_sharded

__all__ = ["NewTables"]


class NewTables:
    """Compares the modules of a model with those that it had at first."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], selection: Selection) -> None:
        """Note the modules of a model, whose tables these optimizers train."""
        self._model, self._optimizers, self._selection = model, optimizers, selection
        self._seen = weakref.WeakSet[nn.Module](each.module for each in named_modules(model))

    def find(self, streamed: Collection[int]) -> Iterator[str]:
        """Yield the names of selected tables in modules that were added, or the paths of sharded modules.

        `streamed` are the ids of parameters that are streamed, which a new module may share.
        """
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        trained = {id(parameter) for group in groups for parameter in group["params"]} - set(streamed)
        for found in named_modules(self._model):
            if found.module not in self._seen:
                yield from filter(self._selection.selects, _trained_tables(found.path, found.module, trained))


def _trained_tables(path: str, module: nn.Module, trained: Collection[int]) -> Iterator[str]:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        weight = module._parameters.get("weight")
        if weight is not None and weight.requires_grad and id(weight) in trained:
            yield f"{path}.weight" if path else "weight"
    elif is_table_batched(module):
        yield from (part.fqn for part in table_parts(path, module))
    elif is_sharded(module):
        yield path
