"""The update log as followers see it: long polls for durable records, and what is kept for whom.

A follower that asks for what is not there yet waits for it without holding anything up; reading is done in a thread.
A follower that gives a name and a lease holds back the removal of log from where it is, until the lease ends or the
configured bound is reached (`log_retention.py`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.paramserver.ingest.ingest import Ingest
from headrace.paramserver.log.log_leases import LogLeases
from headrace.paramserver.log.update_log import LogRecord, UpdateLog
from headrace.schemas.errors import GoneError, RequestError, SetBackError
from headrace.schemas.idl import idl
from headrace.schemas.log_records import pack_header

__all__ = ["UpdateFeed"]

MAX_WAIT_S = 60.0
# Records of one reply: its containers stay far below what a decoder accepts.
_MAX_RECORDS = 4096
# A long enough reply to be fast, and short enough that a follower in another place is not held up for long.
_MAX_REPLY_BYTES = 16 << 20
# What a reply holds besides bodies, a record and in all, with room.
_RECORD_OVERHEAD_BYTES = 64
_REPLY_OVERHEAD_BYTES = 4096
# Followers that are read for at the same time; others wait their turn, and so does their memory.
_NUM_READERS = 2


class UpdateFeed:
    """Answers `fetchUpdates`.

    Thread: the event loop's.

    Attributes:
        followers: The leases of those who are registered.
        num_waiting: Long polls that wait now.
    """

    def __init__(self, log: UpdateLog, ingest: Ingest, *, server_id: str, max_frame_bytes: int) -> None:
        """Feed from a log.

        Args:
            log: The shard's log.
            ingest: Says when records have become durable.
            server_id: Identity of the store.
            max_frame_bytes: Longest reply.
        """
        self.followers = LogLeases()
        self.num_waiting = 0
        self._log = log
        self._ingest = ingest
        self._server_id = server_id
        self._max_bytes = min(max_frame_bytes - _REPLY_OVERHEAD_BYTES, _MAX_REPLY_BYTES)
        self._readers = asyncio.Semaphore(_NUM_READERS)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Answer all that wait, now and from now on: the shard is about to drain. Idempotent."""
        self._stopping.set()

    async def fetch(self, request: Any) -> Any:
        """Return the `FetchUpdatesReply` to a `FetchUpdatesRequest`.

        Raises:
            GoneError: The records have been removed; the follower has to start over.
            SetBackError: They never were here; so has it.
            RequestError: A field is out of range.

        Cancellation: harmless.
        """
        from_seq, offset = request.from_seq, request.body_offset or 0
        if from_seq < 1 or request.max_bytes < 1 or offset < 0 or request.wait_ms < 0:
            raise RequestError(f"seq {from_seq}, {request.max_bytes} bytes, offset {offset} or wait is out of range")
        self._check(request.server_id, from_seq)
        if request.follower is not None:
            await self._hold(request)
        if from_seq > self._log.last_seq:
            await self._wait(from_seq, min(request.wait_ms / 1000, MAX_WAIT_S))
        records: list[Any] = []
        if from_seq <= self._log.last_seq:
            max_bytes = min(request.max_bytes, self._max_bytes)
            async with self._readers:
                records = await asyncio.to_thread(_collect, self._log, from_seq, offset, max_bytes, self._max_bytes)
        log = self._log
        return idl.FetchUpdatesReply(
            records=records,
            first_seq=log.first_seq,
            last_seq=log.last_seq,
            mark_before=log.mark_of(from_seq - 1),
            mark=log.mark_of(records[-1].seq) if records else None,
        )

    async def _hold(self, request: Any) -> None:
        """Keep the log for a follower, and make sure that it still is there."""
        lease_s, copy_id = (request.lease_ms or 0) / 1000, request.copy_id or ""
        if self.followers.renew(request.follower, request.from_seq, lease_s, copy_id=copy_id):
            async with self.followers.removing:  # what is being removed was chosen without this lease
                pass
            self._check(request.server_id, request.from_seq)

    def _check(self, server_id: str, from_seq: int) -> None:
        if server_id != self._server_id:
            raise GoneError(f"this is store {self._server_id}, not {server_id}: start over")
        first, last = self._log.first_seq, self._log.last_seq
        if from_seq < first:
            raise GoneError(f"the log begins at seq {first}, seq {from_seq} has been removed: start over")
        if from_seq > last + 1:
            raise SetBackError(f"the log ends at seq {last}, seq {from_seq - 1} is not in it: start over")

    async def _wait(self, seq: int, timeout_s: float) -> None:
        stopping = asyncio.ensure_future(self._stopping.wait())
        durable = asyncio.ensure_future(self._ingest.wait_durable(seq))
        self.num_waiting += 1
        try:
            await asyncio.wait((stopping, durable), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.num_waiting -= 1
            stopping.cancel()
            durable.cancel()


def _collect(log: UpdateLog, from_seq: int, offset: int, max_bytes: int, most_bytes: int) -> list[Any]:
    """Return `idl.UpdateRecord`s of about `max_bytes`; a first record that is larger comes in part.

    Its header comes whole with each part of it, and may be long: all together is never above `most_bytes`.

    Thread: any; it blocks.
    """
    records: list[Any] = []
    left = max_bytes
    for record in log.read(from_seq):
        header = pack_header(record.header)
        body_bytes, rest_bytes = record.body.nbytes - offset, len(header) + _RECORD_OVERHEAD_BYTES
        size_bytes = body_bytes + rest_bytes
        if size_bytes > left and records:
            break
        struct = idl.UpdateRecord(
            seq=record.seq, epoch=record.epoch, kind=_kind_of(record), header=header, body=record.body
        )
        if offset or size_bytes > left:
            if body_bytes < 0:
                raise RequestError(f"offset {offset} in record {record.seq} of {record.body.nbytes} bytes")
            struct.body = record.body[offset : offset + max(min(left, most_bytes - rest_bytes), 1)]
            struct.body_size_bytes = record.body.nbytes
        records.append(struct)
        left -= size_bytes
        offset = 0
        # Nothing follows a part: the reply's mark is its record's, by which the parts are known to be of one record.
        if left <= 0 or struct.body_size_bytes is not None or len(records) == _MAX_RECORDS:
            break
    return records


def _kind_of(record: LogRecord) -> int:
    kind: int = record.header["kind"]
    return kind
