"""What the trainer of the chaos harness trains, and a served copy computes: a small ranker."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn

from headrace.kernels.dtypes import DTYPES
from headrace.kernels.quantization import dequantize_rows_reference, quantize_rows_reference
from headrace.schemas.tables import ROWWISE_INT8_BYTES, TableSpec
from headrace.streamer import RawEmbeddingStreamer

__all__ = [
    "DENSE_SPECS",
    "DIMS",
    "GROWING",
    "MAX_ROWS",
    "MODELS",
    "QUANTIZED",
    "TORCH_TABLES",
    "Ranker",
    "attach",
    "compute",
    "outputs_of",
]

MODELS = ("ctr", "cvr")
TORCH_TABLES = {"item": (1500, 16), "user": (400, 8), "shop": (50, 32), "tag": (300, 8), "brand": (200, 9)}
GROWING, MAX_ROWS = "user", 1000  # the table that gets more rows, and what it may end with
# The other tables are stored as they are trained.
_STORED_TYPES = {
    "ctr": {"tag": torch.bfloat16, "brand": torch.int8},
    "cvr": {"tag": torch.float16, "brand": torch.int8},
}
_STATELESS = {"ctr": set[str](), "cvr": {"tag"}}  # and those in int8
QUANTIZED = {
    f"{model}:{name}.weight" for model, types in _STORED_TYPES.items() for name in types if types[name] is torch.int8
}
DIMS = {
    f"{model}:{name}.weight": dim + ROWWISE_INT8_BYTES * (f"{model}:{name}.weight" in QUANTIZED)
    for model in MODELS
    for name, (_, dim) in TORCH_TABLES.items()
}
"""Columns of each model's tables as they are stored."""


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
    for table, dtype in _STORED_TYPES[name].items():
        bag = frozen.get_submodule(table)
        assert isinstance(bag, nn.EmbeddingBag)
        bag.weight = nn.Parameter(_rounded(bag.weight, dtype), requires_grad=False)
    return compute(frozen)


def _rounded(weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype is not torch.int8:
        return weights.to(dtype)
    return dequantize_rows_reference(quantize_rows_reference(weights, "int8"), "int8", weights.shape[1])


def attach(streamer: RawEmbeddingStreamer, model: nn.Module, name: str, optimizer: torch.optim.Optimizer) -> None:
    """Attach one of the models, with its tables stored as `outputs_of` has them. Of the second one, rows wait."""
    streamer.attach(
        model,
        optimizer,
        publish="all",
        dense=True,
        dense_states=True,
        weights_dtype={f"{table}.weight": dtype for table, dtype in _STORED_TYPES[name].items()},
        states={f"{table}.weight": table not in _STATELESS[name] for table in TORCH_TABLES},
        send_share=0.5 if name == MODELS[1] else None,
    )
