"""Rows in fewer bits on any device: `row_quantization.py` on the CPU, kernels that make the same bytes on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.cuda_module import Launcher, num_blocks
from headrace.kernels.dispatch import launcher_for
from headrace.kernels.row_quantization import (
    PRECISIONS,
    Precision,
    dequantize_rows,
    dequantize_rows_reference,
    is_packed,
    quantize_rows,
    quantize_rows_reference,
    row_size_bytes,
)

__all__ = ["dequantize", "quantize"]

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.uint8,
    "int4": torch.uint8,
}
_THREADS = 256
_WARP_LANES = 32


def quantize(rows: Tensor, precision: Precision) -> Tensor:
    """Return rows in fewer bits: the bytes of `row_quantization.quantize_rows_reference`.

    Args:
        rows: `[n, dim]`, floating, any device and strides; float64 goes through float32.
        precision: Of the result.

    Returns:
        `[n, dim]` in float32, float16 or bfloat16; for int8 and int4 uint8 `[n, row_size_bytes(dim, precision)]`. On
        the rows' device, contiguous, a copy.

    Raises:
        ValueError: The rows' shape or type, or the precision is another.
    """
    if rows.dim() != 2 or not rows.is_floating_point() or precision not in PRECISIONS:
        raise ValueError(f"{rows.dtype}{list(rows.shape)} as {precision!r}: floating [n, dim], as one of {PRECISIONS}")
    packed: Tensor = _quantize(rows.detach(), precision)
    return packed


def dequantize(packed: Tensor, precision: Precision, dim: int) -> Tensor:
    """Return rows as float32 `[n, dim]`: those of `row_quantization.dequantize_rows_reference`.

    Args:
        packed: As `quantize` returns it.
        precision: Of `packed`.
        dim: Columns of a row.

    Returns:
        On the packed rows' device, contiguous, a copy.

    Raises:
        ValueError: The packed rows are not of this precision and dim.
    """
    width = row_size_bytes(dim, precision) if is_packed(precision) else dim
    if packed.dtype != _DTYPES[precision] or packed.dim() != 2 or packed.shape[1] != width:
        raise ValueError(f"{packed.dtype}{list(packed.shape)} are no rows of {dim} columns in {precision}")
    rows: Tensor = _dequantize(packed.detach().contiguous(), precision, dim)
    return rows


def launch_quantize(launcher: Launcher, rows: Tensor, precision: Precision) -> Tensor:
    """Return what `quantize` does for int8 and int4, with its kernels."""
    rows = _aligned(rows.to(torch.float32))
    num_rows, dim = rows.shape
    packed = torch.empty(num_rows, row_size_bytes(dim, precision), dtype=torch.uint8, device=rows.device)
    blocks = num_blocks(num_rows * _WARP_LANES, _THREADS)
    launcher.launch(f"quantize_{precision}_kernel", blocks, _THREADS, rows, num_rows, dim, packed)
    return packed


def launch_dequantize(launcher: Launcher, packed: Tensor, precision: Precision, dim: int) -> Tensor:
    """Return what `dequantize` does for int8 and int4, with its kernels."""
    rows = torch.empty(packed.shape[0], dim, device=packed.device)
    blocks = num_blocks(packed.shape[0] * _WARP_LANES, _THREADS)
    launcher.launch(f"dequantize_{precision}_kernel", blocks, _THREADS, packed, packed.shape[0], dim, rows)
    return rows


@torch.library.custom_op("headrace::quantize", mutates_args=())
def _quantize(rows: Tensor, precision: str) -> Tensor:
    kind = _precision(precision)
    if rows.device.type == "cpu":
        done = quantize_rows(rows, kind)
        # An operator's output may not be its input.
        return done.clone() if done.data_ptr() == rows.data_ptr() else done
    if not is_packed(kind):
        return rows.to(torch.float32).to(_DTYPES[kind], copy=True).contiguous()
    launcher = launcher_for("quantize", "quantize", rows.device)
    if launcher is not None and rows.numel():
        return launch_quantize(launcher, rows, kind)
    return quantize_rows_reference(rows, kind).to(rows.device)


@_quantize.register_fake
def _quantize_fake(rows: Tensor, precision: str) -> Tensor:
    kind = _precision(precision)
    width = row_size_bytes(rows.shape[1], kind) if is_packed(kind) else rows.shape[1]
    return rows.new_empty(rows.shape[0], width, dtype=_DTYPES[kind])


@torch.library.custom_op("headrace::dequantize", mutates_args=())
def _dequantize(packed: Tensor, precision: str, dim: int) -> Tensor:
    kind = _precision(precision)
    if not is_packed(kind):
        return packed.to(torch.float32, copy=True)
    if packed.device.type == "cpu":
        return dequantize_rows(packed, kind, dim)
    launcher = launcher_for("dequantize", "quantize", packed.device)
    if launcher is not None:
        return launch_dequantize(launcher, packed, kind, dim)
    return dequantize_rows_reference(packed, kind, dim)


@_dequantize.register_fake
def _dequantize_fake(packed: Tensor, precision: str, dim: int) -> Tensor:
    return packed.new_empty(packed.shape[0], dim, dtype=torch.float32)


def _precision(name: str) -> Precision:
    """Return a name as what it is: an operator's arguments have plain types."""
    return next(precision for precision in PRECISIONS if precision == name)


def _aligned(rows: Tensor) -> Tensor:
    rows = rows.contiguous()
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()
