"""How long the building of a copy pauses, on a clock of its own."""

from __future__ import annotations

import threading

import pytest

from headrace.paramserver.replica.copy.build_pace import BuildPace


class Clock:
    """A thread's processor time, and what it has slept."""

    def __init__(self, percent: int) -> None:
        self.spent_s = 5.0
        self.slept: list[float] = []
        self.pace = BuildPace(percent, spent_s=lambda: self.spent_s, sleep=self.slept.append)


@pytest.mark.parametrize(("percent", "slept_s"), [(50, [0.01] * 3), (25, [0.03] * 3), (80, [0.0025] * 3), (100, [])])
def test_a_thread_sleeps_for_its_share(percent: int, slept_s: list[float]) -> None:
    """Of a thread's time at a share of p percent, p are spent and the rest is slept; what was before does not count."""
    clock = Clock(percent)
    clock.pace.pause()
    assert clock.slept == []
    for _ in range(3):
        clock.spent_s += 0.01
        clock.pace.pause()
    assert clock.slept == pytest.approx(slept_s)


def test_threads_are_paced_each() -> None:
    """Work in one thread after the other sleeps for each part; processor time of two threads is never compared."""
    clock = Clock(50)

    def work() -> None:
        with clock.pace.paced():
            clock.spent_s += 0.02

    clock.pace.pause()
    clock.spent_s = 90.0
    for target in (clock.pace.pause, work, work):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert clock.slept == pytest.approx([0.02] * 2)
