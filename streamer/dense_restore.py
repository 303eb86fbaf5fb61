"""The dense tensors of a model as they take stored values: parameters, buffers, and what an optimizer keeps of them.

All values are of one step. Rank 0 reads them, and each rank gets one whole tensor at a time, of which it keeps its
part: everything, or the local tensor of a DTensor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from headrace.kernels.dtypes import TORCH_DTYPES
from headrace.kernels.module_walk import named_tensors
from headrace.paramserver.reading.dense_parts import DensePart
from headrace.paramserver.system.text import first_of
from headrace.schemas.errors import UnsupportedModelError
from headrace.schemas.table_names import path_of
from headrace.schemas.tables import DType, TableSpec
from headrace.streamer.taps.dense_tensors import DenseTensor, DenseTensors
from headrace.streamer.taps.local_parts import is_dtensor, local_tensor
from headrace.streamer.taps.model_tree import check_apart, inner_optimizers
from headrace.streamer.taps.optimizer_rules import rule_of
from headrace.streamer.taps.torch_optim import TableParameter, TrackedParameter
from headrace.streamer.world import World

__all__ = ["DenseTargets", "RestoredDense"]

_log = logging.getLogger(__name__)
_Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredDense:
    """What became of the dense tensors: parameters and buffers that are no tables.

    Attributes:
        tensors: Paths of those that were read back, all as of one step.
        epoch: Epoch of that step; 0 if there are none.
        step: That step.
        without_states: Those whose optimizer's states are not stored, or whose optimizer was not given.
        kept: Paths of the model's other ones, which the store lacks; they keep the model's values.
    """

    tensors: tuple[str, ...] = ()
    epoch: int = 0
    step: int = 0
    without_states: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Describe them in one line each for those restored and those kept."""
        lines = []
        if self.tensors:
            lines.append(f"dense: {len(self.tensors)} tensors restored, step {self.step}")
        if self.without_states:
            lines[-1] += f"; without optimizer states: {first_of(self.without_states)}"
        if self.kept:
            lines.append(f"dense: {len(self.kept)} tensors are not stored and keep their values: {first_of(self.kept)}")
        return "\n".join(lines)


class DenseTargets:
    """The dense tensors of a model that are stored, as far as the model has them, and its others.

    Attributes:
        stored: The stored tensors, by path.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: _Optimizers,
        stored: Mapping[str, TableSpec],
        *,
        table_paths: Iterable[str],
        called: Mapping[str, str],
        with_states: bool,
    ) -> None:
        """Find them.

        Args:
            model: The model as it trains.
            optimizers: Those that train it.
            stored: The stored dense tensors, by their names on the server.
            table_paths: Tables of the model that are restored by rows.
            called: Names on the server of the tensors that are not called by their paths there.
            with_states: Restore optimizer states too.

        Raises:
            ConfigError: Two tensors of the model would be the same stored one.
            UnsupportedModelError: A dense tensor of the model, or its optimizer, is of a kind that is never stored.
        """
        self._called = called
        by_name = {path_of(name): spec for name, spec in stored.items()}
        paths = [each.path for each in named_tensors(model) if called.get(each.path, each.path) in by_name]
        check_apart(paths, called)
        of_name = {called.get(path, path): path for path in paths}
        self.stored = {of_name.get(name, name): spec for name, spec in by_name.items()}
        tables = set(table_paths) - self.stored.keys()
        # A weight of an `nn.Embedding` counts as dense only under its very name.
        named = [each.path for each in named_tensors(model) if each.path in self.stored]
        settings: dict[str, Any] = {"model_name": "default", "table_paths": tables}
        self._live: dict[str, torch.Tensor] = {}
        self._here: dict[str, DenseTensor] = {}
        self._with_states = with_states
        self._trained = {
            id(each): (one, group)
            for one in inner_optimizers(optimizers)
            for group in one.param_groups
            for each in group["params"]
        }
        try:
            found = DenseTensors(model, (), names=None, has_states=False, **settings)
            if named:
                names = sorted({*named, *(each.path for each in found.all)})
                found = DenseTensors(model, (), names=names, has_states=False, **settings)
                self._live = found.live()
                if with_states and any(self.stored[path].states and self._is_trained(path) for path in named):
                    found = DenseTensors(model, optimizers, names=names, has_states=True, **settings)
        except UnsupportedModelError as exc:
            if self.stored:
                raise
            _log.info("no dense tensors are stored, nor could they be: %s", exc)
            return
        self._here = {each.path: each for each in found.all}

    @property
    def paths(self) -> list[str]:
        """The tensors that are stored and in the model."""
        return [path for path in self.stored if path in self._here]

    @property
    def kept(self) -> list[str]:
        """The dense tensors of the model that are not stored."""
        return [path for path in self._here if path not in self.stored]

    @property
    def without_states(self) -> list[str]:
        """The restored parameters whose optimizer's states are not stored, or whose optimizer was not given."""
        return [path for path in self.paths if self._with_states and self._lacks_states(path)]

    def misfits(self) -> dict[str, str]:
        """Return by path why a stored tensor cannot be restored into this model, or what may be stored by another name.

        What is stored and not in the model is no misfit: the model has left it behind.
        """
        found = {path: reason for path in self.paths if (reason := self._misfit(path, self.stored[path])) is not None}
        if left := sorted(self.stored.keys() - self._here.keys()):
            found |= dict.fromkeys(self.kept, f"is not stored, and the model lacks others that are: {first_of(left)}")
        return found

    def _misfit(self, path: str, spec: TableSpec) -> str | None:
        here = self._here[path]
        if self._live[path].is_meta:
            return "is on the meta device: materialize the model first"
        ours, theirs = here.spec, spec
        differences = []
        if ours.shape != theirs.shape:
            differences.append(f"shape {list(ours.shape or ())} ≠ {list(theirs.shape or ())}")
        if ours.dtype is not theirs.dtype:
            differences.append(f"dtype {ours.dtype.name} ≠ {theirs.dtype.name}")
        if here.trained is not None and theirs.states and ours.states != theirs.states:
            differences.append(f"states [{_states(ours)}] ≠ [{_states(theirs)}]")
        return f"differs (model ≠ stored): {'; '.join(differences)}" if differences else None

    def restore(
        self, world: World, part: DensePart | None, scalars: Mapping[str, Mapping[str, float]], paths: Iterable[str]
    ) -> None:
        """Write the values of a part, which rank 0 has; all ranks call it together. REQUIRES: the tensors fit."""
        for path in paths:
            of_rank_0: dict[str, npt.NDArray[Any]] | None = None
            name = self._called.get(path, path)
            if world.rank == 0:
                assert part is not None
                of_rank_0 = {"": part.tensors[name], **part.states.get(name, {})}
            values = world.share(of_rank_0)
            spec = self.stored[path]
            _write(self._live[path], values[""], spec.dtype)
            if self._takes_states(path):
                tracked = self._tracked(self._here[path])
                tracked.create_states()
                made = tracked.optimizer.state[tracked.parameter]
                for state in spec.states:
                    _write(made[state.name], values[state.name], state.dtype)
                tracked.set_scalars(scalars.get(name, {}))

    def _takes_states(self, path: str) -> bool:
        return self._here[path].trained is not None and bool(self.stored[path].states)

    def _is_trained(self, path: str) -> bool:
        return id(self._live[path]) in self._trained

    def _lacks_states(self, path: str) -> bool:
        if not self._is_trained(path):
            return bool(self.stored[path].states)
        optimizer, group = self._trained[id(self._live[path])]
        try:
            has_states = bool(rule_of(optimizer).states(group))
        except UnsupportedModelError:  # it may have some
            has_states = True
        return has_states and not self.stored[path].states

    def _tracked(self, dense: DenseTensor) -> TrackedParameter:
        trained, parameter = dense.trained, self._live[dense.path]
        assert trained is not None and isinstance(parameter, nn.Parameter)
        return TrackedParameter(
            source=TableParameter(parts=(), parameter=parameter, is_sparse=False),
            optimizer=trained.optimizer,
            rule=trained.rule,
            states=tuple((name, False) for name in trained.state_names),
        )


def _states(spec: TableSpec) -> str:
    return ", ".join(f"{state.name}:{state.dtype.name}" for state in spec.states) or "none"


def _write(target: torch.Tensor, values: npt.NDArray[Any], dtype: DType) -> None:
    """Copy a whole tensor, or this rank's part of it, to its place."""
    whole = torch.from_numpy(np.ascontiguousarray(values)).view(TORCH_DTYPES[dtype]).reshape(values.shape)
    if is_dtensor(target):
        # Replicated values become shards by dropping the rest: no rank sends anything.
        from torch.distributed.tensor import DTensor, Replicate

        mesh, placements = target.device_mesh, target.placements  # type: ignore[attr-defined]
        everywhere = [Replicate()] * mesh.ndim
        whole = DTensor.from_local(whole.to(target.device), mesh, everywhere, run_check=False)
        whole = local_tensor(whole.redistribute(placements=placements))
    local_tensor(target).copy_(whole)
