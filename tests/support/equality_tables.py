"""Models of the same tables of several dims, in torch and in FBGEMM, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["BATCH", "TABLES", "TorchModel", "batch_of", "table_batched"]

BATCH = 16
# (name, rows, dim): dims that are and are not multiples of 16 bytes, and a table of few rows.
TABLES = [("users", 1500, 16), ("films", 303, 8), ("shops", 7, 36)]


class TorchModel(nn.Module):
    """Plain embedding tables: pooled ones, and one that takes an id a sample."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, sparse: bool) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(
            {
                name: nn.EmbeddingBag(rows, dim, mode="sum", sparse=sparse, dtype=dtype)
                for name, rows, dim in TABLES[:-1]
            }
        )
        _, rows, dim = TABLES[-1]
        self.one = nn.Embedding(rows, dim, sparse=sparse, dtype=dtype)

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        pooled = [bag(ids[name]).float() for name, bag in self.bags.items()]
        return torch.cat([*pooled, self.one(ids["shops"][:, 0]).float()], dim=1)


def batch_of(generator: torch.Generator, device: torch.device | None = None) -> dict[str, torch.Tensor]:
    """Return three ids a sample for each table."""
    return {name: torch.randint(0, rows, (BATCH, 3), generator=generator).to(device) for name, rows, _ in TABLES}


def table_batched(
    optimizer: str, precision: str = "FP32", device: torch.device | None = None, **settings: Any
) -> tuple[Any, Any]:
    """Return a fused module of all tables, and a function that gives its output for a batch.

    Args:
        optimizer: Name in `EmbOptimType`.
        precision: Of the weights: name in `SparseType`.
        device: Where the tables are; the CPU by default.
        **settings: Of the module.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    is_on_gpu = device is not None and device.type == "cuda"
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if is_on_gpu else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, *place) for _, rows, dim in TABLES],
        optimizer=EmbOptimType[optimizer],
        learning_rate=0.1,
        eps=1e-6,
        weights_precision=SparseType[precision],
        output_dtype=SparseType.FP32,
        table_names=[table for table, _, _ in TABLES],
        device=device,
        **settings,
    )
    tbe.init_embedding_weights_uniform(-0.1, 0.1)

    def forward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        indices = torch.cat([batch[table].flatten() for table, _, _ in TABLES])
        output: torch.Tensor = tbe(indices, torch.arange(0, indices.numel() + 1, 3, device=device))
        return output

    return tbe, forward
