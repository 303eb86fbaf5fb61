"""The listening sockets of a server, all bound before any of its processes starts.

The supervisor keeps them open as long as it lives: a shard process that is restarted takes up the same socket, and
connections that arrive in between wait in its backlog.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

from headrace.paramserver.rpc.address import is_wildcard
from headrace.paramserver.rpc.security import check_bind
from headrace.schemas.errors import ConfigError

__all__ = ["bind_listener", "bind_listeners"]

# Connections that the kernel keeps for a shard that is being restarted; it caps this at net.core.somaxconn.
_BACKLOG = 4096


@contextlib.contextmanager
def bind_listeners(
    host: str, port: int, num_shards: int, *, is_protected: bool = False, insecure_bind: bool = False
) -> Iterator[list[socket.socket]]:
    """Bind one listening socket a shard; close them at the end.

    Args:
        host: Name or address to listen on.
        port: Of shard 0; shard i gets `port + i`. 0 lets the system choose each.
        num_shards: How many.
        is_protected: Clients are authenticated over TLS, so other addresses than loopback are fine.
        insecure_bind: The user says that they are fine all the same.

    Yields:
        The sockets by shard: non-blocking, listening, not inheritable.

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
    """Bind one listening socket, which the caller closes.

    Args:
        host: Name or address to listen on.
        port: TCP port; 0 lets the system choose.
        taker: Who listens, for messages: `the replica`.
        flag: Where the port was given, for messages.
        is_open: Other addresses than loopback are fine.
        host_flag: Where the host was given, for messages.

    Returns:
        The socket: non-blocking, listening, not inheritable.

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
    # A restart must not wait for the last connections' TIME_WAIT. On Linux this lets no two sockets listen on a port.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sock.family == socket.AF_INET6:
        # Of the wildcard, IPv4 too: to clients that are told a name with addresses of both kinds, each must lead here.
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_wildcard(address))
    sock.setblocking(False)
    try:
        sock.bind((address, port))
        sock.listen(_BACKLOG)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"{flag}: port {port} of {host}, which {taker} would take, is in use; choose another {flag}"
            ) from exc
        if exc.errno == errno.EACCES:
            raise ConfigError(f"{flag}: port {port} is not allowed to this user; choose one from 1024 up") from exc
        if exc.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"{host_flag} {host}: {address} is not an address of this machine") from exc
        raise ConfigError(f"{host_flag} {host} {flag} {port}: {exc.strerror}") from exc
