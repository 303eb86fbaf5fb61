"""The schema's dtypes in torch."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.dtypes import DTYPES, TORCH_DTYPES, bits_of
from headrace.schemas.tables import DType


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.ROWWISE_INT8])
def test_every_dtype(dtype: DType) -> None:
    """Each of the schema's dtypes has one of torch's, of the same size, and back; its bits are numpy's."""
    of_torch = TORCH_DTYPES[dtype]
    assert of_torch.itemsize == dtype.size_bytes
    assert DTYPES[of_torch] is dtype
    rows = torch.randint(0, 100, (3, 5)).to(of_torch)
    bits = bits_of(rows)
    assert bits.shape == (3, 5)
    assert bits.tobytes() == bytes(rows.view(torch.uint8).numpy())
    assert dtype is DType.BFLOAT16 or bits.dtype == dtype.numpy


def test_bits_of_a_parameter() -> None:
    """A parameter's bits need no detaching, and share its memory."""
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    bits = bits_of(weight)
    with torch.no_grad():
        weight[1, 2] = 7.0
    assert bits[1, 2] == 7.0
