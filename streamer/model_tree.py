"""The modules of a model and the optimizers of a trainer, looked at through the wrappers around them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

__all__ = ["inner_optimizers", "is_a", "named_modules"]

# Attribute under which a wrapper holds the module that the user wrote; wrapper's class by name, so that nothing is
# imported that the model does not use.
_WRAPPERS = {
    "DistributedModelParallel": "_dmp_wrapped_module",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
}


def is_a(thing: object, class_name: str) -> bool:
    """Return whether `thing` is of a class, or of one derived from a class, with this bare name."""
    return any(base.__name__ == class_name for base in type(thing).__mro__)


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once, with its path in the model as it was before it was wrapped.

    Paths are those of the keys of the unwrapped model's `state_dict`. The wrappers themselves are not yielded.

    Args:
        model: Any module; `DistributedModelParallel`, `DistributedDataParallel` and compiled modules are looked
            through, at any depth.
    """
    yield from _named_modules(model, "", set())


def _named_modules(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for class_name, attribute in _WRAPPERS.items():
        # DMPCollection (2D parallel) is yielded as it is, and refused: its rows are on several ranks.
        if is_a(module, class_name) and not is_a(module, "DMPCollection"):
            yield from _named_modules(getattr(module, attribute), path, seen)
            return
    if module in seen:
        return
    seen.add(module)
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _named_modules(child, f"{path}.{name}" if path else name, seen)


def inner_optimizers(
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    """Return the optimizers that do the steps, each once, in order.

    TorchRec wraps optimizers in others (`KeyedOptimizerWrapper`, `CombinedOptimizer`, `WarmupOptimizer` …) whose own
    step hooks never run, and whose fused members do nothing in `step()`: their update is part of `backward()`.

    Args:
        optimizers: One or several, wrapped or not.
    """
    if isinstance(optimizers, torch.optim.Optimizer):
        optimizers = [optimizers]
    found: dict[int, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        for inner in _inner_optimizers(optimizer):
            found.setdefault(id(inner), inner)
    return list(found.values())


def _inner_optimizers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    if is_a(optimizer, "CombinedOptimizer"):
        for _, member in optimizer.optimizers:  # type: ignore[attr-defined]
            yield from _inner_optimizers(member)
    elif is_a(optimizer, "KeyedOptimizerWrapper") or is_a(optimizer, "OptimizerWrapper"):
        yield from _inner_optimizers(optimizer._optimizer)  # type: ignore[attr-defined]
    elif not is_a(optimizer, "FusedOptimizer"):
        yield optimizer
