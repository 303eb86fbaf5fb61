"""The precisions in which a replica keeps rows, and the sizes of rows; `quantization.py` makes them."""

from __future__ import annotations

from typing import Final, Literal, get_args

__all__ = ["PRECISIONS", "Precision", "is_packed", "row_size_bytes"]

Precision = Literal["fp32", "fp16", "bf16", "int8", "int4"]
PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)

# Bits of a column, and bytes of a row's scale and bias.
_SIZES = {"fp32": (32, 0), "fp16": (16, 0), "bf16": (16, 0), "int8": (8, 8), "int4": (4, 4)}


def is_packed(precision: Precision) -> bool:
    """Return whether rows are bytes with their own scale and bias, rather than elements of a dtype."""
    return _SIZES[precision][1] > 0


def row_size_bytes(dim: int, precision: Precision) -> int:
    """Return the size of a row of `dim` columns."""
    column_bits, extra_bytes = _SIZES[precision]
    return -(-dim * column_bits // 8) + extra_bytes
