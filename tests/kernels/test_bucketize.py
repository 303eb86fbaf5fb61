"""Rows dealt out to shards: the CPU's way and the kernels against the definition, and that against the routing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import ALL_WAYS, WARP_LAUNCHERS, examples, launcher_of, random_rows, same_bits

from headrace.kernels import bucketize as bz
from headrace.schemas.routing import shards_of_rows

# Around a lane group, a warp's tile and a block's.
SIZES = st.sampled_from([0, 1, 31, 33, 1000, 1024, 1025, 5000])
SHARDS = st.sampled_from([1, 2, 3, 8, 37, 255, 256, 257, 2048])
WEIGHTS = st.sampled_from([None, torch.float64, torch.float32, torch.float16, torch.bfloat16])


def _same(left: bz.Bucketized, right: bz.Bucketized) -> bool:
    return all(a is b is None or same_bits(a, b) for a, b in zip(left, right, strict=True))


def _inputs(
    size: int, num_shards: int, block_rows: int | None, dtype: torch.dtype | None, seed: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, num_shards * (block_rows or 2**40), (size,), generator=generator)
    return ids, None if dtype is None else random_rows((size,), dtype, seed)


def _bucketize(
    device: str,
    lanes: int,
    ids: torch.Tensor,
    num_shards: int,
    block_rows: int | None = None,
    seed: int = 0,
    weights: torch.Tensor | None = None,
) -> bz.Bucketized:
    """Return what the public function gives, or the kernels on a device."""
    if device == "plain":
        return bz.block_bucketize(ids, num_shards, block_rows=block_rows, seed=seed, weights=weights)
    given_weights = (ids.new_empty(0) if weights is None else weights).to(device)
    launcher = launcher_of("bucketize", device, lanes)
    *done, moved = bz.launch_block_bucketize(launcher, ids.to(device), num_shards, block_rows or 0, seed, given_weights)
    return bz.Bucketized(*done, None if weights is None else moved)


@pytest.mark.parametrize(("device", "lanes"), ALL_WAYS)
@examples(40)
@given(SIZES, SHARDS, st.sampled_from([None, None, 1, 7, 1000]), WEIGHTS, st.integers(0, 2**64 - 1))
def test_every_way_is_the_definition(
    device: str,
    lanes: int,
    size: int,
    num_shards: int,
    block_rows: int | None,
    dtype: torch.dtype | None,
    seed: int,
) -> None:
    """By block and by hash, rows come to their shards in the order in which they came, weights and all.

    The kernels' order is the definition's, stable across groups, tiles and blocks.
    """
    ids, weights = _inputs(size, num_shards, block_rows, dtype, seed % 2**32)
    plain = bz.block_bucketize_reference(ids, num_shards, block_rows=block_rows, seed=seed, weights=weights)
    assert _same(_bucketize(device, lanes, ids, num_shards, block_rows, seed, weights), plain)
    shards = ids.numpy() // block_rows if block_rows else shards_of_rows(seed, ids.numpy(), num_shards)
    assert np.array_equal(np.argsort(shards, kind="stable"), plain.positions.numpy())
    assert torch.equal(plain.row_ids, ids[plain.positions])
    assert plain.bounds.tolist() == [0, *np.bincount(shards, minlength=num_shards).cumsum().tolist()]


@pytest.mark.parametrize(("num_shards", "block_rows"), [(37, None), (2048, None), (3, 1000)])
@pytest.mark.parametrize(("device", "lanes"), WARP_LAUNCHERS)
def test_several_blocks(device: str, lanes: int, num_shards: int, block_rows: int | None) -> None:
    """Warps of several blocks deal out their tiles, of which some warps have two."""
    ids, weights = _inputs(9000, num_shards, block_rows, torch.float32, 1)
    plain = bz.block_bucketize_reference(ids, num_shards, block_rows=block_rows, seed=5, weights=weights)
    assert _same(_bucketize(device, lanes, ids, num_shards, block_rows, 5, weights), plain)


@pytest.mark.parametrize("row", [-1, 40])
def test_a_row_on_no_shard_is_an_error(row: int) -> None:
    """A row beyond the last block raises on the CPU and stops the kernel."""
    for device, said in (("plain", str(row)), ("cpu", "trap")):
        with pytest.raises(IndexError, match=said):
            _bucketize(device, 32, torch.tensor([0, row, 39]), 4, 10)


def test_bad_arguments_are_named() -> None:
    """Numbers out of range and weights of another length are errors."""
    ids = torch.arange(3)
    with pytest.raises(ValueError, match="0 shards"):
        bz.block_bucketize(ids, 0)
    with pytest.raises(ValueError, match="no weights of the ids"):
        bz.block_bucketize(ids, 2, weights=torch.zeros(4))
    with pytest.raises(ValueError, match="int64"):
        bz.block_bucketize(ids.int(), 2)
