"""A copy that keeps itself up to date, and the log leases with which the server keeps what the copy needs."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Self

from headrace.paramserver.reading.follower import ShardFollower, Update
from headrace.paramserver.reading.link import ShardLink
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.replica.api.config import ReplicaConfig
from headrace.paramserver.replica.copy.table_set import TableSet
from headrace.paramserver.system.event_loop import run_in_thread_to_end, run_to_end
from headrace.schemas.errors import HeadraceError, UnavailableError

__all__ = ["CopyLease", "LiveCopy", "LogLeaseKeeper"]

# For a replica without a name; the lease ends soon after the replica has.
_UNNAMED, _UNNAMED_LEASE_S = "unnamed", 60.0
# Renewals per lease time: one may come late.
_RENEWALS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyLease:
    """The name under which the shards keep log for one copy, and for how long."""

    name: str  # the replica's; replicas may share one
    copy_id: str  # unique to this copy: during a switch a replica has two
    lease_s: float
    is_lasting: bool  # renew while the copy follows; otherwise only until lookups see it

    @classmethod
    def of(cls, config: ReplicaConfig) -> Self:
        """Return the lease of a new copy."""
        is_named = config.name is not None
        return cls(
            name=config.name or _UNNAMED,
            copy_id=secrets.token_hex(8),
            lease_s=config.lease_s if is_named else min(config.lease_s, _UNNAMED_LEASE_S),
            is_lasting=is_named,
        )

    @property
    def renewal_s(self) -> float:
        """Time between renewals, seconds."""
        return self.lease_s / _RENEWALS

    def follower(
        self, link: ShardLink, *, from_seq: int, mark: int | None = None, wait_s: float = 10.0
    ) -> ShardFollower:
        """Return a follower of one shard's log that holds this lease."""
        name, copy_id, lease_s = self.name, self.copy_id, self.lease_s
        return ShardFollower(
            link, from_seq=from_seq, mark=mark, name=name, copy_id=copy_id, lease_s=lease_s, wait_s=wait_s
        )


class LogLeaseKeeper:
    """Makes every shard keep its log while a copy loads; a fast writer's log would be gone by then.

    Use it with `async with`. Thread: the event loop's, except `check`.
    """

    def __init__(
        self,
        links: Sequence[ShardLink],
        from_seqs: Sequence[int],
        lease: CopyLease,
        *,
        marks: Sequence[int | None] | None = None,
    ) -> None:
        """Prepare leases on each shard's log from `from_seqs` on; none is taken yet.

        `marks` has the nonces of the records before those, which the copy has; None where unknown.
        """
        places = zip(links, from_seqs, marks or [None] * len(links), strict=True)
        self._followers = [lease.follower(link, from_seq=seq, mark=mark) for link, seq, mark in places]
        self._renewal_s = lease.renewal_s
        self._error: HeadraceError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Take the leases; raise `GoneError` if a shard's log no longer has the records."""
        await asyncio.gather(*(follower.register() for follower in self._followers))
        # One task per shard: while one shard is away, the leases of the others must not end.
        self._tasks = [
            asyncio.create_task(self._keep(follower), name="headrace-log-lease") for follower in self._followers
        ]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Stop renewing; the leases expire, or the follower's replace them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    @property
    def marks(self) -> list[int | None]:
        """Nonces of the records before those that the copy will need, known once the leases are taken."""
        return [follower.mark for follower in self._followers]

    def check(self) -> None:
        """Raise the error of a lost lease: the copy being loaded could not follow the log. Thread: any."""
        if self._error is not None:
            raise self._error

    async def _keep(self, follower: ShardFollower) -> None:
        try:
            while True:
                await asyncio.sleep(self._renewal_s)
                await follower.register()
        except HeadraceError as exc:
            self._error = exc


class LiveCopy:
    """Follows the server's logs into a table set until it is closed or loses its place in a log.

    Thread: the event loop's.
    """

    def __init__(
        self,
        table_set: TableSet,
        reader: EmbeddingReader,
        config: ReplicaConfig,
        lease: CopyLease,
        *,
        target_seqs: Sequence[int],
        on_change: Callable[[], None],
        on_lost: Callable[[LiveCopy, HeadraceError], None],
    ) -> None:
        """Begin to follow into a loaded table set; the reader is closed with the copy.

        The lease keeps log that is not fetched yet. `target_seqs` is what the server has accepted by now, by shard.
        `on_change` is called when something became visible, `on_lost` once, when following has ended.
        """
        self.table_set = table_set
        self.reader = reader
        self.target_seqs = tuple(target_seqs)
        # Why it does not follow any more: a place in a log is gone, a record cannot be applied, or it is closed.
        self.lost: HeadraceError | None = None
        self._config = config
        self._lease = lease
        self._on_change = on_change
        self._on_lost = on_lost
        self._changed = asyncio.Event()
        self._taking = asyncio.Lock()
        self._pausing = asyncio.Lock()
        self._followers: list[ShardFollower] = []
        self._tasks = [
            asyncio.create_task(self._follow(tail.shard), name=f"headrace-follow-{tail.shard}")
            for tail in table_set.tails
        ]

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Return when a condition is true, which is checked again whenever records have come.

        Raise `lost` once following has ended, whether the condition is true or not. Cancellation: safe.
        """
        while True:
            if self.lost is not None:
                raise self.lost
            if is_so():
                return
            self._changed.clear()
            await self._changed.wait()

    async def show_when(self, is_so: Callable[[], bool], *, beside: LiveCopy | None) -> None:
        """Return when a condition is true; from that very moment lookups may see the copy.

        Threads that apply updates to the copy `beside` it, which the condition reads, are waited for. Raise `lost` if
        following has ended before. Cancellation: safe.
        """
        while not self.table_set.is_shown:
            await self.wait_until(is_so)
            async with contextlib.AsyncExitStack() as stack:
                for copy in (self,) if beside is None else (self, beside):  # a thread may be applying updates
                    await stack.enter_async_context(copy._taking)
                self.table_set.is_shown = self.lost is None and is_so()

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Show no new records during the block, except by `show_up_to`; they wait within `max_pending_bytes`.

        Cancellation: ends the pause.
        """
        async with self._pausing:
            async with self._taking:
                self.table_set.limits = [tail.visible_seq for tail in self.table_set.tails]
            try:
                yield
            finally:
                self.table_set.limits = None  # before anything that may be cancelled
                if self.lost is None:
                    await run_to_end(self._advance())  # show what came meanwhile, also if the caller is cancelled

    async def show_up_to(self, seqs: Sequence[int]) -> bool:
        """During a pause, show exactly the records up to `seqs`, by shard; return whether lookups see them.

        By step, lookups see no more than when the pause began, so there must be no rows in between. Raise `lost` if
        following has ended before. Cancellation: safe.
        """
        tails = self.table_set.tails
        self.table_set.limits = tuple(seqs)
        await self._advance()

        def have_come() -> bool:
            return all(tail.seq >= seq for tail, seq in zip(tails, seqs, strict=True))

        def are_pending() -> bool:
            pairs = zip(tails, seqs, strict=True)
            return any(change.deltas for tail, seq in pairs for change in list(tail.pending) if change.seq <= seq)

        # By step they stay pending, and could fill `max_pending_bytes` so that later records never come.
        await self.wait_until(lambda: have_come() or (self._config.consistency == "step" and are_pending()))
        async with self._taking:
            return have_come() and not are_pending()

    async def hold_recorded(self, is_on: bool, *, goes_on: bool = False) -> None:
        """Stay at recorded steps or not; see `TableSet.hold_recorded`.

        Cancellation: it is done or not; what has come meanwhile may be shown later.
        """
        async with self._taking:
            self.table_set.hold_recorded(is_on, goes_on=goes_on)
        if self.lost is None:
            await self._advance()

    @property
    def silence(self) -> str | None:
        """The shard that has not answered for longer than a fetch may take, for people; None if all answer.

        Such a shard accepts connections, and then refuses or hangs. Thread: any.
        """
        patience_s = self._config.fetch_wait_s + self._config.timeout_s
        return next((said for follower in self._followers if (said := follower.silence(patience_s))), None)

    async def close(self) -> None:
        """Stop following and wake all waiters with an error; the table set stays as it is. Idempotent."""
        if self.lost is None:
            self.lost = UnavailableError("the copy is not followed any more: another one has taken its place")
            self._changed.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.reader.close()

    async def _follow(self, shard: int) -> None:
        table_set, config = self.table_set, self._config
        tail, link = table_set.tails[shard], self.reader.links[shard]
        follower = self._lease.follower(link, from_seq=tail.seq + 1, mark=tail.begin_mark, wait_s=config.fetch_wait_s)
        self._followers.append(follower)
        ahead: asyncio.Task[list[Update]] | None = None
        try:
            while True:
                await self._wait_for_room(shard, follower)
                if table_set.is_shown and not self._lease.is_lasting:
                    follower.let_go()
                updates = await (follower.fetch() if ahead is None else ahead)
                last_seq, ahead = follower.last_seq, None
                if follower.is_behind:  # fetch a far server's next records while these are applied
                    ahead = asyncio.create_task(follower.fetch(), name=f"headrace-fetch-{shard}")
                    await asyncio.sleep(0)  # tables in memory are updated on the loop: send the request before
                await self._take(shard, updates, last_seq)
        except Exception as exc:  # also a bug: the copy stays, and reports it
            self._end(_as_headrace_error(exc))
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    async def _wait_for_room(self, shard: int, follower: ShardFollower) -> None:
        """Return when more of a shard may be fetched; keep its log meanwhile."""
        max_bytes = self._config.max_pending_bytes
        while True:
            try:
                async with asyncio.timeout(self._lease.renewal_s):
                    return await self.wait_until(lambda: not self.table_set.is_waiting(shard, max_bytes))
            except TimeoutError:
                if follower.is_registered:
                    await follower.register()

    async def _take(self, shard: int, updates: Sequence[Update], last_seq: int) -> None:
        def take() -> bool:
            has_changed = self.table_set.take(shard, updates, last_seq)
            self.table_set.make_room(shard, self._config.max_pending_bytes)
            return has_changed

        async with self._taking:
            # In a thread: connections must not wait for the disk. One shard at a time, as on the loop.
            has_changed = await run_in_thread_to_end(take) if self.table_set.is_on_disk else take()
        if has_changed:
            self._on_change()
        self._changed.set()

    async def _advance(self) -> None:
        async with self._taking:
            try:
                if await run_in_thread_to_end(self.table_set.advance):
                    self._on_change()
            except Exception as exc:
                self._end(_as_headrace_error(exc))
                raise
        self._changed.set()

    def _end(self, error: HeadraceError) -> None:
        if self.lost is None:
            self.lost = error
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()
            self._changed.set()
            self._on_lost(self, error)


def _as_headrace_error(exc: Exception) -> HeadraceError:
    return exc if isinstance(exc, HeadraceError) else HeadraceError(f"following failed: {exc!r}")
