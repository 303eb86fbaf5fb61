"""Rows dealt out to shards: the CPU's way and the kernels against the definition, and that against the routing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_inputs import MAPS, WARP_LAUNCHERS, examples, launcher_of, random_rows, same_bits

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


@examples(60)
@given(SIZES, SHARDS, st.sampled_from([None, None, 1, 7, 1000]), PARTITIONS, WEIGHTS, st.integers(0, 2**64 - 1))
def test_cpu_is_the_definition(
    size: int,
    num_shards: int,
    block_rows: int | None,
    num_partitions: int | None,
    dtype: torch.dtype | None,
    seed: int,
) -> None:
    """By block, by hash and by map, rows come to their shards in the order in which they came, weights and all."""
    ids, weights = _inputs(size, num_shards, block_rows, dtype, seed % 2**32)
    owners = None if block_rows else _owners(num_partitions, num_shards, seed)
    routing = {"block_rows": block_rows, "seed": seed, "owners": owners}
    plain = bz.block_bucketize_reference(ids, num_shards, weights=weights, **routing)  # type: ignore[arg-type]
    assert _same(bz.block_bucketize(ids, num_shards, weights=weights, **routing), plain)  # type: ignore[arg-type]
    shards = ids.numpy() // block_rows if block_rows else shards_of_rows(seed, ids.numpy(), num_shards)
    if owners is not None:
        at = owners.numpy().astype(np.int64)
        shards = PartitionMap(1, np.ones(at.size, np.int64), at).shards_of_rows(seed, ids.numpy())
    assert np.array_equal(np.argsort(shards, kind="stable"), plain.positions.numpy())
    for shard in range(num_shards):
        rows = plain.row_ids[plain.bounds[shard] : plain.bounds[shard + 1]]
        assert rows.tolist() == ids.numpy()[shards == shard].tolist()


@pytest.mark.parametrize(("device", "lanes"), WARP_LAUNCHERS)
@settings(max_examples=25)
@given(SIZES, SHARDS, st.sampled_from([None, None, 1, 7, 1000]), PARTITIONS, WEIGHTS, st.integers(0, 2**64 - 1))
def test_kernels_are_the_definition(
    device: str,
    lanes: int,
    size: int,
    num_shards: int,
    block_rows: int | None,
    num_partitions: int | None,
    dtype: torch.dtype | None,
    seed: int,
) -> None:
    """The kernels' order is the definition's, stable across groups, tiles and blocks."""
    ids, weights = _inputs(size, num_shards, block_rows, dtype, seed % 2**32)
    owners = None if block_rows else _owners(num_partitions, num_shards, seed)
    plain = bz.block_bucketize_reference(
        ids, num_shards, block_rows=block_rows, seed=seed, weights=weights, owners=owners
    )
    given_weights = (ids.new_empty(0) if weights is None else weights).to(device)
    table = (NO_OWNERS if owners is None else owners).to(device)
    bounds, row_ids, positions, moved = bz.launch_block_bucketize(
        launcher_of("bucketize", device, lanes), ids.to(device), num_shards, block_rows or 0, seed, given_weights, table
    )
    assert _same(bz.Bucketized(bounds, row_ids, positions, None if weights is None else moved), plain)


@pytest.mark.parametrize(("num_shards", "block_rows"), [(37, None), (2048, None), (3, 1000)])
@pytest.mark.parametrize(("device", "lanes"), WARP_LAUNCHERS)
def test_several_blocks(device: str, lanes: int, num_shards: int, block_rows: int | None) -> None:
    """Warps of several blocks deal out their tiles, of which some warps have two."""
    ids, weights = _inputs(9000, num_shards, block_rows, torch.float32, 1)
    assert weights is not None
    plain = bz.block_bucketize_reference(ids, num_shards, block_rows=block_rows, seed=5, weights=weights)
    done = bz.launch_block_bucketize(
        launcher_of("bucketize", device, lanes),
        ids.to(device),
        num_shards,
        block_rows or 0,
        5,
        weights.to(device),
        NO_OWNERS.to(device),
    )
    assert _same(bz.Bucketized(*done), plain)


@pytest.mark.parametrize("partition_map", MAPS)
@pytest.mark.parametrize(("device", "lanes"), WARP_LAUNCHERS)
def test_rows_come_to_the_shards_of_a_map(device: str, lanes: int, partition_map: PartitionMap) -> None:
    """Kernels and definition route as the map does, of however many shards, ids of any size."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.cat((torch.arange(1500), torch.randint(2**31, 2**63 - 1, (1500,), generator=generator)))
    num_shards, seed = partition_map.num_shards, 2**64 - 3
    owners = None if partition_map.is_first else torch.tensor(partition_map.owners, dtype=torch.int32)
    plain = bz.block_bucketize_reference(ids, num_shards, seed=seed, owners=owners)
    table = (NO_OWNERS if owners is None else owners).to(device)
    launcher, weights = launcher_of("bucketize", device, lanes), ids.new_empty(0).to(device)
    done = bz.launch_block_bucketize(launcher, ids.to(device), num_shards, 0, seed, weights, table)
    assert _same(bz.Bucketized(*done[:3], None), plain)
    shards = partition_map.shards_of_rows(seed, ids.numpy())
    assert plain.bounds.diff().tolist() == np.bincount(shards, minlength=num_shards).tolist()
    assert np.array_equal(np.argsort(shards, kind="stable"), plain.positions.numpy())


@pytest.mark.parametrize("row", [-1, 40])
def test_a_row_on_no_shard_is_an_error(row: int) -> None:
    """A row beyond the last block raises on the CPU and stops the kernel."""
    ids = torch.tensor([0, row, 39])
    with pytest.raises(IndexError, match=str(row)):
        bz.block_bucketize(ids, 4, block_rows=10)
    with pytest.raises(IndexError, match="trap"):
        bz.launch_block_bucketize(launcher_of("bucketize", "cpu"), ids, 4, 10, 0, torch.empty(0), NO_OWNERS)


@pytest.mark.parametrize("owner", [-1, 4])
def test_an_owner_that_is_no_shard_is_an_error(owner: int) -> None:
    """A map of more shards raises on the CPU and stops the kernel."""
    ids, owners = torch.arange(100), torch.tensor([0, owner], dtype=torch.int32)
    with pytest.raises(IndexError, match="none of 4 shards"):
        bz.block_bucketize(ids, 4, owners=owners)
    with pytest.raises(IndexError, match="trap"):
        bz.launch_block_bucketize(launcher_of("bucketize", "cpu"), ids, 4, 0, 0, torch.empty(0), owners)


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


def test_operator_is_registered_rightly() -> None:
    """The operator's schema, and what it says to a tracer, are true."""
    torch.library.opcheck(bz._block_bucketize, (torch.arange(9), 4, 3, 0, torch.randn(9), NO_OWNERS))
    torch.library.opcheck(bz._block_bucketize, (torch.arange(9), 4, 0, 5, torch.empty(0), NO_OWNERS))
    owners = torch.tensor([3, 1], dtype=torch.int32)
    torch.library.opcheck(bz._block_bucketize, (torch.arange(9), 4, 0, 5, torch.empty(0), owners))
