"""The ledger tells lost, stale, resurrected and wrong rows from sound ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chaos_ledger import AckedDelta, Ledger

from headrace.paramserver.reading.reader import Rows
from headrace.schemas.routing import shards_of_rows, table_seed

ROW_IDS = np.array([3, 8], np.int64)


def _ledger() -> Ledger:
    """Return one in which row 3 was acked with the value 7 at (2, 5), and row 8 deleted at (2, 4)."""
    ledger = Ledger({"t": ROW_IDS}, {"t": 1})
    for step, rows, deleted in ((4, [3, 8], []), (5, [3], []), (4, [], [8])):
        ledger.take(
            [
                AckedDelta(
                    fqn="t",
                    version=(2, step),
                    column_offset=0,
                    width=1,
                    row_ids=np.array(rows, np.int64).tobytes(),
                    columns={"weights": np.full(len(rows), step + 2, "<f4").tobytes()},
                    identities=None,
                    deleted_row_ids=np.array(deleted, np.int64).tobytes(),
                )
            ]
        )
    return ledger


def _delta(step: int, row_id: int) -> AckedDelta:
    """Return one in which a row has its step as value."""
    return AckedDelta(
        fqn="t",
        version=(2, step),
        column_offset=0,
        width=1,
        row_ids=np.array([row_id], np.int64).tobytes(),
        columns={"weights": np.full(1, step, "<f4").tobytes()},
        identities=None,
        deleted_row_ids=b"",
    )


def _stored(**changes: Any) -> Rows:
    first, second = changes.setdefault("presence", [1, 0])
    columns: dict[str, Any] = {"weights": [7.0, 0.0], "epochs": [2 * first, 2 * second]}
    columns |= {"steps": [5 * first, 4 * second], **changes}
    return Rows(
        row_ids=ROW_IDS,
        presence=np.array(columns["presence"], np.uint8),
        weights=np.array(columns["weights"], "<f4")[:, None],
        states={},
        epochs=np.array(columns["epochs"], np.int64),
        steps=np.array(columns["steps"], np.int64),
        times_us=None,
        identities=None,
    )


def test_a_shard_is_set_back_alone() -> None:
    """Behind a seq a shard forgets all it has acked, with values; other shards, and later acks, stay."""
    here, there = shards_of_rows(table_seed("t"), ROW_IDS, 3).tolist()
    assert here != there
    ledger = Ledger({"t": ROW_IDS}, {"t": 1})
    ledger.take([_delta(1, 3), _delta(1, 8)])
    ledger.keep_journal()
    for step, row_id, shard, seq in ((2, 3, here, 10), (3, 3, here, 11), (3, 8, there, 12), (4, 3, here, 13)):
        ledger.take([_delta(step, row_id)], shard=shard, seq=seq)
    assert ledger.set_back({here: 11}, 3) == 1
    as_of = _stored(presence=[1, 1], weights=[3.0, 3.0], steps=[3, 3])
    assert not ledger.compare("t", as_of, is_final=True)
    assert ledger.set_back({here: 9}, 3) == 2
    assert dict(ledger.compare("t", as_of, is_final=True).counts) == {"unacked": 1}
    assert not ledger.compare("t", _stored(presence=[1, 1], weights=[1.0, 3.0], steps=[1, 3]), is_final=True)
    ledger.take([_delta(9, 3)], shard=here, seq=10)
    assert not ledger.compare("t", _stored(presence=[1, 1], weights=[9.0, 3.0], steps=[9, 3]), is_final=True)
    assert ledger.num_lost == 3


def test_a_table_that_is_gone_is_lost() -> None:
    """Of a table that the store has not every acked row counts, deleted ones too; where none was acked it may lack."""
    assert dict(_ledger().compare("t", None, is_final=False).counts) == {"lost": 2}
    assert not Ledger({"t": ROW_IDS}, {"t": 1}).compare("t", None, is_final=False)


def test_a_row_may_be_deleted_by_a_batch_that_is_not_acked_yet() -> None:
    """Where rows are deleted, a missing row is lost once all that was sent is acked."""
    ledger = Ledger({"t": ROW_IDS}, {"t": 1}, deletes={"t"})
    ledger.take([_delta(1, 3), _delta(1, 8)])
    stored = _stored(presence=[0, 1], weights=[0.0, 1.0], epochs=[0, 2], steps=[0, 1])
    assert not ledger.copy().compare("t", stored, is_final=False)
    assert dict(ledger.compare("t", stored, is_final=True).counts) == {"lost": 1}


@pytest.mark.parametrize(
    ("changes", "is_final", "kinds"),
    [
        ({}, True, {}),
        ({}, False, {}),
        ({"steps": [6, 0], "weights": [1.0, 0.0]}, False, {}),
        ({"steps": [6, 0]}, True, {"unacked": 1}),
        ({"presence": [0, 0]}, False, {"lost": 1}),
        ({"steps": [4, 0]}, False, {"stale": 1}),
        ({"epochs": [1, 0], "steps": [9, 0]}, False, {"stale": 1}),
        ({"presence": [1, 1], "weights": [7.0, 1.0]}, False, {"resurrected": 1}),
        ({"presence": [1, 1], "weights": [7.0, 1.0], "steps": [5, 3]}, False, {"resurrected": 1}),
        ({"presence": [1, 1], "weights": [7.0, 1.0], "steps": [5, 6]}, False, {}),
        ({"weights": [7.5, 0.0]}, False, {"wrong": 1}),
    ],
)
def test_each_kind_is_told(changes: dict[str, Any], is_final: bool, kinds: dict[str, int]) -> None:
    """What the store says is sound, or one row of one kind is found."""
    assert dict(_ledger().compare("t", _stored(**changes), is_final=is_final).counts) == kinds
