"""Addresses as people write them, `host:port`, `[::1]:7601` or a host alone, and those of a server's shards."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from headrace.paramserver.system.settings import flag_of
from headrace.schemas.errors import ConfigError, ProtocolError

__all__ = [
    "DEFAULT_PORT",
    "check_hosts",
    "format_address",
    "is_wildcard",
    "parse_address",
    "problem_of_host",
    "shard_map",
]

DEFAULT_PORT = 7601
"""Port of a server's shard 0."""

_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^][]+)\]|(?P<host>[^][:/\s]+))(?::(?P<port>[0-9]{1,5}))?")
_MAX_LABEL_CHARS = 63  # RFC 1035; Python's own lookup raises for longer labels, and for empty ones


def format_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str, *, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Return host and port of an address as people write it; a `default_port` of 0 makes a port mandatory.

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
    """Return why a text cannot be a host name or address, or None; it is not looked up."""
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return "give a host's name or address alone, without brackets, scheme or port"
        return None
    labels = host.removesuffix(".").split(".")  # a trailing dot is the root's, as in `host.example.`
    if re.search(r"[][/,\s\0]", host) or not all(0 < len(label) <= _MAX_LABEL_CHARS for label in labels):
        return "this is no name or address of a host"
    return None


def is_wildcard(host: str) -> bool:
    """Return whether a host means every address of a machine: fit to listen on, not to connect to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def check_hosts(host: str, advertise_host: str | None) -> None:
    """Check the host to listen on (`--host`) and the one that clients connect to (`--advertise-host`).

    Raises:
        ConfigError: One is not a host, or clients cannot connect to it.
    """
    for name, given in (("host", host), ("advertise_host", advertise_host)):
        if given is not None and (problem := problem_of_host(given)):
            raise ConfigError(f"{flag_of(name)} {given}: {problem}")
    if advertise_host is None and is_wildcard(host):
        raise ConfigError(
            f"host: {host} is every address of this machine; say with --advertise-host which name or address clients "
            "shall use"
        )
    if advertise_host is not None and is_wildcard(advertise_host):
        raise ConfigError(
            f"--advertise-host {advertise_host}: to a client that is its own machine; give the name or address that "
            "clients shall use"
        )


def shard_map(hello: Any, host: str, port: int) -> list[tuple[str, int]]:
    """Return host and port of each shard in a hello's reply, by index.

    The `host` by which the shard was reached replaces missing and wildcard hosts in the reply: a server that listens on
    every address cannot know which of them a client uses.

    Raises:
        ProtocolError: A shard is missing, or listed twice.
    """
    places = sorted((place.shard, place.host, place.port) for place in hello.shards)
    if [shard for shard, _, _ in places] != list(range(len(places))) or not 0 <= hello.shard < len(places):
        raise ProtocolError(
            f"the server at {format_address(host, port)} has an incomplete shard map: this is shard {hello.shard}, and "
            f"it lists {[shard for shard, _, _ in places]}"
        )
    return [(host if not name or is_wildcard(name) else name, shard_port) for _, name, shard_port in places]
