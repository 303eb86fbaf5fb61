"""One table of a replica, wherever it keeps its rows: what lookups and updates ask of it."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.torch_dtypes import TORCH_DTYPES
from headrace.paramserver.store.pending import RowDelta
from headrace.schemas.errors import ConfigError, RequestError
from headrace.schemas.tables import ColumnShard, TableSpec

__all__ = ["ReplicaTable", "as_ids", "default_row"]

_Ids = npt.NDArray[np.int64]


class ReplicaTable(Protocol):
    """Rows of one table as lookups see them.

    Missing and deleted rows look like the table's default row.

    Thread: one applies and loads; lookups may overlap with it, and are of use only when nothing was applied meanwhile
    (`VersionGate`).
    """

    @property
    def spec(self) -> TableSpec:
        """What the table is."""

    @property
    def num_present(self) -> int:
        """Rows that are present."""

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""

    def gather(self, ids: _Ids) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
        """Return rows.

        Args:
            ids: int64[n], valid ids of the table, any order, also repeated.

        Returns:
            `[n, dim]` on the CPU in the table's dtype, whatever it keeps them in, sharing no memory with the table; and
            bool[n], which of them are missing.
        """

    def inspect(self, ids: _Ids) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
        """Return what `gather` does and leave no trace: nothing counts as looked up, or comes into memory for it."""

    def pool(
        self, ids: _Ids, offsets: torch.Tensor, mode: Literal["sum", "mean"], weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
        """Return the sums or means of bags of rows, with the bits of `torch.nn.functional.embedding_bag`.

        Args:
            ids: int64[n], valid ids of the table.
            offsets: int64[b + 1]: bag i is `ids[offsets[i]:offsets[i + 1]]`.
            mode: How the rows of a bag become one.
            weights: float32[n], with `sum` only, or None.

        Returns:
            `[b, dim]`; and bool[n], which ids are missing: they count as the default row.
        """

    def apply(self, delta: RowDelta, *, epoch: int, step: int, is_conditional: bool) -> None:
        """Take a delta's rows and deletions as the store does: later ones win, conditional ones when not older."""

    def load(self, row_ids: _Ids, weights: Any, presence: Any, epochs: Any, steps: Any, shard: ColumnShard) -> None:
        """Take rows that are read from a store, with a version of their own each.

        Args:
            row_ids: int64[n], each once.
            weights: Contiguous bytes of `n` rows of the shard's columns.
            presence: uint8[n], `RowPresence`; rows that are missing are passed over.
            epochs: One a row.
            steps: One a row.
            shard: Columns that are given.
        """

    def close(self) -> None:
        """Free what memory alone does not hold; nothing is looked up any more. Idempotent."""


def as_ids(ids: npt.ArrayLike | torch.Tensor) -> _Ids:
    """Return ids that a caller has given as int64 of the same shape, C-contiguous.

    Args:
        ids: Integers, on any device.

    Raises:
        RequestError: They are no integers, or one does not fit into 64 bits.
    """
    if isinstance(ids, torch.Tensor):
        if not ids.numel():
            return np.empty(tuple(ids.shape), np.int64)
        if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
            raise RequestError(f"ids are {ids.dtype}, not integers")
        ids = ids.detach().cpu().numpy()
    try:
        given = np.asarray(ids)
    except ValueError as exc:
        raise RequestError(f"ids are no array of integers: {exc}") from exc
    if given.size and given.dtype.kind not in "iu":
        raise RequestError(f"ids are {given.dtype}, not integers")
    if given.size and given.dtype == np.uint64 and int(given.max()) >= 2**63:
        raise RequestError(f"id {given.max()} is beyond 2**63 - 1")
    return np.asarray(given, np.int64, order="C")


def default_row(spec: TableSpec, default: torch.Tensor | None) -> torch.Tensor:
    """Return `[dim]` on the CPU in the table's dtype: what missing rows look like; zeros when `default` is None.

    Raises:
        ConfigError: The default is of another shape.
    """
    dtype = TORCH_DTYPES[spec.dtype]
    if default is None:
        return torch.zeros(spec.dim, dtype=dtype)
    if default.shape != (spec.dim,):
        raise ConfigError(f"table {spec.fqn!r}: a default of shape {tuple(default.shape)}, its dim is {spec.dim}")
    return default.to("cpu", dtype)
