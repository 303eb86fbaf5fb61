"""Dirty rows of tables on a device, marked there by kernels without waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from headrace.kernels.dirty_bitmap import make_bitmap, mark_dirty, mark_dirty_features, mark_dirty_tables, take_dirty
from headrace.kernels.dirty_sets import DirtyRows, DirtySet
from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.device.runtime import DeviceRuntime

__all__ = ["DeviceBitmap", "DeviceDirtyRows", "TableDirtySet", "slots_of"]

_WORD_BITS = 64


def slots_of(num_rows: int) -> int:
    """Return the slots of a table: its rows, rounded up to whole words."""
    return -(-num_rows // _WORD_BITS) * _WORD_BITS


class DeviceBitmap:
    """One bitmap of many tables' rows on a device.

    Thread: the training thread's; during `backward()`, the thread that runs it.

    Attributes:
        runtime: The device.
        bits: int64[w] on the device, see `kernels.dirty_bitmap`.
        cursor: int64[1] on the device: the slot at which the next drain begins.
        is_marked: Rows may have been marked since the last drain; known on the host.
        is_captured: Marking was captured in a graph, whose replays mark rows without notice.
    """

    def __init__(self, runtime: DeviceRuntime, num_slots: int = 0) -> None:
        """Begin with `num_slots` clean slots, a multiple of 64."""
        self.runtime = runtime
        self.bits = make_bitmap(num_slots, runtime.device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=runtime.device)
        self.is_marked = False
        self.is_captured = False

    @property
    def num_slots(self) -> int:
        """Number of slots of all tables."""
        return self.bits.numel() * _WORD_BITS

    def grow(self, num_slots: int) -> None:
        """Append slots, a multiple of 64. REQUIRES: no marking was captured, as a graph would keep the old memory."""
        assert not self.is_captured
        # Not `torch.cat`, which would read the bits before queued work has written them.
        before, bits = self.bits, make_bitmap(self.num_slots + num_slots, self.runtime.device)
        self.runtime.enqueue(lambda: bits[: before.numel()].copy_(before))
        self.bits = bits

    def note_mark(self) -> None:
        """Note that rows are marked."""
        self.is_marked = True
        if not self.is_captured and self.runtime.is_capturing():
            self.is_captured = True

    def note_drain(self) -> None:
        """Note that a drain is queued."""
        self.is_marked = self.is_captured

    def mark_features(self, row_ids: Tensor, starts: Tensor, first_slots: Tensor, num_rows: Tensor) -> None:
        """Add rows of many tables, see `kernels.dirty_bitmap.mark_dirty_features`; does not wait."""
        self.note_mark()
        bits = self.bits
        self.runtime.enqueue(lambda: mark_dirty_features(bits, row_ids, starts, first_slots, num_rows))

    def mark_tables(self, marks: Sequence[tuple[DeviceDirtyRows, Tensor]]) -> None:
        """Add rows of many tables of this bitmap in one call, like `DeviceDirtyRows.mark` for each of them."""
        self.note_mark()
        bits = self.bits
        row_ids = [self.runtime.to_device(ids) for _, ids in marks]
        first_slots = [table.first_slot for table, _ in marks]
        num_rows = [table.num_rows for table, _ in marks]
        self.runtime.enqueue(lambda: mark_dirty_tables(bits, row_ids, first_slots, num_rows))


class DeviceDirtyRows:
    """The set of dirty rows of one table, by local row id: a range of a bitmap on a device; see `DirtyRows`.

    `mark`, `mark_all`, `add` and `clear` only queue work. The others wait for the device, so no step calls them.

    Thread: the training thread's; `mark` and its like on the thread of `backward()`.

    Attributes:
        num_rows: Rows of the table, ≥ 0.
        bitmap: The bitmap.
        first_slot: Slot of row 0, a multiple of 64.
    """

    def __init__(self, num_rows: int, bitmap: DeviceBitmap, first_slot: int = 0) -> None:
        """Use a range of a bitmap, with the bits that it has."""
        self.num_rows, self.bitmap, self.first_slot = num_rows, bitmap, first_slot

    @classmethod
    def beside(cls, other: DeviceDirtyRows) -> DeviceDirtyRows:
        """Return another, empty set for the same table, with its own bitmap."""
        return cls(other.num_rows, DeviceBitmap(other.bitmap.runtime, slots_of(other.num_rows)))

    def mark(self, row_ids: Tensor) -> None:
        """Add rows, see `kernels.dirty_bitmap.mark_dirty`; ids on another device are copied, which may wait."""
        self.bitmap.note_mark()
        ids = self._runtime.to_device(row_ids)
        words = self._words
        self._runtime.enqueue(lambda: mark_dirty(words, ids))

    def mark_all(self) -> None:
        """Add every row."""
        self.bitmap.note_mark()
        words, used_bits = self._words, self.num_rows % _WORD_BITS

        def fill() -> None:
            words.fill_(-1)
            if used_bits:
                words[-1:].fill_((1 << used_bits) - 1)

        self._runtime.enqueue(fill)

    def add(self, other: TableDirtySet) -> None:
        """Add every row of another set of the same table."""
        assert other.num_rows == self.num_rows
        if not isinstance(other, DeviceDirtyRows):
            for part in other.parts():
                self.mark(part)
            return
        self.bitmap.note_mark()
        words, others = self._words, other._words
        self._runtime.enqueue(lambda: words.bitwise_or_(others))

    def clear(self) -> None:
        """Remove every row."""
        self._runtime.enqueue(self._words.zero_)

    def discard(self, row_ids: Tensor) -> None:
        """Remove rows, dirty or not; negative ids are skipped. Waits, except for no rows."""
        if not row_ids.numel():
            return
        gone = make_bitmap(slots_of(self.num_rows))
        mark_dirty(gone, self._runtime.read(row_ids))
        kept = self._runtime.to_device(~gone)
        words = self._words
        self._runtime.enqueue(lambda: words.bitwise_and_(kept))

    def contains(self, row_ids: Tensor) -> Tensor:
        """Return which rows are dirty, bool[n] on the CPU, for int64[n] on the CPU. Waits, except for no rows."""
        if not row_ids.numel():
            return torch.empty(0, dtype=torch.bool, device="cpu")
        return (self._read()[row_ids >> 6] >> (row_ids & 63) & 1).bool()

    def take(
        self, max_rows: int | None = None, *, first_row: int = 0, note: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Remove and return the lowest dirty rows from `first_row` on, see `DirtyRows.take`. Waits."""
        ids, _ = take_dirty(self._read())
        ids = ids[ids >= first_row][:max_rows].clone()
        if note is not None:
            note(ids)
        self.discard(ids)
        return ids

    def parts(self) -> Iterator[Tensor]:
        """Yield the dirty rows without removing them: int64 on the CPU, ascending. Waits."""
        ids, _ = take_dirty(self._read())
        if ids.numel():
            yield ids

    def to_host(self) -> DirtyRows:
        """Move the rows to a set on the host, and return it. Waits.

        Raises:
            UnsupportedModelError: Marking was captured in a graph, whose replays would mark rows here unseen; nothing
                is moved.
        """
        if self.bitmap.is_captured:
            raise UnsupportedModelError(
                "a table cannot leave the device pipeline (its rows are evicted, or a state of it was replaced) after "
                "its marking was captured in a CUDA graph: set device_pipeline=False, or train it outside of graphs"
            )
        rows = DirtyRows(self.num_rows)
        rows.mark(self.take())
        return rows

    @property
    def is_empty(self) -> bool:
        """Whether no row is dirty. Waits."""
        return not bool(self._read().any())

    @property
    def count(self) -> int:
        """Number of dirty rows. Waits."""
        return sum(part.numel() for part in self.parts())

    @property
    def size_bytes(self) -> int:
        """Memory on the device."""
        return slots_of(self.num_rows) // 8

    @property
    def _runtime(self) -> DeviceRuntime:
        return self.bitmap.runtime

    @property
    def _words(self) -> Tensor:
        # Looked up each time, because the bitmap grows.
        first = self.first_slot // _WORD_BITS
        return self.bitmap.bits[first : first + slots_of(self.num_rows) // _WORD_BITS]

    def _read(self) -> Tensor:
        return self._runtime.read(self._words)


TableDirtySet = DirtySet | DeviceDirtyRows
"""A set of dirty rows, on the host or on a device."""
