"""Packing of many tables' rows, ids and states into one buffer in the wire's columns; and writing rows back.

A packed table is its row ids (int64, global), then its columns, weights first. Every column is contiguous and begins at
a multiple of 64 bytes, as `TableDelta` carries them and staging buffers hold them. Tables follow one another. On a GPU
one launch packs all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.kernels.runtime.cuda_module import Launcher, num_blocks
from headrace.kernels.runtime.dispatch import check_vector, implementation_of

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
"""Alignment of columns, as in the streamer's staging buffers."""

MAX_PACKED_BYTES = 2**34
"""Largest packed buffer: kernels count its rows (8 bytes or more) and its units of 16 bytes in 32 bits."""

PACKED_COLUMN_WORDS = 10
"""Size of a `PackedColumn` in packed_column.cuh, in words of 64 bits."""

# As in packed_column.cuh.
_PACK_THREADS = 256
_UNIT_BYTES = 16
_TILE_BYTES = 1024 * _UNIT_BYTES
_UNPACK_THREADS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedColumn:
    """The place of one column in a packed buffer: `num_rows` rows of `row_bytes` each from the byte `offset` on."""

    offset: int
    num_rows: int
    row_bytes: int

    @property
    def end(self) -> int:
        """First byte behind the column."""
        return self.offset + self.num_rows * self.row_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTable:
    """The places of one table's ids, and of its weights and states in their order, in a packed buffer."""

    row_ids: PackedColumn
    columns: tuple[PackedColumn, ...]


def layout_of(
    tables: Sequence[Tensor], num_rows: Sequence[int], states: Sequence[Sequence[Tensor]]
) -> tuple[list[PackedTable], int]:
    """Return (place of each table, bytes of the buffer) for the arguments of `pack_rows` and each table's rows."""
    at = 0

    def carve(rows: int, row_bytes: int) -> PackedColumn:
        nonlocal at
        column = PackedColumn(offset=at, num_rows=rows, row_bytes=row_bytes)
        at = _aligned(column.end)
        return column

    packed = []
    for weights, rows, others in zip(tables, num_rows, states, strict=True):
        ids = carve(rows, 8)
        columns = tuple(carve(rows, row_bytes_of(source)) for source in (weights, *others))
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
        tables: Weights of each table: `[rows, dim]`, any type, contiguous along a row.
        row_ids: int64[n] per table, local, any order, each 0 to rows - 1.
        states: Any number per table: `[rows, width]` or `[rows]`, any type. Identities are one more column.
        out: uint8[m], contiguous, at an address divisible by 64, with m ≥ the size by `layout_of`. Bytes between
            columns stay as they are. It is on the tables' device, or, for tables on a GPU, in the host's pinned memory:
            the kernel writes there directly, so keep it, and do not read it, until an event recorded after this call.
        row_offsets: Added to each table's ids in the buffer, ≥ 0; None adds nothing.

    Returns:
        The place of each table, as of `layout_of`.

    Raises:
        IndexError: On the CPU, an id is not a row of its table; the buffer's content is undefined. On a GPU this stops
            the kernel: the next synchronization raises.
    """
    sources = [_as_rows(source) for table, others in zip(tables, states, strict=True) for source in (table, *others)]
    counts = [1 + len(others) for others in states]
    offsets = [0] * len(tables) if row_offsets is None else list(row_offsets)
    packed, size_bytes = layout_of(tables, [ids.numel() for ids in row_ids], states)
    _check_packing(sources, row_ids, out, size_bytes)
    for table, others, ids in zip(tables, states, row_ids, strict=True):
        rows = {source.shape[0] for source in (table, *others)}
        if len(rows) > 1:
            raise ValueError(f"weights and states of one table have {sorted(rows)} rows")
        check_vector("row_ids", ids, torch.int64)
    if tables:
        _pack_rows(sources, list(row_ids), counts, offsets, out)
    return packed


def unpack_rows(out_table: Tensor, row_ids: Tensor, packed: Tensor) -> None:
    """Write packed rows into a table.

    Args:
        out_table: `[rows, dim]`, any type, contiguous along a row; changed.
        row_ids: int64[n], each 0 to rows - 1, each once: of repeated rows either may stay.
        packed: `[n, dim]`, of the table's type, contiguous.

    Raises:
        IndexError: On the CPU, an id is not a row; some rows may have been written. On a GPU this stops the kernel.
    """
    check_vector("row_ids", row_ids, torch.int64)
    if packed.shape != (row_ids.numel(), *out_table.shape[1:]) or packed.dtype != out_table.dtype:
        rows = f"{row_ids.numel()} rows of {out_table.dtype}{list(out_table.shape)}"
        raise ValueError(f"{packed.dtype}{list(packed.shape)} are not {rows}")
    if not packed.is_contiguous() or len({out_table.device, row_ids.device, packed.device}) > 1:
        raise ValueError("packed rows must be contiguous, and on the device of the table and of the row ids")
    _unpack_rows(_as_rows(out_table), row_ids, packed.view(row_ids.numel(), math.prod(packed.shape[1:])))


def pack_rows_reference(
    tables: Sequence[Tensor],
    row_ids: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    out: Tensor,
    *,
    row_offsets: Sequence[int] | None = None,
) -> list[PackedTable]:
    """Define `pack_rows` in torch's operations."""
    packed, _ = layout_of(tables, [ids.numel() for ids in row_ids], states)
    for number, (place, ids) in enumerate(zip(packed, row_ids, strict=True)):
        columns = [tables[number], *states[number]]
        _write(out, place.row_ids, ids + (row_offsets[number] if row_offsets else 0))
        for column, source in zip(place.columns, columns, strict=True):
            _write(out, column, source[ids])
    return packed


def unpack_rows_reference(out_table: Tensor, row_ids: Tensor, packed: Tensor) -> None:
    """Define `unpack_rows` in torch's operations."""
    out_table[row_ids] = packed


def launch_pack_rows(
    launcher: Launcher, sources: list[Tensor], row_ids: list[Tensor], counts: list[int], offsets: list[int], out: Tensor
) -> None:
    jobs: list[list[int]] = []
    num_tiles, start = 0, out.data_ptr()
    for ids, offset, source, num_rows, row_bytes, at in _columns_of(sources, row_ids, counts, offsets):
        address, stride, word_bytes = 0, 0, 0
        if source is not None:
            address, stride = source.data_ptr(), source.stride(0) * source.element_size()
            word_bytes = word_bytes_of(address, stride, row_bytes)
        size_bytes = ids.numel() * row_bytes
        if size_bytes:
            of_source, of_ids = (address, num_rows, stride), (ids.data_ptr(), ids.numel())
            jobs.append([num_tiles, *of_source, *of_ids, row_bytes, start + at, word_bytes, offset])
        num_tiles += -(-size_bytes // _TILE_BYTES)
    # The buffer may be pinned memory, whose host addresses are also valid on the GPU; so the ids tell the device.
    job_list = to_device(torch.tensor(jobs, dtype=torch.int64, device="cpu"), row_ids[0].device)
    launcher.launch("pack_rows_kernel", num_tiles, _PACK_THREADS, job_list, len(jobs))


def launch_planned_packing(launcher: Launcher, columns: Tensor, num_columns: int, out_bytes: int) -> None:
    # An upper bound: the buffer's tiles, and one partial tile per column.
    num_tiles = -(-out_bytes // _TILE_BYTES) + num_columns
    launcher.launch("pack_rows_kernel", num_tiles, _PACK_THREADS, columns, num_columns)


def launch_unpack_rows(launcher: Launcher, out_table: Tensor, row_ids: Tensor, packed: Tensor) -> None:
    row_bytes, stride = row_bytes_of(packed), out_table.stride(0) * out_table.element_size()
    word_bytes = word_bytes_of(out_table.data_ptr() | packed.data_ptr(), stride, row_bytes)
    blocks = num_blocks(packed.numel() * packed.element_size() // word_bytes, _UNPACK_THREADS)
    arguments = (out_table, out_table.shape[0], stride, row_ids, row_ids.numel(), row_bytes, packed, word_bytes)
    launcher.launch("unpack_rows_kernel", blocks, _UNPACK_THREADS, *arguments)


@torch.library.custom_op("headrace::pack_rows", mutates_args={"out"})
def _pack_rows(
    sources: list[Tensor], row_ids: list[Tensor], counts: list[int], offsets: list[int], out: Tensor
) -> None:
    # Checked here, because a traced tensor has no address.
    if out.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(f"the buffer's address is no multiple of {ALIGNMENT_BYTES}")
    ways = _pack_by_torch, launch_pack_rows, _pack_by_torch
    run = implementation_of("pack_rows", "row_packing", row_ids[0].device, *ways)
    run(sources, row_ids, counts, offsets, out)


@torch.library.custom_op("headrace::unpack_rows", mutates_args={"out_table"})
def _unpack_rows(out_table: Tensor, row_ids: Tensor, packed: Tensor) -> None:
    ways = _unpack_on_cpu, launch_unpack_rows, unpack_rows_reference
    run = implementation_of("unpack_rows", "row_packing", out_table.device, *ways)
    run(out_table, row_ids, packed)


for _operator in (_pack_rows, _unpack_rows):
    _operator.register_fake(lambda *args: None)


def _pack_by_torch(
    sources: list[Tensor], row_ids: list[Tensor], counts: list[int], offsets: list[int], out: Tensor
) -> None:
    is_on_device = out.device == row_ids[0].device  # else it is pinned memory, into which torch cannot gather
    for ids, offset, source, _, row_bytes, at in _columns_of(sources, row_ids, counts, offsets):
        dtype = torch.int64 if source is None else source.dtype
        place = out[at : at + ids.numel() * row_bytes].view(dtype).view(ids.numel(), row_bytes // dtype.itemsize)
        if not is_on_device:
            found = (ids + offset).unsqueeze(1) if source is None else source.index_select(0, ids)
            place.copy_(found, non_blocking=True)
        elif source is None:
            torch.add(ids, offset, out=place.view(-1))
        else:
            torch.index_select(source, 0, ids, out=place)


def _columns_of(
    sources: list[Tensor], row_ids: list[Tensor], counts: list[int], offsets: list[int]
) -> Iterator[tuple[Tensor, int, Tensor | None, int, int, int]]:
    """Yield (ids, offset, source, the table's rows, row bytes, first byte) of each column; the ids have no source."""
    at = first = 0
    for ids, count, offset in zip(row_ids, counts, offsets, strict=True):
        its_sources = sources[first : first + count]
        first += count
        for source in (None, *its_sources):
            row_bytes = 8 if source is None else row_bytes_of(source)
            yield ids, offset, source, its_sources[0].shape[0], row_bytes, at
            at += _aligned(ids.numel() * row_bytes)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _unpack_on_cpu(out_table: Tensor, row_ids: Tensor, packed: Tensor) -> None:
    ids = row_ids.numpy()
    if ids.size and ids.min() < 0:  # numpy would count from the end
        raise IndexError(f"row {ids.min()} is negative")
    if packed.numel():
        # As elements of a row's length, so that numpy copies whole rows.
        _whole_rows(out_table)[ids] = _whole_rows(packed)


def _whole_rows(rows: Tensor) -> npt.NDArray[np.void]:
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
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"tensors are on several devices: {names} (only out may differ, in pinned host memory)")


def _as_rows(source: Tensor) -> Tensor:
    source = source.detach()
    rows = source.unsqueeze(1) if source.dim() == 1 else source
    if rows.dim() != 2 or (rows.shape[1] > 1 and rows.stride(1) != 1):
        raise ValueError(f"{list(source.shape)} with strides {source.stride()}: rows must be contiguous")
    return rows


def row_bytes_of(source: Tensor) -> int:
    """Return the bytes of one row of a table or state."""
    return math.prod(source.shape[1:]) * source.element_size()


def word_bytes_of(address: int, stride: int, row_bytes: int) -> int:
    """Return the longest access, a power of two up to 16, that an address, a stride and a row's bytes allow."""
    return math.gcd(_UNIT_BYTES, address, stride, row_bytes)


def _write(out: Tensor, place: PackedColumn, values: Tensor) -> None:
    out[place.offset : place.end] = values.contiguous().flatten().view(torch.uint8)


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without waiting for it.

    Raises:
        RuntimeError: A CUDA graph is being captured. Its replays would copy whatever the host memory holds by then.
    """
    if device.type == "cpu":
        return numbers
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a copy from the host cannot be captured in a CUDA graph: call this operation outside")
    # torch's allocator does not reuse the pinned memory before the copy is done.
    return numbers.pin_memory().to(device, non_blocking=True)
