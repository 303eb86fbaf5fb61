"""A table's map from identities (raw ids) to row ids in a replica, beside the table's rows.

As in the store (`paramserver/store/identity_index.py`), an identity belongs to the row that was written with it last,
and to no row if that row has another identity by now or is deleted. Each shard's log arrives separately, so versions
decide which write was last: the newest (epoch, step), and between equal versions the one that arrived later.

The runtime meta of a table's rows is kept here, too: it belongs to the identities, and is the only state that replicas
keep.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.replica.tables.base import Bools, Ids
from headrace.paramserver.replica.tables.id_map import IdMap
from headrace.paramserver.store.catalog import Table
from headrace.paramserver.store.deltas import RowDelta
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.row_records import DELETED, NO_IDENTITY, PRESENT, decode_row_ids, key_prefix
from headrace.schemas.tables import RUNTIME_META, ColumnShard, TableSpec
from headrace.schemas.version import is_newer_record

__all__ = ["IdentityMap", "load_identities", "size_of_identity_map"]

_FIRST_SLOTS = 1024
# Identity and version of a row; cell and claim of an identity, where at worst half of the cells are empty.
_ROW_BYTES = 20 + 2 * (32 + 20)
_ROWS_PER_SCAN = 8192
_META_FIELD = f"state:{RUNTIME_META}"  # in a record's layout

_Array = npt.NDArray[Any]

# Which identity a row has, and which row an identity belongs to, each with the version of the write that said so.
_STAMP = np.dtype([("epoch", "<u4"), ("step", "<i8"), ("identity", "<i8")])
_CLAIM = np.dtype([("epoch", "<u4"), ("step", "<i8"), ("row", "<i8")])


def size_of_identity_map(spec: TableSpec) -> int:
    """Return the most memory that a table's identities take, bytes; for virtual ids, the initial memory."""
    return (spec.num_rows or _FIRST_SLOTS) * (_ROW_BYTES + _meta_bytes(spec)) if spec.has_identities else 0


class IdentityMap:
    """The identities of one table, and its rows' runtime meta.

    Thread: one thread applies and loads. `find` may overlap with it, and is valid only if nothing was applied
    meanwhile; `SeqLock` tells.
    """

    def __init__(self, spec: TableSpec) -> None:
        self._slot_of_row = None if spec.num_rows else IdMap()
        num_slots = spec.num_rows or _FIRST_SLOTS
        self._row_of_slot = np.arange(num_slots, dtype=np.int64)
        self._identity = np.full(num_slots, NO_IDENTITY, np.int64)
        # By slot, opaque; zeros for rows that are not there.
        self._meta = np.zeros(num_slots, f"V{_meta_bytes(spec)}") if spec.runtime_meta else None
        self._stamps: dict[ColumnShard, _Array] = {}
        self._numbers = IdMap()  # numbers identities
        self._claims = np.zeros(_FIRST_SLOTS, _CLAIM)  # by number

    @property
    def size_bytes(self) -> int:
        """Memory that the map takes."""
        arrays = [self._identity, self._row_of_slot, self._claims, *self._stamps.values()]
        arrays += [] if self._meta is None else [self._meta]
        maps = [self._numbers] if self._slot_of_row is None else [self._numbers, self._slot_of_row]
        return sum(array.nbytes for array in arrays) + sum(ids.size_bytes for ids in maps)

    def find(self, identities: Ids) -> Ids:
        """Return the row that has each of int64[n] identities, in any order; -1 where no row has it.

        The row may still be missing from the table: it has expired, or was not read yet.
        """
        numbers = self._numbers.find(identities) - 1
        known = np.flatnonzero((numbers >= 0) & (identities != NO_IDENTITY))
        rows = self._claims["row"][numbers[known]]
        slots = rows if self._slot_of_row is None else self._slot_of_row.find(rows) - 1
        agrees = self._identity[slots] == identities[known]
        found = np.full(identities.size, -1, np.int64)
        found[known[agrees]] = rows[agrees]
        return found

    def meta_of(self, row_ids: Ids) -> _Array:
        """Return the runtime meta of int64[n] rows, opaque; zeros for absent ones and -1. REQUIRES: there is some."""
        assert self._meta is not None
        slots = row_ids if self._slot_of_row is None else self._slot_of_row.find(row_ids) - 1
        meta = self._meta[slots]
        meta[slots < 0] = np.zeros((), meta.dtype)
        return meta

    def grow(self, spec: TableSpec) -> None:
        """Take a spec with more rows, which have no identities yet. Enter the seqlock before."""
        assert self._slot_of_row is None, "virtual ids have no number of rows"
        self._row_of_slot = np.arange(spec.num_rows, dtype=np.int64)
        self._resize(spec.num_rows)

    def apply(self, delta: RowDelta, *, epoch: int, step: int) -> None:
        """Apply a delta's identities and deletions: the last write of a row wins, the newest claim of an identity."""
        shard = delta.layout.shard
        if delta.identities is not None:
            meta = None
            if self._meta is not None and delta.row_ids.size:
                meta = np.frombuffer(delta.columns[_META_FIELD], self._meta.dtype)
            self._write(shard, delta.row_ids, delta.identities, meta, epoch, step)
        if delta.deleted_row_ids is not None:
            nothing = np.full(delta.deleted_row_ids.size, NO_IDENTITY, np.int64)
            # Rows that are deleted in all columns are deleted in every layout, as in the store.
            for each in {shard, *self._stamps} if shard == delta.spec.whole else {shard}:
                self._write(each, delta.deleted_row_ids, nothing, None, epoch, step)

    def load(
        self,
        row_ids: Ids,
        identities: Ids,
        presence: Any,
        epochs: Any,
        steps: Any,
        shard: ColumnShard,
        meta: _Array | None = None,
    ) -> None:
        """Load int64[n] identities of unique rows that were read from a store; see `ReplicaTable.load`.

        `meta` has the rows' runtime meta, of its own type `[n, width]` or opaque `[n]`, if the table has some.
        """
        at = np.flatnonzero((presence == PRESENT) | (presence == DELETED))
        is_present = presence[at] == PRESENT
        if self._meta is not None:
            assert meta is not None
            meta = np.ascontiguousarray(meta[at]).view(self._meta.dtype).reshape(-1)
            meta[~is_present] = np.zeros((), meta.dtype)
        present_identities = np.where(is_present, identities[at], NO_IDENTITY)
        self._write(shard, row_ids[at], present_identities, meta, epochs[at], steps[at])

    def _write(
        self,
        shard: ColumnShard,
        row_ids: Ids,
        identities: Ids,
        meta: _Array | None,
        epoch: Any,
        step: Any,
    ) -> None:
        if not row_ids.size:
            return
        self._claim(row_ids, identities, epoch, step)
        slots = self._slots_for(row_ids)
        stamps = self._stamps_of(shard)
        new = np.empty(slots.size, _STAMP)
        new["epoch"], new["step"], new["identity"] = epoch, step, identities
        stamps[slots] = new
        self._identity[slots] = self._newest_of(slots)
        if self._meta is not None and shard.offset == 0:  # a whole row has the states of its first column
            wins = self._is_newest_first(shard, slots, new)
            self._meta[slots[wins]] = np.zeros((), self._meta.dtype) if meta is None else meta[wins]
        self._forget_stale()

    def _is_newest_first(self, shard: ColumnShard, slots: Ids, new: _Array) -> Bools:
        """Return bool[n], of which rows no other shard that begins at the first column has a newer record."""
        wins = np.ones(slots.size, np.bool_)
        for other, stamps in self._stamps.items():
            if other.offset == 0 and other != shard:
                wins &= ~is_newer_record(stamps[slots], new)
        return wins

    def _newest_of(self, slots: Ids) -> Ids:
        """Return the identity in each row's newest record; between equal versions, the one of the lowest columns."""
        first, *others = (stamps for _, stamps in sorted(self._stamps.items()))
        newest: _Array = first[slots]
        for stamps in others:
            other = stamps[slots]
            wins = is_newer_record(other, newest)
            newest[wins] = other[wins]
        return newest["identity"]

    def _claim(self, row_ids: Ids, identities: Ids, epoch: Any, step: Any) -> None:
        claims = np.empty(row_ids.size, _CLAIM)
        claims["epoch"], claims["step"], claims["row"] = epoch, step, row_ids
        is_claim = identities != NO_IDENTITY
        identities, claims = identities[is_claim], claims[is_claim]
        if np.ndim(step):
            order = np.lexsort((claims["step"], claims["epoch"], identities))
        else:
            order = np.argsort(identities, kind="stable")
        identities, claims = identities[order], claims[order]
        is_newest = np.ones(identities.size, np.bool_)
        np.not_equal(identities[1:], identities[:-1], out=is_newest[:-1])
        identities, claims = identities[is_newest], claims[is_newest]
        numbers = self._numbers.insert(identities) - 1
        if len(self._numbers) > self._claims.size:
            self._claims = _grown(self._claims, 2 * len(self._numbers), np.zeros((), _CLAIM))
        wins = ~is_newer_record(self._claims[numbers], claims)
        self._claims[numbers[wins]] = claims[wins]

    def _forget_stale(self) -> None:
        """Start a new map once most of this one is identities that no row has any more."""
        num_rows = self._identity.size if self._slot_of_row is None else len(self._slot_of_row)
        if 2 * len(self._numbers) <= 3 * num_rows + 2 * _FIRST_SLOTS:
            return
        slots = np.flatnonzero(self._identity[:num_rows] != NO_IDENTITY)
        identities, rows = self._identity[slots], self._row_of_slot[slots]
        known = self._numbers.find(identities) - 1
        old = self._claims[known]
        # A row has no claim to an identity that another row has taken since.
        is_good = (known >= 0) & (old["row"] == rows)
        numbers, claims = IdMap(capacity=slots.size), np.zeros(max(slots.size, _FIRST_SLOTS), _CLAIM)
        claims[numbers.insert(identities[is_good]) - 1] = old[is_good]
        self._numbers, self._claims = numbers, claims

    def _stamps_of(self, shard: ColumnShard) -> _Array:
        stamps = self._stamps.get(shard)
        if stamps is None:
            stamps = self._stamps[shard] = np.full(self._identity.size, _no_stamp())
        return stamps

    def _resize(self, num_slots: int) -> None:
        self._stamps = {shard: _grown(old, num_slots, _no_stamp()) for shard, old in self._stamps.items()}
        self._identity = _grown(self._identity, num_slots, np.int64(NO_IDENTITY))
        if self._meta is not None:
            self._meta = _grown(self._meta, num_slots, np.zeros((), self._meta.dtype))

    def _slots_for(self, row_ids: Ids) -> Ids:
        if self._slot_of_row is None:
            return row_ids
        num_known = len(self._slot_of_row)
        slots = self._slot_of_row.insert(row_ids) - 1
        num_slots = len(self._slot_of_row)
        if num_slots > self._identity.size:
            self._row_of_slot = _grown(self._row_of_slot, 2 * num_slots, np.int64(0))
            self._resize(2 * num_slots)
        is_new = slots >= num_known
        self._row_of_slot[slots[is_new]] = row_ids[is_new]
        return slots


def load_identities(store: RowStore, table: Table, target: IdentityMap, *, check_wanted: Callable[[], None]) -> None:
    """Load the identities, and runtime meta, of the rows in one shard's store, which nobody writes to.

    Args:
        store: Open.
        table: As the store numbers it.
        target: The table's map.
        check_wanted: Called every few thousand rows; an exception ends the loading.

    Thread: any; blocks for some microseconds a row.
    """
    for shard in store.layouts(table.table_id):
        layout = table.layout_of(shard)
        pairs = store.scan(key_prefix(table.table_id, shard))
        while chunk := list(islice(pairs, _ROWS_PER_SCAN)):
            check_wanted()
            records, presence = layout.decode([value for _, value in chunk])
            row_ids = decode_row_ids([key for key, _ in chunk])
            meta = records[_META_FIELD] if table.spec.runtime_meta else None
            target.load(row_ids, records["identity"], presence, records["epoch"], records["step"], shard, meta)


def _meta_bytes(spec: TableSpec) -> int:
    state = spec.runtime_meta
    return 0 if state is None else state.width * state.dtype.size_bytes


def _no_stamp() -> _Array:
    return np.array((0, 0, NO_IDENTITY), _STAMP)


def _grown(array: _Array, size: int, fill: Any) -> _Array:
    grown = np.full(size, fill, array.dtype)
    grown[: array.size] = array
    return grown
