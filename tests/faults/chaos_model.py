"""What the trainer of the chaos harness trains, and a served copy computes: a small ranker."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn

from headrace.kernels.dtypes import DTYPES
from headrace.schemas.tables import TableSpec
from headrace.streamer import RawEmbeddingStreamer

__all__ = [
    "DENSE_SPECS",
    "DIMS",
    "GROWING",
    "MAX_ROWS",
    "MODELS",
    "TORCH_TABLES",
    "Ranker",
    "attach",
    "compute",
    "outputs_of",
]

MODELS = ("ctr", "cvr")
TORCH_TABLES = {"item": (1500, 16), "user": (400, 8), "shop": (50, 32), "tag": (300, 8), "brand": (200, 9)}
GROWING, MAX_ROWS = "user", 1000  # the table that gets more rows, and what it may end with
_ROUNDED = "tag"
_STORED_AS = {"ctr": torch.bfloat16, "cvr": torch.float16}
DIMS = {f"{model}:{name}.weight": dim for model in MODELS for name, (_, dim) in TORCH_TABLES.items()}
"""Columns of each model's tables."""


class Ranker(nn.Module):
    """Bags of all tables, a norm with buffers, and a small tower: what both models are."""

    def __init__(self, *, num_grown: int = 0) -> None:
        """Make it with so many rows more in the growing table."""
        super().__init__()
        self.sizes = {name: rows + num_grown * (name == GROWING) for name, (rows, _) in TORCH_TABLES.items()}
        for name, (_, dim) in TORCH_TABLES.items():
            self.add_module(name, nn.EmbeddingBag(self.sizes[name], dim, mode="sum", sparse=True))
        width = sum(dim for _, dim in TORCH_TABLES.values())
        self.norm = nn.BatchNorm1d(width)
        self.top = nn.Sequential(nn.Linear(width, 40), nn.ReLU(), nn.Linear(40, 1))

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a score `[n]` for ids `[n, k]` of each table."""
        bags = [self.get_submodule(name)(ids[name]) for name in TORCH_TABLES]
        scores: torch.Tensor = self.top(self.norm(torch.cat(bags, dim=1)))
        return scores.squeeze(1)


def _dense_specs() -> dict[str, TableSpec]:
    with torch.device("meta"):
        tensors = Ranker().state_dict()
    paths = [path for path in tensors if path.partition(".")[0] not in TORCH_TABLES]
    return {path: TableSpec.of_tensor(path, tensors[path].shape, DTYPES[tensors[path].dtype]) for path in paths}


DENSE_SPECS = _dense_specs()


def compute(model: nn.Module) -> bytes:
    """Return what a model computes of a batch that is always the same."""
    some = np.random.default_rng(0)
    probe = {name: torch.from_numpy(some.integers(0, rows, (16, 3))) for name, (rows, _) in TORCH_TABLES.items()}
    with torch.no_grad():
        outputs: torch.Tensor = model(probe)
    return outputs.numpy().tobytes()


def outputs_of(model: nn.Module, name: str) -> bytes:
    """Return what a frozen copy of a trainer's model computes with its tables as they are stored, as a served copy is.

    Where torch has to keep a product for gradients, it may round otherwise.
    """
    frozen = copy.deepcopy(model).eval().requires_grad_(False)
    bag = frozen.get_submodule(_ROUNDED)
    assert isinstance(bag, nn.EmbeddingBag)
    bag.weight = nn.Parameter(bag.weight.to(_STORED_AS[name]), requires_grad=False)
    return compute(frozen)


def attach(streamer: RawEmbeddingStreamer, model: nn.Module, name: str, optimizer: torch.optim.Optimizer) -> None:
    """Attach one of the models, with its tables stored as `outputs_of` has them. Of the second one, rows wait."""
    streamer.attach(
        model,
        optimizer,
        publish="all",
        dense=True,
        dense_states=True,
        weights_dtype={f"{_ROUNDED}.weight": _STORED_AS[name]},
        states={f"{_ROUNDED}.weight": name == MODELS[0]},
        send_share=0.5 if name == MODELS[1] else None,
    )
