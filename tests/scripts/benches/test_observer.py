"""Which delay a step has, from what an observed replica has shown."""

from __future__ import annotations

import pytest

from headrace.schemas.errors import ProtocolError
from headrace.scripts.benches.observer import delays_of

MS = 1_000_000


def test_a_step_is_visible_with_the_first_that_is_not_below_it() -> None:
    """Steps that become visible together have one moment; each counts from its own update."""
    updated_ns = [10 * MS, 20 * MS, 30 * MS, 40 * MS]
    seen = [(4, 5 * MS), (5, 13 * MS), (7, 36 * MS), (9, 41 * MS)]
    assert delays_of(range(5, 9), updated_ns, seen) == [3.0, 16.0, 6.0, 1.0]
    assert delays_of([5, 8], [10 * MS, 40 * MS], seen) == [3.0, 1.0]
    assert delays_of([], [], []) == []


def test_a_step_that_was_never_visible_is_an_error() -> None:
    """A step that the replica has not shown is not left out in silence."""
    with pytest.raises(ProtocolError, match="the replica has not shown step 6"):
        delays_of([5, 6], [MS, MS], [(5, 2 * MS)])
    with pytest.raises(ProtocolError, match="step 5"):
        delays_of([5], [MS], [])
