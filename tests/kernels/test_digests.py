"""Digests of rows in tensors: the CPU's way, torch's and the kernel against the definition in `schemas`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import ALL_WAYS, DIMS, DTYPES, WARP_LAUNCHERS, examples, launcher_of, random_rows

from headrace.kernels import digests as rd
from headrace.schemas.row_digest import digest_rows

_COLUMNS = st.lists(st.tuples(DIMS, st.sampled_from(DTYPES)), min_size=1, max_size=4)


def _rows(num_rows: int, kinds: list[tuple[int, torch.dtype]], seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    ids = torch.randint(0, 2**62, (num_rows,), generator=torch.Generator().manual_seed(seed))
    return ids, [random_rows((num_rows, dim), dtype, seed + n) for n, (dim, dtype) in enumerate(kinds)]


def _defined(ids: torch.Tensor, columns: list[torch.Tensor]) -> torch.Tensor:
    """The definition, on bytes as they are: numpy has no bfloat16."""
    arrays = [column.contiguous().view(torch.uint8).numpy() for column in columns]
    return torch.from_numpy(digest_rows(ids.numpy(), arrays).view(np.int64))


@pytest.mark.parametrize(("device", "lanes"), ALL_WAYS)
@examples(50)
@given(num_rows=st.sampled_from([0, 1, 7, 8, 9, 50]), kinds=_COLUMNS, seed=st.integers(0, 2**32))
def test_digests_are_the_definitions(
    device: str, lanes: int, num_rows: int, kinds: list[tuple[int, torch.dtype]], seed: int
) -> None:
    """Every way gives the digests that server and audit compute, for all types and widths."""
    ids, columns = _rows(num_rows, kinds, seed)
    expected = _defined(ids, columns)
    assert torch.equal(rd.row_digests_reference(ids, columns), expected)
    if device == "plain":
        assert torch.equal(rd.row_digests(ids, columns), expected)
    else:
        there = [column.to(device) for column in columns]
        digests = rd.launch_row_digests(launcher_of("row_digests", device, lanes), ids.to(device), there)
        assert torch.equal(digests.cpu(), expected)


@pytest.mark.parametrize(("device", "lanes"), WARP_LAUNCHERS)
def test_several_blocks(device: str, lanes: int) -> None:
    """Warps of several blocks digest a row each."""
    ids, columns = _rows(20, [(33, torch.float32), (7, torch.float16), (5, torch.uint8)], 1)
    there = [column.to(device) for column in columns]
    digests = rd.launch_row_digests(launcher_of("row_digests", device, lanes), ids.to(device), there)
    assert torch.equal(digests.cpu(), _defined(ids, columns))


def test_arguments() -> None:
    """A rowwise state may be `[n]`, a column a part of a wider matrix; columns of another length are an error."""
    ids, (wide, state) = _rows(9, [(33, torch.bfloat16), (1, torch.float32)], 2)
    part = wide[:, 1:8]
    assert torch.equal(rd.row_digests(ids, [part, state[:, 0]]), _defined(ids, [part.contiguous(), state]))
    with pytest.raises(ValueError, match="rows of 3 ids"):
        rd.row_digests(torch.arange(3), [torch.zeros(4, 2)])
    with pytest.raises(ValueError, match="int64"):
        rd.row_digests(torch.zeros(3), [torch.zeros(3, 2)])
