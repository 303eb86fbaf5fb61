"""The model of benches: a DLRM with any tables, of MLPs and pairwise dot products."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["NUM_DENSE", "Dlrm", "FusedTables"]

NUM_DENSE = 13
"""Dense features of a sample."""


class Dlrm(nn.Module):
    """A DLRM; `tables` returns float32[batch, num_tables, dim] for the ids that it is called with."""

    def __init__(self, tables: nn.Module, num_tables: int, dim: int, *, bottom: Sequence[int], top: Sequence[int]):
        """Make the MLPs, with inner layers of these widths."""
        super().__init__()
        self.tables, num_vectors = tables, num_tables + 1
        self.bottom = _mlp(NUM_DENSE, *bottom, dim)
        self.top = _mlp(dim + num_vectors * (num_vectors - 1) // 2, *top, 1)
        first, second = torch.tril_indices(num_vectors, num_vectors, -1)
        self.pairs = first * num_vectors + second

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return logits float32[batch] of `dense` float32[batch, 13] and ids as the tables take them."""
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom.unsqueeze(1), self.tables(ids)], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        logits: torch.Tensor = self.top(torch.cat([bottom, products], 1)).squeeze(1)
        return logits


class FusedTables(nn.Module):
    """Tables in one of FBGEMM's table-batched modules with fused rowwise Adagrad, in the memory of a device."""

    def __init__(self, num_tables: int, num_rows: int, dim: int, batch_size: int, device: torch.device) -> None:
        """Make the tables. Raises: ModuleNotFoundError: fbgemm_gpu is not installed."""
        super().__init__()
        tbe = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        location = tbe.EmbeddingLocation.DEVICE if device.type == "cuda" else tbe.EmbeddingLocation.HOST
        table = (num_rows, dim, location, tbe.ComputeDevice.CUDA if device.type == "cuda" else tbe.ComputeDevice.CPU)
        optimizer = {"optimizer": tbe.OptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
        self.fused = tbe.SplitTableBatchedEmbeddingBagsCodegen([table] * num_tables, device=device, **optimizer)
        self.fused.init_embedding_weights_uniform(-0.05, 0.05)
        self._shape = (batch_size, num_tables, dim)
        self._offsets = torch.arange(num_tables * batch_size + 1, device=device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids, table after table."""
        rows: torch.Tensor = self.fused(ids.flatten(), self._offsets).view(self._shape)
        return rows


def _mlp(*widths: int) -> nn.Sequential:
    layers = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])
