"""Makes the copy of a stream's log the log of a server in files.

A segment without a `source_mark` is of the log's time in files; `own_segments` makes the others so.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from headrace.paramserver.log.interface import LogMetrics, LogRecord, UpdateLogConfig, check_record
from headrace.paramserver.log.segment_reader import damage, load_sealed, read_records
from headrace.paramserver.log.segments import FileOps, LogSegment, SegmentWriter, list_segments, storage_errors
from headrace.paramserver.log.tail import LogTail
from headrace.paramserver.log.writer import OutgoingRecord, write_records
from headrace.paramserver.system.durable import fsync_path
from headrace.schemas.log_records import RECORD_HEADER_BYTES, pack_header

__all__ = ["num_mirrored_bytes", "own_segments"]

_SEGMENT_TAIL_BYTES = 8 << 20
# Records that are written and synced together when a segment is written anew.
_GROUP_BYTES, _MAX_GROUP = 16 << 20, 10_000


class _SegmentCopy:
    """The segment that is to hold the records of a copied one, as one of the log itself. Thread: one; blocks.

    The mark is its nonce, so both tell the same of their records. No process writes to it once it is there, so no stale
    bytes can pass for records of it.
    """

    def __init__(self, directory: Path, segment: LogSegment) -> None:
        """Create it, in a directory that holds nothing else of that log."""
        self._mark, header = segment.header.source_mark, segment.header
        assert self._mark, "a copied segment"
        self._writer = SegmentWriter(
            directory,
            replace(header, nonce=self._mark % 2**64, source_mark=0),
            tail=LogTail(_SEGMENT_TAIL_BYTES),
            ops=FileOps(),
            metrics=LogMetrics(),
            config=UpdateLogConfig(allocate_bytes=0),
        )

    def write(self, records: Sequence[LogRecord]) -> None:
        """Add records and sync them once."""
        outgoing = []
        for record in records:
            packed = pack_header(record.header)
            size_bytes = RECORD_HEADER_BYTES + check_record(record.epoch, packed, [record.body])
            outgoing.append(OutgoingRecord(record.seq, record.epoch, packed, [record.body], size_bytes, self._mark))
        if outgoing:
            write_records(self._writer, outgoing, durable_seq=self._writer.segment.last_seq)

    def seal(self, sealed_us: int | None) -> Path:
        """Complete the segment and close it; return its file. `sealed_us` is the wall clock, None is now."""
        self._writer.seal(time.time_ns() // 1000 if sealed_us is None else sealed_us)
        return self._writer.segment.path

    def close(self) -> None:
        """Close the file as it is. Idempotent."""
        self._writer.close()


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
    writer = _SegmentCopy(aside, segment)
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
