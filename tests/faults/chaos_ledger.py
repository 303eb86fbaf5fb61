"""What a trainer was acked, row by row, and how it compares with what a store says."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.paramserver.reading.reader import Rows
from headrace.schemas.routing import shards_of_rows, table_seed

__all__ = ["UNKNOWN_SEQ", "AckedDelta", "Findings", "Ledger", "Newest"]

_MISSING, _PRESENT = 0, 1
_MAX_LINES = 10
# More than trainers send in a minute, in which the archive must have caught up.
_MAX_JOURNAL = 40_000
UNKNOWN_SEQ = 2**62
"""Of a batch whose ack came with a hello, which tells no seq."""


@dataclass(frozen=True, kw_only=True)
class AckedDelta:
    """Rows of one column shard of one table in an acked batch: plain bytes, to go through a pipe.

    Attributes:
        fqn: The table.
        version: (epoch, step) of all rows.
        column_offset: First column of the shard.
        width: Its columns.
        row_ids: int64[n].
        columns: Bytes of `weights` and of each state, n rows each.
        identities: int64[n], where the table has them.
        deleted_row_ids: int64[k].
    """

    fqn: str
    version: tuple[int, int]
    column_offset: int
    width: int
    row_ids: bytes
    columns: dict[str, bytes]
    identities: bytes | None
    deleted_row_ids: bytes


@dataclass
class Findings:
    """What a comparison has found: counts by kind, and the first few in words."""

    counts: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)

    def add(self, kind: str, number: int, line: str) -> None:
        """Count and describe."""
        self.counts[kind] += number
        if len(self.lines) < _MAX_LINES:
            self.lines.append(f"{kind}: {line}")

    def __bool__(self) -> bool:
        return bool(self.counts)


class Newest(NamedTuple):
    """The newest acked versions of some rows: int64[n] each."""

    row_ids: npt.NDArray[np.int64]
    epochs: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]


class _Entry(NamedTuple):
    """An acked batch: of a shard, with an upper bound of its seq in the shard's log."""

    shard: int
    seq: int
    deltas: Sequence[AckedDelta]


@dataclass
class _Table:
    """The newest acked version of each row of a table, in arrays of as many rows."""

    row_ids: npt.NDArray[np.int64]
    epochs: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    is_deleted: npt.NDArray[np.bool_]
    identities: npt.NDArray[np.int64]
    columns: dict[str, npt.NDArray[np.uint8]] = field(default_factory=dict)

    @classmethod
    def of(cls, row_ids: npt.NDArray[np.int64]) -> _Table:
        """Return one of which nothing was acked."""
        none = np.zeros_like(row_ids)
        return cls(row_ids, none, none.copy(), none.astype(bool), none.copy())

    def map(self, change: Callable[[Any], Any]) -> _Table:
        """Return the table with each of its arrays changed."""
        arrays = (self.row_ids, self.epochs, self.steps, self.is_deleted, self.identities)
        return _Table(*map(change, arrays), columns={name: change(column) for name, column in self.columns.items()})

    def set_back(self, older: _Table, rows: npt.NDArray[np.bool_]) -> None:
        """Take some rows from an older state."""
        for name in ("epochs", "steps", "is_deleted", "identities"):
            getattr(self, name)[rows] = getattr(older, name)[rows]
        for name, column in self.columns.items():
            column[rows] = older.columns[name][rows] if name in older.columns else 0

    def take(self, delta: AckedDelta, row_bytes: dict[str, tuple[int, int, int]]) -> None:
        for ids, is_deleted in ((delta.row_ids, False), (delta.deleted_row_ids, True)):
            at = np.searchsorted(self.row_ids, np.frombuffer(ids, np.int64))
            self.epochs[at], self.steps[at] = delta.version
            self.is_deleted[at] = is_deleted
            if is_deleted or not at.size:
                continue
            if delta.identities is not None:
                self.identities[at] = np.frombuffer(delta.identities, np.int64)
            for name, data in delta.columns.items():
                whole_bytes, first, last = row_bytes[name]
                column = self.columns.setdefault(name, np.zeros((self.row_ids.size, whole_bytes), np.uint8))
                column[at, first:last] = np.frombuffer(data, np.uint8).reshape(at.size, -1)


class Ledger:
    """What has been acked. Not thread-safe.

    A shard that was restored has its log up to a seq, and what was acked behind it again only after the next flush.
    `set_back` makes this the ledger's state. For that the ledger lets its last batches wait in a journal.

    Attributes:
        num_batches: Acked batches.
        num_rows: Their rows, each as often as it was acked.
        num_acked: Acked batches by shard.
        num_lost: Batches that were acked and went with a disk.
    """

    def __init__(
        self, rows: dict[str, npt.NDArray[np.int64]], dims: dict[str, int], *, deletes: Container[str] = ()
    ) -> None:
        """Begin empty.

        Args:
            rows: All row ids that a table may have, ascending, by table.
            dims: Columns of each table.
            deletes: Tables of which a trainer deletes rows.
        """
        self.num_batches = self.num_rows = self.num_lost = 0
        self.num_acked: Counter[int] = Counter()
        self._tables = {fqn: _Table.of(ids) for fqn, ids in rows.items()}
        self._dims, self._deletes = dims, deletes
        self._journal: deque[_Entry] = deque()
        self._base: dict[str, _Table] | None = None  # the state before the journal
        self._base_seqs: Counter[int] = Counter()

    @property
    def row_ids(self) -> dict[str, npt.NDArray[np.int64]]:
        """All row ids by table."""
        return {fqn: table.row_ids for fqn, table in self._tables.items()}

    def keep_journal(self) -> None:
        """From now on be ready for `set_back`."""
        self._base = {fqn: table.map(np.copy) for fqn, table in self._tables.items()}

    def take(self, deltas: Sequence[AckedDelta], *, shard: int = 0, seq: int = 0) -> None:
        """Note an acked batch. Batches of one client come in the order of their acks.

        Args:
            deltas: The batch.
            shard: Which has acked it.
            seq: At most this is its place in the shard's log.
        """
        self.num_batches += 1
        self.num_acked[shard] += 1
        self.num_rows += sum((len(delta.row_ids) + len(delta.deleted_row_ids)) // 8 for delta in deltas)
        self._apply(self._tables, deltas)
        if self._base is None:
            return
        self._journal.append(_Entry(shard, seq, deltas))
        if len(self._journal) > _MAX_JOURNAL:
            oldest = self._journal.popleft()
            self._apply(self._base, oldest.deltas)
            if oldest.seq != UNKNOWN_SEQ:
                self._base_seqs[oldest.shard] = max(self._base_seqs[oldest.shard], oldest.seq)

    def set_back(self, seqs: Mapping[int, int], num_shards: int) -> int:
        """Forget what shards have acked behind a seq each, because it went with a disk; return how many batches."""
        assert self._base is not None, "keep_journal comes first"
        for shard, seq in seqs.items():
            assert self._base_seqs[shard] <= seq, f"the journal begins behind seq {seq} of shard {shard}"
        for fqn, table in self._tables.items():
            shards = shards_of_rows(table_seed(fqn), table.row_ids, num_shards)
            table.set_back(self._base[fqn], np.isin(shards, list(seqs)))
        num_before = len(self._journal)
        self._journal = deque(entry for entry in self._journal if entry.seq <= seqs.get(entry.shard, entry.seq))
        for entry in self._journal:
            if entry.shard in seqs:
                self._apply(self._tables, entry.deltas)
        num_lost = num_before - len(self._journal)
        self.num_lost += num_lost
        return num_lost

    def _apply(self, tables: dict[str, _Table], deltas: Sequence[AckedDelta]) -> None:
        for delta in deltas:
            tables[delta.fqn].take(delta, self._places(delta, len(delta.row_ids) // 8))

    def copy(self) -> Ledger:
        """Return what has been acked up to now, as something that does not change."""
        other = Ledger({}, self._dims, deletes=self._deletes)
        other._tables = {fqn: table.map(np.copy) for fqn, table in self._tables.items()}
        return other

    def present_rows(self, fqn: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Return the ids of the rows that are acked and not deleted, and the bytes of their weights, `[n, bytes]`."""
        table = self._tables[fqn]
        is_present = (table.epochs > 0) & ~table.is_deleted
        if "weights" not in table.columns:
            return table.row_ids[:0], np.zeros((0, 0), np.uint8)
        return table.row_ids[is_present], table.columns["weights"][is_present]

    def newest(self, fqn: str, row_ids: npt.NDArray[np.int64]) -> Newest:
        """Return the newest acked versions of those of some rows, deleted ones too, of which anything was acked."""
        table = self._tables[fqn]
        at = np.searchsorted(table.row_ids, row_ids)
        at = at[table.epochs[at] > 0]
        return Newest(table.row_ids[at], table.epochs[at], table.steps[at])

    def compare(self, fqn: str, stored: Rows | None, *, is_final: bool) -> Findings:
        """Compare what was acked of a table with what the store says of all its rows.

        A deleted row is missing, and no version says since when. So while batches are on their way, any row of a table
        of which rows are deleted may be.

        Args:
            fqn: The table.
            stored: All rows in order, with states and versions, read after the last batch was noted here. Rows beyond
                them are rows that the stored table has not got yet. None for no such table.
            is_final: All that was ever sent has been acked: the store has nothing newer.
        """
        table, findings = self._tables[fqn], Findings()
        size = 0 if stored is None else stored.presence.size
        if num_beyond := int((table.epochs[size:] > 0).sum()):
            findings.add("lost", num_beyond, f"{fqn}: {num_beyond} acked rows are beyond the stored table")
        if stored is None:
            return findings
        table = table.map(lambda rows: rows[:size])
        assert stored.epochs is not None and stored.steps is not None
        acked = table.epochs > 0
        is_older = (stored.epochs < table.epochs) | ((stored.epochs == table.epochs) & (stored.steps < table.steps))
        is_equal = (stored.epochs == table.epochs) & (stored.steps == table.steps)
        is_missing, is_present = stored.presence == _MISSING, stored.presence == _PRESENT
        values_differ = np.zeros(acked.size, bool)
        columns = {"weights": stored.weights, **stored.states}
        for name, column in table.columns.items():
            theirs = np.ascontiguousarray(columns[name]).view(np.uint8).reshape(acked.size, -1)
            values_differ |= (theirs != column).any(axis=1)
        if stored.identities is not None:
            values_differ |= stored.identities != table.identities
        faults = {
            "lost": acked & ~table.is_deleted & is_missing & (is_final or fqn not in self._deletes),
            "resurrected": acked & table.is_deleted & is_present & (is_older | is_equal),
            "stale": acked & is_present & is_older & ~table.is_deleted,
            "wrong": acked & is_present & is_equal & ~table.is_deleted & values_differ,
        }
        if is_final:
            faults["unacked"] = acked & ~is_missing & ~is_older & ~is_equal
        for kind, rows in faults.items():
            if rows.any():
                at = int(np.flatnonzero(rows)[0])
                findings.add(
                    kind,
                    int(rows.sum()),
                    f"{fqn} row {table.row_ids[at]}: acked (epoch {table.epochs[at]}, step {table.steps[at]}"
                    f"{', deleted' if table.is_deleted[at] else ''}), the store has presence {stored.presence[at]}, "
                    f"(epoch {stored.epochs[at]}, step {stored.steps[at]}); {int(rows.sum())} such rows",
                )
        return findings

    def _places(self, delta: AckedDelta, size: int) -> dict[str, tuple[int, int, int]]:
        """Return, by column, (bytes of a whole row, where this shard's begin, where they end)."""
        places = {}
        for name, data in delta.columns.items():
            mine = len(data) // size if size else 0
            # What is as wide as the shard is split with it; the rest belongs to the row.
            is_split = name == "weights" or name.startswith("pointwise")
            whole = mine * self._dims[delta.fqn] // delta.width if is_split else mine
            first = mine * delta.column_offset // delta.width if is_split else 0
            places[name] = (whole, first, first + mine)
        return places


def acked_deltas(epoch: int, step: int, deltas: Sequence[Any]) -> list[AckedDelta]:
    """Return what a batch's `TableDelta` structs hold, copied."""
    return [
        AckedDelta(
            fqn=delta.fqn,
            version=(epoch, step),
            column_offset=delta.column_offset,
            width=delta.width,
            row_ids=bytes(delta.row_ids),
            columns={"weights": bytes(delta.weights), **{state.name: bytes(state.data) for state in delta.states}},
            identities=None if delta.identities is None else bytes(delta.identities),
            deleted_row_ids=bytes(delta.deleted_row_ids or b""),
        )
        for delta in deltas
    ]
