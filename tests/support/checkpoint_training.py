"""A TorchRec model that is trained on ranks, and goes on from a checkpoint that was exported from a server."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import sharded_training
import torch
import torch.distributed as dist
from sharded_training import Job

__all__ = ["JOB", "resume_on_rank", "save_on_rank", "start_on_rank"]

JOB = Job(
    run="resumed",
    module="sparse",
    shardings={"users": ("row_wise", {}), "films": ("table_wise", {"rank": 0})},
)
_STEPS = 4


def _build(seed: int) -> tuple[Any, Any]:
    model, _ = sharded_training.build(JOB)
    torch.manual_seed(seed)
    with torch.no_grad():
        for columns in sharded_training.live_shards(model).values():
            for shards in columns.values():
                for _, _, tensor in shards:
                    tensor.copy_(torch.rand(tensor.shape))
    return model, model.module.sparse


def _train(model: Any, core: Any, first: int) -> list[float]:
    """Return the losses of some steps; the dense layer has no optimizer and stays as it was."""
    losses = []
    for step in range(first, first + _STEPS):
        inputs = sharded_training.batch(core, 1000 * step + dist.get_rank(), is_empty=False)
        loss = model(inputs)
        loss.backward()
        losses.append(loss.item())
    return losses


def _state_of(model: Any) -> dict[str, Any]:
    weights = {fqn: value for fqn, value in model.state_dict().items() if "dense" not in fqn}
    return {**weights, "state": dict(model.fused_optimizer.state_dict()["state"])}


def start_on_rank(rank: int) -> dict[str, Any]:
    """Train; return all shards as they are then, in the form of `whole_tables`, and the losses of going on."""
    model, core = _build(seed=1 + rank)
    _train(model, core, 0)
    shards = sharded_training.copied(sharded_training.live_shards(model))
    return {"shards": shards, "losses": _train(model, core, _STEPS)}


def resume_on_rank(rank: int, path: str) -> list[float]:
    """Load a checkpoint into a model of other values; return the losses of going on."""
    import torch.distributed.checkpoint as dcp

    model, core = _build(seed=100 + rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(_state_of(model), checkpoint_id=path)
    return _train(model, core, _STEPS)


def save_on_rank(rank: int, path: str) -> dict[str, Any]:
    """Train, save a checkpoint as a trainer does, and return all shards."""
    import torch.distributed.checkpoint as dcp

    model, core = _build(seed=1 + rank)
    _train(model, core, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_state_of(model), checkpoint_id=path)
    return {"shards": sharded_training.copied(sharded_training.live_shards(model)), "is_there": Path(path).is_dir()}
