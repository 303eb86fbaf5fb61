"""Which rows are handed over from one part of the pipeline to the next: counted on both sides, and compared.

Each crossing (flush → messages, log → memtable, memtable → store, log → replica) has a check of its own. A tally costs
a sum over row ids, so it runs in production. It finds rows that are lost, doubled or taken for others; what is in them
has the log's checksums, and audits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from headrace.schemas.errors import InvariantError

__all__ = ["RowTally"]

_MASK = 2**64 - 1


class RowTally(NamedTuple):
    """How many rows, and the sum of their ids modulo 2⁶⁴."""

    num_rows: int = 0
    id_sum: int = 0

    @classmethod
    def of(cls, columns: Iterable[Any], *, offset: int = 0) -> RowTally:
        """Return the tally of int64 ids in contiguous buffers, None for none; `offset` is added to each id."""
        some = [column for column in columns if column is not None]
        # One sum for all of them: in a batch of many tables numpy's calls cost more than the copy.
        ids = np.frombuffer(some[0] if len(some) == 1 else b"".join(some), "<u8")
        return cls(ids.size, (int(ids.sum(dtype=np.uint64)) + ids.size * offset) & _MASK)

    def check(self, found: RowTally, crossing: str) -> None:
        """Raise `InvariantError` unless what has come at a crossing, named for people, is what was handed over."""
        if found != self:
            raise InvariantError(
                f"{crossing}: {self.num_rows} rows with ids that sum to {self.id_sum} were handed over, and "
                f"{found.num_rows} with {found.id_sum} have come: report it, and check the machine's memory"
            )
