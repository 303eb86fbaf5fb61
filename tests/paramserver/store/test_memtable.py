"""The memtable: parts that pend, snapshots of them, and sources for readers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from row_batches import (
    LAYOUT,
    ROWS,
    SPEC,
    UPDATES,
    FakeStore,
    Model,
    make_batch,
    make_update,
    parts_of,
    read,
)

from headrace.paramserver.store import row_reader
from headrace.paramserver.store.coalescing import EntryIndex, coalesce
from headrace.paramserver.store.deltas import Part
from headrace.paramserver.store.memtable import PendingRows, ShardSource
from headrace.paramserver.store.row_reader import read_rows


class MemtableMachine(RuleBasedStateMachine):
    """Adds, applies and reads in any order; a read shows the newest acked value of every row."""

    @initialize(rows_per_get=st.sampled_from([1, 3, 2048]))
    def start(self, rows_per_get: int) -> None:
        self.patch = mock.patch.object(row_reader, "_ROWS_PER_GET", rows_per_get)
        self.patch.start()
        self.pending = PendingRows(1, LAYOUT)
        self.store = FakeStore()
        self.model = Model()
        self.seq = 0
        self.parts: list[Part] = []

    @rule(updates=st.lists(UPDATES, min_size=1, max_size=9))
    def add(self, updates: list[Any]) -> None:
        for update in updates:
            self.seq += 1
            batch = make_update(self.seq, update)
            for part in parts_of(batch):
                self.pending.add(part)
                self.parts.append(part)
            self.model.apply(batch)

    @precondition(lambda self: self.parts)
    @rule(data=st.data(), forget=st.booleans())
    def apply(self, data: st.DataObject, forget: bool) -> None:
        # Rows are in RocksDB a while before the memtable forgets them: to write them twice is the same as to wait.
        count = data.draw(st.integers(1, len(self.parts)))
        self.store.write(coalesce(1, self.parts[:count]))
        if forget:
            self.pending.applied(count)
            del self.parts[:count]

    @rule()
    def read_pending_part_by_part(self) -> None:
        # Builds some of the trees, which later steps prune.
        for row in ROWS:
            self.model.check([row], read(self.pending, self.store, [row]))

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.stop()

    @invariant()
    def reads_are_right(self) -> None:
        if hasattr(self, "pending"):
            rows = [*ROWS, 77, 1, 1]
            self.model.check(rows, read(self.pending, self.store, rows))


MemtableMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestMemtable = MemtableMachine.TestCase


def test_a_snapshot_outlives_what_it_shows() -> None:
    """A snapshot still has rows that are applied and forgotten meanwhile."""
    pending, store, model = PendingRows(1, LAYOUT), FakeStore(), Model()
    batches = [make_batch(seq, [seq % 3, 10 + seq]) for seq in range(1, 20)]
    for batch in batches:
        pending.add(parts_of(batch)[0])
        model.apply(batch)
    snapshot = pending.snapshot()
    for size in (3, 7, 9):
        store.write(coalesce(1, parts_of(*batches[:size])))
        del batches[:size]
        pending.applied(size)
    assert pending.snapshot() is None
    rows = list(range(40))
    source = ShardSource(LAYOUT, snapshot, False)
    model.check(rows, read_rows(1, SPEC, [source], np.array(rows), store.read, seq=0))


def test_a_read_builds_each_tree_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading n parts looks at about log n indexes, builds none of them twice, and none below the ones it needs."""
    built: list[int] = []
    of_parts = EntryIndex.of_parts

    def count(parts: list[Part], first: int) -> EntryIndex:
        built.append(len(parts))
        return of_parts(parts, first)

    monkeypatch.setattr(EntryIndex, "of_parts", count)
    pending = PendingRows(1, LAYOUT)
    num_pending = 0
    for num_parts, wanted in ((100, [4, 32, 64]), (100, []), (104, [4])):
        for seq in range(num_pending + 1, num_parts + 1):
            pending.add(parts_of(make_batch(seq, [seq]))[0])
        snapshot = pending.snapshot()
        assert snapshot is not None
        assert len([*snapshot.find(np.arange(1, num_parts + 1))]) == 3  # 100 = 64 + 32 + 4, 104 = 64 + 32 + 8
        assert built == wanted
        built.clear()
        num_pending = num_parts
