"""Versions: epochs compare before steps, in arrays and records as in tuples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.row_records import HEADER_FIELDS
from headrace.schemas.version import (
    MAX_EPOCH,
    is_newer,
    is_newer_record,
    last_epoch_after,
)

_EPOCHS = st.one_of(st.integers(0, 3), st.integers(MAX_EPOCH - 2, MAX_EPOCH))
_STEPS = st.one_of(st.integers(-1, 2), st.integers(2**63 - 2, 2**63 - 1))
_VERSIONS = st.tuples(_EPOCHS, _STEPS)


@given(pairs=st.lists(st.tuples(_VERSIONS, _VERSIONS), max_size=20))
def test_arrays_and_records_compare_as_tuples_do(pairs: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    """Arrays of any width, one version for all rows, and records agree with the comparison of tuples."""
    some, others = (np.array([*pairs], np.int64).reshape(-1, 2, 2)[:, side] for side in (0, 1))
    expected = [left > right for left, right in pairs]
    assert is_newer(*some.T, *others.T).tolist() == expected
    assert is_newer(some[:, 0].astype(np.uint32), some[:, 1], *others.T).tolist() == expected
    for _, other in pairs[:1]:
        assert is_newer(*some.T, *other).tolist() == [left > other for left, _ in pairs]
        assert is_newer(*other, *some.T).tolist() == [other > left for left, _ in pairs]
    left, right = (np.zeros(len(pairs), HEADER_FIELDS) for _ in range(2))
    for records, versions in ((left, some), (right, others)):
        records["epoch"], records["step"] = versions.T
    assert is_newer_record(left, right).tolist() == expected


@pytest.mark.parametrize(
    ("highest", "last"),
    [(0, 2**31 + 2**20), (2**31 + 5, 2**31 + 5 + 2**20), (MAX_EPOCH - 1, MAX_EPOCH), (MAX_EPOCH, MAX_EPOCH)],
)
def test_the_last_epoch_that_is_accepted(highest: int, last: int) -> None:
    """A shard accepts the lower half of all epochs, then a limited number above its highest, up to the end."""
    assert last_epoch_after(highest) == last
