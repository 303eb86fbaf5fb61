"""Reads of rows in several gets and from several column shards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from row_batches import LAYOUT, SHARDS, SPEC, SPLIT, FakeStore, make_batch, make_delta, parts_of

from headrace.paramserver.store import row_reader
from headrace.paramserver.store.coalescing import coalesce
from headrace.paramserver.store.deltas import Part
from headrace.paramserver.store.memtable import PendingRows, ShardSource
from headrace.paramserver.store.row_reader import read_rows
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import ColumnShard


@pytest.mark.parametrize("rows_per_get", [1, 3, 4, 2048])
def test_rocksdb_is_asked_for_few_rows_at_once(monkeypatch: pytest.MonkeyPatch, rows_per_get: int) -> None:
    """A long get holds up others; no row is left out between two gets."""
    monkeypatch.setattr(row_reader, "_ROWS_PER_GET", rows_per_get)
    store, asked = FakeStore(), list[int]()
    for step, ids in ((7, [1, 4, 6, 9]), (6, [2, 5, 10]), (5, [3, 7])):
        store.write(coalesce(1, parts_of(make_batch(step, ids))))

    def get(keys: list[bytes]) -> list[bytes | None]:
        asked.append(len(keys))
        return store.read(keys)

    wanted = np.array([10, 4, 30, 4, 7, 1])
    assert read_rows(1, SPEC, [ShardSource(LAYOUT, None, True)], wanted, get, seq=9).steps.tolist() == [
        6,
        7,
        0,
        7,
        5,
        7,
    ]
    assert sum(asked) == 6 and max(asked) <= rows_per_get


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
    """In each column of a row the newest record that covers it wins; the rest is of those that win, marks left out."""
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
        winners = np.full(6, -1)
        for number, (_, _, _, seq, shard, is_deleted) in enumerate(records):
            columns = make_delta([row], seq, spec=SPLIT, shard=shard).columns
            covered = slice(shard.offset, shard.offset + shard.width)
            weights[covered] = 0 if is_deleted else np.frombuffer(columns["weights"], "<f4")
            exps[covered] = 0 if is_deleted else np.frombuffer(columns["state:exp"], "<f2")
            winners[covered] = -1 if is_deleted else number
        live, version = winners[winners >= 0], (0, 0)
        if live.size:
            _, _, _, seq, shard, _ = records[live[0]]  # the copy of the first column
            sums[:] = np.frombuffer(make_delta([row], seq, spec=SPLIT, shard=shard).columns["state:sum"], "<f4")
            version = records[live.max()][0]
        assert result.weights[row].tolist() == weights.tolist()
        assert result.states["exp"][row].tolist() == exps.tolist()
        assert result.states["sum"][row].tolist() == sums.tolist()
        assert result.presence[row] == bool(live.size)
        assert (result.epochs[row], result.steps[row]) == version


def test_reading_an_unknown_shard_finds_nothing() -> None:
    """Rows of a table without any writes are missing and zero."""
    source = ShardSource(LAYOUT, None, False)
    result = read_rows(1, SPEC, [source], np.array([3, 1]), lambda keys: pytest.fail("nothing is stored"), seq=0)
    assert result.presence.tolist() == [0, 0]
    assert not result.weights.any()
