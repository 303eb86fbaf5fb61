"""Rows of a table that were evicted: which deletions have to be sent, and which rows stay deleted until they are used.

Nobody tells when an evicted row is used again: it is just marked dirty, like any other. So an eviction takes its rows
out of the dirty set, and of what is to be deleted, whatever is dirty again when a flush comes is alive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.kernels.dirty_ids import DirtyIds
from headrace.streamer.device.device_dirty_rows import TableDirtySet

__all__ = ["DeletedRows"]


class DeletedRows:
    """The evicted rows of one table, by local row id.

    Takes nothing until rows are evicted, then up to 32 bytes for each that is not used again. Not thread-safe: the
    training thread's.
    """

    def __init__(self, num_rows: int, *, is_lasting: bool) -> None:
        """Begin with none.

        Args:
            num_rows: Ids are below it.
            is_lasting: Remember rows beyond the sending of their deletion, because they stay in the table's memory.
        """
        self._pending = DirtyIds(num_rows)
        self._deleted = DirtyIds(num_rows) if is_lasting else None

    def add(self, row_ids: torch.Tensor, dirty: TableDirtySet) -> None:
        """Have rows deleted, and what they had to send forgotten; interrupted before the latter, they go on to live.

        Args:
            row_ids: int64[n], each once, on the CPU.
            dirty: The table's changed rows.
        """
        self._pending.mark(row_ids)
        if self._deleted is not None:
            self._deleted.mark(row_ids)
        dirty.discard(row_ids)

    def take(
        self, max_rows: int, dirty: TableDirtySet, *, note: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """Remove and return rows to delete; those that are dirty again are alive, and left out for good.

        Args:
            max_rows: Look at so many at most, ≥ 0; `is_pending` then says whether any are left.
            dirty: The table's changed rows, before any are taken for the same flush.
            note: Called with all of these rows before they are removed, for `give_back` after an interrupt.

        Returns:
            int64[n] on the CPU, ascending.
        """
        row_ids = self._pending.take(max_rows, note=note)
        return row_ids[~dirty.contains(row_ids)]

    def give_back(self, row_ids: torch.Tensor) -> None:
        """Have rows deleted that `take` had returned, as they were not sent."""
        self._pending.mark(row_ids)

    def note_sent(self, row_ids: torch.Tensor) -> None:
        """Learn that rows go out with their values, int64[n]: they are used again."""
        if self._deleted is not None and not self._deleted.is_empty:
            self._deleted.discard(row_ids)

    def unused(self, dirty: TableDirtySet) -> torch.Tensor:
        """Return the rows that were evicted and not used since, int64[n] on the CPU, ascending.

        Of a table that forgets them once they are deleted, those whose deletion has not been taken.
        """
        held = self._pending if self._deleted is None else self._deleted
        row_ids = torch.cat([torch.empty(0, dtype=torch.int64), *held.parts()])
        return row_ids[~dirty.contains(row_ids)]

    @property
    def is_empty(self) -> bool:
        """Whether no row is evicted: none has to be deleted, and all that were are used again."""
        return self._pending.is_empty and (self._deleted is None or self._deleted.is_empty)

    @property
    def is_pending(self) -> bool:
        """Whether a deletion has not been taken."""
        return not self._pending.is_empty

    @property
    def num_pending(self) -> int:
        """Deletions that have not been taken, those of rows that are used again included.

        Thread: any.
        """
        return self._pending.count
