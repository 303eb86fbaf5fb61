"""Flushes that are not durable on every shard yet: handed over by one thread, delivered by another."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.schemas.errors import HeadraceError
from headrace.streamer.flush.flush import Flush, FlushedDeletions, Pending
from headrace.streamer.stats import LagReservoir

__all__ = ["OutstandingFlush", "OutstandingFlushes"]


@dataclass(eq=False, slots=True)
class OutstandingFlush:
    """A flush that is not durable on every shard.

    Attributes:
        flush: As it is now: whole, or on its way from a device.
        num_shards_left: Shards on which it is not durable.
        is_spooled: Its rows are in the spool, and its staging buffer is given back.
    """

    flush: Flush
    num_shards_left: int
    is_spooled: bool = False


class OutstandingFlushes:
    """The flushes that are outstanding, in the order of their hand-over, and what has become of the others.

    Thread: any. What an entry holds is changed by the delivering thread only.
    """

    def __init__(self) -> None:
        """Begin empty."""
        # Whoever waits for a change waits on the condition.
        self._changed = threading.Condition()
        self._entries: deque[OutstandingFlush] = deque()
        self._error: HeadraceError | None = None
        self._inflight_bytes = 0
        self._num_flushes = self._num_rows = 0
        self._acked_step = -1
        self._lags = LagReservoir()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def error(self) -> HeadraceError | None:
        """What has ended the delivery for good."""
        return self._error

    def add(self, flush: Flush, *, num_shards: int) -> OutstandingFlush:
        """Note a flush that is being handed over; until it is taken it can be withdrawn."""
        entry = OutstandingFlush(flush, num_shards)
        with self._changed:
            self._entries.append(entry)
            self._inflight_bytes += flush.size_bytes
        return entry

    def withdraw(self, flush: Flush) -> bool:
        """Forget a flush whose hand-over was interrupted; return False when it is taken, and will be delivered."""
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
        """Take a flush for delivery; return False when it has been withdrawn."""
        with self._changed:
            if entry not in self._entries:
                return False
            entry.flush.is_taken = True
        return True

    def complete(self, entry: OutstandingFlush, flush: Flush | None) -> None:
        """Put the whole flush in the place of one that was on its way from a device; None: it has come to nothing."""
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

    def note_durable(self, entry: OutstandingFlush) -> None:
        """Note that every shard has all of a flush, and tell who waits."""
        flush = entry.flush
        with self._changed:
            self._entries.remove(entry)
            self._inflight_bytes -= flush.size_bytes
            self._num_flushes += 1
            self._num_rows += flush.num_rows
            if flush.mark is not None:
                self._acked_step = flush.mark.step
            self._lags.add(time.monotonic() - flush.dirty_since_s)
            self._changed.notify_all()

    def fail(self, error: HeadraceError) -> list[Pending]:
        """Note what has ended the delivery, the first of it, and tell who waits.

        Returns:
            What of the flushes is still on its way from a device.
        """
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
            return [entry.flush.pending for entry in self._entries if entry.flush.pending is not None]

    def wait_durable(self, timeout_s: float) -> tuple[int, int]:
        """Wait until nothing is outstanding.

        Returns:
            How many flushes are outstanding after that time, and their bytes; (0, 0) when none is.

        Raises:
            HeadraceError: The delivery has ended.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while self._entries and self._error is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    break
            if self._error is not None:
                raise self._error
            return len(self._entries), self._inflight_bytes

    def deletions(self) -> dict[str, list[int]]:
        """Return, by fqn, the global ids of rows whose deletion is handed over and not durable on every shard."""
        found: dict[str, list[int]] = {}
        with self._changed:
            for entry in self._entries:
                for table in entry.flush.tables:
                    if isinstance(table, FlushedDeletions):
                        ids: list[int] = np.frombuffer(table.row_ids.data, "<i8").tolist()
                        found.setdefault(table.format.spec.fqn, []).extend(ids)
        return found

    def figures(self) -> dict[str, Any]:
        """Return the fields of `StreamerStats` that it knows, all as of one moment."""
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
