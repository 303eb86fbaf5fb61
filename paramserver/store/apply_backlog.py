"""What waits to be applied, and when its turn comes: batches, of which a window at a time is coalesced and written.

Batches wait for others to fill a window only for so long, or until somebody wants to see them in the store. No I/O and
no threads: the applier asks, and does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.paramserver.store.pending import Batch, Part, PendingRows

__all__ = ["Backlog", "Entry"]

# What coalescing takes for a row beside its frame: its id, where it lies, and the order of both.
_INDEX_BYTES = 80


@dataclass(slots=True)
class Entry:
    """A batch that waits.

    Attributes:
        batch: It.
        parts: Where each of its parts pends, and it.
        since_s: When it came, monotonic seconds.
        size_bytes: Memory of it, and what coalescing it takes.
    """

    batch: Batch
    parts: list[tuple[PendingRows, Part]]
    since_s: float
    size_bytes: int


class Backlog:
    """Batches on their way, oldest first.

    Thread: the loop's.

    Attributes:
        newest_seq: Of the newest batch that was ever added.
    """

    def __init__(
        self,
        *,
        newest_seq: int,
        window_bytes: int,
        hold_s: float,
        quiet_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Begin with nothing that waits.

        Args:
            newest_seq: Position in the log behind which batches come.
            window_bytes: See `ApplierConfig`, as for the others.
            hold_s: See there.
            quiet_s: See there.
            clock: Monotonic seconds.
        """
        self.newest_seq = newest_seq
        self._window_bytes = window_bytes
        self._hold_s, self._quiet_s = hold_s, quiet_s
        self._clock = clock
        self._entries: deque[Entry] = deque()
        self._entries_bytes = 0
        self._due_seq = 0  # up to here rows wait for no others
        self._newest_s = 0.0

    def add(self, batch: Batch, parts: list[tuple[PendingRows, Part]]) -> bool:
        """Add the newest batch; say whether the applier has something to look at."""
        self._newest_s = self._clock()
        size_bytes = batch.size_bytes + _INDEX_BYTES * sum(part.ids.size for _, part in parts)
        self._entries.append(Entry(batch, parts, self._newest_s, size_bytes))
        self._entries_bytes += size_bytes
        self.newest_seq = batch.seq
        if not self._hold_s:
            self._due_seq = batch.seq
        return len(self._entries) == 1 or self.is_window_due

    def apply_now(self, seq: int) -> None:
        """Let nothing up to a position wait for others."""
        self._due_seq = max(self._due_seq, seq)

    def apply_held(self) -> bool:
        """Let nothing wait any longer, if it has waited long enough; say whether it has."""
        ends_s = self.hold_ends_s
        if ends_s is None or ends_s > self._clock():
            return False
        self.apply_now(self.newest_seq)
        return True

    @property
    def hold_ends_s(self) -> float | None:
        """When rows have waited long enough for others, monotonic seconds; None when none wait."""
        if self._due_seq >= self.newest_seq or not self._entries:
            return None
        return min(self._entries[0].since_s + self._hold_s, self._newest_s + self._quiet_s)

    @property
    def is_window_due(self) -> bool:
        """Whether batches are to be written."""
        if not self._entries:
            return False
        return self._entries_bytes >= self._window_bytes or self._entries[0].batch.seq <= self._due_seq

    def take_entries(self, stop_seqs: Iterable[int]) -> list[Entry]:
        """Return the batches of the next window, and forget them. REQUIRES: there is one.

        Args:
            stop_seqs: Positions, ascending, at which somebody wants to see the store: no window goes over one.
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
