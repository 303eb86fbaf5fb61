"""How often and how long a replica's process tries to begin; replica and clock are fakes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.paramserver.replica.endpoint import replica_process
from headrace.paramserver.replica.endpoint.process_config import EndpointConfig
from headrace.paramserver.replica.endpoint.replica_process import ReplicaProcess
from headrace.schemas.errors import UnavailableError

START_TIMEOUT_S, HOUR_S = 600.0, 3600.0


class Attempts:
    """Each attempt takes some seconds, with progress in the first of them; the last one succeeds."""

    def __init__(self, *attempts: tuple[float, float]) -> None:
        self.now_s = 1000.0
        self.attempts = list(attempts)
        self.timeouts: list[float] = []
        self.told: list[str] = []
        self.process: ReplicaProcess

    def make(self, _: str, *, open_timeout_s: float, on_progress: Callable[[], None], **__: Any) -> Any:
        self.timeouts.append(open_timeout_s)
        self.told.append(str(self.process._readiness.look().failure))
        if not self.attempts:
            return "a replica"
        gets_on_s, then_s = self.attempts.pop(0)
        if gets_on_s:
            self.now_s += gets_on_s
            on_progress()
        self.now_s += then_s
        raise UnavailableError("a shard restarts")


async def begin(monkeypatch: pytest.MonkeyPatch, *attempts: tuple[float, float]) -> tuple[Any, Attempts]:
    made = Attempts(*attempts)
    monkeypatch.setattr(replica_process, "ArrayReplica", made.make)
    monkeypatch.setattr(replica_process, "time", SimpleNamespace(monotonic=lambda: made.now_s))
    monkeypatch.setattr(replica_process, "_FIRST_PAUSE_S", 1e-9)
    made.process = ReplicaProcess(EndpointConfig(server="h", start_timeout_s=START_TIMEOUT_S), environ={})
    return await made.process._begin(), made


async def test_an_attempt_that_got_on_begins_the_deadline_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress restarts the deadline, in one attempt or several."""
    replica, made = await begin(monkeypatch, (3 * HOUR_S, 1), (HOUR_S, 500), (0, 90))
    assert replica == "a replica" and len(made.timeouts) == 4


async def test_attempts_without_end_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """While attempts make progress, health shows their number and the last error."""
    _, made = await begin(monkeypatch, (HOUR_S, 1), (HOUR_S, 1))
    copies, failed = "starting: it copies the tables of h", "; the one before failed: a shard restarts"
    assert made.told == [copies, f"{copies}, attempt 2{failed}", f"{copies}, attempt 3{failed}"]


async def test_an_attempt_has_its_full_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that comes up late gets the full timeout."""
    _, made = await begin(monkeypatch, (0, 590))
    assert made.timeouts == [START_TIMEOUT_S] * 2


@pytest.mark.parametrize("num_turns", range(8))
async def test_a_replica_that_begins_as_the_process_stops_is_closed(
    monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    """However many turns of the loop it comes after the signal, nobody loses it."""
    begins, may_end, closed = threading.Event(), threading.Event(), threading.Event()
    replica = SimpleNamespace(close=closed.set)

    def make(*_: Any, **__: Any) -> Any:
        begins.set()
        assert may_end.wait(60)
        return replica

    monkeypatch.setattr(replica_process, "ArrayReplica", make)
    process = ReplicaProcess(EndpointConfig(server="h"), environ={})
    beginning = asyncio.create_task(process._until_stopped(process._begin()))
    assert await asyncio.to_thread(begins.wait, 60)
    process._stop("a test")
    for _ in range(num_turns):
        await asyncio.sleep(0)
    may_end.set()
    for thread in threading.enumerate():  # the loop stands still meanwhile
        if thread.name == "headrace-replica-begins":
            thread.join(60)
    assert await beginning is replica or await asyncio.to_thread(closed.wait, 60)


@pytest.mark.parametrize("attempts", [[(0, 300), (0, 301)], [(HOUR_S, 300), (0, 301)], [(HOUR_S, 601)]])
async def test_it_gives_up_when_nothing_gets_on(
    monkeypatch: pytest.MonkeyPatch, attempts: list[tuple[float, float]]
) -> None:
    """The time counts from the last progress of any attempt."""
    with pytest.raises(UnavailableError, match=r"given up after 600 s \(--start-timeout-s\): a shard restarts"):
        await begin(monkeypatch, *attempts)
