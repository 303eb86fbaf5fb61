"""Drains: dirty rows that fit into a buffer are taken from a bitmap, ordered by shard and packed, in one pass.

The number of dirty rows, the choice of rows that fit, and the places of their columns are computed on the device and
stay there until the header is copied. On a GPU the training thread only starts kernels.

One bitmap covers all tables: row r of a table is the *slot* `first_slot + r`. The next drain continues at the cursor
with the rows that one has left, so hot low rows do not starve high ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.bucketize import block_bucketize, block_bucketize_reference
from headrace.kernels.dirty_bitmap import mark_dirty_reference, take_dirty, take_dirty_reference
from headrace.kernels.packing import (
    ALIGNMENT_BYTES,
    MAX_PACKED_BYTES,
    PACKED_COLUMN_WORDS,
    launch_planned_packing,
    layout_of,
    pack_rows,
    pack_rows_reference,
    row_bytes_of,
    to_device,
    word_bytes_of,
)
from headrace.kernels.runtime.cuda_module import Launcher, signed
from headrace.kernels.runtime.dispatch import check_vector, launcher_for, runs_eagerly

__all__ = ["HEADER_WORDS", "DrainPlan", "DrainTable", "drain_dirty", "drain_dirty_reference", "header_words"]

HEADER_WORDS = 3
"""Numbers of a header before the counts: bytes packed, dirty rows left, and the slot at which the next drain begins."""

_WORD_BITS = 64
_ROW_ID_BYTES = 8
# As in dirty_drain.cu and its headers.
_TILE_WORDS = 1024
_TAKE_THREADS = 256
_PLAN_THREADS = 256
_ROUTE_THREADS = 128
_ROUTE_ROWS = 4096
_MAX_SHARDS = 2048
_STATE_WORDS = 4
# The operator's numbers of a table: first slot, rows, row offset, seed (signed), bytes of a packed row, columns.
_TABLE_NUMBERS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainTable:
    """One table of a drain.

    Attributes:
        first_slot: Slot of row 0, a multiple of 64. Tables lie in the bitmap in their order, without overlap.
        num_rows: Local rows.
        row_offset: Added to local ids in the buffer, ≥ 0.
        seed: `TableSpec.seed`, for the hash that gives a row's shard.
        columns: Weights, then states: `[num_rows, width]`, any type, contiguous along a row.
    """

    first_slot: int
    num_rows: int
    row_offset: int
    seed: int
    columns: tuple[Tensor, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of a packed row with its id."""
        return _ROW_ID_BYTES + sum(row_bytes_of(column) for column in self.columns)

    @property
    def num_words(self) -> int:
        """Words in the bitmap."""
        return -(-self.num_rows // _WORD_BITS)

    @property
    def end_slot(self) -> int:
        """First slot behind the table's words."""
        return self.first_slot + self.num_words * _WORD_BITS

    def rows_that_fit(self, free_bytes: int) -> int:
        """Return how many rows, whichever they are, fit into `free_bytes` of a buffer."""
        return max(0, free_bytes - (1 + len(self.columns)) * ALIGNMENT_BYTES) // self.row_bytes

    def packed_bytes(self, num_rows: int) -> int:
        """Return the bytes that this many rows take in a buffer."""
        return layout_of(self.columns[:1], [num_rows], [self.columns[1:]])[1]


def header_words(num_tables: int, num_shards: int) -> int:
    """Return the length of a header: `HEADER_WORDS`, and each table's number of rows for each shard."""
    return HEADER_WORDS + num_tables * num_shards


class DrainPlan:
    """The tables of a drain: checked once, and copied to a GPU once, without waiting for it.

    The plan keeps the columns' memory. Make another plan when a column has become another tensor (an optimizer replaced
    a state); it costs some microseconds per column.

    Attributes:
        tables: One or more, in the order of their slots.
        num_shards: 1 to 65,536; above 2048 a GPU uses torch's own operations, which wait.
        device: Device of all columns.
        header_words: Length of a header.
        min_out_bytes: Least length of a buffer, into which one row of any table fits.
        end_slot: First slot behind all tables' words; the bitmap has at least as many bits.
        columns: Columns of all tables.
        addresses: Their addresses when the plan was made.
        numbers: First slot, rows, row offset, seed (signed), bytes of a packed row, and columns of each table.
        descriptors: int64[n] on the device: tables and columns as dirty_drain.cu reads them.
    """

    def __init__(self, tables: Sequence[DrainTable], num_shards: int) -> None:
        """Check the tables, and copy their descriptors to the device."""
        self.tables = tuple(tables)
        self.num_shards = num_shards
        self.device = _check_tables(self.tables, num_shards)
        self.columns = [column.detach() for table in self.tables for column in table.columns]
        self.addresses = [column.data_ptr() for column in self.columns]
        self.numbers = [number for table in self.tables for number in _numbers_of(table)]
        self.header_words = header_words(len(self.tables), num_shards)
        self.end_slot = self.tables[-1].end_slot
        self.min_out_bytes = max(table.row_bytes + (1 + len(table.columns)) * ALIGNMENT_BYTES for table in self.tables)
        self.descriptors = to_device(
            torch.tensor(_descriptors(self.tables), dtype=torch.int64, device="cpu"), self.device
        )


def drain_dirty(bitmap: Tensor, cursor: Tensor, plan: DrainPlan, out: Tensor, header: Tensor) -> None:
    """Take dirty rows from the cursor on, as many as fit, and pack them; `drain_dirty_reference` is the definition.

    On a GPU this queues five launches on the current stream and does not wait. All tensors are on the plan's device.

    Args:
        bitmap: int64[w]; changed.
        cursor: int64[1], ≥ 0; changed.
        plan: The tables.
        out: uint8[m]; one row of each table has to fit, so that every drain takes a row.
        header: int64[`header_words`]; changed.

    Raises:
        IndexError: On the CPU, a bit behind a table's last row is set; bitmap and buffer are undefined. On a GPU this
            stops the kernel.
    """
    _check_drain(bitmap, cursor, plan, out, header)
    # The plan has its columns' addresses, so they were plain tensors when it was made.
    run = _drain if runs_eagerly(bitmap, cursor, out, header) else _drain_dirty
    run(bitmap, cursor, plan.columns, plan.numbers, plan.num_shards, plan.descriptors, out, header)


def drain_dirty_reference(
    bitmap: Tensor, cursor: Tensor, tables: Sequence[DrainTable], num_shards: int, out: Tensor, header: Tensor
) -> None:
    """Define `drain_dirty` in torch's operations.

    Rows are taken by ascending slot until one does not fit. The cursor then is behind the last one taken, or at 0 if
    all rows fitted. A drain that begins in the middle does not wrap around.

    Args:
        bitmap: int64[w], see `dirty_bitmap`; bits of taken rows are cleared.
        cursor: int64[1]: the slot at which to begin; changed.
        tables: In the order of their slots.
        num_shards: Shards of the store.
        out: uint8[m], contiguous, at an address divisible by 64; receives the rows by `layout_of`, each table's ordered
            by shard and then by id.
        header: int64[header_words], changed: `HEADER_WORDS`, then each table's number of rows for each shard.
    """
    start, free_bytes = int(cursor), out.numel()
    slots, _ = take_dirty_reference(bitmap.clone())
    num_dirty = behind_taken = 0
    is_full = False
    local_ids, counts = [], []
    for table in tables:
        dirty = slots[(slots >= table.first_slot) & (slots < table.end_slot)]
        wanted = dirty[dirty >= start] - table.first_slot
        num_rows = 0 if is_full else min(wanted.numel(), table.rows_that_fit(free_bytes))
        is_full = is_full or num_rows < wanted.numel()
        if num_rows:
            behind_taken = table.first_slot + int(wanted[num_rows - 1]) + 1
        ordered = block_bucketize_reference(wanted[:num_rows] + table.row_offset, num_shards, seed=table.seed)
        local_ids.append(ordered.row_ids - table.row_offset)
        counts.append(ordered.bounds.diff())
        num_dirty += dirty.numel()
        free_bytes -= table.packed_bytes(num_rows)
    weights, states = [table.columns[0] for table in tables], [table.columns[1:] for table in tables]
    pack_rows_reference(weights, local_ids, states, out, row_offsets=[table.row_offset for table in tables])
    taken = torch.zeros_like(bitmap)
    taken_slots = [ids + table.first_slot for ids, table in zip(local_ids, tables, strict=True)]
    mark_dirty_reference(taken, torch.cat(taken_slots))
    bitmap.bitwise_xor_(taken)
    num_left = num_dirty - sum(ids.numel() for ids in local_ids)
    next_slot = behind_taken if is_full else 0
    header.copy_(torch.cat((header.new_tensor([out.numel() - free_bytes, num_left, next_slot]), *counts)))
    cursor.fill_(next_slot)


def launch_drain_dirty(
    launchers: tuple[Launcher, Launcher],
    bitmap: Tensor,
    cursor: Tensor,
    numbers: list[int],
    num_shards: int,
    descriptors: Tensor,
    out: Tensor,
    header: Tensor,
) -> None:
    drain, packing = launchers
    tables = [numbers[first : first + _TABLE_NUMBERS] for first in range(0, len(numbers), _TABLE_NUMBERS)]
    num_tables, num_columns = len(tables), sum(table[5] for table in tables)
    words = [-(-table[1] // _WORD_BITS) for table in tables]
    num_tiles = sum(-(-count // _TILE_WORDS) for count in words)
    max_rows = min(sum(words) * _WORD_BITS, out.numel() // min(table[4] for table in tables))
    # One shard needs no order. Else there are as many tiles as rows that fit have, and a partial one for each table.
    route_tiles = 0 if num_shards == 1 else -(-max_rows // _ROUTE_ROWS) + num_tables
    num_packed = num_columns + num_tables
    num_progress = route_tiles * num_shards
    sizes = [_STATE_WORDS, 2 * num_tiles + 1, 2 * num_tables + 1, num_packed * PACKED_COLUMN_WORDS]
    sizes += [max_rows, max_rows if route_tiles else 0, num_progress]
    state, tile_rows, table_firsts, packed, row_ids, routed_ids, progress = _scratch(sizes, bitmap.device)
    if not route_tiles:
        routed_ids = row_ids
    of_tables = (descriptors, num_tables)
    counted = (cursor, state, tile_rows, progress, num_progress, header, num_tables * num_shards)
    drain.launch("count_dirty_kernel", max(1, num_tiles), _TAKE_THREADS, bitmap, *of_tables, *counted)
    planned = (cursor, state, tile_rows, table_firsts, packed, routed_ids, out, out.numel(), header)
    drain.launch("plan_drain_kernel", 1, _PLAN_THREADS, *of_tables, *planned)
    taken = (num_shards, cursor, state, tile_rows, row_ids, header)
    drain.launch("take_rows_kernel", num_tiles, _TAKE_THREADS, bitmap, *of_tables, *taken)
    routed = (num_shards, state, table_firsts, row_ids, routed_ids, progress, header)
    drain.launch("route_rows_kernel", route_tiles, _ROUTE_THREADS, *of_tables, *routed)
    launch_planned_packing(packing, packed, num_packed, out.numel())


def _scratch(sizes: list[int], device: torch.device) -> tuple[Tensor, ...]:
    # One allocation for all.
    return torch.empty(sum(sizes), dtype=torch.int64, device=device).split_with_sizes(sizes)


def _drain(
    bitmap: Tensor,
    cursor: Tensor,
    columns: list[Tensor],
    numbers: list[int],
    num_shards: int,
    descriptors: Tensor,
    out: Tensor,
    header: Tensor,
) -> None:
    # Checked here, because a traced tensor has no address.
    if out.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(f"the buffer's address is no multiple of {ALIGNMENT_BYTES}")
    if bitmap.device.type == "cpu":
        return _drain_on_cpu(bitmap, cursor, _tables_of(columns, numbers), num_shards, out, header)
    launcher = launcher_for("drain_dirty", "dirty_drain", bitmap.device) if num_shards <= _MAX_SHARDS else None
    packing = launcher_for("pack_rows", "row_packing", bitmap.device) if launcher else None
    if launcher is None or packing is None:
        return drain_dirty_reference(bitmap, cursor, _tables_of(columns, numbers), num_shards, out, header)
    return launch_drain_dirty((launcher, packing), bitmap, cursor, numbers, num_shards, descriptors, out, header)


_MUTATED = {"bitmap", "cursor", "out", "header"}
_drain_dirty = torch.library.custom_op("headrace::drain_dirty", _drain, mutates_args=_MUTATED)
_drain_dirty.register_fake(lambda *args: None)


def _drain_on_cpu(
    bitmap: Tensor, cursor: Tensor, tables: Sequence[DrainTable], num_shards: int, out: Tensor, header: Tensor
) -> None:
    start = int(cursor)
    num_left = behind_taken = at = 0
    is_full = False
    numbers = header.numpy()
    counts = numbers[HEADER_WORDS:].reshape(len(tables), num_shards)
    counts.fill(0)
    for table, its_counts in zip(tables, counts, strict=True):
        words = bitmap[table.first_slot // _WORD_BITS :][: table.num_words]
        num_dirty = int(np.bitwise_count(words.numpy().view(np.uint64)).sum(dtype=np.int64))
        num_left += num_dirty
        if is_full or table.end_slot <= start or not num_dirty:
            continue
        ids, is_full = _take_from(words, max(0, start - table.first_slot), table.rows_that_fit(out.numel() - at))
        if not ids.numel():
            continue
        behind_taken = table.first_slot + int(ids[-1]) + 1
        ordered = block_bucketize(ids + table.row_offset, num_shards, seed=table.seed)
        weights, *states = table.columns
        pack_rows([weights], [ids[ordered.positions]], [states], out[at:], row_offsets=[table.row_offset])
        its_counts[:] = ordered.bounds.diff().numpy()
        num_left -= ids.numel()
        at += table.packed_bytes(ids.numel())
    next_slot = behind_taken if is_full else 0
    numbers[:HEADER_WORDS] = at, num_left, next_slot
    cursor.fill_(next_slot)


def _take_from(bitmap: Tensor, first_row: int, max_rows: int) -> tuple[Tensor, bool]:
    """Take the lowest dirty rows from a row on; return (their ids, whether more are dirty)."""
    first_word, first_bit = divmod(first_row, _WORD_BITS)
    words = bitmap.numpy()[first_word:].view(np.uint64)
    below = words[:1] & np.uint64(2**first_bit - 1)
    words[:1] ^= below
    up_to = np.cumsum(np.bitwise_count(words), dtype=np.int64)
    # Only the words up to the last row taken, so that a dense table costs in proportion to what is taken.
    num_words = int(np.searchsorted(up_to, max_rows)) + 1
    ids, _ = take_dirty(bitmap[first_word : first_word + num_words], max_rows)
    words[:1] |= below
    return ids + first_word * _WORD_BITS, int(up_to[-1]) > max_rows


def _numbers_of(table: DrainTable) -> tuple[int, ...]:
    columns = table.columns
    return table.first_slot, table.num_rows, table.row_offset, signed(table.seed), table.row_bytes, len(columns)


def _tables_of(columns: list[Tensor], numbers: list[int]) -> list[DrainTable]:
    tables, rest = [], iter(columns)
    for first in range(0, len(numbers), _TABLE_NUMBERS):
        first_slot, num_rows, row_offset, seed, _, num_columns = numbers[first : first + _TABLE_NUMBERS]
        its_columns = tuple(next(rest) for _ in range(num_columns))
        place = {"first_slot": first_slot, "num_rows": num_rows, "row_offset": row_offset}
        tables.append(DrainTable(**place, seed=seed % 2**64, columns=its_columns))
    return tables


def _descriptors(tables: Sequence[DrainTable]) -> list[int]:
    """Return the tables, an end entry, and the columns, as dirty_drain.cu reads them."""
    of_tables: list[int] = []
    of_columns: list[int] = []
    first_tile = first_column = 0
    for table in tables:
        first_slot, num_rows, row_offset, seed, row_bytes, _ = _numbers_of(table)
        of_tables += [first_slot // _WORD_BITS, table.num_words, num_rows, row_offset, seed, row_bytes]
        of_tables += [first_tile, first_column]
        for column in table.columns:
            address, stride, length = column.data_ptr(), column.stride(0) * column.element_size(), row_bytes_of(column)
            of_columns += [address, stride, length, word_bytes_of(address, stride, length)]
        first_tile += -(-table.num_words // _TILE_WORDS)
        first_column += len(table.columns)
    return [*of_tables, 0, 0, 0, 0, 0, 0, first_tile, first_column, *of_columns]


def _check_tables(tables: Sequence[DrainTable], num_shards: int) -> torch.device:
    if not tables or not all(table.columns for table in tables):
        raise ValueError("a drain needs a table, and each table a column")
    if not 1 <= num_shards <= 2**16:
        raise ValueError(f"{num_shards} shards: out of range")
    device = tables[0].columns[0].device
    end = 0
    for table in tables:
        if table.first_slot % _WORD_BITS or table.first_slot < end:
            raise ValueError(f"slot {table.first_slot} is no multiple of 64, or not behind those of the table before")
        if table.num_rows < 0 or table.row_offset < 0 or not 0 <= table.seed < 2**64:
            raise ValueError(f"{table.num_rows} rows from {table.row_offset} on, seed {table.seed}: out of range")
        end = table.end_slot
        for column in table.columns:
            if column.dim() != 2 or column.shape[0] != table.num_rows or column.device != device:
                needed = f"[{table.num_rows}, width] on {device}"
                raise ValueError(f"a column is {list(column.shape)} on {column.device}: {needed} is needed")
            if column.shape[1] > 1 and column.stride(1) != 1:
                raise ValueError(f"a column has strides {column.stride()}: rows must be contiguous")
    return device


def _check_drain(bitmap: Tensor, cursor: Tensor, plan: DrainPlan, out: Tensor, header: Tensor) -> None:
    check_vector("cursor", cursor, torch.int64, 1)
    check_vector("header", header, torch.int64, plan.header_words)
    check_vector("bitmap", bitmap, torch.int64)
    check_vector("out", out, torch.uint8)
    if bitmap.numel() * _WORD_BITS < plan.end_slot:
        raise ValueError(f"a bitmap of {bitmap.numel()} words has no slot {plan.end_slot - 1}")
    if not plan.min_out_bytes <= out.numel() <= MAX_PACKED_BYTES:
        raise ValueError(f"out has {out.numel()} bytes: {plan.min_out_bytes} to {MAX_PACKED_BYTES} are needed")
    if devices := {tensor.device for tensor in (bitmap, cursor, out, header)} - {plan.device}:
        raise ValueError(f"tensors are on {', '.join(sorted(map(str, devices)))}, the plan's on {plan.device}")
