"""Element types: the schema's dtypes in torch, and tensors of any of them in numpy."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from headrace.schemas.tables import DType

__all__ = ["DTYPES", "TORCH_DTYPES", "bits_of", "is_smaller_float", "tensor_of"]

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
}
"""torch's dtypes by the schema's."""

DTYPES = {of_torch: dtype for dtype, of_torch in TORCH_DTYPES.items()}
"""The schema's dtypes by torch's."""


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
