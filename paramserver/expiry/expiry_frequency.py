"""How often rows are updated, as far as a server can know: a file of scores beside the store, a table each.

A trainer sends a row's newest values however often they changed since the last flush, so no server can count
updates. What it can tell at a run is whether a row has changed since the run before. A row's *frequency* is the number
of runs that found it changed, each run before counting `decay` as much as the next: 1 when it is seen first, then

    frequency = frequency × decay + (1 if its version is another than at the last run, else 0)

It is at most 1 / (1 - decay). It does not depend on how often a trainer flushes, on retries or on what is replayed
after a crash: nothing is counted when rows are written, and tables without the policy cost nothing.

The file holds, for each row of the last complete run, its id, a 32-bit stamp of its version and its frequency: 16
bytes, ascending by id, in pages with checksums. It is read and written a page at a time while the table is scanned, and
put in the place of the old one when the run is complete, so an interrupted run has counted nothing. A file that is
missing, damaged or of another table's shape counts as none: frequencies begin anew, and rows stay longer than they
would have.

The error: two versions of a row have the same stamp once in 2³² changes; then one change is not seen.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from pathlib import Path
from typing import IO, Self

import numpy as np
import numpy.typing as npt

from headrace.paramserver.files.durable_files import fsync_path
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
    """Return 32 bits that stand for each version, uint32[n]. ON DISK: never change."""
    mixed = epochs.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + steps.astype(np.uint64)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(32)).astype(np.uint32)


class FrequencyFile:
    """One pass over a table's frequencies: old ones in, new ones out; without `save`, none come out.

    Use it with `with`.

    Thread: any one at a time; it blocks.

    Attributes:
        damage: Why the old file was not believed; None when it was, or was not there.
    """

    def __init__(self, path: Path, fingerprint: int, *, decay: float, is_written: bool) -> None:
        """Open the old file, and begin the new one.

        Args:
            path: The file; its directory is made.
            fingerprint: Of the table's spec.
            decay: What is left of a frequency at each run.
            is_written: False only looks.

        Raises:
            StorageError: The disk failed.
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
                self._check_header(fingerprint)
            if is_written:
                path.parent.mkdir(exist_ok=True)
                self._new = open(self._new_path, "wb")  # noqa: SIM115
                self._new.write(_HEADER.pack(_MAGIC, fingerprint))
        except OSError as exc:
            self.close()
            raise StorageError(f"{path}: {exc.strerror or exc}") from exc

    def frequencies_of(self, row_ids: _Ids, epochs: _Ids, steps: _Ids) -> npt.NDArray[np.float32]:
        """Return the frequencies as of this run, float32[n], and note them for the next.

        Args:
            row_ids: int64[n], ascending, above those of every call before.
            epochs: int64[n].
            steps: int64[n].

        Raises:
            StorageError: The disk failed.
        """
        frequencies = np.ones(row_ids.size, np.float32)
        stamps = version_stamps(epochs, steps)
        at = 0
        # A page at a time: of rows that are gone, the file may have any number between two that are there.
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
        """Write rows that stay, at most 65 536, in the order of their ids; harmless where nothing is written.

        Raises:
            StorageError: The disk failed.
        """
        if self._new is None or not row_ids.size:
            return
        entries = np.empty(row_ids.size, _ENTRY)
        entries["row_id"], entries["stamp"] = row_ids, version_stamps(epochs, steps)
        entries["frequency"] = frequencies
        self._write_page(entries)

    def save(self) -> None:
        """Put the new file in the old one's place, durably: the run is complete.

        Raises:
            StorageError: The disk failed; the old file may still be there.
        """
        assert self._new is not None
        self._write_page(np.empty(0, _ENTRY))
        try:
            self._new.flush()
            os.fsync(self._new.fileno())
            os.replace(self._new_path, self._path)
            fsync_path(self._path.parent)
        except OSError as exc:
            raise StorageError(f"{self._path}: {exc.strerror or exc}") from exc

    def close(self) -> None:
        """Let go of the files; what was not saved is removed. Idempotent."""
        if self._old is not None:
            self._old.close()
        if self._new is not None:
            # What it still holds, after an error or a cancellation, is not wanted: a full disk may refuse that, too.
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

    def _check_header(self, fingerprint: int) -> None:
        assert self._old is not None
        data = self._old.read(_HEADER.size)
        if len(data) < _HEADER.size or _HEADER.unpack(data) != (_MAGIC, fingerprint):
            self._disbelieve("it is of another table or format")

    def _disbelieve(self, why: str) -> None:
        self.damage = f"{self._path}: {why}"
        if self._old is not None:
            self._old.close()
        self._old, self._page = None, np.empty(0, _ENTRY)

    def _fill_page(self, row_id: int) -> bool:
        """Hold the page that has, or would have, a row; say whether there is one."""
        while not self._page.size or self._page["row_id"][-1] < row_id:
            if self._old is None:
                return False
            try:
                page = self._read_page(self._old)
            except CorruptionError as exc:
                self._disbelieve(str(exc))
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
