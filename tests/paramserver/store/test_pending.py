"""Pending rows: coalescing and the overlay, against a dict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from row_batches import SPEC, Model, make_batch, make_delta

from headrace.paramserver.store import pending as pending_module
from headrace.paramserver.store.pending import Batch, CoalescedRun, Part, PendingRows, Run, coalesce, coalesce_all
from headrace.paramserver.store.row_reader import RowsRead, ShardSource, read_rows, settle
from headrace.schemas.row_keys import encode_keys
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import ColumnShard, DType, StateKind, StateSpec, TableSpec

LAYOUT = RecordLayout(SPEC, SPEC.whole)
ROWS = [0, 1, 2, 3, 5, 8, 2**40, 2**63 - 1]


class FakeStore(dict[bytes, bytes]):
    """The part of a store that readers and the applier use."""

    def read(self, keys: list[bytes]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def write(self, run: Run | CoalescedRun) -> None:
        # In pieces, as the store does.
        for start in range(0, run.row_ids.size, 3):
            end = min(start + 3, run.row_ids.size)
            keys = encode_keys(run.table_id, run.layout.shard, run.row_ids[start:end])
            self.update(zip(keys, run.layout.values_of(run.records_at(slice(start, end))), strict=True))


def parts_of(*batches: Batch) -> list[Part]:
    return [Part.of_delta(delta, batch) for batch in batches for delta in batch.deltas]


def read(pending: PendingRows, store: FakeStore, rows: Sequence[int] = ROWS) -> RowsRead:
    source = ShardSource(LAYOUT, pending.snapshot(), True)
    return read_rows(1, SPEC, [source], np.array(rows, np.int64), store.read, seq=0)


def test_coalescing_keeps_the_newest_of_each_row_sorted() -> None:
    """Of many updates to a row only the last is left, ids ascending, no matter what is deleted meanwhile."""
    batches = [
        make_batch(1, [5, 1, 9]),
        make_batch(2, [1], deleted=[9, 3]),
        make_batch(3, [3, 7]),
    ]
    run = coalesce(1, parts_of(*batches)).copied()
    assert run.row_ids.tolist() == [1, 3, 5, 7, 9]
    assert run.records["step"].tolist() == [2, 3, 1, 3, 2]
    assert run.records["flags"].tolist() == [0, 0, 0, 0, 1]
    assert run.is_conditional is None
    store, model = FakeStore(), Model()
    store.write(run)
    for batch in batches:
        model.apply(batch)
    model.check(ROWS, read(PendingRows(1, LAYOUT), store))


def test_a_part_of_nothing_but_deletes() -> None:
    """Deletes need no columns."""
    run = coalesce(1, parts_of(make_batch(4, deleted=[6, 2]))).copied()
    assert run.row_ids.tolist() == [2, 6]
    assert run.records["flags"].tolist() == [1, 1]


def test_copied_runs_do_not_share_memory_with_frames() -> None:
    """Until then a run's rows are those of the frames; afterwards frames may be reused."""
    frame = bytearray(64)
    delta = make_delta([1], 1)
    delta.columns["weights"] = memoryview(frame)[:16]
    batch = make_batch(1, deltas=(delta,))
    coalesced = coalesce(1, parts_of(batch))
    run = coalesced.copied()
    before = run.records.tobytes()
    assert coalesced.records_at(slice(None)).tobytes() == before
    frame[:] = b"\xff" * 64
    assert run.records.tobytes() == before
    assert coalesced.records_at(np.array([0])).tobytes() != before


batch_lists = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(ROWS), st.booleans(), max_size=6),
        st.booleans(),
        st.tuples(st.integers(1, 2), st.integers(0, 3)),
    ),
    max_size=12,
)


def batches_from(drawn: Iterable[tuple[dict[int, bool], bool, tuple[int, int]]]) -> list[Batch]:
    return [
        make_batch(
            seq,
            [row for row, is_deleted in rows.items() if not is_deleted],
            deleted=[row for row, is_deleted in rows.items() if is_deleted],
            is_conditional=is_conditional,
            version=version,
        )
        for seq, (rows, is_conditional, version) in enumerate(drawn, 1)
        if rows
    ]


@given(batch_lists, st.data())
def test_any_split_into_windows_ends_in_the_same_rows(drawn: Any, data: st.DataObject) -> None:
    """Coalesced in windows of any sizes, conditional batches among them, as if one by one."""
    batches = batches_from(drawn)
    store, model = FakeStore(), Model()
    left = batches
    while left:
        size = data.draw(st.integers(1, len(left)))
        run = coalesce(1, parts_of(*left[:size]))
        assert run.size_bytes == run.row_ids.size * (LAYOUT.size_bytes + 8)
        store.write(settle(run, store.read))
        left = left[size:]
    for batch in batches:
        model.apply(batch)
    model.check(ROWS, read(PendingRows(1, LAYOUT), store))


@given(batch_lists, st.data())
def test_replaying_any_suffix_changes_nothing(drawn: Any, data: st.DataObject) -> None:
    """After a crash, batches that are in the store already may be applied to it once more."""
    batches = batches_from(drawn)
    store, model = FakeStore(), Model()
    start = data.draw(st.integers(0, len(batches)))
    for batch in [*batches, *batches[start:]]:
        store.write(settle(coalesce(1, parts_of(batch)), store.read))
    for batch in batches:
        model.apply(batch)
    model.check(ROWS, read(PendingRows(1, LAYOUT), store))


class OverlayMachine(RuleBasedStateMachine):
    """Adds, applies and reads in any order; a read shows the newest acked value of every row."""

    @initialize()
    def start(self) -> None:
        self.pending = PendingRows(1, LAYOUT)
        self.store = FakeStore()
        self.model = Model()
        self.seq = 0
        self.parts: list[Part] = []

    @rule(
        rows=st.dictionaries(st.sampled_from(ROWS), st.booleans(), min_size=1),
        is_conditional=st.booleans(),
        version=st.tuples(st.integers(1, 2), st.integers(0, 3)),
    )
    def add(self, rows: dict[int, bool], is_conditional: bool, version: tuple[int, int]) -> None:
        self.seq += 1
        batch = make_batch(
            self.seq,
            [row for row, is_deleted in rows.items() if not is_deleted],
            deleted=[row for row, is_deleted in rows.items() if is_deleted],
            is_conditional=is_conditional,
            version=version,
        )
        for part in parts_of(batch):
            self.pending.add(part)
            self.parts.append(part)
        self.model.apply(batch)

    @rule(
        drawn=st.lists(
            st.tuples(
                st.dictionaries(st.sampled_from(ROWS), st.booleans(), min_size=1, max_size=3),
                st.booleans(),
                st.tuples(st.integers(1, 2), st.integers(0, 3)),
            ),
            min_size=2,
            max_size=9,
        )
    )
    def add_many_before_the_next_read(self, drawn: list[tuple[dict[int, bool], bool, tuple[int, int]]]) -> None:
        for rows, is_conditional, version in drawn:
            self.add(rows, is_conditional, version)

    @precondition(lambda self: self.parts)
    @rule(data=st.data(), forget=st.booleans())
    def apply(self, data: st.DataObject, forget: bool) -> None:
        # Rows are in RocksDB a while before the overlay forgets them: to write them twice is the same as to wait.
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


OverlayMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestOverlay = OverlayMachine.TestCase


def test_a_snapshot_outlives_what_it_shows() -> None:
    """A reader whose rows are applied and forgotten meanwhile reads them all the same."""
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


SPLIT = TableSpec(
    fqn="split",
    num_rows=0,
    dim=6,
    dtype=DType.FLOAT32,
    states=(
        StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),
        StateSpec(name="exp", kind=StateKind.POINTWISE, dtype=DType.FLOAT16),
    ),
)
SHARDS = [ColumnShard(offset=0, width=6), ColumnShard(offset=0, width=2), ColumnShard(offset=2, width=4)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(SHARDS), st.integers(0, 3), st.tuples(st.integers(1, 2), st.integers(0, 2)), st.booleans()
        ),
        max_size=10,
    ),
    st.integers(0, 10),
)
def test_column_shards_are_put_together(
    writes: list[tuple[ColumnShard, int, tuple[int, int], bool]], num_applied: int
) -> None:
    """In each column of a row the newest record that covers it wins, whole-table ones among them."""
    rows = {shard: PendingRows(1, RecordLayout(SPLIT, shard)) for shard in SHARDS}
    store = FakeStore()
    newest: dict[tuple[ColumnShard, int], tuple[tuple[int, int], int, bool]] = {}
    for seq, (shard, row, version, is_deleted) in enumerate(writes, 1):
        ids = {"row_ids": [], "deleted": [row]} if is_deleted else {"row_ids": [row]}
        delta = make_delta(tag=seq, spec=SPLIT, shard=shard, **ids)  # type: ignore[arg-type]
        part = Part.of_delta(delta, make_batch(seq, deltas=(delta,), version=version))
        if seq <= num_applied:
            store.write(coalesce(1, [part]))
            # The log's order decides within a column shard, so what pends must be newer there.
        else:
            rows[shard].add(part)
        newest[shard, row] = (version, seq, is_deleted)
    sources = [ShardSource(of.layout, of.snapshot(), True) for of in rows.values()]
    result = read_rows(1, SPLIT, sources, np.arange(4), store.read, seq=3)
    assert result.seq == 3
    for row in range(4):
        records = sorted(
            (version, -shard.offset, -shard.width, seq, shard, is_deleted)
            for (shard, of_row), (version, seq, is_deleted) in newest.items()
            if of_row == row
        )
        weights, sums, exps = np.zeros(6, "<f4"), np.zeros(1, "<f4"), np.zeros(6, "<f2")
        live = np.zeros(6, bool)
        for _, _, _, seq, shard, is_deleted in records:
            columns = make_delta([row], seq, spec=SPLIT, shard=shard).columns
            covered = slice(shard.offset, shard.offset + shard.width)
            weights[covered] = 0 if is_deleted else np.frombuffer(columns["weights"], "<f4")
            exps[covered] = 0 if is_deleted else np.frombuffer(columns["state:exp"], "<f2")
            if shard.offset == min(shard.offset for *_, shard, _ in records):  # the copy of the first column
                sums[:] = 0 if is_deleted else np.frombuffer(columns["state:sum"], "<f4")
            live[covered] = not is_deleted
        assert result.weights[row].tolist() == weights.tolist()
        assert result.states["exp"][row].tolist() == exps.tolist()
        assert result.states["sum"][row].tolist() == sums.tolist()
        assert result.presence[row] == (0 if not records else 1 if live.any() else 2)
        assert (result.epochs[row], result.steps[row]) == (records[-1][0] if records else (0, 0))


COLUMN_SHARDS = [(1, SPEC, SPEC.whole), (2, SPEC, SPEC.whole), *((3, SPLIT, shard) for shard in SHARDS[1:])]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(range(len(COLUMN_SHARDS))),
            st.dictionaries(st.sampled_from(ROWS), st.booleans(), min_size=1, max_size=6),
            st.booleans(),
        ),
        max_size=16,
    ),
    st.sampled_from([1, 4, 8, 1024]),
)
def test_column_shards_coalesced_together_are_what_each_is_by_itself(
    drawn: list[tuple[int, dict[int, bool], bool]], few_entries: int
) -> None:
    """Whether column shards have few entries or many, are laid out alike or not, or have conditional rows."""
    pending = [PendingRows(table_id, RecordLayout(spec, shard)) for table_id, spec, shard in COLUMN_SHARDS]
    parts: dict[PendingRows, list[Part]] = {}
    for seq, (number, rows, is_conditional) in enumerate(drawn, 1):
        table_id, spec, shard = COLUMN_SHARDS[number]
        delta = make_delta(
            [row for row, is_deleted in rows.items() if not is_deleted],
            seq,
            deleted=[row for row, is_deleted in rows.items() if is_deleted],
            spec=spec,
            shard=shard,
            table_id=table_id,
        )
        batch = make_batch(seq, deltas=(delta,), is_conditional=is_conditional)
        parts.setdefault(pending[number], []).append(Part.of_delta(delta, batch))
    with mock.patch.object(pending_module, "_FEW_ENTRIES", few_entries):
        found = {(run.table_id, run.layout.shard): run.copied() for run in coalesce_all(parts)}
    assert len(found) == len(parts)
    for rows_of, of_rows in parts.items():
        run, wanted = found[rows_of.table_id, rows_of.layout.shard], coalesce(rows_of.table_id, of_rows).copied()
        assert run.row_ids.tolist() == wanted.row_ids.tolist()
        assert run.records.tobytes() == wanted.records.tobytes()
        flags = [None if of.is_conditional is None else of.is_conditional.tolist() for of in (run, wanted)]
        assert flags[0] == flags[1]


def test_a_row_is_not_taken_for_the_next_tables_row_of_the_same_id() -> None:
    """The last row of one column shard and the first of the next, coalesced together, are two."""
    parts = {}
    for table_id in (1, 2):
        delta = make_delta([7], table_id, table_id=table_id)
        parts[PendingRows(table_id, LAYOUT)] = [Part.of_delta(delta, make_batch(table_id, deltas=(delta,)))]
    runs = coalesce_all(parts)
    assert [(run.table_id, run.row_ids.tolist(), run.copied().records["step"].tolist()) for run in runs] == [
        (1, [7], [1]),
        (2, [7], [2]),
    ]


def test_reading_an_unknown_shard_finds_nothing() -> None:
    """Rows of a table that nothing was written to are missing, and zero."""
    source = ShardSource(LAYOUT, None, False)
    result = read_rows(1, SPEC, [source], np.array([3, 1]), lambda keys: pytest.fail("nothing is stored"), seq=0)
    assert result.presence.tolist() == [0, 0]
    assert not result.weights.any()
