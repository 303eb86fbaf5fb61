"""Addresses as people write them."""

from __future__ import annotations

import pytest

from headrace.paramserver.rpc.address import format_address, parse_address
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
    "text", ["", ":7601", "::1", "host:", "host:0", "host:65536", "host:x", "a b:1", "[::1", "h:1/"]
)
def test_refuses(text: str) -> None:
    """Anything else is an error that shows what is expected."""
    with pytest.raises(ConfigError, match="is not an address such as"):
        parse_address(text, default_port=99)


@pytest.mark.parametrize("address", [("127.0.0.1", 1), ("::1", 65535)])
def test_round_trip(address: tuple[str, int]) -> None:
    """What is formatted parses to the same."""
    assert parse_address(format_address(*address), default_port=99) == address
