"""Which rows of a table changed since they were last taken: a bitmap of one bit a row.

A table is large and a step touches little of it, so a summary of one byte a block says where the bitmap has to be
looked at: `take` costs in proportion to the dirty blocks, never to the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["DirtyRows", "distinct", "ids_of", "set_bits"]

_WORD_BITS = 64
_BLOCK_WORDS = 64
_BLOCK_BYTES = 8 * _BLOCK_WORDS
_BLOCK_ROWS = _WORD_BITS * _BLOCK_WORDS
_BLOCK_SHIFT = _BLOCK_ROWS.bit_length() - 1
# Blocks looked at in one pass of `take`: 2 MiB of bitmap, so that a part of a table that is dirty all over costs
# what the part costs.
_PASS_BLOCKS = 4096

_Words = npt.NDArray[np.uint64]

# The bit of each row of a word.
_BITS: _Words = np.left_shift(np.uint64(1), np.arange(_WORD_BITS, dtype=np.uint64))


class DirtyRows:
    """The set of changed rows of one table, by local row id.

    Takes `num_rows / 8` bytes, and one byte for every 4096 rows. Not thread-safe: marked and taken on the training
    thread.

    Attributes:
        num_rows: Rows of the table, ≥ 0.
    """

    def __init__(self, num_rows: int) -> None:
        """Start with no row dirty.

        Args:
            num_rows: Rows of the table, ≥ 0.
        """
        if num_rows < 0:
            raise ValueError(f"num_rows {num_rows} is negative")
        self.num_rows = num_rows
        num_blocks = -(-num_rows // _BLOCK_ROWS)
        # Little-endian words, so that the bytes of a word are its rows in ascending order.
        self._words: _Words = np.zeros((num_blocks, _BLOCK_WORDS), dtype="<u8")
        # Invariant: true exactly where the block has a bit set.
        self._has_rows: npt.NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)

    def mark(self, row_ids: torch.Tensor) -> None:
        """Add rows; negative ids are skipped, and a row may be named many times.

        Args:
            row_ids: int32 or int64, any shape, order and device; not kept. On a GPU this waits for the device.

        Raises:
            IndexError: An id is not below `num_rows`; nothing is marked.
        """
        ids = ids_of(row_ids, self.num_rows)
        if not ids.size:
            return
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
        """Add every row of another set, of the same table; costs in proportion to its blocks that have rows.

        Raises:
            ValueError: The other is of a table with another number of rows.
        """
        if other.num_rows != self.num_rows:
            raise ValueError(f"rows of a table of {other.num_rows} cannot be added to one of {self.num_rows}")
        blocks = np.flatnonzero(other._has_rows)
        self._words[blocks] |= other._words[blocks]
        self._has_rows[blocks] = True

    def discard(self, row_ids: torch.Tensor) -> None:
        """Remove rows, dirty or not; negative ids are skipped.

        Args:
            row_ids: As for `mark`.

        Raises:
            IndexError: An id is not below `num_rows`; nothing is removed.
        """
        ids = ids_of(row_ids, self.num_rows)
        words = ids >> 6
        np.bitwise_and.at(self._words.reshape(-1), words, ~_BITS[ids & 63])
        blocks = distinct(words >> 6)
        self._has_rows[blocks] = self._words[blocks].any(axis=1)

    def contains(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return bool[n] on the CPU: which of some rows are dirty.

        Args:
            row_ids: int64[n], each 0 to `num_rows - 1`.
        """
        ids = row_ids.cpu().numpy()
        return torch.from_numpy((self._words.reshape(-1)[ids >> 6] & _BITS[ids & 63]) != 0)

    def parts(self) -> Iterator[torch.Tensor]:
        """Yield the dirty rows, which stay dirty: int64 on the CPU, ascending. Not to be marked meanwhile."""
        blocks = np.flatnonzero(self._has_rows)
        for first in range(0, blocks.size, _PASS_BLOCKS):
            some = blocks[first : first + _PASS_BLOCKS]
            yield torch.from_numpy(_row_ids(self._words[some], some))

    def clear(self) -> None:
        """Remove every row; costs in proportion to the blocks that have some."""
        blocks = np.flatnonzero(self._has_rows)
        self._words[blocks] = 0
        self._has_rows[blocks] = False

    def take(
        self, max_rows: int | None = None, *, first_row: int = 0, note: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """Remove and return the lowest dirty rows from `first_row` on.

        Args:
            max_rows: At most so many, ≥ 0; None takes all.
            first_row: Rows below it stay, ≥ 0.
            note: Called with the rows before they are removed, in one part or several that ascend, so that whoever is
                interrupted (Ctrl-C) can mark them again: no row is neither here nor noted.

        Returns:
            int64[n] on the CPU, ascending, unique, contiguous, owned by the caller.
        """
        wanted = self.num_rows if max_rows is None else max_rows
        note = note or (lambda row_ids: None)
        parts: list[npt.NDArray[np.int64]] = []
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

    def _take_from(
        self, blocks: npt.NDArray[np.intp], max_rows: int, first_row: int, note: Callable[[torch.Tensor], None]
    ) -> npt.NDArray[np.int64]:
        """Take at most `max_rows` ≥ 1 rows from `first_row` on out of blocks."""
        words = self._words[blocks]
        below = _hide_below(words[0], first_row) if first_row and blocks[0] == first_row // _BLOCK_ROWS else None
        num_rows_up_to = np.bitwise_count(words).sum(axis=1, dtype=np.int64).cumsum()
        num_blocks = min(int(np.searchsorted(num_rows_up_to, max_rows)) + 1, blocks.size)
        blocks, words = blocks[:num_blocks], words[:num_blocks]
        is_cut = num_rows_up_to[num_blocks - 1] > max_rows
        ids = _row_ids(words, blocks)[:max_rows]
        note(torch.from_numpy(ids))
        if not is_cut and below is None:
            self._words[blocks] = 0
            self._has_rows[blocks] = False
            return ids
        last = words[-1].copy()
        words[:] = 0
        if is_cut:  # rows of the last block that are beyond the last one taken stay
            word, bit = divmod(int(ids[-1]) % _BLOCK_ROWS, _WORD_BITS)
            last[:word] = 0
            last[word] &= np.uint64(2**64 - (2 << bit)) if bit < 63 else np.uint64(0)
            words[-1] = last
        if below is not None:
            words[0] |= below
        has_rows = words[[0, -1]].any(axis=1)
        # At once: between two of these an interrupt would leave rows neither here nor taken.
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
        """Number of dirty rows; costs in proportion to the blocks that have some.

        Thread: any; of what is marked meanwhile some may count.
        """
        blocks = np.flatnonzero(self._has_rows)
        return sum(
            int(np.bitwise_count(self._words[blocks[first : first + _PASS_BLOCKS]]).sum(dtype=np.int64))
            for first in range(0, blocks.size, _PASS_BLOCKS)
        )

    @property
    def size_bytes(self) -> int:
        """Memory taken, bytes."""
        return self._words.nbytes + self._has_rows.nbytes


def _hide_below(words: _Words, row: int) -> _Words:
    """Remove the rows of a row's block that are below it from its words, and return the words that they were in."""
    word, bit = divmod(row % _BLOCK_ROWS, _WORD_BITS)
    below: _Words = words.copy()
    below[word] &= np.uint64((1 << bit) - 1)
    below[word + 1 :] = 0
    words ^= below
    return below


def _row_ids(words: _Words, blocks: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """Return int64 ids, ascending, of the bits set in `words` uint64[len(blocks), 64]."""
    # By bytes, not words: where few rows are dirty a word has one bit, and 63 zeros would be unpacked with it.
    flat = words.reshape(-1).view(np.uint8)
    where = np.flatnonzero(flat != 0)
    first_ids = blocks[where // _BLOCK_BYTES].astype(np.int64) * _BLOCK_ROWS + (where % _BLOCK_BYTES) * 8
    bits = np.unpackbits(flat[where], bitorder="little").view(np.bool_)
    hits = np.flatnonzero(bits)
    ids: npt.NDArray[np.int64] = first_ids[hits >> 3] + (hits & 7)
    return ids


def set_bits(words: _Words, ids: npt.NDArray[np.int64]) -> None:
    """Set the bits of rows in little-endian words.

    Args:
        words: uint64[w], contiguous; changed.
        ids: int64[n], each 0 to `64 * w - 1`; may repeat.
    """
    octets = words.view(np.uint8)
    places = ids >> 3
    bits = np.left_shift(np.uint8(1), ids.astype(np.uint8) & np.uint8(7))
    octets[places] = octets.take(places) | bits
    # Of rows that share an octet the last one was written, so each pass sets one more bit of it; there are at most
    # eight. Half of the time of `bitwise_or.at`, and no sorting.
    while (left := np.flatnonzero((octets.take(places) & bits) == 0)).size:
        places, bits = places.take(left), bits.take(left)
        octets[places] = octets.take(places) | bits


def distinct(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers of int64[n], ascending, each once."""
    # `np.unique` imports `numpy.ma` at its first call: 1.6 MiB, and many milliseconds of a training step.
    ids = np.sort(ids)
    is_first = np.ones(ids.size, np.bool_)
    is_first[1:] = ids[1:] != ids[:-1]
    return ids[is_first]


def ids_of(row_ids: torch.Tensor, num_rows: int) -> npt.NDArray[np.int64]:
    """Return the ids ≥ 0 out of a tensor as int64[n] on the CPU; a view where it can be.

    Args:
        row_ids: int32 or int64, any shape, order and device. On a GPU this waits for the device.
        num_rows: All ids are below it; 2⁶³ takes any.

    Raises:
        IndexError: An id is not below `num_rows`.
    """
    ids = row_ids.detach().reshape(-1).cpu().numpy().astype(np.int64, copy=False)
    # Seen as unsigned, negative ids are the highest ones: one pass finds both kinds.
    if ids.size and ids.view(np.uint64).max() >= num_rows:
        ids = ids[ids >= 0]
        if ids.size and (highest := ids.max()) >= num_rows:
            raise IndexError(f"row {highest} is not below {num_rows}")
    return ids
