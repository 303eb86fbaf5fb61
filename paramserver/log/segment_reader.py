"""Reading update logs: one segment record by record, and whole logs across their segments.

Reading changes nothing and takes no lock, so it is safe beside a running server. Damage is a `CorruptionError` that
names file and offset; a file that cannot be read is a `StorageError`.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from headrace.paramserver.log.interface import LogRecord
from headrace.paramserver.log.segments import LogSegment, list_segments, segment_name, storage_errors
from headrace.paramserver.system.direct_file import BLOCK_BYTES, block_memory, open_direct, try_direct
from headrace.schemas.errors import CorruptionError, GoneError
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

__all__ = ["LogReader", "SegmentReader", "check_chain", "damage", "load_sealed", "read_records", "scan_growing"]

_Visit = Callable[[RecordHeader, dict[str, Any]], None]

# Chunks grow from the first size to the second, so that reading few records costs little.
_FIRST_CHUNK_BYTES = 64 * 1024
_MAX_CHUNK_BYTES = 4 * 1024 * 1024
# Records from this size on are read one at a time: a chunk would end within one, and read that part twice.
_LARGE_RECORD_BYTES = 256 * 1024


def damage(path: Path, offset: int, what: object) -> CorruptionError:
    """Return the error for damage at an offset of a segment."""
    return CorruptionError(f"{path}: damaged at offset {offset}: {what}")


class SegmentReader:
    """A segment opened for reading. Use with `with`. Thread: any, one at a time; everything blocks.

    Attributes:
        path: The file.
        header: Its header.
        offset: The position: where the next record begins.
        limit: Bytes from here on are ignored.
    """

    def __init__(
        self,
        path: Path,
        read_recent: Callable[[int, int], memoryview | None] | None = None,
        *,
        past_cache: bool = False,
    ) -> None:
        """Open a segment and read its header. The file is read only where `read_recent(offset, size)` returns None.

        Raises:
            FileNotFoundError: The file does not exist.
            CorruptionError: The header is damaged, or the name is another segment's.
        """
        self.path = path
        self._read_recent = read_recent
        self._chunk, self._chunk_at, self._chunk_bytes = memoryview(b""), 0, _FIRST_CHUNK_BYTES
        with storage_errors(path, "opening", passing=(FileNotFoundError,)):
            self._fd = open_direct(path, os.O_RDONLY) if past_cache else os.open(path, os.O_RDONLY)
        try:
            self.offset = 0
            self.limit = os.fstat(self._fd).st_size
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
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def refresh(self) -> None:
        """Drop what was read ahead, because the file may have changed."""
        self._chunk = memoryview(b"")
        self.limit = os.fstat(self._fd).st_size

    def read_seal(self) -> Seal | None:
        """Return the seal at the end of the file, or None. Does not move the position."""
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
        """Return the header of the record at `offset`; None for zeros and at the end of the file."""
        if self.offset >= self.limit:
            return None
        try:
            return decode_record_header(self._take(RECORD_HEADER_BYTES), 0, nonce=self.header.nonce)
        except CorruptionError as exc:
            raise damage(self.path, self.offset, exc) from exc

    def payload(self, record: RecordHeader) -> memoryview:
        """Return the payload of the record at `offset`, unchecked."""
        left = self.limit - self.offset
        if record.size_bytes > left:
            raise damage(self.path, self.offset, f"a record of {record.size_bytes} bytes where {left} are left")
        return self._take(record.size_bytes)[RECORD_HEADER_BYTES:]

    def read_data(self, record: RecordHeader) -> tuple[dict[str, Any], memoryview]:
        """Return map and body of the DATA record at `offset`, checked."""
        payload = self.payload(record)
        try:
            return decode_payload(record, payload)
        except CorruptionError as exc:
            raise damage(self.path, self.offset, exc) from exc

    def scan_tail(self, visit: _Visit = lambda *_: None) -> tuple[LogSegment, str | None]:
        """Walk and check the records of a segment without a seal; leave `offset` after the last intact one.

        An unreadable end is a torn tail, unless a later record proves that it was synced. Then it was acked, and is
        damage. `visit` is called with header and map of each intact record.

        Returns the segment up to its last intact record, and why the next one is unreadable: None where zeros, a
        checkpoint or the end of the file follow. Raises `CorruptionError` if the acked record at `offset` is damaged.
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
            visit(record, fields)
            last_seq = record.seq
            self.offset += record.size_bytes
        proof = self._find_proof(last_seq + 1)
        if proof is not None:
            raise damage(self.path, self.offset, f"record {last_seq + 1} was synced, {proof}") from reason
        segment = LogSegment(self.path, self.header, last_seq, self.offset, None)
        return segment, None if reason is None else str(reason)

    def _find_proof(self, missing_seq: int) -> str | None:
        """Name a record from `offset` on that was written after `missing_seq` was synced; None if there is none."""
        end, overlap = self.offset, RECORD_HEADER_BYTES - 1
        try:
            while self.offset + RECORD_HEADER_BYTES <= self.limit:
                chunk = self._take(min(_MAX_CHUNK_BYTES, self.limit - self.offset))
                at = 0
                while (found := find_record_header(chunk, at, nonce=self.header.nonce)) is not None:
                    record = decode_record_header(chunk, found, nonce=self.header.nonce)
                    if record is not None and record.durable_seq >= missing_seq:
                        return f"as a {record.kind.name} record at offset {self.offset + found} proves"
                    at = found + 1
                self.offset += max(1, len(chunk) - overlap)
            return None
        finally:
            self.offset = end

    def _take(self, size_bytes: int) -> memoryview:
        """Return bytes from `offset` on; fewer at the end of the file."""
        start = self.offset - self._chunk_at
        if start < 0 or start + size_bytes > len(self._chunk):
            # Include the next record's header, which says how much to read next.
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
        # Whole blocks, because a read past the page cache needs them.
        skipped = offset % BLOCK_BYTES
        end, filled = skipped + size_bytes, 0
        memory = block_memory(end)
        with storage_errors(self.path, f"reading at offset {offset}"):
            while filled < end:
                more = try_direct(os.preadv, self._fd, [memory[filled:]], offset - skipped + filled)
                if not more:
                    break
                filled += more
        return memory[skipped : min(filled, end)].toreadonly()


class LogReader:
    """Reads a log for tools, as it was at creation, without opening it. Sees records once written, synced or not.

    Implements `LogSource`.

    Attributes:
        segments: The segments up to `to_seq`, oldest first.
    """

    def __init__(self, directory: Path, to_seq: int | None = None) -> None:
        """List and check the segments; ignore damage after `to_seq`, unless it is None.

        Raises:
            CorruptionError: A segment is damaged, or is missing between others.
        """
        self.segments: list[LogSegment] = []
        paths = list_segments(directory)
        for path in paths:
            try:
                segment = load_sealed(path) or _load_open(path, to_seq, is_last=path == paths[-1])
            except FileNotFoundError:
                continue  # trimmed since it was listed
            self.segments.append(segment)
            if to_seq is not None and segment.last_seq >= to_seq:
                break
        check_chain(self.segments)

    @classmethod
    def of_segments(cls, segments: Sequence[LogSegment]) -> Self:
        """Return a reader of segments that were loaded before.

        Raises:
            CorruptionError: A segment is missing between others.
        """
        reader = cls.__new__(cls)
        reader.segments = list(segments)
        check_chain(reader.segments)
        return reader

    @property
    def log_id(self) -> str:
        """See `LogSource`."""
        return self.segments[0].header.log_id.hex() if self.segments else ""

    @property
    def first_seq(self) -> int:
        """Oldest record; `last_seq + 1` if there is none."""
        return self.segments[0].first_seq if self.segments else 1

    @property
    def last_seq(self) -> int:
        """Newest record; 0 in a new log."""
        return self.segments[-1].last_seq if self.segments else 0

    def nonces(self, from_seq: int, to_seq: int) -> list[int]:
        """See `LogSource.nonces`."""
        return [
            segment.mark for segment in self.segments if segment.first_seq <= to_seq and segment.last_seq >= from_seq
        ]

    def read(self, from_seq: int, to_seq: int | None = None) -> Iterator[LogRecord]:
        """See `LogSource.read`."""
        if from_seq < self.first_seq:
            raise GoneError(f"the log begins at seq {self.first_seq}, seq {from_seq} has been removed")
        return read_records(self.segments, from_seq, self.last_seq if to_seq is None else min(to_seq, self.last_seq))


def load_sealed(path: Path) -> LogSegment | None:
    """Return a sealed segment; None if it has no seal. Raises as `SegmentReader`, and if header and seal disagree."""
    with SegmentReader(path) as file:
        seal = file.read_seal()
        if seal is None:
            return None
        header, end = file.header, file.limit - SEAL_BYTES
        if seal.num_records != seal.last_seq - header.first_seq + 1:
            raise damage(path, end, f"the seal says {seal.num_records} records up to seq {seal.last_seq}")
        return LogSegment(path, header, seal.last_seq, end, seal.sealed_us)


def _load_open(path: Path, to_seq: int | None, *, is_last: bool) -> LogSegment:
    """Return a segment without a seal; end it before damage that lies after `to_seq`."""
    with SegmentReader(path) as file:
        try:
            segment, _ = scan_growing(file)
        except CorruptionError:
            sound = [file.header.first_seq - 1]
            with suppress(CorruptionError):  # it is raised again
                file.scan_tail(lambda record, _: sound.append(record.seq))
            segment = LogSegment(path, file.header, sound[-1], file.offset, None)
            if to_seq is None or segment.last_seq < to_seq:
                raise
        if not is_last and (to_seq is None or segment.last_seq < to_seq):
            raise damage(path, segment.end, "no seal, and not the last segment")
        return segment


def scan_growing(
    file: SegmentReader, visit: _Visit = lambda *_: None, *, on_start: Callable[[], None] = lambda: None
) -> tuple[LogSegment, str | None]:
    """Call `scan_tail` on a segment that may be written to meanwhile, again if it finds new damage.

    A half-written record looks like damage if its successors arrive before they are searched for. Real damage is still
    there, at the same offset, on the next scan. `on_start` is called before each scan.
    """
    damaged_at = -1
    while True:
        on_start()
        try:
            return file.scan_tail(visit)
        except CorruptionError:
            if file.offset == damaged_at:
                raise
            damaged_at = file.offset
            file.refresh()


def check_chain(segments: Sequence[LogSegment]) -> None:
    """Raise `CorruptionError` unless each segment begins where the one before it ends, in the same log."""
    for before, after in pairwise(segments):
        if after.header.log_id != before.header.log_id:
            raise CorruptionError(f"{after.path}: a segment of another log than {before.path.name}")
        if after.first_seq != before.last_seq + 1:
            raise CorruptionError(
                f"{after.path}: begins at seq {after.first_seq}, {before.path.name} ends at {before.last_seq}: "
                "a segment is missing"
            )


def read_records(
    segments: Sequence[LogSegment], from_seq: int, last_seq: int, *, past_cache: bool = False
) -> Iterator[LogRecord]:
    """Yield the records from `from_seq` to `last_seq`, which is durable, each checked, as `UpdateLog.read` does."""
    for segment in segments:
        if segment.last_seq < from_seq or segment.first_seq > last_seq:
            continue
        try:
            file = SegmentReader(segment.path, segment.read_recent, past_cache=past_cache)
        except FileNotFoundError as exc:
            seq = max(from_seq, segment.first_seq)
            raise GoneError(f"the log no longer holds seq {seq}: {segment.path.name} has been removed") from exc
        with file:
            yield from _read_segment(file, segment, from_seq, min(last_seq, segment.last_seq))


def _read_segment(file: SegmentReader, segment: LogSegment, from_seq: int, last_seq: int) -> Iterator[LogRecord]:
    seq = segment.first_seq
    place = bisect_right(segment.index, from_seq, key=lambda entry: entry[0]) - 1
    if place >= 0:
        seq, file.offset = segment.index[place]
    file.limit = min(file.limit, segment.end)
    while seq <= last_seq:
        record = file.peek()
        if record is None or record.kind is not RecordKind.DATA or record.seq != seq:
            what = "nothing" if record is None else f"a {record.kind.name} record of seq {record.seq}"
            raise damage(file.path, file.offset, f"{what} where record {seq} should be")
        if seq >= from_seq:
            header, body = file.read_data(record)
            yield LogRecord(seq, record.epoch, header, body)
        elif record.size_bytes > file.limit - file.offset:
            raise damage(file.path, file.offset, f"a record of {record.size_bytes} bytes ends beyond its segment")
        file.offset += record.size_bytes
        seq += 1
