"""Plain torch tables on several ranks: DTensors of any placement, their parts, and models that are refused."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["OTHER_ORDER", "PLACEMENTS", "layouts_on_rank", "place_whole", "refusal_on_rank"]

# By name: the mesh's shape and each mesh dimension's placement: Sn shards dimension n, R replicates, XnF is a strided
# shard of dimension n with split factor F.
PLACEMENTS: dict[str, tuple[tuple[int, ...], str]] = {
    "S0": ((2,), "S0"),
    "S1": ((2,), "S1"),
    "R": ((2,), "R"),
    "S0-4": ((4,), "S0"),
    "R-S0": ((2, 2), "R S0"),
    "S1-R": ((2, 2), "S1 R"),
    "R-R": ((2, 2), "R R"),
    "S0-S0": ((2, 2), "S0 S0"),
    "S0-S1": ((2, 2), "S0 S1"),
    "S1-S0": ((2, 2), "S1 S0"),
    "strided-0": ((2, 2), "X02 S0"),
    "strided-1": ((2, 2), "X12 S1"),
    "strided-R": ((2, 2), "X02 R"),
    "S1-strided": ((2, 2), "S1 X03"),
}
# Rows that the second of two mesh dimensions cuts first, on 4 ranks.
OTHER_ORDER = "other-order"


def _placements(text: str) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    def one(word: str) -> Any:
        if word == "R":
            return Replicate()
        return Shard(int(word[1])) if word[0] == "S" else _StridedShard(int(word[1]), split_factor=int(word[2:]))

    return [one(word) for word in text.split()]


@functools.cache
def _mesh(shape: tuple[int, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape)


def place_whole(whole: torch.Tensor, placement: str) -> Any:
    """Return a DTensor of a key of `PLACEMENTS` or `OTHER_ORDER`: each rank keeps its part, and none sends anything."""
    from torch.distributed.tensor import distribute_tensor

    if placement == OTHER_ORDER:
        return _in_other_order(whole)
    shape, text = PLACEMENTS[placement]
    return distribute_tensor(whole, _mesh(shape), _placements(text), src_data_rank=None)


def refusal_on_rank(rank: int, case: str) -> str:
    """Return the error with which attaching a model is refused."""
    from headrace.schemas.errors import ConfigError, UnsupportedModelError
    from headrace.streamer.taps.attach import tap_model

    model, optimizers = _REFUSED[case](rank)
    try:
        tap_model(model, optimizers, lambda: None, tables=["bagg.weight", "*"] if case == "unknown_name" else None)
    except (UnsupportedModelError, ConfigError) as exc:
        return str(exc)
    return "not refused"


def _sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def _unwrapped(rank: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = nn.Embedding(5, 2)
    return model, _sgd(model)


def _ignored(rank: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    inner = nn.ModuleDict({"bag": nn.EmbeddingBag(5, 2), "one": nn.Embedding(3, 4)})
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["bag.weight"])
    return nn.parallel.DistributedDataParallel(inner), _sgd(inner)


def _part_of_the_ranks(rank: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))["model"]
    model = nn.Embedding(5, 2)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)], src_data_rank=None))
    return model, _sgd(model)


def _rowwise_dtensor(rank: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    model = nn.Embedding(6, 2)
    model.weight = nn.Parameter(place_whole(model.weight.detach(), "S1"))
    return model, [RowWiseAdagrad(model.parameters(), lr=0.1)]


def _ddp_of_some_ranks(rank: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    groups = [dist.new_group([0]), dist.new_group([1])]
    model = nn.parallel.DistributedDataParallel(nn.Embedding(5, 2), process_group=groups[rank])
    return model, _sgd(model)


def _partial(rank: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (2,))
    model = nn.Embedding(5, 2)
    model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), mesh, [Partial()], run_check=False))
    return model, _sgd(model)


class FullyShardedDataParallel(nn.Module):
    """The wrapper by its name: the real one asks for a GPU."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


def _flattened(rank: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = FullyShardedDataParallel(nn.Embedding(5, 2))
    return model, _sgd(model)


def _only_one_rank_refuses(rank: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = nn.parallel.DistributedDataParallel(nn.Embedding(5, 2, max_norm=1.0 if rank else None))
    return model, _sgd(model)


def _tbe(name: str) -> nn.Module:
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tbe: nn.Module = SplitTableBatchedEmbeddingBagsCodegen(
        [(10, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)], table_names=[name], learning_rate=0.1
    )
    return tbe


def _different_ways_to_count(rank: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = nn.ModuleDict({"tbe": _tbe(f"t{rank}"), "dense": nn.Linear(2, 1)})
    return model, [] if rank else _sgd(model["dense"])


def _same_rows_twice(rank: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    return nn.ModuleDict({"tbe": _tbe("t")}), []


def _unknown_name(rank: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = nn.parallel.DistributedDataParallel(nn.ModuleDict({"bag": nn.EmbeddingBag(5, 2)}))
    return model, _sgd(model)


_REFUSED = {
    "unknown_name": _unknown_name,
    "unwrapped": _unwrapped,
    "ignored": _ignored,
    "part_of_the_ranks": _part_of_the_ranks,
    "rowwise_dtensor": _rowwise_dtensor,
    "ddp_of_some_ranks": _ddp_of_some_ranks,
    "partial": _partial,
    "flattened": _flattened,
    "only_one_rank_refuses": _only_one_rank_refuses,
    "different_ways_to_count": _different_ways_to_count,
    "same_rows_twice": _same_rows_twice,
}


def layouts_on_rank(rank: int) -> list[str]:
    """Check the parts of DTensors against their local tensors; return what was checked."""
    checked = []
    for (rows, dim), (name, (mesh, _)) in itertools.product(
        [(101, 6), (7, 6), (3, 5), (1, 1), (8, 12)], PLACEMENTS.items()
    ):
        if torch.Size(mesh).numel() == dist.get_world_size():
            whole = torch.arange(float(rows * dim)).reshape(rows, dim)
            _check_parts(whole, place_whole(whole, name))
            checked.append(f"{name} {rows}")
    if dist.get_world_size() == 4:
        for rows, dim in ((101, 6), (5, 4), (2, 3)):
            whole = torch.arange(float(rows * dim)).reshape(rows, dim)
            _check_parts(whole, place_whole(whole, OTHER_ORDER))
            checked.append(f"order {rows}")
    return checked


def _in_other_order(whole: torch.Tensor) -> Any:
    """Return a DTensor whose rows the second mesh dimension cuts first, moved there by torch."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    mesh = _mesh((2, 2))
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    before = DTensorSpec(mesh, (Replicate(), Replicate()), meta)
    after = DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=order)
    return DTensor(redistribute_local_tensor(whole, before, after), after, requires_grad=False)


def _check_parts(whole: torch.Tensor, table: Any) -> None:
    """Check that parts have the local tensor's values, and all ranks' parts each element of the whole once."""
    from headrace.streamer.taps.local_parts import dtensor_parts, local_tensor

    count = torch.zeros_like(whole)
    for part in dtensor_parts("t", table):
        here = part.columns(part.rows(local_tensor(table)))
        rows = slice(part.row_offset, part.row_offset + here.shape[0])
        columns = slice(part.column_offset, part.column_offset + here.shape[1])
        assert torch.equal(here, whole[rows, columns]), (table.placements, part)
        count[rows, columns] += 1
    dist.all_reduce(count)
    assert (count == 1).all(), (table.placements, whole.shape)
