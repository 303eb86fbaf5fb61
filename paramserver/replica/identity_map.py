"""Identities to rows, in a replica: which row of a table has a raw id, kept beside the table's rows.

As in the store (`paramserver/store/identity_index.py`) an identity belongs to the row that was last written with it,
and to none when that row has another identity by now or is deleted. Each shard's log comes on its own, so what was
written last is told by the version: the newest (epoch, step), and of equals the one that came later.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.replica.id_map import IdMap
from headrace.paramserver.store.pending import RowDelta
from headrace.schemas.identity_claims import NO_IDENTITY
from headrace.schemas.row_records import DELETED, PRESENT
from headrace.schemas.tables import ColumnShard, TableSpec

__all__ = ["IdentityMap", "size_of_identity_map"]

_FIRST_SLOTS = 1024
# Identity and version of a row; cell and claim of an identity, half of the cells being empty, at the most.
_BYTES_A_ROW = 20 + 2 * (32 + 20)

_Array = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]

_STAMP = np.dtype([("epoch", "<u4"), ("step", "<i8"), ("identity", "<i8")])
_CLAIM = np.dtype([("epoch", "<u4"), ("step", "<i8"), ("row", "<i8")])


def size_of_identity_map(spec: TableSpec) -> int:
    """Return the memory, bytes, that the identities of a table may take; of virtual ids, what they begin with."""
    return (spec.num_rows or _FIRST_SLOTS) * _BYTES_A_ROW if spec.has_identities else 0


class IdentityMap:
    """The identities of one table.

    Thread: one applies and loads; `find` may overlap with it, and is of use only when nothing was applied meanwhile
    (`VersionGate`).
    """

    def __init__(self, spec: TableSpec) -> None:
        """Begin with no row that has an identity."""
        self._slot_of_row = None if spec.num_rows else IdMap()
        num_slots = spec.num_rows or _FIRST_SLOTS
        self._row_of_slot = np.arange(num_slots, dtype=np.int64)
        self._identity = np.full(num_slots, NO_IDENTITY, np.int64)
        self._stamps: dict[ColumnShard, _Array] = {}
        self._numbers = IdMap()  # of identities
        self._claims = np.zeros(_FIRST_SLOTS, _CLAIM)  # by number

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        arrays = [self._identity, self._row_of_slot, self._claims, *self._stamps.values()]
        maps = [self._numbers] if self._slot_of_row is None else [self._numbers, self._slot_of_row]
        return sum(array.nbytes for array in arrays) + sum(ids.size_bytes for ids in maps)

    def find(self, identities: _Ids) -> _Ids:
        """Return the row that has each identity, int64[n]; -1 where none has it.

        A row may be missing from the table all the same: expired, or not read yet.

        Args:
            identities: int64[n], any order, also repeated.
        """
        numbers = self._numbers.find(identities) - 1
        is_known = np.flatnonzero((numbers >= 0) & (identities != NO_IDENTITY))
        rows = self._claims["row"][numbers[is_known]]
        slots = rows if self._slot_of_row is None else self._slot_of_row.find(rows) - 1
        agrees = self._identity[slots] == identities[is_known]
        found = np.full(identities.size, -1, np.int64)
        found[is_known[agrees]] = rows[agrees]
        return found

    def apply(self, delta: RowDelta, *, epoch: int, step: int, is_conditional: bool) -> None:
        """Take a delta's identities and deletions: later ones win, conditional ones when not older."""
        if delta.identities is not None:
            self._write(delta.layout.shard, delta.row_ids, delta.identities, epoch, step, is_conditional)
        if delta.deleted_row_ids is not None:
            nothing = np.full(delta.deleted_row_ids.size, NO_IDENTITY, np.int64)
            self._write(delta.layout.shard, delta.deleted_row_ids, nothing, epoch, step, is_conditional)

    def load(self, row_ids: _Ids, identities: _Ids, presence: Any, epochs: Any, steps: Any, shard: ColumnShard) -> None:
        """Take identities of rows that are read from a store, with a version of their own each.

        Args:
            row_ids: int64[n], each once.
            identities: int64[n].
            presence: uint8[n], `RowPresence`; rows that are missing are passed over.
            epochs: One a row.
            steps: One a row.
            shard: Columns that were read.
        """
        at = np.flatnonzero((presence == PRESENT) | (presence == DELETED))
        present_identities = np.where(presence[at] == PRESENT, identities[at], NO_IDENTITY)
        self._write(shard, row_ids[at], present_identities, epochs[at], steps[at], False)

    def _write(
        self, shard: ColumnShard, row_ids: _Ids, identities: _Ids, epoch: Any, step: Any, is_conditional: bool
    ) -> None:
        if not row_ids.size:
            return
        self._claim(row_ids, identities, epoch, step)
        slots = self._slots_for(row_ids)
        stamps = self._stamps_of(shard)
        new = np.empty(slots.size, _STAMP)
        new["epoch"], new["step"], new["identity"] = epoch, step, identities
        if is_conditional:
            keep = ~_is_newer(stamps[slots], new)
            slots, new = slots[keep], new[keep]
        stamps[slots] = new
        self._identity[slots] = self._newest_of(slots)
        self._forget_stale()

    def _newest_of(self, slots: _Ids) -> _Ids:
        """Return the identity in each row's newest record; of equals, in that of the lowest columns."""
        first, *others = (stamps for _, stamps in sorted(self._stamps.items()))
        newest: _Array = first[slots]
        for stamps in others:
            other = stamps[slots]
            wins = _is_newer(other, newest)
            newest[wins] = other[wins]
        return newest["identity"]

    def _claim(self, row_ids: _Ids, identities: _Ids, epoch: Any, step: Any) -> None:
        claims = np.empty(row_ids.size, _CLAIM)
        claims["epoch"], claims["step"], claims["row"] = epoch, step, row_ids
        is_one = identities != NO_IDENTITY
        identities, claims = identities[is_one], claims[is_one]
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
        wins = ~_is_newer(self._claims[numbers], claims)
        self._claims[numbers[wins]] = claims[wins]

    def _forget_stale(self) -> None:
        """Begin a new map when most of this one is of identities that have come and gone."""
        num_rows = self._identity.size if self._slot_of_row is None else len(self._slot_of_row)
        if 2 * len(self._numbers) <= 3 * num_rows + 2 * _FIRST_SLOTS:
            return
        slots = np.flatnonzero(self._identity[:num_rows] != NO_IDENTITY)
        identities, rows = self._identity[slots], self._row_of_slot[slots]
        known = self._numbers.find(identities) - 1
        old = self._claims[known]
        # A row that was written with an identity which another row has taken since has no claim to it.
        is_good = (known >= 0) & (old["row"] == rows)
        numbers, claims = IdMap(capacity=slots.size), np.zeros(max(slots.size, _FIRST_SLOTS), _CLAIM)
        claims[numbers.insert(identities[is_good]) - 1] = old[is_good]
        self._numbers, self._claims = numbers, claims

    def _stamps_of(self, shard: ColumnShard) -> _Array:
        stamps = self._stamps.get(shard)
        if stamps is None:
            stamps = self._stamps[shard] = np.full(self._identity.size, _no_stamp())
        return stamps

    def _slots_for(self, row_ids: _Ids) -> _Ids:
        if self._slot_of_row is None:
            return row_ids
        num_known = len(self._slot_of_row)
        slots = self._slot_of_row.insert(row_ids) - 1
        num_slots = len(self._slot_of_row)
        if num_slots > self._identity.size:
            self._identity = _grown(self._identity, 2 * num_slots, np.int64(NO_IDENTITY))
            self._row_of_slot = _grown(self._row_of_slot, 2 * num_slots, np.int64(0))
            self._stamps = {shard: _grown(old, 2 * num_slots, _no_stamp()) for shard, old in self._stamps.items()}
        is_new = slots >= num_known
        self._row_of_slot[slots[is_new]] = row_ids[is_new]
        return slots


def _no_stamp() -> _Array:
    return np.array((0, 0, NO_IDENTITY), _STAMP)


def _grown(array: _Array, size: int, fill: Any) -> _Array:
    grown = np.full(size, fill, array.dtype)
    grown[: array.size] = array
    return grown


def _is_newer(some: _Array, others: _Array) -> npt.NDArray[np.bool_]:
    newer: npt.NDArray[np.bool_] = (some["epoch"] > others["epoch"]) | (
        (some["epoch"] == others["epoch"]) & (some["step"] > others["step"])
    )
    return newer
