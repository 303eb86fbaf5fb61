"""Reads of rows in several gets and from several column shards."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from row_batches import LAYOUT, SHARDS, SPEC, SPLIT, FakeStore, make_batch, make_delta

from headrace.paramserver.store import row_reader
from headrace.paramserver.store.coalescing import coalesce
from headrace.paramserver.store.deltas import Part
from headrace.paramserver.store.memtable import Memtable, PendingRows, ShardSource
from headrace.paramserver.store.row_reader import read_rows, settle
from headrace.schemas.row_records import RecordLayout, encode_keys
from headrace.schemas.tables import ColumnShard


class _Stored:
    """The pairs of a RocksDB, and the number of keys of each read."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.asked: list[int] = []

    def put(self, ids: Sequence[int], step: int, *, deleted: Sequence[int] = ()) -> None:
        batch = make_batch(1, version=(1, step))
        run = coalesce(1, [Part.of_delta(make_delta(ids, step, deleted=deleted), batch)]).copied()
        keys = encode_keys(1, SPEC.whole, run.row_ids)
        self.values.update(zip(keys, (record.tobytes() for record in run.records), strict=True))

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.asked.append(len(keys))
        return [self.values.get(key) for key in keys]


@pytest.fixture(params=[1, 3, 4, 2048])
def rows_per_get(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Read this many rows at a time."""
    number: int = request.param
    monkeypatch.setattr(row_reader, "_ROWS_PER_GET", number)
    return number


def test_no_row_that_is_brought_in_replaces_a_newer_one(rows_per_get: int) -> None:
    """Settling keeps conditional rows that are as new as the stored ones, and all unconditional rows."""
    stored = _Stored()
    stored.put([1, 4, 9], 7, deleted=[6])
    stored.put([2, 5, 10], 6)
    stored.put([3, 7], 5)
    brought = Part.of_delta(make_delta(range(12), 6), make_batch(2, version=(1, 6), is_conditional=True))
    in_order = Part.of_delta(make_delta([9, 20], 3), make_batch(3, version=(1, 3)))
    kept = settle(coalesce(1, [brought, in_order]), stored.get)
    assert kept.row_ids.tolist() == [0, 2, 3, 5, 7, 8, 9, 10, 11, 20]
    assert kept.is_conditional is None
    steps = dict(zip(kept.row_ids.tolist(), kept.records_at(slice(None))["step"].tolist(), strict=True))
    assert steps == {0: 6, 2: 6, 3: 6, 5: 6, 7: 6, 8: 6, 9: 3, 10: 6, 11: 6, 20: 3}
    assert sum(stored.asked) == 11 and max(stored.asked) <= rows_per_get  # not for those that came in order


def test_every_row_that_is_asked_for_is_read(rows_per_get: int) -> None:
    """Rows come in the requested order, repeated, missing and deleted ones included."""
    stored = _Stored()
    stored.put(range(0, 20, 2), 4, deleted=[7])
    ids = np.array([19, 4, 7, 0, 4, 18, 2, 6, 30, 16], np.int64)
    rows = read_rows(1, SPEC, [ShardSource(LAYOUT, None, True)], ids, stored.get, seq=9)
    assert rows.presence.tolist() == [0, 1, 2, 1, 1, 1, 1, 1, 0, 1]
    assert rows.steps.tolist() == [0, 4, 4, 4, 4, 4, 4, 4, 0, 4]
    is_there = rows.presence == 1
    weights = np.frombuffer(make_delta(ids[is_there], 4).columns["weights"], "<f4").reshape(-1, SPEC.dim)
    assert rows.weights[is_there].tobytes() == weights.tobytes()
    assert sum(stored.asked) == 10 and max(stored.asked) <= rows_per_get


def test_of_a_row_that_is_brought_in_and_the_stored_one_the_newer_is_read(rows_per_get: int) -> None:
    """A pending conditional row is read unless the stored row is newer."""
    stored, memtable = _Stored(), Memtable()
    stored.put([1, 2, 3, 5], 6)
    for step, ids in ((5, [1, 4]), (6, [2]), (7, [3])):
        brought = make_delta(ids, 10 + step)
        memtable.add(make_batch(step, version=(1, step), is_conditional=True, deltas=(brought,)))
    sources = memtable.sources_of(1, SPEC, [SPEC.whole])
    rows = read_rows(1, SPEC, sources, np.arange(7), stored.get, seq=9)
    assert rows.presence.tolist() == [0, 1, 1, 1, 1, 1, 0]
    assert rows.steps.tolist() == [0, 6, 6, 7, 5, 6, 0]
    written = [(1, 6), (2, 16), (3, 17), (4, 15), (5, 6)]
    weights = b"".join(bytes(make_delta([row], tag).columns["weights"]) for row, tag in written)
    assert rows.weights[1:6].tobytes() == weights


def test_a_row_costs_the_same_however_many_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a hundred times the rows takes about a hundred times as long, not 250 times."""
    monkeypatch.setattr(row_reader, "_ROWS_PER_GET", 64)
    sources = [ShardSource(LAYOUT, None, True)]

    def seconds_of(num_rows: int) -> float:
        begin_s = time.thread_time()
        read_rows(1, SPEC, sources, np.arange(num_rows), lambda keys: [None] * len(keys), seq=1)
        return time.thread_time() - begin_s

    # One of a few tries: what a busy machine does to its caches and clocks is not what is measured.
    assert any(seconds_of(400_000) < 250 * min(seconds_of(4_000) for _ in range(5)) for _ in range(4))


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
    """In each column of a row the newest record that covers it wins."""
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


def test_reading_an_unknown_shard_finds_nothing() -> None:
    """Rows of a table without any writes are missing and zero."""
    source = ShardSource(LAYOUT, None, False)
    result = read_rows(1, SPEC, [source], np.array([3, 1]), lambda keys: pytest.fail("nothing is stored"), seq=0)
    assert result.presence.tolist() == [0, 0]
    assert not result.weights.any()
