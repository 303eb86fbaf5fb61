"""Bitmaps of dirty rows as tensors: mark rows, and take them out in ascending order, on the CPU or on a GPU.

A bitmap is little-endian words of 64 bits, int64 in torch's types; row r is bit r % 64 of word r / 64. These are the
operations for tables on a GPU, where a bitmap lies beside its table and nobody waits for a step's ids. On the CPU
`DirtyRows` is the better set: it knows which blocks of its bitmap to look at.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.kernels.cuda_module import Launcher, num_blocks
from headrace.kernels.dirty_rows import ids_of, set_bits
from headrace.kernels.dispatch import launcher_for, runs_eagerly

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
# For each table of a launch: of longer ones, threads take several ids.
_MAX_BLOCKS_OF_TABLE = 2**12
# As in bitmap.cu.
_TABLES_A_LAUNCH = 16
_TAKE_THREADS = 256
_TILE_WORDS = 1024
# On the CPU: with a row in so many bits, to look at each bit is cheaper than at each row.
_DENSE_ROWS_OF_BITS = 12


def make_bitmap(num_rows: int, device: torch.device | str = "cpu") -> Tensor:
    """Return a bitmap with no row dirty: int64[ceil(num_rows / 64)].

    Args:
        num_rows: Rows of the table, ≥ 0.
        device: Where.
    """
    return torch.zeros(-(-num_rows // _WORD_BITS), dtype=torch.int64, device=device)


def mark_dirty(bitmap: Tensor, row_ids: Tensor) -> None:
    """Set the bits of rows; negative ids are skipped, and a row may be named many times.

    Args:
        bitmap: int64[w], contiguous; changed.
        row_ids: int32 or int64, any shape and order, on the bitmap's device.

    Raises:
        IndexError: On the CPU, an id is beyond the bitmap; nothing is marked. On a GPU this stops the kernel, as an
            index that is out of range does in torch: the next synchronization raises.
        ValueError: Types, devices or layout are others.
    """
    _check_bitmap(bitmap)
    if row_ids.dtype not in (torch.int32, torch.int64) or row_ids.device != bitmap.device:
        raise ValueError(f"row_ids is {row_ids.dtype} on {row_ids.device}: int32 or int64 on {bitmap.device} is needed")
    (_mark if runs_eagerly(bitmap, row_ids) else _mark_dirty)(bitmap, row_ids)


def mark_dirty_features(bitmap: Tensor, row_ids: Tensor, starts: Tensor, first_slots: Tensor, num_rows: Tensor) -> None:
    """Set the bits of the rows of many features in one bitmap of all tables; on a GPU one launch, and nothing waits.

    The layout of FBGEMM's batches: with `offsets` of a batch of B, `starts` is `offsets[::B]`. Negative ids are
    skipped, and so are ids before the first start and behind the last.

    Args:
        bitmap: int64[w], contiguous; changed. Row r of feature f is bit `first_slots[f] + r`.
        row_ids: int32 or int64 [n], local, the features' one after the other.
        starts: int32 or int64 [f + 1], ascending, any stride: feature f has the ids `starts[f]` to `starts[f + 1] - 1`.
        first_slots: int64[f], contiguous; -1 for a feature that is not marked.
        num_rows: int64[f], contiguous: rows of each feature's table.

    Raises:
        IndexError: On the CPU, an id is beyond its table; nothing is marked. On a GPU this stops the kernel.
        ValueError: Types, shapes, devices or layout are others.
    """
    _check_bitmap(bitmap)
    _check_features(bitmap, row_ids, starts, first_slots, num_rows)
    is_eager = runs_eagerly(bitmap, row_ids, starts, first_slots, num_rows)
    (_mark_features if is_eager else _mark_dirty_features)(bitmap, row_ids, starts, first_slots, num_rows)


def mark_dirty_tables(bitmap: Tensor, row_ids: list[Tensor], first_slots: list[int], num_rows: list[int]) -> None:
    """Set the bits of rows of many tables, whose ids lie apart, in one bitmap of all tables.

    Negative ids are skipped, and a row may be named many times. On a GPU a launch marks 16 tables, and nothing waits;
    ids that are int32 or not contiguous are copied first.

    Args:
        bitmap: int64[w], contiguous; changed. Row r of table t is bit `first_slots[t] + r`.
        row_ids: One tensor for each table, int32 or int64, any shape and order, on the bitmap's device.
        first_slots: One for each table, ≥ 0.
        num_rows: Of each table.

    Raises:
        IndexError: On the CPU, an id is beyond its table or the bitmap; nothing is marked. On a GPU this stops the
            kernel.
        ValueError: Types, devices, layout or lengths are others, or a slot is negative.
    """
    _check_bitmap(bitmap)
    _check_tables(bitmap, row_ids, first_slots, num_rows)
    (_mark_tables if runs_eagerly(bitmap, *row_ids) else _mark_dirty_tables)(bitmap, row_ids, first_slots, num_rows)


def take_dirty(bitmap: Tensor, max_rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Clear the bits of the lowest dirty rows, and return these rows.

    Args:
        bitmap: int64[w], contiguous; changed.
        max_rows: At most so many, ≥ 0; the others stay dirty. None takes all, and on a GPU makes room for all rows of
            the bitmap, 512 bytes for each of its words.

    Returns:
        (row ids, count): int64[n] on the bitmap's device, the first `count` of them the rows, ascending and unique;
        and int64[], on that device too. On the CPU n is the count. With the kernel, n is the room, what follows the
        rows is undefined, and nothing waits for the device; torch's own operations wait, and n is the count.

    Raises:
        ValueError: The bitmap's type or layout is another, or `max_rows` is negative.
    """
    _check_bitmap(bitmap)
    if max_rows is not None and max_rows < 0:
        raise ValueError(f"max_rows {max_rows} is negative")
    room = bitmap.numel() * _WORD_BITS
    ids, count = _take_dirty(bitmap, room if max_rows is None else min(room, max_rows))
    return ids, count


def mark_dirty_reference(bitmap: Tensor, row_ids: Tensor) -> None:
    """Do what `mark_dirty` does: the definition."""
    bits = _bits_of(bitmap)
    ids = row_ids.flatten().long()
    bits[ids[ids >= 0]] = 1
    _set_bits(bitmap, bits)


def mark_dirty_features_reference(
    bitmap: Tensor, row_ids: Tensor, starts: Tensor, first_slots: Tensor, num_rows: Tensor
) -> None:
    """Do what `mark_dirty_features` does: the definition."""
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
    """Do what `mark_dirty_tables` does: the definition."""
    marked = []
    for table, (ids, slot, rows) in enumerate(zip(row_ids, first_slots, num_rows, strict=True)):
        if ids.numel() and int(ids.max()) >= rows:
            raise IndexError(f"table {table} has row {int(ids.max())} and {rows} rows")
        marked.append(ids[ids >= 0].long() + slot)
    if marked:
        mark_dirty_reference(bitmap, torch.cat(marked))


def take_dirty_reference(bitmap: Tensor, max_rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Do what `take_dirty` does on the CPU, on any device: the definition."""
    bits = _bits_of(bitmap)
    ids = bits.nonzero().flatten()[:max_rows]
    bits[ids] = 0
    _set_bits(bitmap, bits)
    return ids, torch.tensor(ids.numel(), device=bitmap.device)


def launch_mark_dirty(launcher: Launcher, bitmap: Tensor, row_ids: Tensor) -> None:
    """Do what `mark_dirty` does, with its kernel."""
    ids = row_ids.contiguous()
    kernel = "mark_dirty_int32_kernel" if ids.dtype == torch.int32 else "mark_dirty_int64_kernel"
    blocks = num_blocks(ids.numel(), _MARK_THREADS)
    launcher.launch(kernel, blocks, _MARK_THREADS, bitmap, bitmap.numel(), ids, ids.numel())


def launch_mark_dirty_features(
    launcher: Launcher, bitmap: Tensor, row_ids: Tensor, starts: Tensor, first_slots: Tensor, num_rows: Tensor
) -> None:
    """Do what `mark_dirty_features` does, with its kernel."""
    ids = row_ids.contiguous()
    launcher.launch(
        "mark_dirty_features_kernel",
        num_blocks(ids.numel(), _MARK_THREADS),
        _MARK_THREADS,
        bitmap,
        bitmap.numel(),
        ids,
        ids.numel(),
        ids.element_size(),
        starts,
        starts.element_size(),
        starts.stride(0),
        first_slots,
        num_rows,
        first_slots.numel(),
    )


def launch_mark_dirty_tables(
    launcher: Launcher, bitmap: Tensor, row_ids: list[Tensor], first_slots: list[int], num_rows: list[int]
) -> None:
    """Do what `mark_dirty_tables` does, with its kernel."""
    tables = list(zip(row_ids, first_slots, num_rows, strict=True))
    for first in range(0, len(tables), _TABLES_A_LAUNCH):
        arguments: list[Tensor | int] = [bitmap, bitmap.numel()]
        longest = 0
        for ids, slot, rows in tables[first : first + _TABLES_A_LAUNCH]:
            if ids.dtype != torch.int64:
                ids = ids.long()
            num_ids = ids.numel()
            longest = max(longest, num_ids)
            arguments += (ids.contiguous(), num_ids, slot, rows)
        arguments += [0] * (2 + 4 * _TABLES_A_LAUNCH - len(arguments))
        blocks = _TABLES_A_LAUNCH * min(num_blocks(longest, _MARK_THREADS), _MAX_BLOCKS_OF_TABLE)
        launcher.launch("mark_dirty_tables_kernel", blocks, _MARK_THREADS, *arguments)


def launch_take_dirty(launcher: Launcher, bitmap: Tensor, max_rows: int) -> tuple[Tensor, Tensor]:
    """Do what `take_dirty` does, with its kernel."""
    row_ids = torch.empty(max_rows, dtype=torch.int64, device=bitmap.device)
    num_tiles = -(-bitmap.numel() // _TILE_WORDS)
    if not num_tiles:
        return row_ids, torch.zeros((), dtype=torch.int64, device=bitmap.device)
    # Of its own, which the kernel writes: a copy out of the state would be one launch more.
    count = torch.empty((), dtype=torch.int64, device=bitmap.device)
    # What each tile has told the others, and the number of tiles begun.
    state = torch.zeros(num_tiles + 1, dtype=torch.int64, device=bitmap.device)
    launcher.launch(
        "take_dirty_kernel",
        num_tiles,
        _TAKE_THREADS,
        bitmap,
        bitmap.numel(),
        state,
        num_tiles,
        max_rows,
        row_ids,
        count,
    )
    return row_ids, count


def _mark(bitmap: Tensor, row_ids: Tensor) -> None:
    if bitmap.device.type == "cpu":
        return _mark_on_cpu(bitmap, row_ids)
    launcher = launcher_for("mark_dirty", "bitmap", bitmap.device)
    if launcher is None:
        return mark_dirty_reference(bitmap, row_ids)
    return launch_mark_dirty(launcher, bitmap, row_ids)


_mark_dirty = torch.library.custom_op("headrace::mark_dirty", _mark, mutates_args={"bitmap"})


@_mark_dirty.register_fake
def _mark_dirty_fake(bitmap: Tensor, row_ids: Tensor) -> None:
    return None


def _mark_features(bitmap: Tensor, row_ids: Tensor, starts: Tensor, first_slots: Tensor, num_rows: Tensor) -> None:
    if bitmap.device.type == "cpu":
        return _mark_features_on_cpu(bitmap, row_ids, starts, first_slots, num_rows)
    launcher = launcher_for("mark_dirty_features", "bitmap", bitmap.device)
    if launcher is None:
        return mark_dirty_features_reference(bitmap, row_ids, starts, first_slots, num_rows)
    return launch_mark_dirty_features(launcher, bitmap, row_ids, starts, first_slots, num_rows)


_mark_dirty_features = torch.library.custom_op("headrace::mark_dirty_features", _mark_features, mutates_args={"bitmap"})


@_mark_dirty_features.register_fake
def _mark_dirty_features_fake(
    bitmap: Tensor, row_ids: Tensor, starts: Tensor, first_slots: Tensor, num_rows: Tensor
) -> None:
    return None


def _mark_tables(bitmap: Tensor, row_ids: list[Tensor], first_slots: list[int], num_rows: list[int]) -> None:
    if bitmap.device.type == "cpu":
        return _mark_tables_on_cpu(bitmap, row_ids, first_slots, num_rows)
    launcher = launcher_for("mark_dirty_tables", "bitmap", bitmap.device)
    if launcher is None:
        return mark_dirty_tables_reference(bitmap, row_ids, first_slots, num_rows)
    return launch_mark_dirty_tables(launcher, bitmap, row_ids, first_slots, num_rows)


_mark_dirty_tables = torch.library.custom_op("headrace::mark_dirty_tables", _mark_tables, mutates_args={"bitmap"})


@_mark_dirty_tables.register_fake
def _mark_dirty_tables_fake(bitmap: Tensor, row_ids: list[Tensor], first_slots: list[int], num_rows: list[int]) -> None:
    return None


@torch.library.custom_op("headrace::take_dirty", mutates_args={"bitmap"})
def _take_dirty(bitmap: Tensor, max_rows: int) -> tuple[Tensor, Tensor]:
    if bitmap.device.type == "cpu":
        return _take_on_cpu(bitmap, max_rows)
    launcher = launcher_for("take_dirty", "bitmap", bitmap.device)
    if launcher is None:
        return take_dirty_reference(bitmap, max_rows)
    return launch_take_dirty(launcher, bitmap, max_rows)


@_take_dirty.register_fake
def _take_dirty_fake(bitmap: Tensor, max_rows: int) -> tuple[Tensor, Tensor]:
    # How many rows come back depends on the bits, but for the kernel.
    num_rows = torch.library.get_ctx().new_dynamic_size()
    return bitmap.new_empty(num_rows), bitmap.new_empty(())


def _mark_on_cpu(bitmap: Tensor, row_ids: Tensor) -> None:
    ids = ids_of(row_ids, bitmap.numel() * _WORD_BITS)
    set_bits(_words_of(bitmap), ids)


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
    words = _words_of(bitmap)
    num_rows = int(np.bitwise_count(words).sum(dtype=np.int64))
    if num_rows * _DENSE_ROWS_OF_BITS > words.size * _WORD_BITS:
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
    return torch.from_numpy(ids), torch.tensor(ids.size)


def _rows_of(words: npt.NDArray[np.uint64], first_rows: npt.NDArray[np.int64], num_rows: int) -> npt.NDArray[np.int64]:
    """Return the rows of words that are not zero, ascending: the lowest of each word, the next of each, and so on."""
    counts = np.bitwise_count(words)
    places = np.cumsum(counts, dtype=np.int64) - counts
    ids = np.empty(num_rows, np.int64)
    while words.size:
        others = words & (words - np.uint64(1))
        ids[places] = first_rows + np.bitwise_count((words ^ others) - np.uint64(1))
        left = np.flatnonzero(others)
        words, places, first_rows = others[left], places[left] + 1, first_rows[left]
    return ids


def _words_of(bitmap: Tensor) -> npt.NDArray[np.uint64]:
    words: npt.NDArray[np.uint64] = bitmap.numpy().view(np.uint64)
    return words


def _bits_of(bitmap: Tensor) -> Tensor:
    places = torch.arange(_WORD_BITS, device=bitmap.device)
    return (bitmap[:, None] >> places & 1).flatten()


def _set_bits(bitmap: Tensor, bits: Tensor) -> None:
    places = torch.arange(_WORD_BITS, device=bitmap.device)
    bitmap.copy_((bits.view(-1, _WORD_BITS) << places).sum(1))


def _check_bitmap(bitmap: Tensor) -> None:
    if bitmap.dtype != torch.int64 or bitmap.dim() != 1 or not bitmap.is_contiguous():
        raise ValueError(f"bitmap is {bitmap.dtype}{list(bitmap.shape)}: contiguous int64[w] is needed")


def _check_features(bitmap: Tensor, row_ids: Tensor, starts: Tensor, first_slots: Tensor, num_rows: Tensor) -> None:
    for name, ids in (("row_ids", row_ids), ("starts", starts)):
        if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
            raise ValueError(f"{name} is {ids.dtype}{list(ids.shape)}: int32[n] or int64[n] is needed")
    for name, numbers in (("first_slots", first_slots), ("num_rows", num_rows)):
        if numbers.dtype != torch.int64 or not numbers.is_contiguous() or numbers.shape != (starts.numel() - 1,):
            raise ValueError(
                f"{name} is {numbers.dtype}{list(numbers.shape)}: contiguous int64[{starts.numel() - 1}] is needed"
            )
    if len(devices := {tensor.device for tensor in (bitmap, row_ids, starts, first_slots, num_rows)}) > 1:
        raise ValueError(f"tensors are on several devices: {', '.join(sorted(map(str, devices)))}")


def _check_tables(bitmap: Tensor, row_ids: list[Tensor], first_slots: list[int], num_rows: list[int]) -> None:
    if not len(row_ids) == len(first_slots) == len(num_rows):
        raise ValueError(f"{len(row_ids)} row_ids, {len(first_slots)} first_slots and {len(num_rows)} num_rows")
    device = bitmap.device
    for table, ids in enumerate(row_ids):
        if ids.dtype not in (torch.int64, torch.int32) or ids.device != device:
            raise ValueError(
                f"row_ids of table {table} is {ids.dtype} on {ids.device}: int32 or int64 on {device} is needed"
            )
    # Behind the bitmap's end the kernel looks itself.
    if first_slots and min(first_slots) < 0:
        raise ValueError(f"first slot {min(first_slots)} is negative")
