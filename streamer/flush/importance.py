"""Which dirty rows of a table go out with a flush, and which wait: those that have changed least since they were sent.

A row's change is the distance between two random projections of its weights, now and when it was last sent: four bytes
a row stand for what the server has. Of the dirty rows of a flush, a share goes out, those with the largest change; so
the bytes are known beforehand, and no threshold has to fit a table's scale. The others wait. A row that waits is asked
again when it changes again, since until then its change stays what it was.

On the log of `headrace demo` two projections of two bytes cost little more of the hit rate than exact distances, and a
single one of four bytes twice as much or more. The growth of Adagrad's sums is as good, but other optimizers have none.
Counts of updates hardly beat chance. A share of all waiting rows does worse than one of the dirty ones, and reads more.

Source: K. K. Matam et al., "QuickUpdate: a Real-Time Personalization System for Large-Scale Recommendation Models",
NSDI 2024: the parameters that changed most, and all of them from time to time.
"""

from __future__ import annotations

import math

import torch

from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["ImportanceFilter"]

# Rows are projected some at a time, because each has a copy on the way.
_COPY_BYTES = 2**20


class ImportanceFilter:
    """Holds back rows of one table, in its `waiting` set.

    Memory: four bytes and a bit per row. Thread: the training thread's.
    """

    def __init__(self, table: TappedTable) -> None:
        """Begin with no row sent. REQUIRES: the table's `send_share` is below 1."""
        assert table.waiting is not None
        self._table, self._waiting = table, table.waiting
        # Random signs; the second column flips a random half of them, so the two are orthogonal. Independent ones lose
        # more.
        width = table.shard.width
        generator = torch.Generator().manual_seed(0)
        signs = 1 - 2 * torch.randint(0, 2, (width, 1), generator=generator, dtype=torch.int64, device="cpu")
        places = torch.randperm(width, generator=generator, dtype=torch.int64, device="cpu")
        self._signs = (signs * (1 - 2 * (places[:, None] * torch.arange(2, dtype=torch.int64, device="cpu") & 1))).to(
            torch.float32
        )
        # Of each row when it was last sent; NaN before.
        self._sent = torch.full((table.num_local_rows, 2), math.nan, dtype=torch.float16, device="cpu")

    @property
    def is_empty(self) -> bool:
        """Whether no row waits."""
        return self._waiting.is_empty

    @property
    def num_waiting(self) -> int:
        """Number of rows that wait. Thread: any."""
        return self._waiting.count

    @property
    def size_bytes(self) -> int:
        """Memory of the filter."""
        return self._sent.nbytes + self._waiting.size_bytes

    def important(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Return which rows, local int64[n] on the CPU, unique, go out now: bool[n].

        These are the share of those that changed most; and all that were never sent, that have a value which is not
        finite, or that are used again after an eviction.
        """
        change = torch.linalg.vector_norm(self._project(row_ids) - self._sent[row_ids], dim=1)
        is_important = ~torch.isfinite(change) | self._table.deleted.contains(row_ids)
        others = (~is_important).nonzero().view(-1)
        num_sent = math.ceil(self._table.send_share * others.numel())
        is_important[others[torch.topk(change[others], num_sent, sorted=False).indices]] = True
        return is_important

    def hold_back(self, row_ids: torch.Tensor) -> None:
        """Have rows wait, int64[n]."""
        self._waiting.mark(row_ids)

    def let_go(self, row_ids: torch.Tensor) -> None:
        """Have rows wait no more, int64[n]; the caller sends them."""
        self._waiting.discard(row_ids)

    def release(self) -> None:
        """Make all waiting rows dirty."""
        for row_ids in self._waiting.parts():
            self._table.dirty.mark(row_ids)
        self._waiting.clear()

    def note_sent(self, row_ids: torch.Tensor) -> None:
        """Note that rows, int64[n], go out with their present values."""
        self._sent[row_ids] = self._project(row_ids).to(torch.float16)

    @torch.no_grad()
    def _project(self, row_ids: torch.Tensor) -> torch.Tensor:
        # float32[n, projections] of the present weights, as they are stored.
        found = torch.empty(row_ids.numel(), 2, dtype=torch.float32, device="cpu")
        places, rows_at_once = self._table.places(row_ids), max(1, _COPY_BYTES // self._table.live_row_bytes)
        for first in range(0, row_ids.numel(), rows_at_once):
            some = slice(first, first + rows_at_once)
            rows = self._table.weights_at(places[some])
            found[some] = (rows.to(torch.float32) @ self._signs.to(rows.device)).cpu()
        return found
