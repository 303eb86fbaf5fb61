"""The update log in a stream of several machines: acked means on a majority of them.

    while following    stream ──▶ StreamReader ──┐
    as the owner       append ──▶ Appender ──────┴──▶ committed, in order ──▶ memory ──▶ mirror on this disk

Every process of a shard follows the stream; the one that has taken over appends to it. What is committed is readable at
once: from memory until the local mirror, a `FileUpdateLog` of the same records and marks, has it on its disk, for which
no ack waits. What is older than the mirror comes from the stream.

Terms, the void rule, acks and unknown outcomes: `docs/replicated-log.md`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.interface import (
    Append,
    CommittedLog,
    LogMetrics,
    LogRecord,
    UpdateLogConfig,
    check_record,
)
from headrace.paramserver.log.jetstream.appender import (
    Appender,
    PendingAppend,
    StreamMetrics,
    StreamTimes,
    Takeover,
    cancel_for_sure,
    get_message,
)
from headrace.paramserver.log.jetstream.engine import PublishOutcome, StreamConnection, StreamEngine, StreamState
from headrace.paramserver.log.jetstream.stream_reader import CommittedRecord, StreamReader
from headrace.paramserver.log.jetstream.terms import MAX_IN_FLIGHT
from headrace.paramserver.log.segments import list_segments, storage_errors
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    GoneError,
    HeadraceError,
    LogFencedError,
    OverloadedError,
    RequestError,
    StorageError,
    UnavailableError,
)
from headrace.schemas.log_records import pack_header, unpack_header
from headrace.schemas.messages import Segment
from headrace.schemas.stream_records import (
    STREAM_HEADER_BYTES,
    StreamRecordKind,
    decode_stream_record,
    encode_stream_note,
)

__all__ = ["GATHER_S", "JetStreamUpdateLog", "Mirror"]

_log = logging.getLogger(__name__)

_MIB = 1 << 20
# Measured: with messages near 1 MiB, 32 in flight are as fast as it gets.
_MAX_IN_FLIGHT_BYTES = 32 * _MIB
_READ_BYTES = 4 * _MIB
# Records that are committed and not yet in the mirror, besides `max_pending_bytes`: appends wait beyond it.
_MAX_UNMIRRORED_BYTES = 64 * _MIB
_RECORD_BYTES = 256  # Python objects of one of them
GATHER_S = 0.05
"""How long a mirror gathers records, seconds. With a sync for each it would take a third of the processor time of an
owner that acks one small record after the other, and time of the engine's disk where that is the same."""
_RETRY_AFTER_S = 0.05
_STATE_INTERVAL_S = 0.5
# A question that no leader has answered for so long is asked again.
_ASK_AGAIN_S = 0.2
# A damaged message may be whole on another server.
_MAX_DAMAGED_READS = 6
_HISTORY_TIMEOUT_S = 60.0


class Mirror(CommittedLog, Protocol):
    """What the log needs of its mirror: `FileUpdateLog`, or one in memory."""

    @property
    def failed(self) -> HeadraceError | None: ...  # noqa: D102 - as in `UpdateLog`

    def append(  # noqa: D102 - as in `FileUpdateLog`
        self, *, epoch: int, header: dict[str, Any], body: Sequence[Segment], source_mark: int = 0
    ) -> Append: ...
    async def wait_failed(self) -> HeadraceError: ...  # noqa: D102
    async def close(self) -> None: ...  # noqa: D102


class JetStreamUpdateLog:
    """One shard's log in a stream. Implements `ReplicatedLog`. Thread: the loop's, but where `UpdateLog` says any.

    It follows the stream from the beginning on, and refuses appends until `take_over`. Once `failed` is set it does
    neither, and reading continues.

    Attributes:
        metrics: See `UpdateLog`; of the records that were appended here.
        stream_metrics: What the engine did.
    """

    def __init__(
        self,
        engine: StreamEngine,
        mirror: Mirror,
        reader: StreamReader,
        *,
        first_seq: int,
        max_message_bytes: int,
        config: UpdateLogConfig,
        times: StreamTimes,
        draw_mark: Callable[[], int],
    ) -> None:
        """Use `open`."""
        self.metrics = LogMetrics()
        self.stream_metrics = StreamMetrics()
        self._engine, self._mirror, self._reader = engine, mirror, reader
        self._config, self._times, self._draw_mark = config, times, draw_mark
        self._loop = asyncio.get_running_loop()
        self._max_message_bytes = max_message_bytes
        self._lock = threading.Lock()  # guards the next three: readers are in any thread
        self._unmirrored: deque[CommittedRecord] = deque()
        self._last_seq = reader.next_seq - 1
        self._before = (reader.next_seq - 1, reader.nonce)  # seq and nonce; the mirror may be empty
        self._unmirrored_bytes = 0
        self._first_seq, self._mirror_begin_seq = first_seq, mirror.first_seq
        self._is_refused_full = False  # at the last try to take over
        self._failed: HeadraceError | None = None
        self._failure: asyncio.Future[HeadraceError] = self._loop.create_future()
        self._progress: asyncio.Future[None] = self._loop.create_future()
        self._mirrored = asyncio.Event()
        self._heard_s = self._loop.time()
        self._connection: StreamConnection | None = None  # the follower's, also for the stream's state and history
        self._leader: str | None = None
        self._appender: Appender | None = None
        self._takeover_lock = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None
        self._purging: asyncio.Task[None] | None = None
        self._purge_seq = 1  # what is before it may go
        self._following: asyncio.Task[None] | None = None
        self._watching = self._loop.create_task(self._watch_mirror(), name="headrace-log-mirror")
        self._follow()

    @classmethod
    async def open(
        cls,
        engine: StreamEngine,
        directory: Path,
        *,
        begin_seq: int,
        needed_seq: int | None = None,
        config: UpdateLogConfig | None = None,
        times: StreamTimes | None = None,
    ) -> Self:
        """Follow a stream from `begin_seq` on into a mirror in `directory`, which may have more already.

        A mirror that lacks records from `needed_seq` on, by default `begin_seq`, or is of another history, is removed
        and begun anew. It waits for an engine that is away; set a time-out where that matters.

        Raises:
            GoneError: The stream has no longer all records from `begin_seq` on, and those that tell the term.
            StorageError: This disk refuses; or the stream ends before what is known to have been in it.
            ConfigError: The mirror is open elsewhere, or the engine refuses our credentials.

        Cancellation: harmless.
        """
        config = config or UpdateLogConfig()

        async def open_mirror(seq: int, *, anew: bool) -> Mirror:
            # This log bounds what the mirror has pending: a committed record is never refused.
            of_mirror = replace(config, max_pending_bytes=1 << 62, gather_s=GATHER_S)
            return await asyncio.to_thread(_open_mirror, directory, seq, of_mirror, anew)

        return await cls.open_on(
            engine, open_mirror, begin_seq=begin_seq, needed_seq=needed_seq, config=config, times=times
        )

    @classmethod
    async def open_on(
        cls,
        engine: StreamEngine,
        open_mirror: Callable[..., Awaitable[Mirror]],
        *,
        begin_seq: int,
        needed_seq: int | None = None,
        config: UpdateLogConfig | None = None,
        times: StreamTimes | None = None,
        draw_mark: Callable[[], int] = lambda: secrets.randbits(63) + 1,
    ) -> Self:
        """As `open`, with a mirror from `open_mirror(begin_seq, anew=...)`: `anew` removes what is there."""
        times = times or StreamTimes()
        mirror = await open_mirror(begin_seq, anew=False)
        try:
            begun = await _begin_behind(engine, mirror, begin_seq if needed_seq is None else needed_seq, times)
            if begun is None:
                # First the reader: if the stream cannot replace the mirror, this raises and removes nothing.
                begun = await _begin_reading(engine, StreamReader(begin_seq), times)
                _log.warning("the mirror does not lead to record %d of the stream: it is begun anew", begin_seq)
                await mirror.close()
                mirror = await open_mirror(begin_seq, anew=True)
        except BaseException:
            await mirror.close()
            raise
        reader, first_seq, max_message_bytes = begun
        log = cls(
            engine,
            mirror,
            reader,
            first_seq=first_seq,
            max_message_bytes=max_message_bytes,
            config=config or UpdateLogConfig(),
            times=times,
            draw_mark=draw_mark,
        )
        try:
            await log._wait_read(begin_seq - 1)
        except BaseException:
            await log.close()
            raise
        return log

    async def _wait_read(self, seq: int) -> None:
        """Wait until `last_seq` is at least `seq`: what a store has applied is in its log."""
        while self._last_seq < seq:
            await asyncio.wait((self._progress, self._failure), return_when=asyncio.FIRST_COMPLETED)
            self._check_works()

    # What is known of the log.

    @property
    def first_seq(self) -> int:
        """See `UpdateLog`. Older records than the mirror's come from the stream."""
        return min(self._first_seq, self._mirror.first_seq)

    @property
    def last_seq(self) -> int:
        """The last committed record that was read, or acked here."""
        return self._last_seq

    @property
    def term(self) -> int:
        """Of the last valid open record; 0 before the first."""
        return self._reader.terms.term

    @property
    def owner(self) -> str:
        """The address that the owner of that term gave; empty while it is unknown."""
        return self._reader.terms.owner

    @property
    def is_owner(self) -> bool:
        """Whether this process has taken over, and neither is fenced nor has failed."""
        return self._appender is not None and self._failed is None and self._closing is None

    @property
    def max_payload_bytes(self) -> int:
        """See `UpdateLog`."""
        return self._max_message_bytes - STREAM_HEADER_BYTES

    @property
    def failed(self) -> HeadraceError | None:
        """A `LogFencedError`, a `StorageError`; or a `GoneError`, if the stream has lost what is to be read next."""
        return self._failed

    @property
    def pending_bytes(self) -> int:
        """See `UpdateLog`."""
        return 0 if self._appender is None else self._appender.pending_bytes

    @property
    def size_bytes(self) -> int:
        """Of the mirror."""
        return self._mirror.size_bytes

    @property
    def stalled_s(self) -> float:
        """For how long records have been waiting for an engine that does not ack; 0 while it does."""
        return 0.0 if self._appender is None else self._appender.stalled_s

    @property
    def is_full(self) -> bool:
        """Whether the engine has no room for a record that waits."""
        return self._is_refused_full if self._appender is None else self._appender.is_full

    @property
    def outstanding_bytes(self) -> int:
        """Bytes in memory: of records without an ack, and of those that the mirror does not have yet."""
        return self.pending_bytes + self._unmirrored_bytes

    def check_owned(self) -> None:
        """Raise `UnavailableError` unless an append that was sent less than `lease_s` ago was acked.

        Call it after an answer was computed and before it is sent. Thread: any.
        """
        appender = self._appender
        if appender is None or not appender.is_owner():
            raise UnavailableError("this process does not own the shard's log now; another one may: resolve again")

    async def engine_state(self) -> StreamState | None:
        """Ask what the stream's leader says of it; None if there is no answer."""
        connection = self._connection
        try:
            if connection is not None and not connection.lost.done():
                return self._noted(await connection.state())
            try:
                connection = await self._engine.connect()
            except UnavailableError:  # one server may be away
                connection = await self._engine.connect()
            try:
                return self._noted(await connection.state())
            finally:
                await connection.close()
        except UnavailableError:
            return None

    def _noted(self, state: StreamState) -> StreamState:
        if state.leader is not None and state.leader != self._leader:
            self.stream_metrics.num_elections += self._leader is not None
            self._leader = state.leader
        return state

    async def wait_beyond(self, seq: int) -> None:
        """Wait until `last_seq` is above `seq`. Cancellation: harmless."""
        while self._last_seq <= seq:
            await asyncio.shield(self._progress)

    async def wait_silent(self) -> None:
        """Wait until the stream has had a leader and no new record for `silence_s`. Cancellation: harmless."""
        quiet_s = self._loop.time()
        while True:
            # Who follows a busy log begins to wait again behind each record: no question before the first pause.
            due_s = max(quiet_s, self._heard_s) + self._times.silence_s
            await asyncio.sleep(min(_STATE_INTERVAL_S, max(0.0, due_s - self._loop.time())))
            state, again_s = await self._ask_leader()
            now = self._loop.time()
            if state.last_seq > self._last_seq:
                quiet_s = now
            elif again_s is not None:
                quiet_s = again_s
            elif now >= max(quiet_s, self._heard_s) + self._times.silence_s:
                return

    async def _ask_leader(self) -> tuple[StreamState, float | None]:
        """Return what the stream's leader says of it, once there is one.

        A question that comes while there is no leader is never answered. So this asks again and again, and waits for
        all answers: it hears soon of a new leader, and in the end of one that is slow. It also returns when it asked
        what was answered; None for the first question: then there was a leader all the time.
        """
        asked_s: dict[asyncio.Task[StreamState | None], float | None] = {}
        again_s: float | None = None
        try:
            while True:
                asked_s[self._loop.create_task(self.engine_state(), name="headrace-log-state")] = again_s
                due_s = self._loop.time() + _ASK_AGAIN_S
                while asked_s and (left_s := due_s - self._loop.time()) > 0:
                    done, _ = await asyncio.wait(asked_s, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                    for task in [each for each in asked_s if each in done]:  # the first one's answer says most
                        of_s, state = asked_s.pop(task), task.result()
                        if state is not None and state.leader is not None:
                            return state, of_s
                await asyncio.sleep(max(0.0, due_s - self._loop.time()))
                again_s = self._loop.time()
        finally:
            for task in asked_s:
                task.cancel()
            if asked_s:
                await asyncio.wait(asked_s)

    async def wait_failed(self) -> HeadraceError:
        """See `UpdateLog.wait_failed`."""
        return await asyncio.shield(self._failure)

    # Reading.

    def read(self, from_seq: int, *, past_cache: bool = False) -> Iterator[LogRecord]:
        """See `UpdateLog.read`. Records before the mirror's are asked for over the network, but not on the loop."""
        if from_seq < 1:
            raise ValueError(f"seq {from_seq}: the first is 1")
        with self._lock:  # the mirror may only have more than what is taken from memory here
            last_seq, newest = self._last_seq, [each.record for each in self._unmirrored]
        if from_seq < (first_seq := self.first_seq):
            raise GoneError(f"the log begins at seq {first_seq}, seq {from_seq} has been removed")
        if newest and from_seq >= newest[0].seq:
            return iter(newest[from_seq - newest[0].seq :])
        if from_seq >= self._mirror.first_seq:
            mirrored = self._mirror.read(from_seq, past_cache=past_cache)
            return _joined(from_seq, mirrored, newest, last_seq)
        assert not _runs_on(self._loop), "records before the mirror come over this loop: read them in a thread"
        return self._read_all(from_seq, newest, last_seq, past_cache)

    def _read_all(
        self, from_seq: int, newest: Sequence[LogRecord], last_seq: int, past_cache: bool
    ) -> Iterator[LogRecord]:
        """Yield records that the mirror lacks from the stream, then those of the mirror, then those in memory."""
        reader: StreamReader | None = None
        while from_seq < min(self._mirror.first_seq, last_seq + 1):
            reading = asyncio.run_coroutine_threadsafe(self._read_history(reader, from_seq), self._loop)
            try:
                reader, records = reading.result(_HISTORY_TIMEOUT_S)
            except TimeoutError as exc:
                reading.cancel()
                raise UnavailableError(f"the engine does not answer about record {from_seq}") from exc
            for each in records:
                if each.seq >= self._mirror.first_seq or each.seq > last_seq:
                    break
                yield each
                from_seq = each.seq + 1
        if from_seq <= last_seq:
            yield from _joined(from_seq, self._mirror.read(from_seq, past_cache=past_cache), newest, last_seq)

    async def _read_history(self, reader: StreamReader | None, from_seq: int) -> tuple[StreamReader, list[LogRecord]]:
        """Return the next records of the stream from `from_seq` on; `reader` is as the call before returned it."""
        while True:
            connection: StreamConnection | None = None
            try:
                connection = await self._engine.connect()
                if reader is None:
                    begun = StreamReader(from_seq)
                    await begun.begin(connection)
                    reader = begun
                if records := await reader.read(connection, max_bytes=_READ_BYTES):
                    return reader, [each.record for each in records]
            except UnavailableError as exc:
                _log.debug("reading on over another connection: %s", exc)
            finally:
                if connection is not None:
                    await connection.close()
            await asyncio.sleep(self._times.retry_s)

    def nonce_of(self, seq: int) -> int | None:
        """Return what identifies the log up to a record that is here, see `UpdateLog`: its owner's mark."""
        with self._lock:
            if self._unmirrored and seq >= (first := self._unmirrored[0].record.seq):
                return self._unmirrored[seq - first].nonce if seq - first < len(self._unmirrored) else None
            if seq == self._before[0] and self._before[1] is not None:
                return self._before[1]
        return self._mirror.nonce_of(seq)

    # Following.

    def _follow(self) -> None:
        if self._closing is not None:
            return
        self._following = self._loop.create_task(self._run_following(), name="headrace-log-follow")

    async def _stop_following(self) -> None:
        if (following := self._following) is not None:
            self._following = None
            await cancel_for_sure(following)

    async def _run_following(self) -> None:
        num_damaged = 0
        while self._failed is None:
            begin_seq = self._last_seq
            try:
                async with contextlib.AsyncExitStack() as stack:
                    connection = self._connection = await self._engine.connect()
                    stack.push_async_callback(connection.close)
                    await self._follow_on(connection)
            except UnavailableError as exc:
                _log.debug("following on over another connection: %s", exc)
            except CorruptionError as exc:
                num_damaged = 1 if self._last_seq > begin_seq else num_damaged + 1
                _log.error("reading the stream: %s", exc)
                if num_damaged >= _MAX_DAMAGED_READS:
                    self._fail(exc)
            except ConfigError as exc:  # credentials may be being changed
                _log.error("the log is not followed: %s", exc)
                await asyncio.sleep(self._times.ack_s)
            except HeadraceError as exc:
                self._fail(exc)
            except Exception as exc:
                _log.exception("following the stream failed")
                self._fail(StorageError(f"following the stream failed: {exc!r}"))
            finally:
                self._connection = None
            await asyncio.sleep(self._times.retry_s)

    async def _follow_on(self, connection: StreamConnection) -> None:
        wait_s = self._times.poll_s
        while True:
            records = await self._reader.read(connection, max_bytes=_READ_BYTES)
            self.stream_metrics.num_voids = self._reader.terms.num_voids
            if records:
                self._heard_s, wait_s = self._loop.time(), self._times.poll_s
                self._commit(records)
                while self._unmirrored_bytes > self._config.max_pending_bytes:
                    self._mirrored.clear()
                    await self._mirrored.wait()
            else:
                await asyncio.sleep(wait_s)
                wait_s = min(1.5 * wait_s, self._times.idle_poll_s)

    def _commit(self, records: Sequence[CommittedRecord]) -> None:
        """Make committed records readable, and let the mirror write them."""
        for each in records:
            record = each.record
            assert record.seq == self._last_seq + 1, "the mirror would have a gap"
            try:
                append = self._mirror.append(
                    epoch=record.epoch, header=record.header, body=[record.body], source_mark=each.nonce
                )
            except HeadraceError as exc:
                self._fail(exc if isinstance(exc, StorageError) else StorageError(f"the log's mirror: {exc}"))
                return
            with self._lock:
                self._unmirrored.append(each)
                self._last_seq = record.seq
            self._unmirrored_bytes += each.size_bytes + _RECORD_BYTES
            append.durable.add_done_callback(self._on_mirrored)
        progress, self._progress = self._progress, self._loop.create_future()
        progress.set_result(None)

    def _on_mirrored(self, durable: asyncio.Future[None]) -> None:
        """Forget the oldest record in memory: the mirror has it. If not, it stays, and the mirror has failed."""
        if durable.cancelled() or durable.exception() is not None:
            return
        with self._lock:
            each = self._unmirrored.popleft()
        self._unmirrored_bytes -= each.size_bytes + _RECORD_BYTES
        self._mirrored.set()

    async def _watch_mirror(self) -> None:
        self._fail(await self._mirror.wait_failed())

    def _fail(self, error: HeadraceError) -> None:
        if self._failed is None and self._closing is None:
            self._failed = error
            self._failure.set_result(error)
            fenced = isinstance(error, LogFencedError)
            _log.log(logging.WARNING if fenced else logging.ERROR, "the update log stops: %s", error)
            if (appender := self._appender) is not None:
                appender.fail(error)

    # Owning.

    async def take_over(self, applied_seq: int, *, owner: str, above_term: int = 0, offer: str | None = None) -> bool:
        """Become the owner directly behind `applied_seq`, which this process has applied. See `ReplicatedLog`.

        It tries until the engine answers. `owner` is the address that others are told.

        Raises:
            LogFencedError, StorageError, GoneError: The log has failed.
            StorageError: The stream has less than was read from it.
            UnavailableError: The log is closed.

        Cancellation: it may have become the owner in the stream; calling again opens another term.
        """
        async with self._takeover_lock:
            self._check_works()
            if self._appender is not None:
                raise RuntimeError("this process owns the log already")
            if applied_seq > self._last_seq:
                raise StorageError(f"record {applied_seq} was applied, the log ends at {self._last_seq}")
            if applied_seq < self._last_seq:
                return False
            await self._stop_following()
            try:
                takeover = None
                if applied_seq == self._last_seq:  # nothing came while the follower stopped
                    takeover = await self._open_term(applied_seq, owner, above_term, offer)
                if takeover is not None:
                    self._own(takeover, applied_seq, offer)
                    self._check_works()  # the mirror may have failed just now
            except StorageError as exc:
                self._fail(exc)
                raise
            finally:
                if not self.is_owner:
                    self._follow()
            return takeover is not None

    async def _open_term(self, applied_seq: int, owner: str, above_term: int, offer: str | None) -> Takeover | None:
        """Append an open record and padding directly behind `applied_seq`; return None if others were first.

        The padding takes all places where records of the owner before may still fit, in the same atomic batch.
        """
        term, mark = max(self.term, above_term) + 1, self._draw_mark()
        previous = applied_seq, self.nonce_of(applied_seq) or 0
        first_seq, last_seq = applied_seq + 1, applied_seq + MAX_IN_FLIGHT
        open_record = encode_stream_note(
            StreamRecordKind.OPEN,
            term=term,
            mark=mark,
            seq=first_seq,
            owner=owner,
            previous=previous,
            offer=offer,
        )
        padding = [
            encode_stream_note(StreamRecordKind.PADDING, term=term, mark=mark, seq=seq, owner=owner)
            for seq in range(first_seq + 1, last_seq + 1)
        ]
        opening = _Opening(self._times, applied_seq, [open_record, *padding])
        while True:
            self._check_works()
            connection: StreamConnection | None = None
            try:
                connection = await self._engine.connect()
                if (is_ours := await opening.attempt(connection)) is not None:
                    return Takeover(term, mark, owner, last_seq + 1, opening.sent_s) if is_ours else None
                self._is_refused_full = opening.is_full
            except UnavailableError as exc:
                _log.debug("taking over goes on over another connection: %s", exc)
            finally:
                if connection is not None:
                    await connection.close()
            await asyncio.sleep(self._times.retry_s)

    def _own(self, takeover: Takeover, applied_seq: int, offer: str | None) -> None:
        terms, mark = self._reader.terms, takeover.mark
        terms.term, terms.mark, terms.owner = takeover.term, mark, takeover.owner
        notes = [CommittedRecord.of_note(applied_seq + 1, mark, "open", offer=offer)]
        notes += [CommittedRecord.of_note(seq, mark, "padding") for seq in range(applied_seq + 2, takeover.next_seq)]
        self._reader.next_seq = takeover.next_seq
        self._commit(notes)
        if self._failed is None:
            self._appender = Appender(
                self._engine,
                takeover,
                times=self._times,
                metrics=self.stream_metrics,
                max_in_flight_bytes=_MAX_IN_FLIGHT_BYTES,
                on_settled=self._on_settled,
                on_failed=self._fail,
            )
            _log.info("term %d: this process owns the log from record %d on", takeover.term, takeover.next_seq)

    def _check_works(self) -> None:
        if (failed := self._failed) is not None:
            raise type(failed)(str(failed))  # not `failed`: each raise adds a traceback, whose frames keep buffers
        if self._closing is not None:
            raise UnavailableError("the log is closed")

    def append(self, *, epoch: int, header: dict[str, Any], body: Sequence[Segment]) -> Append:
        """See `UpdateLog.append`. The body is copied and checksummed when it is sent, mostly at once.

        Raises:
            OverloadedError: `max_pending_bytes` wait for the engine, or for the mirror's disk; or the engine is full.
            UnavailableError: The log is closed, or this process has not taken over.
        """
        self._check_works()
        if (appender := self._appender) is None:
            raise UnavailableError("this process does not own the shard's log")
        packed = pack_header(header)
        payload_bytes = check_record(epoch, packed, body)
        if payload_bytes > self.max_payload_bytes:
            raise RequestError(f"a log record of {payload_bytes} bytes, the most is {self.max_payload_bytes}")
        size_bytes = STREAM_HEADER_BYTES + payload_bytes
        self._check_room(appender, size_bytes)
        pending = appender.append(epoch=epoch, packed=packed, body=body, size_bytes=size_bytes)
        assert pending.durable is not None
        return Append(pending.seq, pending.durable)

    def _check_room(self, appender: Appender, size_bytes: int) -> None:
        most, pending_bytes = self._config.max_pending_bytes, appender.pending_bytes
        if appender.is_full:
            reason = "the engine has no room for the log"
        elif pending_bytes and pending_bytes + size_bytes > most:
            reason = f"{pending_bytes} bytes wait for the engine's ack, the most is {most}"
        elif self._unmirrored_bytes > most + _MAX_UNMIRRORED_BYTES:
            reason = f"{self._unmirrored_bytes} bytes wait for the mirror's disk"
        else:
            return
        raise OverloadedError(reason, retry_after_s=_RETRY_AFTER_S)

    def _on_settled(self, settled: list[PendingAppend]) -> None:
        mark, now, num_data = self._reader.terms.mark, self._loop.time(), 0
        committed = []
        for pending in settled:
            if pending.durable is None:
                committed.append(CommittedRecord.of_note(pending.seq, mark, pending.kind.name.lower()))
            else:
                seq, epoch, header = pending.seq, pending.epoch, unpack_header(pending.packed)
                payload = memoryview(pending.message)[STREAM_HEADER_BYTES:]
                record = LogRecord(seq, epoch, header, payload[len(pending.packed) :])
                committed.append(CommittedRecord(record, mark, len(payload)))
                num_data += 1
                self.metrics.written_bytes += pending.size_bytes
        self._reader.next_seq = self._last_seq + 1 + len(settled)
        self._commit(committed)
        if num_data:
            self.metrics.num_records += num_data
            self.metrics.num_groups += 1
            self.metrics.count_commit(max(0.0, now - settled[0].first_sent_s))
        for pending in settled:
            if pending.durable is not None:
                pending.durable.set_result(None)

    # Retention.

    def trim(self, before_seq: int, *, max_bytes: int | None = None, max_age_s: float | None = None) -> int:
        """See `UpdateLog.trim`. The owner removes from the stream, a little later, what the mirror no longer has.

        `MAX_IN_FLIGHT` messages more stay there: who begins to read behind them learns the term from them. What is
        older than the mirror goes when the mirror exceeds a bound, or when the stream is full.
        """
        trimmed_seq = self._mirror.trim(before_seq, max_bytes=max_bytes, max_age_s=max_age_s)
        is_bounded = max_bytes is not None or max_age_s is not None
        if is_bounded and trimmed_seq <= self._mirror_begin_seq and not self.is_full:
            return self.first_seq  # the mirror is within the bounds; what is older than it stays in the stream too
        floor = min(before_seq, trimmed_seq, self._last_seq)
        with self._lock:
            self._first_seq = max(self._first_seq, floor)
            if self._before[0] < self._first_seq:
                self._before = (0, None)
        with contextlib.suppress(RuntimeError):  # the loop was closed without closing the log
            self._loop.call_soon_threadsafe(self._purge, floor - MAX_IN_FLIGHT)
        return self.first_seq

    def _purge(self, before_seq: int) -> None:
        # Who cannot take over a full stream must be able to make room in it.
        may_purge = self._appender is not None or self._is_refused_full
        if before_seq > self._purge_seq and may_purge and self._failed is None:
            self._purge_seq = before_seq
            if self._purging is None or self._purging.done():
                self._purging = self._loop.create_task(self._run_purge(), name="headrace-log-purge")

    async def _run_purge(self) -> None:
        """Remove what no reader needs, or leave it to the next time."""
        done_seq = 1
        try:
            while done_seq < self._purge_seq:
                connection = await self._engine.connect()
                try:
                    if self._appender is not None:
                        self.check_owned()
                    # A purge beyond the last message moves the last seq forward.
                    before_seq = min(self._purge_seq, self._last_seq)
                    await connection.purge(before_seq)
                    done_seq = before_seq
                finally:
                    await connection.close()
        except HeadraceError as exc:
            _log.warning("records before %d stay in the stream for now: %s", self._purge_seq, exc)
            self._purge_seq = 1

    async def close(self) -> None:
        """See `UpdateLog.close`. An engine that is away is waited for `close_s`."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(), name="headrace-log-close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._stop_following()
        if self._purging is not None:
            await asyncio.wait([self._purging], timeout=self._times.close_s)
            await cancel_for_sure(self._purging)
        if self._appender is not None:
            await self._appender.close()
        await cancel_for_sure(self._watching)
        await self._mirror.close()


class _Opening:
    """One atomic batch that opens a term, tried over and over: it may be in the stream since an earlier time.

    Attributes:
        sent_s: When it was sent first.
        is_full: Whether the engine refused it for want of room.
    """

    def __init__(self, times: StreamTimes, applied_seq: int, messages: Sequence[bytes]) -> None:
        self.sent_s: float = 0.0
        self.is_full = False
        self._times, self._applied_seq, self._messages = times, applied_seq, messages
        self._suspected_s: tuple[float, float] | None = None

    async def attempt(self, connection: StreamConnection) -> bool | None:
        """Return whether the batch is in the stream, or another record at its place; None if neither is known."""
        loop = asyncio.get_running_loop()
        self.sent_s = self.sent_s or loop.time()
        try:
            async with asyncio.timeout(self._times.ack_s):
                reply = await connection.publish_batch(self._messages, expected_last=self._applied_seq)
        except TimeoutError as exc:
            raise UnavailableError(f"{connection.server}: no ack of the batch that opens the term") from exc
        if reply.outcome is PublishOutcome.ACKED:
            if reply.seq != self._applied_seq + len(self._messages):
                raise StorageError(f"the engine put a batch behind {self._applied_seq} at {reply.seq}")
            return True
        if reply.outcome is PublishOutcome.WRONG_LAST and reply.seq > self._applied_seq:
            found = await get_message(connection, self._applied_seq + 1, self._times.get_s)
            if found is not None:
                return found.payload == self._messages[0]
        elif reply.outcome is PublishOutcome.WRONG_LAST:
            await self._suspect(connection)
        elif reply.outcome is not PublishOutcome.AWAY and not self.is_full:
            self.is_full = True
            _log.error("the engine refuses to open a term: %s %s", reply.outcome.value, reply.reason)
        return None

    async def _suspect(self, connection: StreamConnection) -> None:
        """Raise `StorageError` once it is sure that the engine has less than was read from it."""
        state, now = await connection.state(), asyncio.get_running_loop().time()
        if not state.is_healthy or state.last_seq >= self._applied_seq:
            self._suspected_s = None
            return
        if self._suspected_s is None or now - self._suspected_s[1] > 2 * self._times.ack_s + 1:
            self._suspected_s = now, now
        self._suspected_s = self._suspected_s[0], now
        if now - self._suspected_s[0] >= self._times.lost_data_s:
            raise StorageError(
                f"the engine has lost data: the stream ends at {state.last_seq}, record {self._applied_seq} was read "
                "from it; see 'The engine has lost data' in docs/replicated-log.md"
            )


async def _begin_behind(
    engine: StreamEngine, mirror: Mirror, needed_seq: int, times: StreamTimes
) -> tuple[StreamReader, int, int] | None:
    """Begin to read behind a mirror's last record; None if it lacks records, or is of another history."""
    if mirror.first_seq > needed_seq:
        return None
    try:
        begun = await _begin_reading(engine, StreamReader(mirror.last_seq + 1), times)
    except GoneError:
        if mirror.last_seq >= needed_seq - 1:
            raise
        return None  # the stream may still have what comes from `needed_seq` on
    mark, nonce = mirror.nonce_of(mirror.last_seq), begun[0].nonce
    return None if mark is not None and nonce is not None and mark != nonce else begun


async def _begin_reading(
    engine: StreamEngine, reader: StreamReader, times: StreamTimes
) -> tuple[StreamReader, int, int]:
    """Let a reader begin; return it, the first seq that can be read, and the most bytes of a message."""
    num_damaged = 0
    behind_s: float | None = None
    loop = asyncio.get_running_loop()
    while True:
        connection: StreamConnection | None = None
        try:
            connection = await engine.connect()
            first_seq = await reader.begin(connection)
            return reader, await _readable_seq(connection, first_seq), connection.max_message_bytes
        except CorruptionError:
            num_damaged += 1
            if num_damaged >= _MAX_DAMAGED_READS:
                raise
        except UnavailableError as exc:
            _log.debug("beginning to read: %s", exc)
            if connection is not None and not connection.lost.done():
                behind_s = await _behind_since(connection, reader.next_seq - 1, behind_s)
                if behind_s is not None and loop.time() - behind_s >= times.lost_data_s:
                    raise StorageError(
                        "the engine has lost data, or the stream was removed and made anew: it ends before "
                        f"{reader.next_seq - 1}; see 'The engine has lost data' in docs/replicated-log.md"
                    ) from exc
        finally:
            if connection is not None:
                await connection.close()
        await asyncio.sleep(times.retry_s)


async def _behind_since(connection: StreamConnection, seq: int, since_s: float | None) -> float | None:
    """Return since when a stream that is well ends before `seq`; None if it is not known to."""
    try:
        state = await connection.state()
    except UnavailableError:
        return None
    is_behind = state.is_healthy and state.last_seq < seq
    return (since_s or asyncio.get_running_loop().time()) if is_behind else None


async def _readable_seq(connection: StreamConnection, first_seq: int) -> int:
    """Return the first seq of a stream that a reader can begin at: the first one, or as many later as tell the term."""
    try:
        messages = await connection.read(first_seq, max_bytes=1)
    except GoneError as exc:  # the state was old, or records were removed meanwhile
        raise UnavailableError(str(exc)) from exc
    if not messages:
        return first_seq
    record = decode_stream_record(messages[0].payload, seq=first_seq)
    return first_seq + (0 if record.kind is StreamRecordKind.OPEN else MAX_IN_FLIGHT)


def _open_mirror(directory: Path, begin_seq: int, config: UpdateLogConfig, anew: bool) -> FileUpdateLog:
    if anew:
        with storage_errors(directory, "removing the mirror of another log"):
            for path in reversed(list_segments(directory)):  # a crash leaves no gap
                path.unlink()
    return FileUpdateLog.open(directory, begin_seq=begin_seq, config=config)


def _runs_on(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether this thread runs the loop."""
    return asyncio._get_running_loop() is loop


def _joined(
    from_seq: int, mirrored: Iterator[LogRecord], newest: Sequence[LogRecord], last_seq: int
) -> Iterator[LogRecord]:
    """Yield the mirror's records, then those of memory that follow on them, up to `last_seq`."""
    next_seq = from_seq
    for record in mirrored:
        if record.seq > last_seq:
            return
        yield record
        next_seq = record.seq + 1
    for record in newest:
        if next_seq <= record.seq <= last_seq:
            yield record
