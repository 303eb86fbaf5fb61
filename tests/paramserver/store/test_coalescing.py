"""Coalescing against a dict, the keys and values of runs, and rows of many buffers as one array."""

from __future__ import annotations

import gc
import mmap
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_batches import (
    LAYOUT,
    ROWS,
    SHARDS,
    SPEC,
    SPLIT,
    UPDATES,
    FakeStore,
    Model,
    make_batch,
    make_delta,
    make_update,
    parts_of,
    read,
    split,
)

from headrace.paramserver.store import coalescing
from headrace.paramserver.store.coalescing import (
    CoalescedRows,
    ScatteredRows,
    SortedRun,
    coalesce,
    coalesce_all,
    entries_of,
    keep_last,
)
from headrace.paramserver.store.deltas import Part
from headrace.paramserver.store.memtable import PendingRows
from headrace.schemas.errors import InvariantError
from headrace.schemas.row_records import RecordLayout, encode_keys
from headrace.schemas.tables import DType, TableSpec


def test_copied_runs_do_not_share_memory_with_frames() -> None:
    """A coalesced run reads from the frames; after `copied` the frames may be reused."""
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


@given(st.lists(UPDATES, max_size=12), st.data())
def test_any_split_into_windows_ends_in_the_same_rows(drawn: Any, data: st.DataObject) -> None:
    """Batches coalesced in windows of any sizes give the rows that they give one by one."""
    batches = [make_update(seq, update) for seq, update in enumerate(drawn, 1)]
    store, model = FakeStore(), Model()
    left = batches
    while left:
        size = data.draw(st.integers(1, len(left)))
        run = coalesce(1, parts_of(*left[:size]))
        assert run.size_bytes == run.row_ids.size * (LAYOUT.size_bytes + 8)
        store.write(run)
        left = left[size:]
    for batch in batches:
        model.apply(batch)
    model.check(ROWS, read(PendingRows(1, LAYOUT), store))


@settings(max_examples=40)
@given(st.lists(UPDATES, max_size=12), st.data())
def test_replaying_any_suffix_changes_nothing(drawn: Any, data: st.DataObject) -> None:
    """Batches that are in the store already may be applied once more, as after a crash."""
    batches = [make_update(seq, update) for seq, update in enumerate(drawn, 1)]
    store, model = FakeStore(), Model()
    start = data.draw(st.integers(0, len(batches)))
    for batch in [*batches, *batches[start:]]:
        store.write(coalesce(1, parts_of(batch)))
    for batch in batches:
        model.apply(batch)
    model.check(ROWS, read(PendingRows(1, LAYOUT), store))


COLUMN_SHARDS = [(1, SPEC, SPEC.whole), (2, SPEC, SPEC.whole), *((3, SPLIT, shard) for shard in SHARDS[1:])]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(range(len(COLUMN_SHARDS))),
            st.dictionaries(st.sampled_from(ROWS), st.booleans(), min_size=1, max_size=6),
        ),
        max_size=16,
    ),
    st.sampled_from([1, 4, 8, 1024]),
)
def test_column_shards_coalesced_together_are_what_each_is_by_itself(
    drawn: list[tuple[int, dict[int, bool]]], few_entries: int
) -> None:
    """Coalescing column shards together gives what each gives alone."""
    pending = [PendingRows(table_id, RecordLayout(spec, shard)) for table_id, spec, shard in COLUMN_SHARDS]
    parts: dict[PendingRows, list[Part]] = {}
    for seq, (number, rows) in enumerate(drawn, 1):
        table_id, spec, shard = COLUMN_SHARDS[number]
        delta = make_delta(tag=seq, **split(rows), spec=spec, shard=shard, table_id=table_id)
        batch = make_batch(seq, deltas=(delta,))
        parts.setdefault(pending[number], []).append(Part.of_delta(delta, batch))
    with mock.patch.object(coalescing, "_FEW_ENTRIES", few_entries):
        found = {
            (run.table_id, run.layout.shard): run.copied()
            for run in coalesce_all((of.table_id, some) for of, some in parts.items())
        }
    assert len(found) == len(parts)
    for rows_of, of_rows in parts.items():
        run, wanted = found[rows_of.table_id, rows_of.layout.shard], coalesce(rows_of.table_id, of_rows).copied()
        assert run.row_ids.tolist() == wanted.row_ids.tolist()
        assert run.records.tobytes() == wanted.records.tobytes()


def test_a_row_is_not_taken_for_the_next_tables_row_of_the_same_id() -> None:
    """The last row of one column shard and the first of the next stay two rows when coalesced together."""
    pending = []
    for table_id in (1, 2):
        delta = make_delta([7], table_id, table_id=table_id)
        pending.append((table_id, [Part.of_delta(delta, make_batch(table_id, deltas=(delta,)))]))
    runs = coalesce_all(pending)
    assert [(run.table_id, run.row_ids.tolist(), run.copied().records["step"].tolist()) for run in runs] == [
        (1, [7], [1]),
        (2, [7], [2]),
    ]


OTHER = TableSpec(fqn="other", num_rows=0, dim=3, dtype=DType.FLOAT16)


LAYOUTS = [RecordLayout(SPEC, SPEC.whole), RecordLayout(OTHER, OTHER.whole)]


sizes = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(0, 3)), max_size=8)


@given(sizes, st.integers(1, 12), st.booleans())
def test_each_row_of_each_run_is_there_once(tables: list[tuple[int, int, int]], num_rows: int, is_copied: bool) -> None:
    """Keys and values come in the order of the runs, `num_rows` at a time, for alike, mixed and deleted rows."""
    pending = {}
    for table_id, (number, num_present, num_deleted) in enumerate(tables, 1):
        spec = LAYOUTS[number], [SPEC, OTHER][number]
        deleted = range(num_present, num_present + num_deleted)
        delta = make_delta(range(num_present), table_id, deleted=deleted, spec=spec[1], table_id=table_id)
        if num_present + num_deleted:
            part = Part.of_delta(delta, make_batch(table_id, deltas=(delta,)))
            pending[table_id] = [part]
    runs: list[SortedRun | CoalescedRows] = sorted(coalesce_all(pending.items()), key=lambda run: run.table_id)
    copies = [run.copied() for run in runs if isinstance(run, CoalescedRows)]
    if is_copied:
        runs[::2] = copies[::2]
    written = list(entries_of(runs, num_rows))
    assert [len(keys) for keys, _ in written[:-1]] == [num_rows] * (len(written) - 1)
    assert all(0 < len(keys) <= num_rows for keys, _ in written)
    wanted_keys = [key for run in copies for key in encode_keys(run.table_id, run.layout.shard, run.row_ids)]
    assert [key for keys, _ in written for key in keys] == wanted_keys
    wanted_values = [value for run in copies for value in run.layout.values_of(run.records)]
    assert [value for _, values in written for value in values] == wanted_values


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.sampled_from([1, 2, 3, 4, 8, 16, 31, 520, 2**14, 2**14 + 1, 2**17]),
    st.integers(0, 7),
    st.data(),
)
def test_rows_are_those_of_their_arrays(sizes: list[int], row_bytes: int, offset: int, data: st.DataObject) -> None:
    """Rows of any length and alignment are gathered in any order, also repeated."""
    rng = np.random.default_rng(row_bytes + offset)
    arrays = []
    for size in sizes:
        frame = memoryview(rng.bytes(offset + size * row_bytes))[offset:]
        arrays.append(np.frombuffer(frame, f"V{row_bytes}") if size else np.empty(0, f"V{row_bytes}"))
    rows = ScatteredRows(arrays, np.dtype(f"V{row_bytes}"))
    there = [(which, row) for which, size in enumerate(sizes) for row in range(size)]
    wanted = data.draw(st.lists(st.sampled_from(there), max_size=20)) if there else []
    which, at = np.array([pair[0] for pair in wanted], np.int64), np.array([pair[1] for pair in wanted], np.int64)
    expected = [arrays[pair[0]][pair[1]].tobytes() for pair in wanted]
    found = rows.take(which, at)
    assert (found.dtype, [row.tobytes() for row in found]) == (np.dtype(f"V{row_bytes}"), expected)
    assert found.base is None or found.flags.owndata


@pytest.mark.parametrize("row_bytes", [8, 4096, 2**15])
@pytest.mark.parametrize(("which", "row"), [(0, 3), (0, -1), (1, 0), (0, 2**60), (2, 0), (-3, 0)])
def test_an_index_outside_the_buffers_is_an_error(row_bytes: int, which: int, row: int) -> None:
    """Memory outside the buffers is not touched, however the rows are copied: together, in place or one by one."""
    arrays = [np.zeros(3, f"V{row_bytes}"), np.zeros(0, f"V{row_bytes}")]
    rows = ScatteredRows(arrays, np.dtype(f"V{row_bytes}"))
    with pytest.raises(IndexError):
        rows.take(np.array([0, which]), np.array([2, row]))


def test_memory_of_the_arrays_stays() -> None:
    """The buffers live as long as the object that indexes them."""

    def scattered() -> ScatteredRows:
        pages = mmap.mmap(-1, 1 << 20)  # unmapped, and so not readable, once nothing refers to it
        pages[:] = b"\x07" * (1 << 20)
        return ScatteredRows([np.frombuffer(pages, "V4096")], np.dtype("V4096"))

    rows = scattered()
    gc.collect()
    assert rows.take(np.array([0, 0]), np.array([0, 255])).tobytes() == b"\x07" * 8192


@pytest.mark.parametrize("fault", ["lost", "another", "twice"])
def test_rows_that_coalescing_loses_are_found(fault: str) -> None:
    """Rows kept and coalesced away are the rows taken, or it is an error."""
    ids = np.array([5, 3, 5, 9])
    order = np.argsort(ids, kind="stable")
    is_last = np.array([True, False, True, True])
    assert [found.tolist() for found in keep_last(ids, order, ids[order], is_last)] == [[1, 2, 3], [3, 5, 9]]
    if fault == "lost":
        is_last[0] = False
    elif fault == "another":
        is_last = np.array([False, True, True, True])
    else:
        order = order[[0, 1, 2, 2]]
    with pytest.raises(InvariantError, match=r"^memtable → store, coalescing: 4 rows"):
        keep_last(ids, order, ids[order], is_last)
