"""A minimal HTTP server for read-only pages: metrics and the status page.

Only GET and HEAD of fixed paths, one request per connection; only the head is read, and everything is bounded. A head
has to come within seconds. When all places are taken, the connection that has waited longest for its head goes, so a
probe is answered while strangers hold connections open.

Pages may not be framed and load nothing from elsewhere. On loopback, only requests for a loopback host are answered: a
page of another site whose name resolves here (DNS rebinding) gets nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Self

__all__ = ["HttpServer", "Page", "Reply", "Request"]

_log = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 8192
# More than asyncio accepts in two turns of its loop: what a new connection has sent is read before it is the oldest.
_MAX_CONNECTIONS = 256
_HEAD_TIMEOUT_S = 3.0
_TIMEOUT_S = 15.0
_HEADERS = (
    "Cache-Control: no-store\r\n"
    "Connection: close\r\n"
    "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "X-Content-Type-Options: nosniff\r\n"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request; `headers` are by lower-case name, the last of a repeated one."""

    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A reply: HTTP status, content type and body."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


Page = Callable[[Request], Awaitable[Reply]]


class HttpServer:
    """Serve pages on one socket while its `async with` lasts.

    Thread: the event loop's.
    """

    def __init__(
        self,
        sock: socket.socket,
        pages: Mapping[str, Page],
        *,
        head_timeout_s: float = _HEAD_TIMEOUT_S,
        timeout_s: float = _TIMEOUT_S,
        max_connections: int = _MAX_CONNECTIONS,
    ) -> None:
        """Create a server that accepts nothing yet.

        Args:
            sock: Bound; the server closes it.
            pages: By path, such as `/metrics`.
            head_timeout_s: From the connection to the end of the request's head, seconds.
            timeout_s: For a request and its reply together, seconds.
            max_connections: A further one takes the place of the oldest, of one without a whole head if there is any.
        """
        self._sock = sock
        self._pages = dict(pages)
        self._head_timeout_s, self._timeout_s = head_timeout_s, timeout_s
        self._max_connections = max_connections
        self._is_loopback = ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback
        self._server: asyncio.Server | None = None
        # Both in the order of their connections.
        self._reading: dict[asyncio.Task[None], asyncio.WriteTransport] = {}
        self._answering: dict[asyncio.Task[None], asyncio.WriteTransport] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, sock=self._sock, limit=_MAX_HEAD_BYTES)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        while self._reading or self._answering:
            self._end_oldest()
        if self._ending:
            await asyncio.wait(self._ending)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(self._reading) + len(self._answering) >= self._max_connections:
            self._end_oldest()
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer), name="headrace-http")
        self._reading[task] = writer.transport
        task.add_done_callback(self._forget)

    def _end_oldest(self) -> None:
        task, transport = next(iter((self._reading or self._answering).items()))
        self._forget(task)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        task.cancel()
        transport.abort()  # here as well: a task that has not begun yet ends without doing so

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._reading.pop(task, None)
        self._answering.pop(task, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # A peer that goes away or is too slow gets no reply.
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                async with asyncio.timeout(self._timeout_s):
                    try:
                        head = await self._read_head(reader)
                    except asyncio.LimitOverrunError:
                        reply = _encode(_refusal(431, f"a head of more than {_MAX_HEAD_BYTES} bytes"), has_body=True)
                    else:
                        reply = await self._reply_to(head)
                    writer.write(reply)
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        finally:
            writer.transport.abort()

    async def _read_head(self, reader: asyncio.StreamReader) -> bytes:
        async with asyncio.timeout(self._head_timeout_s):
            head = await reader.readexactly(1)
            # A client of another protocol would wait for a reply while we wait for the end of its head.
            if head.isalpha():
                head += await reader.readuntil(b"\r\n\r\n")
        task = asyncio.current_task()
        assert task is not None
        self._answering[task] = self._reading.pop(task)
        return head

    async def _reply_to(self, head: bytes) -> bytes:
        request_line, *lines = head.decode("latin-1").split("\r\n")
        method, _, rest = request_line.partition(" ")
        target, _, version = rest.partition(" ")
        if not version.startswith("HTTP/1."):
            return _encode(_refusal(400, "not HTTP/1"), has_body=True)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        request = Request(path=target.partition("?")[0], headers=headers)
        return _encode(await self._page(method, request), has_body=method != "HEAD")

    async def _page(self, method: str, request: Request) -> Reply:
        if method not in ("GET", "HEAD"):
            return _refusal(405, "only GET and HEAD")
        if self._is_loopback and not _is_loopback_host(request.headers.get("host", "localhost")):
            return _refusal(403, "ask for localhost")
        page = self._pages.get(request.path)
        if page is None:
            return _refusal(404, f"there is {', '.join(self._pages)}")
        try:
            return await page(request)
        except Exception:
            _log.exception("page %s failed", request.path)
            return _refusal(500, "failed; the log says more")


def _is_loopback_host(host: str) -> bool:
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _refusal(status: int, text: str) -> Reply:
    return Reply(status=status, body=text.encode() + b"\n")


def _encode(reply: Reply, *, has_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {reply.status} {http.HTTPStatus(reply.status).phrase}\r\n"
        f"Content-Type: {reply.content_type}\r\n"
        f"Content-Length: {len(reply.body)}\r\n"
        f"{_HEADERS}\r\n"
    )
    return head.encode() + (reply.body if has_body else b"")
