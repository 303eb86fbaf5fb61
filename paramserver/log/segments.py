"""The segments of an update log as files: their names, the list of them, and writing one.

At any time at most one segment, the newest, has no seal. A segment is created under another name, synced and then
renamed, so its header is whole or the segment does not exist. A seal is written once all records are synced, and synced
before the next segment is created.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headrace.paramserver.log.interface import LogMetrics, UpdateLogConfig
from headrace.paramserver.log.tail import LogTail
from headrace.paramserver.system.direct_file import open_direct, try_direct
from headrace.paramserver.system.durable import disk_error, fsync_path
from headrace.schemas.errors import StorageError
from headrace.schemas.log_records import (
    SEAL_BYTES,
    SEGMENT_HEADER_BYTES,
    Seal,
    SegmentHeader,
    encode_checkpoint,
    encode_seal,
    encode_segment_header,
)
from headrace.schemas.messages import Segment

__all__ = [
    "UNFINISHED_SUFFIX",
    "FileOps",
    "LogSegment",
    "SegmentList",
    "SegmentWriter",
    "list_segments",
    "segment_name",
    "storage_errors",
]

# ON DISK: file names.
_NAME = re.compile(r"\d{20}\.hrlog")
UNFINISHED_SUFFIX = ".new"

# What file systems without preallocation answer.
_NO_ALLOCATION = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
# The writer indexes a record about this often, so readers need not walk a whole segment.
_INDEX_BYTES = 256 * 1024


def segment_name(first_seq: int) -> str:
    """Return the file name of the segment that begins with a seq."""
    return f"{first_seq:020d}.hrlog"


def list_segments(directory: Path) -> list[Path]:
    """Return the segments in a directory, oldest first; raise `StorageError` if it cannot be read."""
    with storage_errors(directory, "listing"):
        names = sorted(os.listdir(directory))
    return [directory / name for name in names if _NAME.fullmatch(name)]


@contextmanager
def storage_errors(path: Path, doing: str, *, passing: tuple[type[OSError], ...] = ()) -> Iterator[None]:
    """Raise each `OSError` of the block, but those in `passing`, as a `StorageError` that names the path."""
    try:
        yield
    except passing:
        raise
    except OSError as exc:
        name = errno.errorcode.get(exc.errno or 0, "unknown")
        raise disk_error(f"{path}: {doing} failed: {exc.strerror or exc} ({name})", exc) from exc


@dataclass(slots=True, eq=False)
class LogSegment:
    """A segment as readers know it. The writer thread advances `last_seq` and `end` of the newest one after each sync.

    Readers first take `last_seq` of the whole log and never look beyond it.

    Attributes:
        last_seq: Last durable record; first seq − 1 without any.
        end: Offset after the last durable record.
        sealed_us: Wall clock of the seal, microseconds since 1970; None while it is written.
        index: (seq, offset) of some records, ascending; may be empty.
        tail: Memory that may hold its newest bytes; None if this process has not written it.
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
    def mark(self) -> int:
        """`UpdateLog.nonce_of` of its records, -2⁶³ to 2⁶³ - 1: the source's, or else its own nonce."""
        nonce = self.header.nonce
        return self.header.source_mark or (nonce - 2**64 if nonce >= 2**63 else nonce)

    @property
    def size_bytes(self) -> int:
        """Bytes in use, without reserved blocks."""
        return self.end + (SEAL_BYTES if self.sealed_us is not None else 0)


class SegmentList:
    """A log's segments, oldest first. The writer adds, retention removes, anyone reads. Thread: any."""

    def __init__(self, segments: Sequence[LogSegment], *, begin_seq: int = 1) -> None:
        """Begin with the segments found at opening; without any, the first record will have `begin_seq`."""
        self._lock = threading.Lock()
        self._segments = list(segments)
        self._begin_seq = begin_seq

    def snapshot(self) -> list[LogSegment]:
        """Return the present segments."""
        with self._lock:
            return list(self._segments)

    @property
    def first_seq(self) -> int:
        """Oldest record; where it begins in a new log."""
        segments = self.snapshot()
        return segments[0].first_seq if segments else self._begin_seq

    @property
    def size_bytes(self) -> int:
        """Bytes in use."""
        return sum(segment.size_bytes for segment in self.snapshot())

    def find(self, seq: int) -> LogSegment | None:
        """Return the segment that has a durable record; None if there is none."""
        segments = self.snapshot()
        place = bisect_right(segments, seq, key=lambda segment: segment.first_seq) - 1
        return segments[place] if place >= 0 and seq <= segments[place].last_seq else None

    def add(self, segment: LogSegment) -> None:
        """Add the newest segment, which may replace an empty one of the same first seq."""
        with self._lock:
            if self._segments and self._segments[-1].first_seq == segment.first_seq:
                self._segments.pop()
            self._segments.append(segment)

    def remove(self, segment: LogSegment) -> None:
        """Remove a segment from the list."""
        with self._lock:
            self._segments.remove(segment)

    def next_to_trim(self, before_seq: int, max_bytes: int | None, oldest_us: int | None) -> LogSegment | None:
        """Return the oldest segment if it may be removed, or None. See `UpdateLog.trim`."""
        segments = self.snapshot()
        segment = segments[0] if len(segments) > 1 else None
        if segment is None or segment.last_seq >= before_seq or segment.sealed_us is None:
            return None
        is_too_much = max_bytes is not None and sum(each.size_bytes for each in segments) > max_bytes
        is_too_old = oldest_us is not None and segment.sealed_us < oldest_us
        is_unbounded = max_bytes is None and oldest_us is None
        return segment if is_unbounded or is_too_much or is_too_old else None


class SegmentWriter:
    """Writes one segment, with the next record at `offset`. Thread: one at a time; everything blocks.

    Raises `StorageError` where the file system refuses. Then the segment must not be written again: after a failed sync
    the kernel has dropped the pages that it could not write, and the next sync reports success.
    """

    def __init__(
        self,
        directory: Path,
        header: SegmentHeader,
        *,
        tail: LogTail,
        ops: FileOps,
        metrics: LogMetrics,
        config: UpdateLogConfig,
    ) -> None:
        """Create a segment durably; it replaces an empty one of the same first seq. `tail` is to hold its bytes."""
        path = directory / segment_name(header.first_seq)
        unfinished = path.with_name(path.name + UNFINISHED_SUFFIX)
        self.segment = LogSegment(path, header, header.first_seq - 1, SEGMENT_HEADER_BYTES, None, tail=tail)
        self._ops, self._tail, self._metrics = ops, tail, metrics
        self._segment_bytes = config.segment_bytes
        self._allocate_bytes = min(config.allocate_bytes, config.segment_bytes)
        self.offset = self._allocated = self._num_records = 0
        with storage_errors(unfinished, "creating the segment"):
            self._fd = open_direct(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, ops.open)
        tail.begin(self.segment)
        try:
            self._reserve(SEGMENT_HEADER_BYTES)
            self._put([encode_segment_header(header)])
            self.offset = SEGMENT_HEADER_BYTES
            self._timed_sync(is_full=True)
            with storage_errors(path, "naming the segment"):
                ops.rename(unfinished, path)
                ops.fsync_dir(directory)
        except BaseException:
            self.close()
            raise

    @property
    def is_empty(self) -> bool:
        """Whether it has no records; an empty segment takes a record of any size."""
        return not self._num_records

    def fits(self, size_bytes: int) -> bool:
        """Return whether so many more bytes keep the segment within its size."""
        return self.offset + size_bytes + SEAL_BYTES <= self._segment_bytes

    def write(self, buffers: Sequence[Segment], size_bytes: int, seqs_and_offsets: Sequence[tuple[int, int]]) -> None:
        """Write whole records and sync them. On return they are durable and readers see them.

        `size_bytes` is that of all buffers; `seqs_and_offsets` has each record's seq, and offset relative to `offset`.
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

    def write_checkpoint(self) -> None:
        """Note after the last record that it was synced, or its damage could pass for a torn tail that was never acked.

        The note is not synced, and the next record overwrites it.
        """
        record = encode_checkpoint(nonce=self.segment.header.nonce, durable_seq=self.segment.last_seq)
        self._reserve(len(record))
        self._put([record])

    def seal(self, now_us: int) -> None:
        """Complete the segment durably, give reserved blocks back, and close it."""
        segment = self.segment
        seal = encode_seal(nonce=segment.header.nonce, seal=Seal(segment.last_seq, self._num_records, now_us))
        self._put([seal])
        with storage_errors(segment.path, "truncating the segment"):
            # A seal counts only at the end of the file.
            self._ops.truncate(self._fd, self.offset + len(seal))
        self._timed_sync(is_full=True)
        segment.sealed_us = now_us
        self.close()

    def close(self) -> None:
        """Close the file as it is. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._ops.close(fd)

    def _reserve(self, size_bytes: int) -> None:
        missing = self.offset + size_bytes - self._allocated
        if not self._allocate_bytes or missing <= 0:
            return
        size = max(missing, self._allocate_bytes)
        with storage_errors(self.segment.path, f"reserving {size} bytes"):
            try:
                self._ops.allocate(self._fd, self._allocated, size)
                self._allocated += size
            except OSError as exc:
                if exc.errno not in _NO_ALLOCATION:
                    raise
                self._allocate_bytes = 0

    def _put(self, buffers: Sequence[Segment]) -> None:
        for offset, blocks in self._tail.put(buffers, self.offset):
            while blocks:
                size_bytes = sum(len(block) for block in blocks)
                with storage_errors(self.segment.path, f"writing {size_bytes} bytes at offset {offset}"):
                    written = try_direct(self._ops.pwritev, self._fd, blocks, offset)
                if not written:
                    raise StorageError(f"{self.segment.path}: none of {size_bytes} bytes written at offset {offset}")
                # A nearly full disk takes a part; writing the rest reports the reason.
                offset, blocks = offset + written, _after(blocks, written)

    def _timed_sync(self, *, is_full: bool) -> None:
        start_s = time.perf_counter()
        with storage_errors(self.segment.path, "syncing"):
            (self._ops.fsync if is_full else self._ops.fdatasync)(self._fd)
        self._metrics.count_commit(time.perf_counter() - start_s)


def _after(blocks: list[memoryview], size_bytes: int) -> list[memoryview]:
    """Return what remains of buffers without their first bytes."""
    left = []
    for block in blocks:
        if size_bytes < len(block):
            left.append(block[size_bytes:])
        size_bytes = max(0, size_bytes - len(block))
    return left


class FileOps:
    """The operating system's calls that change files, in one place, so that tests can make each of them fail.

    Each may raise `OSError`. Reading does not go through here: it cannot lose anything. Thread: any; methods block.
    """

    def open(self, path: Path, flags: int) -> int:
        """Return a file descriptor, not inherited by child processes; new files get mode 0o644."""
        return os.open(path, flags, 0o644)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def pwritev(self, fd: int, buffers: Sequence[Segment], offset: int) -> int:
        """Write buffers one after the other from `offset` on; return the number of bytes written.

        REQUIRES: at most IOV_MAX buffers.
        """
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, size_bytes: int) -> None:
        """Reserve blocks for a range, which reads as zeros, and grow the file to its end."""
        os.posix_fallocate(fd, offset, size_bytes)

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Set the file's size."""
        os.ftruncate(fd, size_bytes)

    def fdatasync(self, fd: int) -> None:
        """Make the file's data and size survive power loss."""
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        """Make the file and all of its metadata survive power loss."""
        os.fsync(fd)

    def fsync_dir(self, path: Path) -> None:
        """Make creations, renames and removals in a directory survive power loss."""
        fsync_path(path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file, replacing any file at the target."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def drop_cache(self, fd: int) -> None:
        """Ask that later reads of synced data come from the disk; a hint, which may have no effect."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
