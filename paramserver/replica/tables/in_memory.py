"""A replica's table in memory: dense by row id, or sparse through a map from ids to slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.replica.tables.base import Bools, Found, Ids, Located, Rows, default_row
from headrace.paramserver.replica.tables.id_map import IdMap
from headrace.paramserver.replica.tables.slot_rows import Precision, make_slot_rows, stored_row_bytes
from headrace.paramserver.store.deltas import RowDelta
from headrace.schemas.row_records import PRESENT, RecordLayout
from headrace.schemas.tables import ColumnShard, TableSpec

__all__ = ["MemoryTable", "size_of_table"]


_FIRST_SLOTS = 1024
# For each part of a row's columns.
_PRESENCE_BYTES = 1


def size_of_table(spec: TableSpec, precision: Precision | None = None) -> int:
    """Return the memory of a dense table, bytes; of a sparse table, which grows, its initial memory."""
    return (spec.num_rows or _FIRST_SLOTS) * (stored_row_bytes(spec, precision) + _PRESENCE_BYTES)


class MemoryTable:
    """Rows of one table as lookups see them; see `ReplicaTable`. A table with virtual ids (`num_rows` 0) is sparse.

    A missing or deleted row holds the table's default, so a lookup is one gather whatever is missing. Only if the
    precision cannot hold the default is it written into the gathered rows. In a sparse table slot 0 stands for all ids
    that the table does not have.
    """

    def __init__(self, spec: TableSpec, *, default: Rows | None = None, precision: Precision | None = None) -> None:
        """Create an empty table.

        `default` is what missing rows read as, `[dim]` of the table's `DType.numpy`, or zeros; `ConfigError` if it has
        another shape. `precision` is how rows are kept where that makes them smaller (`precision_of`); it needs torch.
        """
        self.spec = spec
        self._default = default_row(spec, default)
        self._map = None if spec.num_rows else IdMap()
        num_slots = spec.num_rows or _FIRST_SLOTS
        self._rows = make_slot_rows(spec, num_slots, self._default, precision)
        self._presence = _SlotPresence(num_slots, spec.whole)

    @property
    def num_present(self) -> int:
        """Number of rows that are present."""
        return self._presence.num_present

    @property
    def size_bytes(self) -> int:
        """Memory that the table takes."""
        return self._rows.size_bytes + self._presence.size_bytes + (self._map.size_bytes if self._map else 0)

    def inspect(self, ids: Ids) -> Found:
        """Return rows and which of them are missing; see `ReplicaTable.inspect`."""
        return self.gather(ids)

    def gather(self, ids: Ids) -> Found:
        """Return rows and which of them are missing; see `ReplicaTable.gather`."""
        slots = self._slots_of(ids)
        missing = self._missing(slots)
        rows = self._rows.take(slots)
        if not self._rows.holds_default:
            rows[missing] = self._default
        return rows, missing

    def locate(self, ids: Ids) -> Located:
        """Return the table's own rows, and where those of the ids are; see `ReplicaTable.locate`."""
        if not self._rows.holds_default:
            rows, missing = self.gather(ids)
            if missing.any():
                return rows, np.arange(ids.size), missing
        slots = self._slots_of(ids)
        return *self._rows.locate(slots), self._missing(slots)

    def grow(self, spec: TableSpec) -> None:
        """Make room for more rows; after an error the table is as before. See `ReplicaTable.grow`."""
        assert spec.is_growth_of(self.spec), "callers compare"
        self._rows.grow(spec.num_rows)
        self._presence.grow(spec.num_rows)
        self.spec = spec

    def close(self) -> None:
        """Do nothing: memory is freed with the last reference, which a lookup may hold."""

    def apply(self, delta: RowDelta, *, epoch: int, step: int) -> None:
        """Apply a delta's rows and deletions; see `ReplicaTable.apply`."""
        if delta.row_ids.size:
            values = np.frombuffer(delta.columns["weights"], delta.layout.dtype["weights"])
            self._write(delta.layout.shard, delta.row_ids, values)
        if delta.deleted_row_ids is not None and delta.deleted_row_ids.size:
            self._write(delta.layout.shard, delta.deleted_row_ids, None)

    def load(self, row_ids: Ids, weights: Any, presence: Any, epochs: Any, steps: Any, shard: ColumnShard) -> None:
        """Load rows that were read from a store; see `ReplicaTable.load`."""
        at = np.flatnonzero(presence == PRESENT)
        if at.size:
            self._write(shard, row_ids[at], np.frombuffer(weights, RecordLayout(self.spec, shard).dtype["weights"])[at])

    def _slots_of(self, ids: Ids) -> Ids:
        return ids if self._map is None else self._map.find(ids)

    def _missing(self, slots: Ids) -> Bools:
        """Return bool[n]; reads presence, which is scattered in memory, only if some row may be missing."""
        num_present = self._presence.num_present
        if self._map is None and num_present == self.spec.num_rows:
            missing = np.zeros(slots.size, np.bool_)
        elif self._map is not None and num_present == len(self._map):
            missing = slots == 0
        else:
            missing = ~self._presence.presence[slots]
        return missing

    def _write(self, shard: ColumnShard, ids: Ids, values: npt.NDArray[np.void] | None) -> None:
        """Write columns of rows with unique ids; delete them if `values` is None."""
        slots = self._slots_for(ids)
        parts = self._presence.parts_of(shard)
        for part in parts:
            if values is None:
                self._rows.clear(slots, part.shard)
            else:
                given = self._columns(values, shard, part.shard) if len(parts) > 1 else values
                self._rows.put(slots, part.shard, given.view(self.spec.dtype.numpy).reshape(given.size, -1))
            self._presence.write(part, slots, values is not None)

    def _columns(self, values: npt.NDArray[np.void], shard: ColumnShard, part: ColumnShard) -> npt.NDArray[np.void]:
        """Return some of a shard's columns, contiguous."""
        item_bytes = self.spec.dtype.size_bytes
        first, width = (part.offset - shard.offset) * item_bytes, part.width * item_bytes
        columns = values.view(np.uint8).reshape(values.size, -1)[:, first : first + width]
        found: npt.NDArray[np.void] = np.ascontiguousarray(columns).view(f"V{width}")[:, 0]
        return found

    def _slots_for(self, ids: Ids) -> Ids:
        if self._map is None:
            return ids
        slots = self._map.insert(ids)
        if len(self._map) + 1 > self._presence.presence.size:
            num_slots = 2 * (len(self._map) + 1)
            self._rows.grow(num_slots)
            self._presence.grow(num_slots)
        return slots


@dataclass(slots=True)
class _Part:
    """Some columns, and which rows are present there, bool[slots]."""

    shard: ColumnShard
    presence: Bools


class _SlotPresence:
    """Which rows are present, by slot, in parts: columns that were always written together are one part.

    Attributes:
        presence: bool[slots]; a row is present if any of its parts is.
        num_present: Number of present rows.
    """

    def __init__(self, num_slots: int, whole: ColumnShard) -> None:
        self.num_present = 0
        self._parts = [_Part(whole, np.zeros(num_slots, np.bool_))]
        self.presence = self._parts[0].presence

    @property
    def size_bytes(self) -> int:
        extra = self.presence.nbytes if len(self._parts) > 1 else 0
        return extra + sum(part.presence.nbytes for part in self._parts)

    def parts_of(self, shard: ColumnShard) -> list[_Part]:
        """Return the parts that make up some columns, splitting parts that reach beyond them."""
        end = shard.offset + shard.width
        for column in (shard.offset, end):
            self._split(column)
        return [part for part in self._parts if shard.offset <= part.shard.offset < end]

    def write(self, part: _Part, slots: Ids, is_present: bool) -> None:
        """Record a write to unique slots of a part."""
        before = np.count_nonzero(self.presence[slots])
        part.presence[slots] = is_present
        if len(self._parts) > 1:
            self.presence[slots] = np.logical_or.reduce([one.presence[slots] for one in self._parts])
        self.num_present += int(np.count_nonzero(self.presence[slots]) - before)

    def grow(self, num_slots: int) -> None:
        parts = [_Part(part.shard, _grown(part.presence, num_slots)) for part in self._parts]
        presence = parts[0].presence if len(parts) == 1 else _grown(self.presence, num_slots)
        self._parts, self.presence = parts, presence

    def _split(self, column: int) -> None:
        for number, part in enumerate(self._parts):
            first, end = part.shard.offset, part.shard.offset + part.shard.width
            if first < column < end:
                if len(self._parts) == 1:
                    self.presence = part.presence.copy()
                left = ColumnShard(offset=first, width=column - first)
                right = ColumnShard(offset=column, width=end - column)
                part.shard = left
                self._parts.insert(number + 1, _Part(right, part.presence.copy()))
                return


def _grown(presence: Bools, num_slots: int) -> Bools:
    grown = np.zeros(num_slots, np.bool_)
    grown[: presence.size] = presence
    return grown
