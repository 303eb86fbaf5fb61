"""The memtable: parts that pend, snapshots of them, and sources for readers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
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
    make_delta,
    make_update,
    parts_of,
    read,
)

from headrace.paramserver.store.coalescing import coalesce
from headrace.paramserver.store.deltas import Part
from headrace.paramserver.store.memtable import Memtable, PendingRows, PendingSnapshot, ShardSource
from headrace.paramserver.store.row_reader import read_rows, settle
from headrace.schemas.row_records import CLAIMS
from headrace.schemas.tables import ColumnShard

LEFT, RIGHT = ColumnShard(offset=0, width=2), ColumnShard(offset=2, width=2)


def _found(snapshot: PendingSnapshot | None, ids: list[int]) -> list[int]:
    assert snapshot is not None
    return sorted({ids[at] for places, _, _ in snapshot.find(np.array(ids)) for at in places.tolist()})


def test_a_batch_pends_by_table_and_column_shard_with_its_claims() -> None:
    """Each delta's rows are found where they belong and nowhere else, and their identities beside them."""
    memtable = Memtable()
    deltas = (make_delta([1, 2], 7, shard=LEFT), make_delta([2, 3], 7, shard=RIGHT), make_delta([4], 7, table_id=2))
    parts = memtable.add(make_batch(1, deltas=deltas))
    assert [(rows.table_id, rows.layout is CLAIMS, part.ids.size) for rows, part in parts] == [
        *((1, False, 2), (1, True, 2), (1, False, 2), (1, True, 2)),
        *((2, False, 1), (2, True, 1)),
    ]
    left, right = memtable.sources_of(1, SPEC, [])
    assert (left.layout.shard, right.layout.shard) == (LEFT, RIGHT)
    assert (_found(left.snapshot, [1, 2, 3, 4]), _found(right.snapshot, [1, 2, 3, 4])) == ([1, 2], [2, 3])
    assert _found(memtable.claims_source(1).snapshot, [1007, 2007, 3007, 4007]) == [1007, 2007, 3007]
    assert _found(memtable.claims_source(2).snapshot, [1007, 4007]) == [4007]


def test_sources_are_what_pends_and_what_is_stored_each_once() -> None:
    """A source says whether RocksDB may have its rows; a table without rows has one source of whole rows."""
    memtable = Memtable()
    memtable.add(make_batch(1, deltas=(make_delta([1], 1, shard=LEFT), make_delta([1], 1, shard=RIGHT))))
    found = [
        (s.layout.shard, s.is_stored, s.snapshot is None) for s in memtable.sources_of(1, SPEC, [RIGHT, SPEC.whole])
    ]
    assert found == [(RIGHT, True, False), (SPEC.whole, True, True), (LEFT, False, False)]
    (empty,) = memtable.sources_of(3, SPEC, [])
    assert (empty.layout.shard, empty.is_stored, empty.snapshot) == (SPEC.whole, False, None)
    assert memtable.claims_source(3).snapshot is None


def test_a_delta_without_rows_pends_nowhere() -> None:
    """Neither an empty delta nor a table without identities leaves anything to look at."""
    plain = dataclasses.replace(SPEC, fqn="plain", has_identities=False)
    memtable = Memtable()
    assert memtable.add(make_batch(1, deltas=(make_delta([], 1), make_delta([], 1, spec=plain, table_id=2)))) == []
    ((rows, part),) = memtable.add(make_batch(2, deltas=(make_delta([5], 1, spec=plain, table_id=2),)))
    assert (rows.table_id, part.ids.tolist()) == (2, [5])


class MemtableMachine(RuleBasedStateMachine):
    """Adds, applies and reads in any order; a read shows the newest acked value of every row."""

    @initialize()
    def start(self) -> None:
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
        self.store.write(settle(coalesce(1, self.parts[:count]), self.store.read))
        if forget:
            self.pending.applied(count)
            del self.parts[:count]

    @rule()
    def read_pending_part_by_part(self) -> None:
        # Builds some of the trees, which later steps prune.
        for row in ROWS:
            self.model.check([row], read(self.pending, self.store, [row]))

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
    # The reader has put the trees of parts that are gone back; nothing of them is left after the next window.
    pending.add(parts_of(make_batch(20, [1]))[0])
    pending.applied(1)
    assert not pending._nodes


def test_a_read_builds_each_tree_once() -> None:
    """Reading n parts looks at about log n indexes, and builds none of them twice."""
    pending = PendingRows(1, LAYOUT)
    for seq in range(1, 101):
        pending.add(parts_of(make_batch(seq, [seq]))[0])
    snapshot = pending.snapshot()
    assert snapshot is not None
    first = [at.tolist() for at, _, _ in snapshot.find(np.arange(1, 101))]
    nodes = dict(pending._nodes)
    assert len(nodes) == 3  # and none below them, whose building would be most of what the read costs
    assert [at.tolist() for at, _, _ in snapshot.find(np.arange(1, 101))] == first
    assert all(pending._nodes[key] is node for key, node in nodes.items())
    assert len(first) == 3  # 100 = 64 + 32 + 4
    for seq in range(101, 105):
        pending.add(parts_of(make_batch(seq, [seq]))[0])
    snapshot = pending.snapshot()
    assert snapshot is not None
    assert len([at for at, _, _ in snapshot.find(np.arange(1, 105))]) == 3  # 104 = 64 + 32 + 8
    assert pending._nodes.keys() == {*nodes, (2, 25), (3, 12)}  # the last 4, beside those that were there
