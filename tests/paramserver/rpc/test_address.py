"""Addresses as people write them, and the addresses of a server's shards."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.paramserver.rpc.address import (
    DEFAULT_PORT,
    format_address,
    is_wildcard,
    parse_address,
    problem_of_host,
    shard_map,
)
from headrace.schemas.errors import ConfigError, ProtocolError
from headrace.schemas.idl import idl


def test_parses() -> None:
    """An address is host and port, or a host alone; IPv6 needs brackets."""
    texts = ("127.0.0.1:7601", " gate.example ", "[::1]:80", "[::1]")
    expected = [("127.0.0.1", 7601), ("gate.example", 99), ("::1", 80), ("::1", 99)]
    assert [parse_address(text, default_port=99) for text in texts] == expected
    assert parse_address("gate") == ("gate", DEFAULT_PORT)


@pytest.mark.parametrize(
    "text",
    ["", ":7601", "::1", "host:", "host:0", "host:65536", "host:x", "a b:1", "[::1", "h:1/", "a..b:1", "a\0b:1"],
)
def test_refuses(text: str) -> None:
    """Anything else is an error that shows what is expected."""
    with pytest.raises(ConfigError, match="is not an address such as"):
        parse_address(text, default_port=99)


def test_a_mandatory_port() -> None:
    """With a default port of 0 a host alone is refused."""
    with pytest.raises(ConfigError, match="is not an address such as"):
        parse_address("gate", default_port=0)


@pytest.mark.parametrize("address", [("127.0.0.1", 1), ("::1", 65535)])
def test_round_trip(address: tuple[str, int]) -> None:
    """A formatted address parses to the same host and port."""
    assert parse_address(format_address(*address), default_port=99) == address


def test_several_addresses() -> None:
    """A list of addresses is refused with the reason why one is enough."""
    with pytest.raises(ConfigError, match=r"^'a:7601,b:7601': give one address, of any shard"):
        parse_address("a:7601,b:7601")


@pytest.mark.parametrize(
    "host", ["::1", "fe80::1%eth0", "::", "0.0.0.0", "gate", "gate.example.", "with_under_score", "a" * 63 + ".example"]
)
def test_hosts(host: str) -> None:
    """Names, with underscores or a trailing dot too, and addresses of both families are hosts."""
    assert problem_of_host(host) is None


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        (("[::1]", "gate:7601", "tcp://gate"), "without brackets, scheme or port"),
        (("gate/", "a..b", ".b", "a" * 64, "a,b", "a b", "a\0b", ""), "is no name"),
    ],
)
def test_invalid_hosts(hosts: tuple[str, ...], problem: str) -> None:
    """Anything else is refused, with what to leave out."""
    for host in hosts:
        assert problem in (problem_of_host(host) or ""), host


def test_wildcards() -> None:
    """Wildcard addresses are recognized."""
    assert [is_wildcard(host) for host in ("0.0.0.0", "::", "::1", "10.0.0.1", "gate")] == [True, True] + [False] * 3


def hello(*places: tuple[int, str, int], shard: int = 0) -> Any:
    shards = [idl.ShardAddress(shard=number, host=host, port=port) for number, host, port in places]
    return idl.HelloReply(shard=shard, shards=shards)


def test_shards_are_sorted() -> None:
    """Shards are in order, however they are listed and whichever was asked."""
    told = hello((1, "b", 2), (0, "a", 1), shard=1)
    assert shard_map(told, "reached", 9) == [("a", 1), ("b", 2)]


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"], ids=["none", "IPv4", "IPv6"])
def test_a_wildcard_host_is_replaced(host: str) -> None:
    """A missing or wildcard host is replaced by the host that was reached."""
    assert shard_map(hello((0, host, 1), (1, "b", 2)), "reached", 9) == [("reached", 1), ("b", 2)]


@pytest.mark.parametrize(
    ("reply", "listed"),
    [
        (hello(), r"\[\]"),
        (hello((1, "b", 2)), r"\[1\]"),
        (hello((0, "a", 1), (0, "b", 2)), r"\[0, 0\]"),
        (hello((0, "a", 1), shard=1), r"\[0\]"),
        (hello((0, "a", 1), shard=-1), r"\[0\]"),
    ],
)
def test_incomplete_shard_map(reply: Any, listed: str) -> None:
    """A map that lacks a shard, or lists one twice, is refused."""
    with pytest.raises(ProtocolError, match=rf"at \[::1\]:9 has an incomplete shard map: .* lists {listed}$"):
        shard_map(reply, "::1", 9)
