"""The tables of a cut through dirty rows (`dirty_cut`): their columns, their slots in the bitmap, and their shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.row_packing import ALIGNMENT_BYTES, layout_of, to_device, word_bytes_of

__all__ = ["HEADER_WORDS", "CutPlan", "CutTable", "header_words"]

HEADER_WORDS = 3
"""Numbers of a header before the counts: bytes packed, dirty rows left, and the slot at which the next cut begins."""

_WORD_BITS = 64
_ROW_ID_BYTES = 8
# As in dirty_words.cuh.
_TILE_WORDS = 1024


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
        return _ROW_ID_BYTES + sum(_row_bytes(column) for column in self.columns)

    @property
    def num_words(self) -> int:
        """Words of the bitmap."""
        return -(-self.num_rows // _WORD_BITS)

    @property
    def end_slot(self) -> int:
        """First slot behind its words."""
        return self.first_slot + self.num_words * _WORD_BITS

    def rows_that_fit(self, free_bytes: int) -> int:
        """Return how many rows fit into so many bytes of a buffer, whichever they are."""
        return max(0, free_bytes - (1 + len(self.columns)) * ALIGNMENT_BYTES) // self.row_bytes

    def packed_bytes(self, num_rows: int) -> int:
        """Return the bytes of so many rows in a buffer."""
        return layout_of(self.columns[:1], [num_rows], [self.columns[1:]])[1]


def header_words(num_tables: int, num_shards: int) -> int:
    """Return the length of a header: `HEADER_WORDS`, and the rows of each table for each shard."""
    return HEADER_WORDS + num_tables * num_shards


class CutPlan:
    """What a cut has to know of its tables: checked once, and on a GPU sent there once, without waiting for it.

    It keeps the columns' memory. Where a column is another tensor now (an optimizer has replaced a state), make
    another plan: it costs some microseconds a column.

    Attributes:
        tables: As given.
        num_shards: As given.
        device: Of all columns.
        header_words: Length of a header.
        min_out_bytes: Least length of a buffer: so that one row of any table fits.
        end_slot: First slot behind all tables' words; so many bits has the bitmap at least.
        columns: Of all tables, for the operator, as the next two.
        addresses: Where these lay when they were sent.
        numbers: First slot, rows, row offset, seed (signed), bytes of a packed row and columns of each table.
        descriptors: int64[n] on the device: the same and where columns lie, as dirty_cut.cu reads it.
    """

    def __init__(self, tables: Sequence[CutTable], num_shards: int) -> None:
        """Check, and send.

        Args:
            tables: One or more, in the order of their slots.
            num_shards: Shards of the store, 1 to 65 536; above 2048 a GPU uses torch's own operations, which wait.

        Raises:
            ValueError: Slots, shapes, layouts or devices are others.
        """
        self.tables = tuple(tables)
        self.num_shards = num_shards
        self.device = _check_tables(self.tables, num_shards)
        self.columns = [column.detach() for table in self.tables for column in table.columns]
        self.addresses = [column.data_ptr() for column in self.columns]
        self.numbers = [number for table in self.tables for number in _numbers_of(table)]
        self.header_words = header_words(len(self.tables), num_shards)
        self.end_slot = self.tables[-1].end_slot
        self.min_out_bytes = max(table.row_bytes + (1 + len(table.columns)) * ALIGNMENT_BYTES for table in self.tables)
        self.descriptors = to_device(torch.tensor(_descriptors(self.tables)), self.device)


def _numbers_of(table: CutTable) -> tuple[int, ...]:
    seed = table.seed - 2**64 if table.seed >= 2**63 else table.seed
    return table.first_slot, table.num_rows, table.row_offset, seed, table.row_bytes, len(table.columns)


def _descriptors(tables: Sequence[CutTable]) -> list[int]:
    """Return the tables, where the last one ends, and the columns, as dirty_cut.cu reads them."""
    of_tables: list[int] = []
    of_columns: list[int] = []
    first_tile = first_column = 0
    for table in tables:
        first_slot, num_rows, row_offset, seed, row_bytes, _ = _numbers_of(table)
        of_tables += [first_slot // _WORD_BITS, table.num_words, num_rows, row_offset, seed, row_bytes]
        of_tables += [first_tile, first_column]
        for column in table.columns:
            address, stride, length = column.data_ptr(), column.stride(0) * column.element_size(), _row_bytes(column)
            of_columns += [address, stride, length, word_bytes_of(address, stride, length)]
        first_tile += -(-table.num_words // _TILE_WORDS)
        first_column += len(table.columns)
    return [*of_tables, 0, 0, 0, 0, 0, 0, first_tile, first_column, *of_columns]


def _check_tables(tables: Sequence[CutTable], num_shards: int) -> torch.device:
    if not tables or not all(table.columns for table in tables):
        raise ValueError("a cut needs a table, and each table a column")
    if not 1 <= num_shards <= 2**16:
        raise ValueError(f"{num_shards} shards: out of range")
    device = tables[0].columns[0].device
    end = 0
    for table in tables:
        if table.first_slot % _WORD_BITS or table.first_slot < end:
            raise ValueError(
                f"slot {table.first_slot} is no multiple of 64, or is not behind those of the table before"
            )
        if table.num_rows < 0 or table.row_offset < 0 or not 0 <= table.seed < 2**64:
            raise ValueError(f"{table.num_rows} rows from {table.row_offset} on, seed {table.seed}: out of range")
        end = table.end_slot
        for column in table.columns:
            if column.dim() != 2 or column.shape[0] != table.num_rows or column.device != device:
                needed = f"[{table.num_rows}, width] on {device}"
                raise ValueError(f"a column is {list(column.shape)} on {column.device}: {needed} is needed")
            if column.shape[1] > 1 and column.stride(1) != 1:
                raise ValueError(f"a column has strides {column.stride()}: rows have to be contiguous")
    return device


def _row_bytes(column: Tensor) -> int:
    return column.shape[1] * column.element_size()
