"""A table's weights by slot in fewer bits: arrays go in and come out in the table's dtype."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.dtypes import TORCH_DTYPES, bits_of, tensor_of
from headrace.kernels.precisions import Precision, row_size_bytes
from headrace.kernels.quantization import (
    dequantize_rows,
    gather_rows,
    quantize_rows,
    split_columns,
    sum_rows,
)
from headrace.schemas.tables import ColumnShard, DType, TableSpec

__all__ = ["QuantizedRows", "narrowed", "use_one_thread", "widened"]

_Rows = npt.NDArray[Any]
_Slots = npt.NDArray[np.int64]
# Rows split in one step: what is unpacked meanwhile stays in the processor's caches.
_ROWS_PER_SPLIT = 65_536


def use_one_thread() -> None:
    """Let torch compute on the calling thread alone, in the whole process: lookups run side by side."""
    torch.set_num_threads(1)


def narrowed(rows: _Rows, dtype: DType, precision: Precision) -> _Rows:
    """Return floating rows `[n, width]` of a dtype in fewer bits, with the bytes of `quantize_rows`."""
    # A copy, because torch does not accept read-only memory.
    return _array_of(quantize_rows(tensor_of(rows.copy(), dtype), precision))


def widened(rows: _Rows, dtype: DType, precision: Precision) -> _Rows:
    """Return rows of `narrowed` that are elements, fp32, fp16 or bf16, in a dtype again."""
    kept = {"fp32": DType.FLOAT32, "fp16": DType.FLOAT16, "bf16": DType.BFLOAT16}[precision]
    return _array_of(tensor_of(rows, kept).to(TORCH_DTYPES[dtype]))


class QuantizedRows:
    """Rows as int8 or int4 codes with a scale and a bias; all are the default, `[dim]` in the table's dtype, at first.

    Columns that are written together are packed together. If trainers write a table in column shards, each shard of a
    row has its own scale. An update then needs none of the row's other columns, so no row is ever packed again from
    unpacked values. When writes begin to use other shards, the parts are split at the new boundaries. A split keeps
    codes, scales and biases, so an unwritten row reads as before, bit for bit.

    Thread: one writes; others may read meanwhile, and read again. Slots are int64[n], unique for `put` and `clear`.

    Attributes:
        holds_default: Whether the precision keeps the default row bit for bit.
    """

    def __init__(self, spec: TableSpec, num_slots: int, default: _Rows, precision: Precision) -> None:
        """Create `num_slots` rows."""
        self._dtype = spec.dtype
        self._precision = precision
        self._default = torch.from_numpy(narrowed(default[None], spec.dtype, precision))
        self._dim = spec.dim
        unpacked = dequantize_rows(self._default, precision, spec.dim)
        self.holds_default = bool(np.array_equal(self._in_own_dtype(unpacked)[0], default))
        # In column order; together they cover each column once.
        self._parts: list[tuple[ColumnShard, torch.Tensor]] = [(spec.whole, _repeat(self._default, num_slots))]

    @property
    def size_bytes(self) -> int:
        """Memory of the rows."""
        return sum(packed.nbytes for _, packed in self._parts)

    def take(self, slots: _Slots) -> _Rows:
        """Return a copy of rows, `[n, dim]` in the table's dtype."""
        at, parts = torch.from_numpy(slots), self._parts  # read once: an update may replace it
        found = [gather_rows(packed, at, self._precision, shard.width) for shard, packed in parts]
        return self._in_own_dtype(found[0] if len(found) == 1 else torch.cat(found, dim=1))

    def locate(self, slots: _Slots) -> tuple[QuantizedRows | _Rows, _Slots]:
        """Return what to pool some rows from, and where they are in it; rows of float32 are not unpacked before."""
        if self._dtype is not DType.FLOAT32:
            return self.take(slots), np.arange(slots.size)
        return self, slots

    def pool(
        self, slots: _Slots, offsets: torch.Tensor, mode: Literal["sum", "mean"], weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Return bags of rows of a float32 table, `[b, dim]`, exact up to the rounding of the sum; see `sum_rows`."""
        at = torch.from_numpy(slots)
        sums = [sum_rows(packed, at, offsets, self._precision, shard.width, weights) for shard, packed in self._parts]
        pooled = sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)
        return pooled if mode == "sum" else pooled / offsets.diff().clamp(min=1)[:, None]

    def put(self, slots: _Slots, shard: ColumnShard, rows: _Rows) -> None:
        """Write a shard's columns, `[n, width]` in the table's dtype."""
        for part, packed in self._parts_of(shard):
            first = part.offset - shard.offset
            codes = narrowed(rows[:, first : first + part.width], self._dtype, self._precision)
            _opaque(packed)[slots] = _opaque(torch.from_numpy(codes))

    def clear(self, slots: _Slots, shard: ColumnShard) -> None:
        """Write the default's columns."""
        for part, packed in self._parts_of(shard):
            _opaque(packed)[slots] = _opaque(self._default_of(part))[0]

    def grow(self, num_slots: int) -> None:
        """Add rows that are the default."""
        parts = []
        for shard, packed in self._parts:
            grown = _repeat(self._default_of(shard), num_slots)
            grown[: packed.shape[0]] = packed
            parts.append((shard, grown))
        self._parts = parts

    def _in_own_dtype(self, rows: torch.Tensor) -> _Rows:
        return _array_of(rows.to(TORCH_DTYPES[self._dtype]))

    def _default_of(self, shard: ColumnShard) -> torch.Tensor:
        return split_columns(self._default, self._precision, shard.offset, shard.width, self._dim)

    def _parts_of(self, shard: ColumnShard) -> list[tuple[ColumnShard, torch.Tensor]]:
        """Return the parts that make up some columns, splitting parts that reach beyond them."""
        ends = shard.offset, shard.offset + shard.width
        if any(part.offset < end < part.offset + part.width for part, _ in self._parts for end in ends):
            self._parts = [piece for part, packed in self._parts for piece in self._split(part, packed, ends)]
        return [(part, packed) for part, packed in self._parts if ends[0] <= part.offset < ends[1]]

    def _split(
        self, part: ColumnShard, packed: torch.Tensor, boundaries: tuple[int, int]
    ) -> list[tuple[ColumnShard, torch.Tensor]]:
        end = part.offset + part.width
        edges = [part.offset, *(column for column in boundaries if part.offset < column < end), end]
        if len(edges) == 2:
            return [(part, packed)]
        pieces = []
        for first, last in itertools.pairwise(edges):
            piece = ColumnShard(offset=first, width=last - first)
            size = row_size_bytes(piece.width, self._precision)
            target = torch.empty(packed.shape[0], size, dtype=torch.uint8, device="cpu")
            for start in range(0, packed.shape[0], _ROWS_PER_SPLIT):
                some = slice(start, start + _ROWS_PER_SPLIT)
                target[some] = split_columns(
                    packed[some], self._precision, first - part.offset, piece.width, part.width
                )
            pieces.append((piece, target))
        return pieces


def _array_of(rows: torch.Tensor) -> _Rows:
    bits = bits_of(rows)
    return bits.view(np.uint16) if rows.dtype is torch.bfloat16 else bits


def _opaque(rows: torch.Tensor) -> npt.NDArray[np.void]:
    view: npt.NDArray[np.void] = rows.numpy().view(f"V{rows.shape[1]}")[:, 0]
    return view


def _repeat(row: torch.Tensor, number: int) -> torch.Tensor:
    # Zeros are left untouched: the system allocates a page only when something is written there.
    return row.repeat(number, 1) if row.any() else torch.zeros(number, row.shape[1], dtype=row.dtype, device="cpu")
