"""Sets of dirty rows on the host: a bitmap (`DirtyRows`), or ids where a bitmap would be too large (`DirtyIds`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import is_not

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "VIRTUAL_ROWS",
    "DirtyIds",
    "DirtyRows",
    "DirtySet",
    "JointMarks",
    "bitmap_bytes",
    "dirty_set",
    "distinct",
    "ids_of",
    "set_bits",
]

VIRTUAL_ROWS = 2**63
"""`num_rows` of a set that accepts any id."""

_WORD_BITS = 64
_BLOCK_WORDS = 64
_BLOCK_BYTES = 8 * _BLOCK_WORDS
_BLOCK_ROWS = _WORD_BITS * _BLOCK_WORDS
_BLOCK_SHIFT = _BLOCK_ROWS.bit_length() - 1
# `take` looks at this many blocks in one pass, 2 MiB of bitmap, so taking part of a wholly dirty table costs in
# proportion to that part.
_PASS_BLOCKS = 4096
# Length of the unsorted list while the set holds few ids: 64 KiB.
_MIN_LISTED = 8192

_Words = npt.NDArray[np.uint64]
_Ids = npt.NDArray[np.int64]
_Note = Callable[[torch.Tensor], None]

# The bit of each row of a word.
_BITS: _Words = np.left_shift(np.uint64(1), np.arange(_WORD_BITS, dtype=np.uint64))


class DirtyRows:
    """The set of dirty rows of one table, by local row id: a bitmap of one bit per row.

    A table is large and a step touches little of it. A summary of one byte per block of 4096 rows says where the bitmap
    has bits, so `take` costs in proportion to the dirty blocks, never to the table. Not thread-safe: the training
    thread marks and takes.

    Attributes:
        num_rows: Rows of the table, ≥ 0.
    """

    def __init__(self, num_rows: int) -> None:
        """Start with no row dirty."""
        _check_size(num_rows)
        self.num_rows = num_rows
        num_blocks = -(-num_rows // _BLOCK_ROWS)
        # Little-endian words, so that the bytes of a word are its rows in ascending order.
        self._words: _Words = np.zeros((num_blocks, _BLOCK_WORDS), dtype="<u8")
        # Invariant: true exactly where the block has a bit set.
        self._has_rows: npt.NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)

    def mark(self, row_ids: torch.Tensor) -> None:
        """Add rows; negative ids are skipped, and ids may repeat.

        Args:
            row_ids: int32 or int64, any shape, order and device; not kept. On a GPU this waits for the device.

        Raises:
            IndexError: An id is not below `num_rows`; nothing is marked.
        """
        ids = ids_of(row_ids, self.num_rows)
        if ids.size:
            set_bits(self._words.reshape(-1), ids)
            self._has_rows[ids >> _BLOCK_SHIFT] = True

    def mark_all(self) -> None:
        """Add every row."""
        if not self.num_rows:
            return
        self._words.fill(np.uint64(2**64 - 1))
        self._has_rows.fill(True)
        words = self._words.reshape(-1)
        first_unused, used_bits = divmod(self.num_rows, _WORD_BITS)
        words[first_unused + bool(used_bits) :] = 0
        if used_bits:
            words[first_unused] = np.uint64((1 << used_bits) - 1)

    def add(self, other: DirtyRows) -> None:
        """Add every row of another set of the same table; costs in proportion to its dirty blocks."""
        _check_same_table(self, other)
        blocks = np.flatnonzero(other._has_rows)
        self._words[blocks] |= other._words[blocks]
        self._has_rows[blocks] = True

    def discard(self, row_ids: torch.Tensor) -> None:
        """Remove rows, dirty or not; arguments and errors as of `mark`."""
        ids = ids_of(row_ids, self.num_rows)
        words = ids >> 6
        np.bitwise_and.at(self._words.reshape(-1), words, ~_BITS[ids & 63])
        blocks = distinct(words >> 6)
        self._has_rows[blocks] = self._words[blocks].any(axis=1)

    def contains(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return which rows are dirty, bool[n] on the CPU, for int64[n], each 0 to `num_rows - 1`."""
        ids = row_ids.cpu().numpy()
        return torch.from_numpy((self._words.reshape(-1)[ids >> 6] & _BITS[ids & 63]) != 0)

    def parts(self) -> Iterator[torch.Tensor]:
        """Yield the dirty rows without removing them: int64 on the CPU, ascending. Do not mark rows meanwhile."""
        blocks = np.flatnonzero(self._has_rows)
        for first in range(0, blocks.size, _PASS_BLOCKS):
            some = blocks[first : first + _PASS_BLOCKS]
            yield torch.from_numpy(_row_ids(self._words[some], some))

    def clear(self) -> None:
        """Remove every row; costs in proportion to the dirty blocks."""
        blocks = np.flatnonzero(self._has_rows)
        self._words[blocks] = 0
        self._has_rows[blocks] = False

    def take(self, max_rows: int | None = None, *, first_row: int = 0, note: _Note | None = None) -> torch.Tensor:
        """Remove and return the lowest dirty rows from `first_row` on.

        Args:
            max_rows: Upper limit, ≥ 0; None takes all.
            first_row: Rows below it stay, ≥ 0.
            note: Called with the rows before they are removed, in one or several ascending parts. A caller that is
                interrupted (Ctrl-C) can mark them again: every row is either still dirty or noted.

        Returns:
            int64[n] on the CPU, ascending, unique, contiguous, owned by the caller.
        """
        wanted = self.num_rows if max_rows is None else max_rows
        note = note or (lambda row_ids: None)
        parts: list[_Ids] = []
        first_block = first_row // _BLOCK_ROWS
        blocks = np.flatnonzero(self._has_rows[first_block:]) + first_block
        for first in range(0, blocks.size, _PASS_BLOCKS):
            if wanted <= 0:
                break
            part = self._take_from(blocks[first : first + _PASS_BLOCKS], wanted, first_row, note)
            wanted -= part.size
            parts.append(part)
        if len(parts) == 1:
            return torch.from_numpy(parts[0])
        return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, dtype=np.int64))

    def _take_from(self, blocks: npt.NDArray[np.intp], max_rows: int, first_row: int, note: _Note) -> _Ids:
        words = self._words[blocks]
        below = _hide_below(words[0], first_row) if first_row and blocks[0] == first_row // _BLOCK_ROWS else None
        num_rows_up_to = np.bitwise_count(words).sum(axis=1, dtype=np.int64).cumsum()
        num_blocks = min(int(np.searchsorted(num_rows_up_to, max_rows)) + 1, blocks.size)
        blocks, words = blocks[:num_blocks], words[:num_blocks]
        keeps_some = num_rows_up_to[num_blocks - 1] > max_rows
        ids = _row_ids(words, blocks)[:max_rows]
        note(torch.from_numpy(ids))
        if not keeps_some and below is None:
            self._words[blocks] = 0
            self._has_rows[blocks] = False
            return ids
        last = words[-1].copy()
        words[:] = 0
        if keeps_some:  # the last block keeps its rows above the last one taken
            word, bit = divmod(int(ids[-1]) % _BLOCK_ROWS, _WORD_BITS)
            last[:word] = 0
            last[word] &= np.uint64(2**64 - (2 << bit)) if bit < 63 else np.uint64(0)
            words[-1] = last
        if below is not None:
            words[0] |= below
        has_rows = words[[0, -1]].any(axis=1)
        # Nothing else between these statements: an interrupt there could hide rows that stay.
        self._words[blocks] = words
        self._has_rows[blocks] = False
        self._has_rows[blocks[[0, -1]]] = has_rows
        return ids

    @property
    def is_empty(self) -> bool:
        """Whether no row is dirty."""
        return not self._has_rows.any()

    @property
    def count(self) -> int:
        """Number of dirty rows; costs in proportion to the dirty blocks.

        Thread: any; rows that are marked meanwhile may or may not count.
        """
        blocks = np.flatnonzero(self._has_rows)
        return sum(
            int(np.bitwise_count(self._words[blocks[first : first + _PASS_BLOCKS]]).sum(dtype=np.int64))
            for first in range(0, blocks.size, _PASS_BLOCKS)
        )

    @property
    def size_bytes(self) -> int:
        """Memory of the set."""
        return self._words.nbytes + self._has_rows.nbytes


class JointMarks:
    """Marks rows of many tables in one pass; a table's own pass costs some 20 µs, however few its rows.

    It moves the bitmaps of the tables' sets next to each other. The sets stay what they are. Not thread-safe, like
    them.
    """

    def __init__(self) -> None:
        """Begin without sets."""
        self._sets: list[DirtyRows] = []
        self._words: _Words = np.empty(0, "<u8")
        self._has_rows: npt.NDArray[np.bool_] = np.empty(0, np.bool_)
        self._num_rows: npt.NDArray[np.uint64] = np.empty(0, np.uint64)  # of each set
        self._first_ids: _Ids = np.empty(0, np.int64)  # what its row 0 is in the joint bitmap

    def mark(self, row_ids: torch.Tensor, sets: list[DirtyRows], starts: list[int]) -> None:
        """Add rows to each set, as `DirtyRows.mark`.

        Args:
            row_ids: int32 or int64[n], local ids.
            sets: A set may be there several times.
            starts: Where the ids of each set begin, ascending, and the end of the last.

        Raises:
            IndexError: An id is not below its set's `num_rows`; no row of this set or a later one is marked.
        """
        if len(sets) != len(self._sets) or any(map(is_not, sets, self._sets)):
            self._join(sets)
        at = np.array(starts)
        lengths = np.diff(at)
        is_used = lengths > 0
        ids = _as_int64(row_ids[starts[0] : starts[-1]])
        if not ids.size:
            return
        # As unsigned numbers, negative ids are the highest.
        highest = np.maximum.reduceat(ids.view(np.uint64), (at - starts[0])[:-1][is_used])
        if (highest >= self._num_rows[is_used]).any():
            for each, start, end in zip(sets, starts[:-1], starts[1:], strict=True):
                each.mark(row_ids[start:end])
            return
        ids = ids + np.repeat(self._first_ids, lengths)
        set_bits(self._words, ids)
        self._has_rows[ids >> _BLOCK_SHIFT] = True

    def _join(self, sets: list[DirtyRows]) -> None:
        distinct_sets = list(dict.fromkeys(sets))
        ends = np.cumsum([each._has_rows.size for each in distinct_sets])
        words = np.concatenate([each._words for each in distinct_sets])
        has_rows = np.concatenate([each._has_rows for each in distinct_sets])
        first_of = {}
        for each, end in zip(distinct_sets, ends.tolist(), strict=True):
            blocks = slice(end - each._has_rows.size, end)
            # The same rows: an interrupt in between loses none.
            each._words, each._has_rows = words[blocks], has_rows[blocks]
            first_of[each] = blocks.start * _BLOCK_ROWS
        self._words, self._has_rows = words.reshape(-1), has_rows
        self._num_rows = np.array([each.num_rows for each in sets], np.uint64)
        self._first_ids = np.array([first_of[each] for each in sets], np.int64)
        self._sets = list(sets)


class DirtyIds:
    """The set of dirty rows of one table, by id, for virtual ids and for tables whose bitmap would be too large.

    It has the methods of `DirtyRows` except `mark_all`. Ids are kept sorted; new ones go to an unsorted list, which is
    at most as long and is sorted in when full. Sorting many ids at once takes numpy about 10 ns each; an
    open-addressing hash table made of numpy operations takes more than 100. The set takes at most 16 bytes per id plus
    64 KiB, three times that while it sorts. Not thread-safe: the training thread marks and takes.

    Attributes:
        num_rows: Ids are below it, ≥ 0; `VIRTUAL_ROWS` accepts any.
    """

    def __init__(self, num_rows: int = VIRTUAL_ROWS) -> None:
        """Start with no id dirty."""
        _check_size(num_rows)
        self.num_rows = num_rows
        self._sorted: _Ids = np.empty(0, np.int64)
        # The first `_num_listed` are ids marked since, in any order; they may repeat, and may be in `_sorted` too.
        self._list: _Ids = np.empty(0, np.int64)
        self._num_listed = 0

    def mark(self, row_ids: torch.Tensor) -> None:
        """Add ids, see `DirtyRows.mark`."""
        ids = ids_of(row_ids, self.num_rows)
        if not ids.size:
            return
        end = self._num_listed + ids.size
        if end > self._list.size:
            self._merge(ids)
        else:
            self._list[self._num_listed : end] = ids
            self._num_listed = end

    def add(self, other: DirtySet) -> None:
        """Add every row of another set of the same table, see `DirtyRows.add`."""
        _check_same_table(self, other)
        for part in other.parts():
            self.mark(part)

    def discard(self, row_ids: torch.Tensor) -> None:
        """Remove ids, see `DirtyRows.discard`; costs in proportion to all dirty ids."""
        ids = ids_of(row_ids, self.num_rows)
        if ids.size and not self.is_empty:
            self._merge()
            self._sorted = self._sorted[~_is_in(self._sorted, distinct(ids))]

    def contains(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return which ids are dirty, bool[n] on the CPU, for int64[n], each ≥ 0."""
        self._merge()
        return torch.from_numpy(_is_in(row_ids.cpu().numpy(), self._sorted))

    def take(self, max_rows: int | None = None, *, first_row: int = 0, note: _Note | None = None) -> torch.Tensor:
        """Remove and return the lowest dirty ids, see `DirtyRows.take`; costs in proportion to all dirty ids."""
        self._merge()
        ids = self._sorted
        first = int(np.searchsorted(ids, first_row))
        end = ids.size if max_rows is None else min(ids.size, first + max_rows)
        # A part is copied: a view would keep the whole memory alive.
        taken = torch.from_numpy(ids if end - first == ids.size else ids[first:end].copy())
        if note is not None:
            note(taken)
        if end - first == ids.size:
            self.clear()
        else:
            self._sorted = np.concatenate((ids[:first], ids[end:]))
        return taken

    def parts(self) -> Iterator[torch.Tensor]:
        """Yield the dirty ids without removing them, see `DirtyRows.parts`."""
        self._merge()
        if self._sorted.size:
            yield torch.from_numpy(self._sorted.copy())

    def clear(self) -> None:
        """Remove every id and free the memory."""
        self._sorted, self._list, self._num_listed = np.empty(0, np.int64), np.empty(0, np.int64), 0

    @property
    def is_empty(self) -> bool:
        """Whether no id is dirty."""
        return not self._num_listed and not self._sorted.size

    @property
    def count(self) -> int:
        """Number of dirty ids, see `DirtyRows.count`; costs in proportion to it."""
        ids = self._sorted
        listed = distinct(self._list[: self._num_listed])
        return int(ids.size + listed.size - _is_in(listed, ids).sum())

    @property
    def size_bytes(self) -> int:
        """Memory of the set."""
        return self._sorted.nbytes + self._list.nbytes

    def _merge(self, more: _Ids | None = None) -> None:
        listed = self._list[: self._num_listed]
        ids = np.sort(listed if more is None else np.concatenate((listed, more)))
        if not ids.size:
            return
        if self._sorted.size:
            ids = np.concatenate((self._sorted, ids))
            ids.sort(kind="stable")  # merges the two sorted halves
        self._sorted = ids[np.concatenate(([True], ids[1:] != ids[:-1]))]
        # With a list as long as the sorted ids, merging costs each id about as much as the sorting itself.
        self._list, self._num_listed = np.empty(max(_MIN_LISTED, self._sorted.size), np.int64), 0


DirtySet = DirtyRows | DirtyIds
"""A set of dirty rows on the host."""


def bitmap_bytes(num_rows: int) -> int:
    """Return the approximate memory of a `DirtyRows` of this many rows."""
    return num_rows // 8


def dirty_set(num_rows: int, *, max_bitmap_bytes: int) -> DirtySet:
    """Return an empty set for a table: a bitmap if it takes at most `max_bitmap_bytes`, else a set of ids."""
    return DirtyRows(num_rows) if bitmap_bytes(num_rows) <= max_bitmap_bytes else DirtyIds(num_rows)


def set_bits(words: _Words, ids: _Ids) -> None:
    """Set the bits of rows, int64[n], each 0 to `64 * w - 1`, in contiguous little-endian words, uint64[w]."""
    octets = words.view(np.uint8)
    places = ids >> 3
    bits = np.left_shift(np.uint8(1), ids.astype(np.uint8) & np.uint8(7))
    octets[places] = octets.take(places) | bits
    # Of rows that share an octet only the last one was written, so each pass sets one more bit of it, at most eight.
    # This takes half the time of `bitwise_or.at`, and needs no sorting.
    while (left := np.flatnonzero((octets.take(places) & bits) == 0)).size:
        places, bits = places.take(left), bits.take(left)
        octets[places] = octets.take(places) | bits


def distinct(ids: _Ids) -> _Ids:
    """Return the distinct numbers of int64[n], ascending."""
    # `np.unique` imports `numpy.ma` at its first call: 1.6 MiB, and many milliseconds of a training step.
    ids = np.sort(ids)
    is_first = np.ones(ids.size, np.bool_)
    is_first[1:] = ids[1:] != ids[:-1]
    return ids[is_first]


def ids_of(row_ids: torch.Tensor, num_rows: int) -> _Ids:
    """Return the ids ≥ 0 of a tensor as int64[n] on the CPU, a view if possible.

    Args:
        row_ids: int32 or int64, any shape, order and device. On a GPU this waits for the device.
        num_rows: All ids are below it; 2⁶³ accepts any.

    Raises:
        IndexError: An id is not below `num_rows`.
    """
    ids = _as_int64(row_ids)
    # As unsigned numbers, negative ids are the highest: one pass finds both kinds.
    if ids.size and ids.view(np.uint64).max() >= num_rows:
        ids = ids[ids >= 0]
        if ids.size and (highest := ids.max()) >= num_rows:
            raise IndexError(f"row {highest} is not below {num_rows}")
    return ids


def _as_int64(row_ids: torch.Tensor) -> _Ids:
    return row_ids.detach().reshape(-1).cpu().numpy().astype(np.int64, copy=False)


def _check_size(num_rows: int) -> None:
    if num_rows < 0:
        raise ValueError(f"num_rows {num_rows} is negative")


def _check_same_table(rows: DirtySet, other: DirtySet) -> None:
    if other.num_rows != rows.num_rows:
        raise ValueError(f"rows of a table of {other.num_rows} cannot be added to one of {rows.num_rows}")


def _hide_below(words: _Words, row: int) -> _Words:
    """Remove the rows below `row` from the words of its block, and return these rows' words."""
    word, bit = divmod(row % _BLOCK_ROWS, _WORD_BITS)
    below: _Words = words.copy()
    below[word] &= np.uint64((1 << bit) - 1)
    below[word + 1 :] = 0
    words ^= below
    return below


def _row_ids(words: _Words, blocks: npt.NDArray[np.intp]) -> _Ids:
    """Return the ids of the bits in `words`, uint64[len(blocks), 64], ascending."""
    # By bytes, not words: with few dirty rows a word has one bit, and 63 zeros would be unpacked with it.
    flat = words.reshape(-1).view(np.uint8)
    where = np.flatnonzero(flat != 0)
    first_ids = blocks[where // _BLOCK_BYTES].astype(np.int64) * _BLOCK_ROWS + (where % _BLOCK_BYTES) * 8
    bits = np.unpackbits(flat[where], bitorder="little").view(np.bool_)
    hits = np.flatnonzero(bits)
    ids: _Ids = first_ids[hits >> 3] + (hits & 7)
    return ids


def _is_in(ids: _Ids, ascending: _Ids) -> npt.NDArray[np.bool_]:
    if not ascending.size:
        return np.zeros(ids.size, np.bool_)
    at = np.minimum(np.searchsorted(ascending, ids), ascending.size - 1)
    is_in: npt.NDArray[np.bool_] = ascending[at] == ids
    return is_in
