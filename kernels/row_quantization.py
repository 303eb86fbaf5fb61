"""Rows in fewer bits: float16, bfloat16, and rowwise int8 and int4 in FBGEMM's fused layouts.

A row of `dim` columns in the two integer layouts, little-endian:

    int8    dim bytes, one a column                                    float32 scale    float32 bias
    int4    ceil(dim / 2) bytes, even columns in the low half          float16 scale    float16 bias

A column reads as `q * scale + bias`, rounded once (as a fused multiply-add), in float32. The bias is the row's least
value, the scale a 255th or 15th of its range. `quantize_rows_reference` and `dequantize_rows_reference` are the
definition, in plain operations on tensors; `quantize_rows` and `dequantize_rows` give the same bytes with the kernels
that come with torch. For finite rows they are also the bytes of FBGEMM's own operators, but that a bias of zero is
always +0 (FBGEMM's has the sign of one of the row's zeros), so any kernel that takes such rows takes these.

What FBGEMM leaves open, and what is here: a row that holds a NaN or an infinity, or whose range or least value is more
than the scale or bias can hold, reads as NaN in all its columns. FBGEMM makes of a NaN some number of the row.

Source: FBGEMM, `src/QuantUtils.cc` and `fbgemm_gpu/src/quantize_ops`; `torch.ops.quantized.embedding_bag_*`.
"""

from __future__ import annotations

from typing import Final, Literal, cast, get_args

import torch

__all__ = [
    "PRECISIONS",
    "Precision",
    "dequantize_rows",
    "dequantize_rows_reference",
    "error_bound",
    "gather_rows",
    "is_packed",
    "quantize_rows",
    "quantize_rows_reference",
    "row_size_bytes",
    "split_columns",
    "sum_rows",
]

Precision = Literal["fp32", "fp16", "bf16", "int8", "int4"]
PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)

_FLOAT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NUM_STEPS = {"int8": 255, "int4": 15}
_SCALE_DTYPES = {"int8": torch.float32, "int4": torch.float16}
# FBGEMM's, against a division by zero in rows of one value.
_INT8_EPSILON = 1e-8
_ops = torch.ops.quantized


def is_packed(precision: Precision) -> bool:
    """Return whether rows are bytes with a scale and a bias of their own, not elements of a dtype."""
    return precision in _NUM_STEPS


def row_size_bytes(dim: int, precision: Precision) -> int:
    """Return what a row of `dim` columns takes."""
    if not is_packed(precision):
        return dim * _FLOAT_DTYPES[precision].itemsize
    return _num_codes(dim, precision) + 2 * _SCALE_DTYPES[precision].itemsize


def quantize_rows(rows: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Return rows in fewer bits.

    Args:
        rows: `[n, dim]`, floating, on the CPU, any strides; float64 goes through float32.
        precision: Of the result.

    Returns:
        `[n, dim]` in float32, float16 or bfloat16; for int8 and int4 uint8 `[n, row_size_bytes(dim, precision)]`.
        Contiguous; it may be `rows` itself.
    """
    if not is_packed(precision):
        return rows.to(torch.float32).to(_FLOAT_DTYPES[precision]).contiguous()
    rows = rows.to(torch.float32).contiguous()
    if not rows.numel():
        return quantize_rows_reference(rows, precision)
    if precision == "int8":
        packed = _ops.embedding_bag_byte_prepack(rows)
    elif rows.shape[1] % 2 == 0:
        packed = _ops.embedding_bag_4bit_prepack(rows)
    else:
        # torch packs even numbers of columns. One that is there already does not change the row's range.
        packed = _ops.embedding_bag_4bit_prepack(torch.cat([rows, rows[:, :1]], dim=1))
        packed[:, _num_codes(rows.shape[1], precision) - 1] &= 0x0F
    return _spoil(_without_minus_zero(packed, precision), rows, precision)


def dequantize_rows(packed: torch.Tensor, precision: Precision, dim: int) -> torch.Tensor:
    """Return rows as float32 `[n, dim]`, contiguous.

    Args:
        packed: As `quantize_rows` returns it, contiguous.
        precision: Of `packed`.
        dim: Columns of a row.
    """
    if not is_packed(precision):
        return packed.to(torch.float32)
    if precision == "int8":
        return cast(torch.Tensor, _ops.embedding_bag_byte_unpack(packed))
    return cast(torch.Tensor, _ops.embedding_bag_4bit_unpack(packed))[:, :dim].contiguous()


def gather_rows(packed: torch.Tensor, indices: torch.Tensor, precision: Precision, dim: int) -> torch.Tensor:
    """Return some rows of a matrix as float32 `[n, dim]`, a copy; the same as to dequantize all and to gather.

    Args:
        packed: As `quantize_rows` returns it, contiguous.
        indices: int64[n], rows of `packed`.
        precision: Of `packed`.
        dim: Columns of a row.

    Raises:
        IndexError: An index is no row; RuntimeError for int8 and int4.
    """
    if not is_packed(precision):
        return packed.index_select(0, indices).to(torch.float32)
    # As bags of one row each: one pass over the rows, where a gather and an unpack would be two.
    return sum_rows(packed, indices, torch.arange(indices.numel() + 1), precision, dim)


def sum_rows(
    packed: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    precision: Precision,
    dim: int,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum of each bag of rows of a packed matrix, float32 `[b, dim]`, without writing the rows anywhere.

    The sums are of the dequantized rows, in the order of the bag, each step rounded as a fused multiply-add: equal to
    `embedding_bag` on dequantized rows but for the last bits of a float32.

    Args:
        packed: int8 or int4 rows, contiguous.
        indices: int64[n], rows of `packed`.
        offsets: int64[b + 1]: bag i is `indices[offsets[i]:offsets[i + 1]]`.
        precision: Of `packed`, int8 or int4.
        dim: Columns of a row.
        weights: float32[n], or None.

    Raises:
        RuntimeError: An index is no row.
    """
    op = _ops.embedding_bag_byte_rowwise_offsets if precision == "int8" else _ops.embedding_bag_4bit_rowwise_offsets
    sums = cast(torch.Tensor, op(packed, indices, offsets, per_sample_weights=weights, include_last_offset=True))
    return sums if sums.shape[1] == dim else sums[:, :dim].contiguous()


def split_columns(packed: torch.Tensor, precision: Precision, offset: int, width: int, dim: int) -> torch.Tensor:
    """Return some columns of packed rows as packed rows of their own, which read as the same numbers, bit for bit.

    Args:
        packed: int8 or int4 rows of `dim` columns.
        precision: Of `packed`, int8 or int4.
        offset: First column.
        width: Number of columns, ≥ 1.
        dim: Columns of a row of `packed`.
    """
    codes = _unpack_codes(packed, precision, dim)[:, offset : offset + width]
    return torch.cat([_pack_codes(codes, precision), packed[:, _num_codes(dim, precision) :]], dim=1)


def error_bound(rows: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Return by how much a column of each row may differ from what it was, float64 `[n]`.

    Args:
        rows: `[n, dim]`, finite, within what the precision can hold (|x| ≤ 65,504 for float16, and the bias and scale
            of int4).
        precision: Of the stored rows.
    """
    wide = rows.to(torch.float64)
    largest = wide.abs().amax(dim=1)
    if precision == "fp32":
        return torch.zeros_like(largest)
    if precision == "fp16":
        return largest * 2**-11 + 2**-25
    if precision == "bf16":
        return largest * 2**-8 + 2**-134
    extent = wide.amax(dim=1) - wide.amin(dim=1)
    if precision == "int8":
        # Half a step; what epsilon takes from the highest code; and float32 arithmetic.
        return extent / 255 / 2 + _INT8_EPSILON + (largest + extent) * 2**-22
    # Half a step; the scale, and with it the range, rounded to float16; the same for the bias.
    return extent / 15 / 2 * (1 + 2**-10) + extent * 2**-10 + largest * 2**-11 + 2**-20


def quantize_rows_reference(rows: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Return what `quantize_rows` does: the definition."""
    if not is_packed(precision):
        return rows.to(torch.float32).to(_FLOAT_DTYPES[precision]).contiguous()
    rows = rows.to(torch.float32)
    if not rows.numel():
        return torch.zeros(rows.shape[0], row_size_bytes(rows.shape[1], precision), dtype=torch.uint8)
    lowest, highest = rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True)
    # Divisors are tensors: torch multiplies by the reciprocal of a plain number, which rounds otherwise.
    num_steps, one = torch.tensor(float(_NUM_STEPS[precision])), torch.tensor(1.0)
    if precision == "int8":
        # To add 0 makes +0 of -0: which of a row's zeros a minimum or a maximum gives is left open.
        scale, bias = (highest - lowest) / num_steps + 0.0, lowest + 0.0
        inverse = num_steps / ((highest - lowest) + _INT8_EPSILON)
    else:
        bias = lowest.half() + 0.0
        scale = ((highest - bias.float()) / num_steps).half()
        scale = torch.where(scale == 0, one.half(), scale)
        inverse = one / scale.float()
    codes = ((rows - bias.float()) * inverse).round().clamp(0, _NUM_STEPS[precision]).nan_to_num(0.0)
    packed = torch.cat(
        [_pack_codes(codes.to(torch.uint8), precision), scale.view(torch.uint8), bias.contiguous().view(torch.uint8)],
        dim=1,
    )
    return _spoil(packed, rows, precision)


def dequantize_rows_reference(packed: torch.Tensor, precision: Precision, dim: int) -> torch.Tensor:
    """Return what `dequantize_rows` does: the definition."""
    if not is_packed(precision):
        return packed.to(torch.float32)
    codes = _unpack_codes(packed, precision, dim)
    scale_and_bias = _scale_and_bias(packed, precision).double()
    # A product of 8 and 24 bits is exact in float64, so this rounds as a fused multiply-add.
    return (codes.double() * scale_and_bias[:, :1] + scale_and_bias[:, 1:]).float()


def _num_codes(dim: int, precision: Precision) -> int:
    """Bytes of a row before its scale."""
    return dim if precision == "int8" else -(-dim // 2)


def _scale_and_bias(packed: torch.Tensor, precision: Precision) -> torch.Tensor:
    dtype = _SCALE_DTYPES[precision]
    # A copy, always: a lone row is contiguous as it is, and its scale may lie at an odd address.
    return packed[:, -2 * dtype.itemsize :].clone(memory_format=torch.contiguous_format).view(dtype)


def _pack_codes(codes: torch.Tensor, precision: Precision) -> torch.Tensor:
    if precision == "int8":
        return codes
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _unpack_codes(packed: torch.Tensor, precision: Precision, dim: int) -> torch.Tensor:
    codes = packed[:, : _num_codes(dim, precision)]
    if precision == "int8":
        return codes
    return torch.stack([codes & 0x0F, codes >> 4], dim=2).flatten(1)[:, :dim]


def _without_minus_zero(packed: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Make a bias of -0 +0, in place: which of a row's zeros is its least value depends on the order of looking."""
    is_zero = _scale_and_bias(packed, precision)[:, 1] == 0
    if bool(is_zero.any()):
        packed[is_zero, -_SCALE_DTYPES[precision].itemsize :] = 0
    return packed


def _spoil(packed: torch.Tensor, rows: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Make rows that cannot be held read as NaN; in place."""
    fits = torch.isfinite(_scale_and_bias(packed, precision)).all(dim=1)
    # A finite sum has finite terms only: one pass tells whether to look closer.
    if not bool(fits.all()) or not bool(torch.isfinite(rows.sum())):
        bad = ~(fits & torch.isfinite(rows).all(dim=1))
        dtype = _SCALE_DTYPES[precision]
        packed[bad] = 0
        packed[bad, -2 * dtype.itemsize :] = torch.full((2,), torch.nan, dtype=dtype).view(torch.uint8)
    return packed
