"""Follow one shard into its mirror: every record once, in order, with the source's marks, over losses and restarts.

Followers get each record when it has come; the disk may take it later. When the disk fails or is full, the relay serves
what it has, opens the mirror again, and goes on where the disk ends.

The relay begins behind the newest snapshot of its source, or where the source's log begins, or at its end. It begins
anew in the same way when the source does not have what comes next: because the relay was away for longer than the
source keeps its log, or because the source was set back to an older copy of itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headrace.paramserver.log.interface import KIND_HELLO, is_housekeeping
from headrace.paramserver.reading.follower import ShardFollower, Update
from headrace.paramserver.reading.link import ShardLink, retry
from headrace.paramserver.relay.mirrored_log import MirroredLog, MirrorPlace, try_disk
from headrace.paramserver.relay.options import RelayConfig
from headrace.paramserver.rpc.outages import Backoff
from headrace.paramserver.system.event_loop import background_task
from headrace.paramserver.system.log_lines import fact
from headrace.schemas.errors import (
    CorruptionError,
    GoneError,
    HeadraceError,
    SetBackError,
    StorageError,
    UnavailableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.snapshot_manifest import SnapshotManifest

__all__ = ["ShardMirror"]

_log = logging.getLogger(__name__)

# The source answers at least this often, so that the age of what a relay knows stays small.
_WAIT_S = 1.0
# The source's tables and owners are asked for this often, and behind each record that may change them.
_HELLO_INTERVAL_S = 10.0
_FETCH_BYTES = 8 << 20
# What the disk may lack before the next fetch waits for it.
_MAX_PENDING_BYTES = 16 << 20
# Between attempts to begin anew, or to write again.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class ShardMirror:
    """Keeps one shard's mirror up to date. Thread: the event loop's.

    Attributes:
        log: The mirror; None until the relay knows where to begin.
        hello: The source's last `idl.HelloReply`.
        failure: Why it does not follow, or cannot write; None while it does.
        num_restarts: How often it has begun anew since the process began.
    """

    def __init__(
        self,
        link: ShardLink,
        config: RelayConfig,
        *,
        shard: int,
        hello: Any,
        newest_snapshot: Callable[[], Awaitable[SnapshotManifest | None]],
        on_hello: Callable[[int, Any], Awaitable[None]],
    ) -> None:
        """Prepare to follow; nothing is opened yet.

        Args:
            link: The source's shard. The caller closes it.
            config: The relay's settings.
            shard: Index of the shard.
            hello: The source's last hello, which a file may have kept.
            newest_snapshot: Returns the manifest of the source's newest snapshot.
            on_hello: Called with shard and `idl.HelloReply` when the source's tables may have changed.
        """
        self.log: MirroredLog | None = None
        self.hello = hello
        self.failure: str | None = None
        self.num_restarts = 0
        self._link, self._config, self._shard = link, config, shard
        self._newest_snapshot, self._on_hello = newest_snapshot, on_hello
        self._directory = config.data / f"shard-{shard:04d}"
        self._place: MirrorPlace | None = None  # of the mirror that was opened last
        self._copy_id = secrets.token_hex(8)
        self._follower: ShardFollower | None = None
        self._behind_since_s = math.inf
        self._hello_s = -math.inf

    @property
    def source(self) -> str:
        """Host and port of the shard that is followed."""
        return self._link.address

    @property
    def source_seq(self) -> int:
        """Last durable seq that the source has reported."""
        known = 0 if self._follower is None else self._follower.last_seq
        return max(known, 0 if self.log is None else self.log.last_seq)

    @property
    def lag_s(self) -> float:
        """How long it has lacked a record that it knows of; 0 if it lacks none."""
        return max(time.monotonic() - self._behind_since_s, 0.0)

    @property
    def knowledge_age_s(self) -> float:
        """How long ago the shard itself was heard, over all relays between; inf before the first time."""
        follower = self._follower
        return math.inf if follower is None else time.monotonic() - follower.heard_s + follower.knowledge_age_s

    async def run(self) -> None:
        """Open the mirror and follow for ever.

        Raises:
            CorruptionError: The mirror is damaged.
            StorageError: The disk failed at the start; later that only stops the mirror until it is mended.
            HeadraceError: The source refuses for good.

        Cancellation: closes the mirror; `log` stays what it was.
        """
        place = await asyncio.to_thread(MirrorPlace.read, self._directory)
        try:
            if place is not None:
                await self._open(place)
            await self._keep_following()
        finally:
            if self.log is not None:
                await self.log.close()

    async def check_ahead(self, from_seq: int) -> None:
        """Find out why a follower asks for what is beyond this mirror: the source decides.

        Raises:
            SetBackError: The source's log ends before it, too: it was set back.
            UnavailableError: The source has it: this relay is behind; or the source is away. Ask again.
        """
        request = idl.FetchUpdatesRequest(server_id=self.hello.server_id, from_seq=from_seq, max_bytes=1, wait_ms=0)
        why = f"this relay is behind {self.source}, and does not have seq {from_seq - 1} yet"
        try:
            await self._link.fetch_updates(request)
        except SetBackError:
            raise
        except HeadraceError as exc:
            why = f"{why}: {exc}"
        raise UnavailableError(why)

    async def _open(self, place: MirrorPlace) -> None:
        """Serve the mirror at a place from now on; the old one is closed."""
        old, self.log = self.log, None
        if old is not None:
            await old.close()
        self.log = await MirroredLog.open(place, self._config, shard=self._shard, server_id=self.hello.server_id)
        self._place = place

    async def _keep_following(self) -> None:
        backoff = Backoff(min_s=_FIRST_PAUSE_S, max_s=_LONGEST_PAUSE_S, random=random.random)
        mend = self._begin if self.log is None else None
        begin_seq = 0
        while True:
            try:
                if mend is not None:
                    await mend()
                assert self.log is not None
                mend, begin_seq = None, self.log.durable_seq
                await self._follow(self.log)
            except GoneError as exc:
                mend, self.failure = self._begin, str(exc)
                self.num_restarts += 1
                fact(_log, logging.WARNING, "the relay begins anew", shard=self._shard, error=str(exc))
            except CorruptionError:
                raise
            except StorageError as exc:
                if self._place is None:
                    raise
                mend, self.failure = mend or self._reopen, f"it mirrors nothing more, because its disk failed: {exc}"
                self._behind_since_s = min(self._behind_since_s, time.monotonic())
                fact(_log, logging.ERROR, "the relay's disk failed; it tries again", shard=self._shard, error=str(exc))
            if self.log is not None and self.log.durable_seq > begin_seq:
                begin_seq = self.log.durable_seq
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _begin(self) -> None:
        """Replace the mirror by a new one; followers of the old one are told that their place is gone."""
        begin_seq, begin_mark = await retry(self._find_beginning)
        fact(_log, logging.INFO, "the mirror begins", shard=self._shard, seq=begin_seq)
        place = await asyncio.to_thread(MirrorPlace.begin, self._directory, begin_seq=begin_seq, begin_mark=begin_mark)
        await self._open(place)

    async def _reopen(self) -> None:
        """Open the mirror again as the disk has it. A follower that is ahead of that waits until it has come again."""
        assert self._place is not None
        await asyncio.to_thread(try_disk, self._directory)  # until it succeeds, the failed log serves what it has
        await self._open(self._place)

    async def _find_beginning(self) -> tuple[int, int | None]:
        """Return the first seq to mirror, and the source's mark of the record before it."""
        manifest = await self._newest_snapshot()
        if manifest is not None:
            part = manifest.parts[self._shard]
            try:
                mark = await self._mark_before(part.seq + 1)
                if mark is None or part.mark is None or mark == part.mark:
                    return part.seq + 1, part.mark if mark is None else mark
            except GoneError as exc:  # SetBackError too: the snapshot is of a time that is gone
                fact(_log, logging.WARNING, "the source's newest snapshot cannot be followed", error=str(exc))
        try:
            return 1, await self._mark_before(1)
        except GoneError:
            end = (await self._link.status()).log_seq + 1
            return end, await self._mark_before(end)

    async def _mark_before(self, from_seq: int) -> int | None:
        """Return the source's mark of the record before a seq, None if unknown; `GoneError` if the seq is gone."""
        server_id = self.hello.server_id
        request = idl.FetchUpdatesRequest(server_id=server_id, from_seq=from_seq, max_bytes=1, wait_ms=0)
        mark: int | None = (await self._link.fetch_updates(request)).mark_before
        return mark

    async def _follow(self, log: MirroredLog) -> None:
        """Mirror records until the source lacks the next one, or the disk fails."""
        async with (
            background_task(log.wait_failed(), name=f"headrace-mirror-failed-{self._shard}") as failing,
            background_task(self._copy(log), name=f"headrace-mirror-{self._shard}") as copying,
        ):
            await asyncio.wait((failing, copying), return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                raise failing.result()
            await copying

    async def _copy(self, log: MirroredLog) -> None:
        follower = ShardFollower(
            self._link,
            from_seq=log.last_seq + 1,
            mark=log.last_mark,
            name=self._config.name,
            copy_id=self._copy_id,
            lease_s=self._config.lease_s,
            max_bytes=_FETCH_BYTES,
            wait_s=_WAIT_S,
        )
        if (before := self._follower) is not None:  # it was heard all the same
            follower.heard_s, follower.knowledge_age_s = before.heard_s, before.knowledge_age_s
        self._follower = follower
        await self._refresh_hello()
        begin_seq = log.last_seq
        while True:
            mark_before = follower.mark
            updates = await follower.fetch()
            if self._link.hello is not self.hello:  # the link has connected again, perhaps to a newer copy of the shard
                await self._take_hello(self._link.hello)
            if updates:
                await self._append(log, updates, await self._marks_of(updates, mark_before, follower.mark))
            # While the disk is full, opening the mirror again succeeds, and writing does not.
            is_well = log.durable_seq > begin_seq or not updates
            if is_well:
                self.failure = None
            is_behind = follower.is_behind or not is_well
            self._behind_since_s = min(self._behind_since_s, time.monotonic()) if is_behind else math.inf
            if any(map(_changes_hello, updates)) or time.monotonic() - self._hello_s > _HELLO_INTERVAL_S:
                await self._refresh_hello()

    async def _append(self, log: MirroredLog, updates: Sequence[Update], marks: Sequence[int | None]) -> None:
        """Let followers have records, and wait for the disk only if it is far behind."""
        durable = [log.append(update, mark) for update, mark in zip(updates, marks, strict=True)]
        log.wake()
        if log.pending_bytes > _MAX_PENDING_BYTES:
            await durable[-1]

    async def _marks_of(self, updates: Sequence[Update], before: int | None, last: int | None) -> list[int | None]:
        """Return the source's mark of each record; a reply tells the last one's only.

        Marks are random, one for each segment, and segments follow on each other. So between two records of one mark
        all have that mark, and a change is found by halving. A change comes once a segment.
        """
        marks: list[int | None] = [None] * len(updates)
        num_asked = 0

        async def fill(low: int, low_mark: int | None, high: int, high_mark: int | None) -> None:
            """Fill in the marks between two places whose marks are known; -1 is the record before the first."""
            nonlocal num_asked
            if low_mark == high_mark:
                marks[low + 1 : high] = [high_mark] * (high - low - 1)
            elif high - low > 1:
                # Mostly the whole reply is of a new segment: look behind the first record before halving.
                middle = 0 if low == -1 else (low + high) // 2
                marks[middle] = await retry(lambda: self._mark_before(updates[middle].seq + 1))
                num_asked += 1
                await fill(low, low_mark, middle, marks[middle])
                await fill(middle, marks[middle], high, high_mark)

        marks[-1] = last
        if last is not None:
            await fill(-1, before, len(updates) - 1, last)
        if num_asked and await retry(lambda: self._mark_before(updates[-1].seq + 1)) != last:
            # The answers may be of another history than the records, and would prove them to followers.
            raise SetBackError(f"{self.source} was set back while its records were mirrored: start over")
        return marks

    async def _refresh_hello(self) -> None:
        await self._take_hello(await retry(self._link.refresh))

    async def _take_hello(self, hello: Any) -> None:
        # First to the disk: a relay that is killed must not come back with a lower term than it has told.
        await self._on_hello(self._shard, hello)
        self.hello, self._hello_s = hello, time.monotonic()


def _changes_hello(update: Update) -> bool:
    """Return whether a record may change what the source's hello says: tables or owners."""
    return update.kind == KIND_HELLO and not is_housekeeping(update.header)
