"""A cut through dirty rows: as many as fit into a buffer are taken, ordered by shard and packed, in one go.

All that has to be known for it (how many rows are dirty, which of them fit, where their columns begin) is counted on
the device and stays there until the header has been copied: on a GPU the training thread only starts kernels.

The bitmap is one of all tables: row r of a table is the *slot* `first_slot + r`. What a cut leaves, the next one takes
up at the cursor, so that hot low rows do not starve high ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.bitmap import mark_dirty_reference, take_dirty_reference
from headrace.kernels.bucketize import block_bucketize_reference
from headrace.kernels.row_packing import ALIGNMENT_BYTES, layout_of, pack_rows_reference

__all__ = ["HEADER_WORDS", "CutTable", "cut_dirty_reference", "header_words"]

HEADER_WORDS = 3
"""Numbers of a header before the counts: bytes packed, dirty rows left, and the slot at which the next cut begins."""

_ROW_ID_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class CutTable:
    """One table of a cut.

    Attributes:
        first_slot: Of its row 0; a multiple of 64. Tables lie in the bitmap in their order, and do not overlap.
        num_rows: Local rows.
        row_offset: Added to local ids in the buffer, ≥ 0.
        seed: Of the hash that deals its rows out to shards: `schemas.routing.table_seed`.
        columns: Weights first, then states: `[num_rows, width]`, any type, contiguous along a row.
    """

    first_slot: int
    num_rows: int
    row_offset: int
    seed: int
    columns: tuple[Tensor, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of a packed row with its id."""
        return _ROW_ID_BYTES + sum(column.shape[1] * column.element_size() for column in self.columns)

    def rows_that_fit(self, free_bytes: int) -> int:
        """Return how many rows fit into so many bytes of a buffer, whichever they are."""
        return max(0, free_bytes - (1 + len(self.columns)) * ALIGNMENT_BYTES) // self.row_bytes


def header_words(num_tables: int, num_shards: int) -> int:
    """Return the length of a header: `HEADER_WORDS`, and the rows of each table for each shard."""
    return HEADER_WORDS + num_tables * num_shards


def cut_dirty_reference(
    bitmap: Tensor, cursor: Tensor, tables: Sequence[CutTable], num_shards: int, out: Tensor, header: Tensor
) -> None:
    """Take dirty rows from the cursor on, as many as fit, and pack them: the definition.

    Rows are taken by ascending slot until one does not fit; the cursor then stands behind the last one taken, and at 0
    when there was none left. A cut that begins in the middle does not go on at the beginning.

    Args:
        bitmap: int64[w], see `bitmap`; changed: what was taken is clear.
        cursor: int64[1]: the slot at which to begin; changed.
        tables: In the order of their slots.
        num_shards: Shards of the store.
        out: uint8[m], contiguous, its address a multiple of 64; gets each table's rows as `layout_of` lays them out,
            ordered by shard and within it by id.
        header: int64[header_words], changed: `HEADER_WORDS`, then of each table the rows of each shard.
    """
    start, free_bytes = int(cursor), out.numel()
    slots, _ = take_dirty_reference(bitmap)
    kept = [slots[slots < start]]
    slots = slots[slots >= start]
    next_slot = 0
    taken: list[Tensor] = []
    for table in tables:
        local = slots[(slots >= table.first_slot) & (slots < table.first_slot + table.num_rows)] - table.first_slot
        num_rows = 0 if next_slot else min(local.numel(), table.rows_that_fit(free_bytes))
        if num_rows < local.numel() and not next_slot:
            next_slot = table.first_slot + (int(local[num_rows - 1]) + 1 if num_rows else 0)
            next_slot = max(next_slot, start)
        taken.append(local[:num_rows])
        kept.append(local[num_rows:] + table.first_slot)
        free_bytes -= _packed_bytes(table, num_rows)
    left = torch.cat(kept)
    mark_dirty_reference(bitmap, left)
    ordered = [
        block_bucketize_reference(ids + table.row_offset, num_shards, seed=table.seed)
        for table, ids in zip(tables, taken, strict=True)
    ]
    weights, states = [table.columns[0] for table in tables], [table.columns[1:] for table in tables]
    local_ids = [ids[done.positions] for ids, done in zip(taken, ordered, strict=True)]
    pack_rows_reference(weights, local_ids, states, out, row_offsets=[table.row_offset for table in tables])
    counts = torch.cat([done.bounds.diff() for done in ordered]) if tables else header.new_empty(0)
    size_bytes = out.numel() - free_bytes
    header.copy_(torch.cat((header.new_tensor([size_bytes, left.numel(), next_slot]), counts)))
    cursor.fill_(next_slot)


def _packed_bytes(table: CutTable, num_rows: int) -> int:
    return layout_of(table.columns[:1], [num_rows], [table.columns[1:]])[1]
