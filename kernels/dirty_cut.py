"""A cut through dirty rows: as many as fit into a buffer are taken, ordered by shard and packed, in one go.

All that has to be known for it (how many rows are dirty, which of them fit, where their columns begin) is counted on
the device and stays there until the header has been copied: on a GPU the training thread only starts kernels.

The bitmap is one of all tables: row r of a table is the *slot* `first_slot + r`. What a cut leaves, the next one takes
up at the cursor, so that hot low rows do not starve high ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.bitmap import mark_dirty_reference, take_dirty, take_dirty_reference
from headrace.kernels.bucketize import block_bucketize, block_bucketize_reference
from headrace.kernels.cuda_module import Launcher
from headrace.kernels.cut_plan import HEADER_WORDS, CutPlan, CutTable
from headrace.kernels.dispatch import launcher_for, runs_eagerly
from headrace.kernels.row_packing import (
    ALIGNMENT_BYTES,
    MAX_PACKED_BYTES,
    PACKED_COLUMN_WORDS,
    launch_planned_packing,
    pack_rows,
    pack_rows_reference,
)

__all__ = ["cut_dirty", "cut_dirty_reference"]

_WORD_BITS = 64
# As in dirty_cut.cu and its headers.
_TAKE_THREADS = 256
_TILE_WORDS = 1024
_PLAN_THREADS = 256
_ROUTE_THREADS = 128
_ROUTE_ROWS = 4096
_MAX_SHARDS = 2048
_STATE_WORDS = 4
# What the operator is told of a table: first slot, rows, row offset, seed, bytes of a packed row, columns.
_TABLE_NUMBERS = 6


def cut_dirty(bitmap: Tensor, cursor: Tensor, plan: CutPlan, out: Tensor, header: Tensor) -> None:
    """Take dirty rows from the cursor on, as many as fit, and pack them, as `cut_dirty_reference` says.

    On a GPU nothing waits for the device: five launches on the current stream.

    Args:
        bitmap: As for `cut_dirty_reference`, as all others; on the plan's device.
        cursor: int64[1], ≥ 0.
        plan: Of the tables.
        out: uint8[m]; one row of each table has to fit, so that each cut gets on.
        header: int64[`header_words`].

    Raises:
        IndexError: On the CPU, a bit behind a table's last row is set; bitmap and buffer are undefined. On a GPU this
            stops the kernel.
        ValueError: Types, devices or layouts are others, or a row does not fit.
    """
    _check_cut(bitmap, cursor, plan, out, header)
    # The plan's columns were plain tensors when it was made, as it has their addresses.
    run = _cut if runs_eagerly(bitmap, cursor, out, header) else _cut_dirty
    run(bitmap, cursor, plan.columns, plan.numbers, plan.num_shards, plan.descriptors, out, header)


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
    slots, _ = take_dirty_reference(bitmap.clone())
    num_dirty = behind_taken = 0
    is_short = False
    local_ids, counts = [], []
    for table in tables:
        dirty = slots[(slots >= table.first_slot) & (slots < table.end_slot)]
        wanted = dirty[dirty >= start] - table.first_slot
        num_rows = 0 if is_short else min(wanted.numel(), table.rows_that_fit(free_bytes))
        is_short = is_short or num_rows < wanted.numel()
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
    mark_dirty_reference(
        taken, torch.cat([ids + table.first_slot for ids, table in zip(local_ids, tables, strict=True)])
    )
    bitmap.bitwise_xor_(taken)
    num_left = num_dirty - sum(ids.numel() for ids in local_ids)
    next_slot = behind_taken if is_short else 0
    header.copy_(torch.cat((header.new_tensor([out.numel() - free_bytes, num_left, next_slot]), *counts)))
    cursor.fill_(next_slot)


def launch_cut_dirty(
    launchers: tuple[Launcher, Launcher],
    bitmap: Tensor,
    cursor: Tensor,
    numbers: list[int],
    num_shards: int,
    descriptors: Tensor,
    out: Tensor,
    header: Tensor,
) -> None:
    """Do what `cut_dirty` does, with the kernels of `dirty_cut` and of `row_packing`."""
    cut, packing = launchers
    tables = [numbers[first : first + _TABLE_NUMBERS] for first in range(0, len(numbers), _TABLE_NUMBERS)]
    num_tables, num_columns = len(tables), sum(table[5] for table in tables)
    words = [-(-table[1] // _WORD_BITS) for table in tables]
    num_tiles = sum(-(-count // _TILE_WORDS) for count in words)
    max_rows = min(sum(words) * _WORD_BITS, out.numel() // min(table[4] for table in tables))
    # One shard needs no order; else as many tiles as rows that fit have, and one more for the rest of each table's.
    route_tiles = 0 if num_shards == 1 else -(-max_rows // _ROUTE_ROWS) + num_tables
    num_packed = num_columns + num_tables
    sizes = (
        _STATE_WORDS,
        2 * num_tiles + 1,
        2 * num_tables + 1,
        num_packed * PACKED_COLUMN_WORDS,
        max_rows,
        max_rows if route_tiles else 0,
        route_tiles * num_shards,
    )
    state, tile_rows, table_firsts, packed, row_ids, routed_ids, progress = _scratch(sizes, bitmap.device)
    if not route_tiles:
        routed_ids = row_ids
    common = (descriptors, num_tables)
    cut.launch(
        "count_dirty_kernel",
        max(1, num_tiles),
        _TAKE_THREADS,
        bitmap,
        *common,
        cursor,
        state,
        tile_rows,
        progress,
        sizes[-1],
        header,
        num_tables * num_shards,
    )
    planned = (cursor, state, tile_rows, table_firsts, packed, routed_ids, out, out.numel(), header)
    cut.launch("plan_cut_kernel", 1, _PLAN_THREADS, *common, *planned)
    taken = (num_shards, cursor, state, tile_rows, row_ids, header)
    cut.launch("take_rows_kernel", num_tiles, _TAKE_THREADS, bitmap, *common, *taken)
    routed = (num_shards, state, table_firsts, row_ids, routed_ids, progress, header)
    cut.launch("route_rows_kernel", route_tiles, _ROUTE_THREADS, *common, *routed)
    launch_planned_packing(packing, packed, num_packed, out.numel())


def _scratch(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Return int64[size] of each size, of one allocation."""
    return torch.empty(sum(sizes), dtype=torch.int64, device=device).split_with_sizes(sizes)


def _cut(
    bitmap: Tensor,
    cursor: Tensor,
    columns: list[Tensor],
    numbers: list[int],
    num_shards: int,
    descriptors: Tensor,
    out: Tensor,
    header: Tensor,
) -> None:
    # Here and not with the other checks, because a traced tensor has no address.
    if out.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(f"the buffer's address is no multiple of {ALIGNMENT_BYTES}")
    if bitmap.device.type == "cpu":
        return _cut_on_cpu(bitmap, cursor, _tables_of(columns, numbers), num_shards, out, header)
    launcher = launcher_for("cut_dirty", "dirty_cut", bitmap.device) if num_shards <= _MAX_SHARDS else None
    packing = launcher_for("pack_rows", "row_packing", bitmap.device) if launcher else None
    if launcher is None or packing is None:
        return cut_dirty_reference(bitmap, cursor, _tables_of(columns, numbers), num_shards, out, header)
    return launch_cut_dirty((launcher, packing), bitmap, cursor, numbers, num_shards, descriptors, out, header)


_cut_dirty = torch.library.custom_op("headrace::cut_dirty", _cut, mutates_args={"bitmap", "cursor", "out", "header"})


@_cut_dirty.register_fake
def _cut_dirty_fake(
    bitmap: Tensor,
    cursor: Tensor,
    columns: list[Tensor],
    numbers: list[int],
    num_shards: int,
    descriptors: Tensor,
    out: Tensor,
    header: Tensor,
) -> None:
    return None


def _cut_on_cpu(
    bitmap: Tensor, cursor: Tensor, tables: Sequence[CutTable], num_shards: int, out: Tensor, header: Tensor
) -> None:
    start = int(cursor)
    num_left = behind_taken = at = 0
    is_short = False
    numbers = header.numpy()
    counts = numbers[HEADER_WORDS:].reshape(len(tables), num_shards)
    counts.fill(0)
    for table, its_counts in zip(tables, counts, strict=True):
        words = bitmap[table.first_slot // _WORD_BITS :][: table.num_words]
        num_dirty = int(np.bitwise_count(words.numpy().view(np.uint64)).sum(dtype=np.int64))
        num_left += num_dirty
        if is_short or table.end_slot <= start or not num_dirty:
            continue
        ids, is_short = _take_from(words, max(0, start - table.first_slot), table.rows_that_fit(out.numel() - at))
        if not ids.numel():
            continue
        behind_taken = table.first_slot + int(ids[-1]) + 1
        ordered = block_bucketize(ids + table.row_offset, num_shards, seed=table.seed)
        weights, *states = table.columns
        pack_rows([weights], [ids[ordered.positions]], [states], out[at:], row_offsets=[table.row_offset])
        its_counts[:] = ordered.bounds.diff().numpy()
        num_left -= ids.numel()
        at += table.packed_bytes(ids.numel())
    next_slot = behind_taken if is_short else 0
    numbers[:HEADER_WORDS] = at, num_left, next_slot
    cursor.fill_(next_slot)


def _take_from(bitmap: Tensor, first_row: int, max_rows: int) -> tuple[Tensor, bool]:
    """Take the lowest dirty rows from a row on; return (their ids, whether there are others)."""
    first_word, first_bit = divmod(first_row, _WORD_BITS)
    words = bitmap.numpy()[first_word:].view(np.uint64)
    below = words[:1] & np.uint64(2**first_bit - 1)
    words[:1] ^= below
    up_to = np.cumsum(np.bitwise_count(words), dtype=np.int64)
    # A dense table costs what is taken of it.
    num_words = int(np.searchsorted(up_to, max_rows)) + 1
    ids, _ = take_dirty(bitmap[first_word : first_word + num_words], max_rows)
    words[:1] |= below
    return ids + first_word * _WORD_BITS, int(up_to[-1]) > max_rows


def _tables_of(columns: list[Tensor], numbers: list[int]) -> list[CutTable]:
    tables, rest = [], iter(columns)
    for first in range(0, len(numbers), _TABLE_NUMBERS):
        first_slot, num_rows, row_offset, seed, _, num_columns = numbers[first : first + _TABLE_NUMBERS]
        its_columns = tuple(next(rest) for _ in range(num_columns))
        tables.append(
            CutTable(
                first_slot=first_slot,
                num_rows=num_rows,
                row_offset=row_offset,
                seed=seed % 2**64,
                columns=its_columns,
            )
        )
    return tables


def _check_cut(bitmap: Tensor, cursor: Tensor, plan: CutPlan, out: Tensor, header: Tensor) -> None:
    for name, tensor, length in (("cursor", cursor, 1), ("header", header, plan.header_words)):
        if tensor.dtype != torch.int64 or tensor.shape != (length,) or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype}{list(tensor.shape)}: contiguous int64[{length}] is needed")
    if bitmap.dtype != torch.int64 or bitmap.dim() != 1 or not bitmap.is_contiguous():
        raise ValueError(f"bitmap is {bitmap.dtype}{list(bitmap.shape)}: contiguous int64[w] is needed")
    if bitmap.numel() * _WORD_BITS < plan.end_slot:
        raise ValueError(f"a bitmap of {bitmap.numel()} words has no slot {plan.end_slot - 1}")
    if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype}{list(out.shape)}: contiguous uint8[m] is needed")
    if not plan.min_out_bytes <= out.numel() <= MAX_PACKED_BYTES:
        raise ValueError(f"out has {out.numel()} bytes: {plan.min_out_bytes} to {MAX_PACKED_BYTES} are needed")
    if devices := {tensor.device for tensor in (bitmap, cursor, out, header)} - {plan.device}:
        raise ValueError(f"tensors are on {', '.join(sorted(map(str, devices)))}, the plan's on {plan.device}")
