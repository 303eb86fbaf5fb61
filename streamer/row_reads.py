"""Plan which rank reads which rows, so that each row is read once, and lay them out for the ranks that hold them.

Sources give whole rows: a server's reply and a snapshot's records have all columns of a row. Where tables are split by
columns, several ranks hold parts of the same rows. Each of them reads a share of these and sends the others their
columns. No I/O.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.reading.reader import Rows
from headrace.schemas.row_records import MISSING, PRESENT, RECORD_VERSION, RecordLayout
from headrace.schemas.tables import ColumnShard, StateKind, TableSpec

__all__ = ["RowBox", "RowRead", "decode_box", "encode_box", "in_pieces", "plan_reads", "rows_in_box"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBox:
    """Rows `first_row` to `end_row`, exclusive, and columns of a stored table that a rank holds."""

    name: str
    first_row: int
    end_row: int
    columns: ColumnShard

    def within(self, read: RowRead) -> RowBox | None:
        """Return the part of it that a read brings; None if there is none."""
        first, end = max(self.first_row, read.first_row), min(self.end_row, read.end_row)
        if read.name != self.name or first >= end:
            return None
        return dataclasses.replace(self, first_row=first, end_row=end)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRead:
    """Rows of a table that one rank reads for all `ranks` that hold parts of them, ascending; it is one of these."""

    name: str
    first_row: int
    end_row: int
    ranks: tuple[int, ...]


def plan_reads(boxes: Sequence[Sequence[RowBox]]) -> list[list[RowRead]]:
    """Return what each rank reads, those rows first that it alone holds.

    Every row of a box is read by exactly one rank that holds a part of it. Rows that several ranks hold are divided
    among these evenly. The same boxes give the same plan on every rank.

    Args:
        boxes: By rank.
    """
    reads: list[list[RowRead]] = [[] for _ in boxes]
    for name in sorted({box.name for of_rank in boxes for box in of_rank}):
        held = [(rank, box) for rank, of_rank in enumerate(boxes) for box in of_rank if box.name == name]
        changes: dict[int, list[tuple[int, int]]] = {}
        for rank, box in held:
            if box.first_row < box.end_row:
                changes.setdefault(box.first_row, []).append((rank, 1))
                changes.setdefault(box.end_row, []).append((rank, -1))
        counts: dict[int, int] = {}
        spans: list[tuple[int, int, tuple[int, ...]]] = []
        first = 0
        for row in sorted(changes):
            ranks = tuple(sorted(rank for rank, count in counts.items() if count))
            if ranks and spans and spans[-1][1:] == (first, ranks):
                spans[-1] = (spans[-1][0], row, ranks)
            elif ranks:
                spans.append((first, row, ranks))
            first = row
            for rank, change in changes[row]:
                counts[rank] = counts.get(rank, 0) + change
        for begin, end, ranks in spans:
            for index, rank in enumerate(ranks):
                share = [begin + (end - begin) * part // len(ranks) for part in (index, index + 1)]
                if share[0] < share[1]:
                    reads[rank].append(RowRead(name=name, first_row=share[0], end_row=share[1], ranks=ranks))
    return [sorted(of_rank, key=lambda read: len(read.ranks) > 1) for of_rank in reads]


def in_pieces(read: RowRead, max_rows: int) -> Iterator[RowRead]:
    """Yield a read in pieces of at most so many rows."""
    for first in range(read.first_row, read.end_row, max_rows):
        yield dataclasses.replace(read, first_row=first, end_row=min(first + max_rows, read.end_row))


def rows_in_box(rows: Rows, spec: TableSpec, box: RowBox) -> Rows:
    """Return those of whole rows, ascending, that are in a box, with its columns."""
    some = slice(*np.searchsorted(rows.row_ids, [box.first_row, box.end_row]))
    columns = slice(box.columns.offset, box.columns.offset + box.columns.width)
    states = {state.name: rows.states[state.name] for state in spec.states}
    pointwise = {state.name for state in spec.states if state.kind is StateKind.POINTWISE}
    assert rows.epochs is not None and rows.steps is not None
    return Rows(
        row_ids=rows.row_ids[some],
        presence=rows.presence[some],
        weights=rows.weights[some, columns],
        states={name: each[some, columns] if name in pointwise else each[some] for name, each in states.items()},
        epochs=rows.epochs[some],
        steps=rows.steps[some],
        times_us=None,
        identities=None,
    )


def encode_box(rows: Rows, spec: TableSpec, box: RowBox) -> npt.NDArray[Any]:
    """Return the rows of `rows_in_box` as records of the box's columns, one for each row of it; absent ones are 0."""
    layout = RecordLayout(spec, box.columns)
    records = np.zeros(box.end_row - box.first_row, layout.dtype)
    at = rows.row_ids - box.first_row
    assert rows.epochs is not None and rows.steps is not None
    records["version"][at] = np.where(rows.presence == PRESENT, RECORD_VERSION, 0)
    records["epoch"][at], records["step"][at] = rows.epochs, rows.steps
    data = {"weights": rows.weights} | {field: rows.states[name] for name, field in layout.fields_of_states.items()}
    contiguous = {name: np.ascontiguousarray(values).view(np.uint8).reshape(-1) for name, values in data.items()}
    for field, values in layout.views(contiguous).items():
        records[field][at] = values
    return records


def decode_box(data: npt.NDArray[np.uint8], spec: TableSpec, box: RowBox) -> Rows:
    """Return the rows that `encode_box` gave, from its bytes."""
    layout = RecordLayout(spec, box.columns)
    records = data.view(layout.dtype)
    columns = {
        name: np.ascontiguousarray(records[name]).view(column.dtype.numpy).reshape(records.size, column.width)
        for name, column in layout.columns.items()
    }
    return Rows(
        row_ids=np.arange(box.first_row, box.end_row),
        presence=np.where(records["version"] == RECORD_VERSION, PRESENT, MISSING).astype(np.uint8),
        weights=columns["weights"],
        states={state: columns[name] for state, name in layout.fields_of_states.items()},
        epochs=records["epoch"].astype(np.int64),
        steps=records["step"].astype(np.int64),
        times_us=None,
        identities=None,
    )
