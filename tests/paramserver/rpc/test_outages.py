"""Outages are logged soon, then rarely, and at their end; pauses between attempts double."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from loop_clock import Clock
from virtual_loop import run_virtual

from headrace.paramserver.rpc.outages import Backoff, OutageLog, tell_of_waiting
from headrace.schemas.errors import HeadraceError, UnauthorizedError, UnavailableError

PEER = "10.0.0.7:7601"


@pytest.fixture(autouse=True)
def _its_own_lines_alone(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Ignore log lines of other modules; garbage of earlier tests is collected at any time."""
    with caplog.filtering(logging.Filter("headrace.paramserver.rpc.outages")):
        yield


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> OutageLog:
    return OutageLog(clock_s=clock.time)


def fail(log: OutageLog, clock: Clock, *, takes_s: float = 0.0, peer: str = PEER, why: str = "refused") -> None:
    began_s = log.trying(peer)
    clock.now_s += takes_s
    log.failed(peer, UnavailableError(why), began_s=began_s)


def test_a_short_outage_is_no_news(log: OutageLog, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """A peer that is back within two seconds is not logged, nor is its return; nor what was left for an hour."""
    for _ in range(19):
        fail(log, clock)
        clock.now_s += 0.1
    log.trying(PEER)
    log.reached(PEER)
    assert log.trouble() is None
    fail(log, clock)
    clock.now_s += 3600.0
    fail(log, clock)
    assert log.trouble() == "10.0.0.7:7601 has not been reached for 0 s: refused"
    assert caplog.records == []


def test_an_outage_is_logged_soon_then_rarely(log: OutageLog, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Log after two seconds, then once a minute, with address, time and reason, and at the end."""
    for _ in range(150):
        fail(log, clock)
        clock.now_s += 1.0
    log.reached(PEER)
    said = [record.getMessage() for record in caplog.records]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 4
    assert said[0] == "10.0.0.7:7601 has not been reached for 2 s: refused; it is tried again"
    assert [text.partition(" for ")[2].partition(":")[0] for text in said[:3]] == ["2 s", "62 s", "122 s"]
    assert said[3] == "10.0.0.7:7601 is reached again, after 150 s"


def test_another_kind_of_error_is_logged_soon(log: OutageLog, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """A new kind of error is logged within two seconds, but not each time."""
    errors: list[HeadraceError] = [UnavailableError("refused")] * 3 + [UnauthorizedError("the token is wrong")] * 60
    for error in errors:
        log.failed(PEER, error, began_s=log.trying(PEER))
        clock.now_s += 1.0
    assert [text.partition(" for ")[2].partition(";")[0] for text in caplog.messages] == [
        "2 s: refused",
        "4 s: the token is wrong",
    ]


def test_trouble_is_the_longest_outage_and_its_last_reason(log: OutageLog, clock: Clock) -> None:
    """`trouble` names the longest outage until the peer is back or nobody tries any more."""
    assert log.trouble() is None
    fail(log, clock)
    clock.now_s += 1.0
    fail(log, clock, peer="other:1")
    fail(log, clock, why="no answer")
    assert log.trouble() == "10.0.0.7:7601 has not been reached for 1 s: no answer"
    assert log.trouble(["other:1"]) == "other:1 has not been reached for 0 s: refused"
    assert log.trouble([]) is None
    log.reached(PEER)
    assert log.trouble() == "other:1 has not been reached for 0 s: refused"
    clock.now_s += 21.0
    assert log.trouble() is None


def test_an_outage_is_kept_while_an_attempt_runs(log: OutageLog, clock: Clock) -> None:
    """An outage is forgotten after 20 seconds without attempts, plus the longest attempt."""
    fail(log, clock)
    clock.now_s += 15.0
    log.trying(PEER)
    clock.now_s += 15.0
    assert log.trouble() == "10.0.0.7:7601 has not been reached for 30 s: refused"
    fail(log, clock, takes_s=30.0)
    fail(log, clock, takes_s=0.0)
    clock.now_s += 40.0
    assert log.trouble() == "10.0.0.7:7601 has not been reached for 100 s: refused"
    clock.now_s += 11.0
    assert log.trouble() is None


def test_long_attempts_are_one_outage(log: OutageLog, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """The time of an attempt counts; attempts of half a minute each are one outage, known while the next one runs."""
    fail(log, clock, takes_s=31.0)
    assert caplog.records == []  # nobody tries again: the caller says it
    clock.now_s += 2.0
    for _ in range(3):
        fail(log, clock, takes_s=30.0, why="no connection")
        clock.now_s += 2.0
    log.trying(PEER)
    clock.now_s += 29.0
    assert log.trouble() == "10.0.0.7:7601 has not been reached for 158 s: no connection"
    log.reached(PEER)
    assert caplog.messages[0] == "10.0.0.7:7601 has not been reached for 33 s: refused; it is tried again"
    told = [text.partition(" for ")[2].partition(":")[0] for text in caplog.messages[1:-1]]
    assert told == ["97 s"]
    assert caplog.messages[-1] == "10.0.0.7:7601 is reached again, after 158 s"


@pytest.mark.parametrize(
    ("number", "asked", "pauses_s"),
    [
        (1.0, {}, [1, 2, 4, 5, 5]),
        (0.0, {}, [0.5, 1, 2, 2.5]),  # full jitter halves each pause, the capped one too
        (0.5, {}, [0.75, 1.5, 3, 3.75]),
        (1.0, {"at_least_s": 30}, [30, 30, 30]),  # the peer may ask for more, above the cap too
        (1.0, {"at_least_s": 0.1}, [1, 2]),
        (0.0, {"at_most_s": 1}, [0.5, 0.5, 0.5]),  # capped before its jitter
    ],
)
def test_pauses_double_up_to_the_cap(number: float, asked: dict[str, float], pauses_s: list[float]) -> None:
    """Pauses are between half of their ceiling and the ceiling, which doubles up to the cap until a reset."""
    backoff = Backoff(min_s=1, max_s=5, random=lambda: number)
    assert [backoff.next_s(**asked) for _ in pauses_s] == pauses_s
    assert backoff.next_s() == min(5, 2 ** len(pauses_s)) * (1 + number) / 2, "the ceiling has gone on doubling"
    backoff.reset()
    assert backoff.next_s() == (1 + number) / 2


@pytest.mark.parametrize(
    ("takes_s", "why", "lines"),
    [
        (0.9, "refused", []),
        (60.0, "refused", ["still trying to reach 10.0.0.7:7601, giving up after 90 s: refused"]),
        (60.0, None, ["still trying to reach 10.0.0.7:7601, giving up after 90 s"]),
    ],
)
def test_a_wait_is_told_once_after_a_second(
    takes_s: float, why: str | None, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """One line says what is waited for, until when, and the last reason; nothing is said of a short wait."""

    async def wait() -> None:
        with tell_of_waiting(PEER, 90.0, lambda: why):
            await asyncio.sleep(takes_s)
        await asyncio.sleep(60.0)

    run_virtual(wait())
    assert caplog.messages == lines
