"""The update log in files: segments, one writer thread, group commit.

    loop's thread     append: seq, queue ─────┐                                     ┌─▶ futures, once a group
    writer's thread                           └─▶ checksums, tail, fdatasync ───────┘

A write or sync that fails stops the log for good: nothing that was not synced is ever acked, and nothing is tried
again, because after a failed sync the kernel forgets the pages that it could not write.

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
from pathlib import Path
from typing import Any

from headrace.paramserver.files.file_ops import FileOps, SystemFileOps
from headrace.paramserver.log.log_reader import read_records
from headrace.paramserver.log.log_recovery import claim_directory, recover_segments
from headrace.paramserver.log.log_segments import SegmentList, fail_storage
from headrace.paramserver.log.log_writer import LogWriter, PendingRecord
from headrace.paramserver.log.update_log import (
    Append,
    DurableFuture,
    LogMetrics,
    LogRecord,
    UpdateLogConfig,
    check_record,
)
from headrace.schemas.errors import GoneError, HeadraceError, OverloadedError, StorageError, UnavailableError
from headrace.schemas.log_records import RECORD_HEADER_BYTES, pack_header
from headrace.schemas.messages import Segment

__all__ = ["FileUpdateLog"]

_log = logging.getLogger(__name__)

# What a client is told to wait when the log is full: some groups' time.
_RETRY_AFTER_S = 0.05


def _now_us() -> int:
    return time.time_ns() // 1000


class FileUpdateLog:
    """The update log of one shard in a directory of its own. Implements `UpdateLog`.

    The directory is locked (`flock`) while the log is open. A log that is dropped without `close` is as after a crash:
    what was acked is there.

    Attributes:
        path: The directory.
        log_id: 16 bytes that tell this log from every other; drawn when the first segment is made.
        metrics: See `UpdateLog`.
        pending_bytes: See `UpdateLog`.
        cut: What was cut from the log's end when it was opened, for the user; None if nothing was.
    """

    def __init__(
        self,
        path: Path,
        segments: SegmentList,
        lock_fd: int,
        *,
        cut: str | None,
        config: UpdateLogConfig,
        ops: FileOps,
        clock_us: Callable[[], int],
    ) -> None:
        """Use `open`."""
        self.path = path
        self.log_id = segments.log_id or secrets.token_bytes(16)
        self.metrics = LogMetrics()
        self.pending_bytes = 0
        self.cut = cut
        self._segments = segments
        self._lock_fd = lock_fd
        self._config = config
        self._ops = ops
        self._clock_us = clock_us
        self._trim_lock = threading.Lock()
        self._next_seq = segments.last_seq + 1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed: asyncio.Future[None] | None = None
        self._failure: asyncio.Future[HeadraceError] | None = None
        self._writer = LogWriter(
            path,
            segments,
            log_id=self.log_id,
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
        config: UpdateLogConfig | None = None,
        ops: FileOps | None = None,
        clock_us: Callable[[], int] = _now_us,
    ) -> FileUpdateLog:
        """Open a log, making the directory if it is not there, and repair what a crash has left.

        Args:
            path: Directory.
            config: Settings.
            ops: The file system; tests put a failing one here.
            clock_us: Wall clock, microseconds since 1970.

        Raises:
            ConfigError: The log is open elsewhere.
            StorageError: The file system refuses, or there is no memory for the tail.
            CorruptionError: A segment is damaged or missing; nothing was changed.

        Thread: any. It blocks, for as long as it takes to read the last segment.
        """
        config, ops, path = config or UpdateLogConfig(), ops or SystemFileOps(), path.absolute()
        lock_fd = claim_directory(path, ops)
        try:
            segments, cut = recover_segments(path, ops, clock_us)
            if cut is not None:
                _log.warning("the update log had a torn tail: %s", cut)
            try:
                log = cls(path, SegmentList(segments), lock_fd, cut=cut, config=config, ops=ops, clock_us=clock_us)
            except OSError as exc:
                fail_storage(path, exc, doing=f"taking {config.tail_bytes} bytes of memory for the log's tail")
            log._writer.start()
        except BaseException:
            os.close(lock_fd)
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
    def failed(self) -> StorageError | None:
        """See `UpdateLog`."""
        return self._writer.failed

    async def wait_failed(self) -> HeadraceError:
        """See `UpdateLog.wait_failed`."""
        if self.failed is not None:
            return self.failed
        if self._failure is None:
            self._failure = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._failure)

    @property
    def size_bytes(self) -> int:
        """See `UpdateLog`."""
        return self._segments.size_bytes

    def append(self, *, epoch: int, header: dict[str, Any], body: Sequence[Segment]) -> Append:
        """See `UpdateLog.append`."""
        failed = self._writer.failed
        if failed is not None:
            raise _copy(failed)
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
        pending = PendingRecord(self._next_seq, epoch, packed, body, size_bytes, DurableFuture(loop=loop))
        self._next_seq += 1
        self.pending_bytes += size_bytes
        self._writer.put(pending)
        return Append(pending.seq, pending.durable)

    def read(self, from_seq: int, *, past_cache: bool = False) -> Iterator[LogRecord]:
        """See `UpdateLog.read`."""
        if from_seq < 1:
            raise ValueError(f"seq {from_seq}: the first is 1")
        last_seq = self._writer.last_seq  # before the segments: those can only hold more
        segments = self._segments.snapshot()
        first_seq = segments[0].first_seq if segments else last_seq + 1
        if from_seq < first_seq:
            raise GoneError(f"the log begins at seq {first_seq}, seq {from_seq} has been removed")
        return read_records(segments, from_seq, last_seq, past_cache=past_cache)

    def mark_of(self, seq: int) -> int | None:
        """See `UpdateLog.mark_of`: the segment's mark, as nobody writes to a segment that another has begun."""
        segment = self._segments.find(seq)
        if segment is None:
            return None
        mark = segment.header.mark
        return mark - 2**64 if mark >= 2**63 else mark

    def trim(self, before_seq: int, *, max_bytes: int | None = None, max_age_s: float | None = None) -> int:
        """See `UpdateLog.trim`."""
        oldest_us = None if max_age_s is None else self._clock_us() - int(max_age_s * 1e6)
        with self._trim_lock:
            while (segment := self._segments.next_to_trim(before_seq, max_bytes, oldest_us)) is not None:
                try:
                    # One at a time, each made to last before the next: never a gap after a crash.
                    with contextlib.suppress(FileNotFoundError):  # somebody else's doing, and what is wanted
                        self._ops.unlink(segment.path)
                    self._ops.fsync_dir(self.path)
                except OSError as exc:
                    fail_storage(segment.path, exc, doing="removing the segment")
                self._segments.remove(segment)
        return self.first_seq

    async def close(self) -> None:
        """See `UpdateLog.close`."""
        if self._closed is None:
            self._loop = self._loop or asyncio.get_running_loop()
            self._closed = self._loop.create_future()
            self._writer.stop()
        await asyncio.shield(self._closed)
        self._writer.join()  # it has nothing left to do

    # The next two run in the writer's thread.

    def _on_settled(self, records: list[PendingRecord], error: StorageError | None) -> None:
        self._call_in_loop(lambda: self._settle(records, error))

    def _on_stopped(self) -> None:
        os.close(self._lock_fd)
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
                record.durable.set_exception(_copy(error))
        if error is not None and self._failure is not None and not self._failure.done():
            self._failure.set_result(error)


def _copy(error: StorageError) -> StorageError:
    """Return an error to raise: raised again and again, one would gather tracebacks and keep their frames' buffers."""
    return StorageError(str(error))
