"""The update log in memory, for tests: keeps every promise of `UpdateLog` but the one about power loss.

Like the file log it makes records durable group by group, later than `append`; a test can hold them back (`hold`,
`release`) and let the log fail (`fail`).
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.paramserver.log.interface import (
    Append,
    DurableFuture,
    LogMetrics,
    LogRecord,
    UpdateLogConfig,
    check_record,
)
from headrace.schemas.errors import (
    GoneError,
    HeadraceError,
    LogFencedError,
    OverloadedError,
    StorageError,
    UnavailableError,
)
from headrace.schemas.log_records import (
    MAX_PAYLOAD_BYTES,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    pack_header,
    unpack_header,
)
from headrace.schemas.messages import Segment

__all__ = ["MemoryUpdateLog"]


@dataclass(frozen=True, slots=True)
class _Record:
    seq: int
    epoch: int
    header: bytes
    body: bytes
    size_bytes: int
    source_mark: int


@dataclass(slots=True)
class _Segment:
    written_us: int
    nonce: int
    source_mark: int
    size_bytes: int = SEGMENT_HEADER_BYTES
    records: list[_Record] = field(default_factory=list)


class MemoryUpdateLog:
    """A log that lasts as long as the object. Implements `UpdateLog`; can be opened again after `close` (`reopen`).

    Attributes:
        first_seq: See `UpdateLog`.
        last_seq: See `UpdateLog`.
        failed: See `UpdateLog`.
        metrics: See `UpdateLog`.
        pending_bytes: See `UpdateLog`.
        term: See `UpdateLog`.
        max_payload_bytes: See `UpdateLog`.
        is_owned: What `check_owned` looks at.
    """

    def __init__(
        self,
        *,
        config: UpdateLogConfig | None = None,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
        begin_seq: int = 1,
        begin_mark: int | None = None,
    ) -> None:
        """Make an empty log.

        Args:
            config: Settings; what concerns disks is ignored.
            clock_us: Wall clock, microseconds since 1970.
            begin_seq: First seq.
            begin_mark: The source's mark of the record before that.
        """
        self.first_seq = begin_seq
        self.last_seq = begin_seq - 1
        self._begin_seq, self._begin_mark = begin_seq, begin_mark
        self.failed: StorageError | LogFencedError | None = None
        self.metrics = LogMetrics()
        self.pending_bytes = self.term = 0
        self.max_payload_bytes = MAX_PAYLOAD_BYTES
        self.is_owned = True
        self._config = config or UpdateLogConfig()
        self._clock_us = clock_us
        self._lock = threading.Lock()
        self._segments: list[_Segment] = []
        self._segment: _Segment | None = None  # the one that this log writes to
        self._next_seq = begin_seq
        self._pending: list[tuple[int, int, bytes, Sequence[Segment], int, int, DurableFuture]] = []
        self._failure: asyncio.Future[HeadraceError] | None = None
        self._is_held = False
        self._is_scheduled = False
        self._is_closed = False

    def reopen(self) -> MemoryUpdateLog:
        """Return a log that goes on where this closed or failed one was durable."""
        log = type(self)(
            config=self._config, clock_us=self._clock_us, begin_seq=self._begin_seq, begin_mark=self._begin_mark
        )
        with self._lock:
            log._segments = list(self._segments)
        log.first_seq, log.last_seq = self.first_seq, self.last_seq
        log._next_seq = self.last_seq + 1
        return log

    def check_owned(self) -> None:
        """See `UpdateLog`."""
        if not self.is_owned:
            raise UnavailableError("the log is not owned by this process")

    def hold(self) -> None:
        """Make nothing durable until `release`."""
        self._is_held = True

    def release(self) -> None:
        """Undo `hold`."""
        self._is_held = False
        self._schedule()

    def fail(self, error: StorageError | LogFencedError) -> None:
        """Fail as after a failed sync, or a takeover: nothing that is pending becomes durable, ever."""
        self.failed = error
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(error)
        self._schedule()

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
        with self._lock:
            return sum(segment.size_bytes for segment in self._segments)

    def append(self, *, epoch: int, header: dict[str, Any], body: Sequence[Segment], source_mark: int = 0) -> Append:
        """See `UpdateLog.append`, and `FileUpdateLog.append`."""
        if self.failed is not None:
            raise type(self.failed)(str(self.failed))
        if self._is_closed:
            raise UnavailableError("the log is closed")
        packed = pack_header(header)
        size_bytes = RECORD_HEADER_BYTES + check_record(epoch, packed, body)
        if self.pending_bytes and self.pending_bytes + size_bytes > self._config.max_pending_bytes:
            raise OverloadedError(
                f"{self.pending_bytes} bytes are pending, the most is {self._config.max_pending_bytes}"
            )
        durable = DurableFuture(loop=asyncio.get_running_loop())
        seq = self._next_seq
        self._next_seq += 1
        self.pending_bytes += size_bytes
        self._pending.append((seq, epoch, packed, body, size_bytes, source_mark, durable))
        self._schedule()
        return Append(seq, durable)

    def read(self, from_seq: int, *, past_cache: bool = False) -> Iterator[LogRecord]:
        """See `UpdateLog.read`."""
        if from_seq < 1:
            raise ValueError(f"seq {from_seq}: the first is 1")
        with self._lock:
            if from_seq < self.first_seq:
                raise GoneError(f"the log begins at seq {self.first_seq}, seq {from_seq} has been removed")
            records = [record for segment in self._segments for record in segment.records if record.seq >= from_seq]
        return (
            LogRecord(record.seq, record.epoch, unpack_header(record.header), memoryview(record.body))
            for record in records
        )

    def nonce_of(self, seq: int) -> int | None:
        """See `UpdateLog.nonce_of`."""
        with self._lock:
            held = (segment for segment in self._segments if segment.records[0].seq <= seq <= segment.records[-1].seq)
            mark = next((segment.source_mark or segment.nonce for segment in held), None)
        return self._begin_mark if mark is None and seq == self._begin_seq - 1 else mark

    def trim(self, before_seq: int, *, max_bytes: int | None = None, max_age_s: float | None = None) -> int:
        """See `UpdateLog.trim`."""
        oldest_us = None if max_age_s is None else self._clock_us() - int(max_age_s * 1e6)
        is_unbounded = max_bytes is None and oldest_us is None
        with self._lock:
            segments = self._segments
            while len(segments) > 1 and segments[0].records[-1].seq < before_seq:
                is_too_much = max_bytes is not None and sum(each.size_bytes for each in segments) > max_bytes
                is_too_old = oldest_us is not None and segments[0].written_us < oldest_us
                if not (is_unbounded or is_too_much or is_too_old):
                    break
                del segments[0]
                self.first_seq = segments[0].records[0].seq
        return self.first_seq

    async def close(self) -> None:
        """See `UpdateLog.close`. What is held is let go."""
        self._is_closed = True
        self.release()
        if self._pending:
            # The last one is done last. It may fail; that is for who waits for it to know.
            await asyncio.wait([self._pending[-1][-1]])

    def _schedule(self) -> None:
        if self._pending and not self._is_scheduled and (not self._is_held or self.failed is not None):
            self._is_scheduled = True
            self._pending[0][-1].get_loop().call_soon(self._commit)

    def _commit(self) -> None:
        self._is_scheduled = False
        if self._is_held and self.failed is None:
            return
        pending, self._pending = self._pending, []
        for seq, epoch, header, body, size_bytes, source_mark, durable in pending:
            self.pending_bytes -= size_bytes
            if self.failed is not None:
                durable.set_exception(type(self.failed)(str(self.failed)))
                continue
            self._add(_Record(seq, epoch, header, b"".join(body), size_bytes, source_mark))
            self.last_seq = seq
            self.metrics.num_records += 1
            self.metrics.written_bytes += size_bytes
            durable.set_result(None)
        self.metrics.num_groups += 1

    def _add(self, record: _Record) -> None:
        with self._lock:
            segment = self._segment
            is_full = segment is None or segment.size_bytes + record.size_bytes > self._config.segment_bytes
            if segment is None or is_full or segment.source_mark != record.source_mark:
                nonce = secrets.randbits(64) - 2**63
                self._segment = segment = _Segment(self._clock_us(), nonce, record.source_mark)
                self._segments.append(segment)
            segment.records.append(record)
            segment.size_bytes += record.size_bytes
            segment.written_us = self._clock_us()
