"""Compute which part of a table a rank streams: replicated rows are split over their ranks, DTensors by shard.

Source: `torch/distributed/tensor/placement_types.py` (`Shard`, `_StridedShard`: how each cuts a dimension) and
`_dtensor_spec.py` (`ShardOrder`), torch 2.13.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from headrace.kernels.module_walk import is_a
from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.model_tree import or_without
from headrace.streamer.taps.tapped_table import TablePart

__all__ = [
    *("Replicas", "Runs", "TableCopy", "cuts_columns", "dtensor_parts", "dtensor_rows", "is_dtensor", "layout_runs"),
    *("local_tensor", "replica_groups", "replica_part", "replicas_in"),
]

Runs = list[tuple[int, int]]
"""The runs of a local dimension, in its order: where each begins in the whole dimension, and its length."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """The ranks that hold the same values: their count, and this rank's index among them."""

    index: int
    count: int

    def row_range(self, num_rows: int) -> tuple[int, int]:
        """Return the first row that this rank streams, and the end; every row belongs to exactly one rank."""
        return num_rows * self.index // self.count, num_rows * (self.index + 1) // self.count


@dataclass(frozen=True, kw_only=True, slots=True)
class TableCopy:
    """Rows of a table that some ranks keep equal, as this one has them."""

    fqn: str
    # The ranks, ascending.
    ranks: tuple[int, ...]
    # The runs of its rows: where each begins in the table, and its length.
    runs: tuple[tuple[int, int], ...]
    # Returns the live weights and states, each `[num_rows, width]` on one device.
    tensors: Callable[[], list[torch.Tensor]]
    # The first column: a rank may have several parts of a table.
    column: int = 0

    @property
    def key(self) -> tuple[str, tuple[int, ...], int, int]:
        """What the same rows of all these ranks have in common: table, ranks, first row and column."""
        return self.fqn, self.ranks, self.runs[0][0] if self.runs else 0, self.column

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return sum(length for _, length in self.runs)

    def row_ids(self, rows: range) -> npt.NDArray[np.int64]:
        """Return the global ids, int64[n], of consecutive local rows."""
        ids = np.concatenate([np.arange(first, first + length) for first, length in self.runs])
        return ids[rows.start : rows.stop]


def replicas_in(fqn: str, group: Any) -> Replicas:
    """Return the replicas of a table that a `DistributedDataParallel` keeps equal; refuse groups of some ranks only."""
    size, world_size = dist.get_world_size(group), dist.get_world_size()
    if size != world_size:
        raise UnsupportedModelError(
            f"table {fqn!r} is kept equal on only {size} of the {world_size} ranks, so several groups would stream "
            f"different values: replicate it over all ranks{or_without(fqn)}"
        )
    return Replicas(dist.get_rank(group), size)


def replica_part(part: TablePart, num_local_rows: int, replicas: Replicas) -> TablePart:
    """Return the rows that this rank streams of a part with `num_local_rows` that each replica holds."""
    first, end = replicas.row_range(num_local_rows)
    return dataclasses.replace(part, row_offset=part.row_offset + first, first_row=first, num_local_rows=end - first)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing its module."""
    return is_a(tensor, "DTensor")


def cuts_columns(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor of which this rank's local tensor has not all columns."""
    return is_dtensor(tensor) and any(
        getattr(placement, "dim", None) == 1
        for placement in tensor.placements  # type: ignore[attr-defined]
    )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the live local tensor of a DTensor, or the tensor itself, detached. Do not keep it."""
    if is_dtensor(tensor):  # detached first, one in another shard order has other rows in torch 2.14
        local: torch.Tensor = tensor._local_tensor.detach()  # type: ignore[attr-defined]
        return local
    return tensor.detach()


def dtensor_parts(fqn: str, tensor: Any) -> tuple[TablePart, ...]:
    """Return the parts of a table that the local tensor of a DTensor holds and this rank streams.

    Each run of rows (or columns) of a strided shard is a part. Rows that a mesh dimension replicates are split over its
    ranks.

    Raises:
        UnsupportedModelError: The layout is not supported.
    """
    mesh, (num_rows, dim) = tensor.device_mesh, tensor.shape
    coordinate = mesh.get_coordinate()
    if coordinate is None or mesh.size() != dist.get_world_size():
        raise UnsupportedModelError(
            f"table {fqn!r} is a DTensor on a mesh of {mesh.size()} of the {dist.get_world_size()} ranks: "
            f"use a mesh of all ranks{or_without(fqn)}"
        )
    runs = _runs_here(fqn, tensor, coordinate)
    replica, num_replicas = 0, 1
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            index, count = coordinate[mesh_dim], mesh.size(mesh_dim)
            replica, num_replicas = replica * count + index, num_replicas * count
    rows = list(_within(_with_local_firsts(runs[0]), Replicas(replica, num_replicas).row_range(_length(runs[0]))))
    # A part without rows stands for a rank that streams none: it still has the table's scalars, and maybe replicas.
    rows = rows or [(runs[0][0][0] if runs[0] else 0, 0, 0)]
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


def replica_groups(tensor: Any) -> tuple[Any, ...]:
    """Return the process groups in which a DTensor's local tensors are equal, the innermost mesh dimension first.

    `dtensor_parts` numbers replicas in this order, so the rows of each group's ranks together follow one another.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    return tuple(mesh.get_group(dim) for dim in reversed(range(mesh.ndim)) if placements[dim].is_replicate())


def dtensor_rows(fqn: str, tensor: Any) -> tuple[tuple[int, int], ...]:
    """Return the runs of rows of a DTensor's local tensor: where each begins in the whole one, and its length."""
    return tuple(_merged(_runs_here(fqn, tensor, tensor.device_mesh.get_coordinate())[0]))


def layout_runs(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Any],
    shard_order: Sequence[tuple[int, Sequence[int]]] | None = None,
) -> list[Runs]:
    """Return which part of a tensor a mesh coordinate holds: the runs of each dimension.

    The local tensor has, in this order, all rows of the first dimension's runs, and of each row all columns of the
    second's. Adjacent runs are not merged. Parts that no placement shards are whole.

    Args:
        shape: Of the whole tensor.
        mesh_shape: Of the mesh.
        coordinate: Place in the mesh.
        placements: One for each mesh dimension; `Replicate` and partial ones cut nothing.
        shard_order: torch's `ShardOrder`, (tensor dimension, mesh dimensions in the order in which they cut it) of each
            sharded dimension. A strided shard then cuts like a plain one. None cuts by one mesh dimension after the
            other.
    """
    runs: list[Runs] = [[(0, int(size))] for size in shape]
    if shard_order is not None:
        for dim, mesh_dims in shard_order:
            for mesh_dim in mesh_dims:
                runs[dim] = _chunk(runs[dim], mesh_shape[mesh_dim], coordinate[mesh_dim])
        return runs
    for placement, count, index in zip(placements, mesh_shape, coordinate, strict=True):
        if is_a(placement, "_StridedShard"):
            runs[placement.dim] = _strided_chunk(runs[placement.dim], placement.split_factor, count, index)
        elif is_a(placement, "Shard"):
            runs[placement.dim] = _chunk(runs[placement.dim], count, index)
    return runs


def _runs_here(fqn: str, tensor: Any, coordinate: Sequence[int]) -> list[Runs]:
    """Return the runs of a DTensor's local tensor; refuse placements that are not streamed."""
    mesh, placements = tensor.device_mesh, tensor.placements
    for placement in placements:
        if not (placement.is_replicate() or is_a(placement, "Shard") or is_a(placement, "_StridedShard")):
            raise UnsupportedModelError(
                f"table {fqn!r} is a DTensor with placement {placement}: use Shard or Replicate{or_without(fqn)}"
            )
    mesh_shape = [mesh.size(dim) for dim in range(mesh.ndim)]
    local_shape = tuple(tensor._local_tensor.shape)

    def runs_at(place: Sequence[int], order: Any) -> list[Runs]:
        return layout_runs(tensor.shape, mesh_shape, place, placements, order)

    orders = _shard_orders(tensor)
    found = [runs_at(coordinate, order) for order in orders]
    fitting = [runs for runs in found if tuple(map(_length, runs)) == local_shape]
    if not fitting:
        shapes = " or ".join(dict.fromkeys(str(tuple(map(_length, runs))) for runs in found))
        raise UnsupportedModelError(
            f"table {fqn!r}: a DTensor of placements {placements} has a local tensor of {local_shape}, not of "
            f"{shapes}: distribute it with distribute_tensor or fully_shard{or_without(fqn)}"
        )
    # The same on every rank, so that all refuse together.
    for place in itertools.product(*map(range, mesh_shape)) if len(orders) > 1 else ():
        one, other = (list(map(_merged, runs_at(place, order))) for order in orders)
        if one != other and all(_length(a) == _length(b) for a, b in zip(one, other, strict=True)):
            raise UnsupportedModelError(
                f"table {fqn!r}: {list(tensor.shape)} in placements {placements} may lie in two ways, "
                f"which no shape tells apart: choose a size that the mesh {mesh_shape} divides{or_without(fqn)}"
            )
    return fitting[0]


def _shard_orders(tensor: Any) -> list[Any]:
    """Return the shard orders that a DTensor may have; None cuts by one mesh dimension after the other.

    Strided shards stand for two layouts, which differ where ranks do not divide a dimension: `distribute_tensor` cuts
    the dimension into `split_factor` chunks and each of these among the ranks; `fully_shard` cuts what another mesh
    dimension has left here, in the order that the strided shards encode.
    """
    spec = tensor._spec
    if any(is_a(placement, "_StridedShard") for placement in tensor.placements):
        encoded = type(spec)._maybe_convert_StridedShard_to_shard_order(tensor.placements, tensor.device_mesh)
        return [None] if encoded is None else [None, encoded]
    return [getattr(spec, "shard_order", None)]


def _length(runs: Runs) -> int:
    return sum(length for _, length in runs)


def _chunk(runs: Runs, count: int, index: int) -> Runs:
    """Return chunk `index` of `count` like `torch.chunk`: equal ones, and the rest in the last."""
    size = -(-_length(runs) // count)
    return _slice(runs, size * index, size * (index + 1))


def _strided_chunk(runs: Runs, split_factor: int, count: int, index: int) -> Runs:
    """Return chunk `index` of each of `split_factor` chunks, side by side."""
    return [run for part in range(split_factor) for run in _chunk(_chunk(runs, split_factor, part), count, index)]


def _slice(runs: Runs, first: int, end: int) -> Runs:
    """Return the local positions `first` to `end - 1`."""
    found, at = [], 0
    for start, length in runs:
        low, high = max(first, at), min(end, at + length)
        if low < high:
            found.append((start + low - at, high - low))
        at += length
    return found


def _merged(runs: Runs) -> Runs:
    """Merge adjacent runs."""
    merged: Runs = []
    for start, length in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged


def _with_local_firsts(runs: Runs) -> Iterator[tuple[int, int, int]]:
    """Merge adjacent runs; yield (begin in the whole dimension, length, begin in the local tensor) of each."""
    at = 0
    for start, length in _merged(runs):
        yield start, length, at
        at += length


def _within(runs: Iterator[tuple[int, int, int]], row_range: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """Clip runs to a range of local positions."""
    for start, length, at in runs:
        low, high = max(row_range[0], at), min(row_range[1], at + length)
        if low < high:
            yield start + low - at, high - low, low
