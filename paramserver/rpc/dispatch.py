"""Decode requests, run the service's methods and encode replies; no socket is involved."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

from thriftpy2.thrift import TApplicationException

from headrace.paramserver.rpc.admission import Ticket
from headrace.paramserver.rpc.first_frame import FIRST_BYTES
from headrace.paramserver.rpc.frames import SMALL_FRAME_BYTES, Frame, ignore
from headrace.paramserver.rpc.security import AccessPolicy
from headrace.paramserver.system.log_lines import WarningThrottle
from headrace.schemas.errors import (
    HeadraceError,
    OverloadedError,
    ProtocolError,
    RequestError,
    StorageError,
    UnauthorizedError,
)
from headrace.schemas.idl import error_to_idl, idl
from headrace.schemas.messages import (
    CALL,
    EXCEPTION,
    MAX_ELEMENTS,
    REPLY,
    MessageHeader,
    Segment,
    decode_header,
    decode_struct,
    encode_message,
    find_fields,
)
from headrace.schemas.table_names import has_controls

__all__ = ["Call", "Dispatcher", "Peer", "Request", "ServerStats", "Service", "define_all"]

_log = logging.getLogger(__name__)

# Of a message before a hello, and of a reader's: they are decoded on the loop, in a few milliseconds. The longest list
# of a reader that is answered has 1024 tables, and the sizes of all shapes in a short hello are fewer, too.
_FEW_ELEMENTS = 2048
# How long the thread that decodes a long hello stops every few values, so that the loop's thread does not wait for it.
_PAUSE_S = 50e-6
_HELLO = b"\0\0\0\5hello"


@dataclass(slots=True)
class ServerStats:
    """Counters of a server since its start."""

    num_connections_refused: int = 0  # over the bound
    num_requests: int = 0  # begun
    num_failed: int = 0  # requests answered with INTERNAL: bugs
    num_overloaded: int = 0  # requests refused for lack of room
    num_unauthorized: int = 0  # requests refused for their token, role or certificate
    num_malformed: int = 0  # connections closed for bytes that are no message
    num_timed_out: int = 0  # connections closed because the peer was too slow
    num_storage: int = 0  # requests that failed because of the disk or damage on it


class Peer:
    """The other end of one connection."""

    __slots__ = (
        *("address", "client", "hang_up", "is_connected", "max_elements", "role", "run", "session"),
        "__weakref__",
    )

    def __init__(self, address: str) -> None:
        """Start before the hello."""
        self.address = address  # host and port
        self.session: Any = None  # free for the service
        self.role: int | None = None  # `Role` of the last successful hello
        self.run = self.client = ""  # of that hello; empty for a reader
        self.is_connected = True  # a reply can still reach it
        self.hang_up: Callable[[], None] = ignore  # closes the connection once its requests are answered
        self.max_elements = _FEW_ELEMENTS  # of one message; more after a hello

    @property
    def who(self) -> Hashable:
        """Equal for all connections of a client; a reader without a name is a client of its own."""
        return (self.run, self.client) if self.client else self


class _SharedFrame:
    """Counts the users of a frame's buffer; the last release frees it."""

    __slots__ = ("frame", "num_users")

    def __init__(self, frame: Frame[Ticket]) -> None:
        self.frame = frame
        self.num_users = 1

    def release(self) -> None:
        self.num_users -= 1
        if not self.num_users:
            self.frame.release()
            self.frame.grant.release_bytes()


class Call:
    """One request, as a method of the service sees it; made by `Dispatcher`.

    Attributes:
        peer: The client's connection.
        method: Name in the IDL.
        frame: The whole message, uint8, read-only. It and all views into it, such as the request's `binary` fields,
            are valid until the method returns, or longer with `hold`. A reply must not contain them.
    """

    __slots__ = ("_shared", "frame", "method", "peer")

    def __init__(self, peer: Peer, method: str, shared: _SharedFrame) -> None:
        """Use a frame."""
        self.peer, self.method, self.frame, self._shared = peer, method, shared.frame.data, shared

    def hold(self) -> Callable[[], None]:
        """Keep the frame's buffer beyond the method's return; its bytes stay in flight.

        Returns:
            A function that gives the buffer back. Idempotent; call it on the loop's thread.
        """
        shared: _SharedFrame | None = self._shared
        assert shared is not None
        assert shared.num_users > 0, "hold() after the frame was released"
        shared.num_users += 1

        def release() -> None:
            nonlocal shared
            held, shared = shared, None
            if held is not None:
                held.release()

        return release


class Service(Protocol):
    """What a server serves: `disconnected`, and any methods of the IDL, named in snake case.

    A method takes a `Call` and the IDL's request, if there is one, and returns the IDL's reply. It raises a
    `HeadraceError` to refuse. Methods of one connection start in the order of its requests, and keep that order up to
    their first `await` that waits. A method runs on when its peer is gone.

    A service with a `term` above 0 has it in every reply. One with `check_answer` has it called with the method's name
    once a reply is there, and the reply is sent only if that does not raise a `HeadraceError`. So is a refusal that
    asking again would not change.
    """

    async def hello(self, call: Call, request: Any) -> Any:
        """Return the IDL's `HelloReply`."""

    def disconnected(self, peer: Peer) -> None:
        """Handle the end of a connection; some of its requests may still be running."""


@dataclass(frozen=True, slots=True)
class _Method:
    name: str
    args: type[Any]
    result: type[Any]
    has_request: bool
    handler: Callable[..., Awaitable[Any]]


@dataclass(slots=True)
class Request:
    """A decoded request."""

    name: str  # of the method, as the peer called it
    seqid: int  # the reply must carry it
    method: _Method | None  # None if there is no such method
    argument: Any  # the method's request struct, or None
    call: Call  # for the service

    def release(self) -> None:
        """Free the request's buffer, unless the service holds it. Call it once, when the method has returned."""
        self.call._shared.release()


class Dispatcher:
    """Decodes requests, checks access, runs the service, encodes replies."""

    def __init__(
        self, service: Service, *, access: AccessPolicy, stats: ServerStats, refusals: WarningThrottle
    ) -> None:
        """Serve the methods of the IDL that `service` has."""
        self.service, self._access, self._stats, self._refusals = service, access, stats, refusals
        self._check_answer: Callable[[str], None] = getattr(service, "check_answer", lambda method: None)
        self._methods = {method.name: method for method in _methods_of(service)}
        self._decoding = asyncio.Lock()  # one thread at a time decodes a long hello
        self._decoding_of: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # one hello of each host

    def screen(self, peer: Peer, head: memoryview) -> HeadraceError | None:
        """Return why a stranger may not come in, by the first bytes of its first call; None if it may.

        Whoever shows a token in the first bytes of a hello comes in; nothing is decoded before that. Which role it
        opens is checked when the hello is.

        Raises:
            ProtocolError: They are not those of a call.
        """
        header = self._decode_call(head)
        try:
            if header.name != "hello":
                self._access.check_call(peer.role, header.name)
            else:
                self._check_knows(head)
        except UnauthorizedError as exc:
            return exc.with_traceback(None)  # its frames would keep all of this until the next garbage collection
        return None

    def screen_hello(self, peer: Peer, frame: Frame[Ticket]) -> HeadraceError | None:
        """Return why a hello is too long for who sends it; None if it is not.

        Only writers have tables to say hello with, and a long hello takes a thread half a second.
        """
        try:
            if len(frame.data) > SMALL_FRAME_BYTES:
                self._check_knows(frame.data[:FIRST_BYTES], at_least=idl.Role.WRITER)
        except UnauthorizedError as exc:
            return exc.with_traceback(None)
        return None

    def _check_knows(self, head: memoryview, *, at_least: int = idl.Role.READER) -> None:
        role = next(find_fields(idl.HelloRequest, "role", head), None)
        self._access.check_knows(role, find_fields(idl.HelloRequest, "token", head), at_least=at_least)

    def decode(self, peer: Peer, frame: Frame[Ticket]) -> Request:
        """Return the request in a frame; the dispatcher owns the frame from now on.

        Raises:
            ProtocolError: The frame is no request; it has been released.
        """
        shared = _SharedFrame(frame)
        try:
            header = self._decode_call(frame.data)
            method = self._methods.get(header.name)
            call = Call(peer, header.name, shared)
            if method is None:
                return Request(header.name, header.seqid, None, None, call)
            args = decode_struct(method.args, frame.data, header.body_offset, max_elements=peer.max_elements)
            return _request_of(header, method, args, call)
        except BaseException:
            shared.release()
            raise

    async def decode_aside(self, peer: Peer, frame: Frame[Ticket]) -> Request:
        """Return the request in a hello's frame as `decode` does; a thread decodes it, one at a time, and gives way.

        Hosts take turns.

        Cancellation: releases the frame. The thread goes on reading it, and nobody what it finds.
        """
        shared = _SharedFrame(frame)
        try:
            header, method = self._decode_call(frame.data), self._methods["hello"]
            host = peer.address.rpartition(":")[0]
            async with self._decoding_of.setdefault(host, asyncio.Lock()), self._decoding:
                args = await asyncio.to_thread(
                    decode_struct, method.args, frame.data, header.body_offset, give_way=_give_way
                )
            return _request_of(header, method, args, Call(peer, header.name, shared))
        except BaseException:
            shared.release()
            raise

    def is_hello(self, frame: memoryview) -> bool:
        """Return whether a frame is a hello, if it is anything."""
        return frame[4:13] == _HELLO

    async def run(self, request: Request) -> list[Segment]:
        """Return the reply to a request, whatever the service does.

        Cancellation: passed on to the service's method.
        """
        method = request.method
        self._stats.num_requests += 1
        if method is None:
            return _unknown_method(request.name, request.seqid)
        try:
            success = await self._call(method, request)
            reply = encode_message(method.name, REPLY, request.seqid, method.result(success=success))
            # Last, for all methods: a process that was paused until here must not send what was right before.
            self._check_answer(method.name)
            return reply
        except ProtocolError as exc:  # the service returned something that cannot be encoded
            error: HeadraceError = self._internal(request, exc)
        except HeadraceError as exc:
            self._count(request.call.peer, method.name, exc)
            error = _without_paths(method.name, request.call.peer, self._checked(method.name, exc))
        except Exception as exc:
            error = self._internal(request, exc)
        return self.encode_error(method.name, request.seqid, error)

    def _checked(self, name: str, error: HeadraceError) -> HeadraceError:
        """Return an error, or in place of a final one, why this process may not answer: another one may know better."""
        if not error.retriable:
            try:
                self._check_answer(name)
            except HeadraceError as exc:
                return exc
        return error

    def refuse(self, peer: Peer, head: memoryview, error: HeadraceError) -> list[Segment]:
        """Return an error reply to a request that is not read, given the frame's `head` of at least its header.

        Raises:
            ProtocolError: The frame is no request.
        """
        header = self._decode_call(head)
        self._count(peer, header.name, error)
        return self.encode_error(header.name, header.seqid, error)

    def encode_error(self, name: str, seqid: int, error: HeadraceError) -> list[Segment]:
        """Return a reply that reports an error."""
        if name not in idl.ParameterServer.thrift_services:
            return _unknown_method(name, seqid)
        result = getattr(idl.ParameterServer, f"{name}_result")
        return encode_message(name, REPLY, seqid, result(error=error_to_idl(error)))

    async def _call(self, method: _Method, request: Request) -> Any:
        peer, argument = request.call.peer, request.argument
        self._access.check_call(peer.role, method.name)
        if method.name == "hello":
            self._access.check_hello(argument.role, argument.token)
            argument.token = None  # no longer needed, and must not reach a log
            _check_names(argument)
        success = await method.handler(request.call, *([argument] if method.has_request else []))
        # Here, for all methods: a reply without it would be one that nobody can tell from an old copy's.
        if (term := getattr(self.service, "term", 0)) and hasattr(success, "term"):
            success.term = term
        if method.name == "hello":
            peer.role, peer.run, peer.client = argument.role, argument.run, argument.client
            peer.max_elements = _FEW_ELEMENTS if argument.role == idl.Role.READER else MAX_ELEMENTS
        return success

    def _decode_call(self, frame: memoryview) -> MessageHeader:
        header = decode_header(frame)
        if header.kind != CALL:
            raise ProtocolError(f"a message of kind {header.kind} where a call was expected")
        if header.name not in self._methods and has_controls(header.name):
            raise ProtocolError(f"a call of {header.name!r}, whose name has control characters")
        return header

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
            # A failed read does not stop the shard, but operators must learn of it as well as readers.
            self._stats.num_storage += 1
            self._refusals.warn("storage", peer.address, f"{name}: {error}")


def _without_paths(name: str, peer: Peer, error: HeadraceError) -> HeadraceError:
    """Return what a client may see of an error: which of the server's files is damaged is for administrators."""
    if not isinstance(error, StorageError) or peer.role == idl.Role.ADMIN:
        return error
    return HeadraceError(f"{name} failed: the server's disk failed or holds wrong data; its log names the file")


def define_all(service: type[Any], refuse: Callable[[Any, Call, Any], Awaitable[Any]]) -> None:
    """Give a service's class every method of the IDL that it lacks, which then is `refuse`.

    Strangers would learn what there is from a missing method.
    """
    for method in idl.ParameterServer.thrift_services:
        if not hasattr(service, _handler_name(method)):
            setattr(service, _handler_name(method), refuse)


def _handler_name(method: str) -> str:
    return re.sub("[A-Z]", lambda match: "_" + match[0].lower(), method)


def _methods_of(service: Service) -> list[_Method]:
    methods = []
    for name in idl.ParameterServer.thrift_services:
        handler = getattr(service, _handler_name(name), None)
        if handler is not None:
            args = getattr(idl.ParameterServer, f"{name}_args")
            result = getattr(idl.ParameterServer, f"{name}_result")
            methods.append(_Method(name, args, result, bool(args.thrift_spec), handler))
    return methods


def _request_of(header: MessageHeader, method: _Method, args: Any, call: Call) -> Request:
    argument = args.request if method.has_request else None
    if method.has_request and argument is None:
        raise ProtocolError(f"{header.name} without its request")
    return Request(header.name, header.seqid, method, argument, call)


def _give_way() -> None:
    time.sleep(_PAUSE_S)


def _check_names(hello: Any) -> None:
    """Refuse a hello that brings names with control characters to logs, status and terminals."""
    names = [("run", hello.run), ("client", hello.client)]
    for spec in hello.tables:
        names += [("table", spec.fqn), *(("state", state.name) for state in spec.states)]
    for what, name in names:
        if has_controls(name):
            raise RequestError(f"{what} {name[:40]!r} has control characters")


def _unknown_method(name: str, seqid: int) -> list[Segment]:
    error = TApplicationException(TApplicationException.UNKNOWN_METHOD, f"there is no method {name!r}")
    return encode_message(name, EXCEPTION, seqid, error)
