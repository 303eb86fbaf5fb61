"""A mirror of an update log: committed records of another log, in segments of today's format.

The archive and a standby keep their copies this way. A record keeps its seq, epoch, header and body, so `read`
and `nonce_of` answer as the source does. Segments have nonces of their own, which guard against stale bytes on this
disk; the nonce of the source stands in the segment's header as `source_mark`, and a segment has records of one mark
only. So a mirror tells another history of its source, and who follows the mirror is told as by the source.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.interface import Append, LogMetrics, LogRecord, UpdateLogConfig, check_record
from headrace.paramserver.log.segment_reader import LogReader, damage, load_sealed
from headrace.paramserver.log.segments import FileOps, LogSegment, SegmentWriter
from headrace.paramserver.log.tail import LogTail
from headrace.paramserver.log.writer import OutgoingRecord, write_records
from headrace.schemas.errors import HeadraceError, ProtocolError
from headrace.schemas.log_records import RECORD_HEADER_BYTES, SegmentHeader, pack_header
from headrace.schemas.messages import Segment

__all__ = [
    "LogMirror",
    "MirrorSegmentWriter",
    "MirrorSource",
]

_SEGMENT_TAIL_BYTES = 8 << 20


class LogMirror:
    """A log of records that another log has committed. It promises what `UpdateLog` does, but for `append`.

    Attributes: those of `UpdateLog`; `last_seq` is the seq before the first one in a new mirror.
    """

    def __init__(self, log: FileUpdateLog) -> None:
        """Use `open`."""
        self._log = log
        self._next_seq = log.last_seq + 1

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        begin_seq: int = 1,
        config: UpdateLogConfig | None = None,
        ops: FileOps | None = None,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> LogMirror:
        """Open a mirror and cut a torn tail; a new one begins at `begin_seq`, ≥ 1. Raises as `FileUpdateLog.open`.

        Thread: any; blocks while it reads the last segment.
        """
        if begin_seq < 1:
            raise ValueError(f"begin_seq {begin_seq}: the first is 1")
        log = FileUpdateLog.open(path, begin_seq=begin_seq, config=config, ops=ops, clock_us=clock_us)
        return cls(log)

    @property
    def first_seq(self) -> int:
        """See `UpdateLog`."""
        return self._log.first_seq

    @property
    def last_seq(self) -> int:
        """See `UpdateLog`."""
        return self._log.last_seq

    @property
    def failed(self) -> HeadraceError | None:
        """See `UpdateLog`."""
        return self._log.failed

    @property
    def pending_bytes(self) -> int:
        """See `UpdateLog`."""
        return self._log.pending_bytes

    @property
    def size_bytes(self) -> int:
        """See `UpdateLog`."""
        return self._log.size_bytes

    @property
    def metrics(self) -> LogMetrics:
        """See `UpdateLog`."""
        return self._log.metrics

    async def wait_failed(self) -> HeadraceError:
        """See `UpdateLog.wait_failed`."""
        return await self._log.wait_failed()

    def append(
        self,
        *,
        seq: int,
        mark: int | None,
        epoch: int,
        header: dict[str, Any],
        body: Sequence[Segment],
    ) -> Append:
        """Add the next record of the source; never blocks. Thread: always the same loop's.

        Args:
            seq: Seq of the record, which must be the one behind the last.
            mark: The source's nonce of the record (`nonce_of`); None where the source gives none.
            epoch: Epoch of the writer.
            header: The record's map.
            body: Contiguous buffers, unchanged until `durable` is done.

        Raises:
            ProtocolError: A gap, or a record that is here; nothing was appended.
            HeadraceError: As `UpdateLog.append`.
        """
        if seq != self._next_seq:
            raise ProtocolError(f"record {seq} where {self._next_seq} was expected: the mirror would have a gap")
        append = self._log.append(epoch=epoch, header=header, body=body, source_mark=mark or 0)
        self._next_seq += 1
        return append

    def read(self, from_seq: int, *, past_cache: bool = False) -> Iterator[LogRecord]:
        """See `UpdateLog.read`."""
        return self._log.read(from_seq, past_cache=past_cache)

    def nonce_of(self, seq: int) -> int | None:
        """See `UpdateLog.nonce_of`: the source's, or the segment's own where the source gave none."""
        return self._log.nonce_of(seq)

    def trim(self, before_seq: int, *, max_bytes: int | None = None, max_age_s: float | None = None) -> int:
        """See `UpdateLog.trim`."""
        return self._log.trim(before_seq, max_bytes=max_bytes, max_age_s=max_age_s)

    async def close(self) -> None:
        """See `UpdateLog.close`."""
        await self._log.close()


class MirrorSegmentWriter:
    """Writes one segment of a mirror, in a directory that holds nothing else of that log. Thread: one; blocks.

    Raises `StorageError` where the disk refuses; then begin anew with another one.

    Attributes:
        path: The file, which exists from the beginning.
        mark: The source's nonce of all records in it; None if unknown.
        first_seq: Seq of its first record.
        last_seq: Seq of its last record, which is durable; `first_seq - 1` before the first.
    """

    def __init__(
        self,
        directory: Path,
        *,
        first_seq: int,
        mark: int | None,
        log_id: bytes | None = None,
        ops: FileOps | None = None,
    ) -> None:
        """Create the segment. Segments with one `log_id`, 16 bytes, can be read as one log; None draws one."""
        header = SegmentHeader(
            log_id=log_id or secrets.token_bytes(16),
            nonce=secrets.randbits(64) or 1,
            first_seq=first_seq,
            created_us=time.time_ns() // 1000,
            source_mark=mark or 0,
        )
        self.mark, self.first_seq = mark, header.first_seq
        config, tail = UpdateLogConfig(allocate_bytes=0), LogTail(_SEGMENT_TAIL_BYTES)
        self._writer = SegmentWriter(
            directory, header, tail=tail, ops=ops or FileOps(), metrics=LogMetrics(), config=config
        )
        self.path = self._writer.segment.path

    @property
    def last_seq(self) -> int:
        """See the class."""
        return self._writer.segment.last_seq

    @property
    def size_bytes(self) -> int:
        """Bytes written, without the seal."""
        return self._writer.offset

    def write(self, records: Sequence[LogRecord]) -> None:
        """Add records and sync them once.

        Raises:
            ProtocolError: A gap, or a record that is here; nothing was written.
            RequestError: A record is too large; nothing was written.
        """
        outgoing = []
        for expected, record in enumerate(records, self.last_seq + 1):
            if record.seq != expected:
                raise ProtocolError(f"record {record.seq} where {expected} was expected: the mirror would have a gap")
            packed = pack_header(record.header)
            size_bytes = RECORD_HEADER_BYTES + check_record(record.epoch, packed, [record.body])
            outgoing.append(OutgoingRecord(record.seq, record.epoch, packed, [record.body], size_bytes, self.mark or 0))
        if outgoing:
            write_records(self._writer, outgoing, durable_seq=self.last_seq)

    def seal(self, sealed_us: int | None = None) -> Path:
        """Complete the segment and close it; return its file. `sealed_us` is the wall clock, None is now."""
        self._writer.seal(time.time_ns() // 1000 if sealed_us is None else sealed_us)
        return self.path

    def close(self) -> None:
        """Close the file as it is. Idempotent."""
        self._writer.close()


class MirrorSource:
    """A mirror, or a part of one, for tools. Implements `LogSource`; `nonces` returns marks of the source.

    Attributes: those of `LogSource`.
    """

    def __init__(self, segments: Sequence[LogSegment]) -> None:
        """Use `of_directory` or `of_segment`."""
        self._segments = segments
        self._reader = LogReader.of_segments(segments)
        self.log_id, self.first_seq, self.last_seq = self._reader.log_id, self._reader.first_seq, self._reader.last_seq

    @classmethod
    def of_directory(cls, directory: Path, *, to_seq: int | None = None) -> MirrorSource:
        """Open all segments in a directory, which must follow on each other; see `LogReader`."""
        return cls(LogReader(directory, to_seq).segments)

    @classmethod
    def of_segment(cls, path: Path) -> MirrorSource:
        """Open one sealed segment, named as `MirrorSegmentWriter` did.

        Raises:
            CorruptionError: It is damaged, or has no seal.
            FileNotFoundError: There is no such file.
        """
        segment = load_sealed(path)
        if segment is None:
            raise damage(path, path.stat().st_size, "no seal")
        return cls([segment])

    def nonces(self, from_seq: int, to_seq: int) -> list[int]:
        """Return the source's marks of a range, oldest first; 0 where the source gave none."""
        return [
            segment.header.source_mark
            for segment in self._segments
            if segment.first_seq <= to_seq and segment.last_seq >= from_seq
        ]

    def read(self, from_seq: int, to_seq: int | None = None) -> Iterator[LogRecord]:
        """See `LogSource.read`. Reading a whole segment checks all of it."""
        return self._reader.read(from_seq, to_seq)
