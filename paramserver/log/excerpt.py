"""A part of a log as a segment of its own: made in memory, and put back into a log's directory elsewhere.

An excerpt has the format of a segment, and the nonce of the segment that its records come from: it holds the same
records. So what was proved about a record by its nonce, such as a follower's place, still holds in a log that is put
together from excerpts. No process writes to an excerpt, so no stale bytes can pass for records of it.

The log id is made from the names of server and shard. So excerpts of a shard are of one log, whoever made them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from headrace.paramserver.log.interface import LogRecord
from headrace.paramserver.log.segment_reader import SegmentReader, damage, load_sealed, read_records
from headrace.paramserver.log.segments import list_segments, segment_name, storage_errors
from headrace.paramserver.system.direct_file import copy_bytes, page_memory
from headrace.paramserver.system.durable import fsync_path
from headrace.schemas.errors import CorruptionError
from headrace.schemas.log_records import (
    Seal,
    SegmentHeader,
    encode_record,
    encode_seal,
    encode_segment_header,
    pack_header,
)

__all__ = ["LogExcerpt", "begin_log_at", "end_log", "excerpt_log_id", "write_excerpt"]

_EMPTY_NONCE = 1
_FIRST_BYTES = 1 << 20


def excerpt_log_id(server_id: str, shard: int) -> bytes:
    """Return the log id of a shard's excerpts, 16 bytes. ON DISK: never change it."""
    return hashlib.sha256(f"headrace-excerpt {server_id} {shard}".encode()).digest()[:16]


class LogExcerpt:
    """Records of one segment of a log, collected in memory. Thread: any, one at a time.

    Attributes:
        first_seq: Of the first record.
        last_seq: Of the last record; `first_seq - 1` without one.
        mark: `UpdateLog.nonce_of` of all records.
        size_bytes: Bytes collected.
        memory: Where they are; another excerpt may have it once this one's bytes are not needed.
    """

    def __init__(
        self, *, log_id: bytes, mark: int, first_seq: int, now_us: int, memory: memoryview | None = None
    ) -> None:
        """Begin without records; `now_us` is the wall clock, microseconds since 1970.

        What does not fit into `memory` is copied into a larger one; None begins with a small one.
        """
        self.first_seq, self.last_seq, self.mark = first_seq, first_seq - 1, mark
        self._nonce = mark % 2**64
        self.memory, self.size_bytes = page_memory(_FIRST_BYTES) if memory is None else memory, 0
        header = SegmentHeader(log_id=log_id, nonce=self._nonce, first_seq=first_seq, created_us=now_us)
        self._put(encode_segment_header(header))

    def add(self, record: LogRecord) -> None:
        """Add the next record, which is copied."""
        assert record.seq == self.last_seq + 1, "records of an excerpt come in order"
        header, body = pack_header(record.header), [record.body]
        before_body = encode_record(
            nonce=self._nonce,
            seq=record.seq,
            durable_seq=record.seq - 1,
            epoch=record.epoch,
            header=header,
            body=body,
        )
        self._put(before_body)
        self._put(record.body)
        self.last_seq = record.seq

    def seal(self, now_us: int) -> memoryview:
        """Return the whole segment; nothing may be added after."""
        seal = Seal(self.last_seq, self.last_seq - self.first_seq + 1, now_us)
        self._put(encode_seal(nonce=self._nonce, seal=seal))
        return self.memory[: self.size_bytes].toreadonly()

    def _put(self, data: bytes | memoryview) -> None:
        start, end = self.size_bytes, self.size_bytes + len(data)
        if end > len(self.memory):
            smaller, self.memory = self.memory, page_memory(max(end, 2 * len(self.memory)))
            copy_bytes(self.memory[:start], smaller[:start])
        copy_bytes(self.memory[start:end], memoryview(data))
        self.size_bytes = end


def write_excerpt(directory: Path, first_seq: int, chunks: Iterable[bytes | memoryview], *, last_seq: int) -> int:
    """Write an excerpt that comes from elsewhere as a segment of a log, checked and durable; end it at `last_seq`.

    Returns the highest epoch of its records; 0 without one.

    Raises:
        CorruptionError: It is no whole excerpt from `first_seq` on, or ends before `last_seq`.
        StorageError: The disk failed.
    """
    path = directory / segment_name(first_seq)
    with storage_errors(path, "writing the segment"), open(path, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
    return _end_segment(path, last_seq)


def end_log(directory: Path, last_seq: int) -> None:
    """Remove all records after `last_seq` from a log of excerpts; it continues there. Raises as `write_excerpt`."""
    for path in reversed(list_segments(directory)):
        segment = load_sealed(path)
        if segment is None:
            raise damage(path, path.stat().st_size, "an excerpt of a log without its seal")
        if segment.first_seq <= last_seq + 1:
            _end_segment(path, last_seq)  # an empty segment says where the log continues
            return
        with storage_errors(path, "removing the segment"):
            path.unlink()
            fsync_path(directory)
    raise CorruptionError(f"{directory}: the log begins after seq {last_seq + 1}")


def _end_segment(path: Path, last_seq: int) -> int:
    """Check every record of a sealed segment up to `last_seq`, remove what follows, and make it durable.

    Returns the highest epoch.
    """
    segment = load_sealed(path)
    if segment is None:
        raise damage(path, path.stat().st_size, "an excerpt of a log without its seal")
    if not segment.first_seq - 1 <= last_seq <= segment.last_seq:
        raise CorruptionError(
            f"{path}: has seqs {segment.first_seq} to {segment.last_seq}, and is to end at {last_seq}"
        )
    # Reading checks each record.
    highest = max((record.epoch for record in read_records([segment], segment.first_seq, last_seq)), default=0)
    if last_seq < segment.last_seq:
        end = _end_of(path, last_seq)
        num_records = last_seq - segment.first_seq + 1
        assert segment.sealed_us is not None
        seal = encode_seal(nonce=segment.header.nonce, seal=Seal(last_seq, num_records, segment.sealed_us))
        with storage_errors(path, "cutting the segment"), open(path, "r+b") as file:
            file.truncate(end)
            file.seek(end)
            file.write(seal)
    with storage_errors(path, "syncing"):
        fsync_path(path)
        fsync_path(path.parent)
    return highest


def _end_of(path: Path, last_seq: int) -> int:
    """Return the offset after a record of a checked segment."""
    with SegmentReader(path) as file:
        for _ in range(file.header.first_seq, last_seq + 1):
            record = file.peek()
            assert record is not None
            file.offset += record.size_bytes
        return file.offset


def begin_log_at(directory: Path, next_seq: int, *, log_id: bytes, now_us: int) -> None:
    """Make a log that has no records and continues at `next_seq`, durably. REQUIRES: the directory is empty."""
    header = SegmentHeader(log_id=log_id, nonce=_EMPTY_NONCE, first_seq=next_seq, created_us=now_us)
    seal = encode_seal(nonce=_EMPTY_NONCE, seal=Seal(next_seq - 1, 0, now_us))
    path = directory / segment_name(next_seq)
    with storage_errors(path, "writing the segment"):
        path.write_bytes(encode_segment_header(header) + seal)
        fsync_path(path)
