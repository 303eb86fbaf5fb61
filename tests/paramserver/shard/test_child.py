from __future__ import annotations

import pytest

from headrace.paramserver.shard.child import HangDetector


def test_ten_looks_in_a_row_are_a_hang() -> None:
    """A look at which the loop has run resets the count, and so does a hang."""
    detector = HangDetector(300.0)
    assert detector.interval_s == 30.0
    looks = [False] * 9 + [True] + [False] * 20
    assert [detector.look(has_run=has_run) for has_run in looks] == [False] * 19 + [True] + [False] * 9 + [True]


@pytest.mark.parametrize("timeout_s", [0, 0.0])
def test_a_timeout_of_zero_detects_nothing(timeout_s: float) -> None:
    assert HangDetector(timeout_s).interval_s is None
