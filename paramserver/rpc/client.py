"""A client of one shard: many calls in flight on one connection, with replies in any order."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import math
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self, cast

from thriftpy2.thrift import TApplicationException

from headrace.paramserver.rpc.address import format_address, keep_alive
from headrace.paramserver.rpc.frame_writer import FrameWriter
from headrace.paramserver.rpc.frames import PROGRESS_BYTES, Frame, FrameReader, new_scratch
from headrace.paramserver.rpc.security import Token, is_loopback
from headrace.paramserver.rpc.shard_places import ShardPlaces, StaleTermError
from headrace.paramserver.system.text import format_seconds
from headrace.schemas.errors import (
    HeadraceError,
    ProtocolError,
    ProtocolMismatchError,
    RequestError,
    UnauthorizedError,
    UnavailableError,
)
from headrace.schemas.idl import error_from_idl, idl
from headrace.schemas.messages import (
    CALL,
    EXCEPTION,
    REPLY,
    MessageHeader,
    decode_header,
    decode_struct,
    encode_message,
    size_of_segments,
)

__all__ = ["DEFAULT_MAX_FRAME_BYTES", "ParamServerClient"]

DEFAULT_MAX_FRAME_BYTES = 64 * 2**20
_MAX_SEQID = 2**31 - 1
# Calls that timed out or were cancelled, and whose reply may still come. A server that owes more is not answering.
_MAX_ABANDONED = 4096
_CLOSE_TIMEOUT_S = 1.0
_NEXT_ADDRESS_S = 0.25  # before the next address of a name is tried as well, as in RFC 8305
_SCRATCH_BYTES = 128 * 2**10
_SMALL_FRAME_BYTES = 32 * 2**10

_Reply = tuple[MessageHeader, memoryview]


class ParamServerClient:
    """One connection to one shard; use it on one event loop. Calls may overlap.

    Calls raise the server's errors as the classes of `headrace.schemas.errors`, and `UnavailableError` if the
    connection is lost or a deadline passes; then the request may or may not have taken effect. While a long frame moves
    on, 64 KiB received or 256 KiB sent within a call's timeout, its deadline is postponed: a slow link is no stuck
    server. `binary` fields of replies are read-only views that stay valid as long as they are referenced.

    Cancellation: a call cancelled while its frame is being written closes the connection; at any other moment the
    connection and the other calls go on.

    Attributes:
        address: Host and port it connected to.
        max_frame_bytes: Longest request that the server accepts, from its hello; 64 MiB before.
        places: Where the server's shards are. Hellos add to it, and a reply of a shard's old copy ends the connection
            with `StaleTermError`. None takes all replies.
    """

    def __init__(self, protocol: _ClientProtocol, host: str, port: int, token: Token | None) -> None:
        """Use `connect`."""
        self.address = format_address(host, port)
        self.places: ShardPlaces | None = None
        self._host, self._port = host, port
        self._guarded_shard: int | None = None
        self.max_frame_bytes = DEFAULT_MAX_FRAME_BYTES
        self._protocol, self._token = protocol, token
        self._last_seqid = 0

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        *,
        timeout_s: float = 10.0,
        ssl_context: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        token: Token | None = None,
        max_reply_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    ) -> ParamServerClient:
        """Connect; call `hello` next.

        Args:
            host: Name or address. A name is looked up each time, and each of its addresses is tried.
            port: TCP port.
            timeout_s: For the connection and its TLS handshake, seconds.
            ssl_context: For TLS, from `client_tls_context`.
            server_hostname: Name that the server's certificate must have; None for `host` without a trailing dot, which
                only keeps a resolver from trying search domains.
            token: For every hello.
            max_reply_bytes: A longer reply ends the connection.

        Raises:
            UnavailableError: Nobody answers there in time.
            UnauthorizedError: The server's certificate, or ours, is not accepted.

        Cancellation: nothing stays open; attempts under way end with the loop's next turn.
        """
        address, loop = format_address(host, port), asyncio.get_running_loop()
        # Without it one silent address would use up the time of all; loops that are not asyncio's, such as uvloop's, do
        # not know it. No race for a plain address: cancelled at the wrong moment, asyncio's leaves a socket to the
        # garbage collector.
        races = isinstance(loop, asyncio.BaseEventLoop) and not _is_address(host)
        eyeballs: dict[str, Any] = {"happy_eyeballs_delay": _NEXT_ADDRESS_S} if races else {}
        try:
            async with asyncio.timeout(timeout_s):
                _, protocol = await loop.create_connection(
                    lambda: _ClientProtocol(address, max_reply_bytes),
                    host,
                    port,
                    ssl=ssl_context,
                    server_hostname=(server_hostname or host.removesuffix(".")) if ssl_context is not None else None,
                    **eyeballs,
                )
        except TimeoutError:
            raise UnavailableError(
                f"no connection to {address} within {format_seconds(timeout_s)}: "
                f"{_silence(host, is_tls=ssl_context is not None)}"
            ) from None  # here and below: what asyncio and the system said is in the text
        except ssl.SSLCertVerificationError as exc:
            raise UnauthorizedError(
                f"TLS with {address}: its certificate is refused: {exc.verify_message}; give its authority, or its "
                "name as the host (docs/security.md)"
            ) from None
        except OSError as exc:
            raise UnavailableError(f"no connection to {address}: {_reason(exc)}") from None
        except ValueError:  # of the lookup: an empty or too long label, a zero byte
            raise UnavailableError(f"no connection to {address}: {host!r} is no name of a host") from None
        return cls(protocol, host, port, token)

    @property
    def is_closed(self) -> bool:
        """Whether the connection is gone, so that every further call fails."""
        return self._protocol.lost is not None

    async def wait_closed(self) -> HeadraceError:
        """Wait until the connection is gone, and return why. Cancellation: harmless."""
        return await self._protocol.wait_closed()

    @property
    def moved_s(self) -> float:
        """When a long frame last moved on, in either direction, on the event loop's clock; -inf before."""
        return self._protocol.moved_s

    async def hello(self, request: Any, *, timeout_s: float = 10.0) -> Any:
        """Call `hello`, with the token in the request, and note the limits in the reply.

        Raises:
            UnauthorizedError: The server refuses us; or the token is not for a connection that others may read.
        """
        if self._token is not None:
            request.token = self._token.reveal(self.address, is_private=self._protocol.is_private)
        reply = await self._call("hello", request, timeout_s)
        self.max_frame_bytes = reply.limits.max_frame_bytes
        if self.places is not None and reply.server_id == self.places.server_id:
            self._guarded_shard = reply.shard
            self._check_term(self.places, reply)
            self.places.learn(reply, self._host, self._port)
        return reply

    async def set_embeddings(self, request: Any, *, timeout_s: float = 60.0) -> Any:
        """Call `setEmbeddings`. The request's columns are not copied and must not change until this ends."""
        return await self._call("setEmbeddings", request, timeout_s)

    async def get_embeddings(self, request: Any, *, timeout_s: float = 10.0) -> Any:
        """Call `getEmbeddings`."""
        return await self._call("getEmbeddings", request, timeout_s)

    async def find_rows(self, request: Any, *, timeout_s: float = 10.0) -> Any:
        """Call `findRows`."""
        return await self._call("findRows", request, timeout_s)

    async def status(self, *, timeout_s: float = 10.0) -> Any:
        """Call `status`."""
        return await self._call("status", None, timeout_s)

    async def fetch_updates(self, request: Any, *, timeout_s: float = 10.0) -> Any:
        """Call `fetchUpdates`; `timeout_s` comes on top of the request's `wait_ms`."""
        return await self._call("fetchUpdates", request, request.wait_ms / 1000 + timeout_s)

    async def digest_rows(self, request: Any, *, timeout_s: float = 60.0) -> Any:
        """Call `digestRows`."""
        return await self._call("digestRows", request, timeout_s)

    async def create_snapshot(self, request: Any, *, timeout_s: float = 86_400.0) -> Any:
        """Call `createSnapshot`; `timeout_s` comes on top of the request's `wait_ms`.

        The shard reads all of its store, which may take hours. TCP keep-alive (`sockets.keep_alive`) notices a server
        that has vanished.
        """
        return await self._call("createSnapshot", request, request.wait_ms / 1000 + timeout_s)

    async def finish_snapshot(self, request: Any, *, timeout_s: float = 600.0) -> Any:
        """Call `finishSnapshot`; a file system needs minutes to remove terabytes of files."""
        return await self._call("finishSnapshot", request, timeout_s)

    async def fetch_snapshot(self, request: Any, *, timeout_s: float = 30.0) -> Any:
        """Call `fetchSnapshot`."""
        return await self._call("fetchSnapshot", request, timeout_s)

    async def expire_rows(self, request: Any, *, timeout_s: float = 30.0) -> Any:
        """Call `expireRows`; `timeout_s` comes on top of the request's `wait_ms`."""
        return await self._call("expireRows", request, request.wait_ms / 1000 + timeout_s)

    async def promote_shard(self, request: Any, *, timeout_s: float = 10.0) -> Any:
        """Call `promoteShard`."""
        return await self._call("promoteShard", request, timeout_s)

    async def close(self) -> None:
        """Close the connection; calls in flight fail with `UnavailableError`. Idempotent.

        Cancellation: the connection closes all the same.
        """
        await self._protocol.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _call(self, name: str, request: Any, timeout_s: float) -> Any:
        args_class, result_class = _CLASSES[name]
        args = args_class(request=request) if request is not None else args_class()
        self._last_seqid = seqid = self._last_seqid % _MAX_SEQID + 1
        segments = encode_message(name, CALL, seqid, args)
        size_bytes = size_of_segments(segments)
        if size_bytes > self.max_frame_bytes:
            raise RequestError(
                f"{name} to {self.address}: a request of {size_bytes} bytes; the server reads {self.max_frame_bytes}"
            )
        try:
            header, frame = await self._protocol.exchange(seqid, segments, timeout_s)
        except TimeoutError as exc:
            why = "" if self._protocol.has_answered else ": what listens there hangs, or is no Headrace server"
            raise UnavailableError(
                f"{name} to {self.address}: no answer within {format_seconds(timeout_s)}{why}"
            ) from exc
        try:
            reply = _result_of(name, header, frame, result_class)
        except ProtocolError as exc:
            self._protocol.fail(exc)
            raise
        if self.places is not None and self._guarded_shard is not None and hasattr(reply, "term"):
            self._check_term(self.places, reply)
        return reply

    def _check_term(self, places: ShardPlaces, reply: Any) -> None:
        assert self._guarded_shard is not None
        try:
            places.check_term(self._guarded_shard, reply.term or 0, self.address)
        except StaleTermError as exc:
            self._protocol.fail(exc)
            raise


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _silence(host: str, *, is_tls: bool) -> str:
    """Return likely reasons why nothing answers."""
    reasons = ["the host is down", "a firewall is in between"]
    if is_tls:  # without TLS, the kernel accepts connections for a process that hangs
        reasons.append("what listens there hangs")
    if not _is_address(host):
        reasons.append("the name is not looked up in time")
    return f"{', '.join(reasons[:-1])}, or {reasons[-1]}"


def _reason(exc: OSError) -> str:
    # asyncio's own text only repeats the address; that of TLS and of name lookup says more than the number.
    if isinstance(exc, ssl.SSLError) and exc.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS; turn TLS on or off on both sides"
    if isinstance(exc, ConnectionResetError):  # during the handshake: without TLS nothing can be reset yet
        return "it hung up on the TLS handshake; turn TLS on or off on both sides"
    if isinstance(exc, socket.gaierror):
        return f"{exc.strerror}; is the host's name right?"
    # For a name with several addresses, one text holds all errors.
    numbers = {exc.errno} if exc.errno else {int(number) for number in re.findall(r"\[Errno (\d+)\]", str(exc))}
    if type(exc).__module__ != "builtins" or not numbers:
        return exc.strerror or str(exc) or type(exc).__name__
    text = ", ".join(os.strerror(number) for number in sorted(numbers))
    return text + ("; is the server running, and is this its port?" if errno.ECONNREFUSED in numbers else "")


_CLASSES = {
    name: (getattr(idl.ParameterServer, f"{name}_args"), getattr(idl.ParameterServer, f"{name}_result"))
    for name in idl.ParameterServer.thrift_services
}


def _result_of(name: str, header: MessageHeader, frame: memoryview, result_class: type[Any]) -> Any:
    """Return the result in a reply, or raise the error that it reports."""
    if header.name != name or header.kind not in (REPLY, EXCEPTION):
        raise ProtocolError(f"the answer to {name} is a message of kind {header.kind} named {header.name!r}")
    if header.kind == EXCEPTION:
        error = decode_struct(TApplicationException, frame, header.body_offset)
        if error.type == TApplicationException.UNKNOWN_METHOD:
            raise ProtocolMismatchError(f"the server has no method {name}; it is older than this client")
        raise HeadraceError(f"{name} failed in the server: {error.message}")
    result = decode_struct(result_class, frame, header.body_offset)
    if result.error is not None:
        raise error_from_idl(result.error)
    if result.success is None:
        raise ProtocolError(f"the answer to {name} is empty")
    return result.success


def _copy_of(error: HeadraceError) -> HeadraceError:
    """Return a copy to raise: one instance raised in several tasks would mix their tracebacks."""
    return type(error)(str(error))


class _CallDeadline:
    """Fails one call when its timeout has passed since it began and since a long frame last moved on.

    On a slow link a long frame delays all later ones; failed too early, a call would be repeated without getting
    further. A call that the server forgot still fails, once no other call keeps the link busy.
    """

    __slots__ = ("_future", "_protocol", "_sending", "_timeout_s", "_timer")

    def __init__(self, protocol: _ClientProtocol, future: asyncio.Future[_Reply], timeout_s: float) -> None:
        self._protocol, self._future, self._timeout_s = protocol, future, timeout_s
        self._sending: asyncio.Timeout | None = None
        # A bare timer and not `asyncio.timeout`, which costs as much as encoding a small call.
        self._timer = protocol.loop.call_later(timeout_s, self._look)

    @asynccontextmanager
    async def of_sending(self) -> AsyncIterator[None]:
        """Raise `TimeoutError` if the deadline passes inside the block."""
        async with asyncio.timeout(None) as self._sending:
            yield
        self._sending = None

    def cancel(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        loop = self._protocol.loop
        deadline_s = self._protocol.moved_s + self._timeout_s
        if deadline_s > loop.time():
            self._timer = loop.call_at(deadline_s, self._look)
            return
        if not self._future.done():
            self._future.set_exception(TimeoutError())
            self._future.exception()  # marks it as retrieved: its call may still be writing
        # Even with a reply: a server that refuses a frame may not read the rest of it.
        if self._sending is not None:
            self._sending.reschedule(-math.inf)  # at once


class _ClientProtocol(asyncio.BufferedProtocol):
    """The connection of a client; matches replies to calls."""

    def __init__(self, address: str, max_reply_bytes: int) -> None:
        self.lost: HeadraceError | None = None  # why the connection is unusable
        self.loop = asyncio.get_running_loop()
        self._address = address
        self._transport: asyncio.Transport | None = None
        self._is_tls = self.is_private = False
        self._closed: asyncio.Future[None] = self.loop.create_future()
        self._received_s = -math.inf  # when a long reply last moved on
        self._moved_seen = 0
        self._pending: dict[int, asyncio.Future[_Reply]] = {}
        self._abandoned: set[int] = set()
        # No deadline of its own: each call brings one.
        self._writer = FrameWriter(timeout_s=None)
        self._reader: FrameReader[bool] = FrameReader(
            max_frame_bytes=max_reply_bytes,
            # Larger than a server's, as only this connection uses it: one system call can read many replies.
            scratch=new_scratch(_SCRATCH_BYTES),
            small_frame_bytes=_SMALL_FRAME_BYTES,
            pool=None,
            admit=lambda length: True,
            deliver=self._deliver,
            refuse=lambda head, error: None,
        )

    @property
    def has_answered(self) -> bool:
        return self._reader.num_begun > 0

    @property
    def moved_s(self) -> float:
        return max(self._received_s, self._writer.moved_s)

    async def exchange(self, seqid: int, segments: list[Any], timeout_s: float) -> _Reply:
        """Send a call and return its reply, or raise `TimeoutError`."""
        if self.lost is not None:
            raise _copy_of(self.lost)
        future: asyncio.Future[_Reply] = self.loop.create_future()
        if seqid in self._pending or seqid in self._abandoned:
            raise UnavailableError(f"{self._address} has not answered for 2^31 calls")
        self._pending[seqid] = future
        deadline = _CallDeadline(self, future, timeout_s)
        is_sent = False
        try:
            if not self._writer.try_send(segments):
                async with deadline.of_sending():
                    await self._writer.send(segments)
            is_sent = True
            return await future
        except UnavailableError as exc:
            lost: HeadraceError | None = self.lost
            raise _copy_of(lost or UnavailableError(f"{self._address}: {exc}")) from None
        finally:
            deadline.cancel()
            # Still pending: no reply has come. A partly sent frame has closed the connection.
            if self._pending.pop(seqid, None) is not None and is_sent:
                self._abandon(seqid)

    def fail(self, error: HeadraceError) -> None:
        """Abort the connection; every call in flight raises `error`."""
        if self.lost is None:
            self.lost = error
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(_copy_of(self.lost))
                future.exception()  # marks it as retrieved: its call may still be writing, and then raises `lost`
        self._reader.stop()
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Close gracefully, or abort if the peer takes too long."""
        if self._transport is not None:
            if self.lost is None:
                self.lost = UnavailableError(f"{self._address}: the connection is closed")
            if self._pending:
                self.fail(self.lost)
            # Never close twice: asyncio's TLS transport then forgets its connection and never ends.
            elif not self._transport.is_closing():
                self._writer.flush()
                self._transport.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.shield(self._closed)
        except TimeoutError:
            if self._transport is not None:
                self._transport.abort()
            await asyncio.shield(self._closed)

    async def wait_closed(self) -> HeadraceError:
        await asyncio.shield(self._closed)
        assert self.lost is not None
        return self.lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        # One that was reset already has no peer, and nothing can be sent to it.
        peer = transport.get_extra_info("peername")
        self.is_private = self._is_tls or peer is None or is_loopback(peer[0])
        self._writer.attach(self._transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            keep_alive(sock)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        reason = f": {exc}" if exc is not None else ""
        if self._is_tls and not self.has_answered:
            # The server's asyncio closes without a TLS alert.
            reason += ", before any answer; it may ask for a client certificate of an authority that it trusts"
        elif not self.has_answered:
            reason += ", before any answer; it is stopping, speaks TLS, or is no Headrace server"
        self.fail(self.lost or UnavailableError(f"{self._address} closed the connection{reason}"))
        self._writer.detach()
        self._closed.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        reader = self._reader
        try:
            reader.buffer_updated(nbytes)
        except ProtocolError as exc:
            self.fail(ProtocolError(f"{self._address}: {exc}"))
        if reader.num_moved - self._moved_seen >= PROGRESS_BYTES:
            self._moved_seen, self._received_s = reader.num_moved, self.loop.time()

    def pause_writing(self) -> None:
        self._writer.pause()

    def resume_writing(self) -> None:
        self._writer.resume()

    def _deliver(self, frame: Frame[bool]) -> None:
        header = decode_header(frame.data)  # `buffer_updated` handles its ProtocolError
        if header.seqid in self._abandoned:
            self._abandoned.remove(header.seqid)
            return
        future = self._pending.pop(header.seqid, None)
        if future is None:
            raise ProtocolError(f"an answer with seqid {header.seqid}, which no call has")
        if not future.done():
            future.set_result((header, frame.data))

    def _abandon(self, seqid: int) -> None:
        if self.lost is not None:
            return
        self._abandoned.add(seqid)
        if len(self._abandoned) > _MAX_ABANDONED:
            self.fail(UnavailableError(f"{self._address} owes {_MAX_ABANDONED} answers"))
