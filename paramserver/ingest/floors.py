"""Rows at or below their table's floor: which of a batch count, judged when all before it is in the memtable.

A floor is in the log, and the record of a batch names the tables whose floor it does not exceed. So whoever reads the
log, a follower or a shard that recovers, judges the same rows in the same place (`schemas/version.py` has the rule).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.deltas import Batch, RowDelta, tally_of_deltas
from headrace.schemas.row_records import PRESENT

__all__ = ["has_rows_below_floor", "without_absent_rows"]

# Whole rows are read to know whether they are present; this bounds the memory.
_ROWS_AT_ONCE = 8192


def has_rows_below_floor(batch: Batch) -> bool:
    """Return whether a batch has rows that count only where they are present."""
    return any(_is_judged(delta) for delta in batch.deltas)


async def without_absent_rows(batch: Batch, applier: Applier) -> tuple[Batch, int]:
    """Return a batch without such rows that are not present, and their number.

    REQUIRES: everything before it is submitted, and nothing else until it is.

    Raises:
        StorageError: RocksDB could not be read.
        UnavailableError: The applier is closed.

    Cancellation: changes nothing.
    """
    deltas, num_ignored = [], 0
    for delta in batch.deltas:
        if _is_judged(delta):
            found = []
            for first in range(0, delta.row_ids.size, _ROWS_AT_ONCE):
                some = delta.row_ids[first : first + _ROWS_AT_ONCE]
                found.append((await applier.read(delta.table_id, delta.spec, some)).presence == PRESENT)
            keep = np.concatenate(found)
            delta = delta.with_rows(keep)
            num_ignored += int(np.count_nonzero(~keep))
        deltas.append(delta)
    return dataclasses.replace(batch, deltas=tuple(deltas), tally=tally_of_deltas(deltas)), num_ignored


def _is_judged(delta: RowDelta) -> bool:
    return delta.is_below_floor and delta.row_ids.size > 0
