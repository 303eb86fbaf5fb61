"""An address of this machine that is not loopback, as other machines see it."""

from __future__ import annotations

import socket

import pytest

__all__ = ["own_address"]


def own_address() -> str:
    """Return an IPv4 address of this machine; skip the test on a machine that has loopback alone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing: only the route is looked up
        except OSError:
            pytest.skip("this machine has no network but loopback")
        return str(sock.getsockname()[0])
