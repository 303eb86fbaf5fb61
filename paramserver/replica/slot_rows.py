"""The weights of a table in memory, by slot: as they came, in a narrower float, or packed to int8 or int4."""

from __future__ import annotations

import itertools
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.row_quantization import (
    Precision,
    dequantize_rows,
    gather_rows,
    is_packed,
    quantize_rows,
    row_size_bytes,
    split_columns,
    sum_rows,
)
from headrace.kernels.torch_dtypes import TORCH_DTYPES
from headrace.paramserver.replica.precision import precision_of
from headrace.schemas.tables import ColumnShard, TableSpec

__all__ = ["PackedRows", "PlainRows", "SlotRows", "make_slot_rows", "pool_rows"]

_Slots = npt.NDArray[np.int64]
_Opaque = npt.NDArray[np.void]
# Rows that are split at once: what is unpacked meanwhile stays in the caches.
_ROWS_PER_SPLIT = 65_536


class SlotRows(Protocol):
    """One row a slot. A slot that nothing was put into holds the default row, as far as the precision can hold it.

    Thread: as `ReplicaTable`.
    """

    @property
    def size_bytes(self) -> int:
        """Memory that they take."""

    @property
    def holds_default(self) -> bool:
        """Whether the default row reads as what it is, bit for bit."""

    def take(self, slots: _Slots) -> torch.Tensor:
        """Return `[n, dim]` in the table's dtype, a copy, of int64[n] slots."""

    def pool(
        self, slots: _Slots, offsets: torch.Tensor, mode: Literal["sum", "mean"], weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Return `[b, dim]` in the table's dtype; see `ReplicaTable.pool`."""

    def put(self, slots: _Slots, shard: ColumnShard, values: _Opaque) -> None:
        """Write some columns of rows.

        Args:
            slots: int64[n], each once.
            shard: The columns.
            values: `[n]`, as opaque bytes of the table's dtype, contiguous.
        """

    def clear(self, slots: _Slots, shard: ColumnShard) -> None:
        """Write the default's columns into rows."""

    def grow(self, num_slots: int) -> None:
        """Make room for so many slots, more than there are."""


def make_slot_rows(spec: TableSpec, num_slots: int, default: torch.Tensor, wanted: Precision | None) -> SlotRows:
    """Return rows of a table, all of them the default.

    Args:
        spec: What the table is.
        num_slots: Rows.
        default: `[dim]`, in the table's dtype.
        wanted: Precision; see `precision_of`.
    """
    precision = precision_of(spec, wanted)
    if precision is not None and is_packed(precision):
        return PackedRows(spec, num_slots, default, precision)
    return PlainRows(spec, num_slots, default, precision)


def pool_rows(
    rows: torch.Tensor, offsets: torch.Tensor, mode: Literal["sum", "mean"], weights: torch.Tensor | None
) -> torch.Tensor:
    """Return pooled bags of rows that lie in the order in which the bags have them."""
    return torch.nn.functional.embedding_bag(
        torch.arange(rows.shape[0]), rows, offsets, mode=mode, per_sample_weights=weights, include_last_offset=True
    )


class PlainRows:
    """Rows as elements of a dtype: the table's own, or a narrower one; see `SlotRows`.

    Attributes:
        weights: `[slots, dim]` on the CPU.
    """

    def __init__(self, spec: TableSpec, num_slots: int, default: torch.Tensor, precision: Precision | None) -> None:
        """See `make_slot_rows`; a precision of None is the table's own dtype."""
        self._dtype = default.dtype
        self._precision = precision
        self._default = default if precision is None else quantize_rows(default[None], precision)[0]
        self.holds_default = torch.equal(self._default.to(self._dtype), default)
        self.weights = self._new(num_slots)

    @property
    def size_bytes(self) -> int:
        """See `SlotRows`."""
        return self.weights.nbytes

    def take(self, slots: _Slots) -> torch.Tensor:
        """See `SlotRows`."""
        rows = self.weights.index_select(0, torch.from_numpy(slots))
        return rows if self._precision is None else rows.to(self._dtype)

    def pool(
        self, slots: _Slots, offsets: torch.Tensor, mode: Literal["sum", "mean"], weights: torch.Tensor | None
    ) -> torch.Tensor:
        """See `SlotRows`."""
        if self._precision is not None:  # torch would round the sums to the narrower float
            return pool_rows(self.take(slots), offsets, mode, weights)
        return torch.nn.functional.embedding_bag(
            torch.from_numpy(slots),
            self.weights,
            offsets,
            mode=mode,
            per_sample_weights=weights,
            include_last_offset=True,
        )

    def put(self, slots: _Slots, shard: ColumnShard, values: _Opaque) -> None:
        """See `SlotRows`."""
        if self._precision is not None:
            narrow = quantize_rows(_as_rows(values, self._dtype), self._precision)
            values = _opaque(narrow)
        # As opaque bytes: one memcpy a row, whatever the type, and from buffers that torch would not take.
        self._columns(self.weights, shard)[slots] = values

    def clear(self, slots: _Slots, shard: ColumnShard) -> None:
        """See `SlotRows`."""
        self._columns(self.weights, shard)[slots] = self._columns(self._default[None], shard)[0]

    def grow(self, num_slots: int) -> None:
        """See `SlotRows`."""
        weights = self._new(num_slots)
        weights[: self.weights.shape[0]] = self.weights
        self.weights = weights

    def _columns(self, rows: torch.Tensor, shard: ColumnShard) -> _Opaque:
        first, width = shard.offset * rows.itemsize, shard.width * rows.itemsize
        view: npt.NDArray[np.uint8] = rows.view(torch.uint8).numpy()
        return view[:, first : first + width].view(f"V{width}")[:, 0]

    def _new(self, num_slots: int) -> torch.Tensor:
        if not self._default.any():
            return torch.zeros(num_slots, self._default.numel(), dtype=self._default.dtype)
        return self._default.repeat(num_slots, 1)


class PackedRows:
    """Rows as int8 or int4 codes with a scale and a bias; see `SlotRows`.

    Columns that are written together are packed together. Where trainers write a table in column shards, each shard of
    a row has a scale of its own, and an update needs nothing of the row's other columns, so that no row is ever packed
    from what was unpacked. When shards begin to be written otherwise, those there are split where the new ones begin
    and end; that keeps codes, scales and biases, so a row that is not written reads as before, bit for bit.
    """

    def __init__(self, spec: TableSpec, num_slots: int, default: torch.Tensor, precision: Precision) -> None:
        """See `make_slot_rows`; the precision is int8 or int4."""
        self._dtype = TORCH_DTYPES[spec.dtype]
        self._precision = precision
        self._default = quantize_rows(default[None], precision)
        self._dim = spec.dim
        self.holds_default = torch.equal(
            dequantize_rows(self._default, precision, spec.dim)[0].to(self._dtype), default
        )
        # In the order of their columns; together they have each column once.
        self._parts: list[tuple[ColumnShard, torch.Tensor]] = [(spec.whole, _repeat(self._default, num_slots))]

    @property
    def size_bytes(self) -> int:
        """See `SlotRows`."""
        return sum(packed.nbytes for _, packed in self._parts)

    def take(self, slots: _Slots) -> torch.Tensor:
        """See `SlotRows`."""
        at, parts = torch.from_numpy(slots), self._parts  # once: an update may put others in their place
        found = [gather_rows(packed, at, self._precision, shard.width) for shard, packed in parts]
        return (found[0] if len(found) == 1 else torch.cat(found, dim=1)).to(self._dtype)

    def pool(
        self, slots: _Slots, offsets: torch.Tensor, mode: Literal["sum", "mean"], weights: torch.Tensor | None
    ) -> torch.Tensor:
        """See `SlotRows`. Of float32 tables, packed rows are summed as they lie: up to the rounding of the sum."""
        if self._dtype != torch.float32:
            return pool_rows(self.take(slots), offsets, mode, weights)
        at = torch.from_numpy(slots)
        sums = [sum_rows(packed, at, offsets, self._precision, shard.width, weights) for shard, packed in self._parts]
        pooled = sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)
        return pooled if mode == "sum" else pooled / offsets.diff().clamp(min=1)[:, None]

    def put(self, slots: _Slots, shard: ColumnShard, values: _Opaque) -> None:
        """See `SlotRows`."""
        rows = _as_rows(values, self._dtype)
        for part, packed in self._parts_of(shard):
            first = part.offset - shard.offset
            codes = quantize_rows(rows[:, first : first + part.width], self._precision)
            _opaque(packed)[slots] = _opaque(codes)

    def clear(self, slots: _Slots, shard: ColumnShard) -> None:
        """See `SlotRows`."""
        for part, packed in self._parts_of(shard):
            _opaque(packed)[slots] = _opaque(self._default_of(part))[0]

    def grow(self, num_slots: int) -> None:
        """See `SlotRows`."""
        parts = []
        for shard, packed in self._parts:
            grown = _repeat(self._default_of(shard), num_slots)
            grown[: packed.shape[0]] = packed
            parts.append((shard, grown))
        self._parts = parts

    def _default_of(self, shard: ColumnShard) -> torch.Tensor:
        return split_columns(self._default, self._precision, shard.offset, shard.width, self._dim)

    def _parts_of(self, shard: ColumnShard) -> list[tuple[ColumnShard, torch.Tensor]]:
        """Return the parts that together are some columns, after splitting those that are more."""
        end = shard.offset + shard.width
        if any(part.offset < cut < part.offset + part.width for part, _ in self._parts for cut in (shard.offset, end)):
            self._parts = [
                piece for part, packed in self._parts for piece in self._split(part, packed, (shard.offset, end))
            ]
        return [(part, packed) for part, packed in self._parts if shard.offset <= part.offset < end]

    def _split(
        self, part: ColumnShard, packed: torch.Tensor, cuts: tuple[int, int]
    ) -> list[tuple[ColumnShard, torch.Tensor]]:
        end = part.offset + part.width
        edges = [part.offset, *(cut for cut in cuts if part.offset < cut < end), end]
        if len(edges) == 2:
            return [(part, packed)]
        pieces = []
        for first, last in itertools.pairwise(edges):
            piece = ColumnShard(offset=first, width=last - first)
            size = row_size_bytes(piece.width, self._precision)
            target = torch.empty(packed.shape[0], size, dtype=torch.uint8)
            for start in range(0, packed.shape[0], _ROWS_PER_SPLIT):
                some = slice(start, start + _ROWS_PER_SPLIT)
                target[some] = split_columns(
                    packed[some], self._precision, first - part.offset, piece.width, part.width
                )
            pieces.append((piece, target))
        return pieces


def _as_rows(values: _Opaque, dtype: torch.dtype) -> torch.Tensor:
    """Return `[n, width]` of opaque rows; a copy, as torch takes no memory that it must not write to."""
    return torch.from_numpy(values.view(np.uint8).reshape(values.size, -1).copy()).view(dtype)


def _opaque(rows: torch.Tensor) -> _Opaque:
    """Return `[n]` opaque rows over the memory of a contiguous `[n, width]`."""
    view: _Opaque = rows.view(torch.uint8).numpy().view(f"V{rows.shape[1] * rows.itemsize}")[:, 0]
    return view


def _repeat(row: torch.Tensor, number: int) -> torch.Tensor:
    # Zeros are not touched: the machine gives them a page at a time, when something is written there.
    return row.repeat(number, 1) if row.any() else torch.zeros(number, row.shape[1], dtype=row.dtype)
