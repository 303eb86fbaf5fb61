"""Which rows and columns a rank holds: equal to torch's own cuts, for every placement, size, mesh and shard order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from replicated_training import PLACEMENTS, layouts_on_rank
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from headrace.streamer.taps.local_parts import Runs, layout_runs

SHARDS = st.builds(Shard, st.sampled_from([0, 1]))
STRIDED = st.builds(_StridedShard, st.sampled_from([0, 1]), split_factor=st.integers(2, 4))


def ids_of(runs: Runs) -> list[int]:
    """Return the positions of runs."""
    return [at for start, length in runs for at in range(start, start + length)]


def cut_by_torch(whole: torch.Tensor, mesh: Sequence[int], at: Sequence[int], placements: Sequence[Any]) -> Any:
    """Return the local tensor of a mesh coordinate, cut by torch."""
    for placement, count, index in zip(placements, mesh, at, strict=True):
        if not placement.is_replicate():
            whole = placement._split_tensor(whole, count, with_padding=False, contiguous=True)[0][index]
    return whole


@given(
    shape=st.tuples(st.integers(0, 30), st.integers(1, 12)),
    layout=st.lists(
        st.tuples(st.integers(1, 5), st.one_of(st.builds(Replicate), SHARDS, STRIDED)), min_size=1, max_size=3
    ),
)
def test_each_coordinate_holds_what_torch_cuts(shape: tuple[int, int], layout: list[tuple[int, Any]]) -> None:
    """Uneven sizes, empty ranks, strided shards: the runs name the rows and columns of torch's local tensor."""
    mesh, placements = zip(*layout, strict=True)
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    for at in itertools.product(*map(range, mesh)):
        rows, columns = map(ids_of, layout_runs(shape, mesh, at, placements))
        assert torch.equal(whole[rows][:, columns], cut_by_torch(whole, mesh, at, placements))


@given(
    num_rows=st.integers(0, 40),
    mesh=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    data=st.data(),
)
def test_shard_orders(num_rows: int, mesh: list[int], data: st.DataObject) -> None:
    """Mesh dimensions that cut in another order leave what torch's chunks in that order leave."""
    order = data.draw(st.permutations(range(len(mesh))))
    placements = [Shard(0)] * len(mesh)
    for at in itertools.product(*map(range, mesh)):
        whole = torch.arange(num_rows)
        for dim in order:
            whole = Shard(0)._split_tensor(whole, mesh[dim], with_padding=False, contiguous=True)[0][at[dim]]
        (rows,) = layout_runs([num_rows], mesh, at, placements, [(0, order)])
        assert ids_of(rows) == whole.tolist()


@pytest.mark.parametrize("world_size", [2, 4])
def test_dtensors_of_real_ranks(world_size: int) -> None:
    """Every placement of meshes of one and two dimensions, and every shard order: each rank holds its parts' rows."""
    results = run_ranks(layouts_on_rank, world_size)
    for checked in results:
        assert checked == results[0]
        assert len(checked) >= 5 * sum(1 for shape, _ in PLACEMENTS.values() if torch.Size(shape).numel() == world_size)
        assert ("order" in str(checked)) == (world_size == 4)
