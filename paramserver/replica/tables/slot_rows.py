"""The weights of a table in memory, by slot: in the table's dtype, in a narrower float, or packed to int8 or int4."""

from __future__ import annotations

import itertools
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.dtypes import TORCH_DTYPES
from headrace.kernels.quantization import (
    PRECISIONS,
    Precision,
    dequantize_rows,
    gather_rows,
    is_packed,
    quantize_rows,
    row_size_bytes,
    split_columns,
    sum_rows,
)
from headrace.paramserver.replica.tables.base import Ids, Pooling
from headrace.schemas.errors import ConfigError
from headrace.schemas.tables import ColumnShard, DType, TableSpec

__all__ = [
    "PRECISIONS",
    "Precision",
    "check_precision",
    "make_slot_rows",
    "opaque_rows",
    "pool_rows",
    "precision_of",
    "stored_row_bytes",
]

_Opaque = npt.NDArray[np.void]
_FLOATS = frozenset({DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
# Rows split in one step: what is unpacked meanwhile stays in the processor's caches.
_ROWS_PER_SPLIT = 65_536


def check_precision(precision: str | None) -> None:
    """Raise `ConfigError` if a setting is not the name of a precision."""
    if precision is not None and precision not in PRECISIONS:
        raise ConfigError(f"replica: precision is {precision!r}, must be one of {', '.join(PRECISIONS)}")


def precision_of(spec: TableSpec, precision: Precision | None) -> Precision | None:
    """Return the precision in which a table's rows are kept; None for the table's own dtype.

    One setting covers tables of all kinds, so it applies only where it makes rows smaller. Integer tables keep their
    dtype, a bfloat16 table does not become float16, and a row of one column does not become a code, scale and bias.
    """
    own_bytes = spec.dim * spec.dtype.size_bytes
    if precision is None or spec.dtype not in _FLOATS or row_size_bytes(spec.dim, precision) >= own_bytes:
        return None
    return precision


def stored_row_bytes(spec: TableSpec, precision: Precision | None) -> int:
    """Return the memory of one row's weights if the row is written whole, bytes."""
    kept = precision_of(spec, precision)
    return spec.dim * spec.dtype.size_bytes if kept is None else row_size_bytes(spec.dim, kept)


class _SlotRows(Protocol):
    """One row per slot. An unwritten slot has the default row, as exactly as the precision allows.

    Thread: as `ReplicaTable`. Slots are int64[n]; `put` and `clear` need unique ones.
    """

    @property
    def size_bytes(self) -> int: ...
    @property
    def holds_default(self) -> bool: ...  # whether the precision keeps the default row bit for bit
    # A copy, `[n, dim]` in the table's dtype.
    def take(self, slots: Ids) -> torch.Tensor: ...
    # Bags `[b, dim]` in the table's dtype; see `ReplicaTable.pool`.
    def pool(self, slots: Ids, offsets: torch.Tensor, mode: Pooling, weights: torch.Tensor | None) -> torch.Tensor: ...
    # Write the shard's columns: `[n]` contiguous opaque rows in the table's dtype, or the default's columns.
    def put(self, slots: Ids, shard: ColumnShard, values: _Opaque) -> None: ...
    def clear(self, slots: Ids, shard: ColumnShard) -> None: ...
    def grow(self, num_slots: int) -> None: ...


def make_slot_rows(spec: TableSpec, num_slots: int, default: torch.Tensor, precision: Precision | None) -> _SlotRows:
    """Return `num_slots` rows that are all the default, `[dim]` in the table's dtype, in `precision_of` the setting."""
    kept = precision_of(spec, precision)
    if kept is not None and is_packed(kept):
        return _PackedRows(spec, num_slots, default, kept)
    return _PlainRows(num_slots, default, kept)


def pool_rows(rows: torch.Tensor, offsets: torch.Tensor, mode: Pooling, weights: torch.Tensor | None) -> torch.Tensor:
    """Return pooled bags of rows that already lie in the order of the bags."""
    return torch.nn.functional.embedding_bag(
        torch.arange(rows.shape[0]), rows, offsets, mode=mode, per_sample_weights=weights, include_last_offset=True
    )


class _PlainRows:
    """Rows as elements of one dtype, the table's own (precision None) or a narrower float; see `_SlotRows`."""

    def __init__(self, num_slots: int, default: torch.Tensor, precision: Precision | None) -> None:
        self._dtype = default.dtype
        self._precision = precision
        self._default = default if precision is None else quantize_rows(default[None], precision)[0]
        self.holds_default = torch.equal(self._default.to(self._dtype), default)
        self._weights = _repeat(self._default[None], num_slots)

    @property
    def size_bytes(self) -> int:
        return self._weights.nbytes

    def take(self, slots: Ids) -> torch.Tensor:
        rows = self._weights.index_select(0, torch.from_numpy(slots))
        return rows if self._precision is None else rows.to(self._dtype)

    def pool(self, slots: Ids, offsets: torch.Tensor, mode: Pooling, weights: torch.Tensor | None) -> torch.Tensor:
        if self._precision is not None:  # torch would round the sums to the narrower float
            return pool_rows(self.take(slots), offsets, mode, weights)
        return torch.nn.functional.embedding_bag(
            torch.from_numpy(slots),
            self._weights,
            offsets,
            mode=mode,
            per_sample_weights=weights,
            include_last_offset=True,
        )

    def put(self, slots: Ids, shard: ColumnShard, values: _Opaque) -> None:
        if self._precision is not None:
            values = opaque_rows(quantize_rows(_as_rows(values, self._dtype), self._precision))
        # As opaque bytes: one memcpy a row for any dtype, also from buffers that torch does not accept.
        self._columns(self._weights, shard)[slots] = values

    def clear(self, slots: Ids, shard: ColumnShard) -> None:
        self._columns(self._weights, shard)[slots] = self._columns(self._default[None], shard)[0]

    def grow(self, num_slots: int) -> None:
        weights = _repeat(self._default[None], num_slots)
        weights[: self._weights.shape[0]] = self._weights
        self._weights = weights

    def _columns(self, rows: torch.Tensor, shard: ColumnShard) -> _Opaque:
        first, width = shard.offset * rows.itemsize, shard.width * rows.itemsize
        view: npt.NDArray[np.uint8] = rows.view(torch.uint8).numpy()
        return view[:, first : first + width].view(f"V{width}")[:, 0]


class _PackedRows:
    """Rows as int8 or int4 codes with a scale and a bias; see `_SlotRows`.

    Columns that are written together are packed together. If trainers write a table in column shards, each shard of a
    row has its own scale. An update then needs none of the row's other columns, so no row is ever packed again from
    unpacked values. When writes begin to use other shards, the parts are split at the new boundaries. A split keeps
    codes, scales and biases, so an unwritten row reads as before, bit for bit.
    """

    def __init__(self, spec: TableSpec, num_slots: int, default: torch.Tensor, precision: Precision) -> None:
        self._dtype = TORCH_DTYPES[spec.dtype]
        self._precision = precision
        self._default = quantize_rows(default[None], precision)
        self._dim = spec.dim
        unpacked = dequantize_rows(self._default, precision, spec.dim)[0].to(self._dtype)
        self.holds_default = torch.equal(unpacked, default)
        # In column order; together they cover each column once.
        self._parts: list[tuple[ColumnShard, torch.Tensor]] = [(spec.whole, _repeat(self._default, num_slots))]

    @property
    def size_bytes(self) -> int:
        return sum(packed.nbytes for _, packed in self._parts)

    def take(self, slots: Ids) -> torch.Tensor:
        at, parts = torch.from_numpy(slots), self._parts  # read once: an update may replace it
        found = [gather_rows(packed, at, self._precision, shard.width) for shard, packed in parts]
        return (found[0] if len(found) == 1 else torch.cat(found, dim=1)).to(self._dtype)

    def pool(self, slots: Ids, offsets: torch.Tensor, mode: Pooling, weights: torch.Tensor | None) -> torch.Tensor:
        """Return bags; packed rows of float32 tables are summed unpacked, exact up to the rounding of the sum."""
        if self._dtype != torch.float32:
            return pool_rows(self.take(slots), offsets, mode, weights)
        at = torch.from_numpy(slots)
        sums = [sum_rows(packed, at, offsets, self._precision, shard.width, weights) for shard, packed in self._parts]
        pooled = sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)
        return pooled if mode == "sum" else pooled / offsets.diff().clamp(min=1)[:, None]

    def put(self, slots: Ids, shard: ColumnShard, values: _Opaque) -> None:
        rows = _as_rows(values, self._dtype)
        for part, packed in self._parts_of(shard):
            first = part.offset - shard.offset
            codes = quantize_rows(rows[:, first : first + part.width], self._precision)
            opaque_rows(packed)[slots] = opaque_rows(codes)

    def clear(self, slots: Ids, shard: ColumnShard) -> None:
        for part, packed in self._parts_of(shard):
            opaque_rows(packed)[slots] = opaque_rows(self._default_of(part))[0]

    def grow(self, num_slots: int) -> None:
        parts = []
        for shard, packed in self._parts:
            grown = _repeat(self._default_of(shard), num_slots)
            grown[: packed.shape[0]] = packed
            parts.append((shard, grown))
        self._parts = parts

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
            target = torch.empty(packed.shape[0], size, dtype=torch.uint8)
            for start in range(0, packed.shape[0], _ROWS_PER_SPLIT):
                some = slice(start, start + _ROWS_PER_SPLIT)
                target[some] = split_columns(
                    packed[some], self._precision, first - part.offset, piece.width, part.width
                )
            pieces.append((piece, target))
        return pieces


def _as_rows(values: _Opaque, dtype: torch.dtype) -> torch.Tensor:
    """Return opaque rows as `[n, width]`; a copy, because torch does not accept read-only memory."""
    return torch.from_numpy(values.view(np.uint8).reshape(values.size, -1).copy()).view(dtype)


def opaque_rows(rows: torch.Tensor) -> _Opaque:
    """Return `[n]` opaque rows over the memory of a contiguous `[n, width]`."""
    view: _Opaque = rows.view(torch.uint8).numpy().view(f"V{rows.shape[1] * rows.itemsize}")[:, 0]
    return view


def _repeat(row: torch.Tensor, number: int) -> torch.Tensor:
    # Zeros are left untouched: the system allocates a page only when something is written there.
    return row.repeat(number, 1) if row.any() else torch.zeros(number, row.shape[1], dtype=row.dtype)
