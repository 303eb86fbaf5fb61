from __future__ import annotations

import errno
import socket

import pytest

from headrace.paramserver.rpc import tcp
from headrace.paramserver.rpc.tcp import SILENCE_S, keep_alive

_LINUX = pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no TCP_USER_TIMEOUT")


def test_keep_alive_sets_the_probe() -> None:
    """The kernel is told to probe."""
    with socket.socket() as sock:
        keep_alive(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@_LINUX
def test_silence_is_as_long_whether_something_is_owed_or_not() -> None:
    """The probes of an idle connection end when the time for an acknowledgement does, which overrides their number."""
    with socket.socket() as sock:
        keep_alive(sock)
        idle_s, interval_s, number, unacknowledged_ms = (
            sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        )
    assert idle_s + number * interval_s == SILENCE_S
    assert unacknowledged_ms == SILENCE_S * 1000


@_LINUX
def test_a_peer_that_takes_nothing_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that lie ready for a peer end the connection in time, where the kernel alone would ask for ever."""
    monkeypatch.setitem(tcp._SILENCE, "TCP_USER_TIMEOUT", 300)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as sock:
        sock.settimeout(20.0)
        keep_alive(sock)
        sock.connect(listener.getsockname())
        with pytest.raises(OSError) as given_up:  # nobody reads: the buffers fill up, and then it waits
            while True:
                sock.send(bytes(2**20))
    assert given_up.value.errno == errno.ETIMEDOUT
