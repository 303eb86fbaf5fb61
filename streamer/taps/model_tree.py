"""Find the modules of a model and the optimizers of a trainer behind their wrappers, and select tables by name."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headrace.paramserver.system.text import describe_near
from headrace.schemas.errors import ConfigError

__all__ = ["FoundModule", "Selection", "check_names", "inner_optimizers", "is_a", "named_modules"]

# By a wrapper's class, the attribute that holds the user's module. Class names, so that nothing is imported that the
# model does not use.
_WRAPPERS = {
    "DistributedModelParallel": "_dmp_wrapped_module",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}

# The same for wrappers around one optimizer that write no table themselves: TorchRec's, Lightning's, Accelerate's.
_OPTIMIZER_WRAPPERS = {
    "KeyedOptimizerWrapper": "_optimizer",
    "OptimizerWrapper": "_optimizer",
    "LightningOptimizer": "_optimizer",
    "AcceleratedOptimizer": "optimizer",
}


def is_a(thing: object, class_name: str) -> bool:
    """Return whether the class of `thing`, or a base of it, has this bare name."""
    return class_name in _class_names(type(thing).__mro__)


@functools.lru_cache(maxsize=1024)  # called for every table, several times a step
def _class_names(classes: tuple[type, ...]) -> frozenset[str]:
    return frozenset(each.__name__ for each in classes)


@dataclass(frozen=True, slots=True)
class FoundModule:
    """A module of a model."""

    # In the unwrapped model, as in the keys of the `state_dict`.
    path: str
    module: nn.Module
    # The innermost `DistributedDataParallel` around it, which keeps its parameters equal on all ranks unless ignored.
    replicated_by: Any = None
    # The `FullyShardedDataParallel` around it, which owns its parameters.
    flattened_by: Any = None


def named_modules(model: nn.Module) -> Iterator[FoundModule]:
    """Yield each module of a model once, without the wrappers (data or model parallel, compiled) at any depth.

    Raises:
        ConfigError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: give the nn.Module, as in attach(model, optimizer)")
    yield from _named_modules(FoundModule("", model), set())


def _named_modules(found: FoundModule, seen: set[nn.Module]) -> Iterator[FoundModule]:
    module = found.module
    for class_name, attribute in _WRAPPERS.items():
        # DMPCollection (2D parallel) is yielded as it is, and refused later: its rows are on several ranks.
        if is_a(module, class_name) and not is_a(module, "DMPCollection"):
            replicated_by = module if class_name == "DistributedDataParallel" else found.replicated_by
            flattened_by = module if class_name == "FullyShardedDataParallel" else found.flattened_by
            inner = FoundModule(found.path, getattr(module, attribute), replicated_by, flattened_by)
            yield from _named_modules(inner, seen)
            return
    if module in seen:
        return
    seen.add(module)
    yield found
    for name, child in module._modules.items():
        if child is not None:
            path = f"{found.path}.{name}" if found.path else name
            yield from _named_modules(FoundModule(path, child, found.replicated_by, found.flattened_by), seen)


def inner_optimizers(
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    """Return the optimizers that really step, out of one or several, wrapped or not; each once, in order.

    The step hooks of TorchRec's wrappers (`KeyedOptimizerWrapper`, `CombinedOptimizer`, `WarmupOptimizer` …) never run,
    and their fused members do nothing in `step()`: their update is part of `backward()`. The wrappers of Lightning
    (`LightningModule.optimizers()`) and Accelerate (`prepare`) have no step hooks either.

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
            f"optimizer: a {type(optimizer).__name__} is not one; give the torch.optim.Optimizer that trains the "
            "tables, a list of them, or the one inside a wrapper"
        )
    elif not is_a(optimizer, "FusedOptimizer"):
        yield optimizer


class Selection:
    """Selects tables by name or pattern, and finds names that match no table."""

    def __init__(self, patterns: Iterable[str] | None = None) -> None:
        """Select tables by name or pattern (`*`, `?`, `[…]`); None selects all.

        Raises:
            ConfigError: It is empty, a single string, or holds something else than strings.
        """
        if isinstance(patterns, str) or not isinstance(patterns, Iterable | None):
            raise ConfigError(f"tables {patterns!r} is not a list: give a list of names or patterns")
        listed = None if patterns is None else list(patterns)
        if not all(isinstance(pattern, str) for pattern in listed or ()):
            raise ConfigError(f"tables {listed} are not all names: give a list of names or patterns")
        self._patterns = None if listed is None else list(dict.fromkeys(listed))
        if self._patterns == []:
            raise ConfigError("tables is empty: give names or patterns of tables, or omit it for all of them")
        self.names: list[str] = []  # all tables that `takes` was called for
        self.unmatched = list(self._patterns or ())  # names and patterns without a table so far

    @property
    def is_of_all(self) -> bool:
        """Whether no names or patterns were given."""
        return self._patterns is None

    def takes(self, fqn: str) -> bool:
        """Return whether a table is selected."""
        self.names.append(fqn)
        if self._patterns is None:
            return True
        matching = [p for p in self._patterns if p == fqn or fnmatch.fnmatchcase(fqn, p)]
        self.unmatched = [pattern for pattern in self.unmatched if pattern not in matching]
        return bool(matching)


def check_names(unmatched: Iterable[str], names: Iterable[str]) -> None:
    """Raise ConfigError if there is an unmatched name or pattern; list the nearest of all tables' names."""
    for pattern in unmatched:
        raise ConfigError(f"tables: no table is named or matches {pattern!r}; {describe_near(pattern, names)}")
