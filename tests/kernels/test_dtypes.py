"""The schema's dtypes in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.kernels.dtypes import DTYPES, TORCH_DTYPES, bits_of, tensor_of
from headrace.schemas.tables import DType


@pytest.mark.parametrize("dtype", DType)
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


@pytest.mark.parametrize("dtype", DType)
def test_an_array_as_a_tensor(dtype: DType) -> None:
    """An array becomes a tensor of its memory and bits, in any dtype; an empty one has the strides that torch gives."""
    array = np.arange(12).astype(dtype.numpy).reshape(3, 4)
    tensor = tensor_of(array, dtype)
    assert tensor.dtype is TORCH_DTYPES[dtype] and tensor.shape == (3, 4)
    array[1, 2] = 0
    assert bits_of(tensor).tobytes() == array.tobytes()
    empty = tensor_of(np.empty((0, 4), dtype.numpy), dtype)
    assert (empty.shape, empty.stride()) == ((0, 4), torch.empty(0, 4).stride())
