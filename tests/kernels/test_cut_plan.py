"""The tables of a cut: what a plan knows of them, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace.kernels.cut_plan import CutPlan, CutTable, header_words
from headrace.kernels.row_packing import layout_of


def _table(first_slot: int, num_rows: int, *columns: torch.Tensor) -> CutTable:
    given = columns or (torch.zeros(num_rows, 3), torch.zeros(num_rows, 1))
    return CutTable(first_slot=first_slot, num_rows=num_rows, row_offset=0, seed=2**64 - 1, columns=given)


def test_a_plan_knows_what_a_cut_needs() -> None:
    """Header, buffer and bitmap are as long as the tables' counts, longest row and last word make them."""
    plan = CutPlan([_table(64, 65), _table(256, 3, torch.zeros(3, 1000))], 5)
    assert plan.header_words == header_words(2, 5) == 13
    assert plan.min_out_bytes == 8 + 4000 + 2 * 64
    assert plan.end_slot == 256 + 64


@pytest.mark.parametrize("num_rows", [0, 1, 7, 100])
def test_rows_that_fit_do_fit(num_rows: int) -> None:
    """As many rows as a buffer is said to take are never longer than it."""
    table = _table(0, 200)
    fitting = table.rows_that_fit(num_rows * table.row_bytes + 3 * 64)
    assert fitting == num_rows
    assert table.packed_bytes(num_rows) == layout_of([table.columns[0]], [num_rows], [table.columns[1:]])[1]
    assert table.packed_bytes(num_rows) <= num_rows * table.row_bytes + 3 * 64
    assert table.rows_that_fit(-1000) == 0


def test_bad_tables_are_named() -> None:
    """Slots that overlap, columns of other lengths or layouts, and numbers out of range are errors."""
    good = _table(0, 65)
    for table in (_table(65, 3), _table(64, 3)):
        with pytest.raises(ValueError, match="multiple of 64, or is not behind"):
            CutPlan([good, table], 2)
    for column in (torch.zeros(64, 3), torch.zeros(65)):
        with pytest.raises(ValueError, match=r"\[65, width\] on cpu is needed"):
            CutPlan([_table(0, 65, column)], 2)
    with pytest.raises(ValueError, match="contiguous"):
        CutPlan([_table(0, 3, torch.zeros(5, 3).t())], 2)
    for change in ({"row_offset": -1}, {"seed": 2**64}, {"seed": -1}):
        with pytest.raises(ValueError, match="out of range"):
            CutPlan([dataclasses.replace(good, **change)], 2)
    for num_shards in (0, 2**16 + 1):
        with pytest.raises(ValueError, match=f"{num_shards} shards"):
            CutPlan([good], num_shards)
    with pytest.raises(ValueError, match="a cut needs a table"):
        CutPlan([], 2)
    with pytest.raises(ValueError, match="each table a column"):
        CutPlan([dataclasses.replace(good, columns=())], 2)
