"""Compare digests of every row of the trainer's tables with the store's, and find the rows that differ.

Each rank requests digests of its own rows and columns. A table split by columns is compared without its rowwise
states: each part has its own copy of them, and the store answers with one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.dtypes import bits_of
from headrace.paramserver.reading.differences import (
    MAX_NAMED,
    describe_difference,
    differing_rows,
    first_differing_rows,
    for_each_table,
    rows_that_differ,
)
from headrace.paramserver.reading.reader import EmbeddingReader, Rows
from headrace.paramserver.system.text import first_of
from headrace.schemas.row_digest import BUCKET_ROWS, TableDigest, digest_rows
from headrace.schemas.row_records import PRESENT
from headrace.schemas.tables import StateKind
from headrace.streamer.absent_rows import AbsentRows, StoredTable, count_absent, stored_tables
from headrace.streamer.copies import CopyDifference
from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["AuditReport", "TableAudit", "audit_tables", "differing_rows_of", "mark_what_differs"]

# Rows gathered at once where the store has only some of a bucket's rows.
_ROWS_AT_ONCE = 8192

_Ids = npt.NDArray[np.int64]
_NO_ROWS = np.empty(0, np.int64)
_Columns = list[npt.NDArray[Any]]


@dataclass(kw_only=True, slots=True)
class TableAudit:
    """The result for one table, or for the part of it that a rank has.

    Attributes:
        fqn: The table.
        rank: The trainer's rank.
        row_offset: First row of the part.
        num_local_rows: Rows of the part.
        column_offset: First column of the part.
        num_columns: Columns of the part.
        num_rows: Rows that the store has, too; their values are compared.
        absent: Rows that it does not have, by the reason.
        lacks: `incomplete` if the server says that no trainer has sent all rows yet, `updated rows only` if none is to.
        digest: Digest of their values in the trainer.
        differing_buckets: Buckets (row id / 65536) whose digests differ.
        differing_row_ids: The first rows in which they differ, global.
        is_steady: False if the shards' logs show a write by someone else meanwhile.
        skipped_states: Rowwise states that were not compared.
    """

    fqn: str
    rank: int
    row_offset: int
    num_local_rows: int
    column_offset: int
    num_columns: int
    num_rows: int = 0
    digest: int = 0
    differing_buckets: list[int] = field(default_factory=list)
    differing_row_ids: list[int] = field(default_factory=list)
    is_steady: bool = True
    skipped_states: tuple[str, ...] = ()
    absent: AbsentRows = field(default_factory=AbsentRows)
    lacks: str = ""

    @property
    def num_missing(self) -> int:
        """Rows that the store does not have."""
        return self.num_local_rows - self.num_rows

    def __str__(self) -> str:
        """Describe the result in one line."""
        last_row, last_column = self.row_offset + self.num_local_rows, self.column_offset + self.num_columns
        text = (
            f"{self.fqn} rows {self.row_offset}:{last_row} columns {self.column_offset}:{last_column} "
            f"(rank {self.rank}): {self.num_rows} rows, digest {self.digest:016x}, {self.num_missing} not in the store"
        )
        text += f" ({self.absent})" if self.num_missing else ""
        text += describe_difference(self.differing_buckets, self.differing_row_ids)
        if self.lacks:
            text += f"; {self.lacks}"
        if not self.is_steady:
            text += "; written to meanwhile"
        if self.skipped_states:
            text += f"; left out: {', '.join(self.skipped_states)}"
        return text


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class AuditReport:
    """The result of an audit.

    Attributes:
        tables: Tables and parts of all ranks.
        only_present: Accept all rows that the store does not have.
        step: Step at which the values were compared.
        preexisting: Tables that the store had before this run, whose rows `attach` did not send.
        unstreamed: What is trained and not streamed, by name, with the reason; not what `attach` was told to leave out.
        copies: Tables whose rows are not the same on ranks that should keep them equal.
    """

    tables: tuple[TableAudit, ...]
    only_present: bool
    step: int
    preexisting: tuple[str, ...] = ()
    unstreamed: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[CopyDifference, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs, no row is missing that may have to be there, and all that is trained is streamed."""
        return not (self.unstreamed or self.copies) and not any(
            table.differing_buckets
            or ((table.absent.num_lost or table.absent.num_maybe_deleted) and not self.only_present)
            for table in self.tables
        )

    @property
    def num_rows(self) -> int:
        """Number of compared rows; each part of a table split by columns counts its own."""
        return sum(table.num_rows for table in self.tables)

    def __repr__(self) -> str:
        return f"<AuditReport of step {self.step}, {'equal' if self.is_equal else 'different'}:\n{self}>"

    def __str__(self) -> str:
        """Describe each table in one line, and say why rows may differ."""
        lines = [*map(str, self.tables)]
        lines += map(str, self.copies)
        lines += [f"{name} is not streamed: {reason}" for name, reason in self.unstreamed.items()]
        if self.preexisting and not self.is_equal:
            lines.append(
                f"the store had {first_of(self.preexisting)} before this run: rows that differ may be of a run before; "
                "attach with publish='all' to send every row"
            )
        return "\n".join(lines)


async def audit_tables(
    tables: Sequence[TappedTable], reader: EmbeddingReader, *, rank: int = 0, updated_only: Container[str] = ()
) -> list[TableAudit]:
    """Compare tables with what a reader's shards have. REQUIRES: no training meanwhile.

    Rows of `updated_only`, by fqn, may be absent because they were not updated.

    Of tables with virtual ids all rows that are held here are read: these are too far apart for digests of buckets.
    Rows that only the store has are not found.

    Cancellation: harmless.
    """
    stored = await stored_tables(reader)

    async def audit(table: TappedTable) -> TableAudit:
        of_table = stored.get(table.spec.fqn, StoredTable())
        result, absent = await _audit_present(table, reader, rank)
        result.lacks = of_table.lacks
        result.absent = await count_absent(table, absent, reader, of_table, updated_only=updated_only)
        return result

    return await _for_each(tables, audit)


async def differing_rows_of(
    tables: Sequence[TappedTable], reader: EmbeddingReader, *, before: Mapping[str, int]
) -> dict[str, list[int]]:
    """Return the tables whose rows the store has with other values, by fqn, with the first such rows, global.

    Rows that it does not have are passed over, and of the tables of `before` those from this row on. REQUIRES and
    cancellation: as for `audit_tables`.
    """

    async def compare(table: TappedTable) -> TableAudit:
        return (await _audit_present(table, reader, 0, end_row=before.get(table.spec.fqn)))[0]

    results = await _for_each(tables, compare)
    return {result.fqn: result.differing_row_ids for result in results if result.differing_buckets}


async def _for_each(
    tables: Sequence[TappedTable], audit: Callable[[TappedTable], Coroutine[Any, Any, TableAudit]]
) -> list[TableAudit]:
    return await for_each_table(
        [table for table in tables if table.num_local_rows or table.index is not None],
        audit,
        num_rows_of=lambda table: table.num_local_rows,
    )


def _audit_present(
    table: TappedTable, reader: EmbeddingReader, rank: int, *, end_row: int | None = None
) -> Coroutine[Any, Any, tuple[TableAudit, _Ids]]:
    """Compare the rows that the store has, of a table without `index` those before `end_row`.

    Return the result, and the rows that it does not have.
    """
    return _audit_held(table, reader, rank) if table.index is not None else _audit(table, reader, rank, end_row)


async def mark_what_differs(
    tables: Sequence[TappedTable], reader: EmbeddingReader, *, marks_absent: Callable[[str], bool]
) -> int:
    """Mark the rows whose values differ between trainer and store, and return their number.

    Costs the store a pass over its rows, and the network the rows of buckets that differ.

    Args:
        tables: REQUIRES: not trained meanwhile.
        reader: Reads the store.
        marks_absent: Returns for an fqn whether to mark rows that the store does not have, too.

    Cancellation: harmless.
    """
    num_marked = 0
    for table in tables:
        if table.index is not None:  # rows would be read one by one, so send them all
            table.mark_all()
            num_marked += table.dirty.count
            continue
        if not table.num_local_rows:
            continue
        stored, live = await _digests(table, reader)
        found = [await _differing_in(table, reader, stored, bucket) for bucket in stored.differing_buckets(live)]
        if marks_absent(table.spec.fqn):
            found += list(_absent_rows(table, stored))
        for row_ids in found:
            table.dirty.mark(torch.from_numpy(row_ids - table.row_offset))
            num_marked += row_ids.size
    return num_marked


def _absent_rows(table: TappedTable, stored: TableDigest) -> Iterator[_Ids]:
    end_row = table.row_offset + table.num_local_rows
    for bucket in range(table.row_offset // BUCKET_ROWS, -(-end_row // BUCKET_ROWS)):
        first, last = max(table.row_offset, bucket * BUCKET_ROWS), min(end_row, (bucket + 1) * BUCKET_ROWS)
        yield np.setdiff1d(np.arange(first, last), stored.present_rows(bucket), assume_unique=True)


async def _digests(
    table: TappedTable, reader: EmbeddingReader, end_row: int | None = None
) -> tuple[TableDigest, TableDigest]:
    """Return digests of the store's values and of the trainer's, for the rows before `end_row` that the store has."""
    last = table.row_offset + table.num_local_rows
    end_row = last if end_row is None else max(table.row_offset, min(end_row, last))
    stored = await reader.digest(
        table.spec.fqn, columns=table.shard, first_row=table.row_offset, end_row=end_row, with_presence=True
    )
    live = TableDigest(spec=table.spec, columns=table.shard)
    for bucket in sorted(stored.buckets):
        row_ids = stored.present_rows(bucket)
        for first in range(0, row_ids.size, _ROWS_AT_ONCE):
            some = row_ids[first : first + _ROWS_AT_ONCE]
            live.add_rows(some, _live_columns(table, some))
    return stored, live


async def _audit(
    table: TappedTable, reader: EmbeddingReader, rank: int, end_row: int | None = None
) -> tuple[TableAudit, _Ids]:
    """Return the result, and the rows that the store does not have."""
    spec, is_split = table.spec, table.shard != table.spec.whole
    stored, live = await _digests(table, reader, end_row)
    differing = stored.differing_buckets(live)
    result = TableAudit(
        fqn=table.spec.fqn,
        rank=rank,
        row_offset=table.row_offset,
        num_local_rows=table.num_local_rows,
        column_offset=table.shard.offset,
        num_columns=table.shard.width,
        num_rows=stored.num_rows,
        digest=live.total,
        differing_buckets=differing,
        differing_row_ids=await first_differing_rows(
            differing, lambda bucket: _differing_in(table, reader, stored, bucket)
        ),
        is_steady=stored.is_steady,
        skipped_states=tuple(state.name for state in spec.states if is_split and state.kind is StateKind.ROWWISE),
    )
    absent = list(_absent_rows(table, stored)) if result.num_missing else []
    return result, np.concatenate([*absent, _NO_ROWS])


async def _audit_held(table: TappedTable, reader: EmbeddingReader, rank: int) -> tuple[TableAudit, _Ids]:
    """Compare the rows of virtual ids that are held here with those that the store has; also return the others."""
    absent = [_NO_ROWS]
    assert table.index is not None
    row_ids = np.sort(table.index.row_ids().cpu().numpy())
    result = TableAudit(
        fqn=table.spec.fqn,
        rank=rank,
        row_offset=0,
        num_local_rows=row_ids.size,
        column_offset=table.shard.offset,
        num_columns=table.shard.width,
    )
    for first in range(0, row_ids.size, _ROWS_AT_ONCE):
        rows = await reader.get(table.spec.fqn, row_ids[first : first + _ROWS_AT_ONCE], with_states=True)
        places = table.places(torch.from_numpy(rows.row_ids)).numpy()
        ours = _live_columns(table, places)
        is_present = rows.presence == PRESENT
        absent.append(rows.row_ids[~is_present])
        result.num_rows += int(is_present.sum())
        digests = digest_rows(rows.row_ids, ours)
        result.digest = (result.digest + int(digests[is_present].sum())) % 2**64
        differing = rows.row_ids[rows_that_differ(ours, _stored_columns(table, rows)) & is_present]
        buckets = {*result.differing_buckets, *(differing // BUCKET_ROWS).tolist()}
        result.differing_buckets = sorted(buckets)
        result.differing_row_ids += differing[: max(0, MAX_NAMED - len(result.differing_row_ids))].tolist()
    return result, np.concatenate(absent)


async def _differing_in(table: TappedTable, reader: EmbeddingReader, stored: TableDigest, bucket: int) -> _Ids:
    """Return the rows of a bucket that differ, of those that the store has."""

    async def compare(row_ids: _Ids) -> npt.NDArray[np.bool_]:
        rows = await reader.get(table.spec.fqn, row_ids, with_states=True)
        differs = rows_that_differ(_live_columns(table, row_ids), _stored_columns(table, rows))
        differs |= rows.presence != PRESENT
        return differs

    return await differing_rows(stored.present_rows(bucket), compare)


def _live_columns(table: TappedTable, row_ids: _Ids) -> _Columns:
    """Return the columns to digest, of ascending global row ids of the table's part, or of places in an index."""
    states = table.states()
    tensors = [
        states[state.name]
        for state in table.spec.states
        if state.kind is StateKind.POINTWISE or table.shard == table.spec.whole
    ]
    local_ids = row_ids - table.row_offset
    first = int(local_ids[0]) if local_ids.size else 0
    has_copies = table.cache is not None or table.is_rounded
    if not has_copies and local_ids.size and int(local_ids[-1]) - first == local_ids.size - 1:
        # Consecutive rows need no copy.
        return [bits_of(tensor.narrow(0, first, local_ids.size)) for tensor in (table.weights(), *tensors)]
    index = torch.from_numpy(local_ids)
    rows = [table.weights_at(index), *(tensor.index_select(0, index.to(tensor.device)) for tensor in tensors)]
    return [bits_of(values) for values in rows]


def _stored_columns(table: TappedTable, rows: Rows) -> _Columns:
    part = slice(table.shard.offset, table.shard.offset + table.shard.width)
    columns = [rows.weights[:, part]]
    for state in table.spec.states:
        if state.kind is StateKind.POINTWISE:
            columns.append(rows.states[state.name][:, part])
        elif table.shard == table.spec.whole:
            columns.append(rows.states[state.name])
    return columns
