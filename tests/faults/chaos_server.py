"""Real servers for the chaos harness: `headrace serve` with shard processes of `chaos_shard.py`.

One is a whole server on one machine, or one node of a server on several hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from waiting import wait_until

from headrace.paramserver.config.cluster_file import cluster_of, settings_of_node
from headrace.paramserver.config.data_dir import DataDir, is_in_use
from headrace.paramserver.config.server_settings import ServerConfig
from headrace.paramserver.log.opening import kind_of_log
from headrace.paramserver.rpc.address import bind_listeners
from headrace.paramserver.shard.supervisor import Supervisor
from headrace.paramserver.system.durable import ReadyFile
from headrace.paramserver.system.log_lines import configure_logging
from headrace.schemas.snapshot_manifest import shard_folder

WAIT_S = 180.0
_MIB = 1 << 20
# So short that segments are closed and removed within a few cycles.
_ARCHIVE_SEGMENT_S, _ARCHIVE_RETENTION_S = 2.0, 30.0
_HAS_FAILED = "storage has failed"  # what the supervisor says of a shard that it leaves down


class Place(NamedTuple):
    """Where a server listens, and the host that it tells clients: the proxy's, on the same ports."""

    host: str
    proxy_host: str
    port: int


def main(arguments: dict[str, Any]) -> int:
    """Run the supervisor, as `headrace serve` does."""
    place = Place(*arguments["place"])
    file = arguments["cluster"] and Path(arguments["cluster"])
    cluster, node = cluster_of(file, arguments["node"], environ={}, env_prefix="")
    own = {"shards": len(arguments["shards"]), "port": place.port, "advertise_host": place.proxy_host}
    settings = {
        # The harness kills more often than any machine would.
        "max_quick_deaths": 1000,
        "quick_death_s": 0.0,
        "drain_s": 2.0,
        "log_segment_bytes": _MIB,
        "log_retention_bytes": 4 * _MIB,
        "memtable_bytes": 12 * _MIB,
        "block_cache_bytes": 32 * _MIB,
        "archive_segment_s": _ARCHIVE_SEGMENT_S,
        "archive_retention_s": _ARCHIVE_RETENTION_S,
    }
    settings |= own | settings_of_node(cluster, node)[1] | arguments["settings"]
    config = ServerConfig(**settings, data=Path(arguments["data"]), host=place.host)
    configure_logging(level="info", log_format="json")
    command = (sys.executable, str(Path(__file__).with_name("chaos_shard.py")), *arguments["shard_arguments"])
    with (
        DataDir.claim(
            config.data, num_shards=config.shards, cluster=cluster, node=node, log=kind_of_log(config.log)
        ) as data_dir,
        bind_listeners(config.host, config.port, arguments["shards"]) as sockets,
    ):
        data_dir.prepare()
        ready_file = ReadyFile(Path(arguments["ready_file"]))
        supervisor = Supervisor(
            config,
            data_dir,
            sockets,
            ready_file=ready_file,
            watch_stdin=True,
            command=command,
            cluster=cluster,
            node=node,
        )
        return asyncio.run(supervisor.run())


class ChaosServer:
    """A server that is killed and started again on the same directory. Every method blocks.

    Attributes:
        data: Its directory.
        control: Where its shards take commands.
        shards: The shards that it runs, those that it stands by for included.
        place: Where it listens; a node that does not run may get another one.
        log_path: What all of its processes have said.
    """

    def __init__(
        self,
        directory: Path,
        *,
        shards: Sequence[int],
        place: Place,
        breakage: str = "none",
        cluster: Path | None = None,
        node: str | None = None,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Prepare a whole server, or the `node` of a `cluster` file, with more `settings`; `start` comes next."""
        self.data, self.control = directory / "data", directory / "control"
        self.log_path = directory / "server.log"
        self.shards, self.place, self.node = tuple(shards), place, node
        self._cluster, self._breakage, self._settings = cluster, breakage, dict(settings)
        self._ready_file = directory / "ready.json"
        self._process: subprocess.Popen[bytes] | None = None
        self._said_before_bytes = 0
        self.control.mkdir(parents=True)

    @property
    def address(self) -> str:
        """Address of its first shard, by way of the proxy."""
        return f"{self.place.proxy_host}:{self.place.port}"

    def shard_path(self, shard: int) -> Path:
        """Return the directory of a shard."""
        return self.data / shard_folder(shard)

    def launch(self) -> None:
        """Start it; `wait_ready`, `wait_end` or `end_failed` comes next."""
        self._ready_file.unlink(missing_ok=True)
        arguments = {
            "data": str(self.data),
            "shards": self.shards,
            "place": self.place,
            "cluster": self._cluster and str(self._cluster),
            "node": self.node,
            "ready_file": str(self._ready_file),
            "settings": self._settings,
            "shard_arguments": [str(self.control), self._breakage],
        }
        with self.log_path.open("ab") as log:
            self._said_before_bytes = log.tell()
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

        def is_ready() -> bool:
            self._check(self._process is not None and self._process.poll() is None, "the server has ended")
            with contextlib.suppress(FileNotFoundError):
                pids = [shard["pid"] for shard in json.loads(self._ready_file.read_bytes())["shards"]]
                return len(pids) == len(self.shards) and other_than not in pids
            return False

        self._wait_until(is_ready, "the server, ready,")

    def wait_end(self) -> int:
        """Return the exit code once the server has ended by itself."""
        assert self._process is not None
        try:
            exit_code = self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired as exc:
            raise AssertionError(f"the server has not ended after {WAIT_S:g} s: {self.tail()}") from exc
        self._forget()
        return exit_code

    def end_failed(self) -> int:
        """Return the exit code of a server that has left a shard down and is then stopped, or ends by itself."""
        assert self._process is not None
        process = self._process
        self._wait_until(lambda: process.poll() is not None or _HAS_FAILED in self.said(), "the failure of a shard")
        if len(self.shards) > 1:  # else it ends by itself
            self._process.terminate()
        return self.wait_end()

    def shard_pid(self, shard: int) -> int:
        """Return the process id of a shard of a server that is ready."""
        shards = json.loads(self._ready_file.read_bytes())["shards"]
        return next(int(found["pid"]) for found in shards if found["shard"] == shard)

    @contextlib.contextmanager
    def paused(self, shard: int | None = None) -> Iterator[None]:
        """Stop a shard's process, or supervisor and all shards, as a machine that swaps does."""
        assert self._process is not None
        pids = [self._process.pid, *map(self.shard_pid, self.shards)] if shard is None else [self.shard_pid(shard)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

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

    def stop(self) -> None:
        """End it as an operator does; it must say that all is well."""
        assert self._process is not None
        self._process.terminate()
        exit_code = self.wait_end()
        self._check(exit_code == 0, f"the server was stopped and ended with {exit_code}")

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

    def said(self) -> str:
        """Return what its processes have said since the last start."""
        with self.log_path.open("rb") as log:
            log.seek(self._said_before_bytes)
            return log.read().decode("utf-8", "replace")

    def tail(self) -> str:
        """Return the last lines of that."""
        return "\n".join(self.said().splitlines()[-12:])

    def _forget(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        self._process = None
        self._wait_until(lambda: not is_in_use(self.data), "the end of all processes of the server")

    def _wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        wait_until(is_so, lambda: f"it said:\n{self.tail()}\n{what}", within_s=WAIT_S)

    def _check(self, is_so: bool, otherwise: str) -> None:
        if not is_so:
            raise AssertionError(f"{otherwise}; it said:\n{self.tail()}")


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
