"""The weights of a table in memory, by slot: in the table's dtype, in a narrower float, or packed to int8 or int4."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from headrace.kernels.precisions import PRECISIONS, Precision, is_packed, row_size_bytes
from headrace.paramserver.replica.tables.base import Ids, Rows
from headrace.schemas.errors import ConfigError
from headrace.schemas.extras import install_command
from headrace.schemas.tables import ColumnShard, DType, TableSpec

if TYPE_CHECKING:
    from headrace.kernels.quantized_rows import QuantizedRows

__all__ = [
    "PRECISIONS",
    "Precision",
    "check_precision",
    "make_slot_rows",
    "opaque_rows",
    "precision_of",
    "quantized_rows",
    "stored_row_bytes",
]

_Opaque = npt.NDArray[np.void]
_FLOATS = frozenset({DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})


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


def quantized_rows() -> ModuleType:
    """Return the module that keeps rows in fewer bits, which torch computes.

    Raises:
        ConfigError: torch is not installed.
    """
    try:
        from headrace.kernels import quantized_rows
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        raise ConfigError(
            f"replica: a precision needs PyTorch, which is not installed: leave it out, or {install_command('torch')}"
        ) from exc
    return quantized_rows


class _SlotRows(Protocol):
    """One row per slot. An unwritten slot has the default row, as exactly as the precision allows.

    Thread: as `ReplicaTable`. Slots are int64[n]; `put` and `clear` need unique ones.
    """

    @property
    def size_bytes(self) -> int: ...
    @property
    def holds_default(self) -> bool: ...  # whether the precision keeps the default row bit for bit
    # A copy, `[n, dim]` in the table's dtype.
    def take(self, slots: Ids) -> Rows: ...
    # Rows that may share the memory, and where the slots' rows are in them; see `ReplicaTable.locate`.
    def locate(self, slots: Ids) -> tuple[Rows | QuantizedRows, Ids]: ...
    # Write the shard's columns, `[n, width]` in the table's dtype; or the default's columns.
    def put(self, slots: Ids, shard: ColumnShard, rows: Rows) -> None: ...
    def clear(self, slots: Ids, shard: ColumnShard) -> None: ...
    def grow(self, num_slots: int) -> None: ...


def make_slot_rows(spec: TableSpec, num_slots: int, default: Rows, precision: Precision | None) -> _SlotRows:
    """Return `num_slots` rows that are all the default, `[dim]` in the table's dtype, in `precision_of` the setting."""
    kept = precision_of(spec, precision)
    if kept is not None and is_packed(kept):
        rows: _SlotRows = quantized_rows().QuantizedRows(spec, num_slots, default, kept)
        return rows
    return _PlainRows(spec.dtype, num_slots, default, kept)


class _PlainRows:
    """Rows as elements of one type, the table's own (precision None) or a narrower float; see `_SlotRows`."""

    def __init__(self, dtype: DType, num_slots: int, default: Rows, precision: Precision | None) -> None:
        self._dtype = dtype
        self._precision = precision
        self._default = self._narrowed(default[None])
        self.holds_default = precision is None or bool(np.array_equal(self._widened(self._default)[0], default))
        self._weights = _repeat(self._default, num_slots)

    @property
    def size_bytes(self) -> int:
        return self._weights.nbytes

    def take(self, slots: Ids) -> Rows:
        return self._widened(np.take(self._weights, slots, axis=0))

    def locate(self, slots: Ids) -> tuple[Rows, Ids]:
        if self._precision is not None:  # sums would be rounded to the narrower float
            return self.take(slots), np.arange(slots.size)
        return self._weights, slots

    def put(self, slots: Ids, shard: ColumnShard, rows: Rows) -> None:
        # As opaque bytes: one memcpy a row for any dtype.
        self._columns(self._weights, shard)[slots] = opaque_rows(self._narrowed(rows))

    def clear(self, slots: Ids, shard: ColumnShard) -> None:
        self._columns(self._weights, shard)[slots] = self._columns(self._default, shard)[0]

    def grow(self, num_slots: int) -> None:
        weights = _repeat(self._default, num_slots)
        weights[: self._weights.shape[0]] = self._weights
        self._weights = weights

    def _narrowed(self, rows: Rows) -> Rows:
        return rows if self._precision is None else quantized_rows().narrowed(rows, self._dtype, self._precision)

    def _widened(self, rows: Rows) -> Rows:
        return rows if self._precision is None else quantized_rows().widened(rows, self._dtype, self._precision)

    def _columns(self, rows: Rows, shard: ColumnShard) -> _Opaque:
        return opaque_rows(rows[:, shard.offset : shard.offset + shard.width])


def opaque_rows(rows: Rows) -> _Opaque:
    """Return `[n]` opaque rows over the memory of `[n, width]`, whose rows are contiguous."""
    view: _Opaque = rows.view(f"V{rows.shape[1] * rows.itemsize}")[:, 0]
    return view


def _repeat(row: Rows, number: int) -> Rows:
    # Zeros are left untouched: the system allocates a page only when something is written there.
    return np.repeat(row, number, axis=0) if row.view(np.uint8).any() else np.zeros((number, row.shape[1]), row.dtype)
