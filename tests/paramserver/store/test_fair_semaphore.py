"""The fair semaphore: short lookups never wait for long ones, and clients take turns."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from gated_store import gated_store, held_reads
from row_batches import SPEC
from text_scripts import Script, scripts

from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.fair_semaphore import _MANY_ROWS, ROWS_PER_TABLE, FairSemaphore
from headrace.schemas.errors import UnavailableError

FEW, MANY = _MANY_ROWS, _MANY_ROWS + 1


@dataclass
class Someone:
    """A client that asks for rows."""

    who: str
    is_connected: bool = True


class Lookups:
    """Lookups that ask for a turn; they begin, and last until they are ended."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[bool]] = {}
        self._begun: list[str] = []

    def threads(self, num_long: int) -> None:
        self._turns = FairSemaphore(num_long=num_long)

    async def ask(self, asker: str, *names: str, rows: str = "many") -> str | None:
        async def take(name: str) -> bool:
            is_long = await self._turns.take(asker, MANY if rows == "many" else FEW)
            self._begun.append(name)
            return is_long

        for name in names:
            self._tasks[name] = asyncio.create_task(take(name))
        return await self._told()

    async def end(self, *names: str, cancels: str | None = None) -> str | None:
        """End lookups one after the other, and cancel another one before it can notice its turn."""
        for name in names:
            self._turns.end(self._tasks[name].result())
            if cancels is not None:
                self._tasks[cancels].cancel()
            await self._settle()
        return await self._told()

    async def cancel(self, name: str) -> str | None:
        self._tasks[name].cancel()
        return await self._told()

    async def _settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)

    async def _told(self) -> str | None:
        await self._settle()
        begun, self._begun = self._begun, []
        return f"begun: {' '.join(begun)}" if begun else None


@scripts(__file__, "fair_semaphore")
async def test_fair_semaphore(script: Script) -> None:
    """Short lookups never wait for long ones, and clients take turns."""
    await script.run_async(Lookups())


@pytest.mark.parametrize("seed", range(30))
async def test_any_course_of_events_keeps_the_bounds_and_ends(seed: int) -> None:
    """Under random requests, ends and cancellations the limits hold, and in the end nobody waits."""
    rng, turns = random.Random(seed), FairSemaphore(num_long=2)
    running: list[bool] = []

    async def look(asker: str, num_rows: int, ends: asyncio.Event) -> None:
        is_long = await turns.take(asker, num_rows)
        running.append(is_long)
        assert len(running) <= 3 and sum(running) <= 2
        try:
            await ends.wait()
        finally:
            running.remove(is_long)
            turns.end(is_long)

    tasks: list[tuple[asyncio.Task[None], asyncio.Event]] = []
    for _ in range(60):
        what = rng.random()
        if what < 0.5 or not tasks:
            ends = asyncio.Event()
            tasks.append((asyncio.create_task(look(rng.choice("abc"), rng.choice([FEW, MANY]), ends)), ends))
        elif what < 0.8:
            rng.choice(tasks)[1].set()
        else:
            rng.choice(tasks)[0].cancel()
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
    for _, ends in tasks:
        ends.set()
    async with asyncio.timeout(60):
        results = await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
    assert not running


async def test_a_small_lookup_is_answered_while_large_ones_are_read(tmp_path: Path) -> None:
    """One asker's large lookups are all held up in RocksDB, and another's small one is not."""
    async with held_reads(tmp_path / "db", 2) as (applier, store):
        store.max_free_keys, many = 1, [(1, SPEC, np.arange(MANY))]
        large = [asyncio.create_task(applier.read_many(many, asker=Someone("greedy"))) for _ in range(20)]
        async with asyncio.timeout(60):
            (small,) = await applier.read_many([(1, SPEC, np.array([3]))], asker=Someone("modest"))
        assert small.presence.tolist() == [1]
        large[-1].cancel()
        store.read_gate.set()
        for rows in await asyncio.gather(*large[:-1]):
            assert rows[0].presence.nonzero()[0].tolist() == [3]


async def test_nothing_is_read_for_those_who_are_gone(tmp_path: Path) -> None:
    """Lookups that the dead connections of a client left waiting take no time of the others."""
    async with held_reads(tmp_path / "db", 1) as (applier, store):
        askers = [Someone(str(number)) for number in range(6)]
        tasks = [
            asyncio.create_task(applier.read_many([(1, SPEC, np.arange(MANY + number))], asker=asker))
            for number, asker in enumerate(askers)
            for _ in range(3)
        ]
        await asyncio.sleep(0)
        for asker in askers[:5]:
            asker.is_connected = False
        store.read_gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, list) for result in (results[0], *results[15:]))  # one had begun before
    assert all(isinstance(result, UnavailableError) for result in results[1:15])
    assert store.num_keys_read == [MANY, MANY + 5, MANY + 5, MANY + 5]


async def test_a_lookup_weighs_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows of many tables or column shards count as many rows."""
    weights: list[int] = []

    async def note(_: FairSemaphore, asker: str, num_rows: int) -> bool:
        weights.append(num_rows)
        raise UnavailableError("noted")

    monkeypatch.setattr(FairSemaphore, "take", note)
    one, two = np.array([3]), np.array([3, 4])
    with gated_store(tmp_path / "db") as store:
        async with Applier(store) as applier:
            many = [(n, SPEC, one) for n in range(33)]
            for num_shards, wanted in ((0, [(1, SPEC, one)]), (1, many), (16, [(1, SPEC, two)])):
                monkeypatch.setattr(store, "layouts", lambda _, n=num_shards: (SPEC.whole,) * n)
                with pytest.raises(UnavailableError, match="noted"):
                    await applier.read_many(wanted)
    assert weights == [1 + ROWS_PER_TABLE, 33 * (1 + ROWS_PER_TABLE), 16 * (2 + ROWS_PER_TABLE)]
    assert weights[0] <= FEW < min(weights[1:])


async def test_waiting_lookups_are_refused_at_the_close(tmp_path: Path) -> None:
    """Lookups that run are answered, those that still wait for a turn are refused; none waits forever."""
    async with held_reads(tmp_path / "db", 1) as (applier, store):
        tasks = [asyncio.create_task(applier.read_many([(1, SPEC, np.arange(MANY))])) for _ in range(3)]
        assert await asyncio.to_thread(store.is_read_held.wait, 60)
        closing = asyncio.create_task(applier.close())
        await asyncio.sleep(0)
        store.read_gate.set()
        async with asyncio.timeout(60):
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await closing
    assert isinstance(results[0], list)
    assert all(isinstance(result, UnavailableError) for result in results[1:])
