"""Start a server as a child process, for demos, tests and benches.

    with ServerProcess.start(path, shards=2) as server:
        streamer = RawEmbeddingStreamer(server.address, run="demo")

The server watches a pipe from this process. So it and its shard processes stop when this process ends, however it ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from headrace.paramserver.config.data_dir import is_in_use
from headrace.paramserver.system.settings import flag_of
from headrace.paramserver.system.text import format_seconds
from headrace.schemas.errors import UnavailableError

__all__ = ["ServerProcess"]

_POLL_S = 0.02


class ServerProcess:
    """A running server, made by `start`, and ended by `stop`, `kill` or the end of its `with` block.

    Every method blocks; if there is an event loop, call them in a thread.

    Attributes:
        address: Address of shard 0, from which a client finds all shards.
        pid: Process id of the supervisor.
        data_dir: The server's directory.
        log_path: The server's stderr: one JSON object per line. `close` removes it.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], data_dir: Path, scratch: tempfile.TemporaryDirectory[str]
    ) -> None:
        """Use `start`."""
        self._process = process
        self._scratch = scratch
        self._ready_path = Path(scratch.name) / "ready.json"
        self.log_path = Path(scratch.name) / "server.log"
        self.data_dir = data_dir
        self.pid = process.pid
        self.address = ""

    @classmethod
    def start(
        cls,
        data_dir: Path,
        *,
        shards: int | None = None,
        port: int | None = 0,
        timeout_s: float = 60.0,
        environ: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Self:
        """Start a server and return when it is ready.

        Args:
            data_dir: Its directory, created if missing.
            shards: Number of shards; None for the directory's own, or 1.
            port: Port of shard 0; 0 lets the system choose, None leaves it to the cluster file among the settings.
            timeout_s: Deadline for being ready, seconds.
            environ: Environment, from which `HEADRACE_SERVE_…` is removed; None for this process's.
            settings: Other settings by their names in `ServerConfig`.

        Raises:
            UnavailableError: It ended or is not ready in time; the message quotes its last log line.
        """
        scratch = tempfile.TemporaryDirectory(prefix="headrace-")
        flags = {"data": data_dir, "shards": shards, "port": port, "log_format": "json", **settings}
        command = [sys.executable, "-m", "headrace", "serve", "--watch-stdin"]
        command.append(f"--ready-file={scratch.name}/ready.json")
        for name, value in flags.items():
            if value is True:
                command.append(flag_of(name))
            elif value is not None and value is not False:
                command.append(f"{flag_of(name)}={value}")
        source = os.environ if environ is None else environ
        env = {name: value for name, value in source.items() if not name.startswith("HEADRACE_SERVE_")}
        try:
            with open(Path(scratch.name) / "server.log", "wb") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, start_new_session=True
                )
        except BaseException:
            scratch.cleanup()
            raise
        server = cls(process, data_dir, scratch)
        try:
            server._wait_ready(timeout_s)
        except BaseException:
            server.close()
            raise
        return server

    @property
    def shard_pids(self) -> list[int]:
        """Process id of each shard, by index, as of the last moment when all were ready."""
        return [shard["pid"] for shard in self._read_ready()["shards"]]

    @property
    def is_running(self) -> bool:
        """Whether the supervisor runs."""
        return self._process.poll() is None

    def read_log(self) -> list[dict[str, Any]]:
        """Return the server's log lines as dicts; a line that is not JSON becomes `{"message": line}`."""
        facts = []
        for line in self.log_path.read_text("utf-8", "replace").splitlines():
            try:
                fact = json.loads(line)
            except ValueError:
                fact = None
            facts.append(fact if isinstance(fact, dict) else {"message": line})
        return facts

    def stop(self, *, timeout_s: float = 60.0) -> int:
        """Let the server drain and end; return its exit code; raises as `wait` does."""
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s=timeout_s)

    def wait(self, *, timeout_s: float = 60.0) -> int:
        """Wait for the server's end; return its exit code; `UnavailableError` if it was late and had to be killed."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as exc:
            self.kill()
            what = f"the server (pid {self.pid}) did not stop within {format_seconds(timeout_s)}"
            raise UnavailableError(what) from exc

    def kill(self, *, timeout_s: float = 60.0) -> None:
        """Kill the supervisor with SIGKILL and wait until its shard processes have ended, too.

        Raises:
            UnavailableError: A process of the server still has its directory locked.
        """
        if self.is_running:
            self._process.kill()
        self._process.wait()
        deadline_s = time.monotonic() + timeout_s
        while is_in_use(self.data_dir):
            if time.monotonic() > deadline_s:
                after = format_seconds(timeout_s)
                raise UnavailableError(f"{self.data_dir} is in use {after} after its server was killed")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Kill the server if it runs, and remove its log; idempotent."""
        try:
            if self.is_running:
                self.kill()
        finally:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._scratch.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        try:
            if kind is None:
                self.stop()
        finally:
            self.close()

    def _wait_ready(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self._ready_path.exists():
            if (exit_code := self._process.poll()) is not None:
                raise UnavailableError(f"the server ended with exit code {exit_code}: {self._last_line()}")
            if time.monotonic() > deadline_s:
                after = format_seconds(timeout_s)
                raise UnavailableError(f"the server is not ready after {after}: {self._last_line()}")
            time.sleep(_POLL_S)
        self.address = self._read_ready()["address"]

    def _read_ready(self) -> Any:
        return json.loads(self._ready_path.read_bytes())

    def _last_line(self) -> str:
        facts = self.read_log()
        errors = [fact for fact in facts if fact.get("level") in ("error", "critical")] or facts
        return " ".join(str(errors[-1].get(key, "")) for key in ("message", "error")).strip() if errors else "no output"
