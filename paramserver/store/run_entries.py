"""Runs as the keys and values that go through RocksDB's memtable.

Of many tables with few rows each, what numpy is asked costs more than the rows: so a write takes rows of many runs, and
their keys, and the records of runs that were coalesced together, are made at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from headrace.paramserver.store.pending import CoalescedRun, Run, records_of
from headrace.schemas.row_keys import encode_keys_of, key_prefix

__all__ = ["entries_of"]

_Piece = tuple[Run | CoalescedRun, slice]


def entries_of(runs: Sequence[Run | CoalescedRun], num_rows: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Yield keys and values of all rows, `num_rows` at a time, in the order of the runs.

    Args:
        runs: None of them conditional.
        num_rows: Rows of one write.
    """
    for pieces in _writes_of(runs, num_rows):
        prefixes = [key_prefix(run.table_id, run.layout.shard) for run, _ in pieces]
        row_ids = [run.row_ids[some] for run, some in pieces]
        keys = encode_keys_of(prefixes, [ids.size for ids in row_ids], np.concatenate(row_ids))
        values: list[bytes] = []
        for layout, records in records_of(pieces):
            values += layout.values_of(records)
        yield keys, values


def _writes_of(runs: Sequence[Run | CoalescedRun], num_rows: int) -> Iterator[list[_Piece]]:
    pieces: list[_Piece] = []
    left = num_rows
    for run in runs:
        start = 0
        while start < run.row_ids.size:
            some = slice(start, min(start + left, run.row_ids.size))
            pieces.append((run, some))
            left -= some.stop - start
            start = some.stop
            if not left:
                yield pieces
                pieces, left = [], num_rows
    if pieces:
        yield pieces
