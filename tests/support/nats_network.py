"""A network for three NATS servers, each in a namespace of its own, whose links can be cut one by one.

A cut drops packets and tells nobody, as a broken switch does. It needs root; `needs_network` skips a test without it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from nats_cluster import SMALL, needs_nats_server
from nats_servers import NatsServer, NatsServers, Places

_NUM_SERVERS = 3


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def _has_network() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"hr{secrets.token_hex(3)}"
    try:
        with ExitStack() as stack:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _ip("link", "add", name, "type", "bridge")
            stack.callback(_ip, "link", "del", name)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def needs_network(function: Any) -> Any:
    """Skip a test where there is no nats-server, or where network namespaces cannot be made."""
    reason = "network namespaces cannot be made here: not root, or no `ip netns`"
    return needs_nats_server(pytest.mark.skipif(not _has_network(), reason=reason)(function))


class NatsNetwork:
    """The servers and their network.

    Attributes:
        servers: The cluster; this process reaches all of its servers.
    """

    def __init__(self, servers: NatsServers, names: dict[str, str]) -> None:
        self.servers = servers
        self._names = names  # of the namespaces, by the server's
        self._blocked: list[tuple[list[str], str]] = []

    def cut(self, one: NatsServer, other: NatsServer) -> None:
        """Drop everything between two servers."""
        self._block(["-n", self._names[one.name]], other.host)
        self._block(["-n", self._names[other.name]], one.host)

    def isolate(self, server: NatsServer) -> None:
        """Drop everything between a server and the others; this process reaches it still."""
        for other in self.servers.servers:
            if other is not server:
                self.cut(server, other)

    def _block(self, where: list[str], host: str) -> None:
        if (where, host) not in self._blocked:
            _ip(*where, "route", "add", "blackhole", f"{host}/32")
            self._blocked.append((where, host))

    def mend(self) -> None:
        """Pass everything on again."""
        while self._blocked:
            where, host = self._blocked.pop()
            _ip(*where, "route", "del", "blackhole", f"{host}/32")


@contextmanager
def nats_network(folder: Path) -> Iterator[NatsNetwork]:
    """Run three servers on a network of their own; remove it at the end."""
    name, third = f"hr{secrets.token_hex(3)}", secrets.randbelow(250) + 1
    net = f"198.18.{third}"  # a range for tests of networks, which nobody routes
    names = {f"n{number}": f"{name}-{number}" for number in range(1, _NUM_SERVERS + 1)}
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        _ip("link", "add", name, "type", "bridge")
        stack.callback(_ip, "link", "del", name)
        _ip("addr", "add", f"{net}.254/24", "dev", name)
        _ip("link", "set", name, "up")
        places = []
        for number, namespace in enumerate(names.values(), 1):
            _ip("netns", "add", namespace)
            stack.callback(_ip, "netns", "del", namespace)  # its end of the cable goes with it
            _ip("link", "add", f"{name}v{number}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("link", "set", f"{name}v{number}", "master", name, "up")
            _ip("-n", namespace, "addr", "add", f"{net}.{number}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", namespace, "link", "set", device, "up")
            enter = ("ip", "netns", "exec", namespace)
            places.append(Places(host=f"{net}.{number}", port=4222, monitor_port=8222, route_port=6222, enter=enter))
        servers = stack.enter_context(NatsServers(folder, jetstream=lambda _: SMALL, places=places))
        network = NatsNetwork(servers, names)
        stack.callback(network.mend)
        yield network
