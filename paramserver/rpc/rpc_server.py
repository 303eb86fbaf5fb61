"""A Thrift server (framed transport, strict binary protocol) for many connections on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import socket
import ssl
from collections.abc import Iterable
from typing import Any

from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.rpc.admission import Admission, ServerLimits
from headrace.paramserver.rpc.buffer_pool import BufferPool
from headrace.paramserver.rpc.rpc_connection import Connection, ServerContext
from headrace.paramserver.rpc.rpc_dispatch import Call, Dispatcher, Peer, RefusalLog, ServerStats, Service
from headrace.paramserver.rpc.security import AccessPolicy
from headrace.paramserver.rpc.tcp import keep_alive
from headrace.schemas.errors import HeadraceError, OverloadedError

__all__ = ["Call", "Peer", "ServerStats", "Service", "ThriftServer"]

_log = logging.getLogger(__name__)

_BACKLOG = 512
_HANDSHAKE_TIMEOUT_S = 10.0
_NO_CERTIFICATE = "PEER_DID_NOT_RETURN_A_CERTIFICATE"  # OpenSSL's name for it
# Connections over the bound that are still told so; those beyond are closed without a word.
_NUM_TOLD = 64
# No descriptor or memory for another connection: wait for one to close.
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_EXHAUSTED_PAUSE_S = 0.2
_ACCEPTS_A_TURN = 64
# How long cancelled requests are waited for once everything else is closed.
_CANCEL_S = 1.0


class ThriftServer:
    """Serves one `Service`.

    Thread: the loop's.

    Attributes:
        stats: What it has counted.
    """

    def __init__(
        self,
        service: Service,
        *,
        limits: ServerLimits,
        ssl_context: ssl.SSLContext | None = None,
        access: AccessPolicy | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        """Serve nothing yet.

        Args:
            service: Has the methods; see `Service`.
            limits: Bounds and deadlines.
            ssl_context: For TLS, as `server_tls_context` makes it.
            access: Tokens and roles; None lets everybody in who can connect.
            pool: Buffers for long frames; None makes one.
        """
        self.stats = ServerStats()
        refusals = RefusalLog(_log)
        if pool is None:
            pool = BufferPool(max_buffer_bytes=limits.max_frame_bytes, max_idle_bytes=limits.max_idle_buffer_bytes)
        access = access or AccessPolicy()
        self._limits = limits
        self._ssl_context = ssl_context
        self._context = ServerContext(
            limits=limits,
            dispatcher=Dispatcher(service, access=access, stats=self.stats, refusals=refusals),
            clients=_clients_admission(limits),
            strangers=_strangers_admission(limits, pool),
            pool=pool,
            stats=self.stats,
            refusals=refusals,
        )
        self._sock: socket.socket | None = None
        self._accepting_again: asyncio.TimerHandle | None = None
        self._arriving: set[asyncio.Task[None]] = set()  # accepted, and not yet connections: TLS takes its time
        self._closing: asyncio.Task[None] | None = None

    @property
    def num_connections(self) -> int:
        """Connections now."""
        return len(self._context.connections)

    @property
    def inflight_bytes(self) -> int:
        """Bytes that requests and unwritten replies hold now."""
        context = self._context
        return sum(a.size_bytes + a.reply_bytes for a in (context.clients, context.strangers))

    @property
    def inflight_requests(self) -> int:
        """Requests that are begun or being read now."""
        return self._context.clients.num_requests + self._context.strangers.num_requests

    @property
    def num_refused(self) -> int:
        """Requests and connections that were refused since the start, whatever for."""
        stats = self.stats
        return (
            stats.num_connections_refused
            + stats.num_overloaded
            + stats.num_unauthorized
            + stats.num_malformed
            + stats.num_timed_out
            + stats.num_storage
        )

    async def start(self, sock: socket.socket) -> None:
        """Begin to accept connections.

        Args:
            sock: A bound TCP socket, listening or not; the server closes it.

        Raises:
            OSError: The socket cannot listen.

        Cancellation: atomic, it does not wait.
        """
        assert self._sock is None, "start() twice"
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._sock = sock
        asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    async def close(self, *, drain_s: float) -> None:
        """Stop: accept no more, answer what is in flight, refuse the rest as unavailable, close every connection.

        Args:
            drain_s: Requests that are not answered by then are cancelled, seconds. Only the first call's counts.

        Cancellation: closing goes on without the caller; another `close` waits for it.
        """
        if self._closing is None:
            for connection in list(self._context.connections):
                connection.begin_drain()
            self._closing = asyncio.get_running_loop().create_task(self._close(drain_s))
        await asyncio.shield(self._closing)

    async def _close(self, drain_s: float) -> None:
        loop, context = asyncio.get_running_loop(), self._context
        deadline_s = loop.time() + drain_s
        if self._accepting_again is not None:
            self._accepting_again.cancel()
        if self._sock is not None:
            loop.remove_reader(self._sock)
            self._sock.close()
        arriving = list(self._arriving)
        for task in arriving:
            task.cancel()
        if arriving:
            await asyncio.wait(arriving)
        for connection in list(context.connections):
            connection.begin_drain()  # those that arrived in the meantime
        await _wait_all(context.tasks, deadline_s - loop.time())
        for connection in list(context.connections):
            connection.finish()
        await _wait_all([c.closed for c in context.connections], deadline_s - loop.time())
        unfinished = list(context.tasks)
        if unfinished:
            _log.warning("closing with %d requests unanswered after %g s", len(unfinished), drain_s)
        for task in unfinished:
            task.cancel()
        connections = list(context.connections)
        for connection in connections:
            connection.abort()
        await _wait_all([*unfinished, *(c.closed for c in connections)], _CANCEL_S)

    def _accept(self, listener: socket.socket) -> None:
        """Accept what waits, but not so many at once that those who are there have to wait."""
        # Not `sock_accept`: cancelled at the wrong moment, it loses the connection that it has just accepted.
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTS_A_TURN):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as exc:
                if exc.errno in _EXHAUSTED:
                    self._context.refusals.warn("exhausted", "listener", exc)
                    loop.remove_reader(listener)
                    self._accepting_again = loop.call_later(
                        _EXHAUSTED_PAUSE_S, loop.add_reader, listener, self._accept, listener
                    )
                    return
                continue  # the fault of the connection that was to be accepted
            sock.setblocking(False)
            # On a socket for both, an IPv4 client comes from a mapped address; it knows itself by the plain one.
            host, port = address[0].removeprefix("::ffff:"), address[1]
            task = loop.create_task(self._welcome(sock, format_address(host, port)))
            self._arriving.add(task)
            task.add_done_callback(functools.partial(self._arrived, sock))

    def _arrived(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._arriving.discard(task)
        if task.cancelled():
            sock.close()  # perhaps before its first line, and then nobody else knows of the socket

    async def _welcome(self, sock: socket.socket, address: str) -> None:
        """Make a connection of an accepted socket, or refuse it."""
        limit = self._limits.max_connections
        num_others = self.num_connections + len(self._arriving) - 1
        refusal = None
        if num_others >= limit:
            self.stats.num_connections_refused += 1
            refusal = OverloadedError(
                f"this server has {limit} connections, its limit", retry_after_s=self._limits.retry_after_s
            )
            self._context.refusals.warn("connection refused", address, refusal)
            if num_others >= limit + _NUM_TOLD:
                sock.close()
                return
        try:
            await self._connect(sock, address, refusal)
        except (OSError, TimeoutError) as exc:  # ssl.SSLError is an OSError
            if isinstance(exc, ssl.SSLCertVerificationError) or getattr(exc, "reason", None) == _NO_CERTIFICATE:
                self.stats.num_unauthorized += 1
                self._context.refusals.warn("unauthorized", address, f"TLS: {exc}")
            else:
                self.stats.num_malformed += 1
                why = str(exc) or "the client hung up"
                self._context.refusals.warn("malformed", address, f"TLS handshake: {why}")

    async def _connect(self, sock: socket.socket, address: str, refusal: HeadraceError | None) -> None:
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(sock.close)
            keep_alive(sock)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self._context, Peer(address), refusal),
                sock,
                ssl=self._ssl_context,
                ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S if self._ssl_context else None,
            )
            on_failure.pop_all()


def _clients_admission(limits: ServerLimits) -> Admission:
    return Admission(
        max_requests=limits.max_inflight_requests,
        max_bytes=limits.max_inflight_bytes,
        max_account_requests=limits.max_client_requests,
        max_account_bytes=limits.max_client_bytes,
    )


def _strangers_admission(limits: ServerLimits, pool: BufferPool) -> Admission:
    longest = pool.capacity_of(min(limits.max_hello_bytes, limits.max_frame_bytes))
    return Admission(
        max_requests=limits.max_inflight_requests,
        max_bytes=max(limits.max_stranger_bytes, longest),
        max_account_requests=limits.max_client_requests,
        max_account_bytes=longest,
    )


async def _wait_all(futures: Iterable[asyncio.Future[Any]], timeout_s: float) -> None:
    waiting = [future for future in futures if not future.done()]
    if waiting:
        await asyncio.wait(waiting, timeout=max(timeout_s, 0))
