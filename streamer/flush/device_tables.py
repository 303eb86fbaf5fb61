"""The tables that one device drains: their ranges of its bitmap, and their columns' present places."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.dirty_drain import DrainPlan, DrainTable
from headrace.kernels.dirty_sets import DirtyRows
from headrace.paramserver.system.text import first_of
from headrace.streamer.device.dirty_rows import DeviceBitmap, DeviceDirtyRows, slots_of
from headrace.streamer.device.runtime import DeviceRuntime, RuntimeOf
from headrace.streamer.flush.gather import RowGatherer
from headrace.streamer.taps.guards.tapped_modules import UsedPlaces

__all__ = ["DeviceTables"]

_log = logging.getLogger(__name__)


class DeviceTables:
    """Tables on one device, and the bitmap of their dirty rows.

    Thread: the training thread's.

    Attributes:
        bitmap: Bitmap of all tables; None before the first one.
        sources: Tables in the order of their slots.
    """

    def __init__(self, num_shards: int, runtime_of: RuntimeOf) -> None:
        """Begin without tables."""
        self._num_shards, self._runtime_of = num_shards, runtime_of
        self.bitmap: DeviceBitmap | None = None
        self.sources: list[RowGatherer] = []
        self._columns: list[tuple[Tensor, ...]] = []
        self._backing: _Backing | None = None  # that of the columns
        self._plan: DrainPlan | None = None

    def change_shards(self, num_shards: int) -> None:
        """Order rows by the shards of another server from the next drain on. REQUIRES: no drain is on its way."""
        self._num_shards, self._plan = num_shards, None

    def choose(self, sources: Sequence[RowGatherer]) -> tuple[DeviceBitmap | None, list[RowGatherer]]:
        """Return the tables that can be taken over, and their bitmap. The log says why others on devices cannot."""
        bitmap, taken = self.bitmap, []
        refused: dict[str, list[RowGatherer]] = {}
        # Asked once each: where a kernel does not compile, each call tries it again.
        runtimes: dict[torch.device, DeviceRuntime | str | None] = {}
        for source in sources:
            if source.table.index is None and not source.table.num_local_rows:
                continue  # another rank has its rows
            device = source.table.weights().device
            if device not in runtimes:
                runtimes[device] = self._runtime_of(device)
            runtime = runtimes[device]
            if runtime is None:
                continue
            if isinstance(runtime, str):
                reason: str | None = runtime
            else:
                bitmap = bitmap or DeviceBitmap(runtime)
                reason = _refusal(source, bitmap)
            if reason is None:
                taken.append(source)
            else:
                refused.setdefault(reason, []).append(source)
        for reason, others in refused.items():
            _log.warning("device_pipeline: gathered by the host, %s: %s", reason, _names(others))
        return bitmap, taken

    def take_over(self, sources: Sequence[RowGatherer], bitmap: DeviceBitmap) -> None:
        """Keep tables' dirty rows on the device from now on. REQUIRES: `choose` has returned both."""
        first_slot = bitmap.num_slots
        bitmap.grow(sum(slots_of(source.table.num_local_rows) for source in sources))
        for source in sources:
            table = source.table
            table.join_device(DeviceDirtyRows(table.num_local_rows, bitmap, first_slot))
            first_slot += slots_of(table.num_local_rows)
        self.bitmap = bitmap
        self.sources = [*self.sources, *sources]
        self._backing = None

    def take_leavers(self) -> list[RowGatherer]:
        """Remove and return the tables that cannot be drained any more; call it before each drain.

        Their dirty rows move to sets on the host, which waits for the device.
        """
        are_here = all([isinstance(source.table.dirty, DeviceDirtyRows) for source in self.sources])
        if are_here and self._backing is not None and self._backing.is_present():
            return []
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
        self._backing = _Backing.of(staying)
        if self._plan is not None and not self._is_present(self._plan):
            self._plan = None
        if leavers:
            _log.warning("device_pipeline: gathered by the host from now on: %s", _names(leavers))
        return leavers

    def plan(self) -> DrainPlan | None:
        """Return the plan of the tables as `take_leavers` has left them; None without tables.

        The last plan is reused unless a column has moved.
        """
        if not self.sources:
            return None
        if self._plan is None or not _has_addresses(self._plan):
            tables = [
                DrainTable(
                    first_slot=_slot_of(source),
                    num_rows=source.table.num_local_rows,
                    row_offset=source.table.row_offset,
                    seed=source.seed,
                    columns=columns,
                )
                for source, columns in zip(self.sources, self._columns, strict=True)
            ]
            self._plan = DrainPlan(tables, self._num_shards)
        return self._plan

    def _is_present(self, plan: DrainPlan) -> bool:
        is_same = len(plan.tables) == len(self.sources) and all(
            table.first_slot == _slot_of(source) and _are_same(table.columns, columns)
            for table, source, columns in zip(plan.tables, self.sources, self._columns, strict=True)
        )
        return is_same and _has_addresses(plan)


@dataclass(frozen=True, slots=True)
class _Backing:
    """The tensors whose parts are all columns of some tables, as they were when each column was last looked at."""

    places: UsedPlaces
    getters: list[Callable[[], Sequence[Tensor]]]
    tensors: list[Tensor]
    addresses: list[int]

    @classmethod
    def of(cls, sources: Sequence[RowGatherer]) -> _Backing | None:
        """Return the tables' backing; None if a table cannot tell its own."""
        getters = dict.fromkeys(source.table.backing for source in sources)  # a module's tables share one
        known = [each for each in getters if each is not None]
        if len(known) < len(getters):
            return None
        tensors = [tensor.detach() for backing in known for tensor in backing()]
        places = UsedPlaces([source.table.is_in_use for source in sources])
        return cls(places, known, tensors, [tensor.data_ptr() for tensor in tensors])

    def is_present(self) -> bool:
        """Return whether all columns are where and what they were, and their tables are in use; else look at each."""
        now = [tensor for backing in self.getters for tensor in backing()]
        return (
            self.places.are_in_use()
            # A storage may get other memory in place, as when tables are moved off the device and back.
            and self.addresses == [tensor.data_ptr() for tensor in now]
            and _are_same(self.tensors, now)
        )


def _refusal(source: RowGatherer, bitmap: DeviceBitmap) -> str | None:
    """Return why a table cannot be drained on the device; None if it can."""
    table = source.table
    if table.index is not None or table.spec.has_identities:
        return "rows with virtual ids or identities"
    if table.cache is not None:
        return "rows in FBGEMM's cache"
    if table.send_share < 1:
        return "rows may wait (send_share)"
    if table.is_rounded:
        return "weights are stored in another type"
    if not isinstance(table.dirty, DirtyRows):
        return "more rows than bitmap_bytes holds"
    if not table.deleted.is_empty:
        return "rows were evicted"
    if bitmap.is_captured:
        return "a CUDA graph was captured before they were attached"
    if not _is_readable(_columns_of(source), bitmap.runtime):
        return f"not in the memory of {bitmap.runtime.device}, or not contiguous along a row"
    return None


def _columns_of(source: RowGatherer) -> tuple[Tensor, ...]:
    # The live weights and states, in the order of the wire.
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
    # The old columns keep their storages, so no other tensor can have the same one.
    # One call of torch compares storage, place, shape and strides; single calls take twice as long.
    return all(a.is_set_to(b) and a.dtype == b.dtype for a, b in zip(before, now, strict=True))


def _has_addresses(plan: DrainPlan) -> bool:
    # A storage may get other memory in place, as when tables are moved off the device and back.
    return plan.addresses == [column.data_ptr() for column in plan.columns]


def _names(sources: Sequence[RowGatherer]) -> str:
    return first_of([repr(source.format.spec.fqn) for source in sources])
