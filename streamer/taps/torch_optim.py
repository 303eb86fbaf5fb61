"""Tap on tables that are parameters updated by torch optimizers.

After an optimizer's step, its gradient names the changed rows: the rows of a sparse gradient, or the nonzero rows of a
dense one. That holds for accumulation over several batches, tied weights, forwards without gradient and steps that a
gradient scaler skipped. For optimizers that change more rows than those, `optimizer_rules` widens the set. If it is not
known what an optimizer changes, all rows are marked after its step, whatever the gradient.

Writes without a gradient (loading a checkpoint, a clamp by hand) show in the version that torch counts on every tensor,
or in probed rows (`RowProbe`). They mark all rows.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from headrace.kernels.dirty_sets import DirtyRows
from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.device.dirty_rows import DeviceBitmap, DeviceDirtyRows
from headrace.streamer.taps.collisions import IdentitySource, Removable
from headrace.streamer.taps.guards.hidden_writes import RowProbe, check_not_aliased, check_not_shared
from headrace.streamer.taps.guards.seen_writes import SeenWrites
from headrace.streamer.taps.guards.unattached_steps import UnattachedSteps
from headrace.streamer.taps.hooks import StepHooks
from headrace.streamer.taps.local_parts import TableCopy, cuts_columns, dtensor_rows, is_dtensor, local_tensor
from headrace.streamer.taps.model_tree import or_without
from headrace.streamer.taps.optimizer_rules import (
    Dirty,
    Reach,
    Rule,
    changed_rows,
    group_of,
    nonzero_rows,
    owners_of,
    rule_for_rows,
)
from headrace.streamer.taps.tapped_table import TablePart, TappedTable, describe_rows, tap_part, zero_state

__all__ = ["TableParameter", "TorchOptimTap", "TrackedParameter", "warn_unknown_reach"]

_log = logging.getLogger(__name__)

# Rows to mark of tables on a device, by bitmap.
_Marks = dict[DeviceBitmap, list[tuple[DeviceDirtyRows, torch.Tensor]]]

# Number of tables with a probe, which costs 30 µs a step. Whoever copies a model copies all its tables.
_MAX_PROBED = 8
# Replicas get rows in pieces of this size.
_SHARE_BYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class TableParameter:
    """A parameter, `[rows, columns]`, that is an embedding table; may be a DTensor."""

    # What this rank streams: one part, none, or several that do not overlap.
    parts: tuple[TablePart, ...]
    parameter: torch.nn.Parameter
    # Whether its gradient is expected to be sparse.
    is_sparse: bool
    # Why no fused optimizer trains it, for messages.
    why_unfused: str = ""
    # Process groups in which all ranks hold the same rows, of which each streams its share; the innermost first.
    replica_groups: tuple[Any, ...] = ()
    # Returns whether the model still uses it, and no other parameter in its place.
    is_in_use: Callable[[], bool] = lambda: True
    # Of a zero-collision-hash table, of which this rank has all rows.
    identities: IdentitySource | None = None


@dataclass(kw_only=True, slots=True)
class _TrackedPart:
    part: TablePart
    table: TappedTable
    # Rows with nonzero states, if the optimizer keeps moving them; else empty.
    touched: DirtyRows | DeviceDirtyRows

    def colocated_touched(self) -> DirtyRows | DeviceDirtyRows:
        """Return `touched`, moved to where the table's dirty rows are; a move waits for the device."""
        dirty, touched = self.table.dirty, self.touched
        if isinstance(dirty, DeviceDirtyRows):
            if not isinstance(touched, DeviceDirtyRows):
                self.touched = DeviceDirtyRows.beside(dirty)
                self.touched.add(touched)
        elif isinstance(touched, DeviceDirtyRows):
            self.touched = touched.to_host()
        return self.touched


@dataclass(kw_only=True, slots=True)
class TrackedParameter:
    """A parameter and the optimizer that updates it."""

    source: TableParameter
    optimizer: torch.optim.Optimizer
    rule: Rule
    # Names of the row states, and whether each is rowwise.
    states: tuple[tuple[str, bool], ...]
    # Each step marks every row, whatever its gradient.
    marks_all: bool = False
    parts: list[_TrackedPart] = field(default_factory=list)
    # The `snapshot` when all writes so far were marked.
    seen: tuple[int, ...] = ()
    # A freed storage leaves its address to the next one. These keep the storage objects alive, though not their memory.
    storages: list[StorageWeakRef] = field(default_factory=list)
    has_warned: bool = field(default=False)
    # Dirty rows are marked on a device, and nothing waits for their number.
    is_on_device: bool = field(default=False)
    probe: RowProbe | None = None
    # Type of another optimizer that has trained the table since.
    other_optimizer: str | None = None
    parameter: torch.nn.Parameter = field(init=False)  # not a property: read several times a step

    def __post_init__(self) -> None:
        self.parameter = self.source.parameter

    @property
    def name(self) -> str:
        """The table's name."""
        return self.source.parts[0].fqn

    def made(self) -> dict[str, torch.Tensor]:
        """Return the local tensors of the row states that the optimizer has created so far."""
        state = self.optimizer.state.get(self.parameter, {})
        return {name: local_tensor(state[name]) for name, _ in self.states if _is_rows(state.get(name))}

    def tensors(self) -> list[torch.Tensor]:
        """Return the weights and the row states created so far."""
        state = self.optimizer.state.get(self.parameter, {})
        return [self.parameter, *(state[name] for name, _ in self.states if _is_rows(state.get(name)))]

    def snapshot(self) -> tuple[int, ...]:
        """Return numbers that differ after any of its tensors was written in place or replaced."""
        numbers: list[int] = []
        for tensor in self.tensors():
            # A DTensor counts its own writes; its local tensor counts those made directly to it.
            local = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
            numbers += (local.untyped_storage()._cdata, local.data_ptr(), tensor._version, local._version)
        return tuple(numbers)

    def is_written(self) -> bool:
        """Return whether the parameter was written in place since `note_seen`."""
        return not self.seen or self.seen[2] != self.parameter._version

    def note_seen(self, now: tuple[int, ...]) -> None:
        """Remember the present `snapshot`. REQUIRES: all writes to its tensors are marked."""
        if now[::4] != self.seen[::4]:
            storages = [local_tensor(tensor).untyped_storage() for tensor in self.tensors()]
            self.storages = [StorageWeakRef(storage) for storage in storages]  # type: ignore[no-untyped-call]
        self.seen = now
        if self.probe is not None:
            self.probe.remember(local_tensor(self.parameter))

    def probe_has_changed(self) -> bool:
        """Return whether a probed row has changed. REQUIRES: the snapshot has not."""
        return self.probe is not None and self.probe.has_changed(local_tensor(self.parameter))

    def check_optimizer(self) -> None:
        """Check that no other optimizer has trained the table; its states would be the other's.

        Raises:
            UnsupportedModelError: One has.
        """
        if self.other_optimizer is not None:
            raise UnsupportedModelError(
                f"table {self.name!r} is trained by another optimizer ({self.other_optimizer}) than the one attached "
                f"({type(self.optimizer).__name__}): attach the model and its new optimizer to a new streamer"
            )

    def backing(self) -> list[torch.Tensor]:
        """Return the local tensors whose parts are the tables' weights and states; raise as `check_optimizer`."""
        self.check_optimizer()
        if not self.states and not is_dtensor(self.parameter):
            return [self.parameter]
        return [local_tensor(self.parameter), *self.made().values()]

    def group(self) -> dict[str, Any] | None:
        """Return the optimizer's present settings for this table; None if it no longer has the table."""
        return group_of(self.optimizer, self.parameter)

    def note_move(self) -> None:
        """Record that a part's dirty rows moved to or from a device."""
        self.is_on_device = any(isinstance(part.table.dirty, DeviceDirtyRows) for part in self.parts)
        self.probe = None  # reading rows would wait for the device

    def mark(self, rows: torch.Tensor) -> None:
        """Mark rows, int64[n]. REQUIRES: all of the parameter is one part."""
        (part,) = self.parts
        part.table.dirty.mark(rows)

    def mark_all(self) -> None:
        """Mark every row, and find the touched rows again."""
        for part in self.parts:
            part.table.mark_all()
        if self.reach() is not Reach.GRADIENT and not self.marks_all:
            self.find_touched()

    def reach(self) -> Reach:
        """Return which rows a step may change with the present settings."""
        group = None if self.marks_all else self.group()
        if group is None:
            return Reach.ALL
        return self.rule.reach(group, self.parameter.dtype, self.source.is_sparse)

    def find_touched(self) -> None:
        """Find the rows with nonzero states."""
        for part in self.parts:
            touched = part.colocated_touched()
            touched.clear()
            for name, state in self.made().items():
                if self.fits(name, state):
                    touched.mark(nonzero_rows(part.part.rows(state), waits=not self.is_on_device))

    def create_states(self) -> None:
        """Create the states that the optimizer's first step creates, where there are none yet."""
        group = self.group()
        assert group is not None, "`_track` has found it"
        known = self.optimizer.state.get(self.parameter, {})
        created = self.rule.first_scalars(group, self.parameter)
        for name, _ in self.states:
            if known.get(name) is None:
                created[name] = torch.zeros_like(self.parameter, memory_format=torch.preserve_format)
        for name, value in created.items():
            if known.get(name) is None:
                self.optimizer.state[self.parameter][name] = value

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Set the values kept once per table, by name, as far as the optimizer has them now."""
        state = self.optimizer.state.get(self.parameter, {})
        for name in [name for name in self.rule.scalars if name in scalars and state.get(name) is not None]:
            if isinstance(present := state[name], torch.Tensor):
                local_tensor(present).fill_(scalars[name])
            else:
                state[name] = type(present)(scalars[name])

    def share_rows(self) -> None:
        """Send this rank's rows, with their states, to the replicas on other ranks, and receive theirs."""
        tensors = [local_tensor(self.parameter), *self.made().values()]
        parts = [part.part for part in self.parts]
        first = min(part.first_row for part in parts)
        end = max(part.first_row + (part.num_local_rows or 0) for part in parts)
        for group in self.source.replica_groups:
            spans: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(spans, (first, end), group=group)
            for member, span in enumerate(spans):
                for tensor in tensors:
                    _broadcast_rows(tensor[slice(*span)], dist.get_global_rank(group, member), group)
            held = [span for span in spans if span[0] < span[1]]
            first, end = (min(first for first, _ in held), max(end for _, end in held)) if held else (0, 0)

    def copies(self) -> list[TableCopy]:
        """Return the rows that each of the replica groups keeps equal."""
        if not self.source.replica_groups:
            return []
        num_rows = local_tensor(self.parameter).shape[0]
        runs = dtensor_rows(self.name, self.parameter) if is_dtensor(self.parameter) else ((0, num_rows),)
        groups = [tuple(sorted(dist.get_process_group_ranks(group))) for group in self.source.replica_groups]
        return [TableCopy(fqn=self.name, ranks=ranks, runs=runs, tensors=self._copied) for ranks in groups]

    def _copied(self) -> list[torch.Tensor]:
        """Return the local weights and states; zeros for states that the optimizer creates in its first step."""
        weights, made = local_tensor(self.parameter), self.made()
        num_rows, num_columns = weights.shape
        return [
            weights,
            *(
                made[name]
                if name in made
                else zero_state(num_rows, 1 if is_row else num_columns, weights.dtype, weights.device)
                for name, is_row in self.states
            ),
        ]

    def fits(self, name: str, state: torch.Tensor) -> bool:
        """Return whether a state has the shape that the optimizer gives it; a flush refuses any other."""
        num_rows, num_columns = local_tensor(self.parameter).shape
        return state.shape == (num_rows, 1 if dict(self.states)[name] else num_columns)


def _broadcast_rows(rows: torch.Tensor, source: int, group: Any) -> None:
    """Copy `[n, width]` from rank `source` to the other ranks of a group, which have as many rows."""
    if not rows.numel():
        return
    for piece in torch.split(rows, max(1, _SHARE_BYTES // (rows.shape[1] * rows.element_size()))):
        whole = piece.contiguous()  # a copy only if the tensor is a view of columns
        dist.broadcast(whole, source, group=group)
        if whole.data_ptr() != piece.data_ptr():
            piece.copy_(whole)


def _is_rows(state: torch.Tensor | None) -> bool:
    # A sparse state (momentum over sparse gradients) has no row for each row of the table: it is not streamed.
    return state is not None and not state.is_sparse


@dataclass(frozen=True, slots=True)
class _Effect:
    """What a step does to the tables of one param group, dtype and kind of gradient."""

    refusal: str | None
    states: tuple[tuple[str, bool], ...]
    reach: Reach

    @classmethod
    def of(cls, rule: Rule, group: dict[str, Any], dtype: torch.dtype, is_sparse: bool) -> _Effect:
        refusal = rule.refuse(group, dtype, is_sparse)
        return cls(refusal, rule.states(group), rule.reach(group, dtype, is_sparse))


def warn_unknown_reach(kind: str, rows: str, *, word: str, rest: str = "") -> None:
    """Log that an optimizer is not known, and what that costs."""
    text = (
        "it is not known which rows a step of %s changes, so each streams all rows of %s%s; if you know, say dirty=%r"
    )
    _log.warning(text, kind, rows, rest, word)


class TorchOptimTap:
    """Marks the rows that torch optimizers update, in the tables of each trained parameter."""

    def __init__(
        self,
        parameters: Iterable[TableParameter],
        optimizers: Iterable[torch.optim.Optimizer],
        note_update: Callable[[], None],
        end_step: Callable[[], None],
        *,
        dirty: Dirty | None = None,
    ) -> None:
        """Check that every table can be streamed exactly, then register hooks. An error leaves no hook.

        Frozen tables are streamed only if one of the optimizers has them. Optimizers applied in `backward()` are found
        without being named. `note_update` is called after marks, `end_step` after a step of an unattached optimizer, so
        that the flush reports it. `dirty` says what steps of unknown optimizers change; `all` is said of every
        optimizer.

        Raises:
            UnsupportedModelError: A table has none or several optimizers, or its optimizer has no exact rule.
        """
        parameters = list(parameters)
        self._optimizers = optimizers = list(optimizers)
        self._note_update, self._end_step = note_update, end_step
        self._handles: list[Removable] = []
        self._tracked: list[TrackedParameter] = []
        self._frozen: list[TableParameter] = []
        # Frozen tables that need a gradient by now, and the frozen ones' versions at attach.
        self._thawed: list[TableParameter] = []
        self._versions: dict[int, int] = {}
        for source in [source for source in parameters if source.parts]:  # a rank may hold none of a table's rows
            if source.parameter.requires_grad:
                self._tracked.append(_track(source, optimizers, dirty))
            elif (frozen := _track_frozen(source, optimizers, dirty)) is not None:
                self._tracked.append(frozen)
            else:
                self._frozen.append(source)
                self._versions[id(source.parameter)] = source.parameter._version
        others = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
        check_not_aliased([(each.name, each.parameter) for each in self._tracked], others)
        self.tables = [part.table for tracked in self._tracked for part in tracked.parts]
        self.parameter_ids = frozenset(id(tracked.parameter) for tracked in self._tracked)
        by_optimizer: dict[int, list[TrackedParameter]] = {}
        for place, tracked in enumerate(self._tracked):
            tracked.probe = RowProbe() if place < _MAX_PROBED else None
            tracked.note_seen(tracked.snapshot())
            by_optimizer.setdefault(id(tracked.optimizer), []).append(tracked)
        self._unattached_steps = UnattachedSteps(self._tracked, sweep=self._sweep, on_step=self._on_unattached_step)
        self._seen_writes = [SeenWrites(tables) for tables in by_optimizer.values()]
        for tables, seen in zip(by_optimizer.values(), self._seen_writes, strict=True):
            self._register(tables[0].optimizer, tables, seen)
        for tracked in self._tracked:
            if (identities := tracked.source.identities) is not None:
                self._handles += identities.watch(tracked.mark)

    def sweep(self) -> None:
        """Mark all rows of tables written since their last step by something other than their optimizer."""
        for seen in self._seen_writes:
            self._sweep_all(seen)
        for tracked in self._tracked:
            identities = tracked.source.identities
            if identities is not None and (slots := identities.take_reassigned()) is not None:
                tracked.mark(slots)
                self._note_update()
        for source in [source for source in self._frozen if source.parameter.requires_grad]:
            self._frozen.remove(source)
            self._thawed.append(source)
            warnings.warn(
                f"table {source.parts[0].fqn!r} was frozen when the streamer was attached and is not streamed, "
                f"but it is trained now: attach again",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def frozen(self) -> list[TableParameter]:
        """Tables that are not streamed, because they were frozen when this was made."""
        return [*self._frozen, *self._thawed]

    def copies(self) -> list[TableCopy]:
        """Return the rows that this rank and others keep equal."""
        return [copy for tracked in self._tracked for copy in tracked.copies()]

    def let_go(self, parameter_ids: Collection[int]) -> Callable[[], None]:
        """Look after frozen tables no more, because another tap has them; return what takes them back."""
        gone = [source for source in self.frozen if id(source.parameter) in parameter_ids]
        self._frozen = [source for source in self._frozen if id(source.parameter) not in parameter_ids]
        self._thawed = [source for source in self._thawed if id(source.parameter) not in parameter_ids]
        return lambda: self._thawed.extend(gone)

    def new_tables(self) -> list[str]:
        """Return the names of the tables that were frozen and that are trained now."""
        thawed = [source for source in self.frozen if source.parameter.requires_grad]
        return [source.parts[0].fqn for source in thawed if self._is_trained(source.parameter)]

    def _is_trained(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether an attached optimizer has a parameter by now, or anything has written it."""
        has_one = any(group_of(optimizer, parameter) is not None for optimizer in self._optimizers)
        return has_one or parameter._version != self._versions[id(parameter)]

    def warn_wide_reach(self) -> None:
        """Log, for each optimizer and reach, the tables of which more than the batches' rows are streamed."""
        found: dict[tuple[str, bool, Reach], list[TrackedParameter]] = {}
        for each in self._tracked:
            if (reach := each.reach()) is not Reach.GRADIENT:
                found.setdefault((type(each.optimizer).__name__, each.rule.is_known, reach), []).append(each)
        for (kind, is_known, reach), of_kind in found.items():
            rows = describe_rows([part.table for each in of_kind for part in each.parts])
            if is_known:
                _log.warning("each step of %s may change %s of a table, and streams these: %s", kind, reach.value, rows)
            else:
                warn_unknown_reach(kind, rows, word="gradients", rest=", without states of the optimizer")

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._unattached_steps.close()

    def _register(
        self, optimizer: torch.optim.Optimizer, tracked: list[TrackedParameter], seen_writes: SeenWrites
    ) -> None:
        by_rows = [each for each in tracked if not each.marks_all]
        whole = [each for each in tracked if each.marks_all]

        def before_update() -> None:
            self._sweep_all(seen_writes)

        def after_update(is_exact: bool) -> None:
            if whole:
                self._mark_all(whole)
            if is_exact:
                self._mark(optimizer, by_rows)
            else:  # something else can have written since the last sweep
                self._mark_all(tracked)
            # Only now: if the marking is interrupted, the next sweep finds the tables changed and marks every row.
            seen_writes.note_seen()
            self._unattached_steps.note_attached_step()

        def after_load(*_: Any) -> None:
            # New tensors may happen to have the addresses and versions of the old ones.
            for each in tracked:
                each.seen = ()

        self._handles.append(optimizer.register_load_state_dict_post_hook(after_load))
        self._handles.append(StepHooks(optimizer, before=before_update, after=after_update))

    def _on_unattached_step(self, tables: list[TrackedParameter], kind: str) -> None:
        for tracked in tables:
            tracked.other_optimizer = kind
            self._sweep(tracked)
        self._end_step()

    def _sweep_all(self, seen_writes: SeenWrites) -> None:
        """Sweep the tables of one optimizer."""
        for tracked in seen_writes.suspects():
            self._sweep(tracked)

    def _sweep(self, tracked: TrackedParameter) -> None:
        if tracked.snapshot() != tracked.seen or not tracked.source.is_in_use():
            written = [tracked]
        elif tracked.probe_has_changed():
            written = self._tracked  # values were copied into the model, and not all its tables have a probe
        else:
            return
        if tracked.group() is None:  # its optimizer no longer has it: perhaps another attached one does
            others = [each for each in self._optimizers if group_of(each, tracked.parameter) is not None]
            tracked.other_optimizer = type(others[0]).__name__ if others else tracked.other_optimizer
        self._mark_all(written)
        for each in written:
            each.note_seen(each.snapshot())

    def _mark_all(self, tables: list[TrackedParameter]) -> None:
        for each in tables:
            each.mark_all()
        self._note_update()

    def _mark(self, optimizer: torch.optim.Optimizer, tables: list[TrackedParameter]) -> None:
        """Mark what an update has changed. REQUIRES: nothing else has written its tables since the last sweep."""
        groups = {id(each): group for group in optimizer.param_groups for each in group["params"]}
        effects: dict[tuple[int, torch.dtype, bool], _Effect] = {}
        marks: _Marks = {}
        for each in tables:
            gradient = each.parameter.grad
            group = groups.get(id(each.parameter))
            if gradient is None or group is None:  # the optimizer skips it, or no longer has it
                continue
            if not effects:
                self._note_update()
            key = (id(group), each.parameter.dtype, gradient.is_sparse)
            if (effect := effects.get(key)) is None:
                effect = effects[key] = _Effect.of(each.rule, group, *key[1:])
            self._mark_rows(each, effect, gradient, marks)
        for bitmap, of_tables in marks.items():
            bitmap.mark_tables(of_tables)

    def _mark_rows(self, tracked: TrackedParameter, effect: _Effect, gradient: torch.Tensor, marks: _Marks) -> None:
        """Mark what the update has changed in one table; `marks` gets rows to mark with other tables' rows."""
        parameter, reason, reach = tracked.parameter, effect.refusal, effect.reach
        if reason is None and effect.states != tracked.states:
            before, now = (", ".join(name for name, _ in each) or "none" for each in (tracked.states, effect.states))
            reason = f"states were {before} and are {now}"
        if reason is not None:
            _warn_once(tracked, reason)
            tracked.mark_all()
            return
        if reach is Reach.ALL:
            for part in tracked.parts:
                part.table.mark_all()
                # The setting may change back, and the states that it leaves would keep moving rows.
                part.colocated_touched().mark_all()
            return
        ids = changed_rows(gradient, parameter, waits=not tracked.is_on_device)
        if tracked.probe is not None:
            tracked.probe.watch(ids)
        for part in tracked.parts:
            local_ids = part.part.row_ids_or_none(ids) if tracked.is_on_device else part.part.row_ids(ids)
            if reach is Reach.TOUCHED:
                touched = part.colocated_touched()
                touched.mark(local_ids)
                part.table.dirty.add(touched)  # type: ignore[arg-type]
            elif gradient.is_sparse and isinstance(dirty := part.table.dirty, DeviceDirtyRows):
                # Not for dense gradients: their ids, 8 bytes per row of each table, would all be in memory at once.
                marks.setdefault(dirty.bitmap, []).append((dirty, local_ids))
            else:
                part.table.dirty.mark(local_ids)


def _track(source: TableParameter, optimizers: list[torch.optim.Optimizer], dirty: Dirty | None) -> TrackedParameter:
    """Find the one optimizer of a table and describe the table, or refuse it."""
    parameter, fqn = source.parameter, source.parts[0].fqn
    owners = owners_of(parameter, optimizers)
    if len(owners) != 1:
        names = " and ".join(type(owner).__name__ for owner, _ in owners)
        raise UnsupportedModelError(
            f"table {fqn!r} is updated by {len(owners)} optimizers ({names}): train it with one{or_without(fqn)}"
            if owners
            else f"table {fqn!r} is trained by none of the given optimizers{source.why_unfused}: "
            f"give the one that trains it, or freeze it with requires_grad_(False){or_without(fqn)}"
        )
    ((optimizer, group),) = owners
    try:
        rule = rule_for_rows(optimizer, dirty)
    except UnsupportedModelError as exc:
        raise UnsupportedModelError(f"table {fqn!r}: {exc}{or_without(fqn)}") from None
    marks_all = dirty == "all" or (dirty is None and not rule.is_known)
    tracked = TrackedParameter(
        source=source, optimizer=optimizer, rule=rule, states=rule.states(group), marks_all=marks_all
    )
    reason = rule.refuse(group, parameter.dtype, source.is_sparse)
    if cuts_columns(parameter) and any(is_rowwise for _, is_rowwise in tracked.states):
        reason = "the rowwise states of a DTensor cut by columns are sums over ranks: cut it by rows"
    if reason is not None:
        raise UnsupportedModelError(
            f"table {fqn!r} with {type(optimizer).__name__} cannot be streamed exactly: {reason}{or_without(fqn)}"
        )
    check_not_shared([fqn], [parameter])
    tracked.parts = [_part(tracked, part) for part in source.parts]
    if tracked.reach() is not Reach.GRADIENT and not marks_all:
        tracked.find_touched()
    return tracked


def _track_frozen(
    source: TableParameter, optimizers: list[torch.optim.Optimizer], dirty: Dirty | None
) -> TrackedParameter | None:
    """Track a frozen table that an optimizer has and will train once it is unfrozen; None if it cannot be streamed.

    Copies on several ranks cannot: `DistributedDataParallel` leaves what is frozen at its construction unequal.
    """
    has_copies = torch.distributed.is_initialized() and not is_dtensor(source.parameter)
    if (has_copies and dist.get_world_size() > 1) or not owners_of(source.parameter, optimizers):
        return None
    try:
        return _track(source, optimizers, dirty)
    except UnsupportedModelError as exc:
        _log.debug("a frozen table is left out: %s", exc)
        return None


def _part(tracked: TrackedParameter, part: TablePart) -> _TrackedPart:
    dtype, made = tracked.parameter.dtype, tracked.made()
    local_shape = local_tensor(tracked.parameter).shape
    num_rows = local_shape[0] if part.num_local_rows is None else part.num_local_rows
    num_columns = local_shape[1] if part.num_local_columns is None else part.num_local_columns
    table = tap_part(
        part,
        num_local_rows=num_rows,
        num_columns=num_columns,
        dtype=dtype,
        states_of=[(name, made[name].dtype if name in made else dtype, is_row) for name, is_row in tracked.states],
        weights=lambda: part.columns(part.rows(_weights(tracked))),
        is_in_use=tracked.source.is_in_use,
        backing=tracked.backing,
        states=lambda: _states(tracked, part, num_rows, num_columns),
        identities=tracked.source.identities,
        scalars=lambda: tracked.rule.scalars_in(tracked.optimizer.state.get(tracked.parameter, {})),
        holder=tracked,
    )
    table.on_move = tracked.note_move
    return _TrackedPart(part=part, table=table, touched=DirtyRows(num_rows))


def _weights(tracked: TrackedParameter) -> torch.Tensor:
    """Return the live local weights, or refuse them if the attached optimizer no longer has their states."""
    tracked.check_optimizer()
    return local_tensor(tracked.parameter)


def _states(tracked: TrackedParameter, part: TablePart, num_rows: int, num_columns: int) -> dict[str, torch.Tensor]:
    """Return the live states; zeros for those that the optimizer creates in its first step."""
    parameter, made = tracked.parameter, tracked.made()
    states = {}
    for name, is_rowwise in tracked.states:
        if name not in made:
            width = 1 if is_rowwise else num_columns
            states[name] = zero_state(num_rows, width, parameter.dtype, parameter.device)
        elif not tracked.fits(name, made[name]):
            shape, weights = list(made[name].shape), list(local_tensor(parameter).shape)
            raise UnsupportedModelError(
                f"state {name!r} of table {part.fqn!r} is {shape}, its weights are {weights}: attach the model with "
                f"its new optimizer to a new streamer{or_without(part.fqn)}"
            )
        else:
            rows = part.rows(made[name])
            states[name] = rows if is_rowwise else part.columns(rows)
    return states


def _warn_once(tracked: TrackedParameter, reason: str) -> None:
    if not tracked.has_warned:
        tracked.has_warned = True
        warnings.warn(
            f"table {tracked.name!r}: since the streamer was attached, settings of "
            f"{type(tracked.optimizer).__name__} changed: {reason}. From now on every row is streamed after each step; "
            f"the states that the optimizer keeps for this setting are not.",
            RuntimeWarning,
            stacklevel=2,
        )
