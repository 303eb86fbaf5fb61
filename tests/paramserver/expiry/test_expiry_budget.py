"""The row budget's cut is exactly that of sorting all rows, whatever memory it has."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.paramserver.expiry.expiry_budget import BudgetCut, Recency, StepRange

_ROWS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 2) | st.integers(0, 40) | st.integers(0, 2**62), st.booleans()),
    min_size=1,
    max_size=60,
)


@given(
    rows=_ROWS,
    num_rows=st.integers(1, 60),
    max_buckets=st.integers(2, 4) | st.integers(2, 70),
    piece=st.integers(1, 61),
)
@settings(max_examples=200)
def test_the_least_recently_updated_go(
    rows: list[tuple[int, int, bool]], num_rows: int, max_buckets: int, piece: int
) -> None:
    """The cut takes the oldest of the rows that may go, by version and then by row id, and no other."""
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
        cut, more = recency.cut(left)
        if isinstance(cut, BudgetCut):
            break
        assert more is not None
        recency, left = Recency(cut, max_buckets=max_buckets), more
    assert isinstance(cut, BudgetCut)
    taken: set[int] = set()
    for start in range(0, len(rows), piece):
        end = start + piece
        mask = cut.take(epochs[start:end], steps[start:end], may_go[start:end])
        taken |= set((np.flatnonzero(mask) + start).tolist())
    assert taken == expected


def test_memory_is_bounded_and_one_more_pass_is_enough() -> None:
    """A million versions share 65 536 buckets, and one range of them is to be counted again."""
    recency = Recency()
    steps = np.arange(1_000_000)
    recency.add(np.ones_like(steps), steps)
    assert len(recency._counts) <= 65_536
    cut, left = recency.cut(123_456)
    assert isinstance(cut, StepRange)
    again = Recency(cut)
    again.add(np.ones_like(steps), steps)
    assert left is not None
    exact, _ = again.cut(left)
    assert isinstance(exact, BudgetCut)
    assert np.count_nonzero(exact.take(np.ones_like(steps), steps, np.ones(steps.size, bool))) == 123_456
