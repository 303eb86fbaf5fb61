"""The soak: a server, a trainer and three replicas run for long, while servers are restarted, rows expire and are
deleted, and snapshots are made and swapped in; at the end replica = store = trainer, and no lookup has failed.

    python tests/faults/chaos.py --soak --cycles 200 --seed 1

Every lookup is checked when it is made (`soak_rows.py`, `soak_replicas.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self

from held_ports import hold_ports
from processes import WAIT_S, ChaosError, Worker
from soak_replicas import BREAKAGES, REPLICAS, Served, run_replicas
from soak_rows import IDLE_STEPS
from soak_trainer import Settled, run_trainer
from waiting import pause, wait_until

from headrace.paramserver.reading.link import Dial
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.remote import create_snapshot, remove_snapshot
from headrace.schemas.idl import idl

__all__ = ["DEEDS", "Soak"]

_MIB = 1 << 20
_NUM_KEPT_SNAPSHOTS = 3
_EXPIRY = f"aging.weight: idle_steps={IDLE_STEPS}, interval_s=5"
_SETTINGS: dict[str, Any] = {
    # The soak kills more often than any machine would.
    "max_quick_deaths": 1000,
    "quick_death_s": 0.0,
    "drain_s": 2.0,
    "log_segment_bytes": _MIB,
    "log_retention_bytes": 16 * _MIB,
    "memtable_bytes": 12 * _MIB,
    "block_cache_bytes": 32 * _MIB,
}


class Soak:
    """All that runs, and what is done to it. Use with `with`.

    Attributes:
        deeds: How often each was done.
        settled: What the trainer had in the end.
        served: What the replicas had in the end.
        num_expired: Rows that the servers said they let expire.
        refused: Why swaps and other deeds were refused.
    """

    faults_of_runs: ClassVar[dict[str, Callable[[Any], None]]]
    breakages: ClassVar[Mapping[str, Callable[[], None]]] = BREAKAGES

    def __init__(self, directory: Path, *, seed: int, breakage: str = "none", num_shards: int = 2) -> None:
        self._num_shards = num_shards
        self.settled: Settled | None = None
        self.served: list[Served] = []
        self.deeds: Counter[str] = Counter()
        self.num_expired = 0
        self.refused: list[str] = []
        self._directory = directory
        self._random = random.Random(seed)
        self._seed, self._breakage = seed, breakage
        self._data = directory / "data"
        self._port = hold_ports(self._num_shards)
        self._snapshots: list[str] = []
        self._server = self._start_server()
        self._workers: list[Worker] = []

    def __enter__(self) -> Self:
        try:
            self._trainer = self._start("the trainer", run_trainer, self._seed)
            self._snapshot()  # what replicas of virtual ids begin from
            self._replicas = self._start("the replicas", run_replicas, self._directory, self._seed, self._breakage)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
        self._server.close()

    def run_cycle(self, deed: str) -> None:
        """Do one thing, and see that all is well after it.

        Raises:
            ChaosError: It is not.
        """
        pause(self._random.uniform(0, 0.5))
        self.deeds[deed] += 1
        DEEDS[deed](self)
        self._trainer.check()
        self._replicas.send("look")
        (problems,) = self._replicas.expect("seen")
        if problems:
            raise ChaosError("\n".join(problems))

    def finish(self) -> None:
        """Let nothing expire any more, have all catch up, and compare.

        Raises:
            ChaosError: Something differs.
        """
        self._restart(self._server.stop, expiry=None)
        self._trainer.send("settle")
        (self.settled,) = (settled,) = self._trainer.expect("settled")
        self._replicas.send(("settle", settled))
        (self.served,) = self._replicas.expect("settled")
        problems = [f"{one.name}: {text}" for one in self.served for text in one.problems]
        if not settled.is_equal:
            problems.append(f"the trainer's audit found differences: {settled.audit}")
        if problems:
            raise ChaosError("\n".join(problems))

    def summary(self) -> str:
        """Return what a run has shown, in a few lines."""
        lines = [
            "deeds: " + ", ".join(f"{name} {number}" for name, number in sorted(self.deeds.items())),
            *(f"refused: {text}" for text in self.refused),
            f"{self.num_expired} rows expired",
        ]
        if self.settled is not None:
            lines.append(f"{self.settled.num_updates} updates in {self.settled.step} steps\n{self.settled.audit}")
        for one in self.served:
            lines.append(
                f"{one.name}: {one.num_failed} of {one.num_lookups} lookups failed; {one.num_gone} rows seen to go; "
                f"{one.num_audits} audits, {one.num_audits_given_up} given up; in the end {one.digest}"
            )
        return "\n".join(lines)

    # Deeds. Each returns when the server is ready again.

    def kill_server(self) -> None:
        """`kill -9` the supervisor; its shards end with it."""
        self._restart(self._server.kill)

    def stop_server(self) -> None:
        """Let the server drain and end."""
        self._restart(self._server.stop)

    def kill_shard(self) -> None:
        """`kill -9` one shard; the supervisor replaces it."""
        pid = self._server.shard_pids[self._random.randrange(self._num_shards)]
        os.kill(pid, signal.SIGKILL)

        def is_replaced() -> bool:
            with suppress(FileNotFoundError, ValueError):  # written anew just now
                return pid not in self._server.shard_pids
            return False

        wait_until(is_replaced, "another process of the shard", within_s=WAIT_S)

    def swap(self, name: str) -> None:
        """Make a snapshot and swap it into a replica."""
        self._load(name, self._snapshot())

    def swap_amid_kill(self) -> None:
        """Swap a snapshot in, and `kill -9` the server meanwhile."""
        snapshot = self._snapshot()
        self._replicas.send(("load", self._random.choice(list(REPLICAS)), self._path(snapshot)))
        pause(self._random.uniform(0, 0.1))
        self.kill_server()
        self._take("swap_amid_kill")

    def expire(self) -> None:
        """Run `headrace expire`."""
        done = self._headrace("expire", "--json", "--table", "aging.weight")
        if done.returncode:
            raise ChaosError(f"headrace expire: exit code {done.returncode}: {done.stdout}{done.stderr}")

    # What the deeds are made of.

    def _start(self, what: str, main: Callable[..., None], *args: Any) -> Worker:
        self._workers.append(worker := Worker(what, main, self._server.address, *args))
        worker.expect("ready")
        return worker

    def _start_server(self, expiry: str | None = _EXPIRY) -> ServerProcess:
        return ServerProcess.start(self._data, shards=self._num_shards, port=self._port, expiry=expiry, **_SETTINGS)

    def _restart(self, end: Callable[[], object], expiry: str | None = _EXPIRY) -> None:
        end()
        self._count_expired()
        self._server.close()
        pause(self._random.uniform(0, 0.5))
        self._server = self._start_server(expiry)

    def _count_expired(self) -> None:
        self.num_expired += sum(fact.get("expired", 0) for fact in self._server.read_log())

    def _snapshot(self) -> str:
        """Make a snapshot, the first one by the command line, and remove the oldest."""
        if not self._snapshots:
            done = self._headrace("snapshot", "create", "--json")
            if done.returncode:
                raise ChaosError(f"headrace snapshot create: exit code {done.returncode}: {done.stderr}")
            name = str(json.loads(done.stdout)["name"])
        else:
            manifest = asyncio.run(create_snapshot(self._server.address, dial=_DIAL, timeout_s=WAIT_S))
            name = manifest.name
        self._snapshots.append(name)
        if len(self._snapshots) > _NUM_KEPT_SNAPSHOTS:
            asyncio.run(remove_snapshot(self._server.address, self._snapshots.pop(0), dial=_DIAL))
        return name

    def _load(self, name: str, snapshot: str) -> None:
        self._replicas.send(("load", name, self._path(snapshot)))
        (why,) = self._replicas.expect("done")
        if why is not None:
            raise ChaosError(f"{name} has not taken a snapshot: {why}")

    def _path(self, snapshot: str) -> str:
        return str(self._data / "snapshots" / snapshot)

    def _take(self, deed: str) -> None:
        (why,) = self._replicas.expect("done")
        if why is not None:
            self.refused.append(f"{deed}: {why}")

    def _headrace(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "headrace", *words, "--server", self._server.address]
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)


_DIAL = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=60.0, role=idl.Role.ADMIN)


def _swap(name: str) -> Callable[[Soak], None]:
    return lambda soak: soak.swap(name)


# By name: what it does. A run goes round them in an order that the seed shuffles.
DEEDS: dict[str, Callable[[Soak], None]] = {
    "kill_server": Soak.kill_server,
    "stop_server": Soak.stop_server,
    "kill_shard": Soak.kill_shard,
    **{f"swap_{name}": _swap(name) for name in REPLICAS},
    "swap_amid_kill": Soak.swap_amid_kill,
    "expire": Soak.expire,
}


Soak.faults_of_runs = DEEDS
