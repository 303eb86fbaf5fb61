"""A real server for the chaos harness: `headrace serve` with shard processes of `chaos_shard.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from held_ports import hold_ports

from headrace.paramserver.config.data_dir import DataDir, is_in_use
from headrace.paramserver.config.server_settings import ServerConfig
from headrace.paramserver.rpc.address import bind_listeners
from headrace.paramserver.shard.supervisor import Supervisor
from headrace.paramserver.system.durable import ReadyFile
from headrace.paramserver.system.log_lines import configure_logging

HOST = "127.0.0.1"
PROXY_HOST = "127.0.0.2"
"""What the server tells clients: the proxy listens there, on the same ports."""
WAIT_S = 60.0
_MIB = 1 << 20
_POLL_S = 0.01


def main(arguments: dict[str, Any]) -> int:
    """Run the supervisor, as `headrace serve` does."""
    config = ServerConfig(
        data=Path(arguments["data"]),
        shards=arguments["shards"],
        host=HOST,
        port=arguments["port"],
        advertise_host=PROXY_HOST,
        # The harness kills more often than any machine would.
        max_quick_deaths=1000,
        quick_death_s=0.0,
        drain_s=2.0,
        log_segment_bytes=_MIB,
        log_retention_bytes=4 * _MIB,
        memtable_bytes=12 * _MIB,
        block_cache_bytes=32 * _MIB,
    )
    configure_logging(level="info", log_format="json")
    command = (sys.executable, str(Path(__file__).with_name("chaos_shard.py")), *arguments["shard_arguments"])
    with (
        DataDir.claim(config.data, num_shards=config.shards) as data_dir,
        bind_listeners(HOST, config.port, data_dir.manifest.num_shards) as sockets,
    ):
        data_dir.prepare()
        ready_file = ReadyFile(Path(arguments["ready_file"]))
        supervisor = Supervisor(config, data_dir, sockets, ready_file=ready_file, watch_stdin=True, command=command)
        return asyncio.run(supervisor.run())


class ChaosServer:
    """A server that is killed and started again on the same directory and ports. Every method blocks.

    Attributes:
        data: Its directory.
        control: Where its shards take commands.
        port: Of shard 0.
        num_shards: How many.
        log_path: What all of its processes have said.
    """

    def __init__(self, directory: Path, *, num_shards: int, breakage: str = "none") -> None:
        self.data, self.control = directory / "data", directory / "control"
        self.log_path = directory / "server.log"
        self.num_shards = num_shards
        self.port = hold_ports(num_shards, (HOST, PROXY_HOST))
        self._breakage = breakage
        self._ready_file = directory / "ready.json"
        self._process: subprocess.Popen[bytes] | None = None
        self.control.mkdir()

    def launch(self) -> None:
        """Start it; `wait_ready` or `wait_end` comes next."""
        self._ready_file.unlink(missing_ok=True)
        arguments = {
            "data": str(self.data),
            "shards": self.num_shards,
            "port": self.port,
            "ready_file": str(self._ready_file),
            "shard_arguments": [str(self.control), self._breakage],
        }
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start(self) -> None:
        """Start it and return when it is ready."""
        self.launch()
        self.wait_ready()

    def wait_ready(self, *, other_than: int | None = None) -> None:
        """Return when all shards are ready, and none of them is the process `other_than`."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(FileNotFoundError):
                pids = [shard["pid"] for shard in json.loads(self._ready_file.read_bytes())["shards"]]
                if len(pids) == self.num_shards and other_than not in pids:
                    return
            self._check(self._process is not None and self._process.poll() is None, "the server has ended")
            self._check(time.monotonic() < deadline_s, f"the server is not ready after {WAIT_S:g} s")
            time.sleep(_POLL_S)

    def wait_end(self) -> int:
        """Return the exit code once the server has ended by itself."""
        assert self._process is not None
        try:
            exit_code = self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired as exc:
            raise AssertionError(f"the server has not ended after {WAIT_S:g} s: {self.tail()}") from exc
        self._forget()
        return exit_code

    def shard_pid(self, shard: int) -> int:
        """Return the process id of a shard of a server that is ready."""
        return int(json.loads(self._ready_file.read_bytes())["shards"][shard]["pid"])

    def kill_shard(self, shard: int) -> None:
        """`kill -9` one shard and return when the supervisor has replaced it."""
        pid = self.shard_pid(shard)
        os.kill(pid, signal.SIGKILL)
        self.wait_ready(other_than=pid)

    def kill(self) -> None:
        """`kill -9` the supervisor and all of its shards."""
        assert self._process is not None
        if self._process.poll() is None:
            supervisor = psutil.Process(self._process.pid)
            supervisor.suspend()  # or it would start a shard while the others are being killed
            for process in [*supervisor.children(), supervisor]:
                process.kill()
        self._process.wait(WAIT_S)
        self._forget()

    def close(self) -> None:
        """End whatever runs; idempotent."""
        if self._process is not None:
            self.kill()

    def command(self, shard: int, **command: Any) -> bool:
        """Tell a shard's file system something; return its answer."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WAIT_S)
            connection.connect(os.fspath(self.control / f"shard-{shard}.sock"))
            with connection.makefile("rwb") as stream:
                stream.write(json.dumps(command).encode() + b"\n")
                stream.flush()
                return bool(json.loads(stream.readline()))

    def tail(self) -> str:
        """Return the last lines that the server has said."""
        return "\n".join(self.log_path.read_text("utf-8", "replace").splitlines()[-12:])

    def _forget(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        self._process = None
        deadline_s = time.monotonic() + WAIT_S
        while is_in_use(self.data):
            self._check(time.monotonic() < deadline_s, "a process of the server is still there")
            time.sleep(_POLL_S)

    def _check(self, is_so: bool, otherwise: str) -> None:
        if not is_so:
            raise AssertionError(f"{otherwise}; it said:\n{self.tail()}")


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
