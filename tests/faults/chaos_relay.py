"""A relay for the chaos harness: `headrace relay`, whose retention is in a hurry.

python chaos_relay.py …     the arguments of `headrace relay`
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from chaos_server import WAIT_S
from chaos_shard import hurry
from held_ports import hold_ports
from waiting import pause, wait_until

from headrace import cli

__all__ = ["ChaosRelay"]


class ChaosRelay:
    """A relay that is killed and started again on the same directory, at one of two addresses. Every method blocks.

    Attributes:
        data: Its directory.
        address: Of both places.
    """

    def __init__(self, directory: Path, *, source: str, object_store: str, num_shards: int, hosts: list[str]) -> None:
        """Prepare a relay of the server at `source`; `start` comes next."""
        self.data = directory / "data"
        self._source, self._object_store, self._hosts = source, object_store, hosts
        self._log_path, self._ready_file = directory / "relay.log", directory / "ready.json"
        self._port = hold_ports(num_shards, hosts)
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir()

    @property
    def address(self) -> str:
        """Addresses of its first shard."""
        return ",".join(f"{host}:{self._port}" for host in self._hosts)

    def start(self) -> None:
        """Start it and return when it serves."""
        self._ready_file.unlink(missing_ok=True)
        flags = {
            "--server": self._source,
            "--object-store": self._object_store,
            "--data": self.data,
            "--host": self._hosts[0],
            "--port": self._port,
            "--ready-file": self._ready_file,
            "--snapshot-interval-s": 1,
            "--log-segment-bytes": "1MiB",
            "--log-retention-bytes": "4MiB",
            "--log-format": "json",
        }
        command = [sys.executable, __file__, "--watch-stdin", *(str(part) for flag in flags.items() for part in flag)]
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        process = self._process

        def is_ready() -> bool:
            assert process.poll() is None, f"the relay has ended; it said:\n{self.tail()}"
            return self._ready_file.exists()

        wait_until(is_ready, lambda: f"the relay said:\n{self.tail()}\nIts ready file", within_s=WAIT_S)

    def pause(self, seconds: float) -> None:
        """Stop its process for a while."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        pause(seconds)
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """`kill -9`."""
        assert self._process is not None
        assert self._process.poll() is None, f"the relay has ended; it said:\n{self.tail()}"
        self.close()

    def close(self) -> None:
        """End it if it runs; idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(WAIT_S)
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process = None

    def move(self) -> None:
        """Take the other address at the next start."""
        self._hosts.reverse()

    def tail(self) -> str:
        """Return the last lines that it has said."""
        return "\n".join(self._log_path.read_text("utf-8", "replace").splitlines()[-12:])


if __name__ == "__main__":
    hurry()
    sys.exit(cli.main(["relay", *sys.argv[1:]]))
