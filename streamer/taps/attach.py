"""Attach taps to the embedding tables of a model, and check with all ranks that each row has one owner."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import nn

from headrace.kernels.module_walk import FoundModule, named_modules
from headrace.schemas.errors import ConfigError, UnsupportedModelError
from headrace.schemas.table_uses import TableUse, encode_uses
from headrace.schemas.tables import TableSpec
from headrace.streamer.taps.collisions import identities_of
from headrace.streamer.taps.fbgemm import FbgemmTap, FusedTables, is_table_batched, table_parts
from headrace.streamer.taps.guards.new_tables import NewTables
from headrace.streamer.taps.guards.tapped_modules import (
    ModulePlaces,
    WeightPlace,
    add_tapped,
    check_untapped,
    remove_tapped,
)
from headrace.streamer.taps.guards.unstreamed_modules import (
    Unstreamed,
    check_unstreamed,
    spoiled_at,
    unstreamed_module,
    warn_unstreamed,
)
from headrace.streamer.taps.guards.untapped_tables import UntappedTables, bare_parameters, warn_frozen
from headrace.streamer.taps.hooks import Override, StepBoundary, hook_sync
from headrace.streamer.taps.local_parts import (
    Replicas,
    TableCopy,
    dtensor_parts,
    is_dtensor,
    replica_groups,
    replica_part,
    replicas_in,
)
from headrace.streamer.taps.model_tree import Selection, check_names, inner_optimizers, or_without
from headrace.streamer.taps.optimizer_rules import Dirty
from headrace.streamer.taps.synced_copies import SyncedCopies, SyncedTables
from headrace.streamer.taps.table_uses import use_of_embedding, uses_in_collection, uses_in_sharded
from headrace.streamer.taps.tapped_table import TablePart, TappedTable, describe_rows
from headrace.streamer.taps.torch_optim import TableParameter, TorchOptimTap
from headrace.streamer.taps.torchrec import (
    has_sharded,
    is_sharded,
    managed_collisions,
    sharded_tables,
    unsharded_collisions,
)
from headrace.streamer.world import current_world, together

__all__ = ["Tap", "check_has_new", "is_attached_again", "tap_model"]

_log = logging.getLogger(__name__)


class Tap(Protocol):
    """The hooks on one model that mark its changed rows and detect the end of each step.

    A tap calls the `on_step` that it was created with on the training thread at each step boundary: all updates of the
    step are in the tables, and none of the next has begun. A row is marked only after its update, so a gather at any
    time outside of `backward()` and `optimizer.step()` reads consistent rows.
    """

    @property
    def tables(self) -> list[TappedTable]:
        """The tables that this rank streams; never changes."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the tables that any rank streams, as far as this rank knows."""

    @property
    def unstreamed(self) -> Mapping[str, str]:
        """What the model trains as embeddings and no tap can stream, by name, with the reason.

        Not what was left out by name.
        """

    def new_tables(self) -> list[str]:
        """Return the names of tables that are trained by now and were not at `attach`, on the training thread.

        Another `attach` of the model takes them in. Not those that were left out by name.
        """

    def copies(self) -> list[TableCopy]:
        """Return the rows that this rank and others should keep equal, as of this moment."""

    def end_step(self) -> bool:
        """End the step, on the training thread: call `on_step` if rows changed since; return whether it was called.

        Needed before a flush, and for a model without a torch optimizer, whose steps otherwise end at the next forward.
        """

    def sweep(self) -> None:
        """Mark, on the training thread, the rows written without a hook seeing it."""

    def close(self) -> None:
        """Remove every hook. The tables stay readable. Idempotent."""


def tap_model(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    on_step: Callable[[], None],
    *,
    tables: Iterable[str] | None = None,
    is_streamed: bool = True,
    has_dense: bool = False,
    dirty: Dirty | None = None,
    owner: Any = None,
    earlier: Iterable[Tap] = (),
) -> Tap:
    """Find the embedding tables of a model and hook what updates them. An error leaves no hook.

    With `torch.distributed` initialized, all ranks must call it together, to check that each row has one owner.

    Tables are `nn.Embedding` and `nn.EmbeddingBag` with torch optimizers, FBGEMM's
    `SplitTableBatchedEmbeddingBagsCodegen`, and TorchRec's sharded embedding modules. Frozen ones are not streamed
    unless an optimizer has them. The log names them, and other parameters that train like tables.

    Args:
        model: The model as it trains, wrapped (`DistributedModelParallel`, `DistributedDataParallel`, compiled) or not.
        optimizers: The training loop's optimizers, wrapped or not; each steps once a step. Without any (all tables have
            fused ones) a step ends at the model's next forward in training mode, or at `Tap.end_step`.
        on_step: Called at each step boundary, on the training thread.
        tables: Names of tables, or patterns such as `*.users.weight`; None for all. Others may be of any kind. Those
            behind `!` are left out.
        is_streamed: Log what streaming the model costs, and which tables it leaves out.
        has_dense: Dense tensors are published too, so that there need be no table, and `tables` may be empty. The
            caller calls `check_has_new` if no dense tensor is new.
        dirty: Which rows a step of an unknown optimizer changes; None for all rows. `all` is said of every optimizer.
        owner: The streamer, for `owners_of`; None for a tap that is closed before its caller returns.
        earlier: Taps of the same streamer. If one is of this model, only the tables that it lacks are tapped, and its
            steps are this one's.

    Raises:
        ConfigError: A name or pattern in `tables` matches no table; the message lists the nearest.
        UnsupportedModelError: A table cannot be streamed exactly, there is none, or the model is streamed already; on
            several ranks also if another rank has refused, or two would stream the same rows.
    """
    selection = Selection(tables, may_be_empty=has_dense)
    tap: _ModelTap | None = None

    def tap_here() -> _Report:
        nonlocal tap
        tap = _ModelTap(
            model,
            inner_optimizers(optimizers),
            on_step,
            selection,
            is_streamed=is_streamed,
            has_dense=has_dense,
            dirty=dirty,
            owner=owner,
            earlier=[each for each in earlier if isinstance(each, _ModelTap)],
        )
        return _Report.of(tap.tables, selection, has_optimizers=tap.has_optimizers)

    try:
        reports = together(current_world(), tap_here, "cannot stream its tables", error=UnsupportedModelError)
        assert tap is not None
        tap.names = frozenset(part.fqn for report in reports for part in report.parts)
        if not has_dense:
            check_has_new(tap)
        if len(reports) == 1:
            check_names(selection.unmatched, selection.names)
        else:
            _check_reports(reports, may_have_none=has_dense)
    except BaseException:
        if tap is not None:
            tap.close()
        raise
    return tap


def is_attached_again(tap: Tap) -> bool:
    """Return whether a tap is of a model that an earlier tap has."""
    return isinstance(tap, _ModelTap) and tap.joined is not None


def check_has_new(tap: Tap) -> None:
    """Refuse a tap that has no table on any rank, of a model that an earlier tap has; all ranks do so alike.

    Raises:
        UnsupportedModelError: There is nothing new in the model.
    """
    if isinstance(tap, _ModelTap) and tap.joined is not None and not tap.names:
        check_untapped(tap.joined._modules)
        raise UnsupportedModelError("the model is streamed already, with nothing new on any rank: do not attach again")


class _ModelTap:
    """The taps of all kinds on one model, and its step boundary."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        on_step: Callable[[], None],
        selection: Selection,
        *,
        is_streamed: bool,
        has_dense: bool,
        dirty: Dirty | None,
        owner: Any,
        earlier: Sequence[_ModelTap],
    ) -> None:
        sources = _Sources(model, selection)
        if not is_streamed and any(fused.synced_by is not None for fused in sources.fused):
            raise UnsupportedModelError(
                "a DMPCollection has copies of each row, of which only one would be restored: load its tables from an "
                "export, on every rank (docs/export.md)"
            )
        # The modules inside sharded ones too, because `install` could stream one of those alone.
        found = {module for _, module in sources.modules}
        inner = [(fused.names, fused.module) for fused in sources.fused if fused.module not in found]
        self._modules = [*sources.modules, *inner]
        self._model = model
        self.joined = joined = next((each for each in earlier if each.is_of(model, self._modules)), None)
        if joined is not None:
            sources.leave_out(earlier)
            tapped = {module for each in earlier for _, module in each._modules}
            self._modules = [(path, module) for path, module in self._modules if module not in tapped]
        check_untapped(self._modules)
        self._new_tables = NewTables(model, optimizers, selection)
        self._unstreamed = {
            each.path: each.reason for each in sources.unstreamed if not (has_dense and each.has_parameters)
        }
        bare = bare_parameters(model, optimizers, [path for path, _ in sources.modules])
        left_out = selection.note_left_out(bare)
        for name in selection.unmatched:
            if name in bare:
                raise ConfigError(
                    f"tables: {name!r} is a parameter outside of embedding modules: make it the weight of an "
                    f"nn.Embedding (`self.t = nn.Embedding(...)`, used as `self.t(ids)` or `self.t.weight`), or "
                    f"publish it with dense=True (docs/dense.md)"
                )
        self._boundary: StepBoundary | None = None
        self._on_leave: list[Callable[[], None]] = []  # if the boundary is that of an earlier tap
        self._untapped: UntappedTables | None = None
        self._parts: list[FbgemmTap | TorchOptimTap] = []
        self._syncs: list[Override] = []
        self._synced: SyncedCopies | None = None
        try:
            by_sync: dict[Any, list[FbgemmTap]] = {}
            for fused in sources.fused:
                tap = FbgemmTap(fused, note_update=self._note_update, dirty=dirty)
                self._parts.append(tap)
                if fused.synced_by is not None:
                    by_sync.setdefault(fused.synced_by, []).append(tap)
            for synced_by, taps in by_sync.items():
                self._syncs.append(hook_sync(synced_by, functools.partial(_mark_all, taps)))
                if is_streamed:
                    rows = describe_rows([table for tap in taps for table in tap.tables])
                    _log.warning("each sync() of DMPCollection may change every row, so all are sent: %s", rows)
            self._synced = SyncedCopies(sources.synced) if is_streamed and joined is None else None
            self._of_torch = of_torch = TorchOptimTap(
                sources.parameters, optimizers, self._note_update, self._finish_step, dirty=dirty
            )
            self._parts.append(of_torch)
            self.tables = [table for part in self._parts for table in part.tables]
            for table in self.tables:
                if uses := sources.uses.get(table.path):
                    table.spec = table.spec.described(encode_uses(uses))
            self.names = frozenset(table.spec.fqn for table in self.tables)
            may_have_none = has_dense or sources.has_sharded or _world_size() > 1 or bool(selection.unmatched)
            may_have_none = may_have_none or joined is not None  # `check_has_new` asks for all ranks
            if is_streamed and joined is None:
                warn_unstreamed(sources.unstreamed, has_dense=has_dense)
            _check_tables(self.tables, may_have_none=may_have_none)
            self.has_optimizers = bool(optimizers)
            # After the taps: hooks run in the order of registration, and a boundary needs all rows to be marked.
            is_alone = _world_size() == 1
            if joined is not None and joined._boundary is not None:
                self._boundary = joined._boundary
                self._on_leave.append(self._boundary.join(optimizers, sweep=self.sweep))
                self._on_leave += [each._of_torch.let_go(of_torch.parameter_ids) for each in earlier]
            else:
                self._boundary = StepBoundary(on_step, model, optimizers, sweep=self.sweep, is_alone=is_alone)
            if (
                selection.is_of_all and not has_dense and joined is None
            ):  # otherwise the user has named the tables, or published the rest
                told = {name: each for name, each in bare.items() if name not in left_out}
                self._untapped = UntappedTables(told, optimizers)
        except BaseException:
            self.close()
            raise
        add_tapped(self._modules, owner)
        if is_streamed:
            for part in self._parts:
                part.warn_wide_reach()
            warn_frozen([source.parts[0].fqn for source in of_torch.frozen])

    @property
    def unstreamed(self) -> Mapping[str, str]:
        return self._unstreamed if self._untapped is None else self._unstreamed | self._untapped.found

    def new_tables(self) -> list[str]:
        return [*self._of_torch.new_tables(), *self._new_tables.find(self._of_torch.parameter_ids)]

    def copies(self) -> list[TableCopy]:
        return self._of_torch.copies() + ([] if self._synced is None else self._synced.copies())

    def is_of(self, model: nn.Module, modules: Iterable[tuple[str, nn.Module]]) -> bool:
        """Return whether this taps a model, or one of its modules."""
        return self._model is model or any(module is other for _, module in self._modules for _, other in modules)

    def end_step(self) -> bool:
        return self._boundary is not None and self._boundary.end_step()

    def sweep(self) -> None:
        for part in self._parts:
            part.sweep()

    def close(self) -> None:
        if self._boundary is not None:
            if not self._on_leave:
                self._boundary.close()
            for leave in self._on_leave:
                leave()
            self._boundary = None
            remove_tapped(self._modules)
        if self._untapped is not None:
            self._untapped.close()
        if self._synced is not None:
            self._synced.close()
        for sync in self._syncs:
            sync.remove()
        for part in self._parts:
            part.close()

    def _note_update(self) -> None:
        if self._boundary is not None:
            self._boundary.note_update()

    def _finish_step(self) -> None:
        if self._boundary is not None:
            self._boundary.finish()


class _Sources:
    """The tables of a model, by what updates them."""

    def __init__(self, model: nn.Module, selection: Selection) -> None:
        self._selection = selection
        self.modules: list[tuple[str, nn.Module]] = []  # those that hold tables, with their paths
        self.fused: list[FusedTables] = []
        self.unstreamed: list[Unstreamed] = []
        self.synced: list[SyncedTables] = []
        self.has_sharded = False  # tables of sharded modules may all be on other ranks
        self.uses: dict[str, list[TableUse]] = {}  # by a table's name
        self._uses_in: dict[nn.Module, TableUse] = {}  # by a module inside of a collection
        self._parameters: dict[int, TableParameter] = {}
        self._collisions: dict[nn.Module, Any] = {}  # what gives rows to raw ids, by the table's module
        collisions: dict[nn.Module, Any] = {}
        found_modules = list(named_modules(model))
        self._places = ModulePlaces(model)
        for found in found_modules:  # first: a module may spoil tables that are found before it
            if spoiled := spoiled_at(found.path, found.module, is_alone=_world_size() == 1):
                selection.spoil(*spoiled)
        for found in found_modules:
            path, module = found.path, found.module
            if managed := managed_collisions(module):
                collisions[managed[0]] = managed[1]
            self._collisions |= unsharded_collisions(module)
            self._uses_in |= uses_in_collection(module)
            if is_sharded(module):
                has_tables = self._add_sharded(found, module, collisions.get(module))
            elif is_table_batched(module):
                has_tables = self._add_table_batched(path, module)
            elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
                has_tables = self._add_embedding(found, module)
            else:
                has_tables = False
                if not has_sharded(module) and (unstreamed := unstreamed_module(path, module)):
                    self.unstreamed.append(unstreamed)
            if has_tables:
                self.modules.append((path, module))
        self.unstreamed = check_unstreamed(self.unstreamed, selection)

    def leave_out(self, taps: Iterable[_ModelTap]) -> None:
        """Leave out what taps stream already, and what they know to be frozen."""
        modules = {part.module for tap in taps for part in tap._parts if isinstance(part, FbgemmTap)}
        self.fused = [each for each in self.fused if each.module not in modules]
        for tap in taps:
            frozen = {id(each.parameter) for each in tap._of_torch.frozen if not each.parameter.requires_grad}
            for known in tap._of_torch.parameter_ids | frozen:
                self._parameters.pop(known, None)

    @property
    def parameters(self) -> list[TableParameter]:
        return list(self._parameters.values())

    def _weight_check(self, module: nn.Module, parameter: nn.Parameter) -> Callable[[], bool]:
        """Return a function that returns whether a parameter is still the weight of a module of the model."""
        if is_dtensor(parameter):  # fully_shard puts other parameters in its place between a forward and its backward
            return lambda: True
        return WeightPlace(parameter, self._places.of(module))

    def _add_sharded(self, found: FoundModule, module: nn.Module, collisions: Any) -> bool:
        """Add the selected tables of a sharded module; return whether there are any, here or on another rank."""
        self.has_sharded = True
        fused, parameters, unstreamed, synced = sharded_tables(
            found.path, module, self._selection, collisions, found.synced_by
        )
        self.fused += fused
        self.synced += synced
        self.unstreamed += unstreamed
        self._parameters |= {id(each.parameter): each for each in parameters}
        self.uses |= {fqn: [use] for fqn, use in uses_in_sharded(found.path, module).items()}
        return bool(fused or parameters) or self._selection.leaves_none_out

    def _add_table_batched(self, path: str, module: nn.Module) -> bool:
        """Add the selected tables of a table-batched module; return whether there are any."""
        parts = tuple(part if self._selection.takes(part.fqn) else None for part in table_parts(path, module))
        if any(parts):
            self.fused.append(FusedTables(module=module, parts=parts, is_in_use=self._places.of(module)))
        return any(parts)

    def _add_embedding(self, found: FoundModule, module: nn.Embedding | nn.EmbeddingBag) -> bool:
        """Add a table if it is selected; return whether it is."""
        fqn = f"{found.path}.weight" if found.path else "weight"
        if not self._selection.takes(fqn):
            return False
        if module.max_norm is not None:
            raise UnsupportedModelError(
                f"table {fqn!r}: max_norm rescales rows in the forward, also in evaluation, without the optimizer: "
                f"rescale what the look-up returns instead (renorm), or clip the rows after the optimizer's step, "
                f"which sends all of them each time{or_without(fqn)}"
            )
        parameter = _check_parameter(fqn, module.weight, found)
        known = self._parameters.get(id(parameter))  # tied weights are one table, under the first name
        collision = self._collisions.get(module)
        if known and (known.identities is not None or collision is not None):
            raise UnsupportedModelError(
                f"table {fqn!r}: tied weights whose rows are given to raw ids are not streamed: give each its own "
                f"memory{or_without(fqn)}"
            )
        has_weight = self._weight_check(module, parameter)
        use = self._uses_in.get(module) or use_of_embedding(module)
        uses = self.uses.setdefault(known.parts[0].fqn if known and known.parts else fqn, [])
        if use not in uses:
            uses.append(use)
        self._parameters[id(parameter)] = TableParameter(
            parts=known.parts if known else _parts_of(fqn, parameter, found),
            parameter=parameter,
            replica_groups=known.replica_groups if known else _replica_groups_of(parameter, found),
            is_sparse=module.sparse and (known is None or known.is_sparse),
            is_in_use=has_weight if known is None else lambda: known.is_in_use() and has_weight(),
            identities=None if collision is None else identities_of(fqn, collision),
        )
        return True


def _mark_all(taps: Iterable[FbgemmTap]) -> None:
    for tap in taps:
        tap.mark_all()


def _check_parameter(fqn: str, weight: torch.Tensor, found: FoundModule) -> nn.Parameter:
    if found.flattened_by is not None and weight.requires_grad:
        raise UnsupportedModelError(
            f"table {fqn!r} is inside FullyShardedDataParallel, which splits parameters without regard to "
            f"rows: use torch.distributed.fsdp.fully_shard, or keep the table outside of it{or_without(fqn)}"
        )
    if not isinstance(weight, nn.Parameter):
        raise UnsupportedModelError(
            f"table {fqn!r} is computed in each forward (as by pruning): make it a parameter again{or_without(fqn)}"
        )
    return weight


def _parts_of(fqn: str, parameter: nn.Parameter, found: FoundModule) -> tuple[TablePart, ...]:
    if is_dtensor(parameter):
        if found.replicated_by is not None:
            raise UnsupportedModelError(
                f"table {fqn!r} is a DTensor in DistributedDataParallel: use a mesh of all ranks{or_without(fqn)}"
            )
        return dtensor_parts(fqn, parameter)
    num_rows, dim = parameter.shape
    part = TablePart(fqn=fqn, num_rows=num_rows, dim=dim)
    if not parameter.requires_grad or _world_size() == 1:
        return (part,)
    return (replica_part(part, num_rows, _replicas_of(fqn, parameter, found)),)


def _replica_groups_of(parameter: nn.Parameter, found: FoundModule) -> tuple[Any, ...]:
    if is_dtensor(parameter):
        return replica_groups(parameter)
    return () if found.replicated_by is None else (found.replicated_by.process_group,)


def _replicas_of(fqn: str, parameter: nn.Parameter, found: FoundModule) -> Replicas:
    """Return the ranks that keep a plain parameter equal, or refuse it."""
    wrapper = found.replicated_by
    if wrapper is None:
        raise UnsupportedModelError(
            f"table {fqn!r} is on {_world_size()} ranks, and nothing keeps its copies equal: wrap the model in "
            f"DistributedDataParallel and attach the wrapper (in Lightning trainer.strategy.model), or shard the table"
            f"{or_without(fqn)}"
        )
    ignored = wrapper.parameters_to_ignore
    if any(other is parameter and name in ignored for name, other in wrapper.module.named_parameters()):
        raise UnsupportedModelError(
            f"table {fqn!r}: DistributedDataParallel ignores it, so its copies are not equal: take it off the ignored "
            f"parameters{or_without(fqn)}"
        )
    return replicas_in(fqn, wrapper.process_group)


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _check_tables(tables: list[TappedTable], *, may_have_none: bool) -> None:
    if not tables and not may_have_none:
        raise UnsupportedModelError(
            "the model has no embedding table that is trained: nn.Embedding, nn.EmbeddingBag, "
            "FBGEMM SplitTableBatchedEmbeddingBagsCodegen and sharded TorchRec modules are streamed; for the other "
            "parameters say dense=True"
        )
    specs: dict[str, TableSpec] = {}
    parts: set[tuple[str, int, int]] = set()
    for table in tables:
        if not table.num_local_rows:
            continue  # with more ranks than rows, several parts begin at the end
        part = (table.spec.fqn, table.row_offset, table.shard.offset)
        if part in parts:
            raise UnsupportedModelError(
                f"two tables are named {table.spec.fqn!r}: give them different names{or_without(table.spec.fqn)}"
            )
        parts.add(part)
        known = specs.setdefault(table.spec.fqn, table.spec)
        if known != table.spec:
            difference = known.describe_difference(table.spec)
            raise UnsupportedModelError(
                f"two parts of table {table.spec.fqn!r} differ: {difference}: if they are two tables, give them "
                f"different names{or_without(table.spec.fqn)}"
            )


@dataclass(frozen=True, slots=True)
class _Part:
    fqn: str
    fingerprint: int
    column: int
    num_columns: int
    row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class _Report:
    """What a rank streams."""

    parts: tuple[_Part, ...]
    has_optimizers: bool
    names: tuple[str, ...]
    unmatched: tuple[str, ...]

    @classmethod
    def of(cls, tables: Sequence[TappedTable], selection: Selection, *, has_optimizers: bool) -> Self:
        parts = tuple(
            _Part(t.spec.fqn, t.spec.fingerprint, t.shard.offset, t.shard.width, t.row_offset, t.num_local_rows)
            for t in tables
        )
        return cls(parts, has_optimizers, tuple(selection.names), tuple(selection.unmatched))


def _check_reports(reports: list[_Report], *, may_have_none: bool) -> None:
    """Refuse ranks that have the same rows, none of which has any, or that count steps differently."""
    unmatched = [p for p in reports[0].unmatched if all(p in report.unmatched for report in reports)]
    check_names(unmatched, [name for report in reports for name in report.names])
    if not may_have_none and not any(report.parts for report in reports):
        raise UnsupportedModelError(
            f"none of the {len(reports)} ranks has an embedding table that is trained: for other parameters say "
            "dense=True"
        )
    given = [report.has_optimizers for report in reports]
    if any(given) != all(given):
        raise UnsupportedModelError(
            f"rank {given.index(True)} was given optimizers and rank {given.index(False)} none, so the ranks "
            f"would count steps differently: give all ranks the same"
        )
    _check_owners(reports)


def _check_owners(reports: list[_Report]) -> None:
    fingerprints: dict[str, tuple[int, int]] = {}
    by_columns: dict[tuple[str, int, int], list[tuple[int, int, int]]] = {}
    for rank, report in enumerate(reports):
        for part in report.parts:
            fingerprint, first_rank = fingerprints.setdefault(part.fqn, (part.fingerprint, rank))
            if fingerprint != part.fingerprint:
                raise UnsupportedModelError(
                    f"table {part.fqn!r} differs between ranks {first_rank} and {rank}: build the same model on all "
                    f"ranks{or_without(part.fqn)}"
                )
            if part.num_rows:
                key = (part.fqn, part.column, part.num_columns)
                by_columns.setdefault(key, []).append((part.row, part.row + part.num_rows, rank))
    for (fqn, _, _), ranges in by_columns.items():
        ranges.sort()
        for (_, end, rank), (row, _, other) in itertools.pairwise(ranges):
            if row < end:
                raise UnsupportedModelError(
                    f"row {row} of table {fqn!r} is on ranks {rank} and {other}, which would both stream it: give "
                    f"different tables different names, or replicate the table with DistributedDataParallel"
                    f"{or_without(fqn)}"
                )
