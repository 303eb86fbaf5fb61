"""Peers that cannot be reached are said soon, then rarely, and once they are back; on a clock by hand."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from headrace.paramserver.rpc.reach_log import ReachLog
from headrace.schemas.errors import HeadraceError, UnauthorizedError, UnavailableError

PEER = "10.0.0.7:7601"


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def _its_own_lines_alone(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Leave out what others are told of things that earlier tests have left: garbage is collected at any time."""
    with caplog.filtering(logging.Filter("headrace.paramserver.rpc.reach_log")):
        yield


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> ReachLog:
    return ReachLog(clock_s=clock)


def fail(log: ReachLog, clock: Clock, *, takes_s: float = 0.0, peer: str = PEER, why: str = "refused") -> None:
    began_s = log.trying(peer)
    clock.now_s += takes_s
    log.failed(peer, UnavailableError(why), began_s=began_s)


def test_a_short_outage_is_no_news(log: ReachLog, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """A shard that is back within two seconds is not spoken of, nor is its return."""
    for _ in range(19):
        fail(log, clock)
        clock.now_s += 0.1
    log.trying(PEER)
    log.reached(PEER)
    assert caplog.records == []
    assert log.trouble() is None


def test_said_soon_then_rarely_and_at_its_end(log: ReachLog, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """A warning after two seconds and then once a minute, with address, time and reason; one more when it is over."""
    for _ in range(150):
        fail(log, clock)
        clock.now_s += 1.0
    log.reached(PEER)
    said = [record.getMessage() for record in caplog.records]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 4
    assert said[0] == "10.0.0.7:7601 has not been reached for 2 s: refused; it is tried again"
    assert [text.partition(" for ")[2].partition(":")[0] for text in said[:3]] == ["2 s", "62 s", "122 s"]
    assert said[3] == "10.0.0.7:7601 is reached again, after 150 s"


def test_another_kind_of_trouble_is_said_soon(log: ReachLog, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """A peer that is back with another token has a new reason, which must not wait for a minute; nor come each time."""
    errors: list[HeadraceError] = [UnavailableError("refused")] * 3 + [UnauthorizedError("the token is wrong")] * 60
    for error in errors:
        log.failed(PEER, error, began_s=log.trying(PEER))
        clock.now_s += 1.0
    assert [text.partition(" for ")[2].partition(";")[0] for text in caplog.messages] == [
        "2 s: refused",
        "4 s: the token is wrong",
    ]


def test_the_time_of_an_attempt_counts(log: ReachLog, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """A peer that lets an attempt wait for five seconds has been away for five seconds."""
    fail(log, clock, takes_s=5.0)
    assert caplog.records == []  # nobody tries again: the caller says it
    log.trying(PEER)
    assert caplog.messages == ["10.0.0.7:7601 has not been reached for 5 s: refused; it is tried again"]


def test_trouble_is_the_longest_outage_and_its_last_reason(log: ReachLog, clock: Clock) -> None:
    """Of several peers the one that has been away for longest is named, until it is back or nobody tries any more."""
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


def test_an_outage_that_was_left_begins_anew(log: ReachLog, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Who tries again after an hour without an attempt has not been waiting for an hour."""
    fail(log, clock)
    clock.now_s += 3600.0
    fail(log, clock)
    assert caplog.records == []
    assert log.trouble() == "10.0.0.7:7601 has not been reached for 0 s: refused"


def test_an_outage_is_known_while_an_attempt_takes_as_long_as_others(log: ReachLog, clock: Clock) -> None:
    """Of a peer that somebody tries to reach is known for twenty seconds, and as long as the longest attempt took."""
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


def test_long_attempts_are_one_outage(log: ReachLog, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Attempts that wait for half a minute each are one outage, of which is known while the next one waits."""
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
