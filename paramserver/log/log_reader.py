"""Reading an update log across its segments. Changes nothing, takes no lock: safe beside a running server."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from headrace.paramserver.log.log_segments import LogSegment, list_segments
from headrace.paramserver.log.segment_file import SegmentFile, Tail, damage
from headrace.paramserver.log.update_log import LogRecord
from headrace.schemas.errors import CorruptionError, GoneError
from headrace.schemas.log_records import SEAL_BYTES, RecordKind

__all__ = ["LogReader", "check_chain", "load_sealed", "read_records"]


class LogReader:
    """A log's directory as it was when this was made, for tools: reads what `FileUpdateLog` reads, without opening it.

    Beside a running server it sees records as soon as they are written, synced or not.

    Attributes:
        segments: All of them, or those up to the last record that matters, oldest first.
    """

    def __init__(self, directory: Path, to_seq: int | None = None) -> None:
        """Take stock of the segments.

        Args:
            directory: The log's.
            to_seq: Last record that matters, whatever has become of what is behind it; None if all do.

        Raises:
            StorageError: The directory or a segment cannot be read.
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

    @property
    def first_seq(self) -> int:
        """Oldest record; `last_seq + 1` when there is none."""
        return self.segments[0].first_seq if self.segments else 1

    @property
    def last_seq(self) -> int:
        """Newest record; 0 in a new log."""
        return self.segments[-1].last_seq if self.segments else 0

    def read(self, from_seq: int) -> Iterator[LogRecord]:
        """Return an iterator over the records from one on; see `UpdateLog.read`."""
        if from_seq < self.first_seq:
            raise GoneError(f"the log begins at seq {self.first_seq}, seq {from_seq} has been removed")
        return read_records(self.segments, from_seq, self.last_seq)


def load_sealed(path: Path) -> LogSegment | None:
    """Return a sealed segment, or None for one without a seal.

    Raises:
        FileNotFoundError: It is not there.
        StorageError: It cannot be read.
        CorruptionError: Its header is damaged, or contradicts its seal or its name.
    """
    with SegmentFile(path) as file:
        seal = file.read_seal()
        if seal is None:
            return None
        header, end = file.header, file.limit - SEAL_BYTES
        if seal.num_records != seal.last_seq - header.first_seq + 1:
            raise damage(path, end, f"the seal says {seal.num_records} records up to seq {seal.last_seq}")
        return LogSegment(path, header, seal.last_seq, end, seal.sealed_us)


def _load_open(path: Path, to_seq: int | None, *, is_last: bool) -> LogSegment:
    """Return a segment without a seal, cut where it is damaged if that is behind the last record that matters."""
    with SegmentFile(path) as file:
        try:
            tail = _scan_growing(file)
            last_seq, end = tail.last_seq, tail.end
        except CorruptionError:
            sound = [file.header.first_seq - 1]
            with suppress(CorruptionError):  # the same once more
                file.scan_tail(lambda record, _: sound.append(record.seq))
            last_seq, end = sound[-1], file.offset
            if to_seq is None or last_seq < to_seq:
                raise
        if not is_last and (to_seq is None or last_seq < to_seq):
            raise damage(path, end, "no seal, and not the last segment")
        return LogSegment(path, file.header, last_seq, end, None)


def _scan_growing(file: SegmentFile) -> Tail:
    """Return what `SegmentFile.scan_tail` does, of a segment that may be written to meanwhile.

    A record that was half written when it was read, and whose successors were there when they were looked for, looks
    like damage. Real damage is still there, at the same place, the next time.

    Raises:
        CorruptionError: An acked record is damaged.
    """
    damaged_at = -1
    while True:
        try:
            return file.scan_tail()
        except CorruptionError:
            if file.offset == damaged_at:
                raise
            damaged_at = file.offset
            file.refresh()


def check_chain(segments: Sequence[LogSegment]) -> None:
    """Check that each segment goes on where the one before it ends.

    Raises:
        CorruptionError: One is missing or belongs to another log.
    """
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
    """Yield the records from `from_seq` to `last_seq`, each checked.

    Args:
        segments: All that hold them, ascending.
        from_seq: First seq.
        last_seq: Last seq, durable.
        past_cache: See `UpdateLog.read`.

    Raises:
        GoneError: A segment has been removed meanwhile.
        StorageError: A segment cannot be read.
        CorruptionError: A record is damaged or missing.

    Thread: any. It blocks.
    """
    for segment in segments:
        if segment.last_seq < from_seq or segment.first_seq > last_seq:
            continue
        try:
            file = SegmentFile(segment.path, segment.read_recent, past_cache=past_cache)
        except FileNotFoundError as exc:
            seq = max(from_seq, segment.first_seq)
            raise GoneError(f"the log no longer holds seq {seq}: {segment.path.name} has been removed") from exc
        with file:
            yield from _read_segment(file, segment, from_seq, min(last_seq, segment.last_seq))


def _read_segment(file: SegmentFile, segment: LogSegment, from_seq: int, last_seq: int) -> Iterator[LogRecord]:
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
