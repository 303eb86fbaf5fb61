"""A model with tables of several kinds, and the training of it with optimizers of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mirror import Mirror, mirrored
from torch import nn

from headrace.streamer.taps.attach import Tap

SIZES = {"user": (97, 8), "item": (64, 16), "tag": (130, 3), "idle": (20, 5)}


class TwoKinds(nn.Module):
    """Plain tables and pooled tables of several dims, one of which no batch uses."""

    def __init__(self, *, sparse: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.user = nn.Embedding(*SIZES["user"], sparse=sparse, dtype=dtype)
        self.item = nn.EmbeddingBag(*SIZES["item"], sparse=sparse, dtype=dtype, mode="sum")
        self.tag = nn.EmbeddingBag(*SIZES["tag"], sparse=sparse, dtype=dtype, mode="mean")
        self.idle = nn.Embedding(*SIZES["idle"], sparse=sparse, dtype=dtype)

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        user, item, tag = self.user(ids["user"]), self.item(ids["item"]), self.tag(ids["tag"])
        return (user.float() * item.float()[:, :8]).sum() + tag.float().pow(2).sum() + (user.float() ** 2).sum()


def batch(step: int, size: int = 6) -> dict[str, torch.Tensor]:
    """Return ids of a step, the same in every run, skewed so that rows repeat within and across batches."""
    generator = torch.Generator().manual_seed(step)

    def ids(name: str, *shape: int) -> torch.Tensor:
        skewed = torch.rand(*shape, generator=generator) ** 3
        return (skewed * SIZES[name][0]).long()

    return {"user": ids("user", size), "item": ids("item", size, 3), "tag": ids("tag", size, 2)}


def touched(*steps: int) -> dict[str, list[int]]:
    """Return the rows that batches look up."""
    rows: dict[str, list[int]] = {"idle.weight": []}
    for name in ("user", "item", "tag"):
        rows[f"{name}.weight"] = sorted({i for step in steps for i in batch(step)[name].flatten().tolist()})
    return rows


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, size: int = 6) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(step, size)).backward()
        optimizer.step()


def row_wise_adagrad(parameters: object, **settings: object) -> torch.optim.Optimizer:
    module = pytest.importorskip("torchrec.optim.rowwise_adagrad")
    optimizer: torch.optim.Optimizer = module.RowWiseAdagrad(parameters, **settings)
    return optimizer


Make = Callable[..., torch.optim.Optimizer]


def watched(
    make: Make = torch.optim.SGD, *, sparse: bool = True, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[TwoKinds, torch.optim.Optimizer, Tap, Mirror]:
    """Return a tapped model, its optimizer (with a rate of 0.1), the tap and a mirror of the tables."""
    model = TwoKinds(sparse=sparse, dtype=dtype)
    optimizer = make(model.parameters(), **{"lr": 0.1, **settings})
    return model, optimizer, *mirrored(model, optimizer)


def hooks(model: nn.Module, *optimizers: torch.optim.Optimizer) -> int:
    """Count the hooks on modules and optimizers."""
    on_modules = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    )
    return on_modules + sum(
        len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks) for optimizer in optimizers
    )


def assert_same_states(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Compare all that two optimizers keep of their parameters: names, types and values."""
    states, expected = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert states.keys() == expected.keys()
    for index, state in expected.items():
        assert states[index].keys() == state.keys()
        for name, value in state.items():
            found = states[index][name]
            assert type(found) is type(value), name
            if isinstance(value, torch.Tensor):
                assert (found.dtype, found.device, found.requires_grad) == (value.dtype, value.device, False), name
                assert torch.equal(found, value), name
            else:
                assert found == value, name
