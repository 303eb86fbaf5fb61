"""The backlog: batches that wait to be applied, and the policy that decides when a window of them is due.

Batches wait for others to fill a window, but only for so long, or until somebody needs them in the store. No I/O and no
threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.paramserver.store.deltas import Batch, Part
from headrace.paramserver.store.memtable import PendingRows

__all__ = ["Backlog", "Entry"]

# Memory for coalescing per row, besides its frame: its id, its place, and the order of both.
_INDEX_BYTES = 80


@dataclass(slots=True)
class Entry:
    """A batch that waits since `since_s` (monotonic), with the column shard in which each of its parts pends."""

    batch: Batch
    parts: list[tuple[PendingRows, Part]]
    since_s: float
    size_bytes: int  # with what coalescing takes


class Backlog:
    """Batches that wait, oldest first; for the settings see `ApplierConfig`.

    `newest_seq` is the seq of the newest batch ever added, and at first the log position after which batches come.

    Thread: the loop's.
    """

    def __init__(
        self, *, newest_seq: int, window_bytes: int, hold_s: float, quiet_s: float, clock: Callable[[], float]
    ) -> None:
        self.newest_seq = newest_seq
        self._window_bytes = window_bytes
        self._hold_s, self._quiet_s = hold_s, quiet_s
        self._clock = clock
        self._entries: deque[Entry] = deque()
        self._entries_bytes = 0
        self._due_seq = 0  # rows up to here do not wait for a full window
        self._newest_s = 0.0

    def add(self, batch: Batch, parts: list[tuple[PendingRows, Part]]) -> bool:
        """Add the newest batch; return whether the applier should look."""
        self._newest_s = self._clock()
        size_bytes = batch.size_bytes + _INDEX_BYTES * sum(part.ids.size for _, part in parts)
        self._entries.append(Entry(batch, parts, self._newest_s, size_bytes))
        self._entries_bytes += size_bytes
        self.newest_seq = batch.seq
        if not self._hold_s:
            self._due_seq = batch.seq
        return len(self._entries) == 1 or self.is_window_due

    def apply_now(self, seq: int) -> None:
        """Stop holding batches up to `seq`."""
        self._due_seq = max(self._due_seq, seq)

    def end_hold(self) -> bool:
        """Make everything due if it has waited long enough; return whether it has."""
        ends_s = self.hold_ends_s
        if ends_s is None or ends_s > self._clock():
            return False
        self.apply_now(self.newest_seq)
        return True

    @property
    def hold_ends_s(self) -> float | None:
        """When held rows become due, monotonic seconds; None when none are held."""
        if self._due_seq >= self.newest_seq or not self._entries:
            return None
        return min(self._entries[0].since_s + self._hold_s, self._newest_s + self._quiet_s)

    @property
    def is_window_due(self) -> bool:
        """Whether a window should be written now."""
        if not self._entries:
            return False
        return self._entries_bytes >= self._window_bytes or self._entries[0].batch.seq <= self._due_seq

    def take_entries(self, stop_seqs: Iterable[int]) -> list[Entry]:
        """Remove and return the next window. REQUIRES: the backlog is not empty.

        `stop_seqs`, ascending, are positions at which somebody wants to see the store: a window ends there.
        """
        stop_seq = next((seq for seq in stop_seqs if seq >= self._entries[0].batch.seq), None)
        entries: list[Entry] = []
        size = 0
        while self._entries and (not entries or size + self._entries[0].size_bytes <= self._window_bytes):
            entries.append(self._entries.popleft())
            size += entries[-1].size_bytes
            if entries[-1].batch.seq == stop_seq:
                break
        self._entries_bytes -= size
        return entries
