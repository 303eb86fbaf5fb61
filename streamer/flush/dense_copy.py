"""The dense part of flushes: all dense tensors at one step, as rows in memory of their own."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from headrace.schemas.errors import HeadraceError, NonFiniteError
from headrace.schemas.tables import DType
from headrace.streamer.flush.gather import copy_rows, order_by_shard, scalar_bytes
from headrace.streamer.flush.layout import Column, FlushedTable, TableFormat
from headrace.streamer.flush.staging import ALIGNMENT_BYTES, StagingBuffer
from headrace.streamer.taps.dense_tensors import DenseTensor, DenseTensors, DenseValues

__all__ = ["DenseCopy"]

# The next dense part is due by the median time that this many took on the training thread.
_NUM_COSTS = 5


class DenseCopy:
    """Copies the dense tensors of all attached models, as far as this rank publishes them, and lends them to flushes.

    The copy is in use until its flush is durable. Thread: the training thread's, except `give_back`.

    Attributes:
        is_free: The copy is in no flush. Thread: any.
        is_current: The tensors have not changed since they were copied.
        size_bytes: What a flush carries of them.
    """

    def __init__(
        self, num_shards: int, *, rejects_non_finite: bool, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin without tensors; with `rejects_non_finite`, NaN and Inf are errors."""
        self._num_shards, self._rejects_non_finite, self._monotonic_s = num_shards, rejects_non_finite, monotonic_s
        self._models: list[tuple[DenseTensors, dict[str, _Place]]] = []
        self._costs_s: deque[float] = deque(maxlen=_NUM_COSTS)
        self.is_free, self.is_current = True, False
        self.size_bytes = 0

    @property
    def is_attached(self) -> bool:
        """Whether there are tensors, here or on other ranks."""
        return bool(self._models)

    @property
    def is_sharded(self) -> bool:
        """Whether there are DTensors, which all ranks read together."""
        return any(tensors.is_sharded for tensors, _ in self._models)

    @property
    def names(self) -> set[str]:
        """Names of all tensors, also of those that other ranks publish."""
        return {each.spec.fqn for tensors, _ in self._models for each in tensors.all}

    @property
    def paths(self) -> set[str]:
        """Paths of all tensors in their models."""
        return {each.path for tensors, _ in self._models for each in tensors.all}

    @property
    def cost_s(self) -> float:
        """Median time of a copy on the training thread; 0 before the first."""
        return sorted(self._costs_s)[len(self._costs_s) // 2] if self._costs_s else 0.0

    def add(self, tensors: DenseTensors, published: list[DenseTensor]) -> None:
        """Add a model's tensors, of which this rank publishes some, and allocate their memory."""
        formats = [TableFormat(each.spec, each.spec.whole) for each in published]
        padding_bytes = ALIGNMENT_BYTES * sum(fmt.num_columns for fmt in formats)
        size_bytes = sum(fmt.row_bytes * fmt.spec.num_rows for fmt in formats)
        is_pinned = any(tensor.is_cuda for tensor in tensors.live().values())
        memory = StagingBuffer(size_bytes + padding_bytes, is_pinned=is_pinned)
        places = {
            each.path: _Place(fmt, memory, self._num_shards) for each, fmt in zip(published, formats, strict=True)
        }
        self._models.append((tensors, places))
        self.size_bytes += size_bytes
        self.is_current = False

    def change_shards(self, num_shards: int) -> None:
        """Order the rows of the copy by the shards of another server; it stays current. REQUIRES: it is free."""
        assert self.is_free
        was_current, self.is_current = self.is_current, False  # if this is interrupted
        self._num_shards = num_shards
        for _, places in self._models:
            for place in places.values():
                place.order_by_shard(num_shards)
        self.is_current = was_current

    def capture(self) -> None:
        """Copy all tensors.

        If there are DTensors, all ranks call it together. It reads every tensor even if one fails, because other ranks
        wait for that. REQUIRES: it is free.

        Raises:
            NonFiniteError: A value is NaN or Inf, and these are rejected.
            UnsupportedModelError: A tensor is not what was attached.
        """
        assert self.is_free
        begin_s = self._monotonic_s()
        failure: HeadraceError | None = None
        self.is_current = False
        with torch.no_grad():
            for tensors, places in self._models:
                live = tensors.live()
                for each in tensors.all:
                    place = places.get(each.path)
                    if place is None and not each.is_sharded:
                        continue
                    try:
                        values = tensors.read(each, live)
                        if place is not None:
                            place.copy(values, rejects_non_finite=self._rejects_non_finite)
                    except HeadraceError as exc:
                        failure = failure or exc
        if failure is not None:
            raise failure
        self.is_current = True
        self._costs_s.append(self._monotonic_s() - begin_s)

    def lend(self, buffer: StagingBuffer) -> list[FlushedTable]:
        """Return the copy for the flush in a staging buffer, which gives it back. REQUIRES: it is current and free."""
        assert self.is_current and self.is_free
        buffer.on_cleared = self.give_back  # first: an interrupt between the two loses nothing
        self.is_free = False
        return [place.table for _, places in self._models for place in places.values()]

    def give_back(self) -> None:
        """Note that no flush needs the copy any more. Thread: any."""
        self.is_free = True


class _Place:
    """One tensor's rows, ordered by shard, in memory."""

    def __init__(self, fmt: TableFormat, memory: StagingBuffer, num_shards: int) -> None:
        spec = fmt.spec
        ids = memory.carve(DType.INT64, spec.num_rows, 1)
        self._ids = ids.tensor.view(-1)
        self._order: torch.Tensor | None = None
        torch.arange(spec.num_rows, out=self._ids, device=self._ids.device, dtype=self._ids.dtype)
        dtypes = [spec.dtype, *(state.dtype for state in spec.states)]
        carved = [memory.carve(dtype, spec.num_rows, spec.dim) for dtype in dtypes]
        self._columns = [each.tensor.zero_() for each in carved]  # zeros behind the last element stay
        weights, *states = (
            Column(each.data, spec.dim * dtype.size_bytes) for each, dtype in zip(carved, dtypes, strict=True)
        )
        self.table = FlushedTable(
            format=fmt, bounds=[], row_ids=Column(ids.data, 8), weights=weights, states=tuple(states)
        )
        self.order_by_shard(num_shards)

    def order_by_shard(self, num_shards: int) -> None:
        """Bring the rows, with their values, into the order of a server's shards."""
        spec = self.table.format.spec
        row_ids = np.arange(spec.num_rows, dtype=np.int64)
        order, bounds = order_by_shard(spec.seed, row_ids, num_shards)
        now = torch.from_numpy(row_ids if order is None else order)
        place_of = torch.empty_like(now)
        place_of[self._ids] = torch.from_numpy(row_ids)
        for column in self._columns:
            column.copy_(column[place_of[now]])
        self._ids.copy_(now)
        self._order = None if order is None else now
        self.table = dataclasses.replace(self.table, bounds=bounds)

    def copy(self, values: DenseValues, *, rejects_non_finite: bool) -> None:
        """Copy a tensor's values; raise NonFiniteError if they have to be finite and are not."""
        spec = self.table.format.spec
        names = ["it", *(f"its state {state.name!r}" for state in spec.states)]
        for name, column, tensor in zip(names, self._columns, (values.weights, *values.states), strict=True):
            self._copy(column, tensor)
            if rejects_non_finite and column.is_floating_point() and not bool(torch.isfinite(column).all()):
                raise NonFiniteError(
                    f"dense tensor {spec.fqn!r}: {name} has NaN or Inf; nothing of this flush was sent"
                )
        scalars = tuple((name, *scalar_bytes(value)) for name, value in values.scalars.items())
        self.table = dataclasses.replace(self.table, scalars=scalars)

    def _copy(self, column: torch.Tensor, tensor: torch.Tensor) -> None:
        elements, (num_rows, dim) = tensor.reshape(-1), column.shape
        if self._order is None:
            column.view(-1)[: elements.numel()].copy_(elements)
            return
        num_full = elements.numel() // dim
        full = elements[: num_full * dim].view(num_full, dim)
        runs = [(0, num_rows)]
        if num_full < num_rows:  # the last row is not full
            at = int((self._order == num_full).nonzero())
            column[at, : elements.numel() - num_full * dim].copy_(elements[num_full * dim :])
            runs = [(0, at), (at + 1, num_rows)]
        for first, end in runs:
            if first < end:
                copy_rows(full, self._order[first:end], column[first:end])
