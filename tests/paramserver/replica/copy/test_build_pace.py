"""How long the building of a copy pauses, on a clock of its own."""

from __future__ import annotations

import threading

import pytest

from headrace.paramserver.replica.copy.build_pace import BuildPace


class Clock:
    """A thread's processor time, and what it has slept."""

    def __init__(self) -> None:
        self.spent_s = 5.0
        self.slept: list[float] = []

    def pace(self, percent: int) -> BuildPace:
        """Return a pace on this clock."""
        return BuildPace(percent, spent_s=lambda: self.spent_s, sleep=self.slept.append)


@pytest.mark.parametrize(("percent", "sleep_s"), [(50, 0.01), (25, 0.03), (80, 0.0025)])
def test_a_thread_sleeps_for_its_share(percent: int, sleep_s: float) -> None:
    """Of a thread's time at a share of p percent, p are spent and the rest is slept."""
    clock = Clock()
    pace = clock.pace(percent)
    pace.pause()
    assert clock.slept == [], "what was spent before is not the builder's"
    for _ in range(3):
        clock.spent_s += 0.01
        pace.pause()
    assert clock.slept == pytest.approx([sleep_s] * 3)


def test_the_full_share_never_sleeps() -> None:
    """At 100 percent nothing sleeps."""
    clock = Clock()
    pace = clock.pace(100)
    for _ in range(3):
        clock.spent_s += 0.01
        pace.pause()
    assert clock.slept == []


def test_parts_in_other_threads_are_paced_each() -> None:
    """Work that runs in one thread after the other sleeps for each part."""
    clock = Clock()
    pace = clock.pace(50)

    def work() -> None:
        with pace.paced():
            clock.spent_s += 0.02

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert clock.slept == pytest.approx([0.02] * 3)


def test_another_thread_begins_anew() -> None:
    """Processor time of two threads is never compared."""
    clock = Clock()
    pace = clock.pace(50)
    pace.pause()
    clock.spent_s = 90.0
    thread = threading.Thread(target=pace.pause)
    thread.start()
    thread.join()
    assert clock.slept == []
