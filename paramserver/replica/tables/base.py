"""What every table of a replica has, in memory or on disk: its interface, and the lock that its readers use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.paramserver.store.deltas import RowDelta
from headrace.schemas.errors import ConfigError
from headrace.schemas.tables import ColumnShard, TableSpec

if TYPE_CHECKING:
    from headrace.kernels.quantized_rows import QuantizedRows

__all__ = ["Bools", "Found", "Ids", "Located", "ReplicaTable", "Rows", "SeqLock", "default_row"]

_T = TypeVar("_T")

Ids = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Rows = npt.NDArray[Any]
"""Rows `[n, dim]` of a table's `DType.numpy`: the bits of bfloat16 as uint16."""
Found = tuple[Rows, Bools]
"""Rows `[n, dim]`, and bool[n], which of the ids are missing."""
Located = tuple["Rows | QuantizedRows", Ids, Bools]
"""Rows, int64[n], where those of the ids are in them, and bool[n], which of the ids are missing."""


class ReplicaTable(Protocol):
    """Rows of one table as lookups see them. Missing and deleted rows read as the table's default row.

    Thread: one thread applies and loads. Lookups may overlap with it, and are valid only if nothing was applied
    meanwhile; `SeqLock` tells.

    Attributes:
        spec: The table's spec. Set only to one with other uses.
    """

    spec: TableSpec

    @property
    def num_present(self) -> int:
        """Number of rows that are present."""

    @property
    def size_bytes(self) -> int:
        """Memory that the table takes."""

    def gather(self, ids: Ids) -> Found:
        """Return rows of int64[n] valid ids in any order, `[n, dim]`, and bool[n], which of them are missing.

        The rows are a copy in the table's dtype, whatever precision the table keeps.
        """

    def inspect(self, ids: Ids) -> Found:
        """Return what `gather` returns without counting as a use or bringing rows into memory."""

    def locate(self, ids: Ids) -> Located:
        """Return what `gather` returns, but without a copy where the table has one: rows that may share its memory.

        To pool rows. Those of an int8 or int4 table are an object that pools them without unpacking them first.
        """

    def apply(self, delta: RowDelta, *, epoch: int, step: int) -> None:
        """Apply a delta's rows and deletions as the store does: the last write wins."""

    def load(self, row_ids: Ids, weights: Any, presence: Any, epochs: Any, steps: Any, shard: ColumnShard) -> None:
        """Load rows of unique int64[n] ids that were read from a store, with a presence and version each.

        `weights` are contiguous bytes of the shard's columns. Rows that are not present (uint8[n]) are skipped.
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


def default_row(spec: TableSpec, default: Rows | None) -> Rows:
    """Return what missing rows read as, `[dim]` of the table's `DType.numpy`; zeros if `default` is None.

    `default` is given as the table's rows are stored.

    Raises:
        ConfigError: The default has another shape.
    """
    if default is None:
        return np.zeros(spec.dim, spec.dtype.numpy)
    if default.shape != (spec.dim,):
        raise ConfigError(f"table {spec.fqn!r}: default has shape {default.shape}, must be ({spec.dim},)")
    assert default.dtype == spec.dtype.numpy, "callers convert"
    return np.ascontiguousarray(default)
