"""Outages are logged soon, then rarely, and at their end; pauses between attempts double."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given
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
    """A peer that is back within two seconds is not logged, nor is its return."""
    for _ in range(19):
        fail(log, clock)
        clock.now_s += 0.1
    log.trying(PEER)
    log.reached(PEER)
    assert caplog.records == []
    assert log.trouble() is None


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


def test_the_time_of_an_attempt_counts(log: OutageLog, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """The time of an attempt counts as outage."""
    fail(log, clock, takes_s=5.0)
    assert caplog.records == []  # nobody tries again: the caller says it
    log.trying(PEER)
    assert caplog.messages == ["10.0.0.7:7601 has not been reached for 5 s: refused; it is tried again"]


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


def test_an_outage_that_was_left_begins_anew(log: OutageLog, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """After an hour without attempts, the next one begins a new outage."""
    fail(log, clock)
    clock.now_s += 3600.0
    fail(log, clock)
    assert caplog.records == []
    assert log.trouble() == "10.0.0.7:7601 has not been reached for 0 s: refused"


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
    """Attempts that take half a minute each are one outage, known while the next one runs."""
    fail(log, clock)
    clock.now_s += 1.0
    for _ in range(3):
        fail(log, clock, takes_s=30.0, why="no connection")
        clock.now_s += 2.0
    log.trying(PEER)
    clock.now_s += 29.0
    assert log.trouble() == "10.0.0.7:7601 has not been reached for 126 s: no connection"
    log.reached(PEER)
    told = [text.partition(" for ")[2].partition(":")[0] for text in caplog.messages[:-1]]
    assert told == ["33 s", "97 s"]
    assert caplog.messages[-1] == "10.0.0.7:7601 is reached again, after 126 s"


def test_pauses_double_up_to_the_cap() -> None:
    """Without jitter the pauses are the ceilings, until a reset."""
    backoff = Backoff(min_s=1, max_s=5, random=lambda: 1.0)
    assert [backoff.next_s() for _ in range(5)] == [1, 2, 4, 5, 5]
    backoff.reset()
    assert backoff.next_s() == 1


def test_jitter_halves_a_pause() -> None:
    """Full jitter halves each pause, the capped one too."""
    backoff = Backoff(min_s=1, max_s=5, random=lambda: 0.0)
    assert [backoff.next_s() for _ in range(4)] == [0.5, 1, 2, 2.5]


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 200))
def test_jitter_stays_within_bounds(number: float, attempts: int) -> None:
    """A pause is at least half of its ceiling and never above the cap."""
    backoff = Backoff(min_s=0.5, max_s=8, random=lambda: number)
    ceiling_s = 0.5
    for _ in range(attempts):
        assert ceiling_s / 2 <= backoff.next_s() <= ceiling_s
        ceiling_s = min(8, 2 * ceiling_s)


def test_peer_may_ask_for_more() -> None:
    """The peer may ask for a pause above the cap, but not for a shorter one."""
    backoff = Backoff(min_s=1, max_s=2, random=lambda: 1.0)
    assert backoff.next_s(at_least_s=30) == 30
    assert backoff.next_s(at_least_s=0.1) == 2


def test_a_cap_of_once_keeps_the_jitter() -> None:
    """`at_most_s` caps a pause before its jitter, and the pauses behind it go on doubling."""
    backoff = Backoff(min_s=1, max_s=8, random=lambda: 0.0)
    assert [backoff.next_s(at_most_s=1) for _ in range(3)] == [0.5, 0.5, 0.5]
    assert backoff.next_s() == 4


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
