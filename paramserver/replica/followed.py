"""A copy that keeps itself up to date: a generation, its connections, and a task a shard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from headrace.paramserver.process.whole_work import finished, to_its_end
from headrace.paramserver.reading.follower import ShardFollower, Update
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.replica.config import ReplicaConfig
from headrace.paramserver.replica.generation import Generation
from headrace.paramserver.replica.log_hold import CopyLease
from headrace.schemas.errors import HeadraceError, UnavailableError

__all__ = ["Followed"]


class Followed:
    """Follows the server's logs into a generation until it is closed or loses its place.

    Thread: the event loop's.

    Attributes:
        generation: What is kept up to date.
        target_seqs: What the server had accepted, by shard, when this began.
        lost: Why it is not any more: its place in a log is gone, a record cannot be applied, or it is closed. None
            while all is well.
    """

    def __init__(
        self,
        generation: Generation,
        reader: EmbeddingReader,
        config: ReplicaConfig,
        lease: CopyLease,
        *,
        target_seqs: Sequence[int],
        on_change: Callable[[], None],
        on_lost: Callable[[Followed, HeadraceError], None],
    ) -> None:
        """Begin to follow.

        Args:
            generation: Loaded.
            reader: Connected to the server; closed with this.
            config: Settings.
            lease: Has the shards keep what is not fetched yet.
            target_seqs: See the attribute.
            on_change: Called when something has become visible.
            on_lost: Called once, when following has ended.
        """
        self.generation = generation
        self.target_seqs = tuple(target_seqs)
        self.lost: HeadraceError | None = None
        self._reader = reader
        self._config = config
        self._lease = lease
        self._on_change = on_change
        self._on_lost = on_lost
        self._changed = asyncio.Event()
        self._taking = asyncio.Lock()
        self._holding = asyncio.Lock()
        self._followers: list[ShardFollower] = []
        self._tasks = [
            asyncio.create_task(self._follow(tail.shard), name=f"headrace-follow-{tail.shard}")
            for tail in generation.tails
        ]

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Return when something holds; it is asked again whenever records have come.

        Raises:
            HeadraceError: Following has ended, whether it holds or not.

        Cancellation: harmless.
        """
        while True:
            if self.lost is not None:
                raise self.lost
            if is_so():
                return
            self._changed.clear()
            await self._changed.wait()

    async def show_when(self, is_so: Callable[[], bool], *, beside: Sequence[Followed] = ()) -> None:
        """Return when something holds; from that very moment on the copy changes as one that lookups see.

        Args:
            is_so: What is to hold.
            beside: Copies that it is compared with: a thread that applies updates to one of them is waited for.

        Raises:
            HeadraceError: Following has ended before.

        Cancellation: harmless for a copy that nobody wants any more.
        """
        while not self.generation.is_shown:
            await self.wait_until(is_so)
            async with contextlib.AsyncExitStack() as stack:
                for copy in (self, *beside):  # another thread may be taking updates
                    await stack.enter_async_context(copy._taking)
                self.generation.is_shown = self.lost is None and is_so()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Show nothing that comes meanwhile, but by `show_up_to`: it waits in memory, within `max_pending_bytes`.

        Cancellation: ends it.
        """
        async with self._holding:
            async with self._taking:
                self.generation.limits = [tail.visible_seq for tail in self.generation.tails]
            try:
                yield
            finally:
                self.generation.limits = None  # before anything that may be cancelled
                if self.lost is None:
                    await finished(self._advance())  # what came meanwhile is shown, whoever gives up

    async def show_up_to(self, seqs: Sequence[int]) -> bool:
        """While held, have lookups see exactly the records up to some; return whether they do.

        By step they never see more than what they saw when holding began: then there must be no rows in between.

        Args:
            seqs: By shard, none before what is visible.

        Raises:
            HeadraceError: Following has ended before.

        Cancellation: harmless.
        """
        tails = self.generation.tails
        self.generation.limits = tuple(seqs)
        await self._advance()

        def have_come() -> bool:
            return all(tail.seq >= seq for tail, seq in zip(tails, seqs, strict=True))

        def are_held() -> bool:
            pairs = zip(tails, seqs, strict=True)
            return any(change.deltas for tail, seq in pairs for change in list(tail.pending) if change.seq <= seq)

        # By step they stay held, and what fills `max_pending_bytes` would keep those behind it from coming.
        await self.wait_until(lambda: have_come() or (self._config.consistency == "step" and are_held()))
        async with self._taking:
            return have_come() and not are_held()

    async def _advance(self) -> None:
        async with self._taking:
            try:
                if await to_its_end(self.generation.advance):
                    self._on_change()
            except Exception as exc:
                self._end(_as_ours(exc))
                raise
        self._changed.set()

    @property
    def silence(self) -> str | None:
        """Which shard has given no answer for longer than a fetch may take, for people; None when there is none.

        Such a shard can be reached: it greets, and then refuses or is stuck. Thread: any.
        """
        patience_s = self._config.fetch_wait_s + self._config.timeout_s
        return next((said for follower in self._followers if (said := follower.silence(patience_s))), None)

    @property
    def reader(self) -> EmbeddingReader:
        """Connected to the server that is followed."""
        return self._reader

    async def close(self) -> None:
        """Stop following; the generation stays as it is, and who waits for something of it is told. Idempotent."""
        if self.lost is None:
            self.lost = UnavailableError("the copy is not followed any more: another one has taken its place")
            self._changed.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._reader.close()

    async def _follow(self, shard: int) -> None:
        generation, config = self.generation, self._config
        tail, link = generation.tails[shard], self._reader.links[shard]
        follower = self._lease.follower(link, from_seq=tail.seq + 1, mark=tail.begin_mark, wait_s=config.fetch_wait_s)
        self._followers.append(follower)
        ahead: asyncio.Task[list[Update]] | None = None
        try:
            while True:
                await self._wait_for_room(shard, follower)
                if generation.is_shown and not self._lease.is_lasting:
                    follower.let_go()
                updates = await (follower.fetch() if ahead is None else ahead)
                last_seq, ahead = follower.last_seq, None
                if follower.is_behind:  # a far server's next records are on their way while these are applied
                    ahead = asyncio.create_task(follower.fetch(), name=f"headrace-fetch-{shard}")
                    await asyncio.sleep(0)  # in memory, records are applied on the loop: the request goes out before
                if await self._take(shard, updates, last_seq):
                    self._on_change()
                self._changed.set()
        except Exception as exc:  # a bug of ours, too: the copy stays, and says so
            self._end(_as_ours(exc))
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    async def _wait_for_room(self, shard: int, follower: ShardFollower) -> None:
        """Return when more of a shard is to be fetched; its log is kept meanwhile."""
        max_bytes = self._config.max_pending_bytes
        while True:
            try:
                async with asyncio.timeout(self._lease.renewal_s):
                    return await self.wait_until(lambda: not self.generation.is_waiting(shard, max_bytes))
            except TimeoutError:
                if follower.is_registered:
                    await follower.register()

    async def _take(self, shard: int, updates: Sequence[Update], last_seq: int) -> bool:
        def take() -> bool:
            has_changed = self.generation.take(shard, updates, last_seq)
            self.generation.make_room(shard, self._config.max_pending_bytes)
            return has_changed

        async with self._taking:
            if not self.generation.is_on_disk:
                return take()
            # The disk may be waited for, and the connections must not. One shard at a time, as in the loop.
            return await to_its_end(take)

    def _end(self, error: HeadraceError) -> None:
        if self.lost is None:
            self.lost = error
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()
            self._changed.set()
            self._on_lost(self, error)


def _as_ours(exc: Exception) -> HeadraceError:
    return exc if isinstance(exc, HeadraceError) else HeadraceError(f"following failed: {exc!r}")
