"""One model with a plain table for each pair of an optimizer and a placement, trained on several ranks and streamed.

A launch of ranks costs seconds, a table next to nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from replicated_training import place_whole
from torch import nn

__all__ = ["OPTIMIZERS", "PLAIN_KINDS", "train_plain_cells_on_rank"]

ROWS, DIM, BATCH, NUM_STEPS = 101, 32, 6, 4

# Torch optimizers by a short name; `sum`, `momentum` … are no part of it.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "decay": ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
    "adagrad": ("Adagrad", {"lr": 0.1}),
    "adam": ("Adam", {"lr": 0.1}),
    "amsgrad": ("Adam", {"lr": 0.1, "amsgrad": True}),
    "adamw": ("AdamW", {"lr": 0.1, "weight_decay": 0.01}),
}
PLAIN_KINDS = ("ddp", "fsdp", "S0", "S1")


def _batches(step: int, rank: int, names: list[str]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: (torch.rand(BATCH, 2, generator=generator) ** 2 * ROWS).long() for name in names}


def train_plain_cells_on_rank(rank: int, address: str, run: str) -> dict[str, Any]:
    """Train plain tables, each replicated or sharded in one of `PLAIN_KINDS` by one of `OPTIMIZERS`, in one model.

    Every table is trained once more, whole and alone, with the gradients of both ranks: those values are returned.
    """
    from torch.distributed.fsdp import fully_shard

    from headrace.streamer import RawEmbeddingStreamer

    names = {f"{kind}_{optimizer}": (kind, optimizer) for kind in PLAIN_KINDS for optimizer in OPTIMIZERS}
    torch.manual_seed(3)
    tables = {name: nn.Embedding(ROWS, DIM) for name in names}
    wholes = {name: table.weight.detach().clone().requires_grad_() for name, table in tables.items()}
    root = nn.Module()
    for kind in PLAIN_KINDS:
        group = nn.ModuleDict({name: table for name, table in tables.items() if names[name][0] == kind})
        root.add_module(kind, _Group(group))
        if kind == "fsdp":
            fully_shard(root.get_submodule(kind))
        for table in group.values():
            if kind in ("S0", "S1"):
                table.weight = nn.Parameter(place_whole(table.weight.detach(), kind))
    root.add_module("ddp", nn.parallel.DistributedDataParallel(root.get_submodule("ddp")))
    holder = nn.Sequential()
    holder.add_module(run, root)
    optimizers, references = (
        [
            getattr(torch.optim, OPTIMIZERS[names[name][1]][0])([of[name]], **OPTIMIZERS[names[name][1]][1])
            for name in names
        ]
        for of in ({name: table.weight for name, table in tables.items()}, wholes)
    )
    with RawEmbeddingStreamer(address, run=run) as streamer:
        streamer.attach(holder, optimizers, publish="all")
        for step in range(NUM_STEPS):
            for optimizer in [*optimizers, *references]:
                optimizer.zero_grad()
            ids = _batches(step, 0, list(names))  # the same on all ranks, so that a mean over them is exact
            for kind in ("ddp", "fsdp"):
                root.get_submodule(kind)(ids).backward()
            for name, whole in wholes.items():
                _loss(nn.functional.embedding(ids[name], whole)).backward()
                if names[name][0] in ("S0", "S1"):
                    assert whole.grad is not None
                    tables[name].weight.grad = place_whole(whole.grad.clone(), names[name][0])
            for optimizer in [*optimizers, *references]:
                optimizer.step()
        streamer.flush()
        dist.barrier()
        fqns = sorted({table.spec.fqn for table in streamer.tables})
    values = {}
    for name, reference in zip(names, references, strict=True):
        state = {key: value for key, value in reference.state[wholes[name]].items() if key != "step"}
        columns = {"weights": wholes[name].detach(), **state}
        values[name] = {key: value.numpy().copy() for key, value in columns.items() if value is not None}
    return {"values": values, "fqns": fqns}


class _Group(nn.Module):
    """Tables of one kind, and their loss."""

    def __init__(self, tables: nn.ModuleDict) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([_loss(table(ids[name])) for name, table in self.tables.items()]).sum()


def _loss(rows: torch.Tensor) -> torch.Tensor:
    return (rows - 1).pow(2).sum()
