"""Tell apart why the store lacks rows that a trainer has: deleted, never to be sent, or lost. No answer is guessed."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.schemas.row_records import PRESENT
from headrace.schemas.table_lacks import merged_lack, what_lacks
from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["AbsentRows", "StoredTable", "count_absent", "stored_tables"]

_ROWS_AT_ONCE = 8192

_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTable:
    """What a server says of a table.

    Attributes:
        lacks: `incomplete`, `updated rows only`, or "" if its trainers have sent all rows.
        lacks_from: It lacks rows from this one on alone.
        has_deletes: Rows of it have expired or were evicted. Nothing tells which.
    """

    lacks: str = ""
    lacks_from: int = 0
    has_deletes: bool = False


@dataclass(kw_only=True, slots=True)
class AbsentRows:
    """Numbers of rows of a trainer that the store does not have.

    Attributes:
        num_deleted: This trainer has evicted them.
        num_maybe_deleted: They may have expired or been evicted before: rows of the table were, nothing tells which.
        num_not_sent: Nobody has sent them, as the user said with `publish="updated"`.
        num_lost: They should be there.
    """

    num_deleted: int = 0
    num_maybe_deleted: int = 0
    num_not_sent: int = 0
    num_lost: int = 0

    def add(self, other: Self) -> None:
        """Add other rows."""
        self.num_deleted += other.num_deleted
        self.num_maybe_deleted += other.num_maybe_deleted
        self.num_not_sent += other.num_not_sent
        self.num_lost += other.num_lost

    def __str__(self) -> str:
        """Describe them, without the words that they are not in the store."""
        parts = {
            "evicted": self.num_deleted,
            "may have expired: nothing can tell": self.num_maybe_deleted,
            "never sent, as publish='updated' says": self.num_not_sent,
            "should be there": self.num_lost,
        }
        return ", ".join(f"{number} {what}" for what, number in parts.items() if number)


async def stored_tables(reader: EmbeddingReader) -> dict[str, StoredTable]:
    """Return what the shards say of all tables, by fqn. Cancellation: harmless."""
    found: dict[str, StoredTable] = {}
    for table in (table for status in await reader.status() for table in status.tables):
        known = found.get(table.spec.fqn, StoredTable())
        first_rows = [known.lacks_from] if known.lacks else []
        first_rows += [] if table.filling is None else [table.filling.from_row or 0]
        found[table.spec.fqn] = StoredTable(
            lacks=merged_lack((known.lacks, what_lacks(table.filling))),
            lacks_from=min(first_rows, default=0),
            has_deletes=known.has_deletes or bool(table.has_deletes),
        )
    return found


async def count_absent(
    table: TappedTable, row_ids: _Ids, reader: EmbeddingReader, stored: StoredTable, *, updated_only: Container[str]
) -> AbsentRows:
    """Tell apart rows of a table that the store does not have, global ids.

    `updated_only` are the tables of which only updated rows are sent. That explains no row that the table had before it
    grew, as far as the server knows. Cancellation: harmless.
    """
    found = AbsentRows()
    if table.spec.fqn in updated_only:
        is_not_sent = row_ids >= stored.lacks_from
        found.num_not_sent, row_ids = int(is_not_sent.sum()), row_ids[~is_not_sent]
    for first in range(0, row_ids.size, _ROWS_AT_ONCE):
        some = row_ids[first : first + _ROWS_AT_ONCE]
        rows = await reader.get(table.spec.fqn, some)
        is_deleted = np.zeros(rows.row_ids.size, bool)
        if table.index is None:
            is_deleted = table.deleted.contains(torch.from_numpy(rows.row_ids - table.row_offset)).numpy()
        num_deleted = int(is_deleted.sum())
        num_left = int((~is_deleted & (rows.presence != PRESENT)).sum())
        is_unknown = stored.has_deletes
        found.add(
            AbsentRows(
                num_deleted=num_deleted,
                num_maybe_deleted=num_left if is_unknown else 0,
                num_lost=0 if is_unknown else num_left,
            )
        )
    return found
