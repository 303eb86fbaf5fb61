"""A table that is a parameter of a torch optimizer: how it was last seen, and the parts of it that are streamed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headrace.kernels.dirty_rows import DirtyRows
from headrace.streamer.device.device_dirty_rows import DeviceDirtyRows
from headrace.streamer.taps.local_parts import is_dtensor, local_tensor
from headrace.streamer.taps.nonzero_rows import rows_with_any_bit
from headrace.streamer.taps.optimizer_rules import Reach, Rule
from headrace.streamer.taps.row_probe import RowProbe
from headrace.streamer.taps.tapped_table import TablePart, TappedTable

__all__ = ["FollowedParameter", "FollowedPart", "TableParameter", "group_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableParameter:
    """A parameter that is an embedding table.

    Attributes:
        parts: What of the table this rank streams of it: one, none, or several that do not overlap.
        parameter: `[rows, columns]`; may be a DTensor.
        is_sparse: Whether its gradient is expected to be sparse.
        is_in_use: Returns whether the model uses it still, and not another one in its place.
    """

    parts: tuple[TablePart, ...]
    parameter: torch.nn.Parameter
    is_sparse: bool
    is_in_use: Callable[[], bool] = lambda: True


@dataclass(kw_only=True, slots=True)
class FollowedPart:
    """One part of a parameter.

    Attributes:
        part: Where it lies.
        table: What is streamed.
        touched: Rows whose states are not all zero, if the optimizer goes on to move them; else empty. On the device if
            the table's changed rows are.
    """

    part: TablePart
    table: TappedTable
    touched: DirtyRows | DeviceDirtyRows

    def touched_beside(self) -> DirtyRows | DeviceDirtyRows:
        """Return `touched`, moved to where the table's changed rows are now; that waits for the device."""
        dirty, touched = self.table.dirty, self.touched
        if isinstance(dirty, DeviceDirtyRows):
            if not isinstance(touched, DeviceDirtyRows):
                self.touched = DeviceDirtyRows.beside(dirty)
                self.touched.add(touched)
        elif isinstance(touched, DeviceDirtyRows):
            self.touched = touched.to_host()
        return self.touched


@dataclass(kw_only=True, slots=True)
class FollowedParameter:
    """A parameter and the optimizer that updates it."""

    source: TableParameter
    optimizer: torch.optim.Optimizer
    rule: Rule
    states: tuple[tuple[str, bool], ...]
    parts: list[FollowedPart] = field(default_factory=list)
    seen: tuple[int, ...] = ()
    # A storage that is freed leaves its address to the next: these keep the objects' own, though not their memory.
    storages: list[StorageWeakRef] = field(default_factory=list)
    has_warned: bool = field(default=False)
    # Changed rows are marked on a device, where nobody waits for their number.
    is_on_device: bool = field(default=False)
    probe: RowProbe | None = None
    # The type of another optimizer that has trained the table since.
    usurper: str | None = None

    @property
    def parameter(self) -> torch.nn.Parameter:
        """What is trained."""
        return self.source.parameter

    @property
    def name(self) -> str:
        """The table's name."""
        return self.source.parts[0].fqn

    def made(self) -> dict[str, torch.Tensor]:
        """Return the row states that the optimizer has made so far, local ones."""
        state = self.optimizer.state.get(self.source.parameter, {})
        return {name: local_tensor(state[name]) for name, _ in self.states if _is_rows(state.get(name))}

    def tensors(self) -> list[torch.Tensor]:
        """Return the weights, and the row states that the optimizer has made so far."""
        state = self.optimizer.state.get(self.source.parameter, {})
        return [self.source.parameter, *(state[name] for name, _ in self.states if _is_rows(state.get(name)))]

    def snapshot(self) -> tuple[int, ...]:
        """Return numbers that differ after any of its tensors was written in place or replaced."""
        numbers: list[int] = []
        for tensor in self.tensors():
            # A DTensor counts its own writes, and its local tensor those that are made to it directly.
            local = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
            numbers += (local.untyped_storage()._cdata, local.data_ptr(), tensor._version, local._version)
        return tuple(numbers)

    def is_written(self) -> bool:
        """Return whether the parameter was written in place since it was last seen."""
        return not self.seen or self.seen[2] != self.source.parameter._version

    def note_seen(self) -> None:
        """Remember how its tensors are now. REQUIRES: what was written to them is marked."""
        now = self.snapshot()
        if now[::4] != self.seen[::4]:
            storages = [local_tensor(tensor).untyped_storage() for tensor in self.tensors()]
            self.storages = [StorageWeakRef(storage) for storage in storages]  # type: ignore[no-untyped-call]
        self.seen = now
        if self.probe is not None:
            self.probe.keep(local_tensor(self.source.parameter))

    def is_off_probe(self) -> bool:
        """Return whether rows changed that are looked at. REQUIRES: its tensors are those that were last seen."""
        return self.probe is not None and self.probe.is_off(local_tensor(self.source.parameter))

    def group(self) -> dict[str, Any] | None:
        """Return the present settings of the optimizer for this table; None when it was given others instead."""
        return group_of(self.optimizer, self.source.parameter)

    def note_move(self) -> None:
        """Learn that a part's changed rows are marked elsewhere now."""
        self.is_on_device = any(isinstance(part.table.dirty, DeviceDirtyRows) for part in self.parts)
        self.probe = None  # a look would wait for the device

    def mark_all(self) -> None:
        """Mark every row, and find out anew which rows the optimizer goes on to move."""
        parameter, reach = self.source.parameter, Reach.ALL
        if group := self.group():
            reach = self.rule.reach(group, parameter.dtype, self.source.is_sparse)
        for part in self.parts:
            part.table.mark_all()
        if reach is not Reach.GRADIENT:
            self.find_touched()

    def find_touched(self) -> None:
        """Find out which rows have states that are not all zero."""
        for part in self.parts:
            touched = part.touched_beside()
            touched.clear()
            for name, state in self.made().items():
                if self.fits(name, state):
                    touched.mark(rows_with_any_bit(part.part.rows(state), waits=not self.is_on_device))

    def fits(self, name: str, state: torch.Tensor) -> bool:
        """Return whether a state has the shape that the optimizer gives it; else no flush sends it."""
        num_rows, num_columns = local_tensor(self.source.parameter).shape
        return state.shape == (num_rows, 1 if dict(self.states)[name] else num_columns)


def group_of(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, Any] | None:
    """Return the present settings of one parameter."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    return next((group for group in groups if any(each is parameter for each in group["params"])), None)


def _is_rows(state: torch.Tensor | None) -> bool:
    # A sparse one, as of momentum over sparse gradients, has no row for each of the table's: it is not streamed.
    return state is not None and not state.is_sparse
