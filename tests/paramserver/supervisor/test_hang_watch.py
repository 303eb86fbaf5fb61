"""When a process is taken to hang."""

from __future__ import annotations

import pytest

from headrace.paramserver.supervisor.hang_watch import HangWatch


def test_ten_looks_in_a_row_are_a_hang() -> None:
    """One look at which the process had run begins the count anew, and so does a hang."""
    watch = HangWatch(300.0)
    assert watch.interval_s == 30.0
    looks = [False] * 9 + [True] + [False] * 20
    assert [watch.look(has_run=has_run) for has_run in looks] == [False] * 19 + [True] + [False] * 9 + [True]


@pytest.mark.parametrize("timeout_s", [0, 0.0])
def test_nobody_looks_without_a_timeout(timeout_s: float) -> None:
    """0 is for ever."""
    assert HangWatch(timeout_s).interval_s is None
