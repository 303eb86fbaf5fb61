"""A table of a replica in memory: dense by row id, or sparse through a map of ids to slots."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from headrace.paramserver.replica.id_map import IdMap
from headrace.paramserver.replica.precision import Precision, stored_row_bytes
from headrace.paramserver.replica.slot_rows import make_slot_rows, pool_rows
from headrace.paramserver.replica.slot_versions import DELETED, PRESENT, VERSION_SIZE_BYTES, SlotVersions
from headrace.paramserver.replica.table import default_row
from headrace.paramserver.store.pending import RowDelta
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import ColumnShard, TableSpec

__all__ = ["MemoryTable", "size_of_table"]

_Ids = npt.NDArray[np.int64]

_FIRST_SLOTS = 1024


def size_of_table(spec: TableSpec, precision: Precision | None = None) -> int:
    """Return the memory that a dense table takes, bytes; of a sparse one, which grows, what it begins with.

    Args:
        spec: What it is.
        precision: As for `MemoryTable`.
    """
    return (spec.num_rows or _FIRST_SLOTS) * (stored_row_bytes(spec, precision) + VERSION_SIZE_BYTES)


class MemoryTable:
    """Rows of one table as lookups see them; see `ReplicaTable`.

    A missing or deleted row holds the table's default, so that a lookup is one gather, whatever is missing; only where
    the precision cannot hold the default it is put into what was gathered. Slot 0 of a sparse table is for all ids that
    it does not have.

    Attributes:
        spec: What the table is.
    """

    def __init__(
        self, spec: TableSpec, *, default: torch.Tensor | None = None, precision: Precision | None = None
    ) -> None:
        """Make an empty table.

        Args:
            spec: What it is; a table of virtual ids (`num_rows` 0) is sparse.
            default: `[dim]`, what missing rows look like; zeros when None.
            precision: What rows are kept in, where that makes them smaller (`precision_of`); None for their own dtype.
                Lookups give the table's dtype all the same.

        Raises:
            ConfigError: The default is of another shape.
        """
        self.spec = spec
        self._default = default_row(spec, default)
        self._map = None if spec.num_rows else IdMap()
        num_slots = spec.num_rows or _FIRST_SLOTS
        self._rows = make_slot_rows(spec, num_slots, self._default, precision)
        self._versions = SlotVersions(num_slots, spec.whole)

    @property
    def num_present(self) -> int:
        """Rows that are present."""
        return self._versions.num_present

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        return self._rows.size_bytes + self._versions.size_bytes + (self._map.size_bytes if self._map else 0)

    def inspect(self, ids: _Ids) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
        """Return rows and which of them are missing; see `ReplicaTable.inspect`."""
        return self.gather(ids)

    def gather(self, ids: _Ids) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
        """Return rows and which of them are missing; see `ReplicaTable.gather`."""
        slots = self._slots_of(ids)
        missing = self._missing(slots)
        rows = self._rows.take(slots)
        if not self._rows.holds_default:
            rows[torch.from_numpy(missing)] = self._default
        return rows, missing

    def pool(
        self, ids: _Ids, offsets: torch.Tensor, mode: Literal["sum", "mean"], weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
        """Return pooled bags and which ids are missing; see `ReplicaTable.pool`.

        Of int8 and int4 rows the sums are right up to the rounding of float32.
        """
        if not self._rows.holds_default:
            rows, missing = self.gather(ids)
            if missing.any():
                return pool_rows(rows, offsets, mode, weights), missing
        slots = self._slots_of(ids)
        return self._rows.pool(slots, offsets, mode, weights), self._missing(slots)

    def close(self) -> None:
        """Do nothing: memory goes with the last reference, which a lookup may hold."""

    def apply(self, delta: RowDelta, *, epoch: int, step: int, is_conditional: bool) -> None:
        """Take a delta's rows and deletions; see `ReplicaTable.apply`."""
        if delta.row_ids.size:
            values = np.frombuffer(delta.columns["weights"], delta.layout.dtype["weights"])
            self._write(delta.layout.shard, delta.row_ids, values, epoch, step, is_conditional)
        if delta.deleted_row_ids is not None and delta.deleted_row_ids.size:
            self._write(delta.layout.shard, delta.deleted_row_ids, None, epoch, step, is_conditional)

    def load(self, row_ids: _Ids, weights: Any, presence: Any, epochs: Any, steps: Any, shard: ColumnShard) -> None:
        """Take rows that are read from a store; see `ReplicaTable.load`."""
        for wanted in (PRESENT, DELETED):
            at = np.flatnonzero(presence == wanted)
            if at.size:
                values = None
                if wanted == PRESENT:
                    values = np.frombuffer(weights, RecordLayout(self.spec, shard).dtype["weights"])[at]
                self._write(shard, row_ids[at], values, epochs[at], steps[at], False)

    def _slots_of(self, ids: _Ids) -> _Ids:
        return ids if self._map is None else self._map.find(ids)

    def _missing(self, slots: _Ids) -> npt.NDArray[np.bool_]:
        """Return bool[n]; presence, which is anywhere in memory, is looked at only where some row may be missing."""
        num_present = self._versions.num_present
        missing: npt.NDArray[np.bool_]
        if self._map is None and num_present == self.spec.num_rows:
            missing = np.zeros(slots.size, np.bool_)
        elif self._map is not None and num_present == len(self._map):
            missing = slots == 0
        else:
            missing = self._versions.presence[slots] != PRESENT
        return missing

    def _write(
        self,
        shard: ColumnShard,
        ids: _Ids,
        values: npt.NDArray[np.void] | None,
        epoch: Any,
        step: Any,
        is_conditional: bool,
    ) -> None:
        """Write columns of rows, each id once; no values are deletions."""
        slots = self._slots_for(ids)
        parts = self._versions.parts_of(shard)
        for part in parts:
            there, given = slots, values if values is None or len(parts) == 1 else self._cut(values, shard, part.shard)
            if is_conditional:
                keep = np.flatnonzero(part.is_older(slots, epoch, step))
                if not keep.size:
                    continue
                there, given = slots[keep], None if given is None else given[keep]
            if given is None:
                self._rows.clear(there, part.shard)
            else:
                self._rows.put(there, part.shard, given)
            self._versions.write(part, there, DELETED if given is None else PRESENT, epoch, step)

    def _cut(self, values: npt.NDArray[np.void], shard: ColumnShard, part: ColumnShard) -> npt.NDArray[np.void]:
        """Return some of a shard's columns, contiguous."""
        item_bytes = self.spec.dtype.size_bytes
        first, width = (part.offset - shard.offset) * item_bytes, part.width * item_bytes
        columns = values.view(np.uint8).reshape(values.size, -1)[:, first : first + width]
        cut: npt.NDArray[np.void] = np.ascontiguousarray(columns).view(f"V{width}")[:, 0]
        return cut

    def _slots_for(self, ids: _Ids) -> _Ids:
        if self._map is None:
            return ids
        slots = self._map.insert(ids)
        if len(self._map) + 1 > self._versions.presence.size:
            num_slots = 2 * (len(self._map) + 1)
            self._rows.grow(num_slots)
            self._versions.grow(num_slots)
        return slots
