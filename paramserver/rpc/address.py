"""Addresses as people write them: `host:port`, `[::1]:7601`, or a host alone."""

from __future__ import annotations

import ipaddress
import re

from headrace.schemas.errors import ConfigError

__all__ = ["format_address", "is_wildcard", "parse_address", "problem_of_host"]

_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^][]+)\]|(?P<host>[^][:/\s]+))(?::(?P<port>[0-9]{1,5}))?")
_MAX_LABEL_CHARS = 63  # RFC 1035; Python's own look-up raises for longer ones, and for empty ones


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
    if "," in text:
        raise ConfigError(f"{text!r}: give one address, of any shard; from it a client finds all")
    match = _ADDRESS.fullmatch(text.strip())
    port = int(match["port"] or default_port) if match else 0
    host = (match["ipv6"] or match["host"]) if match else ""
    if not 1 <= port <= 65535 or problem_of_host(host):
        raise ConfigError(f"{text!r} is not an address such as 127.0.0.1:7601 or [::1]:7601")
    return host, port


def problem_of_host(host: str) -> str | None:
    """Return why a text cannot be a host's name or address, for a message; None when it can.

    Whether there is such a host is not asked.
    """
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return "give a host's name or address alone, without brackets, scheme or port"
        return None
    # One dot at the end is the root's, as in `host.example.`.
    labels = host.removesuffix(".").split(".")
    if re.search(r"[][/,\s\0]", host) or not all(0 < len(label) <= _MAX_LABEL_CHARS for label in labels):
        return "this is no name or address of a host"
    return None


def is_wildcard(host: str) -> bool:
    """Return whether a host is every address of a machine, of one family: fit to listen on, not to connect to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
