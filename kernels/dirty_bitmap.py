"""Bitmaps of dirty rows as tensors on the CPU or a GPU: mark rows, and take them in ascending order.

A bitmap is int64 words, read as unsigned: row r is bit r % 64 of word r / 64. These operations serve tables on a GPU,
where a bitmap lies beside its tables and nothing waits for a step's ids. On the CPU, `DirtyRows` is the better set,
because it knows which blocks of its bitmap have bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.kernels.dirty_sets import ids_of, set_bits
from headrace.kernels.runtime.cuda_module import Launcher, num_blocks
from headrace.kernels.runtime.dispatch import check_vector, implementation_of, runs_eagerly

__all__ = [
    "make_bitmap",
    "mark_dirty",
    "mark_dirty_features",
    "mark_dirty_features_reference",
    "mark_dirty_reference",
    "mark_dirty_tables",
    "mark_dirty_tables_reference",
    "take_dirty",
    "take_dirty_reference",
]

_WORD_BITS = 64
_MARK_THREADS = 256
# Per table of a launch; with more ids, each thread marks several.
_MAX_BLOCKS_PER_TABLE = 2**12
# As in bitmap.cu.
_TABLES_PER_LAUNCH = 16
_TAKE_THREADS = 256
_TILE_WORDS = 1024
# On the CPU: from one row in this many bits on, looking at each bit is cheaper than looking at each row.
_DENSE_BITS_PER_ROW = 12


def make_bitmap(num_rows: int, device: torch.device | str = "cpu") -> Tensor:
    """Return a bitmap of `num_rows` ≥ 0 clean rows on a device: int64[ceil(num_rows / 64)]."""
    return torch.zeros(-(-num_rows // _WORD_BITS), dtype=torch.int64, device=device)


def mark_dirty(bitmap: Tensor, row_ids: Tensor) -> None:
    """Set the bits of rows in a contiguous bitmap, int64[w]; negative ids are skipped, and ids may repeat.

    The ids are int32 or int64 of any shape and order, on the bitmap's device.

    Raises:
        IndexError: On the CPU, an id is beyond the bitmap; nothing is marked. On a GPU this stops the kernel, like an
            index out of range in torch: the next synchronization raises.
    """
    check_vector("bitmap", bitmap, torch.int64)
    if row_ids.dtype not in (torch.int32, torch.int64) or row_ids.device != bitmap.device:
        raise ValueError(f"row_ids is {row_ids.dtype} on {row_ids.device}: int32 or int64 on {bitmap.device} is needed")
    (_mark if runs_eagerly(bitmap, row_ids) else _mark_dirty)(bitmap, row_ids)


def mark_dirty_features(bitmap: Tensor, row_ids: Tensor, starts: Tensor, first_slots: Tensor, num_rows: Tensor) -> None:
    """Set the bits of many features' rows in one bitmap of all tables: one launch on a GPU, without waiting.

    The layout is that of FBGEMM's batches: with the `offsets` of a batch of B, `starts` is `offsets[::B]`. Negative
    ids, ids before the first start and ids behind the last are skipped.

    Args:
        bitmap: int64[w], contiguous; changed. Row r of feature f is bit `first_slots[f] + r`.
        row_ids: int32 or int64 [n], local, one feature after the other.
        starts: int32 or int64 [f + 1], ascending, any stride: feature f has the ids `starts[f]` to `starts[f + 1] - 1`.
        first_slots: int64[f], contiguous; -1 for a feature that is not marked.
        num_rows: int64[f], contiguous: rows of each feature's table.

    Raises:
        IndexError: On the CPU, an id is beyond its table; nothing is marked. On a GPU this stops the kernel.
    """
    check_vector("bitmap", bitmap, torch.int64)
    _check_features(bitmap, row_ids, starts, first_slots, num_rows)
    is_eager = runs_eagerly(bitmap, row_ids, starts, first_slots, num_rows)
    (_mark_features if is_eager else _mark_dirty_features)(bitmap, row_ids, starts, first_slots, num_rows)


def mark_dirty_tables(bitmap: Tensor, row_ids: list[Tensor], first_slots: list[int], num_rows: list[int]) -> None:
    """Set the bits of many tables' rows, each with its own tensor of ids, in one bitmap of all tables.

    Negative ids are skipped, and ids may repeat. On a GPU a launch marks 16 tables, and nothing waits; ids that are
    int32 or not contiguous are copied first.

    Args:
        bitmap: int64[w], contiguous; changed. Row r of table t is bit `first_slots[t] + r`.
        row_ids: One tensor per table, int32 or int64, any shape and order, on the bitmap's device.
        first_slots: One per table, ≥ 0.
        num_rows: Rows of each table.

    Raises:
        IndexError: On the CPU, an id is beyond its table or the bitmap; nothing is marked. On a GPU this stops the
            kernel.
    """
    check_vector("bitmap", bitmap, torch.int64)
    _check_tables(bitmap, row_ids, first_slots, num_rows)
    (_mark_tables if runs_eagerly(bitmap, *row_ids) else _mark_dirty_tables)(bitmap, row_ids, first_slots, num_rows)


def take_dirty(bitmap: Tensor, max_rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Clear the bits of the lowest dirty rows, and return these rows.

    Args:
        bitmap: int64[w], contiguous; changed.
        max_rows: Upper limit, ≥ 0; the others stay dirty. None takes all, and on a GPU allocates room for all rows of
            the bitmap, 512 bytes per word.

    Returns:
        (row ids, count), int64[n] and int64[], on the bitmap's device. The first `count` ids are the rows, ascending
        and unique. The kernel does not wait: n is the room, and ids behind the count are undefined. On the CPU, and
        with torch's own operations, which wait, n is the count.
    """
    check_vector("bitmap", bitmap, torch.int64)
    if max_rows is not None and max_rows < 0:
        raise ValueError(f"max_rows {max_rows} is negative")
    room = bitmap.numel() * _WORD_BITS
    ids, count = _take_dirty(bitmap, room if max_rows is None else min(room, max_rows))
    return ids, count


def mark_dirty_reference(bitmap: Tensor, row_ids: Tensor) -> None:
    """Define `mark_dirty` in torch's operations."""
    bits = _bits_of(bitmap)
    ids = row_ids.flatten().long()
    bits[ids[ids >= 0]] = 1
    _set_bits(bitmap, bits)


def mark_dirty_features_reference(
    bitmap: Tensor, row_ids: Tensor, starts: Tensor, first_slots: Tensor, num_rows: Tensor
) -> None:
    """Define `mark_dirty_features` in torch's operations."""
    bounds = starts.tolist()
    marked = []
    for feature, (slot, rows) in enumerate(zip(first_slots.tolist(), num_rows.tolist(), strict=True)):
        ids = row_ids[bounds[feature] : bounds[feature + 1]].long()
        if slot >= 0:
            if ids.numel() and int(ids.max()) >= rows:
                raise IndexError(f"feature {feature} has row {int(ids.max())} of a table with {rows} rows")
            marked.append(ids[ids >= 0] + slot)
    if marked:
        mark_dirty_reference(bitmap, torch.cat(marked))


def mark_dirty_tables_reference(
    bitmap: Tensor, row_ids: list[Tensor], first_slots: list[int], num_rows: list[int]
) -> None:
    """Define `mark_dirty_tables` in torch's operations: a table is a feature."""
    if row_ids:
        starts = torch.tensor([0, *(ids.numel() for ids in row_ids)], dtype=torch.int64, device="cpu").cumsum(0)
        all_ids = torch.cat([ids.flatten().long() for ids in row_ids])
        mark_dirty_features_reference(
            bitmap,
            all_ids,
            starts,
            torch.tensor(first_slots, dtype=torch.int64, device="cpu"),
            torch.tensor(num_rows, dtype=torch.int64, device="cpu"),
        )


def take_dirty_reference(bitmap: Tensor, max_rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Define `take_dirty` in torch's operations; they wait for the device."""
    bits = _bits_of(bitmap)
    ids = bits.nonzero().flatten()[:max_rows]
    bits[ids] = 0
    _set_bits(bitmap, bits)
    return ids, torch.tensor(ids.numel(), device=bitmap.device, dtype=torch.int64)


def launch_mark_dirty(launcher: Launcher, bitmap: Tensor, row_ids: Tensor) -> None:
    ids = row_ids.contiguous()
    kernel = "mark_dirty_int32_kernel" if ids.dtype == torch.int32 else "mark_dirty_int64_kernel"
    blocks = num_blocks(ids.numel(), _MARK_THREADS)
    launcher.launch(kernel, blocks, _MARK_THREADS, bitmap, bitmap.numel(), ids, ids.numel())


def launch_mark_dirty_features(
    launcher: Launcher, bitmap: Tensor, row_ids: Tensor, starts: Tensor, first_slots: Tensor, num_rows: Tensor
) -> None:
    ids = row_ids.contiguous()
    of_ids = (ids, ids.numel(), ids.element_size())
    of_features = (starts, starts.element_size(), starts.stride(0), first_slots, num_rows, first_slots.numel())
    arguments = (bitmap, bitmap.numel(), *of_ids, *of_features)
    blocks = num_blocks(ids.numel(), _MARK_THREADS)
    launcher.launch("mark_dirty_features_kernel", blocks, _MARK_THREADS, *arguments)


def launch_mark_dirty_tables(
    launcher: Launcher, bitmap: Tensor, row_ids: list[Tensor], first_slots: list[int], num_rows: list[int]
) -> None:
    tables = list(zip(row_ids, first_slots, num_rows, strict=True))
    for first in range(0, len(tables), _TABLES_PER_LAUNCH):
        arguments: list[Tensor | int] = [bitmap, bitmap.numel()]
        longest = 0
        for ids, slot, rows in tables[first : first + _TABLES_PER_LAUNCH]:
            if ids.dtype != torch.int64:
                ids = ids.long()
            num_ids = ids.numel()
            longest = max(longest, num_ids)
            arguments += (ids.contiguous(), num_ids, slot, rows)
        arguments += [0] * (2 + 4 * _TABLES_PER_LAUNCH - len(arguments))
        blocks = _TABLES_PER_LAUNCH * min(num_blocks(longest, _MARK_THREADS), _MAX_BLOCKS_PER_TABLE)
        launcher.launch("mark_dirty_tables_kernel", blocks, _MARK_THREADS, *arguments)


def launch_take_dirty(launcher: Launcher, bitmap: Tensor, max_rows: int) -> tuple[Tensor, Tensor]:
    row_ids = torch.empty(max_rows, dtype=torch.int64, device=bitmap.device)
    num_tiles = -(-bitmap.numel() // _TILE_WORDS)
    if not num_tiles:
        return row_ids, torch.zeros((), dtype=torch.int64, device=bitmap.device)
    # A tensor of its own, because a copy out of the state would take another launch.
    count = torch.empty((), dtype=torch.int64, device=bitmap.device)
    # What each tile has published for the others, and the number of tiles begun.
    state = torch.zeros(num_tiles + 1, dtype=torch.int64, device=bitmap.device)
    arguments = (bitmap, bitmap.numel(), state, num_tiles, max_rows, row_ids, count)
    launcher.launch("take_dirty_kernel", num_tiles, _TAKE_THREADS, *arguments)
    return row_ids, count


def _mark(bitmap: Tensor, row_ids: Tensor) -> None:
    ways = _mark_on_cpu, launch_mark_dirty, mark_dirty_reference
    implementation_of("mark_dirty", "bitmap", bitmap.device, *ways)(bitmap, row_ids)


def _mark_features(bitmap: Tensor, row_ids: Tensor, starts: Tensor, first_slots: Tensor, num_rows: Tensor) -> None:
    ways = _mark_features_on_cpu, launch_mark_dirty_features, mark_dirty_features_reference
    run = implementation_of("mark_dirty_features", "bitmap", bitmap.device, *ways)
    run(bitmap, row_ids, starts, first_slots, num_rows)


def _mark_tables(bitmap: Tensor, row_ids: list[Tensor], first_slots: list[int], num_rows: list[int]) -> None:
    ways = _mark_tables_on_cpu, launch_mark_dirty_tables, mark_dirty_tables_reference
    run = implementation_of("mark_dirty_tables", "bitmap", bitmap.device, *ways)
    run(bitmap, row_ids, first_slots, num_rows)


_mark_dirty = torch.library.custom_op("headrace::mark_dirty", _mark, mutates_args={"bitmap"})
_mark_dirty_features = torch.library.custom_op("headrace::mark_dirty_features", _mark_features, mutates_args={"bitmap"})
_mark_dirty_tables = torch.library.custom_op("headrace::mark_dirty_tables", _mark_tables, mutates_args={"bitmap"})
for _operator in (_mark_dirty, _mark_dirty_features, _mark_dirty_tables):
    _operator.register_fake(lambda *args: None)


@torch.library.custom_op("headrace::take_dirty", mutates_args={"bitmap"})
def _take_dirty(bitmap: Tensor, max_rows: int) -> tuple[Tensor, Tensor]:
    ways = _take_on_cpu, launch_take_dirty, take_dirty_reference
    ids, count = implementation_of("take_dirty", "bitmap", bitmap.device, *ways)(bitmap, max_rows)
    return ids, count


@_take_dirty.register_fake
def _take_dirty_fake(bitmap: Tensor, max_rows: int) -> tuple[Tensor, Tensor]:
    # The number of ids depends on the bits, except with the kernel.
    num_rows = torch.library.get_ctx().new_dynamic_size()
    return bitmap.new_empty(num_rows), bitmap.new_empty(())


def _mark_on_cpu(bitmap: Tensor, row_ids: Tensor) -> None:
    ids = ids_of(row_ids, bitmap.numel() * _WORD_BITS)
    set_bits(bitmap.numpy().view(np.uint64), ids)


def _mark_features_on_cpu(
    bitmap: Tensor, row_ids: Tensor, starts: Tensor, first_slots: Tensor, num_rows: Tensor
) -> None:
    bounds, ids = starts.numpy(), row_ids.numpy()
    lengths = np.diff(np.clip(bounds, 0, ids.size))
    ids = ids[bounds[0] : bounds[-1]].astype(np.int64)
    slots, limits = np.repeat(first_slots.numpy(), lengths), np.repeat(num_rows.numpy(), lengths)
    is_row = (ids >= 0) & (slots >= 0)
    if (beyond := is_row & (ids >= limits)).any():
        raise IndexError(f"row {ids[beyond][0]} is of a table with {limits[beyond][0]} rows")
    _mark_on_cpu(bitmap, torch.from_numpy((ids + slots)[is_row]))


def _mark_tables_on_cpu(bitmap: Tensor, row_ids: list[Tensor], first_slots: list[int], num_rows: list[int]) -> None:
    tables = zip(row_ids, first_slots, num_rows, strict=True)
    if slots := [ids_of(ids, rows) + slot for ids, slot, rows in tables]:
        _mark_on_cpu(bitmap, torch.from_numpy(np.concatenate(slots)))


def _take_on_cpu(bitmap: Tensor, max_rows: int) -> tuple[Tensor, Tensor]:
    words: npt.NDArray[np.uint64] = bitmap.numpy().view(np.uint64)
    num_rows = int(np.bitwise_count(words).sum(dtype=np.int64))
    if num_rows * _DENSE_BITS_PER_ROW > words.size * _WORD_BITS:
        bits = np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_)
        ids: npt.NDArray[np.int64] = np.flatnonzero(bits).astype(np.int64, copy=False)
        words.fill(0)
    else:
        where = np.flatnonzero(words != 0)
        ids = _rows_of(words[where], where.astype(np.int64, copy=False) * _WORD_BITS, num_rows)
        words[where] = 0
    if num_rows > max_rows:
        _mark_on_cpu(bitmap, torch.from_numpy(ids[max_rows:]))
        ids = ids[:max_rows].copy()
    return torch.from_numpy(ids), torch.tensor(ids.size, dtype=torch.int64, device="cpu")


def _rows_of(words: npt.NDArray[np.uint64], first_rows: npt.NDArray[np.int64], num_rows: int) -> npt.NDArray[np.int64]:
    # One pass takes the lowest row of each word, the next pass the next one of each, and so on.
    counts = np.bitwise_count(words)
    places = np.cumsum(counts, dtype=np.int64) - counts
    ids = np.empty(num_rows, np.int64)
    while words.size:
        others = words & (words - np.uint64(1))
        ids[places] = first_rows + np.bitwise_count((words ^ others) - np.uint64(1))
        left = np.flatnonzero(others)
        words, places, first_rows = others[left], places[left] + 1, first_rows[left]
    return ids


def _bits_of(bitmap: Tensor) -> Tensor:
    places = torch.arange(_WORD_BITS, device=bitmap.device, dtype=torch.int64)
    return (bitmap[:, None] >> places & 1).flatten()


def _set_bits(bitmap: Tensor, bits: Tensor) -> None:
    places = torch.arange(_WORD_BITS, device=bitmap.device, dtype=torch.int64)
    bitmap.copy_((bits.view(-1, _WORD_BITS) << places).sum(1))


def _check_features(bitmap: Tensor, row_ids: Tensor, starts: Tensor, first_slots: Tensor, num_rows: Tensor) -> None:
    for name, ids in (("row_ids", row_ids), ("starts", starts)):
        if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
            raise ValueError(f"{name} is {ids.dtype}{list(ids.shape)}: int32[n] or int64[n] is needed")
    for name, numbers in (("first_slots", first_slots), ("num_rows", num_rows)):
        if numbers.dtype != torch.int64 or not numbers.is_contiguous() or numbers.shape != (starts.numel() - 1,):
            needed = f"contiguous int64[{starts.numel() - 1}]"
            raise ValueError(f"{name} is {numbers.dtype}{list(numbers.shape)}: {needed} is needed")
    if len(devices := {tensor.device for tensor in (bitmap, row_ids, starts, first_slots, num_rows)}) > 1:
        raise ValueError(f"tensors are on several devices: {', '.join(sorted(map(str, devices)))}")


def _check_tables(bitmap: Tensor, row_ids: list[Tensor], first_slots: list[int], num_rows: list[int]) -> None:
    if not len(row_ids) == len(first_slots) == len(num_rows):
        raise ValueError(f"{len(row_ids)} row_ids, {len(first_slots)} first_slots and {len(num_rows)} num_rows")
    device = bitmap.device
    for table, ids in enumerate(row_ids):
        if ids.dtype not in (torch.int64, torch.int32) or ids.device != device:
            needed = f"int32 or int64 on {device}"
            raise ValueError(f"row_ids of table {table} is {ids.dtype} on {ids.device}: {needed} is needed")
    # The kernel itself checks the bitmap's end.
    if first_slots and min(first_slots) < 0:
        raise ValueError(f"first slot {min(first_slots)} is negative")
