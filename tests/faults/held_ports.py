"""TCP ports that a test closes and opens again, or hands to a process that is yet to start."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

__all__ = ["hold_ports", "released_ports"]

_held: list[socket.socket] = []


def hold_ports(number: int = 1, hosts: Sequence[str] = ("127.0.0.1",)) -> int:
    """Return the first of consecutive ports that nobody else is given until the test, or this process, ends.

    A port that is merely free may be another test's a moment later. A socket that is bound and does not listen keeps
    the system from choosing its port, for a listener or an outgoing connection, while who names the port may listen
    there (with SO_REUSEADDR, which all our servers set). Until then connections to it are refused.
    """
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            socks: list[socket.socket] = []
            for host in hosts:
                for index in range(number):
                    socks.append(stack.enter_context(socket.socket()))
                    socks[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    socks[-1].bind((host, socks[0].getsockname()[1] + index if len(socks) > 1 else 0))
            stack.pop_all()
            _held.extend(socks)
            return int(socks[0].getsockname()[1])


@contextlib.contextmanager
def released_ports() -> Iterator[None]:
    """Give back, at the end, the ports that were taken within."""
    number = len(_held)
    try:
        yield
    finally:
        while len(_held) > number:
            _held.pop().close()
