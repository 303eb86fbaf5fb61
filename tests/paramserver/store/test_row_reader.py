"""Rows out of RocksDB, some at a time: every one is looked at, whatever the number that one get takes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from row_batches import SPEC, make_batch, make_delta

from headrace.paramserver.store import row_reader
from headrace.paramserver.store.overlay import Overlay
from headrace.paramserver.store.pending import Part, coalesce
from headrace.paramserver.store.row_reader import ShardSource, read_rows, settle
from headrace.schemas.row_keys import encode_keys
from headrace.schemas.row_records import RecordLayout

LAYOUT = RecordLayout(SPEC, SPEC.whole)


class _Stored:
    """What RocksDB has, and how many rows it was asked for at a time."""

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
    """Have so many rows read at a time."""
    number: int = request.param
    monkeypatch.setattr(row_reader, "_ROWS_PER_GET", number)
    return number


def test_no_row_that_is_brought_in_replaces_a_newer_one(rows_per_get: int) -> None:
    """Of the rows of a replay or backfill those stay that are as new as the stored ones, and all that came in order."""
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
    """Rows come in the order asked, twice where they are asked for twice, missing and deleted ones as such."""
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
    """What a replay or backfill has brought in, and nobody has applied yet, is read where it is no older."""
    stored, overlay = _Stored(), Overlay()
    stored.put([1, 2, 3, 5], 6)
    for step, ids in ((5, [1, 4]), (6, [2]), (7, [3])):
        brought = make_delta(ids, 10 + step)
        overlay.add(make_batch(step, version=(1, step), is_conditional=True, deltas=(brought,)))
    sources = overlay.sources_of(1, SPEC, [SPEC.whole])
    rows = read_rows(1, SPEC, sources, np.arange(7), stored.get, seq=9)
    assert rows.presence.tolist() == [0, 1, 1, 1, 1, 1, 0]
    assert rows.steps.tolist() == [0, 6, 6, 7, 5, 6, 0]
    written = [(1, 6), (2, 16), (3, 17), (4, 15), (5, 6)]
    weights = b"".join(bytes(make_delta([row], tag).columns["weights"]) for row, tag in written)
    assert rows.weights[1:6].tobytes() == weights


def test_a_row_costs_the_same_however_many_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred times the rows take some hundred times the processor time, and not five hundred."""
    monkeypatch.setattr(row_reader, "_ROWS_PER_GET", 64)
    sources = [ShardSource(LAYOUT, None, True)]

    def seconds_of(num_rows: int) -> float:
        begin_s = time.thread_time()
        read_rows(1, SPEC, sources, np.arange(num_rows), lambda keys: [None] * len(keys), seq=1)
        return time.thread_time() - begin_s

    # One of a few tries: what a busy machine does to its caches and clocks is not what is measured.
    assert any(seconds_of(400_000) < 250 * min(seconds_of(4_000) for _ in range(5)) for _ in range(4))
