"""Listening sockets of a server, and the keep-alive of every connection.

The supervisor binds all sockets before any process starts, and keeps them open as long as it lives: a restarted shard
process takes up the same socket, and connections that arrive in between wait in its backlog.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

from headrace.paramserver.rpc.address import is_wildcard
from headrace.paramserver.rpc.security import check_bind
from headrace.schemas.errors import ConfigError

__all__ = ["SILENCE_S", "bind_listener", "bind_listeners", "keep_alive"]

SILENCE_S = 120
"""A silent peer is given up after this time, seconds, whether it owes an acknowledgment or nothing at all."""

# Connections that the kernel keeps for a restarting shard, capped at net.core.somaxconn.
_BACKLOG = 4096
# Each option applies only where the system has it. Without the last one, Linux resends data to a vanished peer for some
# 15 minutes, and probes a peer that reads nothing for ever. It is longer than our own deadlines for a peer without
# progress, and not shorter than the probes, whose number it overrides.
_SILENCE = {
    "TCP_KEEPIDLE": SILENCE_S // 2,
    "TCP_KEEPINTVL": SILENCE_S // 8,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": SILENCE_S * 1000,
}


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel probe a silent peer and give it up, so that a half-open connection ends."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _SILENCE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@contextlib.contextmanager
def bind_listeners(
    host: str, port: int, num_shards: int, *, is_protected: bool = False, insecure_bind: bool = False
) -> Iterator[list[socket.socket]]:
    """Yield a listening socket per shard, non-blocking and not inheritable; close them at the end.

    Args:
        host: Name or address to listen on.
        port: Port of shard 0; shard i gets `port + i`. 0 lets the system choose each.
        num_shards: Number of sockets.
        is_protected: Clients authenticate over TLS, so that addresses other than loopback are safe.
        insecure_bind: The user accepts them without protection.

    Raises:
        ConfigError: The host is unknown, not this machine's or not loopback, or a port is taken or not allowed.
    """
    family, address = _resolve(host, "--host")
    check_bind(address.partition("%")[0], is_protected=is_protected, allow_insecure=insecure_bind)
    if port + num_shards - 1 > 65535:
        raise ConfigError(f"--port {port}: {num_shards} shards would need ports up to {port + num_shards - 1}")
    with contextlib.ExitStack() as stack:
        sockets = []
        for shard in range(num_shards):
            sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            _bind(sock, host, address, port + shard if port else 0, f"shard {shard}", "--port", "--host")
            sockets.append(sock)
        yield sockets


def bind_listener(
    host: str, port: int, *, taker: str, flag: str, is_open: bool, host_flag: str = "--host"
) -> socket.socket:
    """Return a listening socket, non-blocking and not inheritable; the caller closes it.

    Args:
        host: Name or address to listen on.
        port: TCP port; 0 lets the system choose.
        taker: Who listens, for messages: `the replica`.
        flag: Flag of the port, for messages.
        is_open: Addresses other than loopback are safe.
        host_flag: Flag of the host, for messages.

    Raises:
        ConfigError: See `bind_listeners`.
    """
    family, address = _resolve(host, host_flag)
    check_bind(address.partition("%")[0], is_protected=is_open, allow_insecure=False)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        _bind(sock, host, address, port, taker, flag, host_flag)
    except BaseException:
        sock.close()
        raise
    return sock


def _resolve(host: str, flag: str) -> tuple[socket.AddressFamily, str]:
    try:
        family, *_, sockaddr = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"{flag} {host}: {getattr(exc, 'strerror', None) or exc}") from exc
    return family, str(sockaddr[0])


def _bind(sock: socket.socket, host: str, address: str, port: int, taker: str, flag: str, host_flag: str) -> None:
    # A restart must not wait for the last connections' TIME_WAIT. On Linux this does not let two sockets share a port.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sock.family == socket.AF_INET6:
        # The wildcard takes IPv4 too: clients may get a name with addresses of both kinds, and each must lead here.
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_wildcard(address))
    sock.setblocking(False)
    try:
        sock.bind((address, port))
        sock.listen(_BACKLOG)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            problem = f"{flag}: port {port} of {host}, which {taker} would take, is in use; choose another {flag}"
        elif exc.errno == errno.EACCES:
            problem = f"{flag}: port {port} is not allowed to this user; choose one from 1024 up"
        elif exc.errno == errno.EADDRNOTAVAIL:
            problem = f"{host_flag} {host}: {address} is not an address of this machine"
        else:
            problem = f"{host_flag} {host} {flag} {port}: {exc.strerror}"
        raise ConfigError(problem) from exc
