"""A relay for the chaos harness: `headrace relay`, whose retention is in a hurry.

python chaos_relay.py …     the arguments of `headrace relay`
"""

from __future__ import annotations

import sys
from pathlib import Path

from chaos_shard import hurry
from held_ports import hold_ports
from processes import Program, stopped
from waiting import pause

from headrace import cli

__all__ = ["ChaosRelay"]


class ChaosRelay(Program):
    """A relay that is killed and started again on the same directory, at one of two addresses.

    Attributes:
        data: Its directory.
        address: Of both places.
    """

    def __init__(self, directory: Path, *, source: str, object_store: str, num_shards: int, hosts: list[str]) -> None:
        """Prepare a relay of the server at `source`; `start` comes next."""
        directory.mkdir()
        super().__init__(directory, "relay")
        self.data = directory / "data"
        self._source, self._object_store, self._hosts = source, object_store, hosts
        self._port = hold_ports(num_shards, hosts)

    @property
    def address(self) -> str:
        """Addresses of its first shard."""
        return ",".join(f"{host}:{self._port}" for host in self._hosts)

    def start(self) -> None:
        """Start it and return when it serves."""
        flags = {
            "--server": self._source,
            "--object-store": self._object_store,
            "--data": self.data,
            "--host": self._hosts[0],
            "--port": self._port,
            "--ready-file": self.ready_file,
            "--snapshot-interval-s": 1,
            "--log-segment-bytes": "1MiB",
            "--log-retention-bytes": "4MiB",
            "--log-format": "json",
        }
        self.launch_program(__file__, ["--watch-stdin", *(part for flag in flags.items() for part in flag)])
        self.wait_ready()

    def pause(self, seconds: float) -> None:
        """Stop its process for a while."""
        with stopped(self.process.pid):
            pause(seconds)

    def kill(self) -> None:
        """`kill -9` it while it runs."""
        self.check(self.process.poll() is None, "it has ended")
        super().kill()

    def close(self) -> None:
        """End it if it runs. Idempotent."""
        if self._process is not None:
            super().kill()

    def move(self) -> None:
        """Take the other address at the next start."""
        self._hosts.reverse()


if __name__ == "__main__":
    hurry()
    sys.exit(cli.main(["relay", *sys.argv[1:]]))
