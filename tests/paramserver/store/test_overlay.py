"""What pends of all tables; `test_pending.py` has one column shard, `test_applier.py` all of it beside a store."""

from __future__ import annotations

import dataclasses

import numpy as np
from row_batches import SPEC, make_batch, make_delta

from headrace.paramserver.store.overlay import Overlay
from headrace.paramserver.store.pending import PendingSnapshot
from headrace.schemas.identity_claims import CLAIMS
from headrace.schemas.tables import ColumnShard

LEFT, RIGHT = ColumnShard(offset=0, width=2), ColumnShard(offset=2, width=2)


def _found(snapshot: PendingSnapshot | None, ids: list[int]) -> list[int]:
    assert snapshot is not None
    return sorted({ids[at] for places, _, _ in snapshot.find(np.array(ids)) for at in places.tolist()})


def test_a_batch_pends_by_table_and_column_shard_with_its_claims() -> None:
    """Each delta's rows are found where they belong and nowhere else, and their identities beside them."""
    overlay = Overlay()
    deltas = (make_delta([1, 2], 7, shard=LEFT), make_delta([2, 3], 7, shard=RIGHT), make_delta([4], 7, table_id=2))
    parts = overlay.add(make_batch(1, deltas=deltas))
    assert [(rows.table_id, rows.layout is CLAIMS, part.ids.size) for rows, part in parts] == [
        *((1, False, 2), (1, True, 2), (1, False, 2), (1, True, 2)),
        *((2, False, 1), (2, True, 1)),
    ]
    left, right = overlay.sources_of(1, SPEC, [])
    assert (left.layout.shard, right.layout.shard) == (LEFT, RIGHT)
    assert (_found(left.snapshot, [1, 2, 3, 4]), _found(right.snapshot, [1, 2, 3, 4])) == ([1, 2], [2, 3])
    assert _found(overlay.claims_source(1).snapshot, [1007, 2007, 3007, 4007]) == [1007, 2007, 3007]
    assert _found(overlay.claims_source(2).snapshot, [1007, 4007]) == [4007]


def test_sources_are_what_pends_and_what_is_stored_each_once() -> None:
    """A column shard of which RocksDB may have rows is said to be stored; a table without rows has the whole of it."""
    overlay = Overlay()
    overlay.add(make_batch(1, deltas=(make_delta([1], 1, shard=LEFT), make_delta([1], 1, shard=RIGHT))))
    found = [
        (s.layout.shard, s.is_stored, s.snapshot is None) for s in overlay.sources_of(1, SPEC, [RIGHT, SPEC.whole])
    ]
    assert found == [(RIGHT, True, False), (SPEC.whole, True, True), (LEFT, False, False)]
    (empty,) = overlay.sources_of(3, SPEC, [])
    assert (empty.layout.shard, empty.is_stored, empty.snapshot) == (SPEC.whole, False, None)
    assert overlay.claims_source(3).snapshot is None


def test_a_delta_without_rows_pends_nowhere() -> None:
    """Neither an empty delta nor a table without identities leaves anything to look at."""
    plain = dataclasses.replace(SPEC, fqn="plain", has_identities=False)
    overlay = Overlay()
    assert overlay.add(make_batch(1, deltas=(make_delta([], 1), make_delta([], 1, spec=plain, table_id=2)))) == []
    ((rows, part),) = overlay.add(make_batch(2, deltas=(make_delta([5], 1, spec=plain, table_id=2),)))
    assert (rows.table_id, part.ids.tolist()) == (2, [5])
