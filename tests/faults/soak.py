"""The soak: a server, a trainer and three replicas run for long, while servers are restarted, rows expire and are
deleted, and snapshots are made and swapped in; at the end replica = store = trainer, and no lookup has failed.

    python tests/faults/soak.py --seconds 600 --seed 1

Every lookup is checked when it is made (`soak_rows.py`, `soak_replicas.py`). The run ends with exit code 1 at the first
thing that must not be, and leaves its directory for a look.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from held_ports import hold_ports
from new_directory import new_directory
from soak_replicas import BREAKAGES, REPLICAS, Served, run_replicas
from soak_rows import IDLE_STEPS
from soak_trainer import Settled, run_trainer
from waiting import pause, wait_until

from headrace.paramserver.reading.link import Dial
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.remote import create_snapshot, remove_snapshot
from headrace.schemas.idl import idl

__all__ = ["DEEDS", "Soak", "SoakError", "deck", "main", "summarize"]

_WAIT_S = 120.0
_MIB = 1 << 20
_NUM_SHARDS = 2
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


class SoakError(Exception):
    """Something was seen that must not be."""


class _Worker:
    """A process at the other end of a pipe."""

    def __init__(self, what: str, main: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._what = what
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(*args, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, request: Any) -> None:
        self._pipe.send(request)

    def expect(self, kind: str) -> Any:
        """Return what comes with an answer of this kind."""
        if not self._pipe.poll(3 * _WAIT_S):
            raise SoakError(f"{self._what}: no {kind!r} within {3 * _WAIT_S:g} s")
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise SoakError(f"{self._what} has ended, exit code {self._process.exitcode}") from None
        if answer[0] != kind:
            raise SoakError(f"{self._what}: {answer[0]} instead of {kind!r}: {answer[1]}")
        return answer[1] if len(answer) > 1 else None

    def check(self) -> None:
        """Raise what has ended it."""
        if self._pipe.poll() or not self._process.is_alive():
            self.expect("nothing of itself")

    def close(self) -> None:
        """End it. Idempotent."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(_WAIT_S)
        self._pipe.close()


class Soak:
    """All that runs, and what is done to it. Use with `with`.

    Attributes:
        deeds: How often each was done.
        num_expired: Rows that the servers said they let expire.
        refused: Why swaps and other deeds were refused.
    """

    def __init__(self, directory: Path, *, seed: int, breakage: str = "none") -> None:
        self.deeds: Counter[str] = Counter()
        self.num_expired = 0
        self.refused: list[str] = []
        self._directory = directory
        self._random = random.Random(seed)
        self._seed, self._breakage = seed, breakage
        self._data = directory / "data"
        self._port = hold_ports(_NUM_SHARDS)
        self._snapshots: list[str] = []
        self._server = self._start_server()
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        try:
            self._trainer = self._start("the trainer", run_trainer, self._server.address, self._seed)
            self._trainer.expect("ready")
            self._snapshot()  # what replicas of virtual ids begin from
            self._replicas = self._start(
                "the replicas", run_replicas, self._server.address, self._directory, self._seed, self._breakage
            )
            self._replicas.expect("ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()
        self._server.close()

    def do(self, deed: str) -> None:
        """Do one thing, and see that all is well after it.

        Raises:
            SoakError: It is not.
        """
        self.deeds[deed] += 1
        DEEDS[deed](self)
        self._trainer.check()
        self._replicas.send("look")
        if problems := self._replicas.expect("seen"):
            raise SoakError("\n".join(problems))

    def settle(self) -> tuple[Settled, list[Served]]:
        """Let nothing expire any more, have all catch up, and compare.

        Raises:
            SoakError: Something differs.
        """
        self._restart(self._server.stop, expiry=None)
        self._trainer.send("settle")
        settled: Settled = self._trainer.expect("settled")
        self._replicas.send(("settle", settled))
        served: list[Served] = self._replicas.expect("settled")
        problems = [f"{one.name}: {text}" for one in served for text in one.problems]
        if not settled.is_equal:
            problems.append(f"the trainer's audit found differences: {settled.audit}")
        if problems:
            raise SoakError("\n".join(problems))
        return settled, served

    # Deeds. Each returns when the server is ready again.

    def kill_server(self) -> None:
        """`kill -9` the supervisor; its shards end with it."""
        self._restart(self._server.kill)

    def stop_server(self) -> None:
        """Let the server drain and end."""
        self._restart(self._server.stop)

    def kill_shard(self) -> None:
        """`kill -9` one shard; the supervisor replaces it."""
        pid = self._server.shard_pids[self._random.randrange(_NUM_SHARDS)]
        os.kill(pid, signal.SIGKILL)

        def is_replaced() -> bool:
            with suppress(FileNotFoundError, ValueError):  # written anew just now
                return pid not in self._server.shard_pids
            return False

        wait_until(is_replaced, "another process of the shard", within_s=_WAIT_S)

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

    def roll_back(self) -> None:
        """Swap in, let both copies follow for a moment, and change back."""
        name = self._random.choice(list(REPLICAS))
        self.swap(name)
        pause(self._random.uniform(0, 0.5))
        self._replicas.send(("roll_back", name))
        self._take("roll_back")

    def expire(self) -> None:
        """Run `headrace expire`."""
        done = self._headrace("expire", "--json", "--table", "aging.weight")
        if done.returncode:
            raise SoakError(f"headrace expire: exit code {done.returncode}: {done.stdout}{done.stderr}")

    # What the deeds are made of.

    def _start(self, what: str, main: Callable[..., None], *args: Any) -> _Worker:
        self._workers.append(_Worker(what, main, *args))
        return self._workers[-1]

    def _start_server(self, expiry: str | None = _EXPIRY) -> ServerProcess:
        return ServerProcess.start(self._data, shards=_NUM_SHARDS, port=self._port, expiry=expiry, **_SETTINGS)

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
                raise SoakError(f"headrace snapshot create: exit code {done.returncode}: {done.stderr}")
            name = str(json.loads(done.stdout)["name"])
        else:
            manifest = asyncio.run(create_snapshot(self._server.address, dial=_DIAL, timeout_s=_WAIT_S))
            name = manifest.name
        self._snapshots.append(name)
        if len(self._snapshots) > _NUM_KEPT_SNAPSHOTS:
            asyncio.run(remove_snapshot(self._server.address, self._snapshots.pop(0), dial=_DIAL))
        return name

    def _load(self, name: str, snapshot: str) -> None:
        self._replicas.send(("load", name, self._path(snapshot)))
        if (why := self._replicas.expect("done")) is not None:
            raise SoakError(f"{name} has not taken a snapshot: {why}")

    def _path(self, snapshot: str) -> str:
        return str(self._data / "snapshots" / snapshot)

    def _take(self, deed: str) -> None:
        if (why := self._replicas.expect("done")) is not None:
            self.refused.append(f"{deed}: {why}")

    def _headrace(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "headrace", *words, "--server", self._server.address]
        return subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S)


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
    "roll_back": Soak.roll_back,
    "expire": Soak.expire,
}


def deck(seed: int) -> Any:
    """Yield deeds without end: each as often as the others, shuffled round by round."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(list(DEEDS), len(DEEDS))


def soak_for(soak: Soak, seconds: float, seed: int, on_deed: Callable[[str], None] = lambda deed: None) -> None:
    """Do one deed after the other, with pauses, until the time is over.

    Raises:
        SoakError: Something must not be.
    """
    end_s, pauses = time.monotonic() + seconds, random.Random(seed)
    for deed in deck(seed):
        pause(pauses.uniform(0.2, 2.0))
        if time.monotonic() > end_s:
            return
        on_deed(deed)
        soak.do(deed)


def summarize(soak: Soak, settled: Settled, served: list[Served]) -> str:
    """Return what a run has shown."""
    deeds = soak.deeds
    num_swaps = sum(deeds[f"swap_{name}"] for name in REPLICAS) + deeds["swap_amid_kill"] + deeds["roll_back"]
    num_swaps -= sum(text.startswith("swap_amid_kill") for text in soak.refused)
    num_restarts = deeds["kill_server"] + deeds["stop_server"] + deeds["kill_shard"] + deeds["swap_amid_kill"]
    lines = [
        f"{sum(one.num_failed for one in served)} failed of {sum(one.num_lookups for one in served)} lookups",
        f"trainer: {settled.num_updates} updates in {settled.step} steps; {soak.num_expired} rows expired",
        f"{num_restarts} restarts, {num_swaps} swaps: " + ", ".join(f"{k} {n}" for k, n in sorted(deeds.items())),
        *(f"refused: {text}" for text in soak.refused),
        f"trainer = store: {'EQUAL' if settled.is_equal else 'DIFFERENT'}",
        *(f"  {line}" for line in settled.audit.splitlines()),
    ]
    for one in served:
        calm, swapping = (_percentile_ms(times) for times in (one.calm_s, one.swapping_s))
        lines.append(
            f"{one.name}: {one.num_lookups} lookups, 99th percentile {calm} ms, during swaps {swapping} ms; "
            f"freshness median {one.freshness_s * 1000:.0f} ms; {one.num_gone} rows seen to go; "
            f"{one.num_audits} audits found no difference, {one.num_audits_given_up} were given up"
        )
        lines += [f"  {line}" for line in f"replica = store: {one.digest}".splitlines()]
    return "\n".join(lines)


def _percentile_ms(times_s: Any) -> str:
    return f"{np.percentile(times_s, 99) * 1000:.1f}" if len(times_s) else "-"


def main(
    seconds: Annotated[float, typer.Option(min=1, help="How long, before all catch up.")] = 600,
    seed: Annotated[int, typer.Option(help="Chooses what is done, and when.")] = 0,
    breakage: Annotated[str, typer.Option(help=f"Break the replicas: {', '.join(BREAKAGES)}.")] = "none",
    data: Annotated[
        Path | None, typer.Option(help="New directory to work in, and to keep.", metavar="DIR", show_default=False)
    ] = None,
) -> None:
    """Run a server, a trainer and replicas for long, and check every lookup and, at the end, every row."""
    if breakage not in BREAKAGES:
        raise typer.BadParameter(f"no breakage {breakage!r}; there is {', '.join(BREAKAGES)}")
    directory = new_directory(data, prefix="headrace-soak-")
    begun_s = time.monotonic()
    try:
        with Soak(directory, seed=seed, breakage=breakage) as soak:
            soak_for(
                soak, seconds, seed, lambda deed: print(f"{time.monotonic() - begun_s:5.0f} s  {deed}", flush=True)
            )
            report = summarize(soak, *soak.settle())
    except SoakError as exc:
        print(f"FAILED after {time.monotonic() - begun_s:.0f} s: {exc}\nleft in {directory}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"{time.monotonic() - begun_s:.0f} s, seed {seed}\n{report}")
    if data is None:
        shutil.rmtree(directory)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    app()
