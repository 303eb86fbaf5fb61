"""Real servers for the chaos harness: `headrace serve` with shard processes of `chaos_shard.py`.

One is a whole server on one machine, or one node of a server on several hosts.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import psutil
from processes import WAIT_S, Program, stopped

from headrace.paramserver.config.cluster_file import cluster_of, settings_of_node
from headrace.paramserver.config.data_dir import DataDir, is_in_use
from headrace.paramserver.config.server_settings import ServerConfig
from headrace.paramserver.log.opening import kind_of_log
from headrace.paramserver.rpc.address import bind_listeners
from headrace.paramserver.shard.supervisor import Supervisor
from headrace.paramserver.system.durable import ReadyFile
from headrace.paramserver.system.log_lines import configure_logging
from headrace.schemas.snapshot_manifest import shard_folder

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


class ChaosServer(Program):
    """A server that is killed and started again on the same directory.

    Attributes:
        data: Its directory.
        control: Where its shards take commands.
        shards: The shards that it runs, those that it stands by for included.
        place: Where it listens; a node that does not run may get another one.
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
        super().__init__(directory, "server")
        self.data, self.control = directory / "data", directory / "control"
        self.shards, self.place, self.node = tuple(shards), place, node
        self._cluster, self._breakage, self._settings = cluster, breakage, dict(settings)
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
        arguments = {
            "data": str(self.data),
            "shards": self.shards,
            "place": self.place,
            "cluster": self._cluster and str(self._cluster),
            "node": self.node,
            "ready_file": str(self.ready_file),
            "settings": self._settings,
            "shard_arguments": [str(self.control), self._breakage],
        }
        self.launch_program(__file__, [json.dumps(arguments)])

    def start(self) -> None:
        """Start it and return when it is ready."""
        self.launch()
        self.wait_ready()

    def shard_pids(self) -> dict[int, int]:
        """Return the process ids of shards of a server that is ready, by shard; of another one those that are there."""
        try:
            return {shard["shard"]: shard["pid"] for shard in json.loads(self.ready_file.read_bytes())["shards"]}
        except FileNotFoundError:
            return {}

    def is_ready(self) -> bool:
        return len(self.shard_pids()) == len(self.shards)

    def wait_replaced(self, pid: int) -> None:
        """Return when all shards are ready, and none of them is that process."""
        self.wait_ready(lambda: self.is_ready() and pid not in self.shard_pids().values())

    def end_failed(self) -> int:
        """Return the exit code of a server that has left a shard down and is then stopped, or ends by itself."""
        process = self.process
        self.wait_until(lambda: process.poll() is not None or _HAS_FAILED in self.said(), "the failure of a shard")
        if len(self.shards) > 1:  # else it ends by itself
            process.terminate()
        return self.wait_end()

    def paused(self, shard: int | None = None) -> AbstractContextManager[None]:
        """Stop a shard's process, or supervisor and all shards, as a machine that swaps does."""
        pids = self.shard_pids()
        return stopped(*([self.process.pid, *pids.values()] if shard is None else [pids[shard]]))

    def kill_shard(self, shard: int) -> None:
        """`kill -9` one shard and return when the supervisor has replaced it."""
        pid = self.shard_pids()[shard]
        os.kill(pid, signal.SIGKILL)
        self.wait_replaced(pid)

    def kill(self) -> None:
        """`kill -9` the supervisor and all of its shards."""
        if self.process.poll() is None:
            supervisor = psutil.Process(self.process.pid)
            supervisor.suspend()  # or it would start a shard while the others are being killed
            for process in [*supervisor.children(), supervisor]:
                process.kill()
        self.process.wait(WAIT_S)
        self.forget()

    def stop(self) -> None:
        """End it as an operator does; it must say that all is well."""
        self.process.terminate()
        exit_code = self.wait_end()
        self.check(exit_code == 0, f"it was stopped and ended with {exit_code}")

    def forget(self) -> None:
        super().forget()
        self.wait_until(lambda: not is_in_use(self.data), "the end of all of its processes")

    def command(self, shard: int, **command: Any) -> bool:
        """Tell a shard's file system something; return its answer."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WAIT_S)
            connection.connect(os.fspath(self.control / f"shard-{shard}.sock"))
            with connection.makefile("rwb") as stream:
                stream.write(json.dumps(command).encode() + b"\n")
                stream.flush()
                return bool(json.loads(stream.readline()))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
