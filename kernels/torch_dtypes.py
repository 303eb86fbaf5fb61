"""The schema's dtypes in torch, both ways, and what a tensor of any of them is to numpy."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from headrace.schemas.tables import DType

__all__ = ["DTYPES", "TORCH_DTYPES", "bits_of"]

TORCH_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT64: torch.float64,
    DType.INT64: torch.int64,
    DType.INT32: torch.int32,
    DType.UINT8: torch.uint8,
}
"""By the schema's dtype."""

DTYPES = {of_torch: dtype for dtype, of_torch in TORCH_DTYPES.items()}
"""By torch's dtype: all that travel."""


def bits_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor as an array, for comparing bits: bfloat16, which numpy lacks, as int16.

    Args:
        tensor: Any shape and dtype; one on the CPU without a gradient shares its memory with the array.
    """
    tensor = tensor.detach().cpu()
    array: npt.NDArray[Any] = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array
