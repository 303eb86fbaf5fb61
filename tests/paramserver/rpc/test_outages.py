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


_AWAY, _WRONG = UnavailableError("away"), UnauthorizedError("wrong token")


def fail(log: OutageLog, clock: Clock, *, takes_s: float = 0.0, peer: str = PEER, error: HeadraceError = _AWAY) -> None:
    began_s = log.trying(peer)
    clock.now_s += takes_s
    log.failed(peer, error, began_s=began_s)


# `x30` is an attempt that fails after 30 s, `a` one that is refused; `?` asks for trouble; seconds pass in between.
_OUTAGES = {
    "one of less than two seconds is no news": ("x 0.1 " * 19 + "t ok ?", ["?"]),
    "nor what was left for an hour": ("x 3600 x ?", ["? 0 away"]),
    "one is logged soon, then rarely, and at its end": (
        "x 1 " * 150 + "ok",
        ["2 away", "62 away", "122 away", "back 150"],
    ),
    "another kind of error is logged soon, once": ("x 1 " * 3 + "a 1 " * 60, ["2 away", "4 wrong token"]),
    "it is kept while an attempt runs": ("x 15 t 15 ?", ["15 away", "? 30 away"]),
    "and for 20 s more than the longest attempt": ("x30 x 40 ? 11 ?", ["30 away", "? 70 away", "?"]),
    "the time of an attempt counts": ("x31 ? 2 t", ["? 31 away", "33 away"]),
    "long attempts are one outage": ("x30 2 x30 2 x30 2 t 29 ok", ["32 away", "96 away", "back 125"]),
}


def _full(text: str) -> str:
    """Return the wording of a short text."""
    kind, _, rest = text.removeprefix("? ").partition(" ")
    if kind == "back":
        return f"{PEER} is reached again, after {rest} s"
    said = f"{PEER} has not been reached for {kind} s: {rest}"
    return f"{said}; it is tried again" if text[0] != "?" else f"? {said}" if rest else "?"


@pytest.mark.parametrize(("script", "expected"), _OUTAGES.values(), ids=_OUTAGES.keys())
def test_outages(script: str, expected: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """An outage is logged after two seconds, then once a minute, with address, time and last reason, and at its end."""
    clock, told = Clock(), list[str]()
    log = OutageLog(clock_s=clock.time)
    for word in script.split():
        if word == "?":
            told.append(f"? {log.trouble() or ''}".rstrip())
        elif word == "t":
            log.trying(PEER)
        elif word == "ok":
            log.reached(PEER)
        elif word[0] in "xa":
            fail(log, clock, takes_s=float(word[1:] or 0), error=_WRONG if word == "a" else _AWAY)
        else:
            clock.now_s += float(word)
        told += caplog.messages
        assert {record.levelname for record in caplog.records} <= {"WARNING"}
        caplog.clear()
    assert told == [_full(text) for text in expected]


def test_trouble_is_the_longest_outage_and_its_last_reason() -> None:
    """`trouble` names the longest outage until the peer is back or nobody tries any more."""
    clock = Clock()
    log = OutageLog(clock_s=clock.time)
    assert log.trouble() is None
    fail(log, clock, error=_WRONG)
    clock.now_s += 1.0
    fail(log, clock, peer="other:1")
    fail(log, clock)
    assert log.trouble() == "10.0.0.7:7601 has not been reached for 1 s: away"
    assert log.trouble(["other:1"]) == "other:1 has not been reached for 0 s: away"
    assert log.trouble([]) is None
    log.reached(PEER)
    assert log.trouble() == "other:1 has not been reached for 0 s: away"
    clock.now_s += 21.0
    assert log.trouble() is None


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
