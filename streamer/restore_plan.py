"""Describe what a restore would do: who reads which rows, who sends them to whom, and how long that takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.paramserver.system.text import counted, first_of, format_seconds, format_size
from headrace.streamer.read_plan import ReadCosts, RowBox, RowRead, seconds_of

__all__ = ["PlannedTable", "RestorePlan", "RowCopy", "describe_plan"]

_MAX_LINES = 16


class RowCopy(NamedTuple):
    """Rows of a table that all of some ranks hold. After the reading each of these sends the others what it streams."""

    name: str
    ranks: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTable:
    """What a restore would do with one table.

    Attributes:
        name: The table's name on the server.
        held: By rank, the rows and columns that it streams.
        reads: By rank, the rows that it reads, and who gets parts of them.
        copies: The ranks that hold the same rows.
        bytes_read: From the store; each row once.
        bytes_sent: Between ranks; of copies at most.
        seconds: Predicted for this table, if it were the only one.
    """

    name: str
    held: tuple[tuple[RowBox, ...], ...]
    reads: tuple[tuple[RowRead, ...], ...]
    copies: tuple[RowCopy, ...]
    bytes_read: int
    bytes_sent: int
    seconds: float

    def __str__(self) -> str:
        """Describe the table in one line, and each rank's part in it in another."""
        read, sent = format_size(self.bytes_read), format_size(self.bytes_sent)
        lines = [f"{self.name}: {read} read, {sent} sent, {format_seconds(self.seconds)}"]
        for rank, (boxes, reads) in enumerate(zip(self.held, self.reads, strict=True)):
            held = [
                f"{box.first_row}:{box.end_row} × {box.columns.offset}:{box.columns.offset + box.columns.width}"
                for box in boxes
            ]
            rows = [f"{read.first_row}:{read.end_row}" for read in reads]
            to = sorted({other for read in reads for other, _ in read.receivers(rank)})
            sends = f", sends to {first_of(list(map(str, to)))}" if to else ""
            lines.append(f"  rank {rank}: holds rows × columns {first_of(held)}; reads rows {first_of(rows)}{sends}")
        lines += [f"  copies on ranks {first_of(list(map(str, copy.ranks)))}" for copy in self.copies]
        more = len(lines) - _MAX_LINES
        return "\n".join([*lines[:_MAX_LINES], *([f"  and {counted(more, 'line')} more"] if more > 0 else [])])


@dataclass(frozen=True, kw_only=True, slots=True)
class RestorePlan:
    """What `restore` would do, the same on every rank; `print` shows it. Nothing was loaded.

    Attributes:
        tables: By name.
        bytes_read: By rank.
        seconds: Predicted for reading and sending all rows. What the model itself needs comes on top.
        costs: What reading and sending costs, as measured; None if there are no rows to read.
    """

    tables: tuple[PlannedTable, ...]
    bytes_read: tuple[int, ...]
    seconds: float
    costs: ReadCosts | None

    def __str__(self) -> str:
        """Describe each table, then all of them together."""
        read, ranks = format_size(sum(self.bytes_read)), counted(len(self.bytes_read), "rank")
        total = f"{counted(len(self.tables), 'table')}: {read} read by {ranks}, {format_seconds(self.seconds)}"
        return "\n".join([*map(str, self.tables), total])


def describe_plan(
    boxes: Sequence[Sequence[RowBox]],
    reads: Sequence[Sequence[RowRead]],
    copies: Collection[RowCopy],
    costs: ReadCosts | None,
) -> RestorePlan:
    """Return the description of what each rank holds and reads, by rank; without costs there are no rows to read."""

    def seconds(reads: Sequence[Sequence[RowRead]], copies: Collection[RowCopy]) -> float:
        if costs is None:
            return 0.0
        copying = [0.0] * len(reads)
        for copy in copies:
            for rank in copy.ranks:
                copying[rank] += copy.size_bytes * max(costs.send[copy.ranks[0]][other] for other in copy.ranks[1:])
        return seconds_of(reads, costs) + max(copying)

    tables = []
    for name in sorted({box.name for of_rank in boxes for box in of_rank}):
        of_table = tuple(tuple(read for read in of_rank if read.name == name) for of_rank in reads)
        copied = tuple(copy for copy in copies if copy.name == name)
        sent = [n for rank, of_rank in enumerate(of_table) for read in of_rank for _, n in read.receivers(rank)]
        tables.append(
            PlannedTable(
                name=name,
                held=tuple(tuple(box for box in of_rank if box.name == name) for of_rank in boxes),
                reads=of_table,
                copies=copied,
                bytes_read=sum(read.size_bytes for of_rank in of_table for read in of_rank),
                bytes_sent=sum(sent) + sum(copy.size_bytes * (len(copy.ranks) - 1) for copy in copied),
                seconds=seconds(of_table, copied),
            )
        )
    return RestorePlan(
        tables=tuple(tables),
        bytes_read=tuple(sum(read.size_bytes for read in of_rank) for of_rank in reads),
        seconds=(0.0 if costs is None else costs.start_s) + seconds(reads, copies),
        costs=costs,
    )
