"""A follower for the chaos harness: `headrace serve --follow`, killed and started again at one of two addresses."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
from held_ports import hold_ports
from processes import WAIT_S, Program, stopped
from waiting import pause

from headrace import cli
from headrace.paramserver.config.data_dir import is_in_use

__all__ = ["ChaosFollower"]


class ChaosFollower(Program):
    """A follower that is killed and started again on the same directory, at one of two addresses.

    Attributes:
        data: Its directory.
        address: Of both places.
    """

    def __init__(self, directory: Path, *, source: str, num_shards: int, hosts: list[str]) -> None:
        """Prepare a follower of the server at `source`; `start` comes next."""
        directory.mkdir()
        super().__init__(directory, "follower")
        self.data = directory / "data"
        self._source, self._hosts = source, hosts
        self._port = hold_ports(num_shards, hosts)

    @property
    def address(self) -> str:
        """Addresses of its first shard."""
        return ",".join(f"{host}:{self._port}" for host in self._hosts)

    def start(self) -> None:
        """Start it and return when it serves."""
        flags = {
            "--follow": self._source,
            "--data": self.data,
            "--host": self._hosts[0],
            "--port": self._port,
            "--ready-file": self.ready_file,
            "--log-segment-bytes": "1MiB",
            "--log-retention-bytes": "4MiB",
            "--memtable-bytes": "12MiB",
            "--block-cache-bytes": "32MiB",
            "--log-format": "json",
        }
        self.launch_program(__file__, ["--watch-stdin", *(part for flag in flags.items() for part in flag)])
        self.wait_ready()

    def pause(self, seconds: float) -> None:
        """Stop its processes for a while."""
        with stopped(self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children())):
            pause(seconds)

    def kill(self) -> None:
        """`kill -9` it while it runs."""
        self.check(self.process.poll() is None, "it has ended")
        self.close()

    def close(self) -> None:
        """End it if it runs. Idempotent."""
        if self._process is None:
            return
        if self.process.poll() is None:
            supervisor = psutil.Process(self.process.pid)
            supervisor.suspend()  # or it would start a shard while the others are being killed
            for process in [*supervisor.children(), supervisor]:
                process.kill()
        self.process.wait(WAIT_S)
        self.forget()
        self.wait_until(lambda: not is_in_use(self.data), "the end of all of its processes")

    def move(self) -> None:
        """Take the other address at the next start."""
        self._hosts.reverse()


if __name__ == "__main__":
    sys.exit(cli.main(["serve", *sys.argv[1:]]))
