"""Sets of dirty rows, by bitmap and by ids, against a Python set."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.kernels import dirty_sets
from headrace.kernels.dirty_sets import VIRTUAL_ROWS, DirtyIds, DirtyRows, DirtySet, JointMarks, dirty_set

# Around the edges of words (64 rows) and blocks (4096 rows); and what only a set of ids can hold.
SIZES = [0, 1, 2, 63, 64, 65, 127, 128, 4095, 4096, 4097, 8191, 8192, 10_000, 3 * 4096 + 63]
HIGH_IDS = st.one_of(st.integers(2**40, 2**40 + 40), st.integers(0, 2**63 - 1), st.just(2**63 - 1))


class DirtySetMachine(RuleBasedStateMachine):
    """Any sequence of operations does to either kind of set what it does to a Python set."""

    # Tables of more blocks than one pass looks at are larger than a test: the pass is shorter instead.
    @initialize(num_rows=st.sampled_from(SIZES) | st.just(VIRTUAL_ROWS), pass_blocks=st.sampled_from([1, 2, 4096]))
    def start(self, num_rows: int, pass_blocks: int) -> None:
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(dirty_sets, "_PASS_BLOCKS", pass_blocks)
        self.num_rows = num_rows
        self.rows = self.new()
        self.model: set[int] = set()

    def new(self) -> DirtySet:
        return dirty_set(self.num_rows, max_bitmap_bytes=2**20)

    def teardown(self) -> None:
        if hasattr(self, "patches"):
            self.patches.undo()

    def draw_ids(self, data: st.DataObject, least: int = -3) -> list[int]:
        """Return ids that come again, and some that are dirty."""
        if self.num_rows <= least:
            return []
        kinds = [st.integers(least, min(self.num_rows - 1, 20_000))]
        kinds += [HIGH_IDS] if self.num_rows == VIRTUAL_ROWS else []
        kinds += [st.sampled_from(sorted(self.model))] if self.model else []
        return data.draw(st.lists(st.one_of(kinds), max_size=60))

    @rule(data=st.data(), operation=st.sampled_from(["mark", "discard"]))
    def change(self, data: st.DataObject, operation: str) -> None:
        ids = self.draw_ids(data)
        is_small = data.draw(st.booleans()) and all(row < 2**31 for row in ids)
        getattr(self.rows, operation)(torch.tensor(ids, dtype=torch.int32 if is_small else torch.int64))
        valid = {row for row in ids if row >= 0}
        self.model = self.model | valid if operation == "mark" else self.model - valid

    @rule(data=st.data(), num_ids=st.integers(0, 5000))
    def mark_run(self, data: st.DataObject, num_ids: int) -> None:
        start = data.draw(st.integers(0, min(self.num_rows, 2**62)))
        end = min(self.num_rows, start + num_ids)
        self.rows.mark(torch.arange(start, end).flip(0))
        self.model.update(range(start, end))

    @precondition(lambda self: isinstance(self.rows, DirtyRows))
    @rule()
    def mark_all(self) -> None:
        self.rows.mark_all()
        self.model.update(range(self.num_rows))

    @rule(max_rows=st.one_of(st.none(), st.integers(0, 200), st.integers(0, 12_000)), data=st.data())
    def take(self, max_rows: int | None, data: st.DataObject) -> None:
        first_row = data.draw(st.one_of(st.just(0), st.integers(0, 13_000), HIGH_IDS))
        taken = self.rows.take(max_rows, first_row=first_row)
        expected = [row for row in sorted(self.model) if row >= first_row][:max_rows]
        assert (taken.dtype, taken.is_contiguous(), taken.tolist()) == (torch.int64, True, expected)
        self.model.difference_update(expected)

    @rule()
    def clear(self) -> None:
        self.rows.clear()
        self.model.clear()

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        ids, theirs = self.draw_ids(data, 0), self.new()
        theirs.mark(torch.tensor(ids, dtype=torch.int64))
        self.rows.add(theirs)  # type: ignore[arg-type]
        assert theirs.count == len(set(ids))
        self.model.update(ids)

    @rule(data=st.data())
    def contains(self, data: st.DataObject) -> None:
        ids = self.draw_ids(data, 0)
        found = self.rows.contains(torch.tensor(ids, dtype=torch.int64))
        assert found.tolist() == [row in self.model for row in ids]

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "rows"):
            assert self.rows.count == len(self.model)
            assert self.rows.is_empty == (not self.model)
            assert [row for part in self.rows.parts() for row in part.tolist()] == sorted(self.model)


DirtySetMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=20)
TestDirtySets = DirtySetMachine.TestCase


def test_marks() -> None:
    """The caller's ids are read, not sorted in place, and any shape and stride will do.

    An id that only its neighbour's rows would cover is an error of joint marks, and marks neither."""
    ids = torch.tensor([[9, 3], [7, 1]])
    rows = DirtyRows(10)
    rows.mark(ids.t())
    assert ids.tolist() == [[9, 3], [7, 1]]
    assert rows.take(2).tolist() == [1, 3]
    few = DirtyIds(10)
    few.mark(torch.tensor([5, 7]))
    few.add(rows)  # a bitmap of the same table
    assert few.take().tolist() == [5, 7, 9] and rows.count == 2
    rows.mark(torch.arange(10)[::2])
    assert rows.take().tolist() == [0, 2, 4, 6, 7, 8, 9]
    sets, joint = [DirtyRows(10), DirtyRows(5000)], JointMarks()
    joint.mark(torch.tensor([3, 4000]), sets, [0, 1, 2])
    with pytest.raises(IndexError, match="row 10 is not below 10"):
        joint.mark(torch.tensor([10, 7]), sets, [0, 1, 2])
    assert [each.take().tolist() for each in sets] == [[3], [4000]]


@given(seed=st.integers(0, 2**32), num_ids=st.integers(0, 20_000), num_batches=st.integers(1, 10))
@settings(max_examples=15)
def test_memory(seed: int, num_ids: int, num_batches: int) -> None:
    """A bitmap takes one bit a row, in blocks of 4096, and a byte a block. A set of ids takes at most 16 bytes an id
    and 64 KiB, however often an id is marked and however high it is; a table has one where its bitmap is too large."""
    for num_rows in SIZES:
        assert DirtyRows(num_rows).size_bytes == -(-num_rows // 4096) * 513
    assert isinstance(dirty_set(8 * 1000, max_bitmap_bytes=1000), DirtyRows)
    rows = dirty_set(8 * 1001, max_bitmap_bytes=1000)
    assert isinstance(rows, DirtyIds) and rows.num_rows == 8008
    ids, rows = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**63 - 1, num_ids)), DirtyIds()
    for _ in range(num_batches):
        rows.mark(ids.repeat(3))
    assert rows.count == len(set(ids.tolist()))
    assert rows.size_bytes <= 16 * num_ids + 65_536
    rows.take()
    assert rows.size_bytes == 0


def test_numpy_loads_no_more_for_a_set() -> None:
    """What a trainer and its statistics ask of a set imports nothing, such as `numpy.ma` for `np.unique`."""
    program = """
import sys
import torch
from headrace.kernels.dirty_sets import DirtyIds, DirtyRows

before = set(sys.modules)
for rows in (DirtyIds(100), DirtyRows(100)):
    rows.mark(torch.tensor([7, 5, 7]))
    rows.discard(torch.tensor([5, 5]))
    assert (rows.count, rows.take().tolist()) == (1, [7])
print(*sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("kind", [DirtyRows, DirtyIds])
@pytest.mark.parametrize("bad", [10, 11, 2**31 + 1, 2**62])
def test_an_id_beyond_the_table_changes_nothing(kind: type[DirtyRows | DirtyIds], bad: int) -> None:
    """An id that is not below `num_rows` is refused, and the good ids beside it are not marked."""
    rows = kind(10)
    for change in (rows.mark, rows.discard):
        with pytest.raises(IndexError, match=f"row {bad} is not below 10"):
            change(torch.tensor([1, bad]))
    assert rows.is_empty
    with pytest.raises(ValueError, match="-1"):
        kind(-1)
    with pytest.raises(ValueError, match="cannot be added"):
        rows.add(DirtyRows(3))


@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=6),
    num_ids=st.integers(0, 500),
)
@settings(max_examples=40)
def test_joint_marks_are_those_of_each_set(seed: int, sizes: list[int], num_ids: int) -> None:
    """Sets that are marked in one pass have the rows that each would have alone, and work as before."""
    rng = np.random.default_rng(seed)
    sets, alone, joint = [DirtyRows(size) for size in sizes], [DirtyRows(size) for size in sizes], JointMarks()
    for round_ in range(4):
        if round_ == 2:  # one becomes another object, as when its table leaves a device
            moved = DirtyRows(sizes[0])
            moved.add(sets[0])
            sets[0] = moved
        order = rng.integers(0, len(sizes), rng.integers(1, 2 * len(sizes) + 1))  # some not at all, some twice
        cuts = np.sort(rng.integers(0, num_ids + 1, order.size - 1))
        starts = [0, *cuts.tolist(), num_ids]
        lengths = np.diff(starts)
        ids = rng.integers(0, np.repeat(np.array(sizes)[order], lengths)).astype(np.int64)
        if round_ == 3:
            ids[rng.random(num_ids) < 0.1] = -1
        joint.mark(torch.from_numpy(ids), [sets[at] for at in order], starts)
        for at, start, end in zip(order, starts, starts[1:], strict=False):
            alone[at].mark(torch.from_numpy(ids[start:end]))
        taken = int(rng.integers(0, len(sizes)))
        assert sets[taken].take(7).tolist() == alone[taken].take(7).tolist()
        assert [each.count for each in sets] == [each.count for each in alone]
    for mine, its in zip(sets, alone, strict=True):
        assert mine.take().tolist() == its.take().tolist()
