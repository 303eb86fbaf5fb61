"""Element types: the schema's dtypes in torch, and tensors of any of them in numpy."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from headrace.kernels.quantization import dequantize_rows
from headrace.schemas.tables import DType, TableSpec

__all__ = ["DTYPES", "TORCH_DTYPES", "bits_of", "is_smaller_float", "tensor_of", "value_dtype", "values_of"]

TORCH_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT64: torch.float64,
    DType.INT64: torch.int64,
    DType.INT32: torch.int32,
    DType.UINT8: torch.uint8,
    DType.BOOL: torch.bool,
    DType.INT16: torch.int16,
    DType.INT8: torch.int8,
    DType.ROWWISE_INT8: torch.uint8,
}
"""torch's dtypes by the schema's."""

DTYPES = {of_torch: dtype for dtype, of_torch in TORCH_DTYPES.items() if dtype is not DType.ROWWISE_INT8}
"""The schema's dtypes by torch's."""


def value_dtype(spec: TableSpec) -> torch.dtype:
    """Return the type in which a table's rows are looked up: that of its weights, or float32 if it is quantized."""
    return torch.float32 if spec.is_quantized else TORCH_DTYPES[spec.dtype]


def is_smaller_float(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether a type is one that values of the other, both of floating point, can be rounded to."""
    return dtype.is_floating_point and other.is_floating_point and dtype.itemsize < other.itemsize


def bits_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor of any shape as an array, to compare bits: int16 for bfloat16, which numpy lacks.

    The array shares the memory of a tensor on the CPU.
    """
    tensor = tensor.detach().cpu()
    array: npt.NDArray[Any] = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def tensor_of(array: npt.NDArray[Any], dtype: DType) -> torch.Tensor:
    """Return a writable array of `DType.numpy` as a tensor that shares its memory."""
    if not array.size:  # torch would keep strides of 0
        return torch.empty(array.shape, dtype=TORCH_DTYPES[dtype], device="cpu")
    return torch.from_numpy(array).view(TORCH_DTYPES[dtype])


def values_of(rows: npt.NDArray[Any], spec: TableSpec) -> torch.Tensor:
    """Return a table's rows, a writable `[n, dim]` of `DType.numpy`, as `value_dtype`, `[n, num_columns]`.

    The tensor shares the array's memory, unless the table is quantized.
    """
    stored = tensor_of(rows, spec.dtype)
    return dequantize_rows(stored, "int8", spec.num_columns) if spec.is_quantized else stored
