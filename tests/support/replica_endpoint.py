"""`headrace replica` as a process, and plain HTTP to it."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from watched_server import WAIT_S, wait_until


@dataclass
class Endpoint:
    """A running replica; `address` and `health` are empty until it is ready."""

    process: subprocess.Popen[bytes]
    log: Path
    ready_file: Path
    address: str = ""
    health: str = ""

    def wait_ready(self) -> None:
        """Return when it serves."""
        wait_until(lambda: self.ready_file.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()
        told = json.loads(self.ready_file.read_text())
        self.address, self.health = told["address"], told.get("health", "")
        assert told["pid"] == self.process.pid

    def wait_logged(self, message: str) -> None:
        """Return when it has logged something with `message` in it."""
        wait_until(lambda: message in self.log.read_text() or self.process.poll() is not None)
        assert message in self.log.read_text(), self.log.read_text()

    def facts(self) -> list[dict[str, Any]]:
        """Return what it has logged; a line whose end is not there yet is none."""
        lines = self.log.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


@contextmanager
def replica_endpoint(
    folder: Path, server: str, *arguments: str, wait: bool = True, **environ: str
) -> Iterator[Endpoint]:
    """Run `headrace replica` on ports of the system's choice."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "headrace", "replica", f"--server={server}", "--watch-stdin"]
    if not any(argument.startswith("--port") for argument in arguments):
        command.append("--port=0")
    command += ["--metrics-port=0", "--log-format=json", f"--ready-file={folder}/ready.json", *arguments]
    (folder / "ready.json").unlink(missing_ok=True)  # of one that was killed
    with (folder / "replica.log").open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=log)
    endpoint = Endpoint(process, folder / "replica.log", folder / "ready.json")
    try:
        if wait:
            endpoint.wait_ready()
        yield endpoint
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def get(address: str, path: str, *, method: str = "GET") -> tuple[int, str]:
    """Return status and body of one HTTP request."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()
