"""What every TCP connection of ours is set to."""

from __future__ import annotations

import socket

__all__ = ["SILENCE_S", "keep_alive"]

SILENCE_S = 120
"""A silent peer is found out within this time, seconds, whether it owes us an acknowledgement or nothing at all."""

# Each only where the system has it. The last one is Linux's. Without it, what a vanished peer does not acknowledge is
# sent again for some 15 minutes, and a peer that takes nothing is asked for ever. Longer than our own deadlines for a
# peer that makes no progress, and not shorter than the probes, whose number it overrides.
_SILENCE = {
    "TCP_KEEPIDLE": SILENCE_S // 2,
    "TCP_KEEPINTVL": SILENCE_S // 8,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": SILENCE_S * 1000,
}


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel probe a silent peer and give it up, so that a half-open connection ends."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _SILENCE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
