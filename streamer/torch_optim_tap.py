"""Tap on tables that are parameters updated by torch optimizers.

The gradient tells the truth: after an optimizer's step, the rows of a sparse gradient, or the rows of a dense one with
an element that is not zero, are the rows that changed. That holds whatever led to the gradient: accumulation over
several batches, tied weights, forwards without gradient, and steps that a gradient scaler skipped.

What changes a table without a gradient (loading a checkpoint, a clamp by hand) shows in the version that torch counts
on every tensor: then all rows are marked.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from headrace.schemas.errors import UnsupportedModelError
from headrace.schemas.tables import ColumnShard, TableSpec
from headrace.streamer.optimizer_rules import Rule, rule_of
from headrace.streamer.tapped_table import TablePart, TappedTable, dtype_of, state_spec, zero_state

__all__ = ["TableParameter", "TorchOptimTap"]

_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class TableParameter:
    """A parameter that is an embedding table.

    Attributes:
        part: What of the table it holds.
        parameter: `[rows, columns]`.
        is_sparse: Whether its gradient is expected to be sparse.
    """

    part: TablePart
    parameter: torch.nn.Parameter
    is_sparse: bool


@dataclass(kw_only=True, slots=True)
class _Followed:
    """A table and the optimizer that updates it."""

    source: TableParameter
    optimizer: torch.optim.Optimizer
    rule: Rule
    table: TappedTable
    seen: tuple[int, ...] = ()
    has_warned: bool = field(default=False)

    def tensors(self) -> list[torch.Tensor]:
        """Return what is streamed of this table and exists."""
        state = self.optimizer.state.get(self.source.parameter, {})
        return [self.source.parameter, *(state[name] for name, _ in self.rule.states if name in state)]

    def snapshot(self) -> tuple[int, ...]:
        """Return numbers that differ after any of its tensors was written in place or replaced."""
        return tuple(number for tensor in self.tensors() for number in (tensor.data_ptr(), tensor._version))

    def group(self) -> dict[str, Any]:
        """Return the present settings of the optimizer for this table."""
        return next(
            group
            for group in self.optimizer.param_groups
            if any(parameter is self.source.parameter for parameter in group["params"])
        )


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
    ) -> None:
        """Check that every table can be streamed exactly, then register hooks; no hook is left after an error.

        Args:
            parameters: Tables, each once. Frozen ones (`requires_grad` is False) are not streamed.
            optimizers: Unwrapped; those that run inside `backward()` are found by themselves.
            note_update: Called after rows were marked.

        Raises:
            UnsupportedModelError: A table is not updated by exactly one optimizer, or that one changes rows without a
                gradient.
        """
        parameters = list(parameters)
        optimizers = list(optimizers)
        self._note_update = note_update
        self._handles: list[RemovableHandle] = []
        self._frozen = [source for source in parameters if not source.parameter.requires_grad]
        self._followed = [_follow(source, optimizers) for source in parameters if source.parameter.requires_grad]
        self.tables = [followed.table for followed in self._followed]
        by_optimizer: dict[int, list[_Followed]] = {}
        for followed in self._followed:
            followed.seen = followed.snapshot()
            by_optimizer.setdefault(id(followed.optimizer), []).append(followed)
        for group in by_optimizer.values():
            self._register(group[0].optimizer, group)

    def sweep(self) -> None:
        """Mark all rows of tables that were written since their last step by something else than their optimizer."""
        for followed in self._followed:
            self._sweep(followed)
        for source in [source for source in self._frozen if source.parameter.requires_grad]:
            self._frozen.remove(source)
            warnings.warn(
                f"table {source.part.fqn!r} was frozen when the streamer was attached and is not streamed, "
                f"but it is trained now: attach again",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Remove the hooks; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _register(self, optimizer: torch.optim.Optimizer, followed: list[_Followed]) -> None:
        def before_step(*_: Any) -> None:
            for each in followed:
                self._sweep(each)

        def after_step(*_: Any) -> None:
            for each in followed:
                self._mark(each)

        def after_load(*_: Any) -> None:
            # New tensors may by chance have the addresses and versions of the old ones.
            for each in followed:
                each.seen = ()

        self._handles.append(optimizer.register_load_state_dict_post_hook(after_load))
        self._handles.append(optimizer.register_step_pre_hook(before_step))
        self._handles.append(optimizer.register_step_post_hook(after_step))

    def _sweep(self, followed: _Followed) -> None:
        now = followed.snapshot()
        if now != followed.seen:
            followed.seen = now
            followed.table.dirty.mark_all()
            self._note_update()

    def _mark(self, followed: _Followed) -> None:
        """Mark what the step that just ended has changed."""
        gradient = followed.source.parameter.grad
        followed.seen = followed.snapshot()
        if gradient is None:  # the optimizer passes over such a parameter
            return
        self._note_update()
        reason = followed.rule.refuse(followed.group(), followed.source.parameter.dtype, gradient.is_sparse)
        if reason is not None:
            _warn_once(followed, reason)
            followed.table.dirty.mark_all()
        elif gradient.is_sparse:
            followed.table.dirty.mark(gradient._indices())
        else:
            followed.table.dirty.mark(_rows_with_any_bit(gradient))


def _follow(source: TableParameter, optimizers: list[torch.optim.Optimizer]) -> _Followed:
    """Find the one optimizer of a table and describe the table, or say why it cannot be streamed."""
    parameter = source.parameter
    in_backward: list[torch.optim.Optimizer] = getattr(parameter, "_in_backward_optimizers", [])
    owners = [
        optimizer
        for optimizer in [*optimizers, *in_backward]
        if any(candidate is parameter for group in optimizer.param_groups for candidate in group["params"])
    ]
    if len(owners) != 1:
        names = " and ".join(type(owner).__name__ for owner in owners)
        raise UnsupportedModelError(
            f"table {source.part.fqn!r} is updated by {len(owners)} optimizers ({names}); one is needed"
            if owners
            else f"table {source.part.fqn!r} is trained by none of the optimizers given: "
            f"give the one that trains it, or freeze it with requires_grad_(False)"
        )
    (optimizer,) = owners
    try:
        rule = rule_of(optimizer)
    except UnsupportedModelError as exc:
        raise UnsupportedModelError(f"table {source.part.fqn!r}: {exc}") from None
    table = TappedTable(
        spec=_spec(source, optimizer, rule),
        shard=ColumnShard(offset=source.part.column_offset, width=parameter.shape[1]),
        row_offset=source.part.row_offset,
        num_local_rows=parameter.shape[0],
        weights=parameter.detach,
        states=lambda: _states(parameter, optimizer, rule),
    )
    followed = _Followed(source=source, optimizer=optimizer, rule=rule, table=table)
    reason = rule.refuse(followed.group(), parameter.dtype, source.is_sparse)
    if reason is not None:
        kind = type(optimizer).__name__
        raise UnsupportedModelError(f"table {source.part.fqn!r} with {kind} cannot be streamed exactly: {reason}")
    return followed


def _spec(source: TableParameter, optimizer: torch.optim.Optimizer, rule: Rule) -> TableSpec:
    parameter = source.parameter
    made = optimizer.state.get(parameter, {})
    return TableSpec(
        fqn=source.part.fqn,
        num_rows=source.part.num_rows,
        dim=source.part.dim,
        dtype=dtype_of(f"table {source.part.fqn!r}", parameter.dtype),
        states=tuple(
            state_spec(
                source.part.fqn,
                name,
                made[name].dtype if name in made else parameter.dtype,
                rowwise_width=1 if is_rowwise else 0,
            )
            for name, is_rowwise in rule.states
        ),
    )


def _states(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer, rule: Rule) -> dict[str, torch.Tensor]:
    """Return the live states; those that the optimizer makes in its first step are zeros before."""
    made = optimizer.state.get(parameter, {})
    num_rows, dim = parameter.shape
    return {
        name: made[name].detach()
        if name in made
        else zero_state(num_rows, 1 if is_rowwise else dim, parameter.dtype, parameter.device)
        for name, is_rowwise in rule.states
    }


def _rows_with_any_bit(gradient: torch.Tensor) -> torch.Tensor:
    """Return int64 ids of the rows of `[rows, dim]` that are not all +0.0.

    Bits, not values: NaN counts, and -0.0 too, since subtracting it turns a weight of -0.0 into 0.0.
    """
    row_bytes = gradient.shape[1] * gradient.element_size()
    size = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
    return gradient.detach().contiguous().view(_INT_OF_SIZE[size]).any(dim=1).nonzero().reshape(-1)


def _warn_once(followed: _Followed, reason: str) -> None:
    if not followed.has_warned:
        followed.has_warned = True
        warnings.warn(
            f"table {followed.source.part.fqn!r}: since the streamer was attached, settings of "
            f"{type(followed.optimizer).__name__} changed: {reason}. Every row is streamed after each step from now "
            f"on; states that the optimizer keeps for this setting are not.",
            RuntimeWarning,
            stacklevel=2,
        )
