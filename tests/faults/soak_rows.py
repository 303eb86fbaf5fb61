"""The rows of the soak: what each says of itself, and what lookups may see of them one after the other.

A row has its number in the table, a stamp that rises with each update, and columns that follow from the two. So a row
that is put together of two updates shows, and one that has gone back to an older update, too.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "FREE",
    "IDLE_STEPS",
    "PAIR",
    "STORED_TYPES",
    "TABLES",
    "SoakTable",
    "Watch",
    "encode_rows",
    "read_stamps",
]

_Ids = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]

IDLE_STEPS = 300
"""Rows of `aging` that were not updated for more steps than this expire."""
_MODULUS = 65_521
_MAX_PROBLEMS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakTable:
    """A table whose rows are written by `encode_rows`.

    Attributes:
        fqn: Its name.
        num_rows: Rows that are ever written.
        dim: Columns, at least 3. Numbers and stamps are whole and below 2²⁴: float32 holds them exactly.
        is_narrow: Columns, at least 6, are whole and from 0 to 255: bfloat16 holds them exactly.
        may_go: Rows are deleted or expire.
        is_virtual: The server knows no number of rows; ids are far apart.
    """

    fqn: str
    num_rows: int
    dim: int
    is_narrow: bool = False
    may_go: bool = False
    is_virtual: bool = False

    def ids_of(self, numbers: _Ids) -> _Ids:
        """Return the row ids of rows by their numbers."""
        return numbers * 1_000_003 + 2**40 if self.is_virtual else numbers


# The first two are always updated together: at no step do they differ.
PAIR = ("left.weight", "right.weight")
TABLES = {
    table.fqn: table
    for table in (
        SoakTable(fqn="left.weight", num_rows=64, dim=4),
        SoakTable(fqn="right.weight", num_rows=64, dim=8),
        SoakTable(fqn="steady.weight", num_rows=3000, dim=16),
        SoakTable(fqn="aging.weight", num_rows=3000, dim=8, may_go=True),
        SoakTable(fqn="evicted.weight", num_rows=500, dim=8, may_go=True),
        SoakTable(fqn="virtual", num_rows=400, dim=4, may_go=True, is_virtual=True),
        SoakTable(fqn="halves.weight", num_rows=500, dim=9, is_narrow=True),
    )
}
FREE = {"free.weight": (1000, 8), "free_halves.weight": (300, 8)}
"""By name: rows and columns of tables under Adagrad, whose rows say nothing of themselves."""
STORED_TYPES = {"halves.weight": torch.bfloat16, "free_halves.weight": torch.bfloat16}
"""By name: what the weights of tables are rounded to; the free one has no states then."""


def encode_rows(table: SoakTable, numbers: _Ids, stamps: Any) -> npt.NDArray[np.float32]:
    """Return the rows `[n, dim]` of some numbers after the updates of these stamps."""
    stamps = np.broadcast_to(np.asarray(stamps, np.int64), numbers.shape)
    said = [numbers + 1, stamps]
    if table.is_narrow:
        said = [of >> shift & 255 for of in said for shift in (0, 8, 16)]
    columns = np.arange(len(said), table.dim, dtype=np.int64)
    mixed = (numbers[:, None] * 40_503 + stamps[:, None] * (columns * 2_903 + 31)) % _MODULUS
    return np.concatenate([np.stack(said, axis=1), mixed & 255 if table.is_narrow else mixed], axis=1).astype(
        np.float32
    )


def read_stamps(table: SoakTable, numbers: _Ids, rows: npt.NDArray[np.float32]) -> tuple[_Ids, _Mask]:
    """Return the stamps of rows, 0 for those that are missing, and which rows are no row that was ever written."""
    stamps = (rows[:, 3:6] @ [1, 1 << 8, 1 << 16] if table.is_narrow else rows[:, 1]).astype(np.int64)
    is_missing = ~rows.any(axis=1)
    is_torn = (rows != encode_rows(table, numbers, stamps)).any(axis=1) & ~is_missing
    return stamps, is_torn


class Watch:
    """What the lookups of one table in one replica have seen, and so what later ones may see.

    A row's floor is twice the highest stamp that was seen, and one more once it was seen gone after that: then only a
    higher stamp may bring it back.

    Thread: any.

    Attributes:
        problems: What must not be, in words; the first few.
        num_gone: Rows that were seen to go.
    """

    def __init__(self, table: SoakTable) -> None:
        self.problems: list[str] = []
        self.num_gone = 0
        self._table = table
        self._lock = threading.Lock()
        self._floors = np.zeros(table.num_rows, np.int64)

    def begin(self, numbers: _Ids) -> _Ids:
        """Return the floors of rows that are about to be looked up."""
        with self._lock:
            return self._floors[numbers]

    def end(self, floors: _Ids, numbers: _Ids, rows: npt.NDArray[np.float32]) -> _Ids:
        """Check what a lookup has returned; return the stamps, 0 for rows that are missing.

        Args:
            floors: From before the lookup.
            numbers: Of the rows, each once.
            rows: What came.
        """
        stamps, is_torn = read_stamps(self._table, numbers, rows)
        is_missing = stamps == 0
        # Missing before the first update, or gone after the last one that was seen.
        seen = np.where(is_missing, floors | (floors > 0), 2 * stamps)
        is_older = seen < floors
        is_lost = is_missing & (floors > 0) & (not self._table.may_go)
        with self._lock:
            self._say("torn", is_torn, numbers, floors, stamps)
            self._say("older than seen before", is_older & ~is_torn, numbers, floors, stamps)
            self._say("lost", is_lost, numbers, floors, stamps)
            now = np.maximum(self._floors[numbers], seen)
            self.num_gone += int(np.count_nonzero((now & 1) > (self._floors[numbers] & 1)))
            self._floors[numbers] = now
        return stamps

    def gone(self) -> tuple[_Ids, _Ids]:
        """Return the numbers of the rows that are gone as far as was seen, and their last stamps."""
        with self._lock:
            numbers = np.flatnonzero(self._floors & 1)
            return numbers, self._floors[numbers] >> 1

    def _say(self, what: str, is_so: _Mask, numbers: _Ids, floors: _Ids, stamps: _Ids) -> None:
        if is_so.any() and len(self.problems) < _MAX_PROBLEMS:
            at = int(np.argmax(is_so))
            was = f"stamp {floors[at] >> 1}{' and gone' if floors[at] & 1 else ''}"
            self.problems.append(
                f"{what}: {self._table.fqn} row {numbers[at]} with stamp {stamps[at]}, seen before with {was}; "
                f"{np.count_nonzero(is_so)} such rows in a lookup"
            )
