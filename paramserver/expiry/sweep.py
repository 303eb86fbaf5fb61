"""Settle the rows of a table that were written in overlapping layouts of columns, as trainers sharded it over time.

A read assembles such a row from the records of all layouts: in each column the newest counts. A sweep removes records
that count in no column any more, and rows of which only marks are left: they were deleted in the columns of each record
(`paramserver/store/rows.py` says where a deletion stays as a mark). What a read answers stays the same.

A read looks into one layout after the other. So a record goes only once every read that began before the records that
replace it has ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from headrace.paramserver.expiry.scan import HeaderScanner, Pace
from headrace.paramserver.expiry.table_pass import PassContext
from headrace.paramserver.store.catalog import Table
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.system.event_loop import run_in_thread_to_end
from headrace.schemas.row_records import DELETED, MISSING, PRESENT, RecordLayout, encode_keys
from headrace.schemas.version import is_newer_record

__all__ = ["needs_sweep", "sweep"]

_Ids = npt.NDArray[np.int64]


def needs_sweep(context: PassContext, table: Table) -> bool:
    """Return whether a table has rows in overlapping layouts of columns."""
    shards = context.store.layouts(table.table_id)
    return any(one.overlaps(other) for one, other in itertools.combinations(shards, 2))


async def sweep(context: PassContext, table: Table) -> int:
    """Remove the records of a table that count for nothing; return their number.

    Cancellation: what is removed stays removed; the rest waits for another sweep.

    Raises:
        StorageError: The disk failed, or (CorruptionError) a record cannot be read.
        UnavailableError: The store has stopped.
    """
    store, applier, ingest = context.store, context.applier, context.ingest
    layouts = [table.layout_of(shard) for shard in store.layouts(table.table_id)]
    pace, num_removed = Pace(context.rows_per_s, context.sleep), 0
    for layout in layouts:
        scanner = HeaderScanner(store, table, layout, piece_rows=context.piece_rows)
        while True:
            await pace.wait()
            if (piece := await run_in_thread_to_end(scanner.next_piece)) is None:
                break
            row_ids = piece[0]
            pace.count(row_ids.size)
            found = await run_in_thread_to_end(partial(_useless, store, table.table_id, layouts, row_ids))
            if not found:
                continue
            await applier.readers_ended()

            def remove(row_ids: _Ids = row_ids, found: set[bytes] = found) -> None:
                nonlocal num_removed
                # Again, because rows may have been written since; now nothing else writes.
                keys = sorted(found & _useless(store, table.table_id, layouts, row_ids))
                store.remove(table.table_id, keys)
                num_removed += len(keys)

            await applier.run_at(ingest.accepted_seq, remove)
    return num_removed


def _useless(store: RowStore, table_id: int, layouts: Sequence[RecordLayout], row_ids: _Ids) -> set[bytes]:
    """Return the keys of the records of int64[n] rows that may go. Thread: any.

    Marks stay as long as a live record is there that counts for nothing: a read that finds it must find the mark.
    """
    # Of equals the later one counts, as in reads.
    layouts = sorted(layouts, key=lambda layout: layout.shard, reverse=True)
    keys = [encode_keys(table_id, layout.shard, row_ids) for layout in layouts]
    decoded = [layout.decode(store.get(of)) for layout, of in zip(layouts, keys, strict=True)]
    records, presence = [of[0] for of in decoded], [of[1] for of in decoded]
    counts = [np.zeros(row_ids.size, bool) for _ in layouts]
    shards = [layout.shard for layout in layouts]
    for column in sorted({shard.offset for shard in shards} | {shard.offset + shard.width for shard in shards})[:-1]:
        newest = np.full(row_ids.size, -1)
        headers = np.zeros(row_ids.size, [("epoch", "u4"), ("step", "i8")])
        for number, layout in enumerate(layouts):
            if layout.shard.offset <= column < layout.shard.offset + layout.shard.width:
                own = records[number][["epoch", "step"]].astype(headers.dtype)
                wins = (presence[number] != MISSING) & ~is_newer_record(headers, own)
                newest[wins], headers[wins] = number, own[wins]
        for number, of_layout in enumerate(counts):
            of_layout |= newest == number
    is_gone = np.logical_and.reduce([there != PRESENT for there in presence])
    hides = np.logical_or.reduce([(there == PRESENT) & ~count for there, count in zip(presence, counts, strict=True)])
    useless = set[bytes]()
    for of_shard, there, count in zip(keys, presence, counts, strict=True):
        may_go = ((there == PRESENT) & ~count) | ((there == DELETED) & ~hides & (~count | is_gone))
        useless.update(itertools.compress(of_shard, may_go))
    return useless
