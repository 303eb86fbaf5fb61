"""Runs as keys and values: those of each run by itself, whatever a write takes of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from row_batches import SPEC, make_batch, make_delta

from headrace.paramserver.store.pending import CoalescedRun, Part, PendingRows, Run, coalesce, coalesce_all
from headrace.paramserver.store.run_entries import entries_of
from headrace.schemas.row_keys import encode_keys
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import ColumnShard, DType, TableSpec

OTHER = TableSpec(fqn="other", num_rows=0, dim=3, dtype=DType.FLOAT16)
LAYOUTS = [RecordLayout(SPEC, SPEC.whole), RecordLayout(OTHER, OTHER.whole)]
LEFT = ColumnShard(offset=0, width=2)

sizes = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(0, 3)), max_size=8)


@given(sizes, st.integers(1, 12), st.booleans())
def test_each_row_of_each_run_is_there_once(tables: list[tuple[int, int, int]], num_rows: int, is_copied: bool) -> None:
    """In the order of the runs, `num_rows` at a time: tables laid out alike, others between them, deleted rows."""
    pending = {}
    for table_id, (number, num_present, num_deleted) in enumerate(tables, 1):
        spec = LAYOUTS[number], [SPEC, OTHER][number]
        deleted = range(num_present, num_present + num_deleted)
        delta = make_delta(range(num_present), table_id, deleted=deleted, spec=spec[1], table_id=table_id)
        if num_present + num_deleted:
            part = Part.of_delta(delta, make_batch(table_id, deltas=(delta,)))
            pending[PendingRows(table_id, spec[0])] = [part]
    runs: list[Run | CoalescedRun] = sorted(coalesce_all(pending), key=lambda run: run.table_id)
    copies = [run.copied() for run in runs if isinstance(run, CoalescedRun)]
    if is_copied:
        runs[::2] = copies[::2]
    written = list(entries_of(runs, num_rows))
    assert [len(keys) for keys, _ in written[:-1]] == [num_rows] * (len(written) - 1)
    assert all(0 < len(keys) <= num_rows for keys, _ in written)
    wanted_keys = [key for run in copies for key in encode_keys(run.table_id, run.layout.shard, run.row_ids)]
    assert [key for keys, _ in written for key in keys] == wanted_keys
    wanted_values = [value for run in copies for value in run.layout.values_of(run.records)]
    assert [value for _, values in written for value in values] == wanted_values


def test_runs_in_another_order_of_rows() -> None:
    """A run of some of the rows, in any order, has its own: claims go to the store in the order of their keys."""
    delta = make_delta([1, 2, 3, 4], 1, spec=OTHER, shard=LEFT, table_id=5)
    run = coalesce(5, [Part.of_delta(delta, make_batch(1, deltas=(delta,)))])
    ((keys, values),) = entries_of([run.take(np.array([3, 0]))], 10)
    assert keys == encode_keys(5, LEFT, np.array([4, 1]))
    assert values == [run.layout.values_of(run.records_at(slice(None)))[at] for at in (3, 0)]
