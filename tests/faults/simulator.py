"""The simulator: seeded schedules of a scenario in virtual time, and the gate that it finds what is planted.

A scenario is a class that derives from `Schedule`; an object of it is one seed. Those who take part run the code under
test on a `VirtualLoop`. For some seconds everything befalls them; then all is well again, they settle, and a ledger
that was kept apart from the code under test says what must be true. The same seed does the same.

A module of a scenario runs many of them:

    python tests/faults/stream_schedules.py --schedules 100000 --seed 1 --jobs 2

A finding names its seed; `--schedules 1 --seed SEED` repeats it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import pytest
from virtual_loop import VirtualLoop

__all__ = ["Finding", "PlantedFaults", "Schedule", "main", "run_schedule", "run_schedules"]

_MOST_FAULTS = 4
_REPORT_EVERY = 10_000


class Finding(Exception):
    """A promise was broken."""


class Schedule:
    """One seed of a scenario. All chance comes from `rng`.

    A scenario has `begin`, `befall`, `heal`, `settle` and `check`, and may set the class variables.

    Attributes:
        did: What happened, counted.
        failure: What has broken first in the background; ends the schedule.
        is_settling: Nothing befalls anybody any more.
    """

    least_faults: ClassVar[int] = 0
    faults_s: ClassVar[float] = 3.0
    settle_s: ClassVar[float] = 60.0
    surroundings: ClassVar[Callable[[], AbstractContextManager[Any]]] = nullcontext
    loop_type: ClassVar[type[VirtualLoop]] = VirtualLoop

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.did: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self.is_settling = False
        self._work: list[asyncio.Future[Any]] = []
        self._beside: list[asyncio.Future[Any]] = []  # the loop itself keeps no task alive

    def begin(self) -> None:
        """Start those who take part, with `work` and `run_beside`."""
        raise NotImplementedError

    def befall(self) -> None:
        """Let something fail."""
        raise NotImplementedError

    def heal(self) -> None:
        """Let everything be well from now on."""
        raise NotImplementedError

    async def settle(self) -> None:
        """Go on until all is over."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise `Finding` unless everything is as it must be."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return how things stand, for a schedule that does not end."""
        return ""

    def work(self, *coroutines: Coroutine[Any, Any, None]) -> None:
        """Run what ends soon once the schedule settles."""
        self._work += [self.run_beside(each) for each in coroutines]

    def run_beside(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something until the schedule ends; if it fails, the schedule does."""
        self._beside.append(task := asyncio.ensure_future(coroutine))
        task.add_done_callback(self.note_end)
        return task

    def note_end(self, task: asyncio.Future[Any]) -> None:
        """Take the end of a task, for one of another owner."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Take what has broken in the background."""
        self.failure = self.failure or error

    async def play(self) -> Counter[str]:
        """Play the schedule; return what it did."""
        loop = asyncio.get_running_loop()
        for _ in range(self.rng.randint(self.least_faults, _MOST_FAULTS)):
            loop.call_later(self.rng.uniform(0.2, self.faults_s), self.befall)
        self.begin()
        await asyncio.sleep(self.faults_s)
        self.heal()
        self.is_settling = True
        try:
            async with asyncio.timeout(self.settle_s):
                await asyncio.gather(*self._work)
                await self.settle()
        except TimeoutError:
            raise self.failure or Finding(f"nothing goes on: {self.describe()}") from None
        if self.failure is not None:
            raise self.failure
        self.check()
        return self.did


def run_schedule(scenario: type[Schedule], seed: int, loop: VirtualLoop) -> Counter[str]:
    """Run one schedule; return what it did. Raises `Finding`, or whatever broke."""

    async def play() -> Counter[str]:
        return await scenario(seed).play()

    return loop.run_alone(play())


def run_schedules(scenario: type[Schedule], seeds: range) -> tuple[Counter[str], list[str]]:
    """Run schedules; return what they did in all, and a line for each finding."""
    loop, total, findings = scenario.loop_type(), Counter[str](), list[str]()
    with scenario.surroundings():
        for seed in seeds:
            try:
                total += run_schedule(scenario, seed, loop)
            except Exception as exc:
                findings.append(f"seed {seed}: {type(exc).__name__}: {exc}; {exc.__cause__ or ''}")
    loop.close()
    return total, findings


class PlantedFaults:
    """The gate of a scenario: faults, planted in the code under test or in its surroundings, that it must find.

    Used as a decorator of functions that plant one, with what one of the findings says: any of some texts.
    """

    def __init__(self, scenario: type[Schedule], *, within: int, at_once: int) -> None:
        """Let each be found in the first schedules, so many; look after each few."""
        self._scenario, self._within, self._at_once = scenario, within, at_once
        self._faults: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]]] = {}

    def __call__(self, *about: str) -> Callable[[Callable[[pytest.MonkeyPatch], None]], None]:
        def add(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
            self._faults[plant.__name__] = plant, about or ("",)

        return add

    @property
    def names(self) -> list[str]:
        """Names of all faults."""
        return list(self._faults)

    def check_found(self, name: str, patch: pytest.MonkeyPatch) -> None:
        """Plant a fault, and assert that the schedules find it."""
        plant, about = self._faults[name]
        plant(patch)
        findings: list[str] = []
        for begin in range(1, self._within, self._at_once):
            findings += run_schedules(self._scenario, range(begin, begin + self._at_once))[1]
            if any(each in finding for each in about for finding in findings):
                return
        pytest.fail(f"{name}: not found in {self._within} schedules: {findings[:5]}")


def main(scenario: type[Schedule], what: str | None) -> int:
    """Run as many schedules as the command line says, and report; return the exit code, 1 with findings."""
    parser = argparse.ArgumentParser(description=(what or "").partition("\n")[0])
    parser.add_argument("--schedules", type=int, default=2000, help="how many, with seeds from --seed on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    began_s, total, findings, busy_s = time.monotonic(), Counter[str](), list[str](), 0.0
    num_done, size = 0, max(1, min(500, args.schedules // args.jobs))
    seeds = range(args.seed, args.seed + args.schedules)
    parts = [seeds[at : at + size] for at in range(0, len(seeds), size)]
    with ProcessPoolExecutor(args.jobs) as pool:
        for did, found, used_s in pool.map(partial(_timed, scenario), parts):
            total += did
            findings += found
            busy_s += used_s
            num_done += size
            if num_done % _REPORT_EVERY < size:
                print(f"{min(num_done, len(seeds))} schedules, {len(findings)} findings", file=sys.stderr, flush=True)
    print("\n".join(findings[:50]))
    print(f"{args.schedules} schedules from seed {args.seed}: {len(findings)} findings, {dict(total)}")
    elapsed_s = time.monotonic() - began_s
    print(f"{elapsed_s:.1f} s, {args.schedules / busy_s:.0f} schedules for each second of a processor")
    return 1 if findings else 0


def _timed(scenario: type[Schedule], seeds: range) -> tuple[Counter[str], list[str], float]:
    began_s = time.process_time()
    return *run_schedules(scenario, seeds), time.process_time() - began_s
