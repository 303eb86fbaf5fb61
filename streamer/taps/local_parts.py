"""Which part of a table a rank streams: the split of replicated rows over their ranks, and the shards of a DTensor.

Source: `torch/distributed/tensor/placement_types.py` (`Shard`, `_StridedShard`: how each cuts a dimension), torch 2.13.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.model_tree import is_a
from headrace.streamer.taps.tapped_table import TablePart

__all__ = ["Replicas", "dtensor_parts", "is_dtensor", "local_tensor", "owned_part", "replicas_in"]


@dataclass(frozen=True, slots=True)
class Replicas:
    """Ranks that hold the same values, and which of them this one is.

    Attributes:
        index: This rank's place among them, 0 to `count` - 1.
        count: How many they are.
    """

    index: int
    count: int

    def owned(self, num_rows: int) -> tuple[int, int]:
        """Return the first row that this rank owns, and the end: every row has exactly one owner."""
        return num_rows * self.index // self.count, num_rows * (self.index + 1) // self.count


def replicas_in(fqn: str, group: Any) -> Replicas:
    """Return the replicas that a process group keeps equal.

    Args:
        fqn: The table, for the error.
        group: Of `DistributedDataParallel`.

    Raises:
        UnsupportedModelError: It is not all ranks: each group would stream its own values of the same rows.
    """
    size, world_size = dist.get_world_size(group), dist.get_world_size()
    if size != world_size:
        raise UnsupportedModelError(
            f"table {fqn!r} is kept equal on {size} of the {world_size} ranks: values of several groups cannot be told "
            f"apart; replicate it over all ranks"
        )
    return Replicas(dist.get_rank(group), size)


def owned_part(part: TablePart, num_local_rows: int, replicas: Replicas) -> TablePart:
    """Return the rows of a replicated part that this rank streams.

    Args:
        part: What all replicas hold, from row 0 of their tensor.
        num_local_rows: Rows of the tensor.
        replicas: Those that hold it.
    """
    first, end = replicas.owned(num_local_rows)
    return dataclasses.replace(part, row_offset=part.row_offset + first, first_row=first, num_local_rows=end - first)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return is_a(tensor, "DTensor")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the live local tensor of a DTensor, or the tensor itself; without gradient, and not to be kept."""
    detached = tensor.detach()
    if is_dtensor(tensor):
        local: torch.Tensor = detached._local_tensor  # type: ignore[attr-defined]
        return local
    return detached


def dtensor_parts(fqn: str, tensor: Any) -> tuple[TablePart, ...]:
    """Return the parts of a table that the local tensor of a DTensor holds and this rank streams.

    A strided shard is several runs of rows (or columns), each of which is a part. Rows that a mesh dimension replicates
    are split over its ranks.

    Args:
        fqn: The table.
        tensor: DTensor `[rows, columns]`.

    Raises:
        UnsupportedModelError: The layout is not one that can be followed.
    """
    mesh, (num_rows, dim) = tensor.device_mesh, tensor.shape
    coordinate = mesh.get_coordinate()
    if coordinate is None or mesh.size() != dist.get_world_size():
        raise UnsupportedModelError(
            f"table {fqn!r} is a DTensor on a mesh of {mesh.size()} of the {dist.get_world_size()} ranks: "
            f"use a mesh of all ranks"
        )
    _check_order(fqn, tensor)
    runs = [[(0, int(num_rows))], [(0, int(dim))]]
    replica, num_replicas = 0, 1
    for mesh_dim, placement in enumerate(tensor.placements):
        index, count = coordinate[mesh_dim], mesh.size(mesh_dim)
        if placement.is_replicate():
            replica, num_replicas = replica * count + index, num_replicas * count
        elif is_a(placement, "_StridedShard"):
            runs[placement.dim] = _strided_chunk(runs[placement.dim], placement.split_factor, count, index)
        elif is_a(placement, "Shard"):
            runs[placement.dim] = _chunk(runs[placement.dim], count, index)
        else:
            raise UnsupportedModelError(f"table {fqn!r} is a DTensor with placement {placement}: not streamed")
    local_shape = tuple(tensor._local_tensor.shape)
    if local_shape != (_length(runs[0]), _length(runs[1])):
        raise UnsupportedModelError(
            f"table {fqn!r}: a DTensor of placements {tensor.placements} has a local tensor of {local_shape}, "
            f"not of {(_length(runs[0]), _length(runs[1]))}"
        )
    rows = list(_own(_with_local_firsts(runs[0]), Replicas(replica, num_replicas).owned(local_shape[0])))
    return tuple(
        TablePart(
            fqn=fqn,
            num_rows=int(num_rows),
            dim=int(dim),
            row_offset=row,
            column_offset=column,
            first_row=first_row,
            num_local_rows=row_count,
            first_column=first_column,
            num_local_columns=column_count,
        )
        for row, row_count, first_row in rows
        for column, column_count, first_column in _with_local_firsts(runs[1])
    )


_Runs = list[tuple[int, int]]
"""Where each run of a local dimension begins in the whole one, and its length."""


def _check_order(fqn: str, tensor: Any) -> None:
    """Refuse shards of one dimension that are not cut from the first mesh dimension to the last."""
    spec = tensor._spec
    order = getattr(spec, "shard_order", None)
    if order and order != type(spec).compute_default_shard_order(tensor.placements):
        raise UnsupportedModelError(f"table {fqn!r} is a DTensor whose shards have the order {order}: not streamed")


def _length(runs: _Runs) -> int:
    return sum(length for _, length in runs)


def _chunk(runs: _Runs, count: int, index: int) -> _Runs:
    """Return the chunk `index` of `count` as `torch.chunk` cuts: equal ones, and what is left in the last."""
    size = -(-_length(runs) // count)
    return _cut(runs, size * index, size * (index + 1))


def _strided_chunk(runs: _Runs, split_factor: int, count: int, index: int) -> _Runs:
    """Return chunk `index` of each of `split_factor` chunks, side by side."""
    return [run for part in range(split_factor) for run in _chunk(_chunk(runs, split_factor, part), count, index)]


def _cut(runs: _Runs, first: int, end: int) -> _Runs:
    """Return the local positions `first` to `end - 1`."""
    found, at = [], 0
    for start, length in runs:
        low, high = max(first, at), min(end, at + length)
        if low < high:
            found.append((start + low - at, high - low))
        at += length
    return found


def _with_local_firsts(runs: _Runs) -> Iterator[tuple[int, int, int]]:
    """Yield (where it begins in the whole, length, where it begins here) for each run; runs that touch become one."""
    at = 0
    merged: _Runs = []
    for start, length in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    for start, length in merged:
        yield start, length, at
        at += length


def _own(runs: Iterator[tuple[int, int, int]], owned: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield what lies in the owned range of local positions."""
    for start, length, at in runs:
        low, high = max(owned[0], at), min(owned[1], at + length)
        if low < high:
            yield start + low - at, high - low, low
