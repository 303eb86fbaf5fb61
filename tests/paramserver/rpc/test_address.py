"""Addresses as people write them."""

from __future__ import annotations

import pytest

from headrace.paramserver.rpc.address import format_address, is_wildcard, parse_address, problem_of_host
from headrace.schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7601", "127.0.0.1", 7601),
        (" gate.example ", "gate.example", 99),
        ("[::1]:80", "::1", 80),
        ("[::1]", "::1", 99),
    ],
)
def test_parses(text: str, host: str, port: int) -> None:
    """Host and port, or a host alone; IPv6 in brackets."""
    assert parse_address(text, default_port=99) == (host, port)


@pytest.mark.parametrize(
    "text",
    ["", ":7601", "::1", "host:", "host:0", "host:65536", "host:x", "a b:1", "[::1", "h:1/", "a..b:1", "a\0b:1"],
)
def test_refuses(text: str) -> None:
    """Anything else is an error that shows what is expected."""
    with pytest.raises(ConfigError, match="is not an address such as"):
        parse_address(text, default_port=99)


@pytest.mark.parametrize("address", [("127.0.0.1", 1), ("::1", 65535)])
def test_round_trip(address: tuple[str, int]) -> None:
    """What is formatted parses to the same."""
    assert parse_address(format_address(*address), default_port=99) == address


def test_several_addresses_are_one_too_many() -> None:
    """A list of addresses is refused with what makes it unnecessary."""
    with pytest.raises(ConfigError, match=r"^'a:7601,b:7601': give one address, of any shard"):
        parse_address("a:7601,b:7601", default_port=99)


@pytest.mark.parametrize(
    "host", ["::1", "fe80::1%eth0", "::", "0.0.0.0", "gate", "gate.example.", "with_under_score", "a" * 63 + ".example"]
)
def test_hosts(host: str) -> None:
    """Names, also with underscores or the root's dot, and addresses of both families are hosts."""
    assert problem_of_host(host) is None


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        ("[::1]", "without brackets, scheme or port"),
        ("gate:7601", "without brackets, scheme or port"),
        ("tcp://gate", "without brackets, scheme or port"),
        ("gate/", "is no name"),
        ("a..b", "is no name"),
        (".b", "is no name"),
        ("a" * 64, "is no name"),
        ("a,b", "is no name"),
        ("a b", "is no name"),
        ("a\0b", "is no name"),
        ("", "is no name"),
    ],
)
def test_what_is_no_host(host: str, problem: str) -> None:
    """Anything else is said to be none, with what to leave out."""
    assert problem in (problem_of_host(host) or "")


@pytest.mark.parametrize(
    ("host", "expected"), [("0.0.0.0", True), ("::", True), ("::1", False), ("10.0.0.1", False), ("gate", False)]
)
def test_wildcards(host: str, expected: bool) -> None:
    """Every address of a machine is one to listen on alone."""
    assert is_wildcard(host) is expected
