"""How often rows are updated, as far as a server can know: one file of frequencies per table, beside the store.

A trainer sends a row's newest values however often they changed, so a server cannot count updates. But each expiry pass
can tell whether a row has changed since the pass before. A row's *frequency* is the number of passes that found it
changed, each counting `decay` as much as the next: 1 when it is first seen, then

    frequency = frequency × decay + (1 if its version differs from the last pass's, else 0)

It is at most 1 / (1 - decay), and does not depend on how often a trainer flushes, or on retries. Nothing is
counted when rows are written, so tables without the policy cost nothing.

For each row of the last complete pass, the file holds its id, a 32-bit stamp of its version and its frequency: 16
bytes, ascending by id, in pages with checksums. It is read and written page by page during the scan, and replaces the
old file when the pass is complete, so an interrupted pass counts nothing. A missing or damaged file, or one of another
table's shape, counts as empty: rows then stay longer than they would have.

Error: two versions of a row have equal stamps once in 2³² changes; then one change is missed.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Self

import numpy as np
import numpy.typing as npt

from headrace.paramserver.system.durable import move_into_place
from headrace.schemas.errors import CorruptionError, StorageError

__all__ = ["FrequencyFile", "version_stamps"]

_Ids = npt.NDArray[np.int64]
# ON DISK: never renumber.
_MAGIC = b"HRFREQ01"
_HEADER = struct.Struct("<8sq")  # magic, the table's fingerprint
_PAGE = struct.Struct("<II")  # entries, crc32 of them; a page without entries ends the file
_ENTRY = np.dtype([("row_id", "<i8"), ("stamp", "<u4"), ("frequency", "<f4")])
_MAX_PAGE_ROWS = 65_536


def version_stamps(epochs: _Ids, steps: _Ids) -> npt.NDArray[np.uint32]:
    """Return uint32[n] that stand for the versions. ON DISK: never change."""
    mixed = epochs.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + steps.astype(np.uint64)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(32)).astype(np.uint32)


class FrequencyFile:
    """Reads a table's old frequencies and writes new ones in one pass; only `save` keeps the new ones.

    Use it with `with`. Methods raise StorageError when the disk failed.

    Thread: any, one at a time; it blocks.

    Attributes:
        damage: Why the old file was ignored; None when it was used or did not exist.
    """

    def __init__(
        self, path: Path, fingerprint: int, *, decay: float, is_written: bool, earlier: Iterable[int] = ()
    ) -> None:
        """Open the old file and, if `is_written`, begin a new one; a pass leaves `decay` of each frequency.

        The old file may have one of the fingerprints that the table had `earlier`, before it grew.
        """
        self.damage: str | None = None
        self._path, self._new_path = path, path.with_suffix(".new")
        self._decay = np.float32(decay)
        self._page = np.empty(0, _ENTRY)
        self._old: IO[bytes] | None = None
        self._new: IO[bytes] | None = None
        try:
            if path.exists():
                self._old = open(path, "rb")  # noqa: SIM115 (`close` does)
                if self._old.read(_HEADER.size) not in {_HEADER.pack(_MAGIC, f) for f in (fingerprint, *earlier)}:
                    self._ignore_old("it is of another table or format")
            if is_written:
                path.parent.mkdir(exist_ok=True)
                self._new = open(self._new_path, "wb")  # noqa: SIM115
                self._new.write(_HEADER.pack(_MAGIC, fingerprint))
        except OSError as exc:
            self.close()
            raise StorageError(f"{path}: {exc.strerror or exc}") from exc

    def frequencies_of(self, row_ids: _Ids, epochs: _Ids, steps: _Ids) -> npt.NDArray[np.float32]:
        """Return float32[n] frequencies as of this pass, for int64[n] versions of rows; ids ascend over all calls."""
        frequencies = np.ones(row_ids.size, np.float32)
        stamps = version_stamps(epochs, steps)
        at = 0
        # A page at a time: between two rows that exist, the file may have any number that are gone.
        while at < row_ids.size and self._fill_page(int(row_ids[at])):
            end = int(np.searchsorted(row_ids, self._page["row_id"][-1], side="right"))
            known = np.searchsorted(self._page["row_id"], row_ids[at:end])
            is_known = self._page["row_id"][known] == row_ids[at:end]
            entries = self._page[known[is_known]]
            rows = np.arange(at, end)[is_known]
            frequencies[rows] = entries["frequency"] * self._decay + (entries["stamp"] != stamps[rows])
            at = end
        return frequencies

    def keep(self, row_ids: _Ids, epochs: _Ids, steps: _Ids, frequencies: npt.NDArray[np.float32]) -> None:
        """Write at most 65 536 rows that stay, in the order of their ids. Does nothing when the file is only read."""
        if self._new is None or not row_ids.size:
            return
        entries = np.empty(row_ids.size, _ENTRY)
        entries["row_id"], entries["stamp"] = row_ids, version_stamps(epochs, steps)
        entries["frequency"] = frequencies
        self._write_page(entries)

    def save(self) -> None:
        """Replace the old file durably: the pass is complete. After an error either file may be there."""
        assert self._new is not None
        self._write_page(np.empty(0, _ENTRY))
        try:
            self._new.flush()
            os.fsync(self._new.fileno())
            move_into_place(self._new_path, self._path)
        except OSError as exc:
            raise StorageError(f"{self._path}: {exc.strerror or exc}") from exc

    def close(self) -> None:
        """Close the files and remove a new one that was not saved. Idempotent."""
        if self._old is not None:
            self._old.close()
        if self._new is not None:
            # Unsaved data is not wanted, and a full disk may refuse its last write.
            with contextlib.suppress(OSError):
                self._new.close()
            self._new_path.unlink(missing_ok=True)
        self._old = self._new = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _write_page(self, entries: npt.NDArray[np.void]) -> None:
        assert self._new is not None and entries.size <= _MAX_PAGE_ROWS
        data = entries.tobytes()
        try:
            self._new.write(_PAGE.pack(entries.size, zlib.crc32(data)) + data)
        except OSError as exc:
            raise StorageError(f"{self._new_path}: {exc.strerror or exc}") from exc

    def _ignore_old(self, why: str) -> None:
        self.damage = f"{self._path}: {why}"
        if self._old is not None:
            self._old.close()
        self._old, self._page = None, np.empty(0, _ENTRY)

    def _fill_page(self, row_id: int) -> bool:
        """Read up to the page that has, or would have, a row; return whether there is one."""
        while not self._page.size or self._page["row_id"][-1] < row_id:
            if self._old is None:
                return False
            try:
                page = self._read_page(self._old)
            except CorruptionError as exc:
                self._ignore_old(str(exc))
                return False
            if not page.size:
                self._old.close()
                self._old, self._page = None, page
                return False
            self._page = page
        return True

    def _read_page(self, file: IO[bytes]) -> npt.NDArray[np.void]:
        try:
            header = file.read(_PAGE.size)
            if len(header) < _PAGE.size:
                raise CorruptionError("it ends early")
            size, checksum = _PAGE.unpack(header)
            data = file.read(size * _ENTRY.itemsize) if size <= _MAX_PAGE_ROWS else b""
        except OSError as exc:
            raise StorageError(f"{self._path}: {exc.strerror or exc}") from exc
        if len(data) != size * _ENTRY.itemsize or zlib.crc32(data) != checksum:
            raise CorruptionError("a page is damaged")
        return np.frombuffer(data, _ENTRY)
