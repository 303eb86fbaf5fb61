"""Checksums of a table file's blocks, checked while somebody reads the file from its beginning to its end.

A checksum of the whole file tells whether it is what it was when that was made. Whether it was sound then, only those
know that RocksDB wrote with each block: a byte that the disk lost before is found by them alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headrace.paramserver.store.table_file_format import TRAILER_BYTES
from headrace.paramserver.store.table_file_reader import TableFileReader
from headrace.schemas.errors import CorruptionError

__all__ = ["BlockCheck"]


class BlockCheck:
    """Checks one file, piece by piece: call `take` with all of it, then `finish`. Use `open`.

    Thread: any, one at a time; other Python threads wait half a microsecond a block.
    """

    def __init__(self, file: TableFileReader) -> None:
        """Made by `open`."""
        self._file = file
        self._offsets, self._sizes = file.blocks()
        self._ends = self._offsets + self._sizes + TRAILER_BYTES
        self._next = 0  # block
        self._at = 0  # in the file
        self._begun = bytearray()  # of the next block, in pieces before

    @classmethod
    def open(cls, path: Path) -> BlockCheck:
        """Find where a file's blocks lie.

        Raises:
            CorruptionError: It is no table, or its index is damaged; or it is of a kind that no store writes: the bytes
                that say which it is have no checksum, so that their damage must not let the rest of the file pass.
            StorageError: It cannot be read.
        """
        file = TableFileReader.open(path)
        if file is None:
            raise CorruptionError(f"{path}: not a table of the kind that this version writes: it cannot be checked")
        with file:
            return cls(file)

    def take(self, piece: memoryview) -> None:
        """Check the blocks that end in the next piece of the file.

        Raises:
            CorruptionError: One does not match its checksum.
        """
        start, self._at = self._at, self._at + len(piece)
        if self._begun:
            missing = int(self._ends[self._next]) - start
            self._begun += piece[:missing]
            if missing > len(piece):
                return
            self._check(memoryview(self._begun), start + missing - len(self._begun), self._next + 1)
            self._begun = bytearray()
        self._check(piece, start, int(np.searchsorted(self._ends, self._at, "right")))
        if self._next < self._ends.size and self._offsets[self._next] < self._at:
            self._begun += piece[int(self._offsets[self._next]) - start :]

    def finish(self) -> None:
        """Say that there is no more of the file.

        Raises:
            CorruptionError: It ends before its last block does.
        """
        if self._next < self._ends.size:
            raise CorruptionError(f"{self._file.path}: ends at byte {self._at}, before its last block does")

    def _check(self, data: memoryview, start: int, stop: int) -> None:
        """Check the blocks from the next one to `stop`, which lie in memory."""
        if self._next < stop:
            which = slice(self._next, stop)
            self._file.check_blocks(data, start, self._offsets[which], self._sizes[which])
            self._next = stop
