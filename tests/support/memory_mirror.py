"""A mirror of a log in memory, for schedules of virtual time: what `FileUpdateLog` is, without a disk and threads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.paramserver.log.interface import Append, LogRecord
from headrace.schemas.errors import GoneError, HeadraceError
from headrace.schemas.messages import Segment

__all__ = ["MemoryMirror"]


class MemoryMirror:
    """Holds records, durable `disk_s` after they were appended. `survivor` is what a crash leaves of it."""

    def __init__(self, begin_seq: int, *, disk_s: float = 0.0, records: Sequence[tuple[LogRecord, int]] = ()) -> None:
        self.first_seq = records[0][0].seq if records else begin_seq
        self.last_seq = records[-1][0].seq if records else begin_seq - 1
        self.failed: HeadraceError | None = None
        self.size_bytes = 0
        self.records = list(records)
        self._disk_s = disk_s
        self._pending: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._next_seq = self.last_seq + 1
        self._failure: asyncio.Future[HeadraceError] = asyncio.get_running_loop().create_future()

    def survivor(self) -> MemoryMirror:
        """Return a mirror of what is durable now."""
        durable = [each for each in self.records if each[0].seq <= self.last_seq]
        return MemoryMirror(self.first_seq, disk_s=self._disk_s, records=durable)

    def append(self, *, epoch: int, header: dict[str, Any], body: Sequence[Segment], source_mark: int = 0) -> Append:
        seq, loop = self._next_seq, asyncio.get_running_loop()
        durable: asyncio.Future[None] = loop.create_future()
        self.records.append((LogRecord(seq, epoch, header, memoryview(b"".join(body))), source_mark))
        self._next_seq += 1
        self._pending.append((seq, durable))
        if self._disk_s:
            if len(self._pending) == 1:
                loop.call_later(self._disk_s, self._settle)
        else:
            self._settle()
        return Append(seq, durable)

    def _settle(self) -> None:
        """Sync what was written: records become durable in groups."""
        while self._pending:
            self.last_seq, durable = self._pending.popleft()
            durable.set_result(None)

    def read(self, from_seq: int, *, past_cache: bool = False) -> Iterator[LogRecord]:
        if from_seq < self.first_seq:
            raise GoneError(f"the mirror begins at {self.first_seq}")
        at = from_seq - self.first_seq
        return iter([record for record, _ in self.records[at : self.last_seq - self.first_seq + 1]])

    def nonce_of(self, seq: int) -> int | None:
        if not self.first_seq <= seq <= self.last_seq:
            return None
        return self.records[seq - self.first_seq][1]

    def trim(self, before_seq: int, *, max_bytes: int | None = None, max_age_s: float | None = None) -> int:
        if max_bytes is not None and self.size_bytes <= max_bytes:
            return self.first_seq
        keep = max(self.first_seq, min(before_seq, self.last_seq))
        del self.records[: keep - self.first_seq]
        self.first_seq = keep
        return keep

    async def wait_failed(self) -> HeadraceError:
        return await asyncio.shield(self._failure)

    async def close(self) -> None:
        pass
