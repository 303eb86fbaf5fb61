"""Make the reads of a plan on all ranks together, and send each rank the rows and columns that it holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.paramserver.reading.reader import Rows
from headrace.schemas.row_records import MISSING, PRESENT, RECORD_VERSION, RecordLayout
from headrace.schemas.tables import StateKind, TableSpec
from headrace.streamer.read_plan import PIECE_BYTES, RowBox, RowRead, in_rounds
from headrace.streamer.world import World

__all__ = ["Read", "SharedReading", "decode_box", "encode_box", "rows_in_box"]

Read = Callable[[Sequence[RowRead], Callable[[RowRead, Rows], None]], None]
"""Makes reads in order, and calls back once for each, with whole rows."""


class SharedReading:
    """Reads this rank's share of all ranks' rows, and sends and receives parts of those that others hold or have read.

    All ranks know all pieces, so that only flags and rows travel.
    """

    def __init__(
        self,
        world: World,
        specs: Mapping[str, TableSpec],
        boxes: Sequence[Sequence[RowBox]],
        reads: Sequence[Sequence[RowRead]],
        write: Callable[[int, Rows], None],
        *,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Prepare the reads of `plan_reads`, which is given what each rank holds.

        Args:
            world: The ranks.
            specs: The tables, by name, with those states that are read.
            boxes: What each rank holds.
            reads: What each rank reads.
            write: Called with the index of one of this rank's boxes, and rows of it.
            piece_bytes: Read and sent at a time.
        """
        self._world, self._specs, self._boxes, self._write = world, specs, boxes, write
        self._num_rounds, pieces = in_rounds(reads, piece_bytes=piece_bytes)
        self._pieces = pieces[world.rank]
        self._due = deque(self._pieces)
        # By rank, the piece that it sends in a round.
        self._sent = [
            {due: piece for due, piece in of_rank if piece.receivers(rank)} for rank, of_rank in enumerate(pieces)
        ]
        self._round = 0
        self._is_ended = False

    def run(self, read: Read) -> None:
        """Read and write all of it; returns early when another rank has failed, whose error `together` raises."""
        try:
            read([piece for _, piece in self._pieces], self._take)
            self._swap_to(self._num_rounds)
        except _OtherRankFailedError:
            return
        except BaseException:
            if self._round < self._num_rounds and not self._is_ended:  # the others wait in this round
                self._world.exchange([1])
            raise

    def _take(self, piece: RowRead, rows: Rows) -> None:
        due, _ = self._due.popleft()
        self._swap_to(due)
        if piece.receivers(self._world.rank):
            self._swap((piece, rows))
        for index, box in enumerate(self._boxes[self._world.rank]):
            if part := box.within(piece):
                self._write(index, rows_in_box(rows, self._specs[part.name], part))

    def _swap_to(self, end_round: int) -> None:
        """Take part in the rounds before one, without a piece."""
        while self._round < end_round:
            self._swap(None)

    def _swap(self, read: tuple[RowRead, Rows] | None) -> None:
        """Send this rank's piece of this round, if it has one, and write those of the others."""
        sent = [np.empty(0, np.uint8)] * self._world.size
        if read is not None:
            piece, rows = read
            spec = self._specs[piece.name]
            for rank, _ in piece.receivers(self._world.rank):
                parts = [part for box in self._boxes[rank] if (part := box.within(piece))]
                records = [encode_box(rows_in_box(rows, spec, part), spec, part) for part in parts]
                sent[rank] = np.concatenate([each.view(np.uint8) for each in records])
        incoming: list[list[tuple[int, RowBox, int]]] = []
        for rank, sent_by in enumerate(self._sent):
            parts_of = []
            if rank != self._world.rank and (theirs := sent_by.get(self._round)) is not None:
                for index, box in enumerate(self._boxes[self._world.rank]):
                    if part := box.within(theirs):
                        record_bytes = RecordLayout(self._specs[part.name], part.columns).size_bytes
                        parts_of.append((index, part, record_bytes * (part.end_row - part.first_row)))
            incoming.append(parts_of)
        flags = self._world.exchange([0])
        self._is_ended = any(flag for (flag,) in flags)
        if self._is_ended:
            raise _OtherRankFailedError
        sizes = [sum(size for *_, size in parts_of) for parts_of in incoming]
        received = self._world.swap([torch.from_numpy(data) for data in sent], sizes)
        self._round += 1
        for data, parts_of in zip(received, incoming, strict=True):
            for values, (index, part, _) in zip(
                torch.split(data, [size for *_, size in parts_of]), parts_of, strict=True
            ):
                self._write(index, decode_box(values.numpy(), self._specs[part.name], part))


class _OtherRankFailedError(Exception):
    """Another rank has failed, and says why to all."""


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
