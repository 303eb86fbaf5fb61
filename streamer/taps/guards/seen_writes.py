"""Detect, for all tables of an optimizer at once, what has written them since their last step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.streamer.taps.guards.tapped_modules import UsedPlaces
from headrace.streamer.taps.local_parts import is_dtensor

if TYPE_CHECKING:
    from headrace.streamer.taps.torch_optim import TrackedParameter

__all__ = ["SeenWrites"]


class SeenWrites:
    """Compares the snapshots of one optimizer's tables, three times a step.

    It does for many tables what `TrackedParameter.snapshot` and `note_seen` do for one. These take 20 times as long:
    most of it goes into calls, not into what torch counts.
    """

    def __init__(self, tables: Sequence[TrackedParameter]) -> None:
        """Watch tables of one optimizer."""
        self._tables = tables
        self._optimizer = tables[0].optimizer
        self._weights = [table.parameter for table in tables]
        self._names = [[name for name, _ in table.states] for table in tables]
        self._has_states = any(self._names)
        # The local tensor of a DTensor counts writes of its own.
        self._has_dtensors = any(map(is_dtensor, self._weights))
        self._places = UsedPlaces([table.source.is_in_use for table in tables])

    def suspects(self) -> list[TrackedParameter]:
        """Return the tables of which anything was written or replaced since `note_seen`, or that may not be in use."""
        if not self._places.are_in_use():
            return list(self._tables)
        return [
            table
            for table, now in zip(self._tables, self._snapshots(), strict=True)
            if now != table.seen or (table.probe is not None and table.probe_has_changed())
        ]

    def note_seen(self) -> None:
        """Take new snapshots. REQUIRES: all writes to the tables are marked."""
        for table, now in zip(self._tables, self._snapshots(), strict=True):
            table.note_seen(now)

    def _snapshots(self) -> list[tuple[int, ...]]:
        """Return each table's `snapshot`."""
        if self._has_dtensors:
            return [table.snapshot() for table in self._tables]
        weights = self._weights
        of_weights: list[tuple[int, ...]] = [
            (each.untyped_storage()._cdata, each.data_ptr(), each._version, each._version) for each in weights
        ]
        if not self._has_states:
            return of_weights
        states = map(self._optimizer.state.get, weights, itertools.repeat({}))
        of_states = [
            [
                (each.untyped_storage()._cdata, each.data_ptr(), each._version, each._version)
                for name in names
                if (each := state.get(name)) is not None and not each.is_sparse
            ]
            for names, state in zip(self._names, states, strict=True)
        ]
        return [sum(numbers, of_weight) for of_weight, numbers in zip(of_weights, of_states, strict=True)]
