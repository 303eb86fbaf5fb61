"""The newest records of a mirror in memory: followers read them here, also before this machine's disk has them.

A record is durable at its shard before anyone else sees it. So a relay that dies with records that its own disk lacks
loses nothing: it fetches them again, with the same seqs and marks, and a follower that has them already waits for it,
like one that comes from another relay. If the shard was set back in between, the marks tell the follower so.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.paramserver.log.interface import LogRecord

__all__ = ["RecentRecords"]

# Approximate memory of Python's objects for a record.
_RECORD_BYTES = 1024
_FEW = 32


class RecentRecords:
    """Records without a gap, and the source's mark of each. Thread: one adds and drops; any may read meanwhile.

    Attributes:
        last_seq: Seq of the newest record, or of the one before the first.
        size_bytes: Approximate memory. The bodies keep whole replies of the source alive, so some more is in use.
    """

    def __init__(self, last_seq: int) -> None:
        """Begin without records, behind `last_seq`."""
        self.last_seq = last_seq
        self.size_bytes = 0
        self._first_seq = last_seq + 1
        self._held: dict[int, tuple[LogRecord, int | None]] = {}

    def add(self, record: LogRecord, mark: int | None) -> None:
        """Add the next record."""
        assert record.seq == self.last_seq + 1
        self._held[record.seq] = record, mark
        self.size_bytes += record.body.nbytes + _RECORD_BYTES
        self.last_seq = record.seq

    def drop(self, *, up_to_seq: int, max_bytes: int) -> None:
        """Drop the oldest records, none behind `up_to_seq`, until at most `max_bytes` are left."""
        while self.size_bytes > max_bytes and self._first_seq <= min(up_to_seq, self.last_seq):
            record, _ = self._held.pop(self._first_seq)
            self.size_bytes -= record.body.nbytes + _RECORD_BYTES
            self._first_seq += 1

    def has(self, seq: int) -> bool:
        """Return whether a record is here."""
        return seq in self._held

    def since(self, seq: int) -> Iterator[LogRecord]:
        """Yield the records from `seq` on; none if that one is not here."""
        while (held := self._held.get(seq)) is not None:
            yield held[0]
            seq += 1

    def few_since(self, seq: int) -> list[LogRecord]:
        """Return all records from `seq` on if they are few and here; else none."""
        return list(self.since(seq)) if self.last_seq - seq < _FEW else []

    def mark_of(self, seq: int) -> int | None:
        """Return the source's mark of a record; None if it is unknown, or the record is not here."""
        held = self._held.get(seq)
        return None if held is None else held[1]
