"""One cut on its way from the device: what its header says, and where its rows lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.kernels.cut_plan import HEADER_WORDS, CutPlan, header_words
from headrace.kernels.row_packing import PackedTable, layout_of
from headrace.kernels.torch_dtypes import TORCH_DTYPES
from headrace.schemas.tables import DType
from headrace.streamer.device.device_runtime import DeviceEvent
from headrace.streamer.flush.flush import Column, Flush, FlushedTable
from headrace.streamer.flush.gather import RowGatherer, check_finite
from headrace.streamer.flush.staging import StagingBuffer
from headrace.streamer.flush.sweep_marks import Half

__all__ = ["Completing", "DeviceCut", "DeviceStaging", "Scalars"]

Scalars = list[tuple[str, DType, bytes | int]]
"""Of one table: name, type, and bytes or which word behind the header has them."""


class Completing(Protocol):
    """What completes cuts: `DevicePipeline`."""

    def complete(self, cut: DeviceCut, flush: Flush) -> Flush | None:
        """Do what `DeviceCut.complete` says."""

    def abandon(self) -> None:
        """Do what `DeviceCut.abandon` says."""


@dataclass(kw_only=True, slots=True)
class DeviceStaging:
    """What belongs to one staging buffer on the device and in pinned memory; in use as long as that is.

    Attributes:
        out: uint8[staging bytes] on the device.
        host: As long, pinned.
        header: int64[n] on the device: the cut's header, and behind it one word for each scalar.
        header_host: As long, pinned.
    """

    out: Tensor
    host: Tensor
    header: Tensor
    header_host: Tensor


@dataclass(eq=False, kw_only=True, slots=True)
class DeviceCut:
    """A cut whose rows are on their way from the device: `Flush.pending`.

    Attributes:
        pipeline: Whose.
        sources: Tables, in the order of their slots.
        plan: As given to `cut_dirty`; None without tables.
        num_shards: Shards of the store.
        staging: Where the rows are.
        header_host: What the header is copied to.
        buffer: The flush's.
        event: When the header is on the host.
        scalars: Of each table: name, type, and bytes or which word behind the header.
        host: What the cut has left of the host's tables.
        restarts: See `sweep_marks.Cut`.
        now_s: Monotonic time of the cut.
        changed_s: See `sweep_marks.Cut`.
        give_back: Makes the host's rows of the flush dirty again.
        exact_step: The step at which it was an exact cut; None before that is known, and when it was not.
    """

    pipeline: Completing
    sources: list[RowGatherer]
    plan: CutPlan | None
    num_shards: int
    staging: DeviceStaging
    header_host: Tensor
    buffer: StagingBuffer
    event: DeviceEvent
    scalars: list[Scalars]
    host: Half
    restarts: bool
    now_s: float
    changed_s: float
    give_back: Callable[[], None]
    exact_step: int | None = None

    def complete(self, flush: Flush) -> Flush | None:
        """Wait for the rows, and return the flush with them; None when its rows are to be dirty again.

        Thread: any but the training thread; one cut after the other.

        Raises:
            HeadraceError: The device has failed.
        """
        return self.pipeline.complete(self, flush)

    def abandon(self) -> None:
        """Say that nobody will complete it: streaming has ended.

        Thread: any.
        """
        self.pipeline.abandon()

    @property
    def num_words(self) -> int:
        """Length of the header."""
        return header_words(len(self.sources), self.num_shards)

    def layout(self) -> tuple[list[PackedTable], int]:
        """Return where each table's rows lie, and how many bytes they are. REQUIRES: the event has come."""
        tables = () if self.plan is None else self.plan.tables
        num_rows = self._counts().sum(1).tolist()
        return layout_of([t.columns[0] for t in tables], num_rows, [t.columns[1:] for t in tables])

    def tables(self, places: list[PackedTable]) -> Iterator[FlushedTable]:
        """Yield the tables that have rows, their columns views of the pinned memory."""
        data = self.staging.host.numpy().data
        words = self.header_host[self.num_words :].view(torch.uint8).numpy()
        for source, place, counts, scalars in zip(self.sources, places, self._counts(), self.scalars, strict=True):
            if not place.row_ids.num_rows:
                continue
            row_ids, weights, *states = (
                Column(data[column.offset : column.end], column.row_bytes) for column in (place.row_ids, *place.columns)
            )
            yield FlushedTable(
                format=source.format,
                bounds=[0, *counts.cumsum(0).tolist()],
                row_ids=row_ids,
                weights=weights,
                states=tuple(states),
                scalars=tuple(
                    (
                        name,
                        dtype,
                        value if isinstance(value, bytes) else words[8 * value :][: dtype.size_bytes].tobytes(),
                    )
                    for name, dtype, value in scalars
                ),
            )

    def check_finite(self, places: list[PackedTable]) -> None:
        """Look at every value. REQUIRES: they are on the host.

        Raises:
            NonFiniteError: One is NaN or Inf.
        """
        for source, place in zip(self.sources, places, strict=True):
            if not place.row_ids.num_rows:
                continue
            row_ids = self.staging.host[place.row_ids.offset : place.row_ids.end].view(torch.int64)
            names = ["weights", *(f"state {state.name!r}" for state, _ in source.format.states)]
            dtypes = [source.format.spec.dtype, *(state.dtype for state, _ in source.format.states)]
            for name, dtype, column in zip(names, dtypes, place.columns, strict=True):
                values = self.staging.host[column.offset : column.end].view(TORCH_DTYPES[dtype])
                values = values.view(column.num_rows, -1)
                check_finite(source.format, name, values, row_ids)

    def _counts(self) -> Tensor:
        """Return int64[tables, shards]: rows."""
        return self.header_host[HEADER_WORDS : self.num_words].view(len(self.sources), self.num_shards)
