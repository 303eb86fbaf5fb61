from __future__ import annotations

import socket

import pytest

from headrace.paramserver.tcp import format_address, keep_alive, parse_address
from headrace.schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("address", "parsed"),
    [("localhost:1", ("localhost", 1)), ("10.0.0.1:65535", ("10.0.0.1", 65535)), ("[::1]:7601", ("::1", 7601))],
)
def test_addresses_parse_and_format(address: str, parsed: tuple[str, int]) -> None:
    """Host and port come out, and go back to the same text."""
    assert parse_address(address) == parsed
    assert format_address(*parsed) == address


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x", "host:-1", "host:¹"])
def test_bad_addresses_are_named(address: str) -> None:
    """What is not host:port is an error that shows it."""
    with pytest.raises(ConfigError, match="host:port"):
        parse_address(address)


def test_keep_alive_sets_the_probe() -> None:
    """The kernel is told to probe."""
    with socket.socket() as sock:
        keep_alive(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
