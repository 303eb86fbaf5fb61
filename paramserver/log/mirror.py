"""A mirror of an update log: committed records of another log, in segments of today's format.

The archive and a standby keep their copies this way. A record keeps its seq, epoch, header and body, so `read`
and `nonce_of` answer as the source does. Segments have nonces of their own, which guard against stale bytes on this
disk; the nonce of the source stands in the segment's header as `source_mark`, and a segment has records of one mark
only. So a mirror tells another history of its source, and who follows the mirror is told as by the source.

A shard's own log that moves into a stream, or back into files, stays the same log: a segment without a mark is of its
time in files, and `own_segments` makes the others so.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.interface import Append, LogMetrics, LogRecord, UpdateLogConfig, check_record
from headrace.paramserver.log.segment_reader import LogReader, damage, load_sealed, read_records
from headrace.paramserver.log.segments import FileOps, LogSegment, SegmentWriter, list_segments, storage_errors
from headrace.paramserver.log.tail import LogTail
from headrace.paramserver.log.writer import OutgoingRecord, write_records
from headrace.paramserver.system.durable import fsync_path
from headrace.schemas.errors import CorruptionError, HeadraceError, ProtocolError
from headrace.schemas.log_records import RECORD_HEADER_BYTES, SegmentHeader, pack_header
from headrace.schemas.messages import Segment

__all__ = [
    "LogMirror",
    "MirrorSegmentWriter",
    "MirrorSource",
    "check_replaceable",
    "num_mirrored_bytes",
    "own_segments",
]

_SEGMENT_TAIL_BYTES = 8 << 20
# Records that are written and synced together when a segment is written anew.
_GROUP_BYTES, _MAX_GROUP = 16 << 20, 10_000


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
        self._begin(directory, header, mark, ops)

    @classmethod
    def of_own(cls, directory: Path, segment: LogSegment) -> Self:
        """Create the segment that is to hold the records of one of a mirror, as one of the log itself.

        The mark is its nonce, so both tell the same of their records. No process writes to it once it is there, so no
        stale bytes can pass for records of it.
        """
        mark, header = segment.header.source_mark, segment.header
        assert mark, "a segment of a mirror"
        writer = cls.__new__(cls)
        writer._begin(directory, replace(header, nonce=mark % 2**64, source_mark=0), mark, None)
        return writer

    def _begin(self, directory: Path, header: SegmentHeader, mark: int | None, ops: FileOps | None) -> None:
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


def check_replaceable(directory: Path) -> None:
    """Raise `CorruptionError` if a mirror has nothing but its log's time in files, which no stream has.

    Thread: any; blocks.
    """
    segments = LogReader(directory).segments
    if segments and not segments[-1].header.source_mark:
        raise CorruptionError(
            f"{directory}: has this log up to record {segments[-1].last_seq}, from its time in files, and the stream "
            "behind it belongs to another one: it is the stream of another copy of this server, or was made anew"
        )


def own_segments(directory: Path, aside: Path, *, on_progress: Callable[[int], None] = lambda _: None) -> None:
    """Make the segments of a mirror those of a log of its own: `FileUpdateLog` goes on from there.

    Each is written anew with its mark as its nonce, in `aside`, and replaces the old one by a rename. So at any moment
    the mirror is whole, and says the same; a repeated call goes on. `on_progress` gets the bytes since its last call.

    REQUIRES: the mirror is closed, and nobody else has it or `aside` open. Thread: any; blocks.

    Raises:
        CorruptionError: A segment is damaged.
        StorageError: The disk failed, or is full.
    """
    with storage_errors(aside, "making room for new segments"):
        shutil.rmtree(aside, ignore_errors=True)  # of an interrupted call
        aside.mkdir()
    for path in list_segments(directory):
        segment = load_sealed(path)
        if segment is None:
            raise damage(path, path.stat().st_size, "no seal")
        if segment.header.source_mark:
            copy = _copy_own(segment, aside, on_progress)
            with storage_errors(path, "replacing the segment"):
                copy.rename(path)
                fsync_path(directory)
    with storage_errors(aside, "removing the empty directory"):
        aside.rmdir()
        fsync_path(aside.parent)


def num_mirrored_bytes(directory: Path) -> int:
    """Return how many bytes `own_segments` would write."""
    segments = (load_sealed(path) for path in list_segments(directory))
    return sum(segment.size_bytes for segment in segments if segment is not None and segment.header.source_mark)


def _copy_own(segment: LogSegment, aside: Path, on_progress: Callable[[int], None]) -> Path:
    writer = MirrorSegmentWriter.of_own(aside, segment)
    try:
        group, group_bytes = [], 0
        for record in read_records([segment], segment.first_seq, segment.last_seq, past_cache=True):
            group.append(record)
            group_bytes += len(record.body)
            if group_bytes >= _GROUP_BYTES or len(group) == _MAX_GROUP:
                writer.write(group)
                on_progress(group_bytes)
                group, group_bytes = [], 0
        writer.write(group)
        on_progress(group_bytes)
        return writer.seal(segment.sealed_us)
    finally:
        writer.close()


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
