"""What every TCP connection of ours is set to."""

from __future__ import annotations

import socket

__all__ = ["keep_alive"]

# A silent peer is found out within two minutes.
_KEEP_ALIVE = [("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)]


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel probe a silent peer, so that a half-open connection ends."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
