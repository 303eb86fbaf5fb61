"""Rows dealt out to shards: the CPU's way and the kernels against the definition, and that against the routing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import ALL_WAYS, MAPS, WARP_LAUNCHERS, examples, launcher_of, random_rows, same_bits

from headrace.kernels import bucketize as bz
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.routing import shards_of_rows

# Around a lane group, a warp's tile and a block's.
SIZES = st.sampled_from([0, 1, 31, 33, 1000, 1024, 1025, 5000])
SHARDS = st.sampled_from([1, 2, 3, 8, 37, 255, 256, 257, 2048])
WEIGHTS = st.sampled_from([None, torch.float64, torch.float32, torch.float16, torch.bfloat16])


def _same(left: bz.Bucketized, right: bz.Bucketized) -> bool:
    return all(a is b is None or same_bits(a, b) for a, b in zip(left, right, strict=True))


NO_OWNERS = torch.empty(0, dtype=torch.int32)
# Partitions, of powers of two and others; None for the first map.
PARTITIONS = st.sampled_from([None, None, 1, 64, 1024, 1536, 65_536])


def _owners(num_partitions: int | None, num_shards: int, seed: int) -> torch.Tensor | None:
    """Return owners of partitions, at random, of which some shards have none."""
    if num_partitions is None:
        return None
    generator = torch.Generator().manual_seed(seed % 2**32)
    return torch.randint(0, num_shards, (num_partitions,), generator=generator, dtype=torch.int32)


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
    owners: torch.Tensor | None = None,
) -> bz.Bucketized:
    """Return what the public function gives, or the kernels on a device."""
    if device == "plain":
        routing = {"block_rows": block_rows, "seed": seed, "owners": owners}
        return bz.block_bucketize(ids, num_shards, weights=weights, **routing)  # type: ignore[arg-type]
    given_weights = (ids.new_empty(0) if weights is None else weights).to(device)
    table, launcher = (NO_OWNERS if owners is None else owners).to(device), launcher_of("bucketize", device, lanes)
    *done, moved = bz.launch_block_bucketize(
        launcher, ids.to(device), num_shards, block_rows or 0, seed, given_weights, table
    )
    return bz.Bucketized(*done, None if weights is None else moved)


@pytest.mark.parametrize(("device", "lanes"), ALL_WAYS)
@examples(40)
@given(SIZES, SHARDS, st.sampled_from([None, None, 1, 7, 1000]), PARTITIONS, WEIGHTS, st.integers(0, 2**64 - 1))
def test_every_way_is_the_definition(
    device: str,
    lanes: int,
    size: int,
    num_shards: int,
    block_rows: int | None,
    num_partitions: int | None,
    dtype: torch.dtype | None,
    seed: int,
) -> None:
    """By block, by hash and by map, rows come to their shards in the order in which they came, weights and all.

    The kernels' order is the definition's, stable across groups, tiles and blocks.
    """
    ids, weights = _inputs(size, num_shards, block_rows, dtype, seed % 2**32)
    owners = None if block_rows else _owners(num_partitions, num_shards, seed)
    plain = bz.block_bucketize_reference(
        ids, num_shards, block_rows=block_rows, seed=seed, weights=weights, owners=owners
    )
    assert _same(_bucketize(device, lanes, ids, num_shards, block_rows, seed, weights, owners), plain)
    shards = ids.numpy() // block_rows if block_rows else shards_of_rows(seed, ids.numpy(), num_shards)
    if owners is not None:
        at = owners.numpy().astype(np.int64)
        shards = PartitionMap(1, np.ones(at.size, np.int64), at).shards_of_rows(seed, ids.numpy())
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


@pytest.mark.parametrize("partition_map", MAPS)
@pytest.mark.parametrize(("device", "lanes"), WARP_LAUNCHERS)
def test_rows_come_to_the_shards_of_a_map(device: str, lanes: int, partition_map: PartitionMap) -> None:
    """Kernels and definition route as the map does, of however many shards, ids of any size."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.cat((torch.arange(1500), torch.randint(2**31, 2**63 - 1, (1500,), generator=generator)))
    num_shards, seed = partition_map.num_shards, 2**64 - 3
    owners = None if partition_map.is_first else torch.tensor(partition_map.owners, dtype=torch.int32)
    plain = bz.block_bucketize_reference(ids, num_shards, seed=seed, owners=owners)
    assert _same(_bucketize(device, lanes, ids, num_shards, None, seed, None, owners), plain)
    shards = partition_map.shards_of_rows(seed, ids.numpy())
    assert plain.bounds.diff().tolist() == np.bincount(shards, minlength=num_shards).tolist()
    assert np.array_equal(np.argsort(shards, kind="stable"), plain.positions.numpy())


@pytest.mark.parametrize(
    ("ids", "block_rows", "owners", "said"),
    [
        *(([0, row, 39], 10, None, str(row)) for row in (-1, 40)),
        *(
            (list(range(100)), None, torch.tensor([0, owner], dtype=torch.int32), "none of 4 shards")
            for owner in (-1, 4)
        ),
    ],
)
def test_a_row_on_no_shard_is_an_error(
    ids: list[int], block_rows: int | None, owners: torch.Tensor | None, said: str
) -> None:
    """A row beyond the last block, and a map of more shards, raise on the CPU and stop the kernel."""
    for device, words in (("plain", said), ("cpu", "trap")):
        with pytest.raises(IndexError, match=words):
            _bucketize(device, 32, torch.tensor(ids), 4, block_rows, 0, None, owners)


def test_bad_arguments_are_named() -> None:
    """Numbers out of range and weights of another length are errors."""
    ids = torch.arange(3)
    with pytest.raises(ValueError, match="0 shards"):
        bz.block_bucketize(ids, 0)
    with pytest.raises(ValueError, match="no weights of the ids"):
        bz.block_bucketize(ids, 2, weights=torch.zeros(4))
    for owners in (NO_OWNERS, torch.zeros(4, dtype=torch.int32)):
        with pytest.raises(ValueError, match="owners are those of partitions"):
            bz.block_bucketize(ids, 2, owners=owners, block_rows=None if owners is NO_OWNERS else 2)
    with pytest.raises(ValueError, match="int64"):
        bz.block_bucketize(ids.int(), 2)
