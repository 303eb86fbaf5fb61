"""One model with a plain table for each pair of an optimizer and a placement, trained on several ranks and streamed.

A launch of ranks costs seconds, a table next to nothing.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from replicated_training import PLACEMENTS, place_whole
from torch import nn
from whole_optimizers import Lion

__all__ = ["NUM_STEPS", "PLAIN_KINDS", "cells_of", "optimizer_names", "optimizer_of", "train_plain_cells_on_rank"]

ROWS, DIM, BATCH, NUM_STEPS = 101, 6, 6, 4

# Torch optimizers by a short name: the class, or its name in `torch.optim`, and its settings.
_OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "decay": ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
    "adagrad": ("Adagrad", {"lr": 0.1}),
    "adam": ("Adam", {"lr": 0.1}),
    "amsgrad": ("Adam", {"lr": 0.1, "amsgrad": True}),
    "adamw": ("AdamW", {"lr": 0.1, "weight_decay": 0.01}),
    "rmsprop": ("RMSprop", {"lr": 0.1, "momentum": 0.9, "centered": True}),
    "nadam": ("NAdam", {"lr": 0.1}),
    "radam": ("RAdam", {"lr": 0.1}),
    "lion": (Lion, {"lr": 0.1}),
}
# By the number of ranks: replicated, cut by `fully_shard`, and keys of `PLACEMENTS`.
PLAIN_KINDS = {
    2: ("ddp", "fsdp", "S0", "S1", "R"),
    4: tuple(name for name, (shape, _) in PLACEMENTS.items() if math.prod(shape) == 4),
}


def cells_of(world_size: int) -> dict[str, tuple[str, str]]:
    """Return, by the table's name, all pairs of a kind and an optimizer that some ranks can have."""
    cells = itertools.product(PLAIN_KINDS[world_size], optimizer_names())
    # Rowwise states of columns are refused.
    return {f"{kind}_{name}": (kind, name) for kind, name in cells if name != "rowwise" or not _is_by_columns(kind)}


def optimizer_names() -> list[str]:
    """Return short names of torch's optimizers, and of TorchRec's rowwise Adagrad if it is installed."""
    return [*_OPTIMIZERS, *(["rowwise"] if importlib.util.find_spec("torchrec") else [])]


def _is_by_columns(kind: str) -> bool:
    return any(word[0] != "R" and word[1] == "1" for word in PLACEMENTS.get(kind, ((), ""))[1].split())


def optimizer_of(name: str, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Return one of `optimizer_names`, of some parameters."""
    if name == "rowwise":
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        rowwise: torch.optim.Optimizer = RowWiseAdagrad(parameters, lr=0.1)
        return rowwise
    kind, settings = _OPTIMIZERS[name]
    make: type[torch.optim.Optimizer] = getattr(torch.optim, kind) if isinstance(kind, str) else kind
    return make(parameters, **settings)


def _batches(step: int, rank: int, names: list[str]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: (torch.rand(BATCH, 2, generator=generator) ** 2 * ROWS).long() for name in names}


def train_plain_cells_on_rank(rank: int, address: str, run: str) -> dict[str, Any]:
    """Train plain tables, one for each of `cells_of` these ranks, in one model.

    Every table is trained once more, whole and alone, with the gradients of both ranks: those values are returned.
    """
    from torch.distributed.fsdp import fully_shard

    from headrace.streamer import RawEmbeddingStreamer

    names = cells_of(dist.get_world_size())
    wrapped = [kind for kind in ("ddp", "fsdp") if kind in PLAIN_KINDS[dist.get_world_size()]]
    torch.manual_seed(3)
    tables = {name: nn.Embedding(ROWS, DIM) for name in names}
    wholes = {name: table.weight.detach().clone().requires_grad_() for name, table in tables.items()}
    root = nn.Module()
    for kind in PLAIN_KINDS[dist.get_world_size()]:
        group = nn.ModuleDict({name: table for name, table in tables.items() if names[name][0] == kind})
        root.add_module(kind, _Group(group))
        if kind == "fsdp":
            fully_shard(root.get_submodule(kind))
        for table in group.values():
            if kind not in wrapped:
                table.weight = nn.Parameter(place_whole(table.weight.detach(), kind))
    if "ddp" in wrapped:
        root.add_module("ddp", nn.parallel.DistributedDataParallel(root.get_submodule("ddp")))
    holder = nn.Sequential()
    holder.add_module(run, root)
    optimizers, references = (
        [optimizer_of(optimizer, [of[name]]) for name, (_, optimizer) in names.items()]
        for of in ({name: table.weight for name, table in tables.items()}, wholes)
    )
    # Each step sends its rows, so that one that is missed is not sent by another step.
    with RawEmbeddingStreamer(address, run=run, freshness_s=0, max_cost_percent=100) as streamer:
        streamer.attach(holder, optimizers, publish="all")
        for step in range(NUM_STEPS):
            for optimizer in [*optimizers, *references]:
                optimizer.zero_grad()
            ids = _batches(step, 0, list(names))  # the same on all ranks, so that a mean over them is exact
            for kind in wrapped:
                root.get_submodule(kind)(ids).backward()
            for name, whole in wholes.items():
                _loss(nn.functional.embedding(ids[name], whole)).backward()
                if names[name][0] not in wrapped:
                    assert whole.grad is not None
                    tables[name].weight.grad = place_whole(whole.grad.clone(), names[name][0])
            for optimizer in [*optimizers, *references]:
                optimizer.step()
        streamer.flush()
        dist.barrier()
        step = streamer.stats().step
        parts = [(t.spec.fqn, t.row_offset, t.num_local_rows, t.shard.offset, t.shard.width) for t in streamer.tables]
    values = {}
    for name, reference in zip(names, references, strict=True):
        # Scalars are no state of rows; states of an optimizer that is not known are not streamed.
        left_out = ("step", "mu_product", *(["exp_avg"] if names[name][1] == "lion" else []))
        state = {key: value for key, value in reference.state[wholes[name]].items() if key not in left_out}
        columns = {"weights": wholes[name].detach(), **state}
        if names[name][0] not in wrapped:  # what torch puts together of strided shards is not right in every version
            local = tables[name].weight.to_local().detach()  # type: ignore[operator]
            assert torch.equal(local, place_whole(wholes[name].detach(), names[name][0]).to_local()), name
        fqn = f"{run}.{names[name][0]}.tables.{name}.weight"
        values[fqn] = {key: value.numpy().copy() for key, value in columns.items() if value is not None}
    return {"values": values, "step": step, "parts": parts}


class _Group(nn.Module):
    """Tables of one kind, and their loss."""

    def __init__(self, tables: nn.ModuleDict) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([_loss(table(ids[name])) for name, table in self.tables.items()]).sum()


def _loss(rows: torch.Tensor) -> torch.Tensor:
    return (rows - 1).pow(2).sum()
