"""Each row that ranks hold is read once, by a rank that holds it, and its columns reach all that hold some."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import Ranks

from headrace.paramserver.reading.reader import Rows
from headrace.schemas.row_records import MISSING, PRESENT
from headrace.schemas.tables import ColumnShard, DType, StateKind, StateSpec, TableSpec
from headrace.streamer.restore import _SharedReading
from headrace.streamer.row_reads import RowBox, decode_box, encode_box, in_pieces, plan_reads, rows_in_box

SPEC = TableSpec(
    fqn="t",
    num_rows=40,
    dim=6,
    dtype=DType.FLOAT32,
    states=(
        StateSpec(name="m", kind=StateKind.POINTWISE, dtype=DType.FLOAT32, width=0),
        StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT64, width=1),
    ),
)
BOXES = st.builds(
    lambda name, rows, columns: RowBox(
        name=name,
        first_row=min(rows),
        end_row=max(rows),
        columns=ColumnShard(offset=min(columns), width=max(columns) - min(columns)),
    ),
    st.sampled_from("tu"),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
    st.sampled_from([(0, 6), (0, 2), (2, 5), (5, 6)]),
)
WORLDS = st.lists(st.lists(BOXES, max_size=4), min_size=1, max_size=5)


@given(boxes=WORLDS)
def test_every_row_is_read_once_by_a_rank_that_holds_it(boxes: list[list[RowBox]]) -> None:
    """No byte is read twice, none that nobody wants, and shares of the same rows differ by at most one row."""
    plan = plan_reads(boxes)
    held = [{(b.name, row) for b in of_rank for row in range(b.first_row, b.end_row)} for of_rank in boxes]
    read = [[(r.name, row) for r in of_rank for row in range(r.first_row, r.end_row)] for of_rank in plan]
    counts = Counter(row for of_rank in read for row in of_rank)
    assert counts.keys() == set().union(*held)
    assert set(counts.values()) <= {1}
    for rank, of_rank in enumerate(plan):
        for each in of_rank:
            assert rank in each.ranks
            for row in range(each.first_row, each.end_row):
                assert each.ranks == tuple(r for r, rows in enumerate(held) if (each.name, row) in rows)
        assert [len(each.ranks) > 1 for each in of_rank] == sorted(len(each.ranks) > 1 for each in of_rank)


@given(num_rows=st.integers(1, 50), world=st.integers(1, 6))
def test_columns_split_over_ranks_are_read_in_equal_shares(num_rows: int, world: int) -> None:
    """Ranks that hold columns of the same rows read as many rows as each other, within one."""
    boxes = [
        [RowBox(name="t", first_row=0, end_row=num_rows, columns=ColumnShard(offset=rank, width=1))]
        for rank in range(world)
    ]
    sizes = [sum(r.end_row - r.first_row for r in reads) for reads in plan_reads(boxes)]
    assert sum(sizes) == num_rows
    assert max(sizes) - min(sizes) <= 1


def rows_of(first: int, end: int, is_present: Any) -> Rows:
    """Return whole rows whose values tell row and column."""
    ids = np.arange(first, end)
    values = (ids[:, None] * 100 + np.arange(6)).astype("<f4")
    presence = np.where(is_present(ids), PRESENT, MISSING).astype(np.uint8)
    return Rows(
        row_ids=ids,
        presence=presence,
        weights=values,
        states={"m": -values, "sum": ids[:, None].astype("<f8")},
        epochs=ids + 1,
        steps=ids + 2,
        times_us=None,
        identities=None,
    )


@given(box=BOXES)
def test_a_box_travels_whole(box: RowBox) -> None:
    """Values, versions and presence of a box's rows come back from its bytes."""
    expected = rows_in_box(rows_of(0, 40, lambda ids: ids % 3 > 0), SPEC, box)
    found = decode_box(encode_box(expected, SPEC, box).view(np.uint8), SPEC, box)
    assert found.row_ids.tolist() == list(range(box.first_row, box.end_row))
    here = expected.presence == PRESENT
    assert (found.presence == expected.presence).all()
    assert (found.weights == expected.weights).all()
    assert expected.epochs is not None and found.epochs is not None
    assert (found.epochs[here] == expected.epochs[here]).all()
    for name, values in expected.states.items():
        assert (found.states[name] == values).all()
        assert found.states[name].dtype == values.dtype


class Source:
    """Rows that are made up; `fails_at` is the piece at which reading fails."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.bytes_read, self.num_pieces, self._fails_at = 0, 0, fails_at

    def read(self, stored: Any, reads: Any, take: Any, *, with_states: bool) -> None:
        for read in reads:
            for piece in in_pieces(read, 3):
                if self.num_pieces == self._fails_at:
                    raise OSError("the disk is gone")
                self.num_pieces += 1
                take(piece, rows_of(piece.first_row, piece.end_row, lambda ids: ids >= 0))


def read_on_ranks(boxes: list[list[RowBox]], monkeypatch: Any, failing: int | None, fails_at: int) -> list[Any]:
    """Run the reading on threads; return what each wrote, as one array a box, or its error."""
    monkeypatch.setattr("headrace.streamer.restore.rows_at_once", lambda _: 3)

    def work(world: Any) -> Any:
        mine = boxes[world.rank]
        wrote = [np.full((40, box.columns.width), np.nan, "f4") for box in mine]

        def write(table: Any, rows: Rows) -> None:
            assert np.isnan(wrote[table][rows.row_ids]).all(), "twice"
            wrote[table][rows.row_ids] = rows.weights

        reading = _SharedReading(
            world,
            {"t": SPEC, "u": SPEC},
            list(zip(mine, range(9), strict=False)),
            write,
            with_states=True,  # type: ignore[arg-type]
        )
        source: Any = Source(fails_at if world.rank == failing else None)
        reading.run(source, None)  # type: ignore[arg-type]
        return wrote

    return Ranks(len(boxes)).run(work)


@given(boxes=WORLDS)
def test_each_rank_gets_its_boxes(boxes: list[list[RowBox]]) -> None:
    """Whatever the layout, each rank writes each row of each box once, with the box's columns."""
    with pytest.MonkeyPatch.context() as patch:
        found = read_on_ranks(boxes, patch, None, 0)
    whole = rows_of(0, 40, lambda ids: ids >= 0).weights
    for of_rank, wrote in zip(boxes, found, strict=True):
        assert not isinstance(wrote, BaseException), wrote
        for box, values in zip(of_rank, wrote, strict=True):
            rows = slice(box.first_row, box.end_row)
            columns = slice(box.columns.offset, box.columns.offset + box.columns.width)
            assert (values[rows] == whole[rows, columns]).all()
            assert np.isnan(np.delete(values, rows, axis=0)).all()


def test_a_rank_that_fails_holds_up_no_other(monkeypatch: Any) -> None:
    """At whatever piece one rank fails, it raises its own error, and the others return for it to be told to all."""
    boxes = [
        [RowBox(name="t", first_row=0, end_row=40, columns=ColumnShard(offset=2 * rank, width=2))] for rank in range(3)
    ]
    for fails_at in range(5):
        one, two, three = read_on_ranks(boxes, monkeypatch, 1, fails_at)
        assert isinstance(two, OSError)
        assert isinstance(one, list) and isinstance(three, list)
