"""The update feed: followers read the log by long polls for durable records, and lease what they still need.

A follower that asks for future records waits without blocking others; a thread reads the log. A follower with a name
and a lease keeps the log from its position on, until the lease ends or the configured bound is reached
(`shard/retention.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from headrace.paramserver.ingest.pipeline import Ingest
from headrace.paramserver.log.interface import KIND_BATCH, CommittedLog, LogRecord
from headrace.paramserver.log.leases import LogLeases
from headrace.paramserver.rpc.dispatch import Peer
from headrace.schemas.errors import GoneError, HeadraceError, RequestError, SetBackError
from headrace.schemas.idl import idl
from headrace.schemas.log_records import pack_header
from headrace.schemas.messages import decode_header, decode_struct

__all__ = ["UpdateFeed"]

MAX_WAIT_S = 60.0
# Records of one reply: far fewer than a decoder accepts.
_MAX_RECORDS = 4096
# Long enough to be fast, short enough to arrive soon at a distant follower.
_MAX_REPLY_BYTES = 16 << 20
# Bytes of a reply besides bodies, per record and in total, rounded up.
_RECORD_OVERHEAD_BYTES = 64
_REPLY_OVERHEAD_BYTES = 4096
# Replies read at the same time; others wait, which bounds memory.
_NUM_READERS = 2
_MAX_FOLLOWERS_SHOWN = 1024
# An age costs a read of a record. Of a thousand followers that are behind, most lack the same one.
_MAX_AGES = 8
# Records without rows of a trainer, such as hellos, are skipped until one has some.
_MAX_RECORDS_OF_AGE = 16


class UpdateFeed:
    """Answers `fetchUpdates`. Thread: the event loop's.

    Attributes:
        followers: The followers' leases.
        num_waiting: Long polls that wait now.
    """

    def __init__(self, log: CommittedLog, ingest: Ingest, *, server_id: str, max_frame_bytes: int) -> None:
        """Serve `log`, the log of the store `server_id`, in replies of at most `max_frame_bytes`.

        `ingest` tells when records become durable.
        """
        self.followers = LogLeases()
        self.num_waiting = 0
        self._log, self._ingest, self._server_id = log, ingest, server_id
        self._max_bytes = min(max_frame_bytes - _REPLY_OVERHEAD_BYTES, _MAX_REPLY_BYTES)
        self._readers = asyncio.Semaphore(_NUM_READERS)
        self._reads: dict[tuple[int, int, int], asyncio.Task[list[Any]]] = {}  # by seq, offset and bytes; running ones
        self._stopping = asyncio.Event()
        # Name of each follower, and the next seq that it needs.
        self._places: WeakKeyDictionary[Peer, tuple[str, int]] = WeakKeyDictionary()

    def stop(self) -> None:
        """Answer all waiting and future long polls at once, because the shard is about to drain. Idempotent."""
        self._stopping.set()

    async def fetch(self, request: Any, peer: Peer) -> Any:
        """Return the `FetchUpdatesReply` to a `FetchUpdatesRequest`; a lease counts for the peer's address.

        Raises:
            GoneError: The records were removed; the follower must start over.
            SetBackError: The records never were in this log; the follower must start over.
            RequestError: A field is out of range.

        Cancellation: harmless.
        """
        from_seq, offset = request.from_seq, request.body_offset or 0
        if from_seq < 1 or request.max_bytes < 1 or offset < 0 or request.wait_ms < 0:
            raise RequestError(f"seq {from_seq}, {request.max_bytes} bytes, offset {offset} or wait is out of range")
        self._check(request.server_id, from_seq)
        if request.follower is not None:
            await self._lease(request, peer.address)
        if request.follower is not None or request.wait_ms:  # who only looks at a record follows nothing
            # A replica without a name of its own stops telling one once it needs no lease.
            known = self._places.get(peer)
            self._places[peer] = request.follower or (known[0] if known else ""), from_seq
        if from_seq > self._ingest.end_seq:
            await self._wait(from_seq, min(request.wait_ms / 1000, MAX_WAIT_S))
        records: list[Any] = []
        if from_seq <= self._ingest.end_seq:
            records = await self._read(from_seq, offset, min(request.max_bytes, self._max_bytes))
        log = self._log
        return idl.FetchUpdatesReply(
            records=records,
            first_seq=log.first_seq,
            last_seq=max(self._ingest.end_seq, records[-1].seq if records else 0),
            mark_before=log.nonce_of(from_seq - 1),
            mark=log.nonce_of(records[-1].seq) if records else None,
        )

    async def followers_status(self, standbys: Sequence[tuple[str, int]] = ()) -> list[Any]:
        """Return an `idl.FollowerStatus` of each connected follower, the furthest behind first.

        `standbys` are addresses and applied seqs, which are known from elsewhere. Cancellation: harmless.
        """
        last_seq = self._ingest.end_seq
        places = [(name, peer.address, seq) for peer, (name, seq) in self._places.items() if peer.is_connected]
        places += [("standby", address, applied_seq + 1) for address, applied_seq in standbys]
        places = sorted(places, key=lambda place: (min(place[2], last_seq + 1), place))[:_MAX_FOLLOWERS_SHOWN]
        lacking = sorted({seq for *_, seq in places if seq <= last_seq})[:_MAX_AGES]
        oldest_us = await asyncio.to_thread(_oldest_updates_us, self._log, lacking) if lacking else {}
        now_us = time.time_ns() // 1000
        return [
            idl.FollowerStatus(
                name=name,
                address=address,
                records_behind=max(last_seq + 1 - seq, 0),
                age_s=max(now_us - oldest_us[seq], 0) / 1e6 if seq in oldest_us else None,
            )
            for name, address, seq in places
        ]

    async def _read(self, from_seq: int, offset: int, max_bytes: int) -> list[Any]:
        """Return records from `from_seq` on. Followers that ask for the same at the same time share one read."""
        key = from_seq, offset, max_bytes
        reading = self._reads.get(key)
        if reading is None:
            reading = self._reads[key] = asyncio.create_task(self._read_alone(*key), name="headrace-feed-read")
            reading.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(reading)

    async def _read_alone(self, from_seq: int, offset: int, max_bytes: int) -> list[Any]:
        async with self._readers:
            end_seq = self._ingest.end_seq
            return await asyncio.to_thread(lambda: self._collect(self._log.read(from_seq), end_seq, offset, max_bytes))

    def _forget(self, key: tuple[int, int, int], reading: asyncio.Task[list[Any]]) -> None:
        del self._reads[key]
        if not reading.cancelled():
            reading.exception()  # those who wait for it get it; there may be none any more

    async def _lease(self, request: Any, address: str) -> None:
        lease_s, copy_id = (request.lease_ms or 0) / 1000, request.copy_id or ""
        if self.followers.renew(request.follower, request.from_seq, lease_s, copy_id=copy_id, address=address):
            async with self.followers.removing:  # a removal that runs now was decided without this lease
                pass
            self._check(request.server_id, request.from_seq)

    def _check(self, server_id: str, from_seq: int) -> None:
        if server_id != self._server_id:
            raise GoneError(f"this is store {self._server_id}, not {server_id}: start over")
        first, last = self._log.first_seq, self._ingest.end_seq
        if from_seq < first:
            raise GoneError(
                f"the log begins at seq {first}, seq {from_seq} has been removed: start over from a snapshot"
            )
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

    def _collect(self, log_records: Iterable[LogRecord], end_seq: int, offset: int, max_bytes: int) -> list[Any]:
        """Return `idl.UpdateRecord`s of about `max_bytes`, or a part of one record if the first is larger. Thread: any.

        None is behind `end_seq`.

        All are of one mark. Each part repeats the record's whole header, which may be long; the total never exceeds the
        longest reply.
        """
        records: list[Any] = []
        left, mark = max_bytes, None
        for record in log_records:
            if record.seq > end_seq or (records and self._log.nonce_of(record.seq) != mark):
                break
            mark = mark if records else self._log.nonce_of(record.seq)
            header = pack_header(record.header)
            body_bytes, rest_bytes = record.body.nbytes - offset, len(header) + _RECORD_OVERHEAD_BYTES
            size_bytes = body_bytes + rest_bytes
            if size_bytes > left and records:
                break
            kind = record.header["kind"]
            struct = idl.UpdateRecord(seq=record.seq, epoch=record.epoch, kind=kind, header=header, body=record.body)
            if offset or size_bytes > left:
                if body_bytes < 0:
                    raise RequestError(f"offset {offset} in record {record.seq} of {record.body.nbytes} bytes")
                struct.body = record.body[offset : offset + max(min(left, self._max_bytes - rest_bytes), 1)]
                struct.body_size_bytes = record.body.nbytes
            records.append(struct)
            left -= size_bytes
            # A part comes last: the reply's `mark` is its record's, which proves that all parts are of one record.
            if left <= 0 or struct.body_size_bytes is not None or len(records) == _MAX_RECORDS:
                break
        return records


def _oldest_updates_us(log: CommittedLog, seqs: Sequence[int]) -> dict[int, int]:
    """Return the trainer's clock at the oldest update in the first record from each seq on that has one. It blocks."""
    found = {}
    for seq in seqs:
        with suppress(HeadraceError):  # the record was removed; who reads it is told
            for record in islice(log.read(seq), _MAX_RECORDS_OF_AGE):
                if record.header.get("kind") != KIND_BATCH:
                    continue
                offset = decode_header(record.body).body_offset
                request = decode_struct(idl.ParameterServer.setEmbeddings_args, record.body, offset).request
                found[seq] = request.oldest_us or request.time_us
                break
    return found
