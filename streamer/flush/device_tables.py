"""The tables that one device streams by itself: their ranges of its bitmap, and where their columns lie now."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.kernels.cut_plan import CutPlan, CutTable
from headrace.kernels.dirty_rows import DirtyRows
from headrace.schemas.near_names import first_of
from headrace.streamer.device.device_dirty_rows import DeviceBitmap, DeviceDirtyRows, slots_of
from headrace.streamer.device.device_runtime import DeviceRuntime
from headrace.streamer.flush.gather import RowGatherer

__all__ = ["DeviceTables"]

_log = logging.getLogger(__name__)


class DeviceTables:
    """Tables on one device, and the bitmap of their changed rows.

    Thread: the training thread's.

    Attributes:
        bitmap: Of all tables; None before there was any.
        sources: In the order of their slots.
    """

    def __init__(self, num_shards: int, runtime_of: Callable[[torch.device], DeviceRuntime | str]) -> None:
        """Begin without tables.

        Args:
            num_shards: Shards of the store.
            runtime_of: Returns what a device is driven by, or why it cannot be.
        """
        self._num_shards, self._runtime_of = num_shards, runtime_of
        self.bitmap: DeviceBitmap | None = None
        self.sources: list[RowGatherer] = []
        self._columns: list[tuple[Tensor, ...]] = []
        self._plan: CutPlan | None = None

    def choose(self, sources: Sequence[RowGatherer]) -> tuple[DeviceBitmap | None, list[RowGatherer]]:
        """Return those of some tables that can be taken over, and the bitmap that would be theirs.

        Why the others cannot is said in the log.
        """
        bitmap, taken = self.bitmap, []
        refused: dict[str, list[RowGatherer]] = {}
        for source in sources:
            reason: str | None = None
            if bitmap is None:
                runtime = self._runtime_of(source.table.weights().device)
                if isinstance(runtime, str):
                    reason = runtime
                else:
                    bitmap = DeviceBitmap(runtime)
            if bitmap is not None:
                reason = _refusal(source, bitmap)
            if reason is None:
                taken.append(source)
            else:
                refused.setdefault(reason, []).append(source)
        for reason, others in refused.items():
            _log.warning("device_pipeline: gathered by the host, %s: %s", reason, _names(others))
        return bitmap, taken

    def take_over(self, sources: Sequence[RowGatherer], bitmap: DeviceBitmap) -> None:
        """Keep the changed rows of tables on the device from now on. REQUIRES: `choose` has returned both."""
        first_slot = bitmap.num_slots
        bitmap.grow(sum(slots_of(source.table.num_local_rows) for source in sources))
        for source in sources:
            table = source.table
            table.join_device(DeviceDirtyRows(table.num_local_rows, bitmap, first_slot))
            first_slot += slots_of(table.num_local_rows)
        self.bitmap = bitmap
        self.sources = [*self.sources, *sources]

    def take_leavers(self) -> list[RowGatherer]:
        """Look at all tables before a cut, and return those that cannot be cut here any more.

        Their changed rows are sets on the host from now on; to move them there waits for the device.
        """
        staying, columns, leavers = [], [], []
        for source in self.sources:
            now, dirty = _columns_of(source), source.table.dirty
            if isinstance(dirty, DeviceDirtyRows) and not _is_readable(now, dirty.bitmap.runtime):
                source.table.leave_device()
            if isinstance(source.table.dirty, DeviceDirtyRows):
                staying.append(source)
                columns.append(now)
            else:
                leavers.append(source)
        self.sources, self._columns = staying, columns
        if leavers:
            _log.warning("device_pipeline: gathered by the host from now on: %s", _names(leavers))
        return leavers

    def plan(self) -> CutPlan | None:
        """Return the plan of the tables as `take_leavers` has found them; None without tables.

        It is the last one, unless a column has moved since.
        """
        if not self.sources:
            return None
        if self._plan is None or not self._is_present(self._plan):
            tables = [
                CutTable(
                    first_slot=_slot_of(source),
                    num_rows=source.table.num_local_rows,
                    row_offset=source.table.row_offset,
                    seed=source.seed,
                    columns=columns,
                )
                for source, columns in zip(self.sources, self._columns, strict=True)
            ]
            self._plan = CutPlan(tables, self._num_shards)
        return self._plan

    def _is_present(self, plan: CutPlan) -> bool:
        is_same = len(plan.tables) == len(self.sources) and all(
            table.first_slot == _slot_of(source) and _are_same(table.columns, columns)
            for table, source, columns in zip(plan.tables, self.sources, self._columns, strict=True)
        )
        # A storage may be given other memory in its place, as by whoever moves tables off the device and back.
        return is_same and plan.addresses == [column.data_ptr() for column in plan.columns]


def _refusal(source: RowGatherer, bitmap: DeviceBitmap) -> str | None:
    """Return why a table cannot go the device's way; None when it can."""
    table = source.table
    if table.index is not None or table.meta is not None or table.spec.has_identities:
        return "rows with virtual ids, identities or runtime meta"
    if not isinstance(table.dirty, DirtyRows):
        return "more rows than bitmap_bytes holds"
    if not table.deleted.is_empty:
        return "rows were evicted"
    if bitmap.is_captured:
        return "a CUDA graph was captured before they were attached"
    if not table.num_local_rows:
        return "no rows on this rank"
    if not _is_readable(_columns_of(source), bitmap.runtime):
        return f"not in the memory of {bitmap.runtime.device}, or not contiguous along a row"
    return None


def _columns_of(source: RowGatherer) -> tuple[Tensor, ...]:
    """Return the live weights and states, in the order of the wire's."""
    table = source.table
    states = table.states() if source.format.states else {}
    return (table.weights().detach(), *(states[state.name].detach() for state, _ in source.format.states))


def _is_readable(columns: Sequence[Tensor], runtime: DeviceRuntime) -> bool:
    return all(runtime.holds(column) and (column.shape[1] <= 1 or column.stride(1) == 1) for column in columns)


def _slot_of(source: RowGatherer) -> int:
    dirty = source.table.dirty
    assert isinstance(dirty, DeviceDirtyRows)
    return dirty.first_slot


def _are_same(before: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    """Return whether columns are the same parts of the same storages, which the old ones keep from others."""
    # One call of torch for storage, place, shape and strides: asked for one by one they take twice as long.
    return all(a.is_set_to(b) and a.dtype == b.dtype for a, b in zip(before, now, strict=True))


def _names(sources: Sequence[RowGatherer]) -> str:
    return first_of([repr(source.format.spec.fqn) for source in sources])
