"""A copy of a trained model that reads its embedding tables from a replica."""

from __future__ import annotations

import copy
import logging
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

from headrace.kernels.dtypes import TORCH_DTYPES, is_smaller_float
from headrace.kernels.module_walk import FoundModule, inside_wrapper, is_a, named_modules, named_tensors
from headrace.kernels.plain_context import in_plain_context
from headrace.paramserver.replica.api.collisions import ReplicaManagedCollisionCollection
from headrace.paramserver.replica.api.dense_forward import DenseForward, own_tensors
from headrace.paramserver.replica.api.embedding_collections import (
    ReplicaEmbeddingBagCollection,
    ReplicaEmbeddingCollection,
    configs_of,
)
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.replica.api.embeddings import ReplicaEmbedding, ReplicaEmbeddingBag
from headrace.paramserver.system.text import counted, describe_near, first_of
from headrace.schemas.errors import ConfigError, HeadraceError, UnknownTableError
from headrace.schemas.table_names import check_model, model_of, name_in, table_name
from headrace.schemas.tables import TableSpec

__all__ = ["serve_model"]

_log = logging.getLogger(__name__)

_Module = TypeVar("_Module", bound=nn.Module)

# By class names, as the trainer finds them: TorchRec may not be installed. A class of that name is TorchRec's only if
# it is defined where `_DEFINED_IN` says; `torchrec.quant` has others of the same names. The folder of a collection's
# tables is the name of its tables in the `state_dict`.
_COLLISIONS = ("BaseManagedCollisionEmbeddingCollection", "BaseShardedManagedCollisionEmbeddingCollection")
_FOLDERS = {
    "EmbeddingBagCollection": "embedding_bags",
    "ShardedEmbeddingBagCollection": "embedding_bags",
    "EmbeddingCollection": "embeddings",
    "ShardedEmbeddingCollection": "embeddings",
}
_DEFINED_IN = {
    "BaseManagedCollisionEmbeddingCollection": "torchrec.modules.mc_embedding_modules",
    "BaseShardedManagedCollisionEmbeddingCollection": "torchrec.distributed.mc_embedding_modules",
    "EmbeddingBagCollection": "torchrec.modules.embedding_modules",
    "ShardedEmbeddingBagCollection": "torchrec.distributed.embeddingbag",
    "EmbeddingCollection": "torchrec.modules.embedding_modules",
    "ShardedEmbeddingCollection": "torchrec.distributed.embedding",
    "Embedding": nn.Embedding.__module__,
    "EmbeddingBag": nn.EmbeddingBag.__module__,
}
# Hold tables that nothing here can replace. The last one is the base of all sharded modules of TorchRec.
_OTHERS = (
    *("FusedEmbeddingBagCollection", "FusedEmbeddingCollection", "GenericITEPModule", "PECEmbeddingCollection"),
    "ShardedModule",
)
_TABLE_BATCHED = "TableBatchedEmbedding"  # part of the names of FBGEMM's modules
_QUANTIZED = "quantized"
_QUANTIZED_IN = ("torch.ao.nn.quantized", "torchrec.quant", "torchrec.distributed.quant")
# What computes the outputs of a module, or says how. A subclass that has one of its own is another module.
_COMPUTING = (
    *("forward", "__call__", "_call_impl", "input_dist", "compute", "output_dist", "compute_and_output_dist"),
    *("embedding_bag_configs", "embedding_configs", "is_weighted", "need_indices"),
)

# A module's hooks around its forward; they go on to the module in its place.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@in_plain_context
def serve_model(
    module: _Module,
    replica: EmbeddingReplica,
    *,
    model: str | None = None,
    prefix: str = "",
    keep: Iterable[str] = (),
    names: Mapping[str, str] | None = None,
) -> _Module:
    """Return a copy of a model, in eval mode, whose embedding tables are those of a replica.

        served = serve_model(net, replica)
        scores = served(batch)

    Each `nn.Embedding` and `nn.EmbeddingBag`, and each EmbeddingBagCollection and EmbeddingCollection of TorchRec,
    managed collisions and sharded ones included, is replaced by the module that reads the table of the same path.
    Modules that are tied, or share a weight, stay so. At one step, the copy's outputs are those of the trainer's model
    in eval mode on the CPU, bit for bit, if its other parameters are that step's too. The trainer says with its tables
    how its modules use them, which sharding changes: the copy does the same, whether it is given the sharded model or
    a plain one.

    Where the trainer publishes dense tensors (`dense=[…]` at its attach), they are: each call of the copy takes the
    replica's newest part for all parameters and buffers that are no table's, and computes at one moment, as
    `EmbeddingReplica.at_one_moment` does. Call the copy itself for that, not a module inside of it. Where it does not,
    the copy computes with the given model's own, and a warning names them, but for those in `keep`.

    The tables' own weights are neither copied nor kept: the given model may be on the meta device. All other
    parameters and buffers are copied, and need no gradient. Data parallel, model parallel and compiling wrappers
    are left out of the copy.

    Args:
        module: The model as it trains, or built like it; it is not changed.
        replica: Open while the copy is used; the caller closes it.
        model: Name of the trained model on the server, needed if the replica has several with such tables.
        prefix: Path of `module` in the trained model, if it is a part of it.
        keep: Paths of modules, or patterns such as `towers.*`, that keep the given model's own weights, which are
            copied: tables that are frozen, for example, which no trainer streams. Paths of parameters and buffers, too.
        names: By what names modules, tables and dense tensors are on the server, by their paths in `module`, where
            modules were renamed, as for `RawEmbeddingStreamer.attach`.

    Raises:
        ConfigError: A module cannot be served, the trained one has other settings, or dense tensors are published that
            do not fit the model, or none, and the model has no values for them; the message lists all such modules or
            tensors, and says what to do.
        UnavailableError: The trainer publishes dense tensors, and none have come whole yet.
    """
    if model is not None:
        check_model(model)
    plan = _Plan(module, replica, model=model, prefix=prefix, keep=list(keep), names=dict(names or {}))
    memo: dict[int, Any] = dict(plan.in_place_of)
    # What is not a module's weight but refers to one, such as a list of weights, gets a tensor without memory.
    for weight in plan.weights.values():
        memo[id(weight)] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    try:
        for wrapper, inner in _wrappers(module, plan.in_place_of):
            memo[id(wrapper)] = copy.deepcopy(inner, memo)
        served: _Module = copy.deepcopy(module, memo)
        for old, new in plan.replaced:
            for name in _HOOKS:
                setattr(new, name, copy.deepcopy(getattr(old, name), memo))
    except Exception as exc:  # whatever the user's own objects raise
        raise ConfigError(f"the model cannot be copied: {type(exc).__name__}: {exc}") from exc
    served.eval().requires_grad_(False)
    if plan.has_dense:
        DenseForward(served, replica, model=plan.trained_model, name_of=plan.name_of, keep=plan.keep)
    else:
        _tell_of_own(served, plan.keep)
    return served


def _tell_of_own(served: nn.Module, keep: Iterable[str]) -> None:
    """Warn of tensors that are the given model's own because no trainer publishes any; refuse those without values."""
    tensors = {each.path: each.tensor for each in own_tensors(served, keep)}
    if without := [path for path, tensor in tensors.items() if tensor.is_meta]:
        raise ConfigError(
            f"the trainer publishes no dense tensors, and the given model has no values for {first_of(without)}, which "
            "are on the meta device: attach with dense=True, or give a model with its weights"
        )
    if tensors:
        _log.warning(
            "the trainer publishes no dense tensors: the served model computes with the given model's own %s (%s). "
            "Load them from the trainer's checkpoint, and name them in keep=[…]; or attach with dense=True",
            counted(len(tensors), "tensor"),
            first_of(list(tensors)),
        )


@dataclass(frozen=True, slots=True)
class _Declared:
    """A table as the given model has it."""

    path: str
    num_rows: int
    dim: int
    dtype: torch.dtype | None = None  # None if outputs do not depend on it

    def fits(self, spec: TableSpec) -> bool:
        """Return whether a table can be served; one that has grown since the model was written can."""
        is_smaller = 0 < spec.num_rows < self.num_rows
        return spec.dim == self.dim and not is_smaller and self._fits_type(TORCH_DTYPES[spec.dtype])

    def _fits_type(self, stored: torch.dtype) -> bool:
        """Return whether outputs of a stored type can be the model's: the trainer may store rounded weights."""
        return self.dtype is None or stored == self.dtype or is_smaller_float(stored, self.dtype)


class _Plan:
    """Which modules are replaced, and by what.

    Attributes:
        in_place_of: New modules by the ids of the old ones.
        replaced: Pairs of old and new modules.
        weights: The tables' weights in the given model, by id.
        trained_model: Name of the trained model; None if it is not given and the replica has no tables of it.
        keep: Patterns of what keeps its own weights.
        has_dense: Whether the trained model has published dense tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        replica: EmbeddingReplica,
        *,
        model: str | None,
        prefix: str,
        keep: list[str],
        names: dict[str, str],
    ) -> None:
        self.in_place_of: dict[int, nn.Module] = {}
        self.replaced: list[tuple[nn.Module, nn.Module]] = []
        self.weights: dict[int, torch.Tensor] = {}
        self._replica = replica
        self._model = self.trained_model = model
        self._start = f"{prefix}." if prefix else ""
        self.keep, self._names = keep, names
        self._paths_of_weight: dict[int, list[str]] = {}
        self._problems: list[str] = []
        found_modules = list(named_modules(module))
        self._find_ties(found_modules)
        if names:
            self._check_names(found_modules, {each.path for each in named_tensors(module)})
        inside: set[nn.Module] = set()  # parts of modules that are replaced
        kept: set[nn.Module] = set()
        unmatched = set(keep)
        for found in found_modules:
            matching = [pattern for pattern in keep if fnmatchcase(found.path, pattern)]
            unmatched.difference_update(matching)
            if matching:
                kept.update(found.module.modules())
            kind = _kind_of(found.module)
            if kind is not None and found.module not in kept and found.module not in inside:
                inside.update(found.module.modules())
                self._replace(found, kind)
        paths = [each.path for each in named_tensors(module)]
        for pattern in sorted(pattern for pattern in unmatched if not any(fnmatchcase(p, pattern) for p in paths)):
            near = describe_near(pattern, [found.path for found in found_modules])
            raise ConfigError(f"keep: no module is named or matches {pattern!r}; {near}")
        for found in found_modules:
            if found.module not in inside:
                self._check_rest(found)
        dense_models = {model_of(name) for name in replica.dense_tensors}
        self.has_dense = bool(dense_models) if self.trained_model is None else self.trained_model in dense_models
        self._raise_problems()

    def _find_ties(self, found_modules: Iterable[FoundModule]) -> None:
        """Note under which paths each weight is a table's: the trainer streams tied ones under one of them."""
        for found in found_modules:
            if isinstance(found.module, nn.Embedding | nn.EmbeddingBag):
                weight = found.module._parameters.get("weight")
                if weight is not None:
                    self._paths_of_weight.setdefault(id(weight), []).append(_join(found.path, "weight"))

    def _check_names(self, found_modules: Iterable[FoundModule], tensors: set[str]) -> None:
        """Raise ConfigError if a table, a tensor or a module is named that the model does not have."""
        paths = tensors | {found.path for found in found_modules}
        paths |= {
            table.path
            for found in found_modules
            if (kind := _kind_of(found.module)) in _DEFINED_IN and _named(found.module, kind) is not None
            for tables in _declared(found, kind, self._paths_of_weight)
            for table in tables
        }
        for path in sorted(self._names.keys() - paths):
            near = describe_near(path, paths - {""})
            raise ConfigError(f"names: the model has no table, tensor or module {path!r}; {near}")

    def _replace(self, found: FoundModule, kind: str) -> None:
        """Plan the module in place of one that has tables."""
        try:
            new = self._new_module(found, kind)
        except HeadraceError as exc:
            self._problems.append(f"{found.path!r} ({type(found.module).__name__}): {exc}")
            return
        self.in_place_of[id(found.module)] = new
        self.replaced.append((found.module, new))
        for part in found.module.modules():
            for weight in part._parameters.values():
                if weight is not None:
                    self.weights[id(weight)] = weight

    def _new_module(self, found: FoundModule, kind: str) -> nn.Module:
        module: Any = found.module
        if found.flattened_by is not None:
            raise ConfigError("is inside FullyShardedDataParallel, which flattens its weights: give the model before")
        if kind == _QUANTIZED:
            raise ConfigError("is quantized: give the model that trains, with float tables")
        if kind in _OTHERS or kind == _TABLE_BATCHED:
            raise ConfigError("has no counterpart: use EmbeddingBagCollection or EmbeddingCollection of TorchRec")
        if _named(module, kind) is None:
            raise ConfigError(f"is {type(module).__module__}'s, and no {kind} of TorchRec: give the model that trains")
        if getattr(module, "max_norm", None) is not None:
            raise ConfigError("max_norm rescales rows in the forward: not served")
        if (owner := _overriding(module, kind)) is not None:
            raise ConfigError(f"what it computes is {owner}'s own: put an {kind} inside of the class")
        specs = [self._check_table(table) for table in _declared(found, kind, self._paths_of_weight)]
        path = f"{self._start}{found.path}".removesuffix(".")
        names = {f"{self._start}{each}".removesuffix("."): name for each, name in self._names.items()}
        where: dict[str, Any] = {"prefix": path, "model": self._model, "names": names}
        if kind in _COLLISIONS:
            return ReplicaManagedCollisionCollection.like(module, self._replica, **where)
        if kind in _FOLDERS:
            of_bags = _FOLDERS[kind] == "embedding_bags"
            like: Any = ReplicaEmbeddingBagCollection.like if of_bags else ReplicaEmbeddingCollection.like
            new: nn.Module = like(module, self._replica, **where)
            return new
        if kind == "EmbeddingBag":
            return ReplicaEmbeddingBag.like(module, self._replica, specs[0].fqn)
        return ReplicaEmbedding.like(module, self._replica, specs[0].fqn)

    def _check_table(self, declared: list[_Declared]) -> TableSpec:
        """Return the replica's table of the first path that it has; raise ConfigError if it has none, or another."""
        for table in declared:
            try:
                spec = self._replica.spec_of(self._table_name_of(table))
            except UnknownTableError:
                continue
            if not table.fits(spec):
                theirs = f"{spec.num_rows:,} × {spec.dim} {TORCH_DTYPES[spec.dtype]}"
                ours = f"{table.num_rows:,} × {table.dim} {table.dtype or ''}".rstrip()
                raise ConfigError(f"table {spec.fqn!r} is {theirs} in the replica and {ours} in the model")
            self.trained_model = model_of(spec.fqn)
            return spec
        raise ConfigError(f"no table {self._table_name_of(declared[0])!r}")

    def name_of(self, path: str) -> str:
        """Return the name on the server, without the model, of what is at a path of the given model."""
        return name_in(self._names, path) or f"{self._start}{path}"

    def _table_name_of(self, table: _Declared) -> str:
        name = self.name_of(table.path)
        return name if self._model is None else table_name(self._model, name)

    def _check_rest(self, found: FoundModule) -> None:
        """Refuse a module that stays, but whose parameters are a table's or in parts on several ranks."""
        for name, parameter in found.module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in self.weights:
                self._problems.append(
                    f"{_join(found.path, name)!r} ({type(found.module).__name__}): is the weight of a table, which the "
                    "copy does not have"
                )
            elif found.flattened_by is not None or is_a(parameter, "DTensor") or is_a(parameter, "ShardedTensor"):
                self._problems.append(
                    f"{_join(found.path, name)!r}: is in parts on several ranks: give the model before it is sharded"
                )

    def _raise_problems(self) -> None:
        if self._problems:
            tables = first_of(sorted(self._replica.tables))
            raise ConfigError(
                f"{len(self._problems)} of the model's modules cannot be served: {'; '.join(self._problems)}. The "
                f"replica has the tables {tables}. If the trainer names them otherwise, give model=…, prefix=… or "
                "names=…; if it does not stream them, attach it with them, or give keep=[paths] to serve the given "
                "model's weights"
            )
        if not self.replaced and not self.has_dense:
            raise ConfigError("no module of the model has a table to serve: give the model with its embedding modules")


def _kind_of(module: nn.Module) -> str | None:
    """Return the name of the class that makes a module one with tables; None for others."""
    if "Embedding" in type(module).__name__ and type(module).__module__.startswith(_QUANTIZED_IN):
        return _QUANTIZED
    for name in (*_COLLISIONS, *_FOLDERS, *_OTHERS):
        if is_a(module, name):
            return name
    if _TABLE_BATCHED in type(module).__name__:
        return _TABLE_BATCHED
    if isinstance(module, nn.EmbeddingBag):
        return "EmbeddingBag"
    return "Embedding" if isinstance(module, nn.Embedding) else None


def _overriding(module: nn.Module, kind: str) -> str | None:
    """Return who overrides what the class that `kind` names computes; None if nobody does."""
    if any(name in module.__dict__ for name in _COMPUTING):
        return "the module"
    classes = type(module).__mro__
    named = _named(module, kind)
    assert named is not None
    below = classes[: classes.index(named)]
    own = (each for each in below if not each.__module__.startswith("torchrec.") or kind not in _COLLISIONS)
    return next((each.__name__ for each in own if any(name in each.__dict__ for name in _COMPUTING)), None)


def _named(module: nn.Module, kind: str) -> type | None:
    """Return the class of a module, or its base, that `kind` names; None for a module of another class of that name."""
    named = (each for each in type(module).__mro__ if each.__name__ == kind)
    return next((each for each in named if each.__module__ == _DEFINED_IN[kind]), None)


def _declared(found: FoundModule, kind: str, paths_of_weight: dict[int, list[str]]) -> Iterator[list[_Declared]]:
    """Yield the tables of a module, each under all paths that the trainer may name it by."""
    module: Any = found.module
    if kind in ("Embedding", "EmbeddingBag"):
        weight = module._parameters.get("weight")
        paths = [_join(found.path, "weight")] if weight is None else paths_of_weight[id(weight)]
        dtype = None if weight is None else weight.dtype
        yield [_Declared(path, module.num_embeddings, module.embedding_dim, dtype) for path in paths]
        return
    path, collection = found.path, module
    if kind in _COLLISIONS:
        path, collection = _join(path, "_embedding_module"), module._embedding_module
    folder = next(folder for name, folder in _FOLDERS.items() if is_a(collection, name))
    for config in configs_of(collection):
        name = _join(path, f"{folder}.{config.name}.weight")
        yield [_Declared(name, config.num_embeddings, config.embedding_dim)]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _wrappers(module: nn.Module, replaced: Container[int]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each wrapper in a model and the module inside it, innermost first; none inside replaced modules (ids)."""
    if id(module) in replaced:
        return
    inner = inside_wrapper(module)
    for child in [inner] if inner is not None else module._modules.values():
        if child is not None:
            yield from _wrappers(child, replaced)
    if inner is not None:
        yield module, inner
