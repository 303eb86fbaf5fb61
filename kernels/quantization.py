"""Rows in fewer bits: float16, bfloat16, and rowwise int8 and int4 in FBGEMM's fused layouts.

A row of `dim` columns in the two integer layouts, little-endian:

    int8    dim bytes, one per column                                  float32 scale    float32 bias
    int4    ceil(dim / 2) bytes, even columns in the low half          float16 scale    float16 bias

A column reads as `q * scale + bias` in float32, rounded once like a fused multiply-add. The bias is the row's least
value, the scale a 255th or 15th of its range. `quantize_rows_reference` and `dequantize_rows_reference` are the
definition, in plain torch operations. `quantize_rows` and `dequantize_rows` give the same bytes on the CPU with torch's
kernels; `quantize` and `dequantize` give them on any device. For finite rows these are also the bytes of FBGEMM's own
operators, except that a bias of zero is always +0 (FBGEMM takes the sign of one of the row's zeros). So every kernel
for FBGEMM's rows accepts these.

A row with a NaN or an infinity, or whose range or least value exceeds the scale or bias, reads as NaN in all columns.
FBGEMM leaves such rows undefined, and turns a NaN into some number of the row.

Source: FBGEMM, `src/QuantUtils.cc` and `fbgemm_gpu/src/quantize_ops`; `torch.ops.quantized.embedding_bag_*`.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from headrace.kernels.precisions import PRECISIONS, Precision, is_packed, row_size_bytes
from headrace.kernels.runtime.cuda_module import Launcher, num_blocks
from headrace.kernels.runtime.dispatch import implementation_of, launcher_for

__all__ = [
    "dequantize",
    "dequantize_rows",
    "dequantize_rows_reference",
    "gather_rows",
    "quantize",
    "quantize_rows",
    "quantize_rows_reference",
    "split_columns",
    "sum_rows",
]

_FLOAT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NUM_STEPS = {"int8": 255, "int4": 15}
_SCALE_DTYPES = {"int8": torch.float32, "int4": torch.float16}
# As FBGEMM: it avoids a division by zero in rows of one value.
_INT8_EPSILON = 1e-8
_THREADS = 256
_WARP_LANES = 32
# As in quantize.cu.
_SHORT_LANES, _SHORT_COLUMNS = 8, 128
_ops = torch.ops.quantized


def quantize(rows: Tensor, precision: Precision) -> Tensor:
    """Return floating rows `[n, dim]` in fewer bits, with the bytes of `quantize_rows_reference`; a traceable operator.

    Rows may be on any device, with any strides; float64 goes through float32. The result is a contiguous copy on their
    device: `[n, dim]` in float32, float16 or bfloat16; for int8 and int4 uint8 `[n, row_size_bytes(dim, precision)]`.
    """
    if rows.dim() != 2 or not rows.is_floating_point() or precision not in PRECISIONS:
        raise ValueError(f"{rows.dtype}{list(rows.shape)} as {precision!r}: floating [n, dim], as one of {PRECISIONS}")
    packed: Tensor = _quantize(rows.detach(), precision)
    return packed


def dequantize(packed: Tensor, precision: Precision, dim: int) -> Tensor:
    """Return rows of `quantize` as float32 `[n, dim]`, a contiguous copy on their device; a traceable operator."""
    width = row_size_bytes(dim, precision) if is_packed(precision) else dim
    if packed.dtype != _dtype_of(precision) or packed.dim() != 2 or packed.shape[1] != width:
        raise ValueError(f"{packed.dtype}{list(packed.shape)} are no rows of {dim} columns in {precision}")
    rows: Tensor = _dequantize(packed.detach().contiguous(), precision, dim)
    return rows


def quantize_rows(rows: Tensor, precision: Precision) -> Tensor:
    """Return what `quantize` does for rows of the CPU, without an operator's overhead; possibly `rows` itself."""
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
        # torch packs even numbers of columns only. A repeated column does not change the row's range.
        packed = _ops.embedding_bag_4bit_prepack(torch.cat([rows, rows[:, :1]], dim=1))
        packed[:, _num_codes(rows.shape[1], precision) - 1] &= 0x0F
    return _spoil(_without_minus_zero(packed, precision), rows, precision)


def dequantize_rows(packed: Tensor, precision: Precision, dim: int) -> Tensor:
    """Return contiguous rows of `quantize_rows` as float32 `[n, dim]`, contiguous."""
    if not is_packed(precision):
        return packed.to(torch.float32)
    if precision == "int8":
        return cast(Tensor, _ops.embedding_bag_byte_unpack(packed))
    return cast(Tensor, _ops.embedding_bag_4bit_unpack(packed))[:, :dim].contiguous()


def gather_rows(packed: Tensor, indices: Tensor, precision: Precision, dim: int) -> Tensor:
    """Return some rows, int64[n], of a contiguous matrix of `quantize_rows` as float32 `[n, dim]`, a copy.

    Raises:
        IndexError: An index is not a row; RuntimeError for int8 and int4.
    """
    if not is_packed(precision):
        return packed.index_select(0, indices).to(torch.float32)
    # Bags of one row each take one pass over the rows; a gather and an unpack would take two.
    return sum_rows(packed, indices, torch.arange(indices.numel() + 1, dtype=torch.int64, device="cpu"), precision, dim)


def sum_rows(
    packed: Tensor, indices: Tensor, offsets: Tensor, precision: Precision, dim: int, weights: Tensor | None = None
) -> Tensor:
    """Return the sum of each bag of rows of a packed matrix, float32 `[b, dim]`, without dequantizing rows to memory.

    The matrix is contiguous int8 or int4 rows. Bag i is `indices[offsets[i]:offsets[i + 1]]`, with indices int64[n],
    offsets int64[b + 1] and weights float32[n], if any. Rows are added in the order of the bag, each step rounded like
    a fused multiply-add: the sums equal those of `embedding_bag` on dequantized rows except for the last bits.

    Raises:
        RuntimeError: An index is not a row.
    """
    op = _ops.embedding_bag_byte_rowwise_offsets if precision == "int8" else _ops.embedding_bag_4bit_rowwise_offsets
    sums = cast(Tensor, op(packed, indices, offsets, per_sample_weights=weights, include_last_offset=True))
    return sums if sums.shape[1] == dim else sums[:, :dim].contiguous()


def split_columns(packed: Tensor, precision: Precision, offset: int, width: int, dim: int) -> Tensor:
    """Return `width` ≥ 1 columns from `offset` on of int8 or int4 rows as packed rows that read as the same numbers."""
    codes = _unpack_codes(packed, precision, dim)[:, offset : offset + width]
    return torch.cat([_pack_codes(codes, precision), packed[:, _num_codes(dim, precision) :]], dim=1)


def quantize_rows_reference(rows: Tensor, precision: Precision) -> Tensor:
    """Define `quantize_rows` and `quantize` in plain operations."""
    if not is_packed(precision):
        return rows.to(torch.float32).to(_FLOAT_DTYPES[precision]).contiguous()
    rows = rows.to(torch.float32)
    if not rows.numel():
        return torch.zeros(rows.shape[0], row_size_bytes(rows.shape[1], precision), dtype=torch.uint8, device="cpu")
    lowest, highest = rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True)
    # Divisors are tensors, because torch multiplies by the reciprocal of a plain number, which rounds differently.
    num_steps, one = (
        torch.tensor(float(_NUM_STEPS[precision]), dtype=torch.float32, device="cpu"),
        torch.tensor(1.0, dtype=torch.float32, device="cpu"),
    )
    if precision == "int8":
        # Adding 0 turns -0 into +0, because a minimum or maximum may return either of a row's zeros.
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


def dequantize_rows_reference(packed: Tensor, precision: Precision, dim: int) -> Tensor:
    """Define `dequantize_rows` and `dequantize` in plain operations."""
    if not is_packed(precision):
        return packed.to(torch.float32)
    codes = _unpack_codes(packed, precision, dim)
    scale_and_bias = _scale_and_bias(packed, precision).double()
    # A product of 8 and 24 bits is exact in float64, so this rounds like a fused multiply-add.
    return (codes.double() * scale_and_bias[:, :1] + scale_and_bias[:, 1:]).float()


def launch_quantize(launcher: Launcher, rows: Tensor, precision: Precision) -> Tensor:
    rows = rows.to(torch.float32).contiguous()
    rows = rows if rows.data_ptr() % 16 == 0 else rows.clone()
    num_rows, dim = rows.shape
    packed = torch.empty(num_rows, row_size_bytes(dim, precision), dtype=torch.uint8, device=rows.device)
    blocks = num_blocks(num_rows * _lanes_per_row(dim), _THREADS)
    launcher.launch(f"quantize_{precision}_kernel", blocks, _THREADS, rows, num_rows, dim, packed)
    return packed


def launch_dequantize(launcher: Launcher, packed: Tensor, precision: Precision, dim: int) -> Tensor:
    packed = packed if packed.data_ptr() % 4 == 0 else packed.clone()
    rows = torch.empty(packed.shape[0], dim, device=packed.device, dtype=torch.float32)
    blocks = num_blocks(packed.shape[0] * _lanes_per_row(dim), _THREADS)
    launcher.launch(f"dequantize_{precision}_kernel", blocks, _THREADS, packed, packed.shape[0], dim, rows)
    return rows


def _lanes_per_row(dim: int) -> int:
    return _SHORT_LANES if dim % 4 == 0 and dim <= _SHORT_COLUMNS else _WARP_LANES


@torch.library.custom_op("headrace::quantize", mutates_args=())
def _quantize(rows: Tensor, precision: str) -> Tensor:
    kind = cast(Precision, precision)
    if rows.device.type == "cpu":
        done = quantize_rows(rows, kind)
        # An operator's output must not be its input.
        return done.clone() if done.data_ptr() == rows.data_ptr() else done
    if not is_packed(kind):
        return rows.to(torch.float32).to(_FLOAT_DTYPES[kind], copy=True).contiguous()
    launcher = launcher_for("quantize", "quantize", rows.device)
    if launcher is not None and rows.numel():
        return launch_quantize(launcher, rows, kind)
    return quantize_rows_reference(rows, kind).to(rows.device)


@_quantize.register_fake
def _quantize_fake(rows: Tensor, precision: str) -> Tensor:
    kind = cast(Precision, precision)
    width = row_size_bytes(rows.shape[1], kind) if is_packed(kind) else rows.shape[1]
    return rows.new_empty(rows.shape[0], width, dtype=_dtype_of(kind))


@torch.library.custom_op("headrace::dequantize", mutates_args=())
def _dequantize(packed: Tensor, precision: str, dim: int) -> Tensor:
    kind = cast(Precision, precision)
    if not is_packed(kind):
        return packed.to(torch.float32, copy=True)
    ways = dequantize_rows, launch_dequantize, dequantize_rows_reference
    return cast(Tensor, implementation_of("dequantize", "quantize", packed.device, *ways)(packed, kind, dim))


@_dequantize.register_fake
def _dequantize_fake(packed: Tensor, precision: str, dim: int) -> Tensor:
    return packed.new_empty(packed.shape[0], dim, dtype=torch.float32)


def _dtype_of(precision: Precision) -> torch.dtype:
    return torch.uint8 if is_packed(precision) else _FLOAT_DTYPES[precision]


def _num_codes(dim: int, precision: Precision) -> int:
    return dim if precision == "int8" else -(-dim // 2)


def _scale_and_bias(packed: Tensor, precision: Precision) -> Tensor:
    dtype = _SCALE_DTYPES[precision]
    # Always a copy: a single row is contiguous already, but its scale may have an odd address.
    return packed[:, -2 * dtype.itemsize :].clone(memory_format=torch.contiguous_format).view(dtype)


def _pack_codes(codes: Tensor, precision: Precision) -> Tensor:
    if precision == "int8":
        return codes
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _unpack_codes(packed: Tensor, precision: Precision, dim: int) -> Tensor:
    codes = packed[:, : _num_codes(dim, precision)]
    if precision == "int8":
        return codes
    return torch.stack([codes & 0x0F, codes >> 4], dim=2).flatten(1)[:, :dim]


def _without_minus_zero(packed: Tensor, precision: Precision) -> Tensor:
    # Which of a row's zeros becomes the bias depends on the order of comparison.
    is_zero = _scale_and_bias(packed, precision)[:, 1] == 0
    if bool(is_zero.any()):
        packed[is_zero, -_SCALE_DTYPES[precision].itemsize :] = 0
    return packed


def _spoil(packed: Tensor, rows: Tensor, precision: Precision) -> Tensor:
    """Make rows that the precision cannot represent read as NaN, in place."""
    fits = torch.isfinite(_scale_and_bias(packed, precision)).all(dim=1)
    # A finite sum has finite terms only, so one pass tells whether to look closer.
    if not bool(fits.all()) or not bool(torch.isfinite(rows.sum())):
        bad = ~(fits & torch.isfinite(rows).all(dim=1))
        dtype = _SCALE_DTYPES[precision]
        packed[bad] = 0
        packed[bad, -2 * dtype.itemsize :] = torch.full((2,), torch.nan, dtype=dtype, device=packed.device).view(
            torch.uint8
        )
    return packed
