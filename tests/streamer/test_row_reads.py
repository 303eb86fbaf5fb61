"""Whoever reads a row, its columns reach all ranks that hold some."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from row_boxes import BOXES, WORLDS
from thread_ranks import Ranks

from headrace.paramserver.reading.reader import Rows
from headrace.schemas.row_records import MISSING, PRESENT, RecordLayout
from headrace.schemas.tables import ColumnShard, DType, StateKind, StateSpec, TableSpec
from headrace.streamer.read_plan import ReadCosts, RowBox, plan_reads
from headrace.streamer.row_reads import SharedReading, decode_box, encode_box, rows_in_box

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


def read_on_ranks(
    boxes: list[list[RowBox]], costs: ReadCosts | None = None, failing: int | None = None, fails_at: int = 0
) -> list[Any]:
    """Run the reading on threads; return what each wrote, as one array a box, or its error.

    The rank `failing` fails at one of its pieces.
    """
    specs = {"t": SPEC, "u": SPEC}
    piece_bytes = 3 * RecordLayout(SPEC, SPEC.whole).size_bytes
    reads = plan_reads(boxes, specs, costs, piece_bytes=piece_bytes)

    def work(world: Any) -> Any:
        mine = boxes[world.rank]
        wrote = [np.full((40, box.columns.width), np.nan, "f4") for box in mine]

        def write(index: int, rows: Rows) -> None:
            assert np.isnan(wrote[index][rows.row_ids]).all(), "twice"
            wrote[index][rows.row_ids] = rows.weights

        def read(pieces: Any, take: Any) -> None:
            for number, piece in enumerate(pieces):
                if (world.rank, number) == (failing, fails_at):
                    raise OSError("the disk is gone")
                take(piece, rows_of(piece.first_row, piece.end_row, lambda ids: ids >= 0))

        SharedReading(world, specs, boxes, reads, write, piece_bytes=piece_bytes).run(read)
        return wrote

    return Ranks(len(boxes)).run(work)


@given(boxes=WORLDS, data=st.data())
def test_each_rank_gets_its_boxes(boxes: list[list[RowBox]], data: st.DataObject) -> None:
    """Whatever the layout and the costs, each rank writes each row of each box once, with the box's columns."""
    by_rank = st.tuples(*[st.sampled_from([0.01, 1.0, 5.0])] * len(boxes))
    costs = ReadCosts(
        start_s=0,
        request_s=data.draw(by_rank),
        read=data.draw(by_rank),
        store=0,
        send=data.draw(st.tuples(*[by_rank] * len(boxes))),
    )
    found = read_on_ranks(boxes, data.draw(st.sampled_from([costs, None])))
    whole = rows_of(0, 40, lambda ids: ids >= 0).weights
    for of_rank, wrote in zip(boxes, found, strict=True):
        assert not isinstance(wrote, BaseException), wrote
        for box, values in zip(of_rank, wrote, strict=True):
            rows = slice(box.first_row, box.end_row)
            columns = slice(box.columns.offset, box.columns.offset + box.columns.width)
            assert (values[rows] == whole[rows, columns]).all()
            assert np.isnan(np.delete(values, rows, axis=0)).all()


def test_a_rank_that_fails_holds_up_no_other() -> None:
    """At whatever piece one rank fails, it raises its own error, and the others return for it to be told to all."""
    boxes = [
        [RowBox(name="t", first_row=0, end_row=40, columns=ColumnShard(offset=2 * rank, width=2))] for rank in range(3)
    ]
    for fails_at in range(5):
        one, two, three = read_on_ranks(boxes, failing=1, fails_at=fails_at)
        assert isinstance(two, OSError)
        assert isinstance(one, list) and isinstance(three, list)
