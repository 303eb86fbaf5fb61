"""The modules of a model and the optimizers of a trainer, looked at through the wrappers around them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headrace.schemas.errors import ConfigError

__all__ = ["Found", "inner_optimizers", "is_a", "named_modules"]

# Attribute under which a wrapper holds the module that the user wrote; wrapper's class by name, so that nothing is
# imported that the model does not use.
_WRAPPERS = {
    "DistributedModelParallel": "_dmp_wrapped_module",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}

# The same of wrappers around one optimizer that write no table themselves: TorchRec's, Lightning's, Accelerate's.
_OPTIMIZER_WRAPPERS = {
    "KeyedOptimizerWrapper": "_optimizer",
    "OptimizerWrapper": "_optimizer",
    "LightningOptimizer": "_optimizer",
    "AcceleratedOptimizer": "optimizer",
}


def is_a(thing: object, class_name: str) -> bool:
    """Return whether `thing` is of a class, or of one derived from a class, with this bare name."""
    return class_name in _class_names(type(thing).__mro__)


@functools.lru_cache(maxsize=1024)  # asked for every table, several times a step
def _class_names(classes: tuple[type, ...]) -> frozenset[str]:
    return frozenset(each.__name__ for each in classes)


@dataclass(frozen=True, slots=True)
class Found:
    """A module of a model.

    Attributes:
        path: In the model as it was before it was wrapped: that of the keys of its `state_dict`.
        module: It.
        replicated_by: The innermost `DistributedDataParallel` around it, which keeps its parameters equal on all ranks
            but for those that it was told to ignore; None if there is none.
        flattened_by: The `FullyShardedDataParallel` around it, which owns its parameters; None if there is none.
    """

    path: str
    module: nn.Module
    replicated_by: Any = None
    flattened_by: Any = None


def named_modules(model: nn.Module) -> Iterator[Found]:
    """Yield each module once; the wrappers themselves are not yielded.

    Args:
        model: Any module; `DistributedModelParallel`, `DistributedDataParallel` and compiled modules are looked
            through, at any depth.

    Raises:
        ConfigError: It is no module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: give the nn.Module, as in attach(model, optimizer)")
    yield from _named_modules(Found("", model), set())


def _named_modules(found: Found, seen: set[nn.Module]) -> Iterator[Found]:
    module = found.module
    for class_name, attribute in _WRAPPERS.items():
        # DMPCollection (2D parallel) is yielded as it is, and refused: its rows are on several ranks.
        if is_a(module, class_name) and not is_a(module, "DMPCollection"):
            replicated_by = module if class_name == "DistributedDataParallel" else found.replicated_by
            flattened_by = module if class_name == "FullyShardedDataParallel" else found.flattened_by
            inner = Found(found.path, getattr(module, attribute), replicated_by, flattened_by)
            yield from _named_modules(inner, seen)
            return
    if module in seen:
        return
    seen.add(module)
    yield found
    for name, child in module._modules.items():
        if child is not None:
            path = f"{found.path}.{name}" if found.path else name
            yield from _named_modules(Found(path, child, found.replicated_by, found.flattened_by), seen)


def inner_optimizers(
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    """Return the optimizers that do the steps, each once, in order.

    TorchRec wraps optimizers in others (`KeyedOptimizerWrapper`, `CombinedOptimizer`, `WarmupOptimizer` …) whose own
    step hooks never run, and whose fused members do nothing in `step()`: their update is part of `backward()`.
    Lightning (`LightningModule.optimizers()`) and Accelerate (`prepare`) have wrappers without step hooks, too.

    Args:
        optimizers: One or several, wrapped or not.

    Raises:
        ConfigError: One of them is no optimizer.
    """
    is_one = isinstance(optimizers, torch.optim.Optimizer | nn.Module | Mapping) or not isinstance(optimizers, Iterable)
    several: Iterable[Any] = [optimizers] if is_one else optimizers  # type: ignore[assignment]
    found: dict[int, torch.optim.Optimizer] = {}
    for optimizer in several:
        for inner in _inner_optimizers(optimizer):
            found.setdefault(id(inner), inner)
    return list(found.values())


def _inner_optimizers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    attribute = next((name for kind, name in _OPTIMIZER_WRAPPERS.items() if is_a(optimizer, kind)), None)
    if is_a(optimizer, "CombinedOptimizer"):
        for _, member in optimizer.optimizers:  # type: ignore[attr-defined]
            yield from _inner_optimizers(member)
    elif attribute is not None:
        yield from _inner_optimizers(getattr(optimizer, attribute))
    elif not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: a {type(optimizer).__name__} is none; give the torch.optim.Optimizer that trains the tables, "
            "or a list of them, and of a wrapper the one inside"
        )
    elif not is_a(optimizer, "FusedOptimizer"):
        yield optimizer
