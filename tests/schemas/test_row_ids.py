"""Ids as callers give them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace.schemas.errors import RequestError
from headrace.schemas.row_ids import row_ids_of


@pytest.mark.parametrize(
    "given",
    [
        [3, 1, 3],
        (3, 1, 3),
        np.array([[3, 1, 3]], np.int32),
        np.array([3, 9, 1, 9, 3, 9], ">u2")[::2],
        torch.tensor([[3], [1], [3]], dtype=torch.uint8),
        [torch.tensor(3), np.int8(1), 3],
    ],
    ids=repr,
)
def test_integers_of_any_kind_are_taken(given: Any) -> None:
    """Lists, arrays and tensors of any shape and integer type are int64[n] in their order."""
    ids = row_ids_of(given)
    assert (ids.dtype, ids.flags.c_contiguous, ids.tolist()) == (np.dtype(np.int64), True, [3, 1, 3])


@pytest.mark.parametrize("given", [[], np.empty(0), torch.tensor([]), torch.empty(0, 2, dtype=torch.int64)], ids=repr)
def test_nothing_has_no_type(given: Any) -> None:
    """An empty list is a float array to numpy and torch: it is no id all the same."""
    assert row_ids_of(given).tolist() == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (torch.zeros(3, dtype=torch.bool), "row ids are bool and not integers; of a mask give the places"),
        ([True, False], "row ids are bool"),
        (np.array([1.0]), "row ids are float64 and not integers"),
        (torch.ones(2, requires_grad=True), "row ids are float32 and not integers"),
        (torch.ones(2, dtype=torch.bfloat16), "row ids of a Tensor are not integers"),
        ([[1], [1, 2]], "row ids of a list are not integers"),
        (["a"], "row ids are <U1 and not integers"),
        ([2**70], "row ids are object and not integers"),
        (None, "row ids are object and not integers"),
    ],
    ids=repr,
)
def test_what_is_no_integer_is_refused(given: Any, told: str) -> None:
    """A mask would name other rows, and a fraction be cut: each is refused in one line."""
    with pytest.raises(RequestError) as caught:
        row_ids_of(given)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
