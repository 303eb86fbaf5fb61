"""Pauses double, are capped and jittered, and heed what the peer asks for."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from headrace.paramserver.rpc.backoff import Backoff


def test_pauses_double_up_to_the_cap() -> None:
    """Without jitter the pauses are the ceilings, until a reset."""
    backoff = Backoff(min_s=1, max_s=5, random=lambda: 1.0)
    assert [backoff.next_s() for _ in range(5)] == [1, 2, 4, 5, 5]
    backoff.reset()
    assert backoff.next_s() == 1


def test_jitter_halves_a_pause() -> None:
    """With the most of it each pause is half of its ceiling, the capped one too."""
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
    """What the peer asks for is heeded above the cap, and does not shorten a pause."""
    backoff = Backoff(min_s=1, max_s=2, random=lambda: 1.0)
    assert backoff.next_s(at_least_s=30) == 30
    assert backoff.next_s(at_least_s=0.1) == 2
