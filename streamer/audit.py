"""The audit: digests of every row of the trainer's tables against the store's, and the rows where they differ.

Each rank answers for its own rows and columns: it asks the shards for digests of just these. Of a table that is split
by columns, the rowwise states are left out: each part has a copy of its own, and the store answers with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.torch_dtypes import bits_of
from headrace.paramserver.reading.digest_groups import for_each_table
from headrace.paramserver.reading.reader import EmbeddingReader, Rows
from headrace.schemas.row_digest import BUCKET_ROWS
from headrace.schemas.row_records import PRESENT
from headrace.schemas.table_digest import TableDigest
from headrace.schemas.tables import StateKind
from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["AuditReport", "TableAudit", "audit_tables", "mark_what_differs", "table_columns"]

_MAX_NAMED = 20
# Rows that are gathered at once where only some of a bucket's rows are there.
_ROWS_AT_ONCE = 8192

_Ids = npt.NDArray[np.int64]


@dataclass(kw_only=True, slots=True)
class TableAudit:
    """What the audit of a table, or of the part of it that a rank has, has shown.

    Attributes:
        fqn: The table.
        rank: Of the trainer.
        row_offset: First row of the part.
        num_local_rows: Rows of the part.
        column_offset: First column of the part.
        num_columns: Columns of the part.
        num_rows: Rows that the store has too, which were compared.
        digest: Their digest, of the trainer's values.
        differing_buckets: Buckets (row id / 65536) whose digests differ.
        differing_row_ids: The first rows in which they differ, global.
        is_steady: No other writer changed the store meanwhile, as far as the shards' logs show.
        skipped_states: Rowwise states that were left out.
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

    @property
    def num_missing(self) -> int:
        """Rows that the store does not have."""
        return self.num_local_rows - self.num_rows

    def __str__(self) -> str:
        """Say it in one line."""
        last_row, last_column = self.row_offset + self.num_local_rows, self.column_offset + self.num_columns
        text = (
            f"{self.fqn} rows {self.row_offset}:{last_row} columns {self.column_offset}:{last_column} "
            f"(rank {self.rank}): {self.num_rows} rows, digest {self.digest:016x}, {self.num_missing} not in the store"
        )
        if self.differing_buckets:
            text += f"; DIFFERENT in buckets {_some(self.differing_buckets)}: rows {_some(self.differing_row_ids)}"
        if not self.is_steady:
            text += "; written to meanwhile"
        if self.skipped_states:
            text += f"; left out: {', '.join(self.skipped_states)}"
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """What an audit has shown.

    Attributes:
        tables: Of all ranks.
        only_present: Rows that the store does not have are no fault.
        step: At which the values were compared.
    """

    tables: tuple[TableAudit, ...]
    only_present: bool
    step: int

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs, and nothing is missing that should be there."""
        return not any(
            table.differing_buckets or (table.num_missing and not self.only_present) for table in self.tables
        )

    @property
    def num_rows(self) -> int:
        """Rows (of parts, where tables are split by columns) that were compared."""
        return sum(table.num_rows for table in self.tables)

    def __str__(self) -> str:
        """Say it in one line a table."""
        return "\n".join(map(str, self.tables))


async def audit_tables(tables: Sequence[TappedTable], reader: EmbeddingReader, *, rank: int = 0) -> list[TableAudit]:
    """Compare tables with what a reader's shards have; nothing may be trained meanwhile.

    Tables with virtual ids are left out: their rows are too far apart for digests by bucket.

    Cancellation: harmless.
    """
    return await for_each_table(
        [table for table in tables if table.num_local_rows],
        lambda table: _audit(table, reader, rank),
        num_rows_of=lambda table: table.num_local_rows,
    )


async def mark_what_differs(
    tables: Sequence[TappedTable], reader: EmbeddingReader, *, marks_absent: Callable[[str], bool]
) -> int:
    """Mark the rows that a store has otherwise than the trainer, and return how many are marked.

    Costs the store a pass over its rows, and the network what lies in buckets that differ.

    Args:
        tables: Not trained meanwhile.
        reader: Of the store.
        marks_absent: By fqn, whether rows are marked too that the store does not have.

    Cancellation: harmless.
    """
    num_marked = 0
    for table in tables:
        if table.index is not None:  # ids that may be anywhere have no digests: send what there is
            table.mark_all()
            num_marked += table.dirty.count
            continue
        if not table.num_local_rows:
            continue
        stored, live = await _digests(table, reader)
        found = [await _differing_rows(table, reader, stored, bucket) for bucket in stored.differing_buckets(live)]
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
        is_absent = np.ones(last - first, np.bool_)
        is_absent[stored.present_rows(bucket) - first] = False
        yield np.flatnonzero(is_absent) + first


async def _digests(table: TappedTable, reader: EmbeddingReader) -> tuple[TableDigest, TableDigest]:
    """Return the digests of the rows that the store has, of its values and of the trainer's."""
    end_row = table.row_offset + table.num_local_rows
    stored = await reader.digest(
        table.spec.fqn, columns=table.shard, first_row=table.row_offset, end_row=end_row, with_presence=True
    )
    live = TableDigest(spec=table.spec, columns=table.shard)
    for bucket in sorted(stored.buckets):
        row_ids = stored.present_rows(bucket)
        for first in range(0, row_ids.size, _ROWS_AT_ONCE):
            some = row_ids[first : first + _ROWS_AT_ONCE]
            live.add_rows(some, table_columns(table, some))
    return stored, live


async def _audit(table: TappedTable, reader: EmbeddingReader, rank: int) -> TableAudit:
    spec, is_split = table.spec, table.shard != table.spec.whole
    stored, live = await _digests(table, reader)
    result = TableAudit(
        fqn=spec.fqn,
        rank=rank,
        row_offset=table.row_offset,
        num_local_rows=table.num_local_rows,
        column_offset=table.shard.offset,
        num_columns=table.shard.width,
        num_rows=stored.num_rows,
        digest=live.total,
        differing_buckets=stored.differing_buckets(live),
        is_steady=stored.is_steady,
        skipped_states=tuple(state.name for state in spec.states if is_split and state.kind is StateKind.ROWWISE),
    )
    for bucket in result.differing_buckets:
        if len(result.differing_row_ids) >= _MAX_NAMED:
            break
        room = _MAX_NAMED - len(result.differing_row_ids)
        result.differing_row_ids += (await _differing_rows(table, reader, stored, bucket))[:room].tolist()
    return result


async def _differing_rows(table: TappedTable, reader: EmbeddingReader, stored: TableDigest, bucket: int) -> _Ids:
    """Return the rows in which a bucket differs, of those that the store has, by comparing them all."""
    row_ids = stored.present_rows(bucket)
    found = [np.empty(0, np.int64)]
    for first in range(0, row_ids.size, _ROWS_AT_ONCE):
        some = row_ids[first : first + _ROWS_AT_ONCE]
        rows = await reader.get(table.spec.fqn, some, with_states=True)
        is_different = rows.presence != PRESENT
        for ours, theirs in zip(table_columns(table, some), _stored_columns(table, rows), strict=True):
            is_different |= (_bytes(ours) != _bytes(theirs)).any(axis=1)
        found.append(some[is_different])
    return np.concatenate(found)


def table_columns(table: TappedTable, row_ids: _Ids) -> list[npt.NDArray[Any]]:
    """Return the columns that a digest takes of some rows of a tapped table.

    Args:
        table: The table, or a part of it.
        row_ids: int64[n], global, ascending, all of them in the part.
    """
    states = table.states()
    tensors = [table.weights()]
    tensors += [
        states[state.name]
        for state in table.spec.states
        if state.kind is StateKind.POINTWISE or table.shard == table.spec.whole
    ]
    local_ids = row_ids - table.row_offset
    first = int(local_ids[0]) if local_ids.size else 0
    if local_ids.size and int(local_ids[-1]) - first == local_ids.size - 1:  # a run: no copy is needed
        return [bits_of(tensor.narrow(0, first, local_ids.size)) for tensor in tensors]
    index = torch.from_numpy(local_ids)
    return [bits_of(tensor.index_select(0, index.to(tensor.device))) for tensor in tensors]


def _stored_columns(table: TappedTable, rows: Rows) -> list[npt.NDArray[Any]]:
    part = slice(table.shard.offset, table.shard.offset + table.shard.width)
    columns = [rows.weights[:, part]]
    for state in table.spec.states:
        if state.kind is StateKind.POINTWISE:
            columns.append(rows.states[state.name][:, part])
        elif table.shard == table.spec.whole:
            columns.append(rows.states[state.name])
    return columns


def _bytes(column: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(column).view(np.uint8).reshape(column.shape[0], -1)


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:_MAX_NAMED])) + (", …" if len(numbers) > _MAX_NAMED else "")
