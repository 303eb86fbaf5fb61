"""The forward of a served model whose dense tensors are the replica's: each call computes with one part of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from headrace.kernels.dtypes import TORCH_DTYPES
from headrace.kernels.module_walk import FoundTensor, named_modules, named_tensors
from headrace.kernels.plain_context import in_plain_context
from headrace.paramserver.reading.dense_parts import DensePart
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica, as_tensor
from headrace.paramserver.system.text import first_of
from headrace.schemas.errors import ConfigError

__all__ = ["DenseForward", "own_tensors"]

# Copies of the parameters that torch keeps up to date itself, when an attribute is set.
_FLAT_WEIGHTS = ("_flat_weights", "_flat_weight_refs")

_Place = tuple[nn.Module, str]


class DenseForward:
    """Stands for the forward of a served model: takes the tensors of the visible part, and computes at one moment.

    A part's tensors are set as new parameters of the modules, so that no thread writes into what another one reads. A
    thread that computes meanwhile may see some of both; it has begun before the part became visible, so that
    `at_one_moment` drops its result and calls it again.

    Thread: any.
    """

    def __init__(
        self,
        served: nn.Module,
        replica: EmbeddingReplica,
        *,
        model: str | None,
        name_of: Callable[[str], str],
        keep: list[str],
    ) -> None:
        """Take over the forward of a served model that has tensors; `name_of` returns a tensor's name by its path.

        `keep` are patterns of paths of modules or tensors that stay as they are.

        Raises:
            ConfigError: The part lacks a tensor of the model, or has another shape or type of it.
            UnavailableError: No part has come whole yet.
        """
        self._replica = replica
        self._model = model
        self._places: dict[int, list[_Place]] = {}
        self._paths: dict[int, list[str]] = {}
        self._kinds: dict[int, tuple[tuple[int, ...], torch.dtype, torch.device, bool]] = {}
        for path, owner, name, tensor, _ in own_tensors(served, keep):
            device = torch.device("cpu") if tensor.is_meta else tensor.device
            self._kinds[id(tensor)] = tuple(tensor.shape), tensor.dtype, device, isinstance(tensor, nn.Parameter)
            self._places.setdefault(id(tensor), []).append((owner.module, name))
            self._paths.setdefault(id(tensor), []).append(name_of(path))
        self._check_containers(served)
        self._taking = threading.Lock()
        self._taken: DensePart | None = None
        self._forward: Callable[..., Any] = served.forward
        if self._places:
            self._take()
            served.forward = self

    # The lookups in it are outside of compiled graphs as well; what it calls is compiled.
    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model computes with the part and the rows of one moment."""

        def compute() -> Any:
            self._take()
            return self._forward(*args, **kwargs)

        self._take()  # not within the moment, where updates may have to wait for it
        return self._replica.at_one_moment(compute)

    def _take(self) -> None:
        """Set the tensors of the visible part, if they are not set yet."""
        if self._taken is self._replica.dense_part(self._model):
            return
        with self._taking:
            part = self._replica.dense_part(self._model)  # again: an older one must not be set after a newer one
            if self._taken is not part:
                for key, tensor in self._tensors(part).items():
                    for module, name in self._places[key]:
                        setattr(module, name, tensor)
                self._taken = part

    @in_plain_context
    def _tensors(self, part: DensePart) -> dict[int, torch.Tensor]:
        """Return what to set, by the id of the tensor as it was given."""
        tensors, problems = {}, []
        for key, paths in self._paths.items():
            shape, dtype, device, is_parameter = self._kinds[key]
            path = next((path for path in paths if path in part.specs), None)
            if path is None:
                problems.append(f"no {paths[0]!r}")
                continue
            spec = part.specs[path]
            if (spec.shape, TORCH_DTYPES[spec.dtype]) != (shape, dtype):
                assert spec.shape is not None
                theirs = f"{list(spec.shape)} {TORCH_DTYPES[spec.dtype]}"
                problems.append(f"{path!r} is {theirs} there and {list(shape)} {dtype} in the model")
                continue
            tensor = as_tensor(part, path).to(device)
            tensors[key] = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
        if problems:
            raise ConfigError(
                f"the trainer's dense tensors at step {part.step} of epoch {part.epoch} do not fit the served model: "
                f"{first_of(problems)}. Give the model that it trains, attach it with dense=[…] that names them all, "
                "or give keep=[paths] to serve the given model's own"
            )
        return tensors

    def _check_containers(self, served: nn.Module) -> None:
        """Refuse lists and dicts that hold a tensor: what a forward reads from them would stay as it is."""
        found = []
        for each in named_modules(served):
            for name, value in vars(each.module).items():
                parts = value.values() if isinstance(value, dict) else value
                if name in ("_parameters", "_buffers", *_FLAT_WEIGHTS) or not isinstance(value, dict | list | tuple):
                    continue
                if any(id(part) in self._paths for part in parts):
                    found.append(f"{each.path}.{name}".lstrip("."))
        if found:
            raise ConfigError(
                f"the model keeps dense tensors in {first_of(found)}, where they cannot be replaced: use "
                "nn.ParameterList or nn.ParameterDict, or give keep=[paths of the tensors]"
            )


def own_tensors(served: nn.Module, keep: Iterable[str]) -> Iterator[FoundTensor]:
    """Yield the tensors of a served model that are no table's, but for those that it is told to keep."""
    for each in named_tensors(served):
        # Tensors without elements have no values, and are not published; nor have those of lazy modules yet.
        if (
            not is_lazy(each.tensor)
            and each.tensor.numel()
            and not any(_is_part_of(each.path, pattern) for pattern in keep)
        ):
            yield each


def _is_part_of(path: str, pattern: str) -> bool:
    """Return whether a pattern matches the path of a tensor, or of a module around it."""
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(len(parts) + 1))
