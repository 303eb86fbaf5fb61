"""A model with dense tensors of every kind, and its tensors put together again from rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from trainer_tables import rows_of

from headrace.kernels.dtypes import TORCH_DTYPES
from headrace.schemas.tables import TableSpec
from headrace.streamer.flush.layout import Flush
from headrace.streamer.taps.dense_tensors import DenseTensors

__all__ = ["DTYPES", "DenseModel", "dense_of", "tensor_from", "tensors_of", "train_dense"]

DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
NUM_ROWS = 60


class DenseModel(nn.Module):
    """Layers over a table, as in a DLRM: of several rows each, with a last row that is not full; and buffers.

    Attributes:
        user: A table.
        bottom, top: Layers with a norm that counts batches.
        tied: Has the weight of a layer of `bottom`.
    """

    def __init__(self, *, dtypes: Iterable[torch.dtype] = DTYPES) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.user = nn.Embedding(NUM_ROWS, 8)
        self.bottom = nn.Sequential(nn.Linear(13, 120), nn.BatchNorm1d(120), nn.ReLU(), nn.Linear(120, 8))
        self.top = nn.Linear(16, 1)
        self.tied = nn.Linear(13, 120, bias=False)
        self.tied.weight = self.bottom[0].weight
        self.turned = nn.Parameter(torch.randn(70, 40).t())  # not contiguous
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        for dtype in dtypes:
            values = torch.arange(3000) % 2 == 0 if dtype is torch.bool else torch.arange(3000).to(dtype)
            self.register_buffer(f"of_{str(dtype).removeprefix('torch.')}", values.reshape(3, 1000))
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.register_buffer("nothing", torch.ones(0, 4))

    def forward(self, ids: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.bottom(inputs), self.user(ids)], dim=1)
        loss: torch.Tensor = (self.top(joined) - 1).pow(2).mean() + self.turned.pow(2).mean()
        return loss + self.tied(inputs).pow(2).mean()


def train_dense(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Train on batches that depend on the step alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, NUM_ROWS, (16,), generator=generator)
        optimizer.zero_grad()
        model(ids, torch.randn(16, 13, generator=generator)).backward()
        optimizer.step()


def tensors_of(model: nn.Module, optimizers: Any = (), **settings: Any) -> DenseTensors:
    """Return the dense tensors of a model, named as in it."""
    known = {"model_name": "default", "names": None, "table_paths": (), "has_states": False}
    return DenseTensors(model, optimizers, **{**known, **settings})


def tensor_from(data: bytes, spec: TableSpec) -> torch.Tensor:
    """Return the tensor of a spec whose rows have these bytes; what lies behind its last element must be zeros."""
    elements = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    size_bytes = spec.num_elements * spec.dtype.size_bytes
    assert not elements[size_bytes:].any()
    assert spec.shape is not None
    return elements[:size_bytes].view(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)


def dense_of(flush: Flush, tensors: DenseTensors, num_shards: int = 1) -> Mapping[str, torch.Tensor]:
    """Return the dense tensors, without states, that a flush carries, by path."""
    found: dict[str, dict[int, bytes]] = {}
    for _, fqn, row, data in rows_of(flush, num_shards):
        found.setdefault(fqn, {})[row] = data
    whole = {}
    for each in tensors.all:
        if rows := found.get(each.spec.fqn):
            assert sorted(rows) == list(range(each.spec.num_rows))
            row_bytes = each.spec.dim * each.spec.dtype.size_bytes
            whole[each.path] = tensor_from(b"".join(rows[row][:row_bytes] for row in sorted(rows)), each.spec)
    return whole
