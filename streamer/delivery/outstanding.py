"""Outstanding flushes: submitted by one thread, delivered by another, not yet durable on every shard."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.schemas.errors import HeadraceError
from headrace.streamer.flush.layout import Flush, FlushedDeletions, Pending
from headrace.streamer.stats import LagReservoir

__all__ = ["OutstandingFlush", "OutstandingFlushes"]

# `delivery_s` is the median of so many, because one that was held up says nothing about the next one.
_NUM_DELIVERIES = 5


@dataclass(eq=False, slots=True)
class OutstandingFlush:
    """A flush in its present form: on its way from a device, or whole.

    Attributes:
        num_shards_left: Shards that lack some of it; 0 before they were given it.
    """

    flush: Flush
    num_shards_left: int = 0
    added_s: float = field(default_factory=time.monotonic)


class OutstandingFlushes:
    """The outstanding flushes in order, and figures of others. Thread: any; only the delivering one changes entries."""

    def __init__(self) -> None:
        """Begin empty."""
        self._changed = threading.Condition()
        self._entries: deque[OutstandingFlush] = deque()
        self._error: HeadraceError | None = None
        self._inflight_bytes = self._num_flushes = self._num_rows = 0
        self._acked_step = -1
        self._lags = LagReservoir()
        self._deliveries_s: deque[float] = deque(maxlen=_NUM_DELIVERIES)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def error(self) -> HeadraceError | None:
        """The error that has ended delivery for good."""
        return self._error

    @property
    def delivery_s(self) -> float:
        """Median time from the submission of a flush until it was durable on every shard; 0 before the first."""
        times_s = sorted(self._deliveries_s)
        return times_s[len(times_s) // 2] if times_s else 0.0

    def add(self, flush: Flush) -> OutstandingFlush:
        """Add a flush that is being submitted; it can be withdrawn until it is taken."""
        entry = OutstandingFlush(flush)
        with self._changed:
            self._entries.append(entry)
            self._inflight_bytes += flush.size_bytes
        return entry

    def withdraw(self, flush: Flush) -> bool:
        """Remove a flush whose submission was interrupted; return False if it is taken, and will be delivered."""
        with self._changed:
            if flush.is_taken:
                return False
            for entry in self._entries:
                if entry.flush is flush:
                    self._entries.remove(entry)
                    self._inflight_bytes -= flush.size_bytes
                    break
            self._changed.notify_all()
        return True

    def take(self, entry: OutstandingFlush) -> bool:
        """Take a flush for delivery; return False if it was withdrawn."""
        with self._changed:
            if entry not in self._entries:
                return False
            entry.flush.is_taken = True
        return True

    def complete(self, entry: OutstandingFlush, flush: Flush | None) -> None:
        """Replace a flush that was on its way from a device by the whole flush; None: it failed, remove it."""
        with self._changed:
            self._inflight_bytes -= entry.flush.size_bytes
            if flush is None:
                self._entries.remove(entry)
            else:
                entry.flush = flush
                self._inflight_bytes += flush.size_bytes
            self._changed.notify_all()

    def entry_of(self, flush: Flush) -> OutstandingFlush:
        """Return the entry of a flush that is outstanding."""
        with self._changed:
            return next(entry for entry in self._entries if entry.flush is flush)

    def begun(self) -> list[OutstandingFlush]:
        """Return those that the shards were given, in order."""
        with self._changed:
            return [entry for entry in self._entries if entry.num_shards_left]

    def drop(self, entries: Collection[OutstandingFlush]) -> None:
        """Remove flushes that no shard gets any more, and wake waiters."""
        with self._changed:
            for entry in entries:
                self._entries.remove(entry)
                self._inflight_bytes -= entry.flush.size_bytes
            self._changed.notify_all()

    def note_durable(self, entry: OutstandingFlush) -> None:
        """Remove a flush that every shard has, and wake waiters."""
        flush = entry.flush
        with self._changed:
            self._entries.remove(entry)
            self._inflight_bytes -= flush.size_bytes
            self._num_flushes += 1
            self._num_rows += flush.num_rows
            if flush.mark is not None:
                self._acked_step = flush.mark.step
            now_s = time.monotonic()
            self._lags.add(now_s - flush.dirty_since_s)
            self._deliveries_s.append(now_s - entry.added_s)
            self._changed.notify_all()

    def fail(self, error: HeadraceError) -> list[Pending]:
        """End delivery with its first error, wake waiters, and return what is still on its way from a device."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
            return [entry.flush.pending for entry in self._entries if entry.flush.pending is not None]

    def wait_durable(self, timeout_s: float) -> tuple[int, int]:
        """Wait until nothing is outstanding; return (flushes, bytes) that still are after `timeout_s`.

        Raises:
            HeadraceError: Delivery has ended.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while self._entries and self._error is None and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            if self._error is not None:
                raise self._error
            return len(self._entries), self._inflight_bytes

    def deletions(self) -> dict[str, list[int]]:
        """Return, by fqn, the global ids of rows whose deletion is outstanding."""
        found: dict[str, list[int]] = {}
        with self._changed:
            for entry in self._entries:
                for table in entry.flush.tables:
                    if isinstance(table, FlushedDeletions):
                        ids: list[int] = np.frombuffer(table.row_ids.data, "<i8").tolist()
                        found.setdefault(table.format.spec.fqn, []).extend(ids)
        return found

    def figures(self) -> dict[str, Any]:
        """Return the fields of `StreamerStats` that are known here, all as of one moment."""
        with self._changed:
            return {
                "acked_step": self._acked_step,
                "num_inflight_flushes": len(self._entries),
                "inflight_bytes": self._inflight_bytes,
                "num_flushes": self._num_flushes,
                "num_rows_sent": self._num_rows,
                "lag_p50_s": self._lags.percentile_s(50),
                "lag_p99_s": self._lags.percentile_s(99),
            }
