"""One segment of an update log, read record by record, and what a crash has left of it.

Reading changes nothing and takes no lock. Damage is a `CorruptionError` that names file and offset.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from headrace.paramserver.files.direct_file import BLOCK_BYTES, block_memory, open_direct, try_direct
from headrace.paramserver.log.log_segments import fail_storage, segment_name
from headrace.schemas.errors import CorruptionError
from headrace.schemas.log_records import (
    RECORD_HEADER_BYTES,
    SEAL_BYTES,
    SEGMENT_HEADER_BYTES,
    RecordHeader,
    RecordKind,
    Seal,
    SegmentHeader,
    decode_payload,
    decode_record_header,
    decode_seal,
    decode_segment_header,
    find_record_header,
)

__all__ = ["SegmentFile", "Tail", "damage"]

# Chunks grow from the first size to the second: few records should not cost reading many.
_FIRST_CHUNK_BYTES = 64 * 1024
_MAX_CHUNK_BYTES = 4 * 1024 * 1024
# From here on a record is read by itself: of a chunk, what it has of the record behind would be read twice.
_LARGE_RECORD_BYTES = 256 * 1024


def damage(path: Path, offset: int, what: object) -> CorruptionError:
    """Return the error for damage at a place."""
    return CorruptionError(f"{path}: damaged at offset {offset}: {what}")


@dataclass(frozen=True, slots=True)
class Tail:
    """What a segment without a seal holds.

    Attributes:
        end: Offset behind the last intact record.
        last_seq: Its seq; first seq − 1 without any.
        reason: Why the next record is none; None where only zeros, a mark or the end of the file follow.
    """

    end: int
    last_seq: int
    reason: str | None


class SegmentFile:
    """A segment opened for reading, with a place in it. Use with `with`.

    Thread: any, one at a time; everything blocks.

    Attributes:
        path: The file.
        header: What it begins with.
        offset: The place: where the next record begins.
        limit: Bytes from here on are not looked at.
    """

    def __init__(
        self,
        path: Path,
        read_recent: Callable[[int, int], memoryview | None] | None = None,
        *,
        past_cache: bool = False,
    ) -> None:
        """Open a segment and read its header.

        Args:
            path: The file.
            read_recent: Asked for (offset, size) before the file is, unless it returns None.
            past_cache: See `UpdateLog.read`.

        Raises:
            FileNotFoundError: It is not there.
            StorageError: It cannot be read.
            CorruptionError: Its header is damaged, or its name is another segment's.
        """
        self.path = path
        self._read_recent = read_recent
        self._chunk = memoryview(b"")
        self._chunk_at = 0
        self._chunk_bytes = _FIRST_CHUNK_BYTES
        try:
            self._fd = open_direct(path, os.O_RDONLY) if past_cache else os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise
        except OSError as exc:
            fail_storage(path, exc, doing="opening")
        try:
            self.offset = 0
            self.limit = self.size_bytes()
            try:
                self.header: SegmentHeader = decode_segment_header(self._take(SEGMENT_HEADER_BYTES))
            except CorruptionError as exc:
                raise damage(path, 0, exc) from exc
            if path.name != segment_name(self.header.first_seq):
                raise damage(path, 40, f"its first seq is {self.header.first_seq}, its name says another")
        except BaseException:
            self.close()
            raise
        self.offset = SEGMENT_HEADER_BYTES

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def size_bytes(self) -> int:
        """Return the file's present size."""
        return os.fstat(self._fd).st_size

    def refresh(self) -> None:
        """Forget what has been read ahead: the file may have changed."""
        self._chunk = memoryview(b"")
        self.limit = self.size_bytes()

    def read_seal(self) -> Seal | None:
        """Return the seal that the file ends with, or None. Does not move the place."""
        at, self.offset = self.offset, self.limit - SEAL_BYTES
        try:
            if self.offset < SEGMENT_HEADER_BYTES:
                return None
            record = self.peek()
            if record is None or record.kind is not RecordKind.SEAL or record.size_bytes != SEAL_BYTES:
                return None
            return decode_seal(record, self.payload(record))
        except CorruptionError:
            return None
        finally:
            self.offset = at

    def peek(self) -> RecordHeader | None:
        """Return the header of the record at `offset`; None for zeros, or where the file ends.

        Raises:
            CorruptionError: Neither.
        """
        if self.offset >= self.limit:
            return None
        try:
            return decode_record_header(self._take(RECORD_HEADER_BYTES), 0, mark=self.header.mark)
        except CorruptionError as exc:
            raise damage(self.path, self.offset, exc) from exc

    def payload(self, record: RecordHeader) -> memoryview:
        """Return the payload of the record at `offset`, unchecked.

        Raises:
            CorruptionError: The file ends within it.
        """
        left = self.limit - self.offset
        if record.size_bytes > left:
            raise damage(self.path, self.offset, f"a record of {record.size_bytes} bytes where {left} are left")
        return self._take(record.size_bytes)[RECORD_HEADER_BYTES:]

    def read_data(self, record: RecordHeader) -> tuple[dict[str, Any], memoryview]:
        """Return map and body of the DATA record at `offset`, checked.

        Raises:
            CorruptionError: The file ends within it, or the checksum is wrong.
        """
        payload = self.payload(record)
        try:
            return decode_payload(record, payload)
        except CorruptionError as exc:
            raise damage(self.path, self.offset, exc) from exc

    def scan_tail(self, visit: Callable[[RecordHeader, dict[str, Any]], None] | None = None) -> Tail:
        """Walk a segment without a seal, and check it, up to where it ends; `offset` is there afterwards.

        What is unreadable at the end is a torn tail, unless something behind it proves that it was synced: then it was
        acked, and is damaged.

        Args:
            visit: Called with header and map of each intact record.

        Raises:
            CorruptionError: An acked record is damaged; `offset` is where.
        """
        self.offset = SEGMENT_HEADER_BYTES
        last_seq = self.header.first_seq - 1
        reason: CorruptionError | None = None
        while True:
            try:
                record = self.peek()
                if record is None or record.kind is not RecordKind.DATA:
                    break
                if record.seq != last_seq + 1:
                    raise damage(self.path, self.offset, f"seq {record.seq} follows seq {last_seq}")
                fields, _ = self.read_data(record)
            except CorruptionError as exc:
                reason = exc
                break
            if visit is not None:
                visit(record, fields)
            last_seq = record.seq
            self.offset += record.size_bytes
        proof = self._find_proof(last_seq + 1)
        if proof is not None:
            raise damage(self.path, self.offset, f"record {last_seq + 1} was synced, {proof}") from reason
        return Tail(self.offset, last_seq, None if reason is None else str(reason))

    def _find_proof(self, missing_seq: int) -> str | None:
        """Say which record from `offset` on was written after `missing_seq` had been synced; None if there is none."""
        end, overlap = self.offset, RECORD_HEADER_BYTES - 1
        try:
            while self.offset + RECORD_HEADER_BYTES <= self.limit:
                chunk = self._take(min(_MAX_CHUNK_BYTES, self.limit - self.offset))
                at = 0
                while (found := find_record_header(chunk, at, mark=self.header.mark)) is not None:
                    record = decode_record_header(chunk, found, mark=self.header.mark)
                    if record is not None and record.durable_seq >= missing_seq:
                        return f"as a {record.kind.name} record at offset {self.offset + found} proves"
                    at = found + 1
                self.offset += max(1, len(chunk) - overlap)
            return None
        finally:
            self.offset = end

    def _take(self, size_bytes: int) -> memoryview:
        """Return bytes from `offset` on, fewer at the end of the file."""
        start = self.offset - self._chunk_at
        if start < 0 or start + size_bytes > len(self._chunk):
            # With the header of the record behind it, which says how much to read next.
            wanted = size_bytes + RECORD_HEADER_BYTES
            if size_bytes < _LARGE_RECORD_BYTES:
                wanted = max(wanted, self._chunk_bytes)
            wanted = min(wanted, max(0, self.limit - self.offset))
            self._chunk = self._read(wanted, self.offset)
            self._chunk_at, start = self.offset, 0
            self._chunk_bytes = min(2 * self._chunk_bytes, _MAX_CHUNK_BYTES)
        return self._chunk[start : start + size_bytes]

    def _read(self, size_bytes: int, offset: int) -> memoryview:
        if self._read_recent is not None and (recent := self._read_recent(offset, size_bytes)) is not None:
            return recent
        # In whole blocks, or a read past the page cache would be refused.
        skipped = offset % BLOCK_BYTES
        end, filled = skipped + size_bytes, 0
        memory = block_memory(end)
        try:
            while filled < end:
                more = try_direct(os.preadv, self._fd, [memory[filled:]], offset - skipped + filled)
                if not more:
                    break
                filled += more
        except OSError as exc:
            fail_storage(self.path, exc, doing=f"reading at offset {offset}")
        return memory[skipped : min(filled, end)].toreadonly()
