"""The dense tensors of a model: its parameters and persistent buffers that are no weights of embedding tables.

They are named as in the model's `state_dict`, without wrappers. Each is looked up by its name whenever it is read, so a
parameter that was replaced by another one of the same shape is read too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from headrace.kernels.dtypes import DTYPES, TORCH_DTYPES
from headrace.kernels.module_walk import FoundTensor, is_a, named_modules, named_tensors
from headrace.schemas.errors import ConfigError, UnsupportedModelError
from headrace.schemas.table_names import table_name
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec
from headrace.streamer.taps.local_parts import is_dtensor
from headrace.streamer.taps.model_tree import Selection, check_apart, check_names, inner_optimizers, or_without
from headrace.streamer.taps.optimizer_rules import Rule, owners_of, rule_of
from headrace.streamer.taps.tapped_table import dtype_of
from headrace.streamer.world import World, together

__all__ = ["DenseTensor", "DenseTensors", "DenseValues", "find_dense_tensors", "publishers"]

# Modules of TorchRec and FBGEMM that hold tables, or map ids to their rows: nothing inside of them is dense.
_OF_TABLES = (
    *("EmbeddingBagCollection", "EmbeddingCollection", "FusedEmbeddingBagCollection", "FusedEmbeddingCollection"),
    *("ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection"),
    *("BaseManagedCollisionEmbeddingCollection", "BaseShardedManagedCollisionEmbeddingCollection"),
    *("ManagedCollisionCollection", "ShardedManagedCollisionCollection", "ManagedCollisionModule"),
    *("SplitTableBatchedEmbeddingBagsCodegen", "DenseTableBatchedEmbeddingBagsCodegen", "SSDTableBatchedEmbeddingBags"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseValues:
    """The present values of a dense tensor, whole and detached. Do not write or keep them.

    Attributes:
        weights: Of the spec's shape and type, on any device.
        states: Alike, in the order of the spec.
        scalars: The optimizer's values of the whole tensor, with one element each; empty before the first step.
    """

    weights: torch.Tensor
    states: tuple[torch.Tensor, ...]
    scalars: dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trained:
    # The parameter as attached, in case the model shows another one at times (FSDP2 between forward and backward).
    parameter: torch.Tensor
    optimizer: torch.optim.Optimizer
    rule: Rule
    state_names: tuple[str, ...]

    def state(self, present: torch.Tensor) -> dict[str, Any]:
        known = self.optimizer.state
        found: dict[str, Any] = known.get(present) or known.get(self.parameter) or {}
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseTensor:
    """One dense tensor of a model.

    Attributes:
        path: Its name in the model.
        spec: Its description, with the name on the server.
        is_buffer: It is no parameter.
        is_sharded: It is a DTensor, which all ranks have to read together.
    """

    path: str
    spec: TableSpec
    is_buffer: bool
    is_sharded: bool
    trained: _Trained | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of its rows, with states."""
        dtypes = [self.spec.dtype, *(state.dtype for state in self.spec.states)]
        return self.spec.num_rows * self.spec.dim * sum(dtype.size_bytes for dtype in dtypes)


class DenseTensors:
    """The dense tensors of one model, in the order of its modules.

    Thread: the training thread's.

    Attributes:
        all: Each tensor once.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        model_name: str,
        names: Iterable[str] | None,
        table_paths: Collection[str],
        has_states: bool,
        called: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Find them.

        Args:
            model: The model as it trains, wrapped or not.
            optimizers: Those that train it.
            model_name: Prefix of the names on the server.
            names: Names or patterns; None for all. The weight of an `nn.Embedding` counts only under its very name.
            table_paths: Tables of the model that are streamed by rows, on any rank.
            has_states: Publish the optimizer's states.
            called: Names on the server of tensors and tables that are not called by their paths there.

        Raises:
            ConfigError: A name or pattern matches no tensor, or a tensor that is streamed by rows; or two have a name.
            UnsupportedModelError: A tensor, or a state of it, cannot be published.
        """
        self._model = model
        self._model_name, self._called = model_name, called
        self._optimizers = inner_optimizers(optimizers) if has_states else None
        selection = Selection(names, argument="dense")
        self.all: list[DenseTensor] = []
        found = list(named_tensors(model))
        seen = {id(each.tensor) for each in found if each.path in table_paths}
        holders = [each.path for each in named_modules(model) if any(is_a(each.module, name) for name in _OF_TABLES)]
        inside = tuple(f"{path}." if path else "" for path in holders)
        for each in found:
            is_named = selection.has_name(each.path)
            if each.path in table_paths and is_named:
                raise ConfigError(f"dense: {each.path!r} is a table that is streamed by rows: leave it out")
            is_embedding = each.name == "weight" and isinstance(each.owner.module, nn.Embedding | nn.EmbeddingBag)
            is_left_out = not is_named if is_embedding else each.path.startswith(inside)
            if each.path in table_paths or is_left_out:
                continue
            if selection.takes(each.path) and id(each.tensor) not in seen:
                seen.add(id(each.tensor))
                _check_tensor(each)
                if each.tensor.numel():
                    self.all.append(self._describe(each))
        check_names(selection.unmatched, selection.names, argument="dense", kind="dense tensor")
        check_apart([*table_paths, *(each.path for each in self.all)], called)
        if has_states and not any(each.trained for each in self.all):
            raise ConfigError("dense_states: no given optimizer trains a dense parameter: give the one that does")

    def leave_out(self, names: Collection[str]) -> bool:
        """Leave out tensors that are published already, by their names on the server; return whether any are left."""
        self.all = [each for each in self.all if each.spec.fqn not in names]
        return bool(self.all)

    @property
    def is_sharded(self) -> bool:
        """Whether any is a DTensor."""
        return any(each.is_sharded for each in self.all)

    def live(self) -> dict[str, torch.Tensor]:
        """Return the present tensors of the model by path, as `read` takes them."""
        return {each.path: each.tensor for each in named_tensors(self._model)}

    def read(self, dense: DenseTensor, live: dict[str, torch.Tensor]) -> DenseValues:
        """Return the present values; of a DTensor, all ranks call this together.

        Raises:
            UnsupportedModelError: It is gone, or its shape or type, or a state's, has changed since `attach`.
        """
        spec, trained = dense.spec, dense.trained
        tensor = live.get(dense.path)
        if tensor is None:
            raise UnsupportedModelError(f"dense tensor {spec.fqn!r} is gone from the model: attach to a new streamer")
        _check_same(f"dense tensor {spec.fqn!r}", tensor, spec, spec.dtype)
        if trained is None:
            return DenseValues(weights=_whole(tensor), states=(), scalars={})
        made = trained.state(tensor)
        states = []
        for state in spec.states:
            value = made.get(state.name)
            if value is None:  # the first step makes it, of zeros
                states.append(torch.zeros((), dtype=TORCH_DTYPES[state.dtype], device="cpu").expand(tensor.shape))
                continue
            _check_same(f"state {state.name!r} of dense tensor {spec.fqn!r}", value, spec, state.dtype)
            states.append(_whole(value))
        return DenseValues(weights=_whole(tensor), states=tuple(states), scalars=trained.rule.scalars_in(made))

    def _describe(self, found: FoundTensor) -> DenseTensor:
        path, tensor = found.path, found.tensor
        trained = None if found.is_buffer or self._optimizers is None else _trained_by(path, tensor, self._optimizers)
        made = {} if trained is None else trained.state(tensor)
        names = () if trained is None else trained.state_names
        states = tuple(_state_spec(path, name, tensor, made.get(name)) for name in names)
        fqn, dtype = (
            table_name(self._model_name, self._called.get(path, path)),
            dtype_of(f"dense tensor {path!r}", tensor.dtype, instead=or_without(path, argument="dense")),
        )
        return DenseTensor(
            path=path,
            spec=TableSpec.of_tensor(fqn, tuple(tensor.shape), dtype, states=states),
            is_buffer=found.is_buffer,
            is_sharded=is_dtensor(tensor),
            trained=trained,
        )


def find_dense_tensors(
    world: World, model: nn.Module, optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer], **rest: Any
) -> DenseTensors:
    """Return the `DenseTensors` of these arguments, if all ranks find the same ones; all ranks call it together.

    Raises as `DenseTensors`, on all ranks.
    """
    found: DenseTensors | None = None

    def find() -> list[tuple[TableSpec, bool, bool]]:
        nonlocal found
        found = DenseTensors(model, optimizers, **rest)
        return [(each.spec, each.is_buffer, each.is_sharded) for each in found.all]

    reports = together(world, find, "cannot publish tensors", error=UnsupportedModelError)
    for rank, each in enumerate(reports):
        if each != reports[0]:
            raise UnsupportedModelError(
                f"ranks 0 and {rank} have different dense tensors: publish only those that all ranks have, dense=[…]"
            )
    assert found is not None
    return found


def publishers(tensors: Collection[DenseTensor], num_ranks: int) -> list[int]:
    """Return the rank that publishes each tensor: equal on all ranks, and about equal bytes on each.

    Rank 0 has all buffers: those of a data-parallel model differ between ranks, and its are the ones that count.
    """
    loads = [0] * num_ranks
    ranks = [0] * len(tensors)
    by_size = sorted(enumerate(tensors), key=lambda each: (not each[1].is_buffer, -each[1].size_bytes))
    for at, tensor in by_size:
        ranks[at] = 0 if tensor.is_buffer else loads.index(min(loads))
        loads[ranks[at]] += tensor.size_bytes
    return ranks


def _check_tensor(found: FoundTensor) -> None:
    """Refuse a tensor that cannot be published."""
    reason = None
    if is_lazy(found.tensor):
        reason = "has no shape yet: run a forward of the model before `attach`"
    elif found.tensor.layout is not torch.strided:
        reason = f"has the layout {str(found.tensor.layout).removeprefix('torch.')}, only strided ones are published"
    elif found.owner.flattened_by is not None and not found.is_buffer:
        reason = "is inside FullyShardedDataParallel, which flattens parameters: use torch.distributed.fsdp.fully_shard"
    elif is_dtensor(found.tensor) and found.tensor.device_mesh.get_coordinate() is None:  # type: ignore[attr-defined]
        reason = "is a DTensor on a mesh without this rank: use a mesh of all ranks"
    if reason is not None:
        without = or_without(found.path, argument="dense")
        raise UnsupportedModelError(f"dense tensor {found.path!r} {reason}{without}")


def _trained_by(path: str, tensor: torch.Tensor, optimizers: list[torch.optim.Optimizer]) -> _Trained | None:
    """Return what trains a parameter; None for a frozen one."""
    owners = owners_of(tensor, optimizers) if tensor.requires_grad else []
    if not owners:
        return None
    if len(owners) > 1:
        names = " and ".join(type(owner).__name__ for owner, _ in owners)
        raise UnsupportedModelError(
            f"dense_states: {path!r} is updated by {len(owners)} optimizers ({names}): train "
            f"it with one, or leave dense_states off"
        )
    ((optimizer, group),) = owners
    try:
        rule = rule_of(optimizer)
    except UnsupportedModelError:
        raise UnsupportedModelError(
            f"dense_states: the states that {type(optimizer).__name__} makes for {path!r} are not known: use SGD, "
            f"Adagrad, Adam, AdamW or SparseAdam, or leave dense_states off"
        ) from None
    states = rule.states(group)
    for name, is_rowwise in states:
        if is_rowwise:
            _refuse_state(path, name, "one value a row")
    return _Trained(parameter=tensor, optimizer=optimizer, rule=rule, state_names=tuple(name for name, _ in states))


def _state_spec(path: str, name: str, tensor: torch.Tensor, made: Any) -> StateSpec:
    if made is not None and (made.layout is not torch.strided or made.shape != tensor.shape):
        _refuse_state(path, name, f"{str(made.layout).removeprefix('torch.')}{list(made.shape)}")
    dtype = dtype_of(f"state {name!r} of dense tensor {path!r}", tensor.dtype if made is None else made.dtype)
    return StateSpec(name=name, kind=StateKind.POINTWISE, dtype=dtype)


def _refuse_state(path: str, name: str, shape: str) -> NoReturn:
    raise UnsupportedModelError(
        f"dense_states: state {name!r} of {path!r} has another shape than it ({shape}): leave dense_states off"
    )


def _check_same(what: str, tensor: torch.Tensor, spec: TableSpec, dtype: DType) -> None:
    if tuple(tensor.shape) != spec.shape or DTYPES.get(tensor.dtype) is not dtype:
        raise UnsupportedModelError(
            f"{what} was {dtype.name.lower()}{list(spec.shape or ())} when it was attached and is "
            f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} now: attach the model to a new streamer"
        )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    whole: torch.Tensor = detached.full_tensor() if is_dtensor(detached) else detached  # type: ignore[attr-defined]
    return whole
