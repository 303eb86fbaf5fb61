"""One connection of a server: frames in, requests started in order, replies out as they are ready.

Every wait has a deadline: for room here, for the peer to take a reply in `frame_writer`, all others in `Deadlines`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

from headrace.paramserver.rpc.admission import Account, Admission, ServerLimits, Ticket, Waiter
from headrace.paramserver.rpc.dispatch import Dispatcher, Peer, Request, ServerStats
from headrace.paramserver.rpc.door import Door, Visit
from headrace.paramserver.rpc.first_frame import FirstFrame
from headrace.paramserver.rpc.frame_writer import FrameWriter
from headrace.paramserver.rpc.frames import (
    MAX_HEAD_BYTES,
    PROGRESS_BYTES,
    SMALL_FRAME_BYTES,
    BufferPool,
    Frame,
    FrameReader,
    ignore,
    new_scratch,
)
from headrace.paramserver.system.log_lines import WarningThrottle
from headrace.paramserver.system.text import format_seconds
from headrace.schemas.errors import HeadraceError, OverloadedError, ProtocolError, RequestError, UnavailableError
from headrace.schemas.messages import Segment, size_of_segments

__all__ = ["Connection", "Deadlines", "ServerContext"]

_log = logging.getLogger(__name__)

# How long a finished connection waits for the peer to close first.
_LINGER_S = 1.0
# A stranger that goes on sending its first frame in small pieces is read less often: each read costs the loop the same.
_DRIP_BYTES, _DRIP_READS, _DRIP_PAUSE_S = 1024, 8, 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerContext:
    """What all connections of a server share."""

    limits: ServerLimits
    dispatcher: Dispatcher
    admission: Admission  # of requests of connections that were let in
    door: Door  # who is let in, and what the others may cost
    pool: BufferPool  # for long frames
    stats: ServerStats
    refusals: WarningThrottle  # logs peers' faults
    scratch: memoryview = field(default_factory=new_scratch)  # where all of them receive
    connections: set[Connection] = field(default_factory=set)  # the live ones
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # running requests and replies being written


class Deadlines:
    """The deadlines of one connection: for the hello, for the next part of a frame, and for idleness.

    One timer watches all three. It checks and re-arms itself when it fires, so requests cost no timer.

    Thread: the loop's.
    """

    def __init__(
        self,
        limits: ServerLimits,
        *,
        is_waiting: Callable[[], bool],
        is_stranger: Callable[[], bool],
        expire: Callable[[bool], None],
    ) -> None:
        """Begin with a new connection; `watch` sets the timer.

        Args:
            limits: The times.
            is_waiting: Whether the peer waits for us, so the connection is not idle.
            is_stranger: Whether the peer has not said hello.
            expire: Called when a deadline has passed; its argument says whether a frame was too slow.
        """
        self._limits, self._expire = limits, expire
        self._is_waiting, self._is_stranger = is_waiting, is_stranger
        self._loop = asyncio.get_running_loop()
        self._active_s = self._loop.time()
        self._frame_since_s: float | None = None
        self._frames_seen = self._moved_seen = 0
        self._finished_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def touch(self) -> None:
        """Note activity."""
        self._active_s = self._loop.time()

    def note_input(self, *, is_mid_frame: bool, num_begun: int, num_moved: int) -> None:
        """Note the reader's progress: a short frame must end in time, a long one must move on.

        A long frame on a slow link takes longer than a timeout that would notice a stuck peer. Cut off, it would be
        sent again for ever. The arguments are those of `FrameReader`.
        """
        if not is_mid_frame:
            self._frame_since_s = None
        elif (
            self._frame_since_s is None
            or num_begun != self._frames_seen
            # A stranger's longest frame is short enough to arrive whole in time.
            or (num_moved - self._moved_seen >= PROGRESS_BYTES and not self._is_stranger())
        ):
            self._frame_since_s = self._active_s
            self._frames_seen, self._moved_seen = num_begun, num_moved
            self._set(self._active_s + self._limits.frame_timeout_s)
        if self._timer is None:
            self.watch()

    def note_pause(self) -> None:
        """Note that we do not read, so the peer cannot finish a frame."""
        self._frame_since_s = None

    def note_finish(self) -> None:
        """Note that nothing more is sent: only the peer's close is awaited."""
        self._finished_s = self._loop.time()
        self.watch()

    def watch(self) -> None:
        """Check no later than the current deadline."""
        self._set(self._deadline_s())

    def cancel(self) -> None:
        """Stop checking: the connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
        self._is_waiting = self._is_stranger = self._expire = ignore

    def _deadline_s(self) -> float:
        if self._finished_s is not None:
            return self._finished_s + _LINGER_S
        if self._frame_since_s is not None:
            return self._frame_since_s + self._limits.frame_timeout_s
        if self._is_waiting():
            return math.inf
        idle_s = self._limits.idle_timeout_s or math.inf
        if self._is_stranger():
            idle_s = min(idle_s, self._limits.hello_timeout_s)
        return self._active_s + idle_s

    def _set(self, deadline_s: float) -> None:
        if deadline_s == math.inf:
            return
        if self._timer is not None:
            if self._timer.when() <= deadline_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline_s, self._check)

    def _check(self) -> None:
        self._timer = None
        deadline_s = self._deadline_s()
        if deadline_s > self._loop.time():
            self._set(deadline_s)
        else:
            is_late = self._frame_since_s is not None and self._finished_s is None
            self._expire(is_late)


class Connection(asyncio.BufferedProtocol):
    """The server's end of one connection; `closed` resolves when it is gone."""

    def __init__(self, context: ServerContext, peer: Peer, visit: Visit) -> None:
        """Wait for the transport, as the stranger of a visit."""
        self.peer = peer
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._context = context
        self._limits = context.limits
        self._visit = visit
        self._refusal: HeadraceError | None = None  # of all new requests
        self._admission = context.admission
        self._account: Account  # from connection_made to connection_lost
        self._waiter: Waiter | None = None
        self._waiter_timer: asyncio.TimerHandle | None = None
        self._writer = FrameWriter(timeout_s=self._limits.write_timeout_s)
        self._reader: FrameReader[Ticket] = FrameReader(
            max_frame_bytes=min(self._limits.max_hello_bytes, self._limits.max_frame_bytes),
            scratch=context.scratch,
            pool=context.pool,
            admit=self._admit,
            deliver=self._begin,
            refuse=self._refuse,
        )
        self._first: FirstFrame | None = FirstFrame(  # None once the connection was let in
            max_frame_bytes=self._reader.max_frame_bytes,
            scratch=context.scratch,
            judge=self._judge,
        )
        self._receiver: FirstFrame | FrameReader[Ticket] = self._first
        self._transport: asyncio.Transport | None = None
        self._num_running = 0
        self._is_leaving = self._is_finished = False
        self._deadlines = Deadlines(
            self._limits,
            is_waiting=self._is_peer_waiting,
            is_stranger=self._is_stranger,
            expire=self._expire,
        )

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)
        self._writer.attach(self._transport)
        self._visit.close = self.abort
        self.peer.hang_up = self.hang_up
        self._account = self._admission.open_account(self.peer.who)
        self._context.connections.add(self)
        self._deadlines.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """End. Running requests go on; their replies are dropped."""
        self.peer.is_connected = False
        self._transport = None
        self._writer.detach()
        self._stop_reading()
        self._context.connections.discard(self)
        self._context.door.leave(self._visit)
        self._visit.close = self.peer.hang_up = ignore
        self._deadlines.cancel()
        self._admission.close_account(self._account)
        if not self.closed.done():
            self.closed.set_result(None)
        try:
            self._context.dispatcher.service.disconnected(self.peer)
        except Exception:
            _log.exception("the service failed to handle the end of %s", self.peer.address)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where to receive."""
        return self._receiver.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Process received bytes."""
        self._deadlines.touch()
        receiver = self._receiver
        try:
            receiver.buffer_updated(nbytes)
        except ProtocolError as exc:
            self._malformed(exc)
        else:
            self._after_input()
            if self._first is not None:
                self._slow_down(nbytes)

    def eof_received(self) -> bool:
        """Let the transport close: a peer that sends no more counts as gone."""
        return False

    def pause_writing(self) -> None:
        """Stop writing: the transport is full."""
        self._writer.pause()

    def resume_writing(self) -> None:
        """Write on: the transport is empty."""
        self._writer.resume()

    # Called by the server.

    def begin_drain(self) -> None:
        """Answer new requests with `UnavailableError` from now on."""
        self._refusal = UnavailableError("the server is stopping")
        if self._waiter is not None:
            self._stop_waiting()
            self._resume(self._refusal)

    def hang_up(self) -> None:
        """Close gracefully as soon as no request is running."""
        self._is_leaving = True
        if not self._num_running:
            self.finish()

    def finish(self) -> None:
        """Close gracefully: send an end of stream, discard input, close when the peer does."""
        if self._is_finished or self._transport is None:
            return
        self._is_finished = True
        self._stop_reading()
        self._writer.end()
        if self._transport.can_write_eof():
            # Closing with unread bytes would reset the connection and lose the last replies.
            try:
                self._transport.write_eof()
            except OSError:  # the peer has reset it
                self._transport.abort()
                return
            self._transport.resume_reading()
        else:
            self._transport.close()
        self._deadlines.note_finish()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    # The door.

    def _judge(self, length: int, head: memoryview) -> None:
        """Let the connection in by the first bytes of its first frame, or refuse and close it."""
        context = self._context
        error = self._refusal or context.dispatcher.screen(self.peer, head)
        if error is None and not context.door.let_in(self._visit):
            context.stats.num_connections_refused += 1
            problem = f"this server has {self._limits.max_connections} connections, its limit"
            error = OverloadedError(problem, retry_after_s=self._limits.retry_after_s)
        if error is not None:
            self._refuse(head[:MAX_HEAD_BYTES], error)
            return
        self._visit.close = ignore  # only strangers have to go
        assert self._first is not None
        data, self._first, self._receiver = self._first.take(), None, self._reader
        self._reader.feed(data)

    def _slow_down(self, num_bytes: int) -> None:
        """Read on later from a stranger that drips, or goes on sending after its refusal."""
        first, transport = self._first, self._transport
        if first is None or transport is None:
            return
        is_dripping = first.is_mid_frame and first.num_reads > _DRIP_READS and num_bytes < _DRIP_BYTES
        if is_dripping or self._is_finished:
            transport.pause_reading()
            self._loop.call_later(_DRIP_PAUSE_S, self._read_on)

    def _read_on(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    # Input.

    def _admit(self, length: int) -> Ticket | HeadraceError | None:
        if self._refusal is not None:
            return self._refusal
        size_bytes = 0 if length <= SMALL_FRAME_BYTES else self._context.pool.capacity_of(length)
        admitted = self._admission.admit(self._account, size_bytes, self._granted)
        if isinstance(admitted, Ticket):
            return admitted
        self._waiter = admitted
        self._waiter_timer = self._loop.call_later(self._limits.admission_timeout_s, self._give_up)
        return None

    def _granted(self, ticket: Ticket) -> None:
        assert self._waiter_timer is not None
        self._waiter_timer.cancel()
        self._waiter = self._waiter_timer = None
        self._resume(ticket)

    def _give_up(self) -> None:
        self._stop_waiting()
        problem = f"no room for this request within {format_seconds(self._limits.admission_timeout_s)}"
        self._resume(OverloadedError(problem, retry_after_s=self._limits.retry_after_s))

    def _stop_waiting(self) -> None:
        waiter, timer = self._waiter, self._waiter_timer
        assert waiter is not None and timer is not None
        self._waiter = self._waiter_timer = None
        timer.cancel()
        self._admission.cancel(waiter)

    def _resume(self, verdict: Ticket | HeadraceError | None = None) -> None:
        self._deadlines.touch()
        try:
            self._reader.resume(verdict)
        except ProtocolError as exc:
            self._malformed(exc)
        else:
            self._after_input()

    def _after_input(self) -> None:
        """Set flow control and deadlines according to the reader's state."""
        transport = self._transport
        if transport is None:
            return
        reader = self._receiver
        if reader.is_paused and not self._is_finished:
            transport.pause_reading()
            self._deadlines.note_pause()
            return
        transport.resume_reading()
        self._deadlines.note_input(
            is_mid_frame=reader.is_mid_frame, num_begun=reader.num_begun, num_moved=reader.num_moved
        )

    def _begin(self, frame: Frame[Ticket]) -> None:
        dispatcher = self._context.dispatcher
        if (self.peer.role is None or len(frame.data) > SMALL_FRAME_BYTES) and dispatcher.is_hello(frame.data):
            if (error := dispatcher.screen_hello(self.peer, frame)) is not None:
                head = bytes(frame.data[:MAX_HEAD_BYTES])
                frame.release()
                frame.grant.release_bytes()
                frame.grant.release()
                self._refuse(memoryview(head), error)
                return
            self._reader.pause()  # until it is answered: what comes next is for whom it makes of this connection
            self._num_running += 1
            self._spawn(self._serve_hello(frame))
            return
        try:
            request = dispatcher.decode(self.peer, frame)
        except ProtocolError as exc:
            frame.grant.release()
            self._malformed(exc)
            return
        self._num_running += 1
        self._spawn(self._serve(request, frame.grant))

    def _refuse(self, head: memoryview, error: HeadraceError) -> None:
        try:
            reply = self._context.dispatcher.refuse(self.peer, head, error)
        except ProtocolError as exc:
            self._malformed(exc)
            return
        if self._first is None:
            self._reader.pause()  # one refusal at a time, so that replies do not pile up
        self._num_running += 1
        self._spawn(self._send_refusal(reply))

    def _stop_reading(self) -> None:
        if self._waiter is not None:
            self._stop_waiting()
        if self._first is not None:
            self._first.stop()
        ticket = self._reader.stop()
        if ticket is not None:
            ticket.release_bytes()
            ticket.release()

    def _malformed(self, exc: ProtocolError) -> None:
        self._context.stats.num_malformed += 1
        self._context.refusals.warn("malformed", self.peer.address, exc)
        self._stop_reading()
        self.abort()

    # Requests.

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._context.tasks.add(task)
        task.add_done_callback(self._context.tasks.discard)

    async def _serve(self, request: Request, ticket: Ticket) -> None:
        try:
            try:
                reply = await self._context.dispatcher.run(request)
            finally:
                request.release()
            if request.name == "hello":
                self._switch_account()
            await self._reply(request, reply)
        finally:
            ticket.release()
            self._request_done()

    async def _serve_hello(self, frame: Frame[Ticket]) -> None:
        """Decode a hello, in a thread if it is long, answer it, and go on reading."""
        dispatcher, ticket = self._context.dispatcher, frame.grant
        try:
            if len(frame.data) > SMALL_FRAME_BYTES:
                request = await dispatcher.decode_aside(self.peer, frame)
            else:
                request = dispatcher.decode(self.peer, frame)
        except BaseException as exc:
            ticket.release()
            self._request_done()
            if not isinstance(exc, ProtocolError):
                raise
            self._malformed(exc)
            return
        await self._serve(request, ticket)
        if self._transport is not None and not self._is_finished:
            self._resume()

    async def _reply(self, request: Request, reply: list[Segment]) -> None:
        """Write a reply; replace it by an error if it is too long or there is no room for it to wait."""
        size_bytes, dispatcher = size_of_segments(reply), self._context.dispatcher
        if size_bytes <= SMALL_FRAME_BYTES:
            await self._send(reply)
            return
        admission, account = self._admission, self._account
        error: HeadraceError | None = None
        if size_bytes > self._limits.max_frame_bytes:
            limit = self._limits.max_frame_bytes
            error = RequestError(f"the reply has {size_bytes} bytes, the longest frame {limit}: ask for less at once")
        elif not admission.admit_reply(account, size_bytes):
            error = OverloadedError("too many replies are unread", retry_after_s=self._limits.retry_after_s)
        if error is not None:
            reply.clear()  # frees its memory now, not when the peer has read
            await self._send(dispatcher.encode_error(request.name, request.seqid, error))
            return
        try:
            await self._send(reply)
        finally:
            admission.release_reply(account, size_bytes)

    async def _send(self, reply: list[Segment]) -> None:
        try:
            await self._writer.send(reply)
        except UnavailableError as exc:
            _log.debug("%s did not get its reply: %s", self.peer.address, exc)

    async def _send_refusal(self, reply: list[Segment]) -> None:
        try:
            await self._send(reply)
        finally:
            self._request_done()
        if self._first is not None:
            self.finish()
        elif self._transport is not None and not self._is_finished:
            self._resume()

    def _request_done(self) -> None:
        self._num_running -= 1
        self._deadlines.touch()
        if not self._num_running and self._transport is not None:
            if self._is_leaving:
                self.finish()
            else:
                self._deadlines.watch()

    def _switch_account(self) -> None:
        """After a hello, count the connection towards its client and allow long frames."""
        if self.peer.role is None or self._transport is None:
            return
        self._reader.max_frame_bytes = self._limits.max_frame_bytes
        key = self.peer.who
        if self._account.key != key:
            self._admission.close_account(self._account)
            self._account = self._admission.open_account(key)

    # Deadlines.

    def _is_peer_waiting(self) -> bool:
        return bool(self._num_running) or self._receiver.is_paused

    def _is_stranger(self) -> bool:
        return self.peer.role is None

    def _expire(self, is_frame_late: bool) -> None:
        if is_frame_late:
            self._context.stats.num_timed_out += 1
            problem = f"the rest of a frame has not come within {format_seconds(self._limits.frame_timeout_s)}"
            self._context.refusals.warn("slow", self.peer.address, problem)
        self.abort()
