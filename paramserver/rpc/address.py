"""Addresses as people write them, those of a server's shards, and the sockets that listen on them.

An address is `host:port`, `[::1]:7601` or a host alone. A server's supervisor binds all sockets before any process
starts, and keeps them open as long as it lives: a restarted shard process takes up the same socket, and connections
that arrive in between wait in its backlog.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.paramserver.rpc.security import check_bind
from headrace.paramserver.system.settings import flag_of
from headrace.schemas.errors import ConfigError, ProtocolError

__all__ = [
    "DEFAULT_PORT",
    "SERVER_ENV",
    "SILENCE_S",
    "Address",
    "bind_listener",
    "bind_listeners",
    "check_hosts",
    "format_address",
    "is_wildcard",
    "keep_alive",
    "parse_address",
    "parse_addresses",
    "problem_of_host",
    "server_address",
    "server_in",
    "shard_map",
]

Address = tuple[str, int]
"""Host and port."""

DEFAULT_PORT = 7601
"""Port of a server's shard 0."""

SERVER_ENV = "HEADRACE_SERVER"
"""Environment variable with the address of the server, for clients that are given none."""

SILENCE_S = 120
"""A silent peer is given up after this time, seconds, whether it owes an acknowledgment or nothing at all."""

_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^][]+)\]|(?P<host>[^][:/\s]+))(?::(?P<port>[0-9]{1,5}))?")
_MAX_LABEL_CHARS = 63  # RFC 1035; Python's own lookup raises for longer labels, and for empty ones
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


def format_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str, *, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Return host and port of an address as people write it; a `default_port` of 0 makes a port mandatory.

    Raises:
        ConfigError: It is no address.
    """
    if "," in text:
        raise ConfigError(f"{text!r}: give one address, of any shard; from it a client finds all")
    match = _ADDRESS.fullmatch(text.strip())
    port = int(match["port"] or default_port) if match else 0
    host = (match["ipv6"] or match["host"]) if match else ""
    if text.strip().startswith(":") and text.strip()[1:].isdigit():
        raise ConfigError(f"{text!r} has no host: this machine's is 127.0.0.1{text.strip()}")
    if port > 65535:
        raise ConfigError(f"{text!r}: ports end at 65535")
    if not port or problem_of_host(host):
        raise ConfigError(f"{text!r} is not an address such as 127.0.0.1:7601 or [::1]:7601")
    return host, port


def parse_addresses(text: str) -> tuple[Address, ...]:
    """Return host and port of each address of a list with commas: of any shards of one server, to be asked in turn.

    Raises:
        ConfigError: One is no address.
    """
    return tuple(dict.fromkeys(parse_address(part) for part in text.split(",")))


def server_in(environ: Mapping[str, str]) -> str | None:
    """Return the address in the environment's `HEADRACE_SERVER`; None if that is not set or empty.

    Raises:
        ConfigError: It is no address.
    """
    address = environ.get(SERVER_ENV) or None
    if address is not None:
        try:
            parse_addresses(address)
        except ConfigError as exc:
            raise ConfigError(f"environment variable {SERVER_ENV}: {exc}") from exc
    return address


def server_address(given: str | None) -> str:
    """Return the address that a client was given, or else the one in the environment.

    Raises:
        ConfigError: There is neither, or it is no text.
    """
    if given is not None and not isinstance(given, str):
        raise ConfigError(f"address {given!r} is not text: give one such as '127.0.0.1:{DEFAULT_PORT}'")
    address = server_in(os.environ) if given is None else given
    if address is None:
        raise ConfigError(f"which server? Give its address, such as 127.0.0.1:{DEFAULT_PORT}, or set {SERVER_ENV}")
    return address


def problem_of_host(host: str) -> str | None:
    """Return why a text cannot be a host name or address, or None; it is not looked up."""
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return "give a host's name or address alone, without brackets, scheme or port"
        return None
    labels = host.removesuffix(".").split(".")  # a trailing dot is the root's, as in `host.example.`
    if re.search(r"[][/,\s\0]", host) or not all(0 < len(label) <= _MAX_LABEL_CHARS for label in labels):
        return "this is no name or address of a host"
    return None


def is_wildcard(host: str) -> bool:
    """Return whether a host means every address of a machine: fit to listen on, not to connect to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def check_hosts(host: str, advertise_host: str | None) -> None:
    """Check the host to listen on (`--host`) and the one that clients connect to (`--advertise-host`).

    Raises:
        ConfigError: One is not a host, or clients cannot connect to it.
    """
    for name, given in (("host", host), ("advertise_host", advertise_host)):
        if given is not None and (problem := problem_of_host(given)):
            raise ConfigError(f"{flag_of(name)} {given}: {problem}")
    if advertise_host is None and is_wildcard(host):
        raise ConfigError(
            f"host: {host} is every address of this machine; say with --advertise-host which name or address clients "
            "shall use"
        )
    if advertise_host is not None and is_wildcard(advertise_host):
        raise ConfigError(
            f"--advertise-host {advertise_host}: to a client that is its own machine; give the name or address that "
            "clients shall use"
        )


def shard_map(hello: Any, host: str, port: int) -> list[tuple[str, int]]:
    """Return host and port of each shard in a hello's reply, by index.

    The `host` by which the shard was reached replaces missing and wildcard hosts in the reply: a server that listens on
    every address cannot know which of them a client uses.

    Raises:
        ProtocolError: A shard is missing, or listed twice.
    """
    places = sorted((place.shard, place.host, place.port) for place in hello.shards)
    if [shard for shard, _, _ in places] != list(range(len(places))) or not -1 <= hello.shard < len(places):
        raise ProtocolError(
            f"the server at {format_address(host, port)} has an incomplete shard map: this is shard {hello.shard}, and "
            f"it lists {[shard for shard, _, _ in places]}"
        )
    return [(host if not name or is_wildcard(name) else name, shard_port) for _, name, shard_port in places]


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel probe a silent peer and give it up, so that a half-open connection ends."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _SILENCE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@contextlib.contextmanager
def bind_listeners(
    host: str, port: int, shards: int | Sequence[int], *, is_protected: bool = False, insecure_bind: bool = False
) -> Iterator[list[socket.socket]]:
    """Yield a listening socket per shard, non-blocking and not inheritable; close them at the end.

    Args:
        host: Name or address to listen on.
        port: Port of the first shard; each next one gets the next port. 0 lets the system choose each.
        shards: Their numbers, or how many there are.
        is_protected: Clients authenticate over TLS, so that addresses other than loopback are safe.
        insecure_bind: The user accepts them without protection.

    Raises:
        ConfigError: The host is unknown, not this machine's or not loopback, or a port is taken or not allowed.
    """
    family, address = _resolve(host, "--host")
    check_bind(address.partition("%")[0], is_protected=is_protected, allow_insecure=insecure_bind)
    shards = range(shards) if isinstance(shards, int) else shards
    if port + len(shards) - 1 > 65535:
        raise ConfigError(f"--port {port}: {len(shards)} shards would need ports up to {port + len(shards) - 1}")
    with contextlib.ExitStack() as stack:
        sockets = []
        for at, shard in enumerate(shards):
            sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            _bind(sock, host, address, port + at if port else 0, f"shard {shard}", "--port", "--host")
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
