"""Requests for rows and their replies, without a shard; `test_reader.py` covers them over connections."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.paramserver.reading.row_query import (
    MAX_ROWS_READ,
    RowPart,
    RowQuery,
    Rows,
    parts_together,
    request_for,
    rows_in_reply,
    scatter_reply,
)
from headrace.schemas.errors import ProtocolError
from headrace.schemas.idl import idl
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

SPEC = TableSpec(
    fqn="user.weight",
    num_rows=100,
    dim=3,
    dtype=DType.BFLOAT16,
    states=(StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT64, width=1),),
    has_identities=True,
)
FULL = RowQuery(spec=SPEC, with_states=True, with_versions=True)


def answer(ids: list[int]) -> Any:
    """Return a shard's reply to `FULL`, with values derived from the ids."""
    row_ids = np.array(ids, np.int64)
    return idl.GetEmbeddingsReply(
        seq=1,
        presence=np.ones(len(ids), np.uint8).tobytes(),
        weights=np.repeat(row_ids, 3).astype("<u2").tobytes(),
        states=[idl.StateColumn(name="sum", dtype=int(DType.FLOAT64), width=1, data=row_ids.astype("<f8").tobytes())],
        epochs=(row_ids + 1).tobytes(),
        steps=(row_ids + 2).tobytes(),
        times_us=(row_ids + 3).tobytes(),
        identities=(row_ids + 4).tobytes(),
    )


def columns_of(rows: Rows) -> list[Any]:
    return [rows.presence, rows.weights, rows.states["sum"], rows.epochs, rows.steps, rows.times_us, rows.identities]


def test_answers_go_to_their_places() -> None:
    """Each reply fills exactly its own rows, bit for bit, in any order."""
    rows = FULL.allocate(np.array([5, 9, 7, 65535], np.int64))
    FULL.scatter(answer([65535, 9]), rows, np.array([3, 1]))
    assert rows.presence.tolist() == [0, 1, 0, 1]
    FULL.scatter(answer([5, 7]), rows, np.array([0, 2]))
    ids = np.array([5, 9, 7, 65535])
    assert rows.weights.dtype == np.uint16
    found = [column.reshape(4, -1)[:, 0].tolist() for column in columns_of(rows)[1:]]
    assert found == [ids.tolist(), ids.tolist(), *((ids + n).tolist() for n in (1, 2, 3, 4))]
    assert (rows.weights == ids[:, None]).all()


@pytest.mark.parametrize("column", ["presence", "weights", "epochs", "steps", "times_us", "identities", "states"])
def test_an_answer_that_lacks_something_is_refused(column: str) -> None:
    """The error names a column that is missing or one byte too long."""
    rows = FULL.allocate(np.array([1, 2], np.int64))
    reply = answer([1, 2])
    setattr(reply, column, [] if column == "states" else None)
    name = "state 'sum'" if column == "states" else column
    with pytest.raises(ProtocolError, match=f"'user.weight': nothing of {name} where"):
        FULL.scatter(reply, rows, np.arange(2))
    reply = answer([1, 2])
    of = reply.states[0] if column == "states" else reply
    attribute = "data" if column == "states" else column
    setattr(of, attribute, getattr(of, attribute) + b"\0")
    with pytest.raises(ProtocolError, match=rf"\d+ bytes of {name} where"):
        FULL.scatter(reply, rows, np.arange(2))


def test_as_many_rows_are_asked_for_as_an_answer_holds() -> None:
    """The reply's columns and the request's ids fit the longest message; one more row would not."""
    limit = 40_000
    row_bytes = sum(column.nbytes for column in columns_of(FULL.allocate(np.zeros(1, np.int64))))
    room = limit - 4096
    assert FULL.rows_at_once(limit) == room // row_bytes
    presence_only = RowQuery(spec=TableSpec(fqn="t", num_rows=1, dim=1, dtype=DType.FLOAT16))
    limit = 12_000
    assert presence_only.rows_at_once(limit) == (limit - 4096) // 8  # the request's ids are longer than the reply


def test_a_row_that_hardly_fits_is_asked_for_alone() -> None:
    """At least one row is requested, and never so many that a reply blocks its connection."""
    assert rows_in_reply(5000, 10_000) == 1
    assert rows_in_reply(2**30, 2**10) == 8 * 2**10
    narrow = RowQuery(spec=TableSpec(fqn="flags", num_rows=0, dim=1, dtype=DType.UINT8))
    assert narrow.rows_at_once(2**30) == 1024 <= MAX_ROWS_READ  # a slow disk would not read more in time


def test_small_parts_do_not_make_one_that_takes_long() -> None:
    """Parts that share a request have no more rows than one part may have."""
    together = list(parts_together([part_of(list(range(400))) for _ in range(5)], 2**30))
    assert [len(parts) for parts in together] == [2, 2, 1]


def part_of(ids: list[int]) -> RowPart:
    rows = FULL.allocate(np.array(ids, np.int64))
    return RowPart(query=FULL, rows=rows, positions=np.arange(len(ids)))


def test_small_tables_are_asked_for_together() -> None:
    """A request takes parts in order: as many as fit a reply with their names, and at most 64."""
    parts = [part_of([1])] * 150
    assert [len(together) for together in parts_together(parts, 2**30)] == [64, 64, 22]
    large = part_of(list(range(100)))
    room = 2 * 4096 + 101 * FULL.row_bytes
    several = [parts[0], large, parts[0], large, large]
    assert [len(together) for together in parts_together(several, room)] == [2, 2, 1]
    assert [len(together) for together in parts_together(several, room - 1)] == [1, 1, 1, 1, 1]
    assert [part for together in parts_together(several, room) for part in together] == several
    assert list(parts_together([], room)) == []


def test_answers_of_several_tables_go_to_their_places() -> None:
    """A wrong number of tables is refused."""
    parts = [part_of([5, 9]), part_of([7]), part_of([6, 4])]
    request = request_for(parts)
    wanted = [np.frombuffer(one.row_ids, np.int64).tolist() for one in (request, *request.more)]
    assert wanted == [[5, 9], [7], [6, 4]] and [one.fqn for one in request.more] == [SPEC.fqn] * 2
    assert request_for(parts[:1]).more is None

    reply = answer([5, 9])
    more = [answer([7]), answer([6, 4])]
    for too_few in (None, more[:1]):
        reply.more = too_few
        with pytest.raises(ProtocolError, match="tables where 3"):
            scatter_reply(reply, parts)
    reply.more = more
    scatter_reply(reply, parts)
    assert [part.rows.epochs.tolist() for part in parts if part.rows.epochs is not None] == [[6, 10], [8], [7, 5]]
