"""Addresses as people write them: `host:port`, `[::1]:7601`, or a host alone."""

from __future__ import annotations

import re

from headrace.schemas.errors import ConfigError

__all__ = ["format_address", "parse_address"]

_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^][]+)\]|(?P<host>[^][:/\s]+))(?::(?P<port>[0-9]{1,5}))?")


def format_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str, *, default_port: int) -> tuple[str, int]:
    """Return host and port.

    Args:
        text: As people write it.
        default_port: When the text has none.

    Raises:
        ConfigError: It is no address.
    """
    match = _ADDRESS.fullmatch(text.strip())
    port = int(match["port"] or default_port) if match else 0
    if match is None or not 1 <= port <= 65535:
        raise ConfigError(f"{text!r} is not an address such as 127.0.0.1:7601 or [::1]:7601")
    return match["ipv6"] or match["host"], port
