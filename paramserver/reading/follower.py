"""Follows one shard's update log over the wire: every record once, in order, over lost connections and restarts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from headrace.paramserver.reading.shard_link import AnotherServerError, ShardLink, retry
from headrace.schemas.durations import format_seconds
from headrace.schemas.errors import GoneError, ProtocolError, SetBackError
from headrace.schemas.idl import idl
from headrace.schemas.log_records import MAX_PAYLOAD_BYTES, unpack_header

__all__ = ["ShardFollower", "Update"]


@dataclass(frozen=True, slots=True)
class Update:
    """One record of a shard's log.

    Attributes:
        seq: Its position, without gaps.
        epoch: Trainer run.
        kind: `UpdateKind`.
        header: The map that the log keeps beside the body.
        body: uint8 view; it keeps the buffer of the whole reply.
    """

    seq: int
    epoch: int
    kind: int
    header: dict[str, Any]
    body: memoryview


class ShardFollower:
    """A place in one shard's log.

    Attributes:
        next_seq: What `fetch` returns next.
        last_seq: Last durable record of the shard, as it last told; 0 before it has.
        mark: Tells the record before `next_seq`, see `FetchUpdatesReply`; None when it is not known.
    """

    def __init__(
        self,
        link: ShardLink,
        *,
        from_seq: int,
        mark: int | None = None,
        name: str | None = None,
        copy_id: str | None = None,
        lease_s: float = 60.0,
        max_bytes: int = 16 << 20,
        wait_s: float = 10.0,
    ) -> None:
        """Begin at a seq; nothing is asked yet.

        Args:
            link: To the shard; it has said hello. The caller closes it.
            from_seq: First record wanted, ≥ 1.
            mark: Tells the record before it, which the caller has; None takes what the shard has there for that.
            name: Registers at the shard, which then keeps what is not fetched yet, within its bound; None does not.
            copy_id: Tells followers of one name apart; each has a lease of its own.
            lease_s: For this long after each fetch, seconds.
            max_bytes: Records of one fetch, about.
            wait_s: How long a fetch waits for something new, seconds.
        """
        self.next_seq = from_seq
        self.last_seq = 0
        self.mark = mark
        self._link = link
        self._server_id = link.hello.server_id
        self._name = name
        self._copy_id = copy_id
        self._lease_ms = round(lease_s * 1000)
        self._max_bytes = max_bytes
        self._wait_ms = round(wait_s * 1000)
        self._asked_s: list[float] = []  # since when the shard owes each answer

    async def fetch(self) -> list[Update]:
        """Return the next records; none when nothing has come for as long as a fetch waits.

        A shard that is away is tried again until it is there.

        Raises:
            GoneError: The records have been removed, or the store is another one: start over from a snapshot.
            SetBackError: The server was set back to an older copy of itself: so do then.
            ProtocolError: The shard has left a record out.
            HeadraceError: The shard refuses for good.

        Cancellation: atomic; the same records come next time.
        """
        reply = await self._ask(self.next_seq, 0)
        records = list(reply.records)
        updates = []
        expected = self.next_seq
        for record in records:
            if record.seq != expected:
                raise ProtocolError(f"{self._link.address}: record {record.seq} where {expected} was expected")
            body = record.body if record.body_size_bytes is None else await self._rest_of(record, reply.mark)
            updates.append(Update(record.seq, record.epoch, record.kind, unpack_header(record.header), body))
            expected += 1
        self.next_seq, self.last_seq = expected, reply.last_seq
        if records:
            self.mark = reply.mark
        return updates

    def silence(self, patience_s: float) -> str | None:
        """Return for how long nothing has come of an answer that the shard owes, and why, if that is too long; or None.

        Thread: any.
        """
        now_s, failure = time.monotonic(), self._link.failure
        # An answer may be long, and the way to the shard slow.
        silent_s = now_s - max(min(self._asked_s, default=now_s), self._link.moved_s)
        if silent_s <= patience_s:
            return None
        why = "" if failure is None else f": {failure}"
        return f"{self._link.address} has not answered for {format_seconds(silent_s)}{why}"

    @property
    def is_behind(self) -> bool:
        """Whether the shard has told of records from `next_seq` on: a fetch would not wait for one."""
        return self.next_seq <= self.last_seq

    @property
    def is_registered(self) -> bool:
        """Whether each fetch renews a lease."""
        return self._name is not None

    def let_go(self) -> None:
        """Renew the lease no more; it ends when it ends."""
        self._name = self._copy_id = None

    async def register(self) -> None:
        """Have the shard keep the log from `next_seq` on for as long as the lease, without fetching; needs a name.

        Raises:
            HeadraceError: As of `fetch`.

        Cancellation: harmless.
        """
        assert self._name is not None, "nobody is registered without a name"
        await self._ask(self.next_seq, 0, is_fetch=False)

    async def _rest_of(self, record: Any, mark: int | None) -> memoryview:
        """Return the whole body of a record whose first part has come."""
        if not 0 <= record.body_size_bytes <= MAX_PAYLOAD_BYTES:
            raise ProtocolError(f"{self._link.address}: record {record.seq} of {record.body_size_bytes} bytes")
        body = bytearray(record.body_size_bytes)
        part, at = record, 0
        while True:
            if not len(part.body) or at + len(part.body) > len(body):
                raise ProtocolError(f"{self._link.address}: record {record.seq} has parts that do not fit together")
            body[at : at + len(part.body)] = part.body
            at += len(part.body)
            if at == len(body):
                return memoryview(body).toreadonly()
            reply = await self._ask(record.seq, at)
            if not reply.records or reply.records[0].seq != record.seq:
                raise ProtocolError(f"{self._link.address}: the rest of record {record.seq} has not come")
            if len(reply.records) == 1:  # else it is another record's
                self._check_mark(record.seq, mark, reply.mark)
            part = reply.records[0]

    async def _ask(self, from_seq: int, body_offset: int, *, is_fetch: bool = True) -> Any:
        request = idl.FetchUpdatesRequest(
            server_id=self._server_id,
            from_seq=from_seq,
            max_bytes=self._max_bytes if is_fetch else 1,
            wait_ms=self._wait_ms if is_fetch else 0,
            follower=self._name,
            copy_id=self._copy_id,
            lease_ms=self._lease_ms if self._name is not None else None,
            body_offset=body_offset or None,
        )
        asked_s = time.monotonic()
        self._asked_s.append(asked_s)
        try:
            reply = await retry(lambda: self._link.fetch_updates(request))
        except AnotherServerError as exc:
            raise GoneError(f"the store is another one than before: {exc}") from exc
        finally:
            self._asked_s.remove(asked_s)
        if from_seq == self.next_seq and reply.mark_before is not None:
            self._check_mark(self.next_seq - 1, self.mark, reply.mark_before)
            self.mark = reply.mark_before
        return reply

    def _check_mark(self, seq: int, taken: int | None, present: int | None) -> None:
        """Check that the shard has the record that was taken, and so all before it."""
        # One of a shard, or of a snapshot, that does not tell cannot be compared.
        if taken is not None and present is not None and taken != present:
            raise SetBackError(
                f"{self._link.address}: record {seq} is another than the one that was taken: the server was set back "
                "to an older copy of itself: start over"
            )
