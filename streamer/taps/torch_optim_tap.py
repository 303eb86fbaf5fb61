"""Tap on tables that are parameters updated by torch optimizers.

The gradient tells the truth: after an optimizer's step, the rows of a sparse gradient, or the rows of a dense one with
an element that is not zero, are the rows that changed. That holds whatever led to the gradient: accumulation over
several batches, tied weights, forwards without gradient, and steps that a gradient scaler skipped. Optimizers that
change more rows than those widen the set, see `optimizer_rules`.

What changes a table without a gradient (loading a checkpoint, a clamp by hand) shows in the version that torch counts
on every tensor, or in rows that are looked at (`RowProbe`): then all rows are marked.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from headrace.kernels.dirty_rows import DirtyRows
from headrace.schemas.errors import UnsupportedModelError
from headrace.schemas.near_names import first_of
from headrace.schemas.tables import ColumnShard, TableSpec
from headrace.streamer.device.device_dirty_rows import DeviceBitmap, DeviceDirtyRows
from headrace.streamer.taps.followed_parameter import FollowedParameter, FollowedPart, TableParameter, group_of
from headrace.streamer.taps.foreign_steps import ForeignSteps
from headrace.streamer.taps.local_parts import is_dtensor, local_tensor
from headrace.streamer.taps.nonzero_rows import changed_rows
from headrace.streamer.taps.optimizer_rules import Reach, rule_of
from headrace.streamer.taps.own_memory import check_not_aliased, check_not_shared
from headrace.streamer.taps.row_probe import RowProbe
from headrace.streamer.taps.step_hooks import StepHooks
from headrace.streamer.taps.tapped_table import TablePart, TappedTable, dtype_of, state_spec, zero_state

__all__ = ["TableParameter", "TorchOptimTap"]

_log = logging.getLogger(__name__)

_Marks = dict[DeviceBitmap, list[tuple[DeviceDirtyRows, torch.Tensor]]]
"""Rows of tables on a device that are to be marked, by the bitmap."""

# Tables of which some rows are looked at: a look costs 30 µs a step, and copies of models are of all their tables.
_MAX_PROBED = 8


class TorchOptimTap:
    """Marks the rows that torch optimizers update.

    Thread: the training thread's.

    Attributes:
        tables: One for each trained parameter, in the order given.
    """

    def __init__(
        self,
        parameters: Iterable[TableParameter],
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        note_update: Callable[[], None],
        end_step: Callable[[], None],
    ) -> None:
        """Check that every table can be streamed exactly, then register hooks; no hook is left after an error.

        Args:
            parameters: Tables, each once. Frozen ones (`requires_grad` is False) are not streamed.
            optimizers: Unwrapped; those that run inside `backward()` are found by themselves.
            note_update: Called after rows were marked.
            end_step: Called after a step that none of the optimizers has made: a flush is to say so.

        Raises:
            UnsupportedModelError: A table is not updated by exactly one optimizer, or that one changes rows without a
                gradient.
        """
        parameters = list(parameters)
        self._optimizers = optimizers = list(optimizers)
        self._note_update, self._end_step = note_update, end_step
        self._handles: list[RemovableHandle | StepHooks] = []
        self._frozen = [source for source in parameters if not source.parameter.requires_grad and source.parts]
        # A rank may hold none of a table's rows.
        self._followed = [
            _follow(source, optimizers) for source in parameters if source.parameter.requires_grad and source.parts
        ]
        trained = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
        check_not_aliased([(each.name, each.source.parameter) for each in self._followed], trained)
        self.tables = [part.table for followed in self._followed for part in followed.parts]
        _tell_wide_reach(self._followed)
        by_optimizer: dict[int, list[FollowedParameter]] = {}
        for place, followed in enumerate(self._followed):
            followed.probe = RowProbe() if place < _MAX_PROBED else None
            followed.note_seen()
            by_optimizer.setdefault(id(followed.optimizer), []).append(followed)
        self._foreign = ForeignSteps(self._followed, sweep=self._sweep, tell=self._note_foreign)
        for group in by_optimizer.values():
            self._register(group[0].optimizer, group)

    def sweep(self) -> None:
        """Mark all rows of tables that were written since their last step by something else than their optimizer."""
        for followed in self._followed:
            self._sweep(followed)
        for source in [source for source in self._frozen if source.parameter.requires_grad]:
            self._frozen.remove(source)
            warnings.warn(
                f"table {source.parts[0].fqn!r} was frozen when the streamer was attached and is not streamed, "
                f"but it is trained now: attach again",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Remove the hooks; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._foreign.close()

    def _register(self, optimizer: torch.optim.Optimizer, followed: list[FollowedParameter]) -> None:
        def before_update() -> None:
            for each in followed:
                self._sweep(each)

        def after_update(is_next: bool) -> None:
            groups = _groups_of(optimizer)
            marks: _Marks = {}
            for each in followed:
                self._mark(each, groups.get(id(each.source.parameter)), is_next, marks)
            for bitmap, of_tables in marks.items():
                bitmap.mark_tables(of_tables)
            # Only now: when the marks are interrupted, the next sweep finds the tables changed and marks every row.
            for each in followed:
                each.note_seen()
            self._foreign.note_own_step()

        def after_load(*_: Any) -> None:
            # New tensors may by chance have the addresses and versions of the old ones.
            for each in followed:
                each.seen = ()

        self._handles.append(optimizer.register_load_state_dict_post_hook(after_load))
        self._handles.append(StepHooks(optimizer, before=before_update, after=after_update))

    def _note_foreign(self, tables: list[FollowedParameter], kind: str) -> None:
        for followed in tables:
            followed.usurper = kind
            self._sweep(followed)
        self._end_step()

    def _sweep(self, followed: FollowedParameter) -> None:
        if followed.snapshot() != followed.seen or not followed.source.is_in_use():
            written = [followed]
        elif followed.is_off_probe():
            written = self._followed  # somebody copies a model, and not each of its tables is looked at
        else:
            return
        if followed.group() is None:  # its own optimizer has given it up: perhaps to one that is attached too
            others = [each for each in self._optimizers if group_of(each, followed.parameter) is not None]
            followed.usurper = type(others[0]).__name__ if others else followed.usurper
        for each in written:
            each.mark_all()
        self._note_update()
        for each in written:
            each.note_seen()

    def _mark(self, followed: FollowedParameter, group: dict[str, Any] | None, is_next: bool, marks: _Marks) -> None:
        """Mark what the update that just ended has changed.

        Args:
            followed: A table.
            group: The settings of the update; None when the optimizer does not have the table any more.
            is_next: Nobody else has written since the last sweep.
            marks: Gets what is to be marked together with other tables' rows.
        """
        if not is_next:
            followed.mark_all()
            self._note_update()
        elif group is not None and followed.source.parameter.grad is not None:  # else it is passed over
            self._note_update()
            self._mark_rows(followed, group, followed.source.parameter.grad, marks)

    def _mark_rows(
        self, followed: FollowedParameter, group: dict[str, Any], gradient: torch.Tensor, marks: _Marks
    ) -> None:
        parameter = followed.source.parameter
        reason = followed.rule.refuse(group, parameter.dtype, gradient.is_sparse)
        if reason is None and (states := followed.rule.states(group)) != followed.states:
            reason = f"states were {_names(followed.states)} and are {_names(states)}"
        if reason is not None:
            _warn_once(followed, reason)
            followed.mark_all()
            return
        reach = followed.rule.reach(group, parameter.dtype, gradient.is_sparse)
        if reach is Reach.ALL:
            for part in followed.parts:
                part.table.mark_all()
                # A setting may go back, and the states that it has left would move rows on.
                part.touched_beside().mark_all()
            return
        ids = changed_rows(gradient, parameter, waits=not followed.is_on_device)
        if followed.probe is not None:
            followed.probe.aim(ids)
        for part in followed.parts:
            own = part.part.row_ids_or_none(ids) if followed.is_on_device else part.part.row_ids(ids)
            if reach is Reach.TOUCHED:
                touched = part.touched_beside()
                touched.mark(own)
                part.table.dirty.add(touched)  # type: ignore[arg-type]
            elif gradient.is_sparse and isinstance(dirty := part.table.dirty, DeviceDirtyRows):
                # A dense one's ids, 8 bytes for each row of a table, would all be there at once.
                marks.setdefault(dirty.bitmap, []).append((dirty, own))
            else:
                part.table.dirty.mark(own)


def _tell_wide_reach(followed: list[FollowedParameter]) -> None:
    """Say once for each optimizer and reach that more is streamed than the rows of the batches."""
    found: dict[tuple[str, Reach], list[str]] = {}
    for each in followed:
        group = each.group()
        assert group is not None, "it has just been found"
        reach = each.rule.reach(group, each.source.parameter.dtype, each.source.is_sparse)
        if reach is not Reach.GRADIENT:
            found.setdefault((type(each.optimizer).__name__, reach), []).append(each.name)
    for (kind, reach), names in found.items():
        _log.warning(
            "a step of %s may change %s of a table, and all of these are streamed after each step: %s",
            kind,
            reach.value,
            first_of(names),
        )


def _groups_of(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Return the present settings of each parameter, by its identity."""
    return {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}


def _names(states: tuple[tuple[str, bool], ...]) -> str:
    return ", ".join(name for name, _ in states) or "none"


def _follow(source: TableParameter, optimizers: list[torch.optim.Optimizer]) -> FollowedParameter:
    """Find the one optimizer of a table and describe the table, or say why it cannot be streamed."""
    parameter, fqn = source.parameter, source.parts[0].fqn
    in_backward: list[torch.optim.Optimizer] = getattr(parameter, "_in_backward_optimizers", [])
    settings = [(optimizer, group_of(optimizer, parameter)) for optimizer in [*optimizers, *in_backward]]
    owners = [(optimizer, group) for optimizer, group in settings if group is not None]
    if len(owners) != 1:
        names = " and ".join(type(owner).__name__ for owner, _ in owners)
        raise UnsupportedModelError(
            f"table {fqn!r} is updated by {len(owners)} optimizers ({names}); one is needed"
            if owners
            else f"table {fqn!r} is trained by none of the optimizers given: "
            f"give the one that trains it, or freeze it with requires_grad_(False)"
        )
    ((optimizer, group),) = owners
    try:
        rule = rule_of(optimizer)
    except UnsupportedModelError as exc:
        raise UnsupportedModelError(f"table {fqn!r}: {exc}") from None
    followed = FollowedParameter(source=source, optimizer=optimizer, rule=rule, states=())
    kind = type(optimizer).__name__
    reason = rule.refuse(group, parameter.dtype, source.is_sparse)
    followed.states = rule.states(group)
    if is_dtensor(parameter) and any(is_rowwise for _, is_rowwise in followed.states):
        reason = "its rowwise states of a DTensor are not followed"
    if reason is not None:
        raise UnsupportedModelError(f"table {fqn!r} with {kind} cannot be streamed exactly: {reason}")
    check_not_shared(repr(fqn), [parameter])
    followed.parts = [_part(followed, part) for part in source.parts]
    for part in followed.parts:
        part.table.on_move = followed.note_move
    reach = rule.reach(group, parameter.dtype, source.is_sparse)
    if reach is not Reach.GRADIENT:
        followed.find_touched()
    return followed


def _part(followed: FollowedParameter, part: TablePart) -> FollowedPart:
    parameter = followed.source.parameter
    local_shape = local_tensor(parameter).shape
    num_rows = local_shape[0] if part.num_local_rows is None else part.num_local_rows
    num_columns = local_shape[1] if part.num_local_columns is None else part.num_local_columns
    table = TappedTable(
        spec=_spec(followed, part),
        shard=ColumnShard(offset=part.column_offset, width=num_columns),
        row_offset=part.row_offset,
        num_local_rows=num_rows,
        weights=lambda: part.columns(part.rows(_weights(followed))),
        is_in_use=followed.source.is_in_use,
        states=lambda: _states(followed, part, num_rows, num_columns),
        scalars=lambda: _scalars(followed),
    )
    return FollowedPart(part=part, table=table, touched=DirtyRows(num_rows))


def _spec(followed: FollowedParameter, part: TablePart) -> TableSpec:
    dtype, made = followed.source.parameter.dtype, followed.made()
    return TableSpec(
        fqn=part.fqn,
        num_rows=part.num_rows,
        dim=part.dim,
        dtype=dtype_of(f"table {part.fqn!r}", dtype),
        states=tuple(
            state_spec(
                part.fqn, name, made[name].dtype if name in made else dtype, rowwise_width=1 if is_rowwise else 0
            )
            for name, is_rowwise in followed.states
        ),
    )


def _weights(followed: FollowedParameter) -> torch.Tensor:
    """Return the live weights, local ones, or say that their states are not the optimizer's that is followed."""
    if followed.usurper is not None:
        raise UnsupportedModelError(
            f"table {followed.name!r} is trained by another optimizer ({followed.usurper}) than the one attached "
            f"({type(followed.optimizer).__name__}): attach the model and its new optimizer to a new streamer"
        )
    return local_tensor(followed.source.parameter)


def _states(followed: FollowedParameter, part: TablePart, num_rows: int, num_columns: int) -> dict[str, torch.Tensor]:
    """Return the live states; those that the optimizer makes in its first step are zeros before."""
    parameter, made = followed.source.parameter, followed.made()
    states = {}
    for name, is_rowwise in followed.states:
        if name not in made:
            width = 1 if is_rowwise else num_columns
            states[name] = zero_state(num_rows, width, parameter.dtype, parameter.device)
        elif not followed.fits(name, made[name]):
            shape, weights = list(made[name].shape), list(local_tensor(parameter).shape)
            raise UnsupportedModelError(f"state {name!r} of table {part.fqn!r} is {shape} now, of weights {weights}")
        else:
            rows = part.rows(made[name])
            states[name] = rows if is_rowwise else part.columns(rows)
    return states


def _scalars(followed: FollowedParameter) -> dict[str, torch.Tensor]:
    """Return the optimizer's numbers for the whole table; a plain number (SparseAdam's step) as int64."""
    state = followed.optimizer.state.get(followed.source.parameter, {})
    return {
        name: local_tensor(value) if isinstance(value, torch.Tensor) else torch.tensor(value)
        for name in followed.rule.scalars
        if (value := state.get(name)) is not None
    }


def _warn_once(followed: FollowedParameter, reason: str) -> None:
    if not followed.has_warned:
        followed.has_warned = True
        warnings.warn(
            f"table {followed.name!r}: since the streamer was attached, settings of "
            f"{type(followed.optimizer).__name__} changed: {reason}. Every row is streamed after each step from now "
            f"on; states that the optimizer keeps for this setting are not.",
            RuntimeWarning,
            stacklevel=2,
        )
