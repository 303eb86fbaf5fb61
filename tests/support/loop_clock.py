"""The clock and the timers of an event loop, for tests of deadlines: it stands still until it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest


class ClockAhead:
    """The clock of the loop that runs, which can be put forward: what waits for a time need not be waited for.

    If it `stands_still` otherwise, what must not happen before a time does not happen on a machine that is busy either.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, stands_still: bool = False) -> None:
        loop = asyncio.get_running_loop()
        self.ahead_s, time, begin_s = 0.0, loop.time, loop.time()
        monkeypatch.setattr(loop, "time", lambda: (begin_s if stands_still else time()) + self.ahead_s)

    async def pass_by(self, seconds: float) -> None:
        """Let so much time be over at once, and timers that are due fire, and what they wake run."""
        self.ahead_s += seconds
        for _ in range(5):
            await asyncio.sleep(0)


class Timer:
    """What `Clock.call_at` returns."""

    def __init__(self, when_s: float, callback: Callable[[], None]) -> None:
        self.when_s, self.callback, self.is_cancelled = when_s, callback, False

    def when(self) -> float:
        """When it fires."""
        return self.when_s

    def cancel(self) -> None:
        """Do not fire."""
        self.is_cancelled = True


class Clock:
    """Stands in for an event loop whose clock stands still until it is told."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        """Seconds."""
        return self.now_s

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Timer:
        """Set a timer."""
        self.timers.append(Timer(when_s, callback))
        return self.timers[-1]

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Set a timer."""
        return self.call_at(self.now_s + delay_s, callback)

    def __getattr__(self, name: str) -> Any:
        """Return what has to do with no time from the loop that runs."""
        return getattr(asyncio.get_running_loop(), name)

    def advance(self, seconds: float) -> None:
        """Let time pass, and every timer on the way fire at its time."""
        end_s = self.now_s + seconds
        while due := [timer for timer in self.timers if not timer.is_cancelled and timer.when_s <= end_s]:
            timer = min(due, key=Timer.when)
            self.timers.remove(timer)
            self.now_s = max(self.now_s, timer.when_s)
            timer.callback()
        self.now_s = end_s
