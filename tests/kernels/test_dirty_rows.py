"""The bitmap of changed rows, against a Python set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from headrace.kernels import dirty_rows
from headrace.kernels.dirty_rows import DirtyRows

# Around the edges of words (64 rows), blocks (4096 rows) and one past them.
SIZES = [0, 1, 2, 63, 64, 65, 127, 128, 4095, 4096, 4097, 8191, 8192, 10_000, 3 * 4096 + 63]


class DirtyRowsMachine(RuleBasedStateMachine):
    """Any sequence of marks and takes does what it does to a set."""

    sizes: Bundle[int] = Bundle("sizes")

    # Tables of more blocks than one pass looks at are larger than a test: the pass is shorter instead.
    @initialize(num_rows=st.sampled_from(SIZES), pass_blocks=st.sampled_from([1, 2, 4096]))
    def start(self, num_rows: int, pass_blocks: int) -> None:
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(dirty_rows, "_PASS_BLOCKS", pass_blocks)
        self.rows = DirtyRows(num_rows)
        self.model: set[int] = set()

    def teardown(self) -> None:
        if hasattr(self, "patches"):
            self.patches.undo()

    @rule(data=st.data(), dtype=st.sampled_from([torch.int32, torch.int64]))
    def mark(self, data: st.DataObject, dtype: torch.dtype) -> None:
        ids = data.draw(st.lists(st.integers(-3, self.rows.num_rows - 1), max_size=60))
        self.rows.mark(torch.tensor(ids, dtype=dtype))
        self.model.update(row for row in ids if row >= 0)

    @rule(data=st.data())
    def mark_run(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, self.rows.num_rows))
        end = min(self.rows.num_rows, start + data.draw(st.integers(0, 5000)))
        self.rows.mark(torch.arange(start, end).flip(0))
        self.model.update(range(start, end))

    @rule()
    def mark_all(self) -> None:
        self.rows.mark_all()
        self.model.update(range(self.rows.num_rows))

    @rule()
    def take_all(self) -> None:
        self.check(self.rows.take(), sorted(self.model))

    @rule(max_rows=st.one_of(st.integers(0, 200), st.integers(0, 12_000)))
    def take_some(self, max_rows: int) -> None:
        self.check(self.rows.take(max_rows), sorted(self.model)[:max_rows])

    @rule(max_rows=st.one_of(st.none(), st.integers(0, 200), st.integers(0, 12_000)), first_row=st.integers(0, 13_000))
    def take_from(self, max_rows: int | None, first_row: int) -> None:
        expected = [row for row in sorted(self.model) if row >= first_row][:max_rows]
        self.check(self.rows.take(max_rows, first_row=first_row), expected)

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        known = st.sampled_from(sorted(self.model)) if self.model else st.just(-1)
        ids = data.draw(st.lists(st.one_of(known, st.integers(-3, self.rows.num_rows - 1)), max_size=60))
        self.rows.discard(torch.tensor(ids, dtype=torch.int64))
        self.model.difference_update(ids)

    @rule()
    def clear(self) -> None:
        self.rows.clear()
        self.model.clear()

    @rule(data=st.data())
    def contains(self, data: st.DataObject) -> None:
        if self.rows.num_rows:
            ids = data.draw(st.lists(st.integers(0, self.rows.num_rows - 1), max_size=60))
            found = self.rows.contains(torch.tensor(ids, dtype=torch.int64))
            assert found.tolist() == [row in self.model for row in ids]

    def check(self, taken: torch.Tensor, expected: list[int]) -> None:
        assert taken.dtype == torch.int64
        assert taken.is_contiguous()
        assert taken.tolist() == expected
        self.model.difference_update(expected)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "rows"):
            assert self.rows.count == len(self.model)
            assert self.rows.is_empty == (not self.model)
            assert [row for part in self.rows.parts() for row in part.tolist()] == sorted(self.model)


DirtyRowsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=20)
TestDirtyRows = DirtyRowsMachine.TestCase


@given(
    seed=st.integers(0, 2**32),
    num_rows=st.integers(1, 2**34),
    num_ids=st.integers(0, 300),
    max_rows=st.integers(1, 50),
)
@settings(max_examples=30)
def test_parts_add_up_to_the_marks(seed: int, num_rows: int, num_ids: int, max_rows: int) -> None:
    """Taking a sparse set of a huge table in parts gives each marked row once, in order."""
    ids = np.random.default_rng(seed).integers(0, num_rows, num_ids)
    rows = DirtyRows(num_rows)
    rows.mark(torch.from_numpy(ids))
    taken: list[int] = []
    while not rows.is_empty:
        part = rows.take(max_rows).tolist()
        assert 1 <= len(part) <= max_rows
        taken += part
    assert taken == sorted(set(ids.tolist()))
    assert rows.take().tolist() == []


@pytest.mark.parametrize("bad", [10, 11, 2**31 + 1, 2**62])
def test_id_beyond_the_table_marks_nothing(bad: int) -> None:
    """A row id that is not below `num_rows` is refused, and the good ids beside it are not marked."""
    rows = DirtyRows(10)
    with pytest.raises(IndexError, match=f"row {bad} is not below 10"):
        rows.mark(torch.tensor([1, bad]))
    assert rows.is_empty
    assert rows.take().tolist() == []


def test_ids_beyond_31_bits() -> None:
    """Row ids are not cut to 32 bits anywhere."""
    rows = DirtyRows(2**33)
    ids = [5, 2**31 - 1, 2**31, 2**32 + 7, 2**33 - 1]
    rows.mark(torch.tensor(ids))
    assert rows.take().tolist() == ids


def test_marked_tensor_is_not_kept_or_changed() -> None:
    """The caller's ids are read, not sorted in place, and any shape and stride will do."""
    ids = torch.tensor([[9, 3], [7, 1]])
    rows = DirtyRows(10)
    rows.mark(ids.t())
    assert ids.tolist() == [[9, 3], [7, 1]]
    assert rows.take(2).tolist() == [1, 3]
    rows.mark(torch.arange(10)[::2])
    assert rows.take().tolist() == [0, 2, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("num_rows", SIZES)
def test_memory_is_one_bit_a_row(num_rows: int) -> None:
    """The bitmap takes one bit a row, rounded up to blocks of 4096, and one byte a block."""
    num_blocks = -(-num_rows // 4096)
    assert DirtyRows(num_rows).size_bytes == num_blocks * 513


def test_negative_size_is_refused() -> None:
    """A table cannot have a negative number of rows."""
    with pytest.raises(ValueError, match="-1"):
        DirtyRows(-1)


def test_add_is_the_union_and_leaves_the_other_as_it_was() -> None:
    """Rows of another set of the same table are added once; the other keeps its own."""
    ours, theirs = DirtyRows(100_000), DirtyRows(100_000)
    ours.mark(torch.tensor([0, 5, 70_000]))
    theirs.mark(torch.tensor([5, 6, 99_999]))
    ours.add(theirs)
    assert ours.count == 5
    assert ours.take().tolist() == [0, 5, 6, 70_000, 99_999]
    assert theirs.take().tolist() == [5, 6, 99_999]
    with pytest.raises(ValueError, match="cannot be added"):
        ours.add(DirtyRows(3))
