"""Addresses of TCP peers, and what every socket of ours is set to."""

from __future__ import annotations

import socket

from headrace.schemas.errors import ConfigError

__all__ = ["format_address", "keep_alive", "parse_address"]

# A silent peer is found out within two minutes.
_KEEP_ALIVE = [("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)]


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port` or `[v6]:port`.

    Raises:
        ConfigError: It is neither.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"address {address!r} is not host:port")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel probe a silent peer, so that a half-open connection ends."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
