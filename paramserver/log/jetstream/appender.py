"""The owner's appends: sent ahead of their acks, settled in order, and never given up while the engine is away.

    append ──▶ queue ──▶ publish with expected = seq - 1 ──▶ own PubAck ──▶ settled from the head of the queue
                 ▲                                             │
                 └── publish the head again, read back ◀── anything else

A record is settled when its own PubAck has come, or when it was read back, and all records before it are settled. So
an owner that was refused at the open record of another one settles nothing behind it, whatever PubAcks come.

Nothing that the engine says of a record proves that it is not there: a leader that is cut off refuses from an old state
without asking anyone. So after anything but an ack, this publishes the oldest unsettled record again, unchanged, over
new connections, and reads, until there is a match; or until there is another owner's record at its place.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headrace.paramserver.log.interface import DurableFuture
from headrace.paramserver.log.jetstream.engine import (
    PublishOutcome,
    PublishReply,
    StoredMessage,
    StreamConnection,
    StreamEngine,
)
from headrace.paramserver.log.jetstream.terms import MAX_IN_FLIGHT
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    HeadraceError,
    LogFencedError,
    StorageError,
    UnavailableError,
)
from headrace.schemas.messages import Segment
from headrace.schemas.stream_records import (
    StreamRecord,
    StreamRecordKind,
    decode_stream_record,
    encode_stream_note,
    encode_stream_record,
)

__all__ = ["Appender", "PendingAppend", "StreamMetrics", "StreamTimes", "Takeover"]

_log = logging.getLogger(__name__)

# Refusals with an old last seq count as one run of them only if they come at least this often.
_SUSPICION_GAP_S = 5.0
_CANCEL_AGAIN_S = 0.1
# Bytes on their way to an engine whose speed is unknown, or slow: within the lease at 1.4 MB/s.
_LEAST_WINDOW_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamTimes:
    """How long a replicated log waits for what, in seconds.

    Attributes:
        heartbeat_s: An idle owner appends a record this often.
        lease_s: An owner answers for so long after it sent a record that was acked. Well below `silence_s`.
        silence_s: A standby takes over when a log that could be written to had no new record for so long.
        ack_s: A record at the head of the queue without an ack for so long is published again.
        get_s: For one message.
        retry_s: Between two attempts.
        lost_data_s: An engine that is well, and has had less than it has acked for so long, has lost data.
        owner_note_s: A busy owner too appends a record that tells its address this often.
        poll_s: A follower asks for new records this often while there are some.
        idle_poll_s: And this often while there are none.
        close_s: Closing waits for acks for so long.
    """

    heartbeat_s: float = 1.0
    lease_s: float = 3.0
    silence_s: float = 4.0
    ack_s: float = 2.0
    get_s: float = 1.0
    retry_s: float = 0.1
    lost_data_s: float = 30.0
    owner_note_s: float = 30.0
    poll_s: float = 0.005
    idle_poll_s: float = 0.05
    close_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.heartbeat_s < self.lease_s < self.silence_s:
            raise ConfigError("replicated log: heartbeat_s must be below lease_s, and that below silence_s")


@dataclass(slots=True)
class StreamMetrics:
    """What the engine did to a log since it was opened. Thread: the loop's; others may read.

    Attributes:
        num_refusals: Publishes that were not acked, by `PublishOutcome.value`.
        num_recoveries: Times that the owner had to find out what became of its records.
        num_voids: Void records that were read.
        num_elections: Changes of the stream's leader that were seen.
        stalled_s: Seconds during which records waited for an engine that did not ack, ended stalls only.
    """

    num_refusals: Counter[str] = field(default_factory=Counter)
    num_recoveries: int = 0
    num_voids: int = 0
    num_elections: int = 0
    stalled_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Takeover:
    """A term of this process: its number, its mark, the owner's address, and where its records begin."""

    term: int
    mark: int
    owner: str
    next_seq: int
    sent_s: float


@dataclass(slots=True, eq=False)
class PendingAppend:
    """A record that has a seq and is not settled.

    Attributes:
        seq: Its place, for good.
        kind: DATA or HEARTBEAT.
        epoch: Of a data record.
        packed: Its msgpack map.
        body: Its buffers, until it was encoded.
        size_bytes: Of the message.
        durable: Done once it is settled; None for a heartbeat.
        message: The bytes, once it was sent.
        first_sent_s: When it was sent first.
        sent_s: When it was sent on the present connection.
        owned_s: A time at which its ack proves that no other owner had opened.
        is_acked: Whether it is in the stream, at its place.
    """

    seq: int
    kind: StreamRecordKind
    epoch: int
    packed: bytes
    body: Sequence[Segment]
    size_bytes: int
    durable: DurableFuture | None
    message: bytes = b""
    first_sent_s: float = 0.0
    sent_s: float = 0.0
    owned_s: float = 0.0
    is_acked: bool = False


class Appender:
    """Appends in one term, until it is fenced, fails or is closed. Thread: the loop's.

    Attributes:
        takeover: The term.
        failed: Why it has ended; None while it has not.
        pending_bytes: Bytes of unsettled records.
        is_full: Whether the engine has no room, or takes no message of this size.
        owned_s: When this process owned the log for sure, by the loop's clock.
    """

    def __init__(
        self,
        engine: StreamEngine,
        takeover: Takeover,
        *,
        times: StreamTimes,
        metrics: StreamMetrics,
        max_in_flight_bytes: int,
        on_settled: Callable[[list[PendingAppend]], None],
        on_failed: Callable[[HeadraceError], None],
    ) -> None:
        """Begin to connect, and to append heartbeats.

        `on_settled` gets records in order, and then sets their futures. `on_failed` is called once, before the futures
        of all unsettled records fail.
        """
        self.takeover = takeover
        self.failed: HeadraceError | None = None
        self.pending_bytes = 0
        self.is_full = False
        self.owned_s = takeover.sent_s
        self._engine, self._times, self._metrics = engine, times, metrics
        self._max_in_flight_bytes = max_in_flight_bytes
        self._on_settled, self._on_failed = on_settled, on_failed
        self._loop = asyncio.get_running_loop()
        self._next_seq = takeover.next_seq
        self._queue: deque[PendingAppend] = deque()
        self._num_sent = 0  # the first of the queue, that were sent on this connection
        self._sent_bytes = 0
        self._window_bytes = self._least_window_bytes = min(_LEAST_WINDOW_BYTES, max_in_flight_bytes)
        self._shrunk_s = 0.0  # when it was halved last
        self._connection: StreamConnection | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._progress_s = self._appended_s = self._note_s = self._loop.time()
        self._suspected_s: tuple[float, float] | None = None  # first and last sign of lost data
        self._num_suspicions = 0
        self._drained: asyncio.Future[None] | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._beat_timer = self._loop.call_later(times.heartbeat_s, self._beat)
        self._recover("")

    @property
    def next_seq(self) -> int:
        """The seq that the next record gets."""
        return self._next_seq

    @property
    def stalled_s(self) -> float:
        """For how long records have been waiting for an engine that does not ack; 0 while it does."""
        waited_s = self._loop.time() - self._progress_s
        return waited_s if self._queue and waited_s > self._times.ack_s else 0.0

    def append(self, *, epoch: int, packed: bytes, body: Sequence[Segment], size_bytes: int) -> PendingAppend:
        """Give a record its seq and send it when its turn comes. REQUIRES: it has not failed, and is not closed."""
        return self._append(StreamRecordKind.DATA, epoch, packed, body, size_bytes, DurableFuture(loop=self._loop))

    def is_owner(self) -> bool:
        """Return whether an append that was sent less than `lease_s` ago was acked."""
        return self.failed is None and self._loop.time() - self.owned_s < self._times.lease_s

    async def close(self) -> None:
        """Wait for acks for `close_s`, then give up what is left. Idempotent. Cancellation: call again."""
        self._beat_timer.cancel()
        if self._queue and self.failed is None:
            self._drained = self._drained or self._loop.create_future()
            await asyncio.wait([self._drained], timeout=self._times.close_s)
        if self.failed is None:
            self.fail(UnavailableError("the log was closed before the engine acked"))
        if (recovery := self._recovery) is not None:
            await cancel_for_sure(recovery)
        if (connection := self._connection) is not None:
            self._connection = None
            await connection.close()

    def _append(
        self,
        kind: StreamRecordKind,
        epoch: int,
        packed: bytes,
        body: Sequence[Segment],
        size_bytes: int,
        durable: DurableFuture | None,
    ) -> PendingAppend:
        pending = PendingAppend(self._next_seq, kind, epoch, packed, body, size_bytes, durable)
        self._next_seq += 1
        self._appended_s = self._loop.time()
        if not self._queue:
            self._progress_s = self._appended_s
        self._queue.append(pending)
        self.pending_bytes += size_bytes
        self._send()
        return pending

    def _beat(self) -> None:
        """Append a heartbeat if the log is idle, or has not told its owner for a while."""
        now = self._loop.time()
        is_idle = not self._queue and now - self._appended_s >= self._times.heartbeat_s
        is_due = len(self._queue) < MAX_IN_FLIGHT and now - self._note_s >= self._times.owner_note_s
        if is_idle or is_due:
            self._note_s = now
            self._append(StreamRecordKind.HEARTBEAT, 0, b"", (), 0, None)
        due_s = self._appended_s + self._times.heartbeat_s
        self._beat_timer = self._loop.call_at(due_s if due_s > now else now + self._times.heartbeat_s, self._beat)

    def _message_of(self, pending: PendingAppend) -> bytes:
        """Return the record's bytes, the same each time: encoded once, so the caller's buffers may change after it."""
        if not pending.message:
            term, mark, seq = self.takeover.term, self.takeover.mark, pending.seq
            if pending.kind is StreamRecordKind.DATA:
                pending.message = encode_stream_record(
                    kind=pending.kind,
                    term=term,
                    mark=mark,
                    seq=seq,
                    epoch=pending.epoch,
                    header=pending.packed,
                    body=pending.body,
                )
            else:
                pending.message = encode_stream_note(
                    pending.kind, term=term, mark=mark, seq=seq, owner=self.takeover.owner
                )
            pending.body = ()
            pending.first_sent_s = self._loop.time()
        return pending.message

    def _send(self) -> None:
        """Publish the next records of the queue, as many as may be on their way."""
        connection = self._connection
        while connection is not None and self._num_sent < min(len(self._queue), MAX_IN_FLIGHT):
            pending = self._queue[self._num_sent]
            if self._sent_bytes and self._sent_bytes + pending.size_bytes > self._window_bytes:
                break
            message = self._message_of(pending)
            pending.sent_s = self._loop.time()
            try:
                connection.publish(
                    [message], expected_last=pending.seq - 1, on_reply=partial(self._on_reply, connection, pending)
                )
            except UnavailableError as exc:
                self._recover(str(exc))
                return
            self._num_sent += 1
            self._sent_bytes += pending.size_bytes
        if self._num_sent and self._head_timer is None:
            self._head_timer = self._loop.call_at(self._progress_s + self._times.ack_s, self._check_head)

    def _check_head(self) -> None:
        """Recover if the oldest record has had no ack for too long."""
        self._head_timer = None
        if self._connection is None or not self._queue:
            return
        due_s = max(self._progress_s, self._queue[0].sent_s) + self._times.ack_s
        if self._loop.time() >= due_s:
            self._recover(f"no ack for {self._times.ack_s:g} s")
        else:
            self._head_timer = self._loop.call_at(due_s, self._check_head)

    def _on_reply(self, connection: StreamConnection, pending: PendingAppend, reply: PublishReply) -> None:
        if connection is not self._connection:
            return  # it says nothing that recovery does not find out
        if reply.outcome is PublishOutcome.ACKED:
            self._take_ack(pending, reply)
            self._settle()
            self._send()
        else:
            self._metrics.num_refusals[reply.outcome.value] += 1
            self._recover(f"record {pending.seq}: {reply.outcome.value} {reply.seq or ''} {reply.reason}".rstrip())

    def _take_ack(self, pending: PendingAppend, reply: PublishReply) -> None:
        if reply.seq != pending.seq:
            self.fail(
                StorageError(f"the engine has put record {pending.seq} at {reply.seq}: it does not honor expectations")
            )
        elif not pending.is_acked:
            pending.is_acked, pending.owned_s = True, pending.sent_s

    def _settle(self) -> None:
        """Settle what is acked from the head of the queue on, and nothing behind a record that is not."""
        settled: list[PendingAppend] = []
        stalled_s = self.stalled_s
        while self._queue and self._queue[0].is_acked and self.failed is None:
            pending = self._queue.popleft()
            self.pending_bytes -= pending.size_bytes
            self.owned_s = max(self.owned_s, pending.owned_s)
            if self._num_sent:
                self._num_sent -= 1
                self._sent_bytes -= pending.size_bytes
                self._fit_window(pending)
            settled.append(pending)
        if not settled:
            return
        self._metrics.stalled_s += stalled_s
        self._progress_s, self.is_full, self._suspected_s = self._loop.time(), False, None
        self._on_settled(settled)
        if not self._queue and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _fit_window(self, settled: PendingAppend) -> None:
        """Have so much on its way that acks come well within the lease: one that comes later proves nothing about now.

        As TCP does: more with each ack, half as much when one was late, at most once a round trip.
        """
        now = self._loop.time()
        if now - settled.sent_s <= self._times.lease_s / 3:
            self._window_bytes = min(self._window_bytes + settled.size_bytes, self._max_in_flight_bytes)
        elif settled.sent_s >= self._shrunk_s:
            self._window_bytes, self._shrunk_s = max(self._window_bytes // 2, self._least_window_bytes), now

    def fail(self, error: HeadraceError) -> None:
        """End for good: no record that is unsettled now is ever settled."""
        if self.failed is not None:
            return
        self.failed = error
        self._beat_timer.cancel()
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._on_failed(error)
        unsettled, self.pending_bytes, self._num_sent = list(self._queue), 0, 0
        self._queue.clear()
        for pending in unsettled:
            if pending.durable is not None:
                # A new one for each: a raise adds a traceback, whose frames keep buffers.
                pending.durable.set_exception(type(error)(str(error)))
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # Recovery: what became of the records that are on their way?

    def _recover(self, reason: str) -> None:
        if self._recovery is not None or self.failed is not None:
            return
        if reason:
            _log.info("term %d: looking for what became of its records: %s", self.takeover.term, reason)
            self._metrics.num_recoveries += 1
        old, self._connection = self._connection, None
        self._num_sent = self._sent_bytes = 0
        self._window_bytes = self._least_window_bytes
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._recovery = self._loop.create_task(self._run_recovery(old), name="headrace-log-recovery")

    async def _run_recovery(self, old: StreamConnection | None) -> None:
        """Connect anew and settle the head of the queue; then send the rest in order."""
        try:
            if old is not None:
                await old.close()  # nothing that it had buffered survives
            connection = await self._connect_and_settle()
        except HeadraceError as exc:
            self._recovery = None
            self.fail(exc)
            return
        except Exception as exc:  # an answer of the engine that nobody has foreseen; a new start finds its way
            _log.exception("recovery failed")
            self._recovery = None
            self.fail(UnavailableError(f"what became of the log's records cannot be found out: {exc!r}"))
            return
        self._recovery, self._connection = None, connection
        connection.lost.add_done_callback(partial(self._on_lost, connection))
        self._send()

    def _on_lost(self, connection: StreamConnection, lost: asyncio.Future[str]) -> None:
        if connection is self._connection:
            self._recover(f"the connection to {connection.server} is lost: {lost.result()}")

    async def _connect_and_settle(self) -> StreamConnection:
        while True:
            connection = None
            try:
                connection = await self._engine.connect()
                await self._settle_head(connection)
                return connection
            except (UnavailableError, ConfigError) as exc:
                # Credentials may be being changed: that stalls a log, and does not end it.
                is_refused = isinstance(exc, ConfigError)
                _log.log(logging.ERROR if is_refused else logging.DEBUG, "the log's records wait: %s", exc)
                wait_s = self._times.ack_s if is_refused else self._times.retry_s
                if connection is not None:
                    await connection.close()
            except BaseException:
                if connection is not None:
                    await connection.close()
                raise
            await asyncio.sleep(wait_s)

    async def _settle_head(self, connection: StreamConnection) -> None:
        """Return once a record was acked on this connection, or none is left.

        Raises:
            UnavailableError: Try another connection.
            LogFencedError: Another owner's record is at the place of ours.
            StorageError: The engine has lost data.
        """
        give_up_s = self._loop.time() + self._times.ack_s
        while self._queue:
            head = self._queue[0]
            if head.is_acked:
                self._settle()
                continue
            reply = await self._publish_again(connection, head)
            if reply.outcome is PublishOutcome.ACKED:
                self._take_ack(head, reply)
                if self.failed is not None:
                    raise self.failed
                self._settle()
                return
            self._metrics.num_refusals[reply.outcome.value] += 1
            if reply.outcome is PublishOutcome.WRONG_LAST:
                if reply.seq >= head.seq:
                    if await self._read_back(connection, reply.seq):
                        give_up_s = self._loop.time() + self._times.ack_s
                        continue
                elif reply.seq < head.seq - 1:
                    await self._suspect(connection, head.seq - 1)
            elif reply.outcome in (PublishOutcome.FULL, PublishOutcome.TOO_LARGE):
                if not self.is_full:
                    _log.error("the log is stalled, the engine refuses record %d: %s", head.seq, reply.reason)
                self.is_full = True
            if self._loop.time() >= give_up_s:
                raise UnavailableError(f"{connection.server}: no ack of record {head.seq}")
            await asyncio.sleep(self._times.retry_s)

    async def _publish_again(self, connection: StreamConnection, head: PendingAppend) -> PublishReply:
        replied: asyncio.Future[PublishReply] = self._loop.create_future()

        def on_reply(reply: PublishReply) -> None:
            if not replied.done():
                replied.set_result(reply)

        message = self._message_of(head)
        head.sent_s = self._loop.time()
        connection.publish([message], expected_last=head.seq - 1, on_reply=on_reply)
        await asyncio.wait((replied, connection.lost), timeout=self._times.ack_s, return_when=asyncio.FIRST_COMPLETED)
        if not replied.done():
            raise UnavailableError(f"{connection.server}: no answer to record {head.seq}")
        return replied.result()

    async def _read_back(self, connection: StreamConnection, last_seq: int) -> bool:
        """Settle the records up to `last_seq` that the stream has; return whether there was one. Raises as above."""
        has_settled = False
        while self._queue and (head := self._queue[0]).seq <= last_seq:
            found = None if head.is_acked else await get_message(connection, head.seq, self._times.get_s)
            if not head.is_acked:
                if found is None:
                    state = await connection.state()
                    if state.first_seq > head.seq:
                        raise LogFencedError(f"record {head.seq} was removed before its ack came, as an owner does")
                    return has_settled
                if not head.message or found.payload != head.message:
                    await self._judge(connection, found)
                head.is_acked, head.owned_s = True, head.first_sent_s
            self._settle()
            has_settled = True
        return has_settled

    async def _judge(self, connection: StreamConnection, found: StoredMessage) -> None:
        """Raise what follows from another record at the place of our oldest one."""
        record = self._decoded(connection, found)
        if record.term > self.takeover.term:
            # Everything before our oldest record was acked. If it is not there, this is no mere takeover.
            before = await get_message(connection, found.seq - 1, self._times.get_s)
            if before is not None and self._decoded(connection, before).term > self.takeover.term:
                raise StorageError(
                    f"the engine has lost data: record {before.seq} was acked, and one of term {record.term} is at its "
                    "place; see 'The engine has lost data' in docs/replicated-log.md"
                )
            raise LogFencedError(
                f"term {record.term} has begun at record {found.seq} or before; ours, term "
                f"{self.takeover.term}, is over"
            )
        if record.term < self.takeover.term:
            raise LogFencedError(f"a late record of term {record.term} has taken the place of our record {found.seq}")
        raise StorageError(f"record {found.seq} of term {record.term} is in the stream with other contents than ours")

    def _decoded(self, connection: StreamConnection, found: StoredMessage) -> StreamRecord:
        try:
            return decode_stream_record(found.payload, seq=found.seq)
        except CorruptionError as exc:
            # Another server may have it whole.
            self._note_suspicion(CorruptionError(f"{connection.server}: {exc}"))
            raise UnavailableError(str(exc)) from exc

    async def _suspect(self, connection: StreamConnection, least_seq: int) -> None:
        """Note that a server has less than was acked; raise `StorageError` once that cannot be an old state."""
        state = await connection.state()
        if not state.is_healthy or state.last_seq >= least_seq:
            self._suspected_s = None
            return
        self._note_suspicion(
            StorageError(
                f"the engine has lost data: the stream ends at {state.last_seq}, record {least_seq} was acked; see "
                "'The engine has lost data' in docs/replicated-log.md"
            ),
        )
        raise UnavailableError(f"{connection.server}: the stream ends at {state.last_seq}, we know {least_seq}")

    def _note_suspicion(self, error: StorageError) -> None:
        now = self._loop.time()
        if self._suspected_s is None or now - self._suspected_s[1] > max(_SUSPICION_GAP_S, 2 * self._times.ack_s):
            self._suspected_s, self._num_suspicions = (now, now), 0
        self._suspected_s, self._num_suspicions = (self._suspected_s[0], now), self._num_suspicions + 1
        if now - self._suspected_s[0] >= self._times.lost_data_s and self._num_suspicions > 1:
            raise error


async def cancel_for_sure(task: asyncio.Task[Any]) -> None:
    """Cancel a task until it has ended: before Python 3.12, `asyncio.wait_for` may swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)


async def get_message(connection: StreamConnection, seq: int, timeout_s: float) -> StoredMessage | None:
    """Return `StreamConnection.get`, and raise `UnavailableError` after the time-out."""
    try:
        async with asyncio.timeout(timeout_s):
            return await connection.get(seq)
    except TimeoutError as exc:
        raise UnavailableError(f"{connection.server}: no answer about message {seq}") from exc
