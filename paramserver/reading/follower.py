"""Follow one shard's update log: every record once, in order, across lost connections and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from headrace.paramserver.reading.link import AnotherServerError, ShardLink, retry
from headrace.paramserver.system.event_loop import background_task
from headrace.paramserver.system.log_lines import fact
from headrace.paramserver.system.text import format_seconds
from headrace.schemas.errors import GoneError, ProtocolError, SetBackError
from headrace.schemas.idl import idl
from headrace.schemas.log_records import MAX_PAYLOAD_BYTES, unpack_header

__all__ = ["ShardFollower", "Update", "hold_log"]

_log = logging.getLogger(__name__)

_RENEW_S = 60.0


@dataclass(frozen=True, slots=True)
class Update:
    """One record of a shard's log, of an `idl.UpdateKind`; the body keeps the buffer of the whole reply alive."""

    seq: int
    epoch: int
    kind: int
    header: dict[str, Any]
    body: memoryview


@contextlib.asynccontextmanager
async def hold_log(follower: ShardFollower) -> AsyncIterator[None]:
    """Have a shard keep its log from a follower's position on while the block lasts, though nothing is fetched.

    A lease that is lost meanwhile shows when the log is fetched.

    Raises:
        GoneError: The shard has removed it.
    """
    await follower.register()
    async with background_task(_keep_registered(follower), name="headrace-hold-log"):
        yield


async def _keep_registered(follower: ShardFollower) -> None:
    try:
        while True:
            await asyncio.sleep(_RENEW_S)
            await follower.register()
    except GoneError as exc:
        fact(_log, logging.WARNING, "the log that was held is gone", error=str(exc))


class ShardFollower:
    """A position in one shard's log.

    Attributes:
        next_seq: First record that `fetch` returns next.
        last_seq: The shard's last durable record, as of its last reply; 0 before the first.
        mark: Stands for the record before `next_seq`, see `FetchUpdatesReply`; None if unknown.
        heard_s: When the last reply came, monotonic seconds; -inf before.
        term: Of the shard, as of the last reply; 0 for none.
        knowledge_age_s: How old its knowledge was then, if it came from a follower; 0 from the writing shard.
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
        """Start at a seq; sends nothing yet.

        Args:
            link: The shard's link, which has said hello. The caller closes it.
            from_seq: First record wanted, ≥ 1.
            mark: Stands for the record before it, which the caller has; None accepts the shard's.
            name: Takes a log lease under this name, within the shard's bound; None takes none.
            copy_id: Distinguishes followers of one name; each has its own lease.
            lease_s: Length of the lease after each fetch, seconds.
            max_bytes: Approximate size of one fetch.
            wait_s: How long a fetch waits for a new record, seconds.
        """
        self.next_seq = from_seq
        self.last_seq = 0
        self.mark = mark
        self.heard_s, self.knowledge_age_s = -math.inf, 0.0
        self.term = 0
        self._link = link
        self._server_id = link.hello.server_id
        self._name = name
        self._copy_id = copy_id
        self._lease_ms = round(lease_s * 1000)
        self._max_bytes = max_bytes
        self._wait_ms = round(wait_s * 1000)
        self._asked_s: list[float] = []  # start of each request that is not answered yet

    async def fetch(self) -> list[Update]:
        """Return the next records, or none if nothing new came within the wait. Retries while the shard is away.

        Raises:
            GoneError: The records were removed, or the store is another one: start over from a snapshot.
            SetBackError: The server was set back to an older copy of itself: start over, too.
            ProtocolError: The shard skipped a record.
            HeadraceError: The shard refuses for good.

        Cancellation: atomic; the next call returns the same records.
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
        """Say how long, and why, a request has gone unanswered with no byte moving; None if within `patience_s`.

        Thread: any.
        """
        now_s, failure = time.monotonic(), self._link.failure
        # A long reply over a slow link counts as progress.
        silent_s = now_s - max(min(self._asked_s, default=now_s), self._link.moved_s)
        if silent_s <= patience_s:
            return None
        why = "" if failure is None else f": {failure}"
        return f"{self._link.address} has not answered for {format_seconds(silent_s)}{why}"

    @property
    def is_behind(self) -> bool:
        """Whether the shard is known to have records from `next_seq` on, so that a fetch returns at once."""
        return self.next_seq <= self.last_seq

    @property
    def is_registered(self) -> bool:
        """Whether each fetch renews a lease."""
        return self._name is not None

    def let_go(self) -> None:
        """Stop renewing the lease; it runs out on its own."""
        self._name = self._copy_id = None

    async def register(self) -> None:
        """Take or renew the lease on records from `next_seq` on without fetching; raises as `fetch` does.

        Cancellation: harmless.
        """
        assert self._name is not None, "a follower without a name has no lease"
        await self._ask(self.next_seq, 0, is_fetch=False)

    async def _rest_of(self, record: Any, mark: int | None) -> memoryview:
        """Return the whole body of a record of which only the first part has come."""
        if not 0 <= record.body_size_bytes <= MAX_PAYLOAD_BYTES:
            raise ProtocolError(f"{self._link.address}: record {record.seq} of {record.body_size_bytes} bytes")
        body = bytearray(record.body_size_bytes)
        part, at = record, 0
        while True:
            if not len(part.body) or at + len(part.body) > len(body):
                raise ProtocolError(f"{self._link.address}: parts of record {record.seq} do not fit together")
            body[at : at + len(part.body)] = part.body
            at += len(part.body)
            if at == len(body):
                return memoryview(body).toreadonly()
            reply = await self._ask(record.seq, at)
            if not reply.records or reply.records[0].seq != record.seq:
                raise ProtocolError(f"{self._link.address}: the rest of record {record.seq} has not come")
            if len(reply.records) == 1:  # otherwise the mark is another record's
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
            raise GoneError(f"the store is not the same as before: {exc}") from exc
        finally:
            self._asked_s.remove(asked_s)
        self.heard_s, self.knowledge_age_s = time.monotonic(), (reply.knowledge_age_ms or 0) / 1000
        self.term = reply.term or 0
        if from_seq == self.next_seq and reply.mark_before is not None:
            self._check_mark(self.next_seq - 1, self.mark, reply.mark_before)
            self.mark = reply.mark_before
        return reply

    def _check_mark(self, seq: int, taken: int | None, present: int | None) -> None:
        """Check that the shard still has the record that was taken, and so all records before it."""
        # An older shard or snapshot has no mark; nothing can be compared then.
        if taken is not None and present is not None and taken != present:
            raise SetBackError(
                f"{self._link.address}: record {seq} differs from the one that was taken: the server was set back to "
                "an older copy of itself: start over"
            )
