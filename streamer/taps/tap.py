"""What a tap is, and which ones fit a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from headrace.schemas.errors import ConfigError, UnsupportedModelError
from headrace.schemas.tables import TableSpec
from headrace.streamer.taps.agreement import agree
from headrace.streamer.taps.fbgemm_tap import FbgemmTap, FusedTables, is_table_batched, table_parts
from headrace.streamer.taps.left_out import LeftOut, bare_parameters, tell_frozen
from headrace.streamer.taps.local_parts import Replicas, dtensor_parts, is_dtensor, owned_part, replicas_in
from headrace.streamer.taps.model_tree import Found, inner_optimizers, named_modules
from headrace.streamer.taps.module_place import ModulePlaces
from headrace.streamer.taps.selection import Selection
from headrace.streamer.taps.step_boundary import StepBoundary
from headrace.streamer.taps.tapped_modules import add_tapped, check_untapped, remove_tapped
from headrace.streamer.taps.tapped_table import TablePart, TappedTable
from headrace.streamer.taps.torch_optim_tap import TableParameter, TorchOptimTap
from headrace.streamer.taps.torchrec_tap import is_sharded, managed_collisions, sharded_tables

__all__ = ["Tap", "tap_model"]


class Tap(Protocol):
    """The hooks on one model that mark its changed rows and tell when a step is over.

    A tap is made with `on_step`, which it calls on the training thread at each step boundary: all updates of the
    step are in the tables, none of the next has begun. Between boundaries rows may be dirty of which the update is
    done, so a gather at any time outside of `backward()` and `optimizer.step()` reads sound rows.

    """

    @property
    def tables(self) -> list[TappedTable]:
        """All tables that are streamed; fixed."""

    @property
    def names(self) -> frozenset[str]:
        """Tables that are streamed by this rank or another, as far as this one knows."""

    def end_step(self) -> bool:
        """Declare, on the training thread, that the step is over: `on_step` is called if rows changed since the last.

        For a model without a torch optimizer, where the end of a step is else noticed at the next forward, and before
        a flush.

        Returns:
            Whether `on_step` was called.
        """

    def sweep(self) -> None:
        """Mark, on the training thread, what was written to the tables and no hook has seen."""

    def close(self) -> None:
        """Remove every hook; the tables stay readable. Idempotent."""


def tap_model(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    on_step: Callable[[], None],
    *,
    tables: Iterable[str] | None = None,
) -> Tap:
    """Find the embedding tables of a model and hook what updates them.

    With `torch.distributed` initialized, all ranks must call it together: they make sure that each row has one owner.

    Tables are `nn.Embedding` and `nn.EmbeddingBag` with torch optimizers, FBGEMM's
    `SplitTableBatchedEmbeddingBagsCodegen`, and the sharded embedding modules of TorchRec. Frozen ones are left out.
    The log names them, and also parameters outside of such modules that are trained as tables are.

    Args:
        model: The model as it is trained, wrapped (`DistributedModelParallel`, `DistributedDataParallel`, compiled) or
            not.
        optimizers: Those that the training loop steps, once a step each; TorchRec's wrappers are looked through.
            May be empty when all tables have fused optimizers: then a step ends where the model's next forward in
            training mode begins, or at `Tap.end_step`.
        on_step: Called at each step boundary, on the training thread.
        tables: Names of tables, or patterns such as `*.users.weight`, to stream only these; None for all. The others
            are not looked at: they may be of any kind.

    Raises:
        ConfigError: A name or a pattern in `tables` is that of no table; the message lists the nearest.
        UnsupportedModelError: A table cannot be streamed exactly, there are none, or the model is streamed already; on
            several ranks also when another rank has refused, or two would stream the same rows. No hook is left.
    """
    selection = Selection(tables)
    tap: _ModelTap | None = None
    failure: Exception | None = None
    try:
        tap = _ModelTap(model, inner_optimizers(optimizers), on_step, selection)
    except Exception as exc:  # the other ranks wait for this one, whatever has happened
        failure = exc
    try:
        if _world_size() > 1:
            counts_steps = tap is not None and tap.counts_optimizer_steps
            names = agree(tap.tables if tap else [], counts_steps, selection, failure)
            if tap is not None:
                tap.names = names
        elif failure is not None:
            raise failure
        else:
            selection.check()
        assert tap is not None
    except BaseException:
        if tap is not None:
            tap.close()
        raise
    return tap


class _ModelTap:
    """The taps of all kinds on one model, and its step boundary."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        on_step: Callable[[], None],
        selection: Selection,
    ) -> None:
        sources = _Sources(model, selection)
        # And what is inside of sharded ones: `install` streams it alone.
        self._modules = [*sources.modules, *((fused.names, fused.module) for fused in sources.fused)]
        check_untapped(self._modules)
        bare = bare_parameters(model, optimizers, [path for path, _ in sources.modules])
        for name in selection.unmatched:
            if name in bare:
                raise ConfigError(
                    f"tables: {name!r} is a parameter that no embedding module holds: make it the weight of an "
                    f"nn.Embedding (`self.t = nn.Embedding(...)`, used as `self.t(ids)` or by `self.t.weight`)"
                )
        self._boundary: StepBoundary | None = None
        self._left_out: LeftOut | None = None
        self._parts: list[FbgemmTap | TorchOptimTap] = []
        try:
            for fused in sources.fused:
                self._parts.append(FbgemmTap(fused, note_update=self._note_update))
            self._parts.append(
                TorchOptimTap(
                    sources.parameters, optimizers, note_update=self._note_update, end_step=self._end_foreign_step
                )
            )
            self.tables = [table for part in self._parts for table in part.tables]
            self.names = frozenset(table.spec.fqn for table in self.tables)
            may_be_elsewhere = sources.has_sharded or _world_size() > 1 or bool(selection.unmatched)
            _check_tables(self.tables, may_be_elsewhere=may_be_elsewhere)
            self.counts_optimizer_steps = bool(optimizers)
            # After the taps: hooks run in the order of registration, and a boundary is told when all is marked.
            self._boundary = StepBoundary(
                on_step, model=model, optimizers=optimizers, sweep=self.sweep, is_alone=_world_size() == 1
            )
            if selection.is_of_all:  # else the user has said which are the tables
                self._left_out = LeftOut(bare, optimizers)
        except BaseException:
            self.close()
            raise
        add_tapped(self._modules)
        tell_frozen(sources.frozen)

    def end_step(self) -> bool:
        return self._boundary is not None and self._boundary.end_step()

    def sweep(self) -> None:
        for part in self._parts:
            part.sweep()

    def close(self) -> None:
        if self._boundary is not None:
            self._boundary.close()
            self._boundary = None
            remove_tapped(self._modules)
        if self._left_out is not None:
            self._left_out.close()
        for part in self._parts:
            part.close()

    def _note_update(self) -> None:
        if self._boundary is not None:
            self._boundary.note_update()

    def _end_foreign_step(self) -> None:
        if self._boundary is not None:
            self._boundary.tell()


class _Sources:
    """The tables of a model, by what updates them.

    Attributes:
        modules: Those that hold tables, with their paths.
        fused: Table-batched modules with a fused optimizer.
        has_sharded: Whether there are sharded modules, whose tables may all be on other ranks.
        parameters: Tables that are parameters of torch optimizers.
    """

    def __init__(self, model: nn.Module, selection: Selection) -> None:
        self._selection = selection
        self._collisions: dict[nn.Module, Any] = {}
        self.modules: list[tuple[str, nn.Module]] = []
        self.fused: list[FusedTables] = []
        self.has_sharded = False
        self._parameters: dict[int, TableParameter] = {}
        found_modules = list(named_modules(model))
        self._places = ModulePlaces(model)
        for found in found_modules:
            path, module = found.path, found.module
            if managed := managed_collisions(module):
                self._collisions[managed[0]] = managed[1]
            if is_sharded(path, module):
                self.has_sharded = True
                fused, parameters = sharded_tables(path, module, selection, self._collisions.get(module))
                self.fused += fused
                for parameter in parameters:
                    self._parameters[id(parameter.parameter)] = parameter
            elif is_table_batched(module):
                parts = tuple(part if selection.takes(part.fqn) else None for part in table_parts(path, module))
                if not any(parts):
                    continue
                self.fused.append(FusedTables(module=module, parts=parts, is_in_use=self._places.of(module).is_kept))
            elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
                if not self._add_embedding(found, module):
                    continue
            else:
                continue
            self.modules.append((path, module))

    @property
    def parameters(self) -> list[TableParameter]:
        return list(self._parameters.values())

    @property
    def frozen(self) -> list[str]:
        """Names of the tables that are selected and that nothing trains."""
        return [s.parts[0].fqn for s in self.parameters if s.parts and not s.parameter.requires_grad]

    def _weight_check(self, module: nn.Module, parameter: nn.Parameter) -> Callable[[], bool]:
        """Return what tells whether a parameter is the weight of a module of the model still."""
        if is_dtensor(parameter):  # fully_shard has other parameters in its place between a forward and its backward
            return lambda: True
        place = self._places.of(module)
        return lambda: module._parameters.get("weight") is parameter and place.is_kept()

    def _add_embedding(self, found: Found, module: nn.Embedding | nn.EmbeddingBag) -> bool:
        """Take a table in if it is selected; return whether it is."""
        fqn = f"{found.path}.weight" if found.path else "weight"
        if not self._selection.takes(fqn):
            return False
        if module.max_norm is not None:
            raise UnsupportedModelError(
                f"table {fqn!r}: max_norm rescales rows in the forward, also in evaluation, without the optimizer; "
                f"clip the rows after the optimizer's step instead"
            )
        parameter = _check_parameter(fqn, module.weight, found)
        known = self._parameters.get(id(parameter))  # tied: one table, by its first name
        has_weight = self._weight_check(module, parameter)
        self._parameters[id(parameter)] = TableParameter(
            parts=known.parts if known else _parts_of(fqn, parameter, found),
            parameter=parameter,
            is_sparse=module.sparse and (known is None or known.is_sparse),
            is_in_use=lambda: (known is None or known.is_in_use()) and has_weight(),
        )
        return True


def _check_parameter(fqn: str, weight: torch.Tensor, found: Found) -> nn.Parameter:
    if found.flattened_by is not None and weight.requires_grad:
        raise UnsupportedModelError(
            f"table {fqn!r} is inside FullyShardedDataParallel, which cuts parameters without regard to rows: "
            f"use torch.distributed.fsdp.fully_shard, or leave the table out of it"
        )
    if not isinstance(weight, nn.Parameter):
        raise UnsupportedModelError(
            f"table {fqn!r} is not a parameter but computed in each forward (parametrization, pruning): not streamed"
        )
    return weight


def _parts_of(fqn: str, parameter: nn.Parameter, found: Found) -> tuple[TablePart, ...]:
    """Return what of a table outside of TorchRec this rank has to stream."""
    if is_dtensor(parameter):
        if found.replicated_by is not None:
            raise UnsupportedModelError(
                f"table {fqn!r} is a DTensor inside DistributedDataParallel: use a mesh of all ranks instead"
            )
        return dtensor_parts(fqn, parameter)
    num_rows, dim = parameter.shape
    part = TablePart(fqn=fqn, num_rows=num_rows, dim=dim)
    if not parameter.requires_grad or _world_size() == 1:
        return (part,)
    return (owned_part(part, num_rows, _replicas_of(fqn, parameter, found)),)


def _replicas_of(fqn: str, parameter: nn.Parameter, found: Found) -> Replicas:
    """Return the ranks that keep a plain parameter equal, or say why there are none."""
    wrapper = found.replicated_by
    if wrapper is None:
        raise UnsupportedModelError(
            f"table {fqn!r} is on {_world_size()} ranks, and nothing keeps its copies equal: wrap the model in "
            f"DistributedDataParallel and attach the wrapper (in Lightning trainer.strategy.model), or shard the table"
        )
    ignored = wrapper.parameters_to_ignore
    if any(other is parameter and name in ignored for name, other in wrapper.module.named_parameters()):
        raise UnsupportedModelError(
            f"table {fqn!r} is on {_world_size()} ranks, and DistributedDataParallel was told to ignore it: "
            f"its copies are not equal"
        )
    return replicas_in(fqn, wrapper.process_group)


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _check_tables(tables: list[TappedTable], *, may_be_elsewhere: bool) -> None:
    """Check that there are tables, and no part of one twice."""
    if not tables and not may_be_elsewhere:
        raise UnsupportedModelError(
            "the model has no embedding table that is trained: nn.Embedding, nn.EmbeddingBag, "
            "FBGEMM SplitTableBatchedEmbeddingBagsCodegen and sharded TorchRec modules are streamed"
        )
    specs: dict[str, TableSpec] = {}
    parts: set[tuple[str, int, int]] = set()
    for table in tables:
        if not table.num_local_rows:
            continue  # more ranks than rows: several of them begin at the end
        part = (table.spec.fqn, table.row_offset, table.shard.offset)
        if part in parts:
            raise UnsupportedModelError(f"two tables are named {table.spec.fqn!r}: give them different names")
        parts.add(part)
        known = specs.setdefault(table.spec.fqn, table.spec)
        if known != table.spec:
            raise UnsupportedModelError(
                f"two parts of table {table.spec.fqn!r} differ: {known.describe_difference(table.spec)}"
            )
