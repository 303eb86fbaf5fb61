"""Plan which rank reads which rows of a restore, and whom it sends columns of them, by what reading and sending cost.

Sources give whole rows: a server's reply and a snapshot's records have all columns of a row. Each row is read once.
Without costs the ranks that hold parts of a row share the reading evenly. With them, a search moves rows from the
busiest rank to another, one that holds none of them too, as long as that is faster. No I/O and no clock: the same
arguments give the same plan.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import ColumnShard, TableSpec

__all__ = ["PIECE_BYTES", "ReadCosts", "RowBox", "RowRead", "in_rounds", "plan_reads", "seconds_of"]

PIECE_BYTES = 4 * 2**20
"""Rows are read and sent in pieces of about this size."""

# The search moves shares of rows. More shares balance better, and take longer to search.
_SHARES_PER_RANK = 16
# Of the ranks that hold no part of a row, the search tries this many, the idlest.
_IDLE_RANKS = 4
# As many moves as there are ranks have to shorten the time to this, or the search ends.
_GAIN = 0.99
# Order of the norms in the search, which come close to the maximum: the larger, the less the other ranks count.
_NORM = 8


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
    """Rows of a table that one rank reads for all ranks that hold parts of them.

    Attributes:
        name, first_row, end_row: As in `RowBox`.
        row_bytes: Of a whole row.
        holders: The ranks that hold parts of the rows, ascending, and the bytes of a row that each of them gets.
    """

    name: str
    first_row: int
    end_row: int
    row_bytes: int
    holders: tuple[tuple[int, int], ...]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.end_row - self.first_row

    @property
    def size_bytes(self) -> int:
        """Bytes that the source gives for it."""
        return self.num_rows * self.row_bytes

    def receivers(self, reader: int) -> list[tuple[int, int]]:
        """Return the ranks that a reader sends parts of the rows, with the bytes that each gets."""
        return [(rank, self.num_rows * width) for rank, width in self.holders if rank != reader]

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> Iterator[RowRead]:
        """Yield it in pieces of about a size."""
        max_rows = max(1, piece_bytes // self.row_bytes)
        for first in range(self.first_row, self.end_row, max_rows):
            yield dataclasses.replace(self, first_row=first, end_row=min(first + max_rows, self.end_row))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadCosts:
    """What reading and sending rows costs.

    Attributes:
        start_s: Until the first reply, seconds.
        request_s: Of a request that brings next to nothing, by rank, seconds.
        read: By rank, seconds a byte, while no other rank reads.
        store: Seconds a byte of all that ranks read at the same time.
        send: By sender and receiver, seconds a byte; both are busy meanwhile.
    """

    start_s: float
    request_s: tuple[float, ...]
    read: tuple[float, ...]
    store: float
    send: tuple[tuple[float, ...], ...]


_Share = tuple[int, RowRead]
"""A reader and rows."""


def plan_reads(
    boxes: Sequence[Sequence[RowBox]],
    specs: Mapping[str, TableSpec],
    costs: ReadCosts | None = None,
    *,
    piece_bytes: int = PIECE_BYTES,
) -> list[list[RowRead]]:
    """Return what each rank reads, by table and row; every row of a box is read by exactly one rank.

    Args:
        boxes: What each rank holds.
        specs: The tables, by name, with those states that are read.
        costs: None divides rows evenly among the ranks that hold parts of them.
        piece_bytes: Of a request.
    """
    even: list[_Share] = []
    for span in _spans(boxes, specs):
        count = len(span.holders)
        ends = [span.first_row + span.num_rows * index // count for index in range(count + 1)]
        for (rank, _), first, end in zip(span.holders, ends, ends[1:], strict=False):
            if first < end:
                even.append((rank, dataclasses.replace(span, first_row=first, end_row=end)))
    planned = _by_rank(even, len(boxes))
    if costs is None:
        return planned
    share_bytes = max(piece_bytes, sum(each.size_bytes for _, each in even) // (_SHARES_PER_RANK * len(boxes)))
    shares = [(rank, part) for rank, share in even for part in share.pieces(share_bytes)]
    # The first goal is the time only about, but has no hollows to end in: the first share that is sent costs no more
    # than others.
    for goal_s in (_Load.busy_s, _Load.total_s):
        shares = _balanced(shares, _Load(costs, len(boxes), piece_bytes), goal_s)
    found = _by_rank(shares, len(boxes))
    return min(planned, found, key=lambda reads: seconds_of(reads, costs, piece_bytes=piece_bytes))


def _spans(boxes: Sequence[Sequence[RowBox]], specs: Mapping[str, TableSpec]) -> Iterator[RowRead]:
    """Yield the rows of all boxes, ascending, in runs of which the same ranks hold the same number of bytes."""
    by_name: dict[str, list[tuple[int, RowBox]]] = {}
    for rank, of_rank in enumerate(boxes):
        for box in of_rank:
            if box.first_row < box.end_row:
                by_name.setdefault(box.name, []).append((rank, box))
    for name, held in sorted(by_name.items()):
        changes: dict[int, list[tuple[int, int]]] = {}
        for rank, box in held:
            width = RecordLayout(specs[name], box.columns).size_bytes
            changes.setdefault(box.first_row, []).append((rank, width))
            changes.setdefault(box.end_row, []).append((rank, -width))
        row_bytes = RecordLayout(specs[name], specs[name].whole).size_bytes
        widths: dict[int, int] = {}
        last: RowRead | None = None
        first = 0
        for row in sorted(changes):
            holders = tuple(sorted(widths.items()))
            if last is not None and (last.end_row, last.holders) == (first, holders):
                last = dataclasses.replace(last, end_row=row)
            else:
                if last is not None:
                    yield last
                last = None
                if holders:
                    last = RowRead(name=name, first_row=first, end_row=row, row_bytes=row_bytes, holders=holders)
            first = row
            for rank, change in changes[row]:
                widths[rank] = widths.get(rank, 0) + change
                if not widths[rank]:
                    del widths[rank]
        if last is not None:
            yield last


def _by_rank(shares: Sequence[_Share], num_ranks: int) -> list[list[RowRead]]:
    """Return each rank's reads, by table and row; adjacent ones become one."""
    reads: list[list[RowRead]] = [[] for _ in range(num_ranks)]
    for rank, share in sorted(shares, key=lambda each: (each[1].name, each[1].first_row)):
        last = reads[rank][-1] if reads[rank] else None
        if last is not None and (last.name, last.end_row, last.holders) == (share.name, share.first_row, share.holders):
            reads[rank][-1] = dataclasses.replace(last, end_row=share.end_row)
        else:
            reads[rank].append(share)
    return reads


class _Load:
    """How long each rank reads, and sends and receives, as shares of rows come and go: float64[num_ranks]."""

    def __init__(self, costs: ReadCosts, num_ranks: int, piece_bytes: int) -> None:
        self._costs, self._piece_bytes = costs, piece_bytes
        self.reading_s, self.sending_s = np.zeros(num_ranks), np.zeros(num_ranks)
        self.store_s = 0.0

    def add(self, reader: int, read: RowRead, sign: int = 1) -> None:
        """Let a rank read rows and send others theirs; with a sign of -1 let it not."""
        requests = max(1.0, read.size_bytes / self._piece_bytes)
        time_s = requests * self._costs.request_s[reader] + read.size_bytes * self._costs.read[reader]
        self.reading_s[reader] += sign * time_s
        self.store_s += sign * read.size_bytes * self._costs.store
        for rank, size_bytes in read.receivers(reader):
            time_s = sign * size_bytes * self._costs.send[reader][rank]
            self.sending_s[rank] += time_s
            self.sending_s[reader] += time_s

    def total_s(self, order: float = np.inf) -> float:
        """Return the time of all; of a finite order more, but less too when one of several busiest ranks has less.

        Ranks read a piece each, then send them all at once. So the slowest reader and the busiest sender add up.
        """
        return max(_norm(self.reading_s, order), self.store_s) + _norm(self.sending_s, order)

    def busy_s(self, order: float) -> float:
        """Return, like `total_s`, how long the busiest rank reads and sends."""
        return _norm(self.reading_s + self.sending_s, order)


def _norm(times_s: npt.NDArray[np.float64], order: float) -> float:
    times_s = np.maximum(times_s, 0.0)  # rounding may leave a little below zero
    largest = float(times_s.max())
    return largest * float(np.linalg.norm(times_s / largest, order)) if largest > 0 else 0.0


def _balanced(shares: Sequence[_Share], load: _Load, goal_s: Callable[[_Load, float], float]) -> list[_Share]:
    """Give shares that the busiest reader or the busiest sender reads to others, as long as that serves the goal."""
    num_ranks = len(load.reading_s)
    # Those that the same ranks hold and that are about as large are alike: one stands for all. By reader.
    alike: list[dict[tuple[tuple[tuple[int, int], ...], int], list[RowRead]]] = [{} for _ in range(num_ranks)]

    def put(reader: int, read: RowRead) -> None:
        load.add(reader, read)
        alike[reader].setdefault((read.holders, read.size_bytes.bit_length()), []).append(read)

    for reader, read in shares:
        put(reader, read)
    goal = before = goal_s(load, _NORM)
    for num_moves in itertools.count(1):
        idlest = np.argsort(load.reading_s + load.sending_s, kind="stable")[:_IDLE_RANKS].tolist()
        best = (goal, -1)
        move: tuple[list[RowRead], int, int] | None = None
        for reader in sorted({int(load.reading_s.argmax()), int(load.sending_s.argmax())}):
            for reads in filter(None, alike[reader].values()):
                read = reads[-1]
                load.add(reader, read, -1)
                for other in sorted({*idlest, *(rank for rank, _ in read.holders)} - {reader}):
                    load.add(other, read)
                    if (now := (goal_s(load, _NORM), other)) < best:
                        best, move = now, (reads, reader, other)
                    load.add(other, read, -1)
                load.add(reader, read)
        if move is None:
            break
        goal, (reads, reader, other) = best[0], move
        load.add(reader, reads[-1], -1)
        put(other, reads.pop())
        if num_moves % num_ranks == 0:
            if goal > _GAIN * before:
                break
            before = goal
    return [(reader, read) for reader, of_rank in enumerate(alike) for reads in of_rank.values() for read in reads]


def seconds_of(reads: Sequence[Sequence[RowRead]], costs: ReadCosts, *, piece_bytes: int = PIECE_BYTES) -> float:
    """Return how long all ranks' reads will take, from the first reply on."""
    load = _Load(costs, len(reads), piece_bytes)
    for reader, of_rank in enumerate(reads):
        for read in of_rank:
            load.add(reader, read)
    return load.total_s()


def in_rounds(
    reads: Sequence[Sequence[RowRead]], *, piece_bytes: int = PIECE_BYTES
) -> tuple[int, list[list[tuple[int, RowRead]]]]:
    """Return in how many rounds ranks send each other rows, and each rank's pieces with the round before or in which.

    All ranks take part in each round, and each of them sends one piece at most: one that others have parts of. A rank
    reads the pieces that it alone holds between rounds. Both are spread evenly, so that no rank waits for long.
    """
    pieces = [[piece for read in of_rank for piece in read.pieces(piece_bytes)] for of_rank in reads]
    sent = [[each for each in of_rank if each.receivers(rank)] for rank, of_rank in enumerate(pieces)]
    num_rounds = max(map(len, sent), default=0)
    found: list[list[tuple[int, RowRead]]] = []
    for rank, of_rank in enumerate(pieces):
        kept = [each for each in of_rank if not each.receivers(rank)]
        due = [(number * num_rounds // len(kept), False, each) for number, each in enumerate(kept)]
        due += [(number * num_rounds // len(sent[rank]), True, each) for number, each in enumerate(sent[rank])]
        found.append([(round_, each) for round_, _, each in sorted(due, key=lambda each: each[:2])])
    return num_rounds, found
