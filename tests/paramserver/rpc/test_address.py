"""Addresses as people write them and of a server's shards; listening sockets, all bound or none; and keep-alive."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
from typing import Any

import pytest
from held_ports import hold_ports

from headrace.paramserver.rpc import address as address_module
from headrace.paramserver.rpc.address import (
    DEFAULT_PORT,
    SERVER_ENV,
    SILENCE_S,
    bind_listener,
    bind_listeners,
    format_address,
    is_wildcard,
    keep_alive,
    parse_address,
    problem_of_host,
    server_address,
    shard_map,
)
from headrace.schemas.errors import ConfigError, ProtocolError
from headrace.schemas.idl import idl


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7601", ("127.0.0.1", 7601)),
        (" gate.example ", ("gate.example", DEFAULT_PORT)),
        ("[::1]:80", ("::1", 80)),
        ("[::1]", ("::1", DEFAULT_PORT)),
        ("gate:65535", ("gate", 65535)),
    ],
)
def test_parses(text: str, address: tuple[str, int]) -> None:
    """An address is host and port, or a host alone; IPv6 needs brackets. Formatted, it parses to the same."""
    assert parse_address(text) == parse_address(format_address(*address)) == address


_SHAPELESS = [
    "",
    "::1",
    "host:",
    "host:0",
    "host:x",
    "a b:1",
    "[::1",
    "h:1/",
    "a..b:1",
    "a\0b:1",
]


@pytest.mark.parametrize(
    ("text", "default_port", "problem"),
    [
        *((text, 99, "is not an address such as") for text in _SHAPELESS),
        (":7801", 99, r"^':7801' has no host: this machine's is 127\.0\.0\.1:7801$"),
        ("host:65536", 99, "^'host:65536': ports end at 65535$"),
        ("gate", 0, "is not an address such as"),  # the port is mandatory
        ("a:7601,b:7601", 99, r"^'a:7601,b:7601': give one address, of any shard"),
    ],
)
def test_refuses(text: str, default_port: int, problem: str) -> None:
    """Anything else is an error that shows what is expected; of several addresses one is enough."""
    with pytest.raises(ConfigError, match=problem):
        parse_address(text, default_port=default_port)


def test_the_server_that_no_argument_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the environment's, whose errors name the variable; without one, the error says both ways."""
    monkeypatch.delenv(SERVER_ENV, raising=False)
    with pytest.raises(ConfigError, match=f"Give its address.* or set {SERVER_ENV}"):
        server_address(None)
    monkeypatch.setenv(SERVER_ENV, "one:7601,two")
    assert server_address(None) == "one:7601,two"
    assert server_address("three") == "three"
    monkeypatch.setenv(SERVER_ENV, "one:x")
    with pytest.raises(ConfigError, match=f"environment variable {SERVER_ENV}: 'one:x' is not an address"):
        server_address(None)


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        (("::1", "fe80::1%eth0", "::", "0.0.0.0", "gate", "gate.example.", "with_under_score"), None),
        (("a" * 63 + ".example",), None),
        (("[::1]", "gate:7601", "tcp://gate"), "give a host's name or address alone, without brackets, scheme or port"),
        (("gate/", "a..b", ".b", "a" * 64, "a,b", "a b", "a\0b", ""), "this is no name or address of a host"),
    ],
)
def test_hosts(hosts: tuple[str, ...], problem: str | None) -> None:
    """Names, with underscores or a trailing dot too, and addresses are hosts; else the problem is told."""
    assert {problem_of_host(host) for host in hosts} == {problem}
    assert [host for host in hosts if is_wildcard(host)] == [host for host in hosts if host in ("::", "0.0.0.0")]


def hello(*places: tuple[int, str, int], shard: int = 0) -> Any:
    shards = [idl.ShardAddress(shard=number, host=host, port=port) for number, host, port in places]
    return idl.HelloReply(shard=shard, shards=shards)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"], ids=["none", "IPv4", "IPv6"])
def test_a_shard_map(host: str) -> None:
    """Shards are in order, however listed and whoever was asked; a missing or wildcard host is the one reached."""
    assert shard_map(hello((1, "b", 2), (0, host, 1), shard=1), "reached", 9) == [("reached", 1), ("b", 2)]


@pytest.mark.parametrize(
    ("places", "shard", "listed"),
    [
        ([], 0, "[]"), ([(1, "b", 2)], 0, "[1]"), ([(0, "a", 1), (0, "b", 2)], 0, "[0, 0]"),
        ([(0, "a", 1)], 1, "[0]"), ([(0, "a", 1)], -2, "[0]"),
    ],
)  # fmt: skip
def test_incomplete_shard_map(places: list[tuple[int, str, int]], shard: int, listed: str) -> None:
    """A map that lacks a shard, or lists one twice, is refused."""
    with pytest.raises(
        ProtocolError, match=rf"at \[::1\]:9 has an incomplete shard map: .* lists {re.escape(listed)}$"
    ):
        shard_map(hello(*places, shard=shard), "::1", 9)


def test_consecutive_ports() -> None:
    """Shard i listens on port + i, and connections wait there before anybody accepts them."""
    port = hold_ports(3)
    with bind_listeners("localhost", port, 3) as sockets:
        assert [sock.getsockname()[1] for sock in sockets] == [port, port + 1, port + 2]
        for sock in sockets:
            assert not sock.getblocking()
            assert not sock.get_inheritable()
            socket.create_connection(sock.getsockname()[:2], timeout=60).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)


def test_one_taken_port_frees_all() -> None:
    """When the second port is taken, the first is free again."""
    port = hold_ports(2)
    with (
        socket.create_server(("127.0.0.1", port + 1)),
        pytest.raises(ConfigError, match=f"port {port + 1} of 127.0.0.1, which shard 1 would take, is in use"),
        bind_listeners("127.0.0.1", port, 2),
    ):
        raise AssertionError("bound all the same")
    with bind_listeners("127.0.0.1", port, 1):
        pass


@pytest.mark.parametrize(
    ("host", "port", "problem"),
    [
        ("no-such-host.invalid", 0, "^--host no-such-host.invalid: "),
        ("a" * 64 + ".example", 0, "^--host "),
        ("127.0.0.1", 65535, "^--port 65535: 2 shards would need ports up to 65536$"),
        ("0.0.0.0", 0, "without protection"),
    ],
)
def test_refusals(host: str, port: int, problem: str) -> None:
    """A host or port that cannot or must not be bound is one line that names the flag."""
    with pytest.raises(ConfigError, match=problem), bind_listeners(host, port, 2):
        raise AssertionError("bound all the same")
    with pytest.raises(ConfigError, match=r"^--metrics-host 192\.0\.2\.1: "):
        bind_listener("192.0.2.1", 0, taker="metrics", flag="--metrics-port", is_open=True, host_flag="--metrics-host")


@pytest.mark.parametrize("flag", ["is_protected", "insecure_bind"])
def test_beyond_loopback(flag: str) -> None:
    """Protection, or the user's consent, opens other addresses; with port 0 each shard gets a port of its own."""
    with bind_listeners("0.0.0.0", 0, 4, **{flag: True}) as sockets:
        assert {sock.getsockname()[0] for sock in sockets} == {"0.0.0.0"}
        assert len({sock.getsockname()[1] for sock in sockets}) == 4


@pytest.mark.parametrize(("host", "is_dual"), [("::", True), ("::1", False)])
def test_families(host: str, is_dual: bool) -> None:
    """`::` accepts IPv4 and IPv6; `::1` only the latter."""
    port = hold_ports()
    with bind_listeners(host, port, 1, insecure_bind=True):
        socket.create_connection(("::1", port), timeout=60).close()
        with contextlib.nullcontext() if is_dual else pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60).close()


_LINUX = pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no TCP_USER_TIMEOUT")


@_LINUX
def test_probes_and_unacknowledged_data_have_one_timeout() -> None:
    """The kernel probes the peer; idle probes end with the timeout for unacknowledged data, which overrides them."""
    with socket.socket() as sock:
        keep_alive(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle_s, interval_s, number, unacknowledged_ms = (
            sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        )
    assert idle_s + number * interval_s == SILENCE_S
    assert unacknowledged_ms == SILENCE_S * 1000


@_LINUX
def test_a_peer_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unread data ends the connection in time; the kernel alone would try for ever."""
    monkeypatch.setitem(address_module._SILENCE, "TCP_USER_TIMEOUT", 300)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as sock:
        sock.settimeout(60.0)
        keep_alive(sock)
        sock.connect(listener.getsockname())
        with pytest.raises(OSError) as given_up:  # nobody reads: the buffers fill up, and then it waits
            while True:
                sock.send(bytes(2**20))
    assert given_up.value.errno == errno.ETIMEDOUT
