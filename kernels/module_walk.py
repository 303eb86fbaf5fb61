"""Walk over the modules of a model, behind their wrappers: the paths are those of the keys in its `state_dict`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from headrace.schemas.errors import ConfigError

__all__ = ["FoundModule", "FoundTensor", "inside_wrapper", "is_a", "named_modules", "named_tensors"]

# By a wrapper's class, the attribute that holds the user's module. Class names, so that nothing is imported that the
# model does not use.
_WRAPPERS = {
    "DistributedModelParallel": "_dmp_wrapped_module",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}


def is_a(thing: object, class_name: str) -> bool:
    """Return whether the class of `thing`, or a base of it, has this bare name."""
    return class_name in _class_names(type(thing).__mro__)


@functools.lru_cache(maxsize=1024)  # called for every table, several times a step
def _class_names(classes: tuple[type, ...]) -> frozenset[str]:
    return frozenset(each.__name__ for each in classes)


def inside_wrapper(module: nn.Module) -> nn.Module | None:
    """Return the module that a wrapper (data or model parallel, compiled) holds; None if this is no wrapper."""
    for class_name, attribute in _WRAPPERS.items():
        if is_a(module, class_name):
            inner: nn.Module = getattr(module, attribute)
            return inner
    return None


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
    # The `DMPCollection` (2D parallel) around it, whose `sync` averages rows over the groups of ranks that have them.
    synced_by: Any = None


def named_modules(model: nn.Module) -> Iterator[FoundModule]:
    """Yield each module of a model once, without the wrappers (data or model parallel, compiled) at any depth.

    Raises:
        ConfigError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: give the nn.Module, as in attach(model, optimizer)")
    yield from _named_modules(FoundModule("", model), set())


class FoundTensor(NamedTuple):
    """A parameter or persistent buffer of a model, `name` in the module `owner`."""

    path: str
    owner: FoundModule
    name: str
    tensor: torch.Tensor
    is_buffer: bool


def named_tensors(model: nn.Module) -> Iterator[FoundTensor]:
    """Yield each parameter and persistent buffer of a model, tied ones under each of their paths.

    Raises:
        ConfigError: `model` is no module.
    """
    for owner in named_modules(model):
        module, prefix = owner.module, f"{owner.path}." if owner.path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield FoundTensor(prefix + name, owner, name, parameter, False)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield FoundTensor(prefix + name, owner, name, buffer, True)


def _named_modules(found: FoundModule, seen: set[nn.Module]) -> Iterator[FoundModule]:
    module = found.module
    inner_module = inside_wrapper(module)
    if inner_module is not None:
        replicated_by = module if is_a(module, "DistributedDataParallel") else found.replicated_by
        flattened_by = module if is_a(module, "FullyShardedDataParallel") else found.flattened_by
        synced_by = module if is_a(module, "DMPCollection") else found.synced_by
        yield from _named_modules(FoundModule(found.path, inner_module, replicated_by, flattened_by, synced_by), seen)
        return
    if module in seen:
        return
    seen.add(module)
    yield found
    for name, child in module._modules.items():
        if child is not None:
            path = f"{found.path}.{name}" if found.path else name
            yield from _named_modules(dataclasses.replace(found, path=path, module=child), seen)
