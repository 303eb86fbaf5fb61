"""Policies: parsing, each decision at its edge, and the row budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.paramserver.expiry.policy import (
    BudgetThreshold,
    ExpiryPolicy,
    ExpiryRules,
    Horizon,
    Recency,
    RowFacts,
    StepRange,
    judge,
)
from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.store.catalog import Owner
from headrace.schemas.errors import ConfigError

HORIZON = Horizon(seq=9, epoch=5, step=50, time_us=2_000_000_000, since=3, first_step=7)


def _facts(epochs: list[int], steps: list[int], **more: Any) -> RowFacts:
    size = len(epochs)
    return RowFacts(
        row_ids=np.arange(size),
        epochs=np.array(epochs, np.int64),
        steps=np.array(steps, np.int64),
        times_us=np.array(more.pop("times_us", [1] * size), np.int64),
        **{name: np.array(values) for name, values in more.items()},
    )


def test_rules_are_read() -> None:
    """Numbers have units, and the first pattern that fits counts."""
    rules = ExpiryRules.parse("user.*: ttl_s=1.5h, match=all, idle_steps=1e3;*: max_rows=7, trigger_bytes=2MiB; ")
    assert rules.policy_of("user.weight") == ExpiryPolicy(ttl_s=5400.0, match="all", idle_steps=1000)
    assert rules.policy_of("item") == ExpiryPolicy(max_rows=7, trigger_bytes=2 << 20)
    assert ExpiryRules.parse("").policy_of("item") is None
    assert ExpiryRules.parse("a: max_rows=0").policy_of("b") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("user", "is not PATTERN: POLICY=VALUE"),
        (": ttl_s=1", "is not PATTERN: POLICY=VALUE"),
        ("u: ttl=1", "'ttl=1' is not a policy; use ttl_s"),
        ("u: ttl_s", "ttl_s=: not a number"),
        ("u: ttl_s=3w", "ttl_s=3w: not a number from 0 on, or one with ms, s, m, h, d"),
        ("u: idle_steps=1.5", "idle_steps=1.5: not a number"),
        ("u: idle_steps=0", "idle_steps is 0"),
        ("u: ttl_s=1, ttl_s=2", "ttl_s is given twice"),
        ("u: max_rows=1, decay=1", "decay is 1"),
        ("u: min_frequency=0", "min_frequency is 0"),
        ("u: min_l2_norm=0", "min_l2_norm is 0"),
        ("u: ttl_s=1, match=some", "match is 'some', not any or all"),
        ("u: ttl_s=1, clock=mine", "clock is 'mine'"),
        ("u: ttl_s=1, interval_s=0.5", "interval_s is 0.5"),
        ("u: interval_s=60", "no policy: give ttl_s"),
    ],
)
def test_mistakes_name_rule_and_key(text: str, says: str) -> None:
    """A wrong rule gives an error of one line that names it."""
    with pytest.raises(ConfigError, match="expiry: ") as caught:
        ExpiryRules.parse(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_rows_are_judged_that_no_rank_may_still_be_writing() -> None:
    """Rows of an ended epoch are settled, and those below the last step that all ranks of the owner have ended."""
    facts = _facts([3, 5, 5, 5, 1, 6], [10**9, 48, 49, 50, 2**63 - 1, 0])
    assert HORIZON.settled(facts.epochs, facts.steps).tolist() == [True, True, True, False, True, False]
    assert not Horizon(seq=9).settled(facts.epochs, facts.steps).any()


_STEPS = _facts([3, 3, 5, 5, 2, 1], [39, 40, 39, 40, 39, 10**9])
_TIMES = _facts([3, 3, 5, 1, 3], [1] * 5, times_us=[989_999_999, 1_990_000_000, 1_989_999_999, 1_989_999_999, 0])
_BELOW = _facts([3] * 4, [1] * 4, norms=[0.0, 0.49, 0.5, np.nan], frequencies=[0.0, 1.0, 0.99, 5.0])
_YEAR_US = 365 * 86_400 * 1_000_000
_AHEAD = Horizon(seq=9, epoch=3, step=100, time_us=_YEAR_US)
_LEAPT = _facts([3, 3], [1, 1], times_us=[900_000_000, _YEAR_US])


@pytest.mark.parametrize(
    ("policy", "facts", "horizon", "now_us", "expired"),
    [
        # Steps of the owner's epochs count; rows from before it took the table count as updated at its first step.
        ("idle_steps=10", _STEPS, HORIZON, 10**15, "x-x-xx"),
        ("idle_steps=42", _STEPS, HORIZON, 10**15, "----xx"),
        ("idle_steps=43", _STEPS, HORIZON, 10**15, "------"),
        # The trainer's clock counts, or on request the server's; a row without a time has no age.
        ("ttl_s=10", _TIMES, HORIZON, 10**15, "x-xx-"),
        ("ttl_s=10, clock=wall", _TIMES, HORIZON, 10**9, "x----"),
        # The earlier of the trainer's and the server's clock counts, so one wrong clock expires nothing.
        ("ttl_s=200", _LEAPT, _AHEAD, 10**9, "--"),
        ("ttl_s=90", _LEAPT, _AHEAD, 10**9, "x-"),
        ("ttl_s=200", _LEAPT, _AHEAD, _YEAR_US, "x-"),
        # A row goes when it is below the limit; NaN never is.
        ("min_l2_norm=0.5", _BELOW, HORIZON, 10**15, "xx--"),
        ("min_frequency=1", _BELOW, HORIZON, 10**15, "x-x-"),
        ("min_l2_norm=0.5, min_frequency=1", _BELOW, HORIZON, 10**15, "xxx-"),
        ("min_l2_norm=0.5, min_frequency=1, match=all", _BELOW, HORIZON, 10**15, "x---"),
        ("max_rows=0", _BELOW, HORIZON, 10**15, "----"),
    ],
)
def test_rows_that_a_policy_lets_go(policy: str, facts: RowFacts, horizon: Horizon, now_us: int, expired: str) -> None:
    """Each condition at its edge."""
    verdict = judge(ExpiryPolicy.parse(policy), horizon, facts, now_us=now_us)
    assert "".join("x" if each else "-" for each in verdict.expired) == expired


def test_a_verdict_counts_by_policy_and_what_stays() -> None:
    """Rows that are not settled count in nothing: they neither expire nor exceed a budget."""
    facts = _facts([3, 3, 3, 5], [1, 29, 40, 50], times_us=[1, 1_999_999_999, 2 * 10**9, 1])
    verdict = judge(ExpiryPolicy.parse("ttl_s=1, idle_steps=20"), HORIZON, facts, now_us=10**15)
    assert verdict.by_policy == {"ttl_s": 1, "idle_steps": 2}
    assert verdict.expired.tolist() == [True, True, False, False]
    assert verdict.stays.tolist() == [False, False, True, False]


def test_a_horizon_is_as_far_as_the_slowest_rank() -> None:
    """It is that of the owner; without one, and until all its ranks have ended a step, there is none."""
    sessions, owner = Sessions({}), Owner("run", 4, since=3, first_step=2)
    for rank, step in ((0, 7), (1, 5)):
        assert Horizon.of(sessions, 1, owner) == Horizon(seq=1)
        session = sessions.open("run", f"rank{rank}", 4, rank, 2)
        sessions.advance(session, client_seq=1, step=step, time_us=step * 100, ends_step=True, is_exact_cut=True)
    assert Horizon.of(sessions, 3, owner) == Horizon(seq=3, epoch=4, step=5, time_us=500, since=3, first_step=2)
    assert Horizon.of(sessions, 3, Owner("other", 4)) == Horizon.of(sessions, 3, None) == Horizon(seq=3)


_STEPS = st.integers(0, 2) | st.integers(0, 40) | st.integers(0, 2**62)
_ROWS = st.lists(st.tuples(st.integers(1, 3), _STEPS, st.booleans()), min_size=1, max_size=60)
_MAX_BUCKETS = st.integers(2, 4) | st.integers(2, 70)


@given(rows=_ROWS, num_rows=st.integers(1, 60), max_buckets=_MAX_BUCKETS, piece=st.integers(1, 61))
@settings(max_examples=200)
def test_the_least_recently_updated_go(
    rows: list[tuple[int, int, bool]], num_rows: int, max_buckets: int, piece: int
) -> None:
    """The threshold takes the oldest of the rows that may go, by version and then by row id, and no other."""
    epochs, steps = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    may_go = np.array([row[2] for row in rows])
    candidates = sorted((epoch, step, row) for row, (epoch, step, may) in enumerate(rows) if may)
    expected = {row for _, _, row in candidates[:num_rows]}
    recency = Recency(max_buckets=max_buckets)
    left = num_rows
    for _ in range(64):
        for start in range(0, len(rows), piece):
            some = may_go[start : start + piece]
            recency.add(epochs[start : start + piece][some], steps[start : start + piece][some])
        found, more = recency.threshold(left)
        if isinstance(found, BudgetThreshold):
            break
        assert more is not None
        recency, left = Recency(found, max_buckets=max_buckets), more
    assert isinstance(found, BudgetThreshold)
    taken: set[int] = set()
    for start in range(0, len(rows), piece):
        end = start + piece
        mask = found.take(epochs[start:end], steps[start:end], may_go[start:end])
        taken |= set((np.flatnonzero(mask) + start).tolist())
    assert taken == expected


def test_memory_is_bounded_and_one_more_pass_is_enough() -> None:
    """Many versions share 65 536 buckets, and one range of them is counted again."""
    recency = Recency()
    steps = np.arange(200_000)
    recency.add(np.ones_like(steps), steps)
    assert len(recency._counts) <= 65_536
    found, left = recency.threshold(23_456)
    assert isinstance(found, StepRange)
    again = Recency(found)
    again.add(np.ones_like(steps), steps)
    assert left is not None
    exact, _ = again.threshold(left)
    assert isinstance(exact, BudgetThreshold)
    assert np.count_nonzero(exact.take(np.ones_like(steps), steps, np.ones(steps.size, bool))) == 23_456
