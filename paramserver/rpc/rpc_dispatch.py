"""From a frame to a method of the service, and from its result to a reply; no socket in sight."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

from thriftpy2.thrift import TApplicationException

from headrace.paramserver.rpc.admission import Ticket
from headrace.paramserver.rpc.frames import Frame
from headrace.paramserver.rpc.security import AccessPolicy
from headrace.schemas.errors import HeadraceError, OverloadedError, ProtocolError, StorageError, UnauthorizedError
from headrace.schemas.idl import error_to_idl, idl
from headrace.schemas.messages import (
    CALL,
    EXCEPTION,
    REPLY,
    Segment,
    decode_header,
    decode_struct,
    encode_message,
)

__all__ = ["Call", "Dispatcher", "Peer", "RefusalLog", "Request", "ServerStats", "Service", "handler_name"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ServerStats:
    """What a server has counted since its start.

    Attributes:
        num_connections_refused: Connections over the bound.
        num_requests: Requests that were begun.
        num_failed: Requests answered with INTERNAL: bugs.
        num_overloaded: Requests refused for want of room.
        num_unauthorized: Requests refused for their token, role or certificate.
        num_malformed: Connections closed for bytes that are no message.
        num_timed_out: Connections closed because the peer was too slow.
        num_storage: Requests that the disk, or damage on it, has failed.
    """

    num_connections_refused: int = 0
    num_requests: int = 0
    num_failed: int = 0
    num_overloaded: int = 0
    num_unauthorized: int = 0
    num_malformed: int = 0
    num_timed_out: int = 0
    num_storage: int = 0


@dataclass(slots=True)
class RefusalLog:
    """Warnings about peers, at most one a second of each kind, so that no peer can fill the disk with them."""

    logger: logging.Logger
    interval_s: float = 1.0
    clock: Callable[[], float] = time.monotonic
    _last_s: dict[str, float] = field(default_factory=dict)
    _num_left_out: dict[str, int] = field(default_factory=dict)

    def warn(self, kind: str, address: str, reason: object) -> None:
        """Log that a peer was refused, or count it towards the next line of this kind."""
        now = self.clock()
        if now - self._last_s.get(kind, -self.interval_s) < self.interval_s:
            self._num_left_out[kind] = self._num_left_out.get(kind, 0) + 1
            return
        self._last_s[kind] = now
        left_out = self._num_left_out.pop(kind, 0)
        more = f" ({left_out} more since the last such line)" if left_out else ""
        self.logger.warning("%s: %s: %s%s", address, kind, reason, more)


class Peer:
    """The other end of one connection.

    Attributes:
        address: Host and port.
        session: Whatever the service keeps here.
        role: `Role` of its last successful hello; None before the first.
        run: Run of that hello; empty for a reader.
        client: Client of that hello; empty for a reader.
        is_connected: Whether an answer can still reach it.
    """

    __slots__ = ("address", "client", "is_connected", "role", "run", "session")

    def __init__(self, address: str) -> None:
        """Start before the hello."""
        self.address = address
        self.session: Any = None
        self.role: int | None = None
        self.run = ""
        self.client = ""
        self.is_connected = True

    @property
    def who(self) -> Hashable:
        """Equal for all connections of a client; a reader without a name is one by itself."""
        return (self.run, self.client) if self.client else self


class _Lease:
    """Counts who needs a frame's buffer; the last one's release frees it."""

    __slots__ = ("frame", "num_holders")

    def __init__(self, frame: Frame[Ticket]) -> None:
        self.frame = frame
        self.num_holders = 1

    def release(self) -> None:
        self.num_holders -= 1
        if not self.num_holders:
            self.frame.release()
            self.frame.grant.release_bytes()


class Call:
    """One request, as a method of the service sees it.

    Attributes:
        peer: Who asks.
        method: Name in the IDL.
        frame: The whole message, uint8, read-only. It and all views into it, which the request's `binary` fields are,
            are valid until the method returns, or longer with `hold`. A reply must not contain them.
    """

    __slots__ = ("_lease", "frame", "method", "peer")

    def __init__(self, peer: Peer, method: str, lease: _Lease) -> None:
        """Made by `Dispatcher`."""
        self.peer = peer
        self.method = method
        self.frame = lease.frame.data
        self._lease = lease

    def hold(self) -> Callable[[], None]:
        """Keep the frame's buffer beyond the method's return; until then its bytes count as in flight.

        Returns:
            What gives it back, to be called once, on the loop's thread; again is harmless.
        """
        lease: _Lease | None = self._lease
        assert lease is not None
        assert lease.num_holders > 0, "hold() after the frame was released"
        lease.num_holders += 1

        def release() -> None:
            nonlocal lease
            held, lease = lease, None
            if held is not None:
                held.release()

        return release


class Service(Protocol):
    """What a server serves: `disconnected`, and methods of the IDL in snake case: these, and any other that it has.

    Methods raise `HeadraceError` to refuse. Those of one connection are begun in the order of its requests: what comes
    before a method's first `await` that waits is in that order too. A method goes on when its peer is gone.
    """

    async def hello(self, call: Call, request: Any) -> Any:
        """Return the IDL's `HelloReply`."""

    async def set_embeddings(self, call: Call, request: Any) -> Any:
        """Return the IDL's `SetEmbeddingsReply`."""

    async def get_embeddings(self, call: Call, request: Any) -> Any:
        """Return the IDL's `GetEmbeddingsReply`."""

    async def status(self, call: Call) -> Any:
        """Return the IDL's `StatusReply`."""

    def disconnected(self, peer: Peer) -> None:
        """Note that a connection is gone; requests of it may still be running."""


@dataclass(frozen=True, slots=True)
class _Method:
    name: str
    args: type[Any]
    result: type[Any]
    has_request: bool
    handler: Callable[..., Awaitable[Any]]


@dataclass(slots=True)
class Request:
    """A decoded request.

    Attributes:
        name: Method as the peer called it.
        seqid: Number that the reply must carry.
        method: None when there is no such method.
        argument: The method's request struct, or None.
        call: What the service gets; its buffer must be given back by `release`.
    """

    name: str
    seqid: int
    method: _Method | None
    argument: Any
    call: Call

    def release(self) -> None:
        """Free the request's buffer, unless the service holds it. Call once, when it has returned."""
        self.call._lease.release()


class Dispatcher:
    """Decodes requests, asks the access policy, runs the service, encodes replies."""

    def __init__(self, service: Service, *, access: AccessPolicy, stats: ServerStats, refusals: RefusalLog) -> None:
        """Serve the methods of the IDL that `service` has."""
        self.service = service
        self._access = access
        self._stats = stats
        self._refusals = refusals
        self._methods = {method.name: method for method in _methods_of(service)}

    def decode(self, peer: Peer, frame: Frame[Ticket]) -> Request:
        """Return the request in a frame, and own the frame from now on.

        Raises:
            ProtocolError: The frame is no request; it has been released.
        """
        lease = _Lease(frame)
        try:
            header = decode_header(frame.data)
            if header.kind != CALL:
                raise ProtocolError(f"a message of kind {header.kind} where a call was expected")
            method = self._methods.get(header.name)
            call = Call(peer, header.name, lease)
            if method is None:
                return Request(header.name, header.seqid, None, None, call)
            args = decode_struct(method.args, frame.data, header.body_offset)
            argument = args.request if method.has_request else None
            if method.has_request and argument is None:
                raise ProtocolError(f"{header.name} without its request")
        except BaseException:
            lease.release()
            raise
        return Request(header.name, header.seqid, method, argument, call)

    async def run(self, request: Request) -> list[Segment]:
        """Return the reply to a request: always one, whatever the service does.

        Cancellation: passed on to the service's method.
        """
        method = request.method
        self._stats.num_requests += 1
        if method is None:
            return _unknown_method(request.name, request.seqid)
        try:
            success = await self._call(method, request)
            return encode_message(method.name, REPLY, request.seqid, method.result(success=success))
        except ProtocolError as exc:  # the service returned what cannot be encoded
            error: HeadraceError = self._internal(request, exc)
        except HeadraceError as exc:
            self._count(request.call.peer, method.name, exc)
            error = exc
        except Exception as exc:
            error = self._internal(request, exc)
        return self.encode_error(method.name, request.seqid, error)

    def refuse(self, peer: Peer, head: memoryview, error: HeadraceError) -> list[Segment]:
        """Return the answer to a request that is not read.

        Args:
            peer: Who asks.
            head: The frame's first bytes, which hold its header.
            error: Why.

        Raises:
            ProtocolError: The frame is no request.
        """
        header = decode_header(head)
        if header.kind != CALL:
            raise ProtocolError(f"a message of kind {header.kind} where a call was expected")
        self._count(peer, header.name, error)
        return self.encode_error(header.name, header.seqid, error)

    def encode_error(self, name: str, seqid: int, error: HeadraceError) -> list[Segment]:
        """Return a reply that reports an error."""
        method = self._methods.get(name)
        if method is None:
            return _unknown_method(name, seqid)
        return encode_message(name, REPLY, seqid, method.result(error=error_to_idl(error)))

    async def _call(self, method: _Method, request: Request) -> Any:
        peer, argument = request.call.peer, request.argument
        self._access.check_call(peer.role, method.name)
        if method.name == "hello":
            self._access.check_hello(argument.role, argument.token)
            argument.token = None  # it has served, and must not reach a log
        if method.has_request:
            success = await method.handler(request.call, argument)
        else:
            success = await method.handler(request.call)
        if method.name == "hello":
            peer.role, peer.run, peer.client = argument.role, argument.run, argument.client
        return success

    def _internal(self, request: Request, exc: Exception) -> HeadraceError:
        self._stats.num_failed += 1
        _log.error("%s from %s failed", request.name, request.call.peer.address, exc_info=exc)
        return HeadraceError(f"{request.name} failed inside the server: {type(exc).__name__}; its log says more")

    def _count(self, peer: Peer, name: str, error: HeadraceError) -> None:
        if isinstance(error, UnauthorizedError):
            self._stats.num_unauthorized += 1
            self._refusals.warn("unauthorized", peer.address, error)
        elif isinstance(error, OverloadedError):
            self._stats.num_overloaded += 1
            self._refusals.warn("overloaded", peer.address, f"{name}: {error}")
        elif isinstance(error, StorageError):
            # What is read is no reason for a shard to stop, and must not be known to its readers alone.
            self._stats.num_storage += 1
            self._refusals.warn("storage", peer.address, f"{name}: {error}")


def handler_name(method: str) -> str:
    """Return how the IDL's method is called in a `Service`."""
    return re.sub("[A-Z]", lambda match: "_" + match[0].lower(), method)


def _methods_of(service: Service) -> list[_Method]:
    methods = []
    for name in idl.ParameterServer.thrift_services:
        handler = getattr(service, handler_name(name), None)
        if handler is not None:
            args = getattr(idl.ParameterServer, f"{name}_args")
            result = getattr(idl.ParameterServer, f"{name}_result")
            methods.append(_Method(name, args, result, bool(args.thrift_spec), handler))
    return methods


def _unknown_method(name: str, seqid: int) -> list[Segment]:
    error = TApplicationException(TApplicationException.UNKNOWN_METHOD, f"there is no method {name!r}")
    return encode_message(name, EXCEPTION, seqid, error)
