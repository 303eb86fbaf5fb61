"""The deadline of a read, on a clock that stands still until it is told."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from headrace.paramserver.reading.read_deadline import ReadDeadline
from headrace.schemas.errors import UnavailableError


class _Loop:
    """What the deadline sees of time: a loop's clock that is moved on by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._now_s = loop.time()  # it stands still: real time must not count beside what the test lets pass
        monkeypatch.setattr(loop, "time", lambda: self._now_s)

    async def pass_by(self, seconds: float) -> None:
        self._now_s += seconds
        for _ in range(5):  # timers that are due fire, and what they wake runs
            await asyncio.sleep(0)


async def _read(deadline: ReadDeadline, answers: asyncio.Queue[Any], number: int) -> int:
    async with deadline:
        for _ in range(number):
            await answers.get()
            deadline.answered()
    return number


def _deadline(total_s: float | None) -> ReadDeadline:
    return ReadDeadline(total_s, 10.0, lambda time: f"nothing within {time}")


async def test_a_read_goes_on_as_long_as_answers_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred answers of nine seconds each are fifteen minutes, and no error; ten without one are."""
    loop, answers = _Loop(monkeypatch), asyncio.Queue[Any]()
    reading = asyncio.create_task(_read(_deadline(None), answers, 101))
    await loop.pass_by(0)  # it begins
    for _ in range(100):
        await loop.pass_by(9)
        answers.put_nowait(None)
        await loop.pass_by(0)
    assert not reading.done()
    await loop.pass_by(11)
    assert reading.done(), "now, by this clock, and not when as much real time has gone by"
    with pytest.raises(UnavailableError, match="nothing within 10 s"):
        await reading


async def test_a_total_is_for_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller who sets a total is told when it is over, however many answers have come."""
    loop, answers = _Loop(monkeypatch), asyncio.Queue[Any]()
    reading = asyncio.create_task(_read(_deadline(20.0), answers, 3))
    await loop.pass_by(0)  # it begins
    for _ in range(2):
        await loop.pass_by(9)
        answers.put_nowait(None)
        await loop.pass_by(0)
    assert not reading.done()
    await loop.pass_by(9)
    assert reading.done(), "now, by this clock, and not when as much real time has gone by"
    with pytest.raises(UnavailableError, match="nothing within 20 s"):
        await reading


async def test_an_answer_in_the_last_moment_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes when the read is being given up is no error of its own."""
    loop, deadline = _Loop(monkeypatch), _deadline(None)

    async def read() -> None:
        async with deadline:
            try:
                await asyncio.Event().wait()
            finally:
                deadline.answered()

    reading = asyncio.create_task(read())
    await loop.pass_by(0)
    await loop.pass_by(11)
    with pytest.raises(UnavailableError):
        await reading


async def test_other_errors_and_cancellation_pass() -> None:
    """What a read raises by itself comes out as it is."""
    with pytest.raises(KeyError):
        async with _deadline(None):
            raise KeyError
    with contextlib.suppress(asyncio.CancelledError):
        async with _deadline(None):
            raise asyncio.CancelledError
