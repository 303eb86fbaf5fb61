"""The simulator itself: a seed is a schedule, failures count for their own seed, and a fault that hides is told."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from simulator import Finding, PlantedFaults, Schedule, run_schedule, run_schedules
from virtual_loop import VirtualLoop


class _Coins(Schedule):
    """Two who toss coins; none may be lost or forged."""

    toss = 1
    hangs = False

    def begin(self) -> None:
        self.coins = 10
        self.work(self._toss(), self._toss())

    async def _toss(self) -> None:
        while not self.is_settling:
            await asyncio.sleep(self.rng.random())
            self.did["heads"] += self.rng.random() < 0.5
            self.coins += self.toss - 1

    def befall(self) -> None:
        self.did["befallen"] += 1

    def heal(self) -> None:
        self.did["healed"] += 1

    async def settle(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()

    def check(self) -> None:
        if self.coins != 10:
            raise Finding(f"{self.coins} coins are left")


def test_a_seed_is_a_schedule() -> None:
    """The same seeds do the same, other ones something else; virtual time takes none."""
    did, findings = run_schedules(_Coins, range(7, 12))
    assert (did, findings) == run_schedules(_Coins, range(7, 12))
    assert did != run_schedules(_Coins, range(12, 17))[0]
    assert not findings and did["healed"] == 5 and did["befallen"] > 0


def test_what_breaks_is_a_finding_of_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost coins, a task that fails and a schedule that hangs are told with their seeds."""
    monkeypatch.setattr(_Coins, "toss", 0)
    (line,) = run_schedules(_Coins, range(3, 4))[1]
    assert line.startswith("seed 3: Finding: ") and "coins are left" in line
    monkeypatch.undo()
    monkeypatch.setattr(_Coins, "befall", lambda self: self.run_beside(_fail()))
    lines = run_schedules(_Coins, range(1, 9))[1]
    assert lines and all("ZeroDivisionError" in line for line in lines)
    monkeypatch.setattr(_Coins, "befall", lambda self: None)
    monkeypatch.setattr(_Coins, "hangs", True)
    assert run_schedules(_Coins, range(5, 6))[1] == ["seed 5: Finding: nothing goes on: ; "]


async def _fail() -> None:
    raise ZeroDivisionError


def test_a_schedule_that_fails_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure counts for its own seed: none of its tasks reports it when it is collected later."""
    monkeypatch.setattr(_Coins, "_toss", lambda self: _fail())
    loop, leftovers = VirtualLoop(), list[dict[str, Any]]()
    with pytest.raises(ZeroDivisionError):
        run_schedule(_Coins, 1, loop)
    loop.set_exception_handler(lambda _, context: leftovers.append(context))
    gc.collect()
    loop.close()
    assert not leftovers


def test_a_planted_fault_that_hides_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate passes where a finding says what was planted, and fails where nothing does."""
    planted = PlantedFaults(_Coins, within=4, at_once=2)

    @planted("forged", "coins are left")
    def lost(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(_Coins, "toss", 0)

    @planted("forged")
    def forged(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(_Coins, "toss", 2)

    planted.check_found("lost", monkeypatch)
    with pytest.raises(pytest.fail.Exception, match="forged: not found in 4 schedules"):
        planted.check_found("forged", monkeypatch)
    assert planted.names == ["lost", "forged"]
