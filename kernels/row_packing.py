"""Rows of many tables, with their ids and states, packed into one buffer in the wire's columns; and written back.

A packed table is its row ids (int64, global) and then each of its columns, weights first, every column contiguous and
at a multiple of 64 bytes: what `TableDelta` carries, and what the streamer's staging buffers hold. Tables follow one
another. On a GPU all of them are packed by one launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.kernels.cuda_module import Launcher, num_blocks
from headrace.kernels.dispatch import launcher_for

__all__ = [
    "ALIGNMENT_BYTES",
    "MAX_PACKED_BYTES",
    "PackedColumn",
    "PackedTable",
    "layout_of",
    "pack_rows",
    "pack_rows_reference",
    "unpack_rows",
    "unpack_rows_reference",
]

ALIGNMENT_BYTES = 64
"""What columns begin at multiples of, as in the streamer's staging buffers."""

MAX_PACKED_BYTES = 2**34
"""The longest packed buffer: the kernels count its rows, of 8 bytes or more, and its units of 16 bytes in 32 bits."""

PACKED_COLUMN_WORDS = 10
"""Numbers of 64 bits of a `PackedColumn` in packed_column.cuh."""

# As in packed_column.cuh.
_PACK_THREADS = 256
_UNIT_BYTES = 16
_TILE_BYTES = 1024 * _UNIT_BYTES
_UNPACK_THREADS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedColumn:
    """Where one column lies in a packed buffer.

    Attributes:
        offset: First byte.
        num_rows: Rows.
        row_bytes: Bytes of a row; rows follow one another.
    """

    offset: int
    num_rows: int
    row_bytes: int

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.offset + self.num_rows * self.row_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTable:
    """Where the rows of one table lie in a packed buffer.

    Attributes:
        row_ids: Of the ids.
        columns: Of weights and states, in their order.
    """

    row_ids: PackedColumn
    columns: tuple[PackedColumn, ...]


def layout_of(
    tables: Sequence[Tensor], num_rows: Sequence[int], states: Sequence[Sequence[Tensor]]
) -> tuple[list[PackedTable], int]:
    """Return (where the columns of each table lie, bytes of the buffer).

    Args:
        tables: As for `pack_rows`.
        num_rows: Rows to be packed of each table.
        states: As for `pack_rows`.
    """
    at = 0

    def carve(rows: int, row_bytes: int) -> PackedColumn:
        nonlocal at
        column = PackedColumn(offset=at, num_rows=rows, row_bytes=row_bytes)
        at = -(-column.end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return column

    packed = []
    for weights, rows, others in zip(tables, num_rows, states, strict=True):
        ids = carve(rows, 8)
        columns = tuple(carve(rows, _row_bytes(source)) for source in (weights, *others))
        packed.append(PackedTable(row_ids=ids, columns=columns))
    return packed, at


def pack_rows(
    tables: Sequence[Tensor],
    row_ids: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    out: Tensor,
    *,
    row_offsets: Sequence[int] | None = None,
) -> list[PackedTable]:
    """Copy rows of tables, with their states, into a buffer.

    Args:
        tables: Weights of each: `[rows, dim]`, any type, contiguous along a row.
        row_ids: int64[n] for each table, local, any order, each 0 to rows - 1.
        states: Of each table, any number: `[rows, width]` or `[rows]`, any type. Identities are one more column.
        out: uint8[m], contiguous, its address a multiple of 64, m as `layout_of` says or more. Bytes between columns
            stay as they are. On the tables' device; or, of tables on a GPU, in pinned memory of the host, which its
            kernel writes to directly: to be kept, and not to be read, before an event recorded behind this call.
        row_offsets: Added to each table's ids in the buffer, ≥ 0; None adds nothing.

    Returns:
        Where each table lies, as `layout_of` says.

    Raises:
        IndexError: On the CPU, an id is no row of its table; the buffer's content is undefined. On a GPU this stops the
            kernel: the next synchronization raises.
        ValueError: Devices, types, shapes or layouts are others, or the buffer is too small.
    """
    sources = [_as_rows(source) for table, others in zip(tables, states, strict=True) for source in (table, *others)]
    counts = [1 + len(others) for others in states]
    offsets = [0] * len(tables) if row_offsets is None else list(row_offsets)
    packed, size_bytes = layout_of(tables, [ids.numel() for ids in row_ids], states)
    _check_packing(sources, row_ids, out, size_bytes)
    first = 0
    for count, ids in zip(counts, row_ids, strict=True):
        rows = {source.shape[0] for source in sources[first : first + count]}
        if len(rows) > 1:
            raise ValueError(f"weights and states of one table have {sorted(rows)} rows")
        _check_row_ids(ids)
        first += count
    if tables:
        _pack_rows(sources, list(row_ids), counts, offsets, out)
    return packed


def unpack_rows(out_table: Tensor, row_ids: Tensor, packed: Tensor) -> None:
    """Write packed rows into a table.

    Args:
        out_table: `[rows, dim]`, any type, contiguous along a row; changed.
        row_ids: int64[n], each 0 to rows - 1, each once: of rows that are named twice either may stay.
        packed: `[n, dim]`, of the table's type, contiguous.

    Raises:
        IndexError: On the CPU, an id is no row; some rows may have been written. On a GPU this stops the kernel.
        ValueError: Devices, types, shapes or layouts are others.
    """
    _check_row_ids(row_ids)
    if packed.shape != (row_ids.numel(), *out_table.shape[1:]) or packed.dtype != out_table.dtype:
        raise ValueError(
            f"{packed.dtype}{list(packed.shape)} are not {row_ids.numel()} rows of "
            f"{out_table.dtype}{list(out_table.shape)}"
        )
    if not packed.is_contiguous() or len({out_table.device, row_ids.device, packed.device}) > 1:
        raise ValueError("packed rows have to be contiguous, and on the device of the table and of the row ids")
    _unpack_rows(_as_rows(out_table), row_ids, packed.view(row_ids.numel(), math.prod(packed.shape[1:])))


def pack_rows_reference(
    tables: Sequence[Tensor],
    row_ids: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    out: Tensor,
    *,
    row_offsets: Sequence[int] | None = None,
) -> list[PackedTable]:
    """Do what `pack_rows` does: the definition."""
    packed, _ = layout_of(tables, [ids.numel() for ids in row_ids], states)
    for number, (place, ids) in enumerate(zip(packed, row_ids, strict=True)):
        columns = [tables[number], *states[number]]
        _write(out, place.row_ids, ids + (row_offsets[number] if row_offsets else 0))
        for column, source in zip(place.columns, columns, strict=True):
            _write(out, column, source[ids])
    return packed


def unpack_rows_reference(out_table: Tensor, row_ids: Tensor, packed: Tensor) -> None:
    """Do what `unpack_rows` does: the definition."""
    out_table[row_ids] = packed


def launch_pack_rows(
    launcher: Launcher, sources: list[Tensor], row_ids: list[Tensor], counts: list[int], offsets: list[int], out: Tensor
) -> None:
    """Do what `pack_rows` does, with its kernel: one copy to the device of what is to be done, and one launch."""
    jobs: list[list[int]] = []
    num_tiles = first = 0
    at = out.data_ptr()
    for ids, count, offset in zip(row_ids, counts, offsets, strict=True):
        its_sources = sources[first : first + count]
        first += count
        for source in (None, *its_sources):
            row_bytes = 8 if source is None else _row_bytes(source)
            address, stride, word_bytes = 0, 0, 0
            if source is not None:
                address, stride = source.data_ptr(), source.stride(0) * source.element_size()
                word_bytes = word_bytes_of(address, stride, row_bytes)
            size_bytes = ids.numel() * row_bytes
            rows = its_sources[0].shape[0]
            if size_bytes:
                jobs.append(
                    [num_tiles, address, rows, stride, ids.data_ptr(), ids.numel(), row_bytes, at, word_bytes, offset]
                )
            num_tiles += -(-size_bytes // _TILE_BYTES)
            at += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    # Not the buffer's device: that may be pinned memory, whose addresses on the host are a GPU's too.
    told = to_device(torch.tensor(jobs, dtype=torch.int64), row_ids[0].device)
    launcher.launch("pack_rows_kernel", num_tiles, _PACK_THREADS, told, len(jobs))


def launch_planned_packing(launcher: Launcher, columns: Tensor, num_columns: int, out_bytes: int) -> None:
    """Pack what a kernel has planned: columns whose tiles are at most all of the buffer's, and one more each.

    Args:
        launcher: Of the family `row_packing`.
        columns: int64[`PACKED_COLUMN_WORDS` × num_columns] on the device: a `PackedColumn` each.
        num_columns: How many.
        out_bytes: Of the buffer.
    """
    num_tiles = -(-out_bytes // _TILE_BYTES) + num_columns
    launcher.launch("pack_rows_kernel", num_tiles, _PACK_THREADS, columns, num_columns)


def launch_unpack_rows(launcher: Launcher, out_table: Tensor, row_ids: Tensor, packed: Tensor) -> None:
    """Do what `unpack_rows` does, with its kernel."""
    row_bytes, stride = _row_bytes(packed), out_table.stride(0) * out_table.element_size()
    word_bytes = word_bytes_of(out_table.data_ptr() | packed.data_ptr(), stride, row_bytes)
    launcher.launch(
        "unpack_rows_kernel",
        num_blocks(packed.numel() * packed.element_size() // word_bytes, _UNPACK_THREADS),
        _UNPACK_THREADS,
        out_table,
        out_table.shape[0],
        stride,
        row_ids,
        row_ids.numel(),
        row_bytes,
        packed,
        word_bytes,
    )


@torch.library.custom_op("headrace::pack_rows", mutates_args={"out"})
def _pack_rows(
    sources: list[Tensor], row_ids: list[Tensor], counts: list[int], offsets: list[int], out: Tensor
) -> None:
    # Here and not with the other checks, because a traced tensor has no address.
    if out.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(f"the buffer's address is no multiple of {ALIGNMENT_BYTES}")
    device = row_ids[0].device
    launcher = None if device.type == "cpu" else launcher_for("pack_rows", "row_packing", device)
    if launcher is not None:
        return launch_pack_rows(launcher, sources, row_ids, counts, offsets, out)
    is_beside = out.device == device  # else it is pinned memory, to which torch gathers nothing
    at = first = 0
    for ids, count, offset in zip(row_ids, counts, offsets, strict=True):
        for source in (None, *sources[first : first + count]):
            dtype, width = (torch.int64, 1) if source is None else (source.dtype, source.shape[1])
            size_bytes = ids.numel() * width * dtype.itemsize
            place = out[at : at + size_bytes].view(dtype).view(ids.numel(), width)
            if not is_beside:
                found = (ids + offset).unsqueeze(1) if source is None else source.index_select(0, ids)
                place.copy_(found, non_blocking=True)
            elif source is None:
                torch.add(ids, offset, out=place.view(-1))
            else:
                torch.index_select(source, 0, ids, out=place)
            at += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        first += count
    return None


@_pack_rows.register_fake
def _pack_rows_fake(
    sources: list[Tensor], row_ids: list[Tensor], counts: list[int], offsets: list[int], out: Tensor
) -> None:
    return None


@torch.library.custom_op("headrace::unpack_rows", mutates_args={"out_table"})
def _unpack_rows(out_table: Tensor, row_ids: Tensor, packed: Tensor) -> None:
    if out_table.device.type == "cpu":
        return _unpack_on_cpu(out_table, row_ids, packed)
    launcher = launcher_for("unpack_rows", "row_packing", out_table.device)
    if launcher is None:
        return unpack_rows_reference(out_table, row_ids, packed)
    return launch_unpack_rows(launcher, out_table, row_ids, packed)


@_unpack_rows.register_fake
def _unpack_rows_fake(out_table: Tensor, row_ids: Tensor, packed: Tensor) -> None:
    return None


def _unpack_on_cpu(out_table: Tensor, row_ids: Tensor, packed: Tensor) -> None:
    ids = row_ids.numpy()
    if ids.size and ids.min() < 0:  # numpy would count from the end
        raise IndexError(f"row {ids.min()} is negative")
    if packed.numel():
        # As elements of a row's length: numpy then copies whole rows.
        _whole_rows(out_table)[ids] = _whole_rows(packed)


def _whole_rows(rows: Tensor) -> npt.NDArray[np.void]:
    """Return `[n, width]` as n elements of a row's bytes, a view."""
    data = rows.view(torch.uint8).numpy()
    whole: npt.NDArray[np.void] = data.view(f"V{data.shape[1]}")[:, 0]
    return whole


def _check_packing(sources: list[Tensor], row_ids: Sequence[Tensor], out: Tensor, size_bytes: int) -> None:
    if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous() or out.numel() < size_bytes:
        raise ValueError(f"out is {out.dtype}{list(out.shape)}: contiguous uint8[{size_bytes}] or more is needed")
    if size_bytes > MAX_PACKED_BYTES:
        raise ValueError(f"{size_bytes} bytes are more than the {MAX_PACKED_BYTES} of the largest buffer")
    devices = {tensor.device for tensor in (*sources, *row_ids)}
    if len(devices) == 1 and out.device not in devices and out.is_pinned():
        return
    devices.add(out.device)
    if len(devices) > 1:
        raise ValueError(
            f"tensors are on several devices: {', '.join(sorted(map(str, devices)))} (only out may be apart, in pinned "
            f"memory of the host)"
        )


def _check_row_ids(row_ids: Tensor) -> None:
    if row_ids.dtype != torch.int64 or row_ids.dim() != 1 or not row_ids.is_contiguous():
        raise ValueError(f"row_ids is {row_ids.dtype}{list(row_ids.shape)}: contiguous int64[n] is needed")


def _as_rows(source: Tensor) -> Tensor:
    """Return `[rows, width]`, a view."""
    source = source.detach()
    rows = source.unsqueeze(1) if source.dim() == 1 else source
    if rows.dim() != 2 or (rows.shape[1] > 1 and rows.stride(1) != 1):
        raise ValueError(f"{list(source.shape)} with strides {source.stride()}: rows have to be contiguous")
    return rows


def _row_bytes(source: Tensor) -> int:
    return math.prod(source.shape[1:]) * source.element_size()


def word_bytes_of(address: int, stride: int, row_bytes: int) -> int:
    """Return the longest access, a power of two up to 16, that fits an address, and rows of such lengths."""
    return math.gcd(_UNIT_BYTES, address, stride, row_bytes)


def _write(out: Tensor, place: PackedColumn, values: Tensor) -> None:
    out[place.offset : place.end] = values.contiguous().flatten().view(torch.uint8)


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Return numbers of the CPU on the device; on a GPU without waiting for it.

    Raises:
        RuntimeError: A CUDA graph is being captured. Its replays would copy what the memory on the host holds by then.
    """
    if device.type == "cpu":
        return numbers
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a copy from the host, which this call needs, cannot be captured in a CUDA graph: call it outside"
        )
    # Pinned memory is not used again before the copy is done: torch's allocator sees to that.
    return numbers.pin_memory().to(device, non_blocking=True)
