"""Gathering: the present values of rows are copied into a staging buffer, column by column, ordered by shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.dtypes import DTYPES
from headrace.schemas.errors import NonFiniteError
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.row_tally import RowTally
from headrace.schemas.tables import DType
from headrace.streamer.flush.importance import ImportanceFilter
from headrace.streamer.flush.layout import Column, FlushedDeletions, FlushedTable, TableFormat
from headrace.streamer.flush.staging import ALIGNMENT_BYTES, StagingBuffer
from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["RowGatherer", "check_finite", "copy_rows", "order_by_shard", "scalar_bytes"]

_Ids = npt.NDArray[np.int64]
_DELETION_BYTES = 8
_COPY_BYTES = 2**20


class RowGatherer:
    """Gathers rows of one tapped table.

    Thread: the training thread's.

    Attributes:
        table: The table.
        format: Layout of its rows on the wire.
        seed: `TableSpec.seed`, for the hash that gives a row's shard.
        filter: Holds back rows that hardly changed; None where all go out.
        num_shards: Shards of the server that the next flush is for.
    """

    def __init__(self, table: TappedTable, *, num_shards: int, rejects_non_finite: bool) -> None:
        """Prepare to gather from a table; with `rejects_non_finite`, NaN and Inf are errors."""
        self.table = table
        self.format = TableFormat(table.spec, table.shard)
        self.seed = table.spec.seed
        self.filter: ImportanceFilter | None = None
        self.num_shards, self._rejects_non_finite = num_shards, rejects_non_finite

    @property
    def longest_row_bytes(self) -> int:
        """Upper bound for one row in a buffer."""
        return self._padding_bytes + self.format.row_bytes

    def rows_that_fit(self, free_bytes: int) -> int:
        """Return how many rows, whichever they are, fit into `free_bytes` of a buffer."""
        return max(0, free_bytes - self._padding_bytes) // self.format.row_bytes

    def bytes_of_rows(self, num_rows: int) -> int:
        """Return an upper bound for this many rows in a buffer."""
        return num_rows * self.format.row_bytes + self._padding_bytes

    def gather(self, local_ids: _Ids, buffer: StagingBuffer) -> Iterator[FlushedTable | FlushedDeletions]:
        """Copy rows, int64[n], ascending and unique, to a buffer that has room, see `rows_that_fit`; yield them.

        Rows of virtual ids that the table does not have any more become deletions.

        Raises:
            NonFiniteError: A value is NaN or Inf, and these are rejected.
        """
        if self.table.index is not None:
            is_held = self.table.places(torch.from_numpy(local_ids)).numpy() >= 0
            if not is_held.all():
                yield self.deletions(local_ids[~is_held], buffer)
                local_ids = local_ids[is_held]
        if local_ids.size:
            yield self._gather(local_ids, buffer)

    def deletions(self, local_ids: _Ids, buffer: StagingBuffer) -> FlushedDeletions:
        """Copy the ids of rows to be deleted, int64[n], unique, to a buffer that has room; return them."""
        local_ids, bounds = self._route(local_ids)
        row_ids = self._carve_ids(torch.from_numpy(local_ids), buffer)[1]
        return FlushedDeletions(self.format, bounds, row_ids, self._tallies(local_ids, bounds))

    @staticmethod
    def deletions_that_fit(free_bytes: int) -> int:
        """Return how many deletions fit into `free_bytes` of a buffer."""
        return max(0, free_bytes - ALIGNMENT_BYTES) // _DELETION_BYTES

    @staticmethod
    def bytes_of_deletions(num_rows: int) -> int:
        """Return an upper bound for this many deletions in a buffer."""
        return num_rows * _DELETION_BYTES + ALIGNMENT_BYTES

    @property
    def _padding_bytes(self) -> int:
        # Rows of virtual ids that are gone become deletions, another column.
        return (self.format.num_columns + (self.table.index is not None)) * ALIGNMENT_BYTES

    def _gather(self, local_ids: _Ids, buffer: StagingBuffer) -> FlushedTable:
        fmt, table = self.format, self.table
        local_ids, bounds = self._route(local_ids)
        num_rows, ids = local_ids.size, torch.from_numpy(local_ids)
        row_ids, id_column = self._carve_ids(ids, buffer)
        places = table.places(ids)
        weights = buffer.carve(fmt.spec.dtype, num_rows, fmt.shard.width)
        if table.cache is None and not table.is_rounded:
            copy_rows(table.weights(), places, weights.tensor)
        else:  # some at a time, because each has a copy on the way
            rows_at_once = max(1, _COPY_BYTES // table.live_row_bytes)
            for first in range(0, num_rows, rows_at_once):
                some = slice(first, first + rows_at_once)
                weights.tensor[some].copy_(table.weights_at(places[some]))
        rounded_to = f" once rounded to {fmt.spec.dtype.name.lower()}" if table.is_rounded else ""
        self._check_finite("weights", weights.tensor, row_ids, rounded_to)
        states = []
        live_states = table.states() if fmt.states else {}
        for state, width in fmt.states:
            carved = buffer.carve(state.dtype, num_rows, width)
            copy_rows(live_states[state.name], places, carved.tensor)
            self._check_finite(f"state {state.name!r}", carved.tensor, row_ids)
            states.append(Column(carved.data, width * state.dtype.size_bytes))
        identities = None
        if fmt.spec.has_identities:
            carved = buffer.carve(DType.INT64, num_rows, 1)
            copy_rows(table.identities().view(-1, 1), places, carved.tensor)
            identities = Column(carved.data, 8)
        return FlushedTable(
            format=fmt,
            bounds=bounds,
            row_ids=id_column,
            weights=Column(weights.data, fmt.shard.width * fmt.spec.dtype.size_bytes),
            states=tuple(states),
            identities=identities,
            scalars=tuple((name, *scalar_bytes(value)) for name, value in table.scalars().items()),
            tallies=self._tallies(local_ids, bounds),
        )

    def _tallies(self, local_ids: _Ids, bounds: Sequence[int]) -> list[RowTally]:
        offset = self.table.row_offset
        return [RowTally.of([local_ids[first:end]], offset=offset) for first, end in pairwise(bounds)]

    def _carve_ids(self, local_ids: torch.Tensor, buffer: StagingBuffer) -> tuple[torch.Tensor, Column]:
        # The global ids, int64[n, 1], in the buffer; and the same as a column.
        carved = buffer.carve(DType.INT64, local_ids.numel(), 1)
        torch.add(local_ids, self.table.row_offset, out=carved.tensor.view(-1))
        return carved.tensor, Column(carved.data, 8)

    def _route(self, local_ids: _Ids) -> tuple[_Ids, list[int]]:
        """Return local ids ordered by shard and then by id, and the shards' bounds."""
        order, bounds = order_by_shard(self.seed, local_ids + self.table.row_offset, self.num_shards)
        return local_ids if order is None else local_ids[order], bounds

    def _check_finite(self, column: str, values: torch.Tensor, row_ids: torch.Tensor, when: str = "") -> None:
        if self._rejects_non_finite:
            check_finite(self.format, column, values, row_ids, when)


def order_by_shard(seed: int, row_ids: _Ids, num_shards: int) -> tuple[_Ids | None, list[int]]:
    """Return the order that puts rows, int64[n], of one shard together, None for one shard; and the shards' bounds."""
    if num_shards == 1:
        return None, [0, row_ids.size]
    shards = shards_of_rows(seed, row_ids, num_shards)
    # numpy sorts 16 bits by radix, several times as fast as 64.
    order = np.argsort(shards.astype(np.uint16), kind="stable")
    ends = np.cumsum(np.bincount(shards, minlength=num_shards))
    return order, [0, *ends.tolist()]


def check_finite(fmt: TableFormat, column: str, values: torch.Tensor, row_ids: torch.Tensor, when: str = "") -> None:
    """Check every value of a column, `[n, width]` on the CPU, of rows with these global ids, int64, n elements.

    Raises:
        NonFiniteError: A value is NaN or Inf; the message has the table and the column's name.
    """
    if not values.dtype.is_floating_point:
        return
    is_finite = torch.isfinite(values)
    if not bool(is_finite.all()):
        first = int((~is_finite.all(dim=1)).nonzero()[0])
        raise NonFiniteError(
            f"table {fmt.spec.fqn!r}: {column} of row {int(row_ids[first])} is NaN or Inf{when}; "
            "nothing of this flush was sent"
        )


def scalar_bytes(value: torch.Tensor) -> tuple[DType, bytes]:
    """Return the type and the bytes of a tensor with one element."""
    dtype = DTYPES[value.dtype]
    return dtype, value.detach().cpu().reshape(1).view(torch.uint8).numpy().tobytes()


def copy_rows(source: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
    """Copy rows of a tensor on any device, by their places, int64[n] on the CPU, to the CPU."""
    if source.device.type == "cpu":
        torch.index_select(source, 0, places, out=out)
    else:
        out.copy_(source.index_select(0, places.to(source.device)))
