"""One connection to one NATS server, with an inbox of its own, that never reconnects.

`nats-py` does the protocol. What it keeps to itself and we need is reached in this file alone, so its version has an
upper bound: its transport (a publish that never waits, and an end that sends nothing more), its reading task (whose end
is the first sign of a lost connection), and the server's first line (TLS is not given up when the server offers none).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import ssl
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, TypeVar

import nats.aio.client
import nats.errors
from nats.aio.client import Srv
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport

from headrace.paramserver.log.jetstream.nats_address import NatsAccess
from headrace.paramserver.rpc.address import format_address
from headrace.schemas.errors import ConfigError, UnavailableError
from headrace.schemas.extras import install_command
from headrace.schemas.messages import Segment, size_of_segments

__all__ = ["API", "MAX_HEADERS_BYTES", "NatsClient", "OnMessage", "status_of"]

_T = TypeVar("_T")

API = "$JS.API"
MAX_HEADERS_BYTES = 1024
"""A message with its headers may take `max_payload`; beyond it the server ends the connection."""

# A paused server accepts a connection and says nothing.
_CONNECT_TIMEOUT_S = 1
_CONNECT_DEADLINE_S = 1.5
_PING_INTERVAL_S = 2
_CLOSE_DEADLINE_S = 1.0
_REQUEST_TIMEOUT_S = 2.0
_READ_BYTES = 1 << 20
# Smaller messages are joined: one write is one system call.
_LARGE_BYTES = 64 << 10
_VERSION_LINE = b"NATS/1.0\r\n"
# What a server says about credentials, in any case.
_REFUSALS = ("authorization", "authentication", "user authentication", "account")

OnMessage = Callable[[Msg], None]
"""Gets a message of the inbox. Thread: the loop's."""


def status_of(message: Msg) -> int:
    """Return the status in a message's first line; 0 if it has none. The words beside it are not reliable."""
    status = (message.headers or {}).get("Status", "0")
    return int(status) if status.isdigit() else 0


_closing: set[asyncio.Task[None]] = set()


class _Client(nats.aio.client.Client):
    """See this file's docstring."""

    def __init__(self, *, needs_tls: bool) -> None:
        super().__init__()
        self._needs_tls = needs_tls
        self.noted_error: Exception | None = None
        self._connecting = asyncio.current_task()

    async def note_error(self, exc: Exception) -> None:
        """Keep the reason. End connecting with it: the client would try the same server again and again."""
        self.noted_error = exc
        if asyncio.current_task() is self._connecting:
            raise exc

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # Called before anything is sent. A server in the middle could claim to know no TLS.
        if initial_connection and self._needs_tls and not info.get("tls_required"):
            if not info.get("tls_available"):
                raise ssl.SSLError("the server does not offer TLS")
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    async def _connect_to_server(self, s: Srv) -> None:
        self._transport = self._transport or TcpTransport()  # type: ignore[no-untyped-call]
        await self._transport.connect(s.uri, buffer_size=_READ_BYTES, connect_timeout=self.options["connect_timeout"])

    async def _read_loop(self) -> None:
        # The client's own reads 32 KiB at a time, which takes a fifth more of the processor, and logs tracebacks.
        assert self._transport is not None
        try:
            while data := await self._transport.read(_READ_BYTES):
                await self._ps.parse(data)
            await self._process_op_err(nats.errors.UnexpectedEOF())
        except (OSError, nats.errors.ProtocolError) as exc:
            await self._process_op_err(exc)

    @property
    def info(self) -> dict[str, Any]:
        """What the server said of itself."""
        return self._server_info

    def writer(self) -> asyncio.StreamWriter | None:
        """Return what writes to the socket."""
        writer: asyncio.StreamWriter | None = getattr(self._transport, "_io_writer", None)
        return writer

    def abort(self) -> None:
        """End the connection; drop what is not sent yet."""
        if (writer := self.writer()) is not None:
            writer.transport.abort()

    async def end(self) -> None:
        """End the connection, and the client's tasks. Cancellation: they end by themselves."""
        self.abort()
        # The rest is tidying up: in a task of its own, because the client swallows cancellations, and bounded, because
        # after a handshake that has failed it waits for ever.
        self._connecting = None
        closing = asyncio.ensure_future(self.close())
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)
        closing.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait([closing], timeout=_CLOSE_DEADLINE_S)
        closing.cancel()

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Return the tasks of the connection, the reading one first."""
        tasks = (self._reading_task, self._ping_interval_task, self._flusher_task)
        return [task for task in tasks if task is not None]


class _Inbox(asyncio.Future[Msg]):
    """Gets all messages of a subscription. The client calls a future's `set_result` from its reading task.

    A callback would get them over a queue and a task, later.
    """

    def __init__(self, on_message: OnMessage) -> None:
        super().__init__()
        self._on_message = on_message

    def set_result(self, message: Msg) -> None:
        """Take a message."""
        self._on_message(message)


class NatsClient:
    """A connection. Thread: the loop's.

    Attributes:
        server: Name and address of the server, for messages.
        version: Of the server.
        max_payload_bytes: The most that a message with its headers may take.
        lost: Done with the reason once the connection is lost, or closed.
    """

    def __init__(self, client: _Client, where: str) -> None:
        """Use a client that has connected; `connect` makes one."""
        info = client.info
        self.server = f"{info.get('server_name') or 'nats-server'} ({where})"
        self.version = str(info.get("version", ""))
        self.max_payload_bytes = int(info.get("max_payload", 0))
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._client = client
        self._inbox = f"_INBOX.{secrets.token_hex(11)}"
        self._numbers = itertools.count(1)
        self._on_message: dict[int, OnMessage] = {}
        self._waiting: set[asyncio.Future[Any]] = set()
        for task in client.tasks():
            task.add_done_callback(self._on_task_end)

    @classmethod
    async def connect(cls, access: NatsAccess, host: str, port: int) -> Self:
        """Connect to one server, within 1.5 s.

        Raises:
            UnavailableError: It does not answer.
            ConfigError: It refuses our credentials or its certificate does not fit; or a file of ours is unfit.

        Cancellation: the connection is ended first.
        """
        # In a task of its own: now and then the client loses a cancellation that comes together with a result.
        connecting = asyncio.ensure_future(cls._connect(access, host, port))
        try:
            await asyncio.wait([connecting])
        except asyncio.CancelledError:
            connecting.cancel()
            await asyncio.wait([connecting])
            if not connecting.cancelled() and connecting.exception() is None:
                await connecting.result().close()
            raise
        return connecting.result()

    @classmethod
    async def _connect(cls, access: NatsAccess, host: str, port: int) -> Self:
        where = format_address(host, port)
        options = access.load_options()
        client = _Client(needs_tls=access.address.has_tls)
        try:
            async with asyncio.timeout(_CONNECT_DEADLINE_S):
                await client.connect(
                    servers=[f"{'tls' if access.address.has_tls else 'nats'}://{where}"],
                    error_cb=client.note_error,
                    allow_reconnect=False,
                    connect_timeout=_CONNECT_TIMEOUT_S,
                    ping_interval=_PING_INTERVAL_S,
                    name="headrace",
                    **options,
                )
                self = cls(client, where)
                await client.subscribe(f"{self._inbox}.*", future=_Inbox(self._dispatch))
                await client.flush(_CONNECT_TIMEOUT_S)  # a publish goes past the queue in which the subscription waits
        except BaseException as exc:
            await client.end()
            if not isinstance(exc, Exception):
                raise
            raise _error_of(
                exc, where, may_lack_certificate=options.get("tls") is not None and not access.tls_certificate
            ) from exc
        return self

    def _dispatch(self, message: Msg) -> None:
        on_message = self._on_message.get(int(message.subject.rpartition(".")[2]))
        if on_message is None or self.lost.done():
            return
        try:
            on_message(message)
        except Exception as exc:  # the client would hide it
            context = {"message": f"a reply of {self.server} was not taken", "exception": exc}
            asyncio.get_running_loop().call_exception_handler(context)

    def expect(self, on_message: OnMessage) -> tuple[int, str]:
        """Return the number and subject of a new reply address; `forget` ends it."""
        number = next(self._numbers)
        self._on_message[number] = on_message
        return number, f"{self._inbox}.{number}"

    def forget(self, number: int) -> None:
        """Take no more messages for a reply address."""
        self._on_message.pop(number, None)

    def check_connected(self) -> asyncio.StreamWriter:
        """Return what writes to the socket; raise `UnavailableError` once the connection is lost."""
        writer = self._client.writer()
        if self.lost.done() or writer is None or writer.transport.is_closing():
            raise UnavailableError(f"{self.server}: {self.lost.result() if self.lost.done() else 'connection lost'}")
        return writer

    def send(
        self, subject: str, message: Sequence[Segment], *, reply: str = "", headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Hand a message to the socket without waiting. The buffers stay unchanged until it is answered.

        Raises:
            UnavailableError: The connection is lost; nothing was sent.
        """
        writer = self.check_connected()
        size_bytes = size_of_segments(message)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        if lines:
            head = b"%b%b\r\n" % (_VERSION_LINE, lines.encode())
            head = f"HPUB {subject} {reply} {len(head)} {len(head) + size_bytes}\r\n".encode() + head
        else:
            head = f"PUB {subject} {reply} {size_bytes}\r\n".encode()
        if size_bytes < _LARGE_BYTES:
            writer.write(b"".join([head, *message, b"\r\n"]))
            return
        writer.write(head)
        for segment in message:
            # What the socket does not take at once is copied once, since it is a view.
            writer.write(memoryview(segment).cast("B"))
        writer.write(b"\r\n")

    async def request(
        self,
        subject: str,
        message: Sequence[Segment] = (),
        *,
        headers: Iterable[tuple[str, str]] = (),
        timeout_s: float = _REQUEST_TIMEOUT_S,
        again_s: float | None = None,
    ) -> Msg:
        """Send a message and return the reply. With `again_s`, send it again and again, as often as that.

        Raises:
            UnavailableError: There is none in time, nobody listens, or the connection is lost.

        Cancellation: the reply is ignored.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Msg] = loop.create_future()

        def take(reply: Msg) -> None:
            if not done.done():
                done.set_result(reply)

        number, reply_to = self.expect(take)
        deadline_s = loop.time() + timeout_s
        try:
            self.send(subject, message, reply=reply_to, headers=headers)
            while again_s is not None and loop.time() + again_s < deadline_s:
                if (await asyncio.wait((done, self.lost), timeout=again_s, return_when=asyncio.FIRST_COMPLETED))[0]:
                    break
                self.send(subject, message, reply=reply_to, headers=headers)
            what = subject if again_s is None else f"the last {subject} of {timeout_s:g} s"
            reply = await self.wait(done, deadline_s - loop.time(), what)
        finally:
            self.forget(number)
        if status_of(reply) == 503:
            raise UnavailableError(f"{self.server}: nobody answers {subject}")
        return reply

    async def ask(
        self,
        what: str,
        stream: str = "",
        order: Any = None,
        *,
        timeout_s: float = _REQUEST_TIMEOUT_S,
        again_s: float | None = None,
    ) -> Any:
        """Ask JetStream and return its answer, a map that may say `error`.

        Args:
            what: The request, as in STREAM.INFO.
            stream: The stream's name, where the request is for one.
            order: Its arguments.
            timeout_s: How long to wait.
            again_s: How often to ask again meanwhile: nobody ever answers what comes while there is no leader.

        Raises:
            UnavailableError: There is no answer in time, or the connection is lost.
        """
        body = b"" if order is None else json.dumps(order).encode()
        subject = f"{API}.{what}.{stream}" if stream else f"{API}.{what}"
        reply = await self.request(subject, [body], timeout_s=timeout_s, again_s=again_s)
        try:
            return json.loads(reply.data)
        except ValueError as exc:
            raise UnavailableError(f"{self.server}: no answer to {what}: status {status_of(reply)}") from exc

    async def wait(self, done: asyncio.Future[_T], timeout_s: float, what: str) -> _T:
        """Return a future's result; it fails when the connection is lost.

        Raises:
            UnavailableError: Not done in time, or the connection is lost.
        """
        self.check_connected()
        self._waiting.add(done)
        try:
            async with asyncio.timeout(timeout_s):
                return await done
        except TimeoutError as exc:
            reason = self._client.noted_error
            text = f"{self.server}: no answer to {what} in {timeout_s:g} s"
            raise UnavailableError(f"{text} ({reason})" if reason is not None else text) from exc
        finally:
            self._waiting.discard(done)

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        exc = None if task.cancelled() else task.exception()
        self._lose(_line_of(exc or self._client.last_error or self._client.noted_error))

    def _lose(self, reason: str) -> None:
        if self.lost.done():
            return
        self.lost.set_result(reason)
        self._on_message.clear()
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(UnavailableError(f"{self.server}: {reason}"))
        self._client.abort()

    async def close(self) -> None:
        """End the connection at once: what is not sent is dropped. Idempotent."""
        self._lose("closed")
        await self._client.end()


def _line_of(exc: BaseException | None) -> str:
    if exc is None:
        return "connection lost"
    return f"connection lost: {str(exc).removeprefix('nats: ').strip() or type(exc).__name__}"


def _error_of(exc: Exception, where: str, *, may_lack_certificate: bool) -> Exception:
    """Return the error of ours for one of connecting."""
    text = str(exc).removeprefix("nats: ").strip().strip("'")
    if isinstance(exc, ConfigError):
        return exc
    if isinstance(exc, ssl.SSLError):
        return ConfigError(f"NATS server {where}: TLS: {text}")
    if isinstance(exc, nats.errors.AuthorizationError) or any(word in text.lower() for word in _REFUSALS):
        return ConfigError(f"NATS server {where} refuses our credentials: {text}")
    if isinstance(exc, ImportError):
        return ConfigError(f"these credentials need {install_command('nats')}")
    if isinstance(exc, (TimeoutError, asyncio.TimeoutError)):
        text = "it says nothing"
    elif may_lack_certificate:  # a server that wants one hangs up, and does not say why
        text = f"{text or type(exc).__name__}; if it asks for our certificate, give --log-tls-certificate"
    return UnavailableError(f"NATS server {where}: {text or type(exc).__name__}")
