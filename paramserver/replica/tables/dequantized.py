"""A replica's table whose rows the trainer has quantized, as lookups see it: in float32."""

from __future__ import annotations

import torch

from headrace.kernels.quantization import dequantize_rows
from headrace.paramserver.replica.tables.base import Found, Ids, Pooling, ReplicaTable, RowSource
from headrace.paramserver.replica.tables.slot_rows import pool_rows

__all__ = ["DequantizedRows", "stored_rows"]


class DequantizedRows:
    """The rows of a quantized table, `stored`, which keeps their bytes. Thread: as for the table."""

    def __init__(self, stored: ReplicaTable) -> None:
        """Read from a table."""
        self.stored, self.spec = stored, stored.spec

    def gather(self, ids: Ids) -> Found:
        """Return rows as float32 `[n, num_columns]`; see `RowSource.gather`."""
        rows, missing = self.stored.gather(ids)
        return dequantize_rows(rows, "int8", self.spec.num_columns), missing

    def pool(self, ids: Ids, offsets: torch.Tensor, mode: Pooling, weights: torch.Tensor | None) -> Found:
        """Return bags as float32 `[b, num_columns]`; see `RowSource.pool`."""
        rows, missing = self.gather(ids)
        return pool_rows(rows, offsets, mode, weights), missing


def stored_rows(source: RowSource) -> RowSource:
    """Return a source of the bytes that are stored."""
    return source.stored if isinstance(source, DequantizedRows) else source
