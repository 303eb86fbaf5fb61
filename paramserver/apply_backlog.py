"""What waits to be applied, and when its turn comes: batches to be coalesced, and windows of them to be written.

Batches are coalesced a window at a time, as soon as there is enough for one; windows are written several at a time.
Both wait for others only for so long, or until somebody wants to see them in the store. No I/O and no threads: the
applier asks, and does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.paramserver.pending import Batch, Part, PendingRows, Run

__all__ = ["Backlog", "Entry", "Window"]


@dataclass(slots=True)
class Entry:
    """A batch that is not coalesced yet.

    Attributes:
        batch: It.
        parts: Where each of its parts pends, and it.
        since_s: When it came, monotonic seconds.
    """

    batch: Batch
    parts: list[tuple[PendingRows, Part]]
    since_s: float


@dataclass(slots=True)
class Window:
    """Consecutive batches, coalesced.

    Attributes:
        first_seq: Of the first one.
        seq: Of the last one.
        meta: Theirs.
        runs: Where each pends, and it.
        since_s: When the first came, monotonic seconds.
    """

    first_seq: int
    seq: int
    meta: dict[bytes, bytes]
    runs: list[tuple[PendingRows, Run]]
    since_s: float

    @property
    def size_bytes(self) -> int:
        """Memory of the runs."""
        return sum(run.size_bytes for _, run in self.runs)


class Backlog:
    """Batches and windows on their way, oldest first.

    Thread: the loop's.

    Attributes:
        newest_seq: Of the newest batch that was ever added.
        is_coalescing: A window is being made of batches that are not here any more, and will be added.
    """

    def __init__(
        self,
        *,
        newest_seq: int,
        window_bytes: int,
        merge_bytes: int,
        hold_s: float,
        quiet_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Begin with nothing that waits.

        Args:
            newest_seq: Position in the log behind which batches come.
            window_bytes: See `ApplierConfig`, as for the others.
            merge_bytes: See there.
            hold_s: See there.
            quiet_s: See there.
            clock: Monotonic seconds.
        """
        self.newest_seq = newest_seq
        self.is_coalescing = False
        self._window_bytes, self._merge_bytes = window_bytes, merge_bytes
        self._hold_s, self._quiet_s = hold_s, quiet_s
        self._clock = clock
        self._entries: deque[Entry] = deque()
        self._entries_bytes = 0
        self._windows: deque[Window] = deque()
        self._windows_bytes = 0
        self._due_seq = 0  # up to here rows wait for no others
        self._newest_s = 0.0

    @property
    def has_entries(self) -> bool:
        """Whether a batch waits to be coalesced."""
        return bool(self._entries)

    def add(self, batch: Batch, parts: list[tuple[PendingRows, Part]]) -> bool:
        """Add the newest batch; say whether the applier has something to look at."""
        self._newest_s = self._clock()
        self._entries.append(Entry(batch, parts, self._newest_s))
        self._entries_bytes += batch.size_bytes
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
        if self._due_seq >= self.newest_seq or not (self._windows or self._entries):
            return None
        since_s = (self._windows[0] if self._windows else self._entries[0]).since_s
        return min(since_s + self._hold_s, self._newest_s + self._quiet_s)

    @property
    def is_window_due(self) -> bool:
        """Whether batches are to be coalesced."""
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
        while self._entries and (not entries or size + self._entries[0].batch.size_bytes <= self._window_bytes):
            entries.append(self._entries.popleft())
            size += entries[-1].batch.size_bytes
            if entries[-1].batch.seq == stop_seq:
                break
        self._entries_bytes -= size
        return entries

    def add_window(self, window: Window) -> None:
        """Add the window that was made of the batches taken last."""
        self._windows.append(window)
        self._windows_bytes += window.size_bytes

    @property
    def is_write_due(self) -> bool:
        """Whether windows are to be written."""
        if not self._windows:
            return False
        if self._windows_bytes >= self._merge_bytes:
            return True
        # What else is due is coalesced first, and written with it.
        is_more_due = self.is_coalescing or (self._entries and self._entries[0].batch.seq <= self._due_seq)
        return self._windows[0].first_seq <= self._due_seq and not is_more_due

    def take_windows(self, stop_seq: int | None) -> list[Window]:
        """Return the windows to be written next, and forget them. REQUIRES: there is one.

        Args:
            stop_seq: First position at which somebody wants to see the store.
        """
        windows: list[Window] = []
        size = 0
        while self._windows and (not windows or size + self._windows[0].size_bytes <= self._merge_bytes):
            windows.append(self._windows.popleft())
            size += windows[-1].size_bytes
            if windows[-1].seq == stop_seq:
                break
        self._windows_bytes -= size
        return windows
