from __future__ import annotations

import socket

from headrace.paramserver.rpc.tcp import keep_alive


def test_keep_alive_sets_the_probe() -> None:
    """The kernel is told to probe."""
    with socket.socket() as sock:
        keep_alive(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
