"""Tallies of rows: what they add up, and which differences they find."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.schemas.errors import InvariantError
from headrace.schemas.row_tally import RowTally

IDS = np.array([3, 2**63 - 1, 7, -1], np.int64)


def test_a_tally_is_of_all_columns_together() -> None:
    """Ids add up modulo 2^64, whatever buffers they lie in; an offset counts for each."""
    whole = RowTally.of([IDS])
    assert whole == RowTally(4, (3 + 2**63 - 1 + 7 - 1) % 2**64)
    assert RowTally.of([IDS[:1].tobytes(), None, memoryview(IDS[1:]), b""]) == whole
    assert RowTally.of([IDS - 5], offset=5) == whole
    assert RowTally.of([]) == RowTally.of([None, b""]) == RowTally()


@pytest.mark.parametrize("come", [[3, 7], [3, 7, 9, 9], [3, 7, 8], []])
def test_a_row_that_is_lost_doubled_or_another_is_found(come: list[int]) -> None:
    """The error names the crossing, and what was handed over and has come."""
    with pytest.raises(InvariantError, match=r"^log → store: 3 rows with ids that sum to 19 were handed over, and "):
        RowTally.of([np.array([3, 7, 9])]).check(RowTally.of([np.array(come, np.int64)]), "log → store")
