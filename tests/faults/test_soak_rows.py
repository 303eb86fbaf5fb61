"""The rows of the soak, and what lookups may see of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from soak_rows import TABLES, Watch, encode_rows, read_stamps

NUMBERS = np.arange(5)


def _look(watch: Watch, fqn: str, stamps: list[int]) -> None:
    """Have a lookup of the first rows return these stamps, 0 for a missing row."""
    rows = encode_rows(TABLES[fqn], NUMBERS, np.array(stamps))
    rows[np.array(stamps) == 0] = 0
    watch.end(watch.begin(NUMBERS), NUMBERS, rows)


@pytest.mark.parametrize("fqn", ["aging.weight", "halves.weight"])
def test_a_row_of_two_updates_is_torn(fqn: str) -> None:
    """Whole rows tell their stamps; one that has columns of another stamp, or of another row, is torn."""
    table = TABLES[fqn]
    rows = encode_rows(table, NUMBERS, np.array([7, 8, 9, 10, 11]))
    rows[1, -1] = encode_rows(table, NUMBERS, 7)[1, -1]
    rows[2] = encode_rows(table, NUMBERS, 9)[3]
    rows[4] = 0
    stamps, is_torn = read_stamps(table, NUMBERS, rows)
    assert stamps[[0, 3, 4]].tolist() == [7, 10, 0]
    assert is_torn.tolist() == [False, True, True, False, False]
    assert 2**24 > 2_000_000 == read_stamps(table, NUMBERS, encode_rows(table, NUMBERS, 2_000_000))[0][1]


def test_narrow_rows_are_exact_in_few_bits() -> None:
    """Stored in bfloat16, and read again, rows have the numbers that they had."""
    table = TABLES["halves.weight"]
    numbers = np.arange(table.num_rows)
    rows = torch.from_numpy(encode_rows(table, numbers, numbers * 5_003))
    assert rows.bfloat16().float().equal(rows)


@pytest.mark.parametrize(
    ("fqn", "seen", "says"),
    [
        ("steady.weight", [[0, 1, 2, 3, 4], [5, 1, 2, 3, 4], [6, 7, 2, 3, 4]], None),
        ("steady.weight", [[0, 1, 2, 3, 4], [0, 1, 2, 3, 3]], "older than seen before"),
        ("steady.weight", [[0, 1, 2, 3, 4], [0, 1, 2, 3, 0]], "lost"),
        ("aging.weight", [[0, 1, 2, 3, 4], [0, 1, 2, 3, 0], [0, 1, 2, 3, 5]], None),
        ("aging.weight", [[0, 1, 2, 3, 4], [0, 1, 2, 3, 0], [0, 1, 2, 3, 4]], "and gone"),
    ],
)
def test_rows_only_go_forward(fqn: str, seen: list[list[int]], says: str | None) -> None:
    """A row does not go back, is lost only where rows may go, and comes back only with a newer update."""
    watch = Watch(TABLES[fqn])
    for stamps in seen:
        _look(watch, fqn, stamps)
    assert bool(watch.problems) == (says is not None)
    if says is not None:
        assert says in watch.problems[0]


def test_what_is_gone_is_told() -> None:
    """Rows that were seen to go are counted once each time, with their last stamps, until they are back."""
    watch = Watch(TABLES["aging.weight"])
    for stamps in ([1, 2, 3, 4, 5], [0, 2, 0, 4, 5], [0, 2, 0, 4, 5], [0, 2, 6, 4, 5]):
        _look(watch, "aging.weight", stamps)
    gone, last = watch.gone()
    assert (gone.tolist(), last.tolist(), watch.num_gone) == ([0], [1], 2)
