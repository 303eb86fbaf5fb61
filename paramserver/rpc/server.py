"""A Thrift server (framed transport, strict binary protocol) with many connections on one event loop."""

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

from headrace.paramserver.rpc.address import format_address, keep_alive
from headrace.paramserver.rpc.admission import Admission, ServerLimits
from headrace.paramserver.rpc.connection import Connection, ServerContext
from headrace.paramserver.rpc.dispatch import Call, Dispatcher, Peer, ServerStats, Service
from headrace.paramserver.rpc.door import TURN_S, Door, Visit
from headrace.paramserver.rpc.frames import BufferPool
from headrace.paramserver.rpc.security import AccessPolicy
from headrace.paramserver.system.log_lines import WarningThrottle

__all__ = ["Call", "Peer", "ServerStats", "Service", "ThriftServer"]

_log = logging.getLogger(__name__)

_BACKLOG = 512
_HANDSHAKE_TIMEOUT_S = 10.0
_NO_CERTIFICATE = "PEER_DID_NOT_RETURN_A_CERTIFICATE"  # OpenSSL's name for it
# No file descriptor or memory for another connection: wait for one to close.
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_EXHAUSTED_PAUSE_S = 0.2
# In one turn of the loop, so that connections that are open need not wait; and one stranger's turn begins.
_ACCEPTS_AT_ONCE = 8
_CANCEL_S = 1.0  # to wait for cancelled requests once everything else is closed


class ThriftServer:
    """Serves one `Service`.

    Thread: the loop's.

    Attributes:
        stats: Counters since the start.
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
        """Create a server that does not listen yet.

        Without `access` it admits everybody who can connect; without `pool` it creates one for its `limits`.
        """
        self.stats = ServerStats()
        refusals = WarningThrottle(_log)
        if pool is None:
            pool = BufferPool(max_buffer_bytes=limits.max_frame_bytes, max_idle_bytes=limits.max_idle_buffer_bytes)
        access = access or AccessPolicy()
        self._limits = limits
        self._ssl_context = ssl_context
        self._context = ServerContext(
            limits=limits,
            dispatcher=Dispatcher(service, access=access, stats=self.stats, refusals=refusals),
            admission=Admission(
                max_requests=limits.max_inflight_requests,
                max_bytes=limits.max_inflight_bytes,
                max_account_requests=limits.max_client_requests,
                max_account_bytes=limits.max_client_bytes,
            ),
            door=Door(
                max_inside=limits.max_connections,
                max_strangers=limits.max_strangers,
                max_turns=limits.max_turns,
                call_next=self._call_next,
            ),
            pool=pool,
            stats=self.stats,
            refusals=refusals,
        )
        self._sock: socket.socket | None = None
        self._accepting_again: asyncio.TimerHandle | None = None
        self._arriving: dict[asyncio.Task[None], socket.socket] = {}  # still in the TLS handshake
        self._is_calling = False  # `_give_turn` runs soon
        self._closing: asyncio.Task[None] | None = None

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._context.connections)

    @property
    def inflight_bytes(self) -> int:
        """Bytes of requests in flight and of unwritten replies."""
        admission = self._context.admission
        return admission.size_bytes + admission.reply_bytes

    @property
    def inflight_requests(self) -> int:
        """Requests that are running or being read."""
        return self._context.admission.num_requests

    @property
    def num_refused(self) -> int:
        """Requests and connections refused since the start, for any reason."""
        stats = self.stats
        num_requests = stats.num_overloaded + stats.num_unauthorized + stats.num_storage
        return num_requests + stats.num_connections_refused + stats.num_malformed + stats.num_timed_out

    @property
    def refused_ago_ms(self) -> int | None:
        """Milliseconds since the last refusal; None without one."""
        quiet_s = self._context.refusals.quiet_s
        return None if quiet_s is None else int(1000 * quiet_s)

    async def start(self, sock: socket.socket) -> None:
        """Accept connections on a bound TCP socket, which the server closes. Cancellation: none, it does not wait.

        Raises:
            OSError: The socket cannot listen.
        """
        assert self._sock is None, "start() twice"
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._sock = sock
        asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    async def close(self, *, drain_s: float) -> None:
        """Stop accepting, answer requests in flight, refuse new ones as unavailable, then close every connection.

        Unanswered requests are cancelled after `drain_s` seconds; only the first call's value counts.

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
        for visit in context.door.close():
            visit.close()
        for sock in self._arriving.values():
            _hang_up(sock)
        await _wait_all(self._arriving, _CANCEL_S)
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
        """Accept waiting connections, but few enough at once that existing ones need not wait."""
        # Not `sock_accept`: cancelled at the wrong moment, it loses a connection that it has just accepted.
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTS_AT_ONCE):
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
                continue  # an error of the connection that was to be accepted
            sock.setblocking(False)
            # On a dual-stack socket, IPv4 clients have mapped addresses; people know the plain ones.
            host, port = address[0].removeprefix("::ffff:"), address[1]
            address = format_address(host, port)
            visit, gone = self._context.door.enter(host)
            if gone is not None:
                self._turn_away(gone, address)
            visit.begin = functools.partial(self._begin, sock, address, visit)
            visit.close = functools.partial(self._drop, sock, visit)
            visit.forget = loop.call_later(self._limits.hello_timeout_s, self._expire, visit).cancel
            loop.add_reader(sock, self._wait_for_turn, sock, visit)

    def _wait_for_turn(self, sock: socket.socket, visit: Visit) -> None:
        asyncio.get_running_loop().remove_reader(sock)
        self._context.door.wait(visit)

    def _call_next(self) -> None:
        if not self._is_calling:
            self._is_calling = True
            asyncio.get_running_loop().call_soon(self._give_turn)

    def _give_turn(self) -> None:
        """Begin one turn; another call, in the loop's next turn, begins the next one."""
        self._is_calling = False
        loop = asyncio.get_running_loop()
        visit, gone = self._context.door.next_turn(loop.time())
        if gone is not None:
            self._turn_away(gone, "the oldest")
        if visit is not None:
            visit.begin()
            loop.call_later(TURN_S, self._call_next)
            self._call_next()

    def _turn_away(self, gone: Visit, newcomer: str) -> None:
        self.stats.num_connections_refused += 1
        self._context.refusals.warn("connection closed", newcomer, "too many strangers at once")
        gone.close()

    def _drop(self, sock: socket.socket, visit: Visit) -> None:
        """Close the socket of a stranger that had no turn."""
        asyncio.get_running_loop().remove_reader(sock)
        sock.close()

    def _expire(self, visit: Visit) -> None:
        """Close a stranger that has not been let in in time."""
        self._context.door.leave(visit)
        visit.close()

    def _begin(self, sock: socket.socket, address: str, visit: Visit) -> None:
        task = asyncio.get_running_loop().create_task(self._welcome(sock, address, visit))
        visit.close = functools.partial(_hang_up, sock)
        self._arriving[task] = sock
        task.add_done_callback(self._arriving.pop)

    async def _welcome(self, sock: socket.socket, address: str, visit: Visit) -> None:
        """Turn an accepted socket into a connection."""
        try:
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(sock.close)
                on_failure.callback(self._context.door.leave, visit)
                keep_alive(sock)
                # asyncio does so only if the listener was made with a protocol number. Without it the end of a reply in
                # two pieces waits for the peer's ack, which the peer delays by 40 ms.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: Connection(self._context, Peer(address), visit),
                    sock,
                    ssl=self._ssl_context,
                    ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S if self._ssl_context else None,
                )
                on_failure.pop_all()
        except (OSError, TimeoutError) as exc:  # ssl.SSLError is an OSError
            if visit.had_to_go:
                return  # counted already
            if isinstance(exc, ssl.SSLCertVerificationError) or getattr(exc, "reason", None) == _NO_CERTIFICATE:
                self.stats.num_unauthorized += 1
                self._context.refusals.warn("unauthorized", address, f"TLS: {exc}")
            else:
                self.stats.num_malformed += 1
                self._context.refusals.warn("malformed", address, f"TLS handshake: {_reason(exc)}")


def _hang_up(sock: socket.socket) -> None:
    """End a connection by its socket, so that a transport of it ends too.

    Were the socket closed, the transport would go on with a descriptor that soon is another connection's.
    """
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _reason(exc: OSError) -> str:
    reason = getattr(exc, "reason", None)
    if reason == "HTTP_REQUEST":
        return "the peer speaks HTTP: metrics and health have ports of their own"
    if reason == "WRONG_VERSION_NUMBER":
        return "the peer does not speak TLS and this side does: turn it on or off on both"
    return str(exc) or "the client hung up"


async def _wait_all(futures: Iterable[asyncio.Future[Any]], timeout_s: float) -> None:
    waiting = [future for future in futures if not future.done()]
    if waiting:
        await asyncio.wait(waiting, timeout=max(timeout_s, 0))
