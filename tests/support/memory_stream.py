"""A replicated log in memory: one stream, and the logs of the processes that follow or own it.

It has the rules of the real one that a shard sees: owners and terms, void records, fencing, silence, and stalls.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.paramserver.log.interface import Append, DurableFuture, LogMetrics, LogRecord, check_record, note_header
from headrace.paramserver.log.jetstream.appender import StreamMetrics
from headrace.paramserver.log.jetstream.engine import StreamState
from headrace.schemas.errors import GoneError, HeadraceError, LogFencedError, UnavailableError
from headrace.schemas.log_records import MAX_PAYLOAD_BYTES, pack_header, unpack_header
from headrace.schemas.messages import Segment

__all__ = ["MemoryStream", "StreamLog"]


@dataclass(frozen=True, slots=True)
class _Record:
    term: int
    mark: int
    epoch: int
    header: bytes
    body: bytes


class MemoryStream:
    """The records that all machines have, from `first_seq` on.

    Attributes:
        term: Of the last open record.
        owner: Its address.
    """

    def __init__(self) -> None:
        """Make an empty stream."""
        self.first_seq, self.term, self.owner = 1, 0, ""
        self.records: list[_Record] = []
        self.is_held = False  # nothing becomes durable
        self.is_silent = False
        self._logs: list[StreamLog] = []

    @property
    def last_seq(self) -> int:
        """Last committed record."""
        return self.first_seq + len(self.records) - 1

    def add(self, epoch: int, header: dict[str, Any], body: bytes, *, term: int, mark: int) -> int:
        """Commit a record, which is void if its term is not the present one; return its seq."""
        if term != self.term:
            header, body, epoch = note_header("void"), b"", 1
        self.is_silent = False
        self.records.append(_Record(term, mark, epoch, pack_header(header), body))
        for log in self._logs:
            log._wake()
        return self.last_seq

    def open_term(self, log: StreamLog, term: int, owner: str, offer: str | None = None) -> None:
        """Let a log become the owner."""
        self.term, self.owner = term, owner
        header = note_header("open") if offer is None else note_header("open", id=offer)
        self.add(1, header, b"", term=term, mark=log.mark)
        for other in self._logs:
            if other is not log:
                other._fence()

    def purge(self, before_seq: int) -> None:
        """Remove the records before a seq."""
        num_gone = min(before_seq, self.last_seq + 1) - self.first_seq
        if num_gone > 0:
            del self.records[:num_gone]
            self.first_seq += num_gone

    def beat(self) -> None:
        """Let the owner append what it appends when idle."""
        for log in self._logs:
            if log.is_owner:
                self.add(1, note_header("heartbeat"), b"", term=log.term_held, mark=log.mark)

    def fall_silent(self) -> None:
        """Have been silent for long, until the next record."""
        self.is_silent = True
        for log in self._logs:
            log._wake()

    def log(self) -> StreamLog:
        """Return a log that follows."""
        log = StreamLog(self)
        self._logs.append(log)
        return log


class StreamLog:
    """One process's log on a `MemoryStream`. Implements `ReplicatedLog`."""

    def __init__(self, stream: MemoryStream) -> None:
        """Use `MemoryStream.log`."""
        self.stream = stream
        self.mark, self.term_held = 0, 0
        self.failed: HeadraceError | None = None
        self.metrics = LogMetrics()
        self.pending_bytes = self.size_bytes = 0
        self.max_payload_bytes = MAX_PAYLOAD_BYTES
        self.stalled_s, self.is_full, self.outstanding_bytes = 0.0, False, 0
        self.stream_metrics = StreamMetrics()
        self.state: StreamState | None = None
        self.is_lease_over = False  # what `check_owned` looks at
        self.first_mirrored_seq: int | None = None  # if the mirror has more than the stream
        self._changed, self._silence = asyncio.Event(), asyncio.Event()
        self._pending: list[tuple[int, dict[str, Any], bytes, DurableFuture]] = []
        self._failure: asyncio.Future[HeadraceError] = asyncio.get_running_loop().create_future()
        self._is_closed = False

    @property
    def first_seq(self) -> int:
        """See `UpdateLog`."""
        return self.first_mirrored_seq or self.stream.first_seq

    @property
    def last_seq(self) -> int:
        """See `UpdateLog`."""
        return self.stream.last_seq

    @property
    def term(self) -> int:
        """See `ReplicatedLog`."""
        return self.stream.term

    @property
    def owner(self) -> str:
        """See `ReplicatedLog`."""
        return self.stream.owner

    @property
    def is_owner(self) -> bool:
        """See `ReplicatedLog`."""
        return bool(self.term_held) and self.failed is None and not self._is_closed

    async def engine_state(self) -> StreamState | None:
        """See `ReplicatedLog`."""
        return self.state

    async def wait_beyond(self, seq: int) -> None:
        """See `ReplicatedLog`."""
        while self.last_seq <= seq:
            self._changed.clear()
            await self._changed.wait()

    async def wait_silent(self) -> None:
        """See `ReplicatedLog`."""
        while not self.stream.is_silent:
            self._silence.clear()
            await self._silence.wait()

    async def take_over(self, applied_seq: int, *, owner: str, above_term: int = 0, offer: str | None = None) -> bool:
        """See `ReplicatedLog`."""
        if applied_seq != self.last_seq:
            return False
        self.mark, self.term_held = secrets.randbits(62) + 1, max(self.term, above_term) + 1
        self.stream.open_term(self, self.term_held, owner, offer)
        return True

    def check_owned(self) -> None:
        """See `UpdateLog`."""
        if not self.is_owner or self.is_lease_over:
            raise UnavailableError("this process does not own the log now")

    def append(self, *, epoch: int, header: dict[str, Any], body: Sequence[Segment]) -> Append:
        """See `UpdateLog`."""
        if self.failed is not None:
            raise type(self.failed)(str(self.failed))
        if not self.is_owner:
            raise UnavailableError("the log is followed, not owned")
        check_record(epoch, pack_header(header), body)
        durable = DurableFuture(loop=asyncio.get_running_loop())
        seq = self.last_seq + len(self._pending) + 1
        self._pending.append((epoch, header, b"".join(body), durable))
        asyncio.get_running_loop().call_soon(self.commit)
        return Append(seq, durable)

    def commit(self) -> None:
        """Make what is pending durable, unless the stream is held."""
        while self._pending and not self.stream.is_held and self.failed is None:
            epoch, header, body, durable = self._pending.pop(0)
            self.stream.add(epoch, header, body, term=self.term_held, mark=self.mark)
            durable.set_result(None)

    async def wait_failed(self) -> HeadraceError:
        """See `UpdateLog`."""
        return await asyncio.shield(self._failure)

    def read(self, from_seq: int, *, past_cache: bool = False) -> Iterator[LogRecord]:
        """See `UpdateLog`."""
        if from_seq < self.first_seq:
            raise GoneError(f"the log begins at seq {self.first_seq}, seq {from_seq} has been removed")
        found = list(enumerate(self.stream.records, self.first_seq))
        return (
            LogRecord(seq, record.epoch, unpack_header(record.header), memoryview(record.body))
            for seq, record in found
            if seq >= from_seq
        )

    def nonce_of(self, seq: int) -> int | None:
        """See `UpdateLog`."""
        at = seq - self.first_seq
        return self.stream.records[at].mark if 0 <= at < len(self.stream.records) else None

    def trim(self, before_seq: int, *, max_bytes: int | None = None, max_age_s: float | None = None) -> int:
        """See `UpdateLog`."""
        if max_bytes is None and max_age_s is None:
            self.stream.purge(before_seq)
        return self.first_seq

    async def close(self) -> None:
        """See `UpdateLog`."""
        self._is_closed = True
        for *_, durable in self._pending:
            durable.set_exception(UnavailableError("the log is closed"))
        self._pending.clear()

    def _wake(self) -> None:
        self._changed.set()
        self._silence.set()

    def _fence(self) -> None:
        if not self.term_held or self.failed is not None:
            return
        self.failed = LogFencedError(f"{self.stream.owner} has taken over in term {self.stream.term}")
        self._failure.set_result(self.failed)
        pending, self._pending = self._pending, []
        for *_, durable in pending:
            durable.set_exception(self.failed)
