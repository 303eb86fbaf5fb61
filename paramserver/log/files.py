"""The update log in files: segments, one writer thread, group commit, and recovery after a crash.

    loop's thread     append: seq, queue ─────┐                                     ┌─▶ futures, once a group
    writer's thread                           └─▶ checksums, tail, fdatasync ───────┘

A failed write or sync stops the log for good. Nothing unsynced is ever acked, and nothing is retried, because after a
failed sync the kernel forgets the pages that it could not write.

A closed log has only sealed segments. After a crash the last one has no seal: it is checked record by record, cut after
the last intact record, and sealed. So writing always begins with a new segment.

Format, start-up rules and guarantees: `docs/update-log.md`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.paramserver.log.interface import (
    Append,
    DurableFuture,
    LogMetrics,
    LogRecord,
    UpdateLogConfig,
    check_record,
)
from headrace.paramserver.log.segment_reader import SegmentReader, check_chain, damage, load_sealed, read_records
from headrace.paramserver.log.segments import (
    UNFINISHED_SUFFIX,
    FileOps,
    LogSegment,
    SegmentList,
    list_segments,
    storage_errors,
)
from headrace.paramserver.log.writer import LogWriter, PendingRecord
from headrace.paramserver.system.file_lock import FileLock
from headrace.schemas.errors import GoneError, HeadraceError, OverloadedError, StorageError, UnavailableError
from headrace.schemas.log_records import MAX_PAYLOAD_BYTES, RECORD_HEADER_BYTES, Seal, encode_seal, pack_header
from headrace.schemas.messages import Segment

__all__ = ["FileUpdateLog"]

_log = logging.getLogger(__name__)

_LOCK_NAME = "LOCK"  # ON DISK
# When clients of a full log should try again: after a few groups.
_RETRY_AFTER_S = 0.05


class FileUpdateLog:
    """The update log of one shard in a directory of its own. Implements `UpdateLog`.

    The directory is locked (`flock`) while the log is open. Dropping a log without `close` equals a crash.

    Attributes, besides those of `UpdateLog`:
        path: The directory.
        log_id: 16 random bytes that identify this log; drawn with the first segment.
        torn_tail: What opening cut from the log's end, as text for the user; None if nothing.
    """

    def __init__(
        self,
        path: Path,
        segments: list[LogSegment],
        lock: FileLock,
        *,
        torn_tail: str | None,
        begin_seq: int,
        begin_mark: int | None,
        config: UpdateLogConfig,
        ops: FileOps,
        clock_us: Callable[[], int],
    ) -> None:
        """Use `open`."""
        self.path = path
        self.log_id = segments[0].header.log_id if segments else secrets.token_bytes(16)
        self.metrics = LogMetrics()
        self.pending_bytes = 0
        self.torn_tail = torn_tail
        self._segments = SegmentList(segments, begin_seq=begin_seq)
        self._lock = lock
        self._begin_seq, self._begin_mark = begin_seq, begin_mark
        self._config, self._ops, self._clock_us = config, ops, clock_us
        self._trim_lock = threading.Lock()
        last_seq = segments[-1].last_seq if segments else begin_seq - 1
        self._next_seq = last_seq + 1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed: asyncio.Future[None] | None = None
        self._failure: asyncio.Future[HeadraceError] | None = None
        self._writer = LogWriter(
            path,
            self._segments,
            log_id=self.log_id,
            last_seq=last_seq,
            config=config,
            ops=ops,
            metrics=self.metrics,
            clock_us=clock_us,
            on_settled=self._on_settled,
            on_stopped=self._on_stopped,
        )

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        begin_seq: int = 1,
        begin_mark: int | None = None,
        config: UpdateLogConfig | None = None,
        ops: FileOps | None = None,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> FileUpdateLog:
        """Open a log and repair what a crash left; create the directory if it is missing.

        `begin_seq` is the first seq of a log without segments, 1 except in a copy of another log; `begin_mark` is the
        source's mark of the record before that, if it is known. `clock_us` is a wall clock in microseconds since 1970.
        Tests pass an `ops` that fails.

        Raises:
            ConfigError: The log is open elsewhere.
            StorageError: The file system refuses, or there is no memory for the tail.
            CorruptionError: A segment is damaged or missing; nothing was changed.

        Thread: any; blocks while it reads the last segment.
        """
        config, ops, path = config or UpdateLogConfig(), ops or FileOps(), path.absolute()
        lock = _lock_directory(path, ops)
        try:
            segments, torn_tail = _recover_segments(path, ops, clock_us)
            if torn_tail is not None:
                _log.warning("the update log had a torn tail: %s", torn_tail)
            with storage_errors(path, f"taking {config.tail_bytes} bytes of memory for the log's tail"):
                log = cls(
                    path,
                    segments,
                    lock,
                    torn_tail=torn_tail,
                    begin_seq=begin_seq,
                    begin_mark=begin_mark,
                    config=config,
                    ops=ops,
                    clock_us=clock_us,
                )
        except BaseException:
            lock.close()
            raise
        return log

    @property
    def first_seq(self) -> int:
        """See `UpdateLog`."""
        return self._segments.first_seq

    @property
    def last_seq(self) -> int:
        """See `UpdateLog`."""
        return self._writer.last_seq

    @property
    def term(self) -> int:
        """0: one machine locks this log."""
        return 0

    @property
    def max_payload_bytes(self) -> int:
        """See `UpdateLog`."""
        return MAX_PAYLOAD_BYTES

    def check_owned(self) -> None:
        """Return: the lock of the directory is held."""

    @property
    def failed(self) -> StorageError | None:
        """See `UpdateLog`."""
        return self._writer.failed

    @property
    def size_bytes(self) -> int:
        """See `UpdateLog`."""
        return self._segments.size_bytes

    def become_mirror(self, *, gather_s: float) -> None:
        """Take records that another log has committed from now on: none is refused, and no ack waits for this disk.

        `gather_s` is as of `UpdateLogConfig`. Thread: the loop's.
        """
        self._config = replace(self._config, max_pending_bytes=1 << 62, gather_s=gather_s)
        self._writer.gather_s = gather_s

    async def wait_failed(self) -> HeadraceError:
        """See `UpdateLog.wait_failed`."""
        if self.failed is not None:
            return self.failed
        self._failure = self._failure or asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._failure)

    def append(self, *, epoch: int, header: dict[str, Any], body: Sequence[Segment], source_mark: int = 0) -> Append:
        """See `UpdateLog.append`. For a record of another log, `source_mark` is its mark there.

        A segment has records of one mark only.
        """
        if (failed := self._writer.failed) is not None:
            raise _copied(failed)  # not `failed`: each raise adds a traceback, whose frames keep buffers
        if self._closed is not None:
            raise UnavailableError(f"{self.path}: the log is closed")
        packed = pack_header(header)
        size_bytes = RECORD_HEADER_BYTES + check_record(epoch, packed, body)
        if self.pending_bytes and self.pending_bytes + size_bytes > self._config.max_pending_bytes:
            raise OverloadedError(
                f"{self.pending_bytes} bytes wait for the disk, the most is {self._config.max_pending_bytes}",
                retry_after_s=_RETRY_AFTER_S,
            )
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        assert self._loop is loop, "a log is appended to from one event loop"
        durable = DurableFuture(loop=loop)
        pending = PendingRecord(self._next_seq, epoch, packed, body, size_bytes, source_mark, durable)
        self._next_seq += 1
        self.pending_bytes += size_bytes
        self._writer.put(pending)
        return Append(pending.seq, pending.durable)

    def read(self, from_seq: int, *, past_cache: bool = False) -> Iterator[LogRecord]:
        """See `UpdateLog.read`."""
        if from_seq < 1:
            raise ValueError(f"seq {from_seq}: the first is 1")
        last_seq = self._writer.last_seq  # before the segments, which can only hold more
        segments = self._segments.snapshot()
        first_seq = segments[0].first_seq if segments else last_seq + 1
        if from_seq < first_seq:
            raise GoneError(f"the log begins at seq {first_seq}, seq {from_seq} has been removed")
        return read_records(segments, from_seq, last_seq, past_cache=past_cache)

    def nonce_of(self, seq: int) -> int | None:
        """See `UpdateLog.nonce_of`. No process writes to a segment that another one began."""
        segment = self._segments.find(seq)
        if segment is not None:
            return segment.mark
        return self._begin_mark if seq == self._begin_seq - 1 else None

    def trim(self, before_seq: int, *, max_bytes: int | None = None, max_age_s: float | None = None) -> int:
        """See `UpdateLog.trim`."""
        oldest_us = None if max_age_s is None else self._clock_us() - int(max_age_s * 1e6)
        with self._trim_lock:
            while (segment := self._segments.next_to_trim(before_seq, max_bytes, oldest_us)) is not None:
                with storage_errors(segment.path, "removing the segment"):
                    # Each removal is synced before the next, so a crash never leaves a gap.
                    with contextlib.suppress(FileNotFoundError):  # already removed
                        self._ops.unlink(segment.path)
                    self._ops.fsync_dir(self.path)
                self._segments.remove(segment)
        return self.first_seq

    async def close(self) -> None:
        """See `UpdateLog.close`."""
        if self._closed is None:
            self._loop = self._loop or asyncio.get_running_loop()
            self._closed = self._loop.create_future()
            self._writer.stop()
        await asyncio.shield(self._closed)
        self._writer.join()  # the thread has nothing left to do

    # The next two run in the writer's thread.

    def _on_settled(self, records: list[PendingRecord], error: StorageError | None) -> None:
        self._call_in_loop(lambda: self._settle(records, error))

    def _on_stopped(self) -> None:
        self._lock.close()
        closed = self._closed
        assert closed is not None
        self._call_in_loop(lambda: closed.set_result(None))

    def _call_in_loop(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            # The loop was closed without closing the log: nobody waits any more.

    def _settle(self, records: list[PendingRecord], error: StorageError | None) -> None:
        for record in records:
            self.pending_bytes -= record.size_bytes
            if error is None:
                record.durable.set_result(None)
            else:
                record.durable.set_exception(_copied(error))
        if error is not None and self._failure is not None and not self._failure.done():
            self._failure.set_result(error)


def _copied(error: StorageError) -> StorageError:
    return StorageError(str(error), is_disk_full=error.is_disk_full)


def _lock_directory(path: Path, ops: FileOps) -> FileLock:
    """Lock a log's directory, created durably if missing."""
    with storage_errors(path, "opening the log"):
        missing = [parent for parent in (path, *path.parents) if not parent.exists()]
        for directory in reversed(missing):
            directory.mkdir()
            ops.fsync_dir(directory.parent)
        busy = f"{path}: the log is in use by another process; stop that one first"
        return FileLock.acquire(path / _LOCK_NAME, busy=busy)


def _recover_segments(path: Path, ops: FileOps, clock_us: Callable[[], int]) -> tuple[list[LogSegment], str | None]:
    """Return a log's segments, all sealed, and what was cut from the last one, or None. Nothing is changed on damage.

    REQUIRES: the caller holds the directory's lock.
    """
    with storage_errors(path, "listing the log"):
        unfinished = [path / name for name in sorted(os.listdir(path)) if name.endswith(UNFINISHED_SUFFIX)]
        paths = list_segments(path)
    segments: list[LogSegment] = []
    reason: str | None = None
    for file in paths:
        if file == paths[-1]:
            _read_from_disk(file, ops)
        segment = load_sealed(file)
        if segment is None:
            if file != paths[-1]:
                raise damage(file, file.stat().st_size, "no seal, and not the last segment")
            with SegmentReader(file) as reader:
                segment, reason = reader.scan_tail()
        segments.append(segment)
    check_chain(segments)
    # Nothing was changed before this point.
    with storage_errors(path, "removing an unfinished segment"):
        for file in unfinished:
            ops.unlink(file)
    if segments and segments[-1].sealed_us is None:
        _seal_last(segments[-1], ops, clock_us())
    if reason is None:
        return segments, None
    return segments, f"{reason}; the log continues after seq {segments[-1].last_seq}"


def _read_from_disk(path: Path, ops: FileOps) -> None:
    """Let the last segment be read as the disk has it, its seal included: the next segment relies on that."""
    with storage_errors(path, "syncing"), _opened(path, ops) as fd:
        # What a killed process wrote may be in memory only, and a failed sync leaves pages there that the disk never
        # got. So write what can be written, drop the cache, and read what is on the disk.
        ops.fdatasync(fd)
        ops.drop_cache(fd)


def _seal_last(segment: LogSegment, ops: FileOps, now_us: int) -> None:
    """Cut and seal the last segment durably. After a crash in between, the next start does the same again."""
    num_records = segment.last_seq - segment.first_seq + 1
    seal = encode_seal(nonce=segment.header.nonce, seal=Seal(segment.last_seq, num_records, now_us))
    with storage_errors(segment.path, "sealing"), _opened(segment.path, ops) as fd:
        ops.truncate(fd, segment.end)
        written = ops.pwritev(fd, [seal], segment.end)
        if written != len(seal):
            raise OSError(f"only {written} of {len(seal)} bytes written")
        ops.fsync(fd)
    segment.sealed_us = now_us


@contextlib.contextmanager
def _opened(path: Path, ops: FileOps) -> Iterator[int]:
    fd = ops.open(path, os.O_RDWR)
    try:
        yield fd
    finally:
        ops.close(fd)
