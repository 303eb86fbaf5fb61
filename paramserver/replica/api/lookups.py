"""What the modules that read from a replica have in common, and what they look up: functions of a table's rows."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from headrace.kernels.dtypes import tensor_of
from headrace.kernels.plain_context import in_plain_context
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.replica.tables.base import Bools, Ids, ReplicaTable
from headrace.schemas.errors import ConfigError, RequestError, UnknownTableError
from headrace.schemas.tables import TableSpec, as_ids

__all__ = [
    "BagLookup",
    "Found",
    "Pooling",
    "PoolingMode",
    "ReplicaModule",
    "RowLookup",
    "check_bags",
    "spec_in",
]

Pooling = Literal["sum", "mean"]
PoolingMode = Literal["sum", "mean", "max"]
Found = tuple[torch.Tensor, Bools]
"""Rows or bags `[n, dim]`, and bool[n], which of the ids are missing."""


def spec_in(replica: EmbeddingReplica, fqn: str) -> TableSpec:
    """Return the spec of a table that a module is to read.

    Raises:
        ConfigError: The replica has no such table.
    """
    try:
        return replica.spec_of(fqn)
    except UnknownTableError as exc:
        raise ConfigError(str(exc)) from exc


class ReplicaModule(nn.Module):
    """A module whose forward reads from a replica; a compiled model calls it outside of its graphs.

    A lookup reads numpy arrays that another thread writes, and takes locks: a traced one would fail, or be a constant.
    """

    def __init__(self, replica: EmbeddingReplica) -> None:
        """Read from an open replica; the caller closes it."""
        super().__init__()
        self._replica = replica
        self._untraced = torch.compiler.disable(in_plain_context(self._look_up))  # type: ignore[no-untyped-call]

    @abstractmethod
    def _look_up(self, *args: Any) -> Any:
        """Compute the forward."""


@dataclass(frozen=True, slots=True)
class RowLookup:
    """Gathers rows."""

    def __call__(self, table: ReplicaTable, ids: Ids) -> Found:
        """Return rows and which of the ids are missing."""
        rows, missing = table.gather(ids)
        return tensor_of(rows, table.spec.dtype), missing


@dataclass(frozen=True, slots=True)
class BagLookup:
    """Pools rows to bags; ids equal to `padding_id` are left out, and never missing.

    torch's kernel runs on the same rows in the same order as in the trainer, which gives the same bits. With a padding
    id torch takes another kernel, also for bags without padding.
    """

    # int64[b + 1] on the CPU, checked by `check_bags`.
    offsets: torch.Tensor
    mode: PoolingMode
    # For sums, in the table's dtype.
    weights: torch.Tensor | None = None
    padding_id: int | None = None
    # In which rows are pooled; None for the table's own.
    dtype: torch.dtype | None = None

    def __call__(self, table: ReplicaTable, ids: Ids) -> Found:
        """Return bags in the dtype of pooling, and which of the ids are missing."""
        weights = None if self.weights is None else self.weights.detach().cpu()
        padding_at = None
        if self.padding_id is not None:
            # The padding row comes last, once, and stands for all padding.
            rows, missing = table.gather(np.append(ids, self.padding_id))
            is_padding = ids == self.padding_id
            padding_at = ids.size
            at = np.where(is_padding, padding_at, np.arange(ids.size))
            missing = missing[:-1] & ~is_padding
        elif self.mode == "max":
            rows, missing = table.gather(ids)
            at = np.arange(ids.size)
        else:
            located, at, missing = table.locate(ids)
            if not isinstance(located, np.ndarray):
                return located.pool(at, self.offsets, self.mode, weights).to(self.dtype), missing
            rows = located
        pooled = torch.nn.functional.embedding_bag(
            torch.from_numpy(at),
            tensor_of(rows, table.spec.dtype).to(self.dtype),
            self.offsets,
            mode=self.mode,
            per_sample_weights=weights,
            include_last_offset=True,
            padding_idx=padding_at,
        )
        return pooled, missing


def check_bags(what: str, ids: Ids, offsets: torch.Tensor, weights: torch.Tensor | None, dtype: torch.dtype) -> None:
    """Check what the kernels for packed rows trust; wrong offsets would make them read beyond the ids.

    `what` begins the message, as in "feature 'user'"; `dtype` is the table's, which weights must have.
    """
    bounds = as_ids(offsets)
    is_good = ids.ndim == bounds.ndim == 1 and bounds.size > 0 and bounds[0] == 0 and bounds[-1] == ids.size
    if not is_good or (np.diff(bounds) < 0).any():
        raise RequestError(f"{what}: offsets of {ids.size} ids must rise from 0 to {ids.size}, one per bag")
    if weights is not None and weights.shape != ids.shape:
        raise RequestError(f"{what}: {ids.size} ids and weights of shape {tuple(weights.shape)}")
    if weights is not None and weights.dtype is not dtype:
        raise RequestError(f"{what}: weights are {weights.dtype}, must be {dtype} like the table's rows")
