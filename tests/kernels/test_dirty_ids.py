"""The set of changed rows by their ids, against a Python set."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.kernels.dirty_ids import DirtyIds, dirty_set
from headrace.kernels.dirty_rows import DirtyRows

# Few ids that come again, ids that a bitmap could not hold, and the highest there is.
IDS = st.one_of(st.integers(0, 40), st.integers(2**40, 2**40 + 40), st.integers(0, 2**63 - 1), st.just(2**63 - 1))


class DirtyIdsMachine(RuleBasedStateMachine):
    """Any sequence of operations does what it does to a set."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = DirtyIds()
        self.model: set[int] = set()

    @rule(ids=st.lists(st.one_of(IDS, st.integers(-3, -1)), max_size=60))
    def mark(self, ids: list[int]) -> None:
        self.ids.mark(torch.tensor(ids, dtype=torch.int64))
        self.model.update(row for row in ids if row >= 0)

    @rule(ids=st.lists(st.integers(-3, 2**31 - 1), max_size=60))
    def mark_int32(self, ids: list[int]) -> None:
        self.ids.mark(torch.tensor(ids, dtype=torch.int32))
        self.model.update(row for row in ids if row >= 0)

    @rule(start=IDS.filter(lambda row: row < 2**62), num_ids=st.integers(0, 3000))
    def mark_run(self, start: int, num_ids: int) -> None:
        self.ids.mark(torch.arange(start, start + num_ids).flip(0))
        self.model.update(range(start, start + num_ids))

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        known = st.sampled_from(sorted(self.model)) if self.model else st.just(-1)
        ids = data.draw(st.lists(st.one_of(known, IDS), max_size=60))
        self.ids.discard(torch.tensor(ids, dtype=torch.int64))
        self.model.difference_update(ids)

    @rule(max_rows=st.one_of(st.none(), st.integers(0, 5000)), first_row=st.one_of(st.just(0), IDS))
    def take(self, max_rows: int | None, first_row: int) -> None:
        taken = self.ids.take(max_rows, first_row=first_row)
        expected = [row for row in sorted(self.model) if row >= first_row][:max_rows]
        assert taken.dtype == torch.int64
        assert taken.is_contiguous()
        assert taken.tolist() == expected
        self.model.difference_update(expected)

    @rule()
    def clear(self) -> None:
        self.ids.clear()
        self.model.clear()

    @rule(other=st.sets(IDS, max_size=60))
    def add(self, other: set[int]) -> None:
        theirs = DirtyIds()
        theirs.mark(torch.tensor(list(other), dtype=torch.int64))
        self.ids.add(theirs)
        assert theirs.count == len(other)
        self.model |= other

    @rule(ids=st.lists(IDS, max_size=60))
    def contains(self, ids: list[int]) -> None:
        asked = [*ids, *list(self.model)[:20]]
        found = self.ids.contains(torch.tensor(asked, dtype=torch.int64))
        assert found.tolist() == [row in self.model for row in asked]

    @rule()
    def parts(self) -> None:
        assert [row for part in self.ids.parts() for row in part.tolist()] == sorted(self.model)

    @invariant()
    def agrees(self) -> None:
        assert self.ids.count == len(self.model)
        assert self.ids.is_empty == (not self.model)


DirtyIdsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestDirtyIds = DirtyIdsMachine.TestCase


@given(seed=st.integers(0, 2**32), num_ids=st.integers(0, 20_000), num_batches=st.integers(1, 10))
@settings(max_examples=15)
def test_memory_goes_by_the_ids_that_are_in_it(seed: int, num_ids: int, num_batches: int) -> None:
    """A set takes at most 16 bytes an id and 64 KiB, however often an id is marked and however high it is."""
    ids = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**63 - 1, num_ids))
    rows = DirtyIds()
    for _ in range(num_batches):
        rows.mark(ids.repeat(3))
    assert rows.count == len(set(ids.tolist()))
    assert rows.size_bytes <= 16 * num_ids + 65_536
    rows.take()
    assert rows.size_bytes == 0


@pytest.mark.parametrize("bad", [10, 2**62])
def test_id_beyond_the_table_marks_nothing(bad: int) -> None:
    """An id that is not below `num_rows` is refused, and the good ids beside it are not marked."""
    rows = DirtyIds(10)
    with pytest.raises(IndexError, match=f"row {bad} is not below 10"):
        rows.mark(torch.tensor([1, bad]))
    with pytest.raises(IndexError, match=f"row {bad} is not below 10"):
        rows.discard(torch.tensor([bad]))
    assert rows.is_empty
    with pytest.raises(ValueError, match="-1"):
        DirtyIds(-1)


def test_rows_of_a_bitmap_are_added() -> None:
    """A bitmap of the same table is added, one of another is refused."""
    rows, bitmap = DirtyIds(100_000), DirtyRows(100_000)
    rows.mark(torch.tensor([5, 70_000]))
    bitmap.mark(torch.tensor([5, 6, 99_999]))
    rows.add(bitmap)
    assert rows.take().tolist() == [5, 6, 70_000, 99_999]
    assert bitmap.count == 3
    with pytest.raises(ValueError, match="cannot be added"):
        rows.add(DirtyRows(3))


def test_kind_is_chosen_by_the_size_of_a_bitmap() -> None:
    """A table whose bitmap would be larger than allowed has a set of ids."""
    assert isinstance(dirty_set(8 * 1000, max_bitmap_bytes=1000), DirtyRows)
    long = dirty_set(8 * 1001, max_bitmap_bytes=1000)
    assert isinstance(long, DirtyIds)
    assert long.num_rows == 8008


def test_numpy_loads_no_more_for_a_set() -> None:
    """What a trainer and its statistics ask of a set imports nothing, such as `numpy.ma` for `np.unique`."""
    program = """
import sys
import torch
from headrace.kernels.dirty_ids import DirtyIds
from headrace.kernels.dirty_rows import DirtyRows

before = set(sys.modules)
for rows in (DirtyIds(100), DirtyRows(100)):
    rows.mark(torch.tensor([7, 5, 7]))
    rows.discard(torch.tensor([5, 5]))
    assert (rows.count, rows.take().tolist()) == (1, [7])
print(*sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
