"""What every table of a replica has, in memory or on disk: its interface, and the lock that its readers use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.dtypes import TORCH_DTYPES
from headrace.kernels.quantization import quantize_rows
from headrace.paramserver.store.deltas import RowDelta
from headrace.schemas.errors import ConfigError
from headrace.schemas.tables import ColumnShard, TableSpec

__all__ = ["Bools", "Found", "Ids", "Pooling", "PoolingMode", "ReplicaTable", "RowSource", "SeqLock", "default_row"]

_T = TypeVar("_T")

Ids = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Pooling = Literal["sum", "mean"]
PoolingMode = Literal["sum", "mean", "max"]
Found = tuple[torch.Tensor, Bools]
"""Rows or bags `[n, dim]`, and bool[n], which of the ids are missing."""


class RowSource(Protocol):
    """What lookups read: a table, or its `DequantizedRows`."""

    spec: TableSpec

    def gather(self, ids: Ids) -> Found:
        """Return rows of int64[n] valid ids in any order, `[n, dim]`, and bool[n], which of them are missing.

        The rows are a copy on the CPU in the table's dtype, whatever precision the table keeps.
        """

    def pool(self, ids: Ids, offsets: torch.Tensor, mode: Pooling, weights: torch.Tensor | None) -> Found:
        """Return sums or means of bags of rows, `[b, dim]`, bit for bit as `torch.nn.functional.embedding_bag`.

        Bag i is `ids[offsets[i]:offsets[i + 1]]`, of int64[n] and int64[b + 1]; weights are float32[n], with `sum`
        only, or None. Missing ids count as the default row.
        """


class ReplicaTable(RowSource, Protocol):
    """Rows of one table as lookups see them. Missing and deleted rows read as the table's default row.

    Thread: one thread applies and loads. Lookups may overlap with it, and are valid only if nothing was applied
    meanwhile; `SeqLock` tells.

    Attributes:
        spec: The table's spec. Set only to that of a renamed table, within the seqlock.
    """

    spec: TableSpec

    @property
    def num_present(self) -> int:
        """Number of rows that are present."""

    @property
    def size_bytes(self) -> int:
        """Memory that the table takes."""

    def inspect(self, ids: Ids) -> Found:
        """Return what `gather` returns without counting as a use or bringing rows into memory."""

    def apply(self, delta: RowDelta, *, epoch: int, step: int, is_conditional: bool) -> None:
        """Apply a delta's rows and deletions as the store does: the last write wins, a conditional one if not older."""

    def load(self, row_ids: Ids, weights: Any, presence: Any, epochs: Any, steps: Any, shard: ColumnShard) -> None:
        """Load rows of unique int64[n] ids that were read from a store, with a presence and version each.

        `weights` are contiguous bytes of the shard's columns. Rows whose presence (uint8[n]) is missing are skipped.
        """

    def grow(self, spec: TableSpec) -> None:
        """Take a spec with more rows (`TableSpec.is_growth_of`); the new rows are missing. Enter the seqlock before."""

    def close(self) -> None:
        """Free files and threads; no lookup may follow. Idempotent."""


class SeqLock:
    """A lock whose readers see a change wholly or not at all, and take no lock while nothing changes.

    The version is even while nobody writes. A reader notes the version, reads, and compares: the same even number means
    that all it read belongs to one moment. Otherwise it reads once more under the writer's lock, so no reader starves.

    Thread: any; one writes at a time.
    """

    def __init__(self) -> None:
        self.num_retries = 0  # reads that were repeated
        self._version = 0
        self._lock = threading.Lock()

    @contextmanager
    def write(self) -> Iterator[None]:
        """Enter a change; readers see the state before it, or wait until it ends."""
        with self._lock:
            self._version += 1
            try:
                yield
            finally:
                self._version += 1

    def read(self, look: Callable[[], _T]) -> _T:
        """Return the result of `look`, computed from one moment.

        `look` is called once or twice and must not change anything. Its exception counts only if nobody wrote
        meanwhile. It may read itself: nobody writes then, or the outer read is repeated too.
        """
        version = self._version
        if not version & 1:
            try:
                found = look()
            except Exception:
                if self._version == version:
                    raise
            else:
                if self._version == version:
                    return found
        self.num_retries += 1
        with self._lock:
            return look()


def default_row(spec: TableSpec, default: torch.Tensor | None) -> torch.Tensor:
    """Return what missing rows read as, `[dim]` on the CPU in the table's dtype; zeros if `default` is None.

    That of a quantized table is quantized, as its rows are.

    Raises:
        ConfigError: The default has another shape.
    """
    dtype = TORCH_DTYPES[spec.dtype]
    if default is None:
        return torch.zeros(spec.dim, dtype=dtype)
    if default.shape != (spec.num_columns,):
        raise ConfigError(
            f"table {spec.fqn!r}: default has shape {tuple(default.shape)}, must be ({spec.num_columns},)"
        )
    if spec.is_quantized:
        return quantize_rows(default[None].cpu(), "int8")[0]
    return default.to("cpu", dtype)
