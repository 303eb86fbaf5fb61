"""Segments of an update log as files: their names, writing one, and the rules for what a crash has left.

At any time at most one segment, the last, is without a seal. It is made under another name, synced, and only then given
its own, so a segment's header is whole or the segment is not there. A seal is written once all records are synced, and
synced before the next segment is made.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from headrace.paramserver.files.direct_file import open_direct, try_direct
from headrace.paramserver.files.file_ops import FileOps
from headrace.paramserver.log.log_tail import LogTail
from headrace.paramserver.log.update_log import LogMetrics
from headrace.schemas.errors import StorageError
from headrace.schemas.log_records import (
    SEAL_BYTES,
    SEGMENT_HEADER_BYTES,
    Seal,
    SegmentHeader,
    encode_mark,
    encode_seal,
    encode_segment_header,
)
from headrace.schemas.messages import Segment

__all__ = [
    "UNFINISHED_SUFFIX",
    "LogSegment",
    "SegmentList",
    "SegmentWriter",
    "fail_storage",
    "list_segments",
    "segment_name",
]

# ON DISK: file names.
_NAME = re.compile(r"\d{20}\.hrlog")
UNFINISHED_SUFFIX = ".new"

# File systems without preallocation say so with one of these.
_NO_ALLOCATION = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
# The writer remembers the place of a record about this often, so that readers need not walk a whole segment.
_INDEX_BYTES = 256 * 1024


def segment_name(first_seq: int) -> str:
    """Return the file name of the segment that begins with a seq."""
    return f"{first_seq:020d}.hrlog"


def list_segments(directory: Path) -> list[Path]:
    """Return the segments in a directory, oldest first.

    Raises:
        StorageError: The directory cannot be read.
    """
    try:
        names = sorted(os.listdir(directory))
    except OSError as exc:
        fail_storage(directory, exc, doing="listing")
    return [directory / name for name in names if _NAME.fullmatch(name)]


def fail_storage(path: Path, exc: OSError, *, doing: str) -> NoReturn:
    """Raise the `StorageError` that an `OSError` on a file of the log means."""
    name = errno.errorcode.get(exc.errno or 0, "unknown")
    raise StorageError(f"{path}: {doing} failed: {exc.strerror or exc} ({name})") from exc


@dataclass(slots=True, eq=False)
class LogSegment:
    """A segment as readers know it.

    The writer thread changes `last_seq` and `end` of the newest one, after each sync; readers take `last_seq` of the
    whole log first and never look beyond it.

    Attributes:
        path: The file.
        header: What it begins with.
        last_seq: Last durable record; first seq − 1 without any.
        end: Offset behind the last durable record.
        sealed_us: Wall clock of the seal, microseconds since 1970; None while it is written.
        index: (seq, offset) of some records, ascending; may be empty.
        tail: Where the newest of its bytes may be in memory; None of a segment that was not written by this process.
    """

    path: Path
    header: SegmentHeader
    last_seq: int
    end: int
    sealed_us: int | None
    index: list[tuple[int, int]] = field(default_factory=list)
    tail: LogTail | None = None

    def read_recent(self, offset: int, size_bytes: int) -> memoryview | None:
        """Return durable bytes from memory, or None if the file has to be read."""
        return None if self.tail is None else self.tail.read(self, offset, size_bytes)

    @property
    def first_seq(self) -> int:
        """Seq of the first record."""
        return self.header.first_seq

    @property
    def size_bytes(self) -> int:
        """Bytes in use: without what is only reserved."""
        return self.end + (SEAL_BYTES if self.sealed_us is not None else 0)


class SegmentList:
    """A log's segments, oldest first: added by the writer, removed by retention, read by anybody. Thread: any."""

    def __init__(self, segments: Sequence[LogSegment]) -> None:
        """Begin with what was found."""
        self._lock = threading.Lock()
        self._segments = list(segments)

    @property
    def log_id(self) -> bytes | None:
        """The log's id; None before the first segment."""
        with self._lock:
            return self._segments[0].header.log_id if self._segments else None

    @property
    def first_seq(self) -> int:
        """Oldest record; what the first will be in a new log."""
        with self._lock:
            return self._segments[0].first_seq if self._segments else 1

    @property
    def last_seq(self) -> int:
        """Newest durable record; 0 in a new log."""
        with self._lock:
            return self._segments[-1].last_seq if self._segments else 0

    def find(self, seq: int) -> LogSegment | None:
        """Return the one that has a durable record; None if none has."""
        with self._lock:
            place = bisect_right(self._segments, seq, key=lambda segment: segment.first_seq) - 1
            found = self._segments[place] if place >= 0 else None
        return found if found is not None and seq <= found.last_seq else None

    @property
    def size_bytes(self) -> int:
        """Bytes in use by all."""
        with self._lock:
            return sum(segment.size_bytes for segment in self._segments)

    def snapshot(self) -> list[LogSegment]:
        """Return them as they are now."""
        with self._lock:
            return list(self._segments)

    def add(self, segment: LogSegment) -> None:
        """Add the newest; an empty one of the same first seq has been replaced by it."""
        with self._lock:
            if self._segments and self._segments[-1].first_seq == segment.first_seq:
                self._segments.pop()
            self._segments.append(segment)

    def remove(self, segment: LogSegment) -> None:
        """Take one out."""
        with self._lock:
            self._segments.remove(segment)

    def next_to_trim(self, before_seq: int, max_bytes: int | None, oldest_us: int | None) -> LogSegment | None:
        """Return the oldest segment if it may go, or None: see `UpdateLog.trim`."""
        with self._lock:
            if len(self._segments) < 2:
                return None
            segment = self._segments[0]
            if segment.last_seq >= before_seq or segment.sealed_us is None:
                return None
            is_too_much = max_bytes is not None and sum(each.size_bytes for each in self._segments) > max_bytes
            is_too_old = oldest_us is not None and segment.sealed_us < oldest_us
            is_unbounded = max_bytes is None and oldest_us is None
            return segment if is_unbounded or is_too_much or is_too_old else None


class SegmentWriter:
    """The one segment that is being written.

    Raises `StorageError` from whatever the file system refuses; the segment must not be written to again then: after a
    failed sync the kernel has dropped what it could not write and says nothing of it next time.

    Thread: one at a time; everything blocks.

    Attributes:
        segment: What readers see of it.
        offset: Where the next record goes.
    """

    def __init__(
        self,
        ops: FileOps,
        fd: int,
        segment: LogSegment,
        tail: LogTail,
        metrics: LogMetrics,
        segment_bytes: int,
        allocate_bytes: int,
    ) -> None:
        """Use `create`."""
        self.segment = segment
        self.offset = 0
        self._ops = ops
        self._fd = fd
        self._tail = tail
        self._metrics = metrics
        self._segment_bytes = segment_bytes
        self._allocate_bytes = allocate_bytes
        self._allocated = 0
        self._num_records = 0

    @classmethod
    def create(
        cls,
        directory: Path,
        header: SegmentHeader,
        *,
        tail: LogTail,
        ops: FileOps,
        metrics: LogMetrics,
        segment_bytes: int,
        allocate_bytes: int,
    ) -> SegmentWriter:
        """Make a segment, durably, replacing an empty one of the same first seq.

        Args:
            directory: Where it goes.
            header: What it begins with.
            tail: What it is written from; it holds this segment's bytes from now on.
            ops: The file system.
            metrics: Syncs and bytes are counted there.
            segment_bytes: Size that the segment should not exceed.
            allocate_bytes: Reserve blocks in steps of this size; 0: do not.
        """
        path = directory / segment_name(header.first_seq)
        unfinished = path.with_name(path.name + UNFINISHED_SUFFIX)
        try:
            fd = open_direct(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, ops.open)
        except OSError as exc:
            fail_storage(unfinished, exc, doing="creating the segment")
        segment = LogSegment(path, header, header.first_seq - 1, SEGMENT_HEADER_BYTES, None, tail=tail)
        tail.begin(segment)
        writer = cls(ops, fd, segment, tail, metrics, segment_bytes, allocate_bytes)
        try:
            writer._reserve(SEGMENT_HEADER_BYTES)
            writer._put([encode_segment_header(header)])
            writer.offset = SEGMENT_HEADER_BYTES
            writer._timed_sync(is_full=True)
            try:
                ops.rename(unfinished, path)
                ops.fsync_dir(directory)
            except OSError as exc:
                fail_storage(path, exc, doing="naming the segment")
        except BaseException:
            writer.close()
            raise
        return writer

    @property
    def is_empty(self) -> bool:
        """Whether it has no records: then one of any size may go in."""
        return not self._num_records

    def fits(self, size_bytes: int) -> bool:
        """Say whether so many more bytes leave the segment within its size."""
        return self.offset + size_bytes + SEAL_BYTES <= self._segment_bytes

    def write(self, buffers: Sequence[Segment], size_bytes: int, seqs_and_offsets: Sequence[tuple[int, int]]) -> None:
        """Write whole records and sync them; on return they are durable and readers see them.

        Args:
            buffers: The records' bytes, in order.
            size_bytes: Of the buffers together.
            seqs_and_offsets: Of each record: its seq and where it begins, relative to `offset`.
        """
        self._reserve(size_bytes)
        self._put(buffers)
        self._timed_sync(is_full=False)
        segment, index = self.segment, self.segment.index
        for seq, offset in seqs_and_offsets:
            if not index or self.offset + offset - index[-1][1] >= _INDEX_BYTES:
                index.append((seq, self.offset + offset))
        self.offset += size_bytes
        self._num_records += len(seqs_and_offsets)
        self._metrics.written_bytes += size_bytes
        segment.end = self.offset
        segment.last_seq = seqs_and_offsets[-1][0]

    def write_mark(self) -> None:
        """Note behind the last record that it was synced; not synced itself, and overwritten by the next record.

        Without it the last group would always look as if it might not have been acked.
        """
        mark = encode_mark(mark=self.segment.header.mark, durable_seq=self.segment.last_seq)
        self._reserve(len(mark))
        self._put([mark])

    def seal(self, now_us: int) -> None:
        """Complete the segment, durably, and give back what is reserved behind it; then close it."""
        segment = self.segment
        seal = encode_seal(mark=segment.header.mark, seal=Seal(segment.last_seq, self._num_records, now_us))
        self._put([seal])
        try:
            # It is found at the end of the file, and until then it is none.
            self._ops.truncate(self._fd, self.offset + len(seal))
        except OSError as exc:
            fail_storage(segment.path, exc, doing="truncating the segment")
        self._timed_sync(is_full=True)
        segment.sealed_us = now_us
        self.close()

    def close(self) -> None:
        """Close the file as it is; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._ops.close(fd)

    def _reserve(self, size_bytes: int) -> None:
        missing = self.offset + size_bytes - self._allocated
        if not self._allocate_bytes or missing <= 0:
            return
        size = max(missing, self._allocate_bytes)
        try:
            self._ops.allocate(self._fd, self._allocated, size)
        except OSError as exc:
            if exc.errno not in _NO_ALLOCATION:
                fail_storage(self.segment.path, exc, doing=f"reserving {size} bytes")
            self._allocate_bytes = 0
        else:
            self._allocated += size

    def _put(self, buffers: Sequence[Segment]) -> None:
        """Write at `offset`."""
        for offset, blocks in self._tail.put(buffers, self.offset):
            while blocks:
                size_bytes = sum(len(block) for block in blocks)
                try:
                    written = try_direct(self._ops.pwritev, self._fd, blocks, offset)
                except OSError as exc:
                    fail_storage(self.segment.path, exc, doing=f"writing {size_bytes} bytes at offset {offset}")
                if not written:
                    raise StorageError(f"{self.segment.path}: none of {size_bytes} bytes written at offset {offset}")
                # A disk that is nearly full takes a part, and says why with the rest of it.
                offset, blocks = offset + written, _behind(blocks, written)

    def _timed_sync(self, *, is_full: bool) -> None:
        start_s = time.perf_counter()
        try:
            if is_full:
                self._ops.fsync(self._fd)
            else:
                self._ops.fdatasync(self._fd)
        except OSError as exc:
            fail_storage(self.segment.path, exc, doing="syncing")
        self._metrics.count_fsync(time.perf_counter() - start_s)


def _behind(blocks: list[memoryview], size_bytes: int) -> list[memoryview]:
    """Return what is left of buffers behind their first bytes."""
    left = []
    for block in blocks:
        if size_bytes < len(block):
            left.append(block[size_bytes:])
        size_bytes = max(0, size_bytes - len(block))
    return left
