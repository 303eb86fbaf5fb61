"""Flows satisfy all givers and takers at the least cost."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.paramserver.reshard.transport import solve_transport


@given(st.integers(1, 5), st.integers(0, 2**32 - 1), st.sampled_from([2, 5, 10**9]))
def test_finds_the_cheapest_assignment(size: int, seed: int, most: int) -> None:
    """With one unit each, the cost is that of the best of all permutations."""
    cost = np.random.default_rng(seed).integers(0, most, (size, size))
    one = np.ones(size, np.int64)
    flow = solve_transport(one, one, cost)
    assert (flow.sum(axis=0) == 1).all() and (flow.sum(axis=1) == 1).all() and (flow >= 0).all()
    assert (flow * cost).sum() == min(sum(cost[i, p[i]] for i in range(size)) for p in permutations(range(size)))


def test_takes_a_flow_back_for_a_cheaper_one() -> None:
    """The taker that both givers are nearest to goes to the one that the other taker is farther from."""
    flow = solve_transport(np.array([4, 3]), np.array([5, 2]), np.array([[1, 9], [1, 2]]))
    assert flow.tolist() == [[4, 0], [1, 2]]


def test_refuses_sums_that_differ() -> None:
    """Such a problem has no answer."""
    with pytest.raises(ValueError, match="supply 3 and demand 4 differ"):
        solve_transport(np.array([3]), np.array([4]), np.array([[1]]))
