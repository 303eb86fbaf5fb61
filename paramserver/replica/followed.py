"""A copy that keeps itself up to date: a generation, its connections, and a task a shard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headrace.paramserver.follower import ShardFollower
from headrace.paramserver.reader import EmbeddingReader
from headrace.paramserver.replica.config import ReplicaConfig
from headrace.paramserver.replica.generation import Generation
from headrace.schemas.errors import HeadraceError

__all__ = ["Followed"]


class Followed:
    """Follows the server's logs into a generation until it is closed or loses its place.

    Thread: the event loop's.

    Attributes:
        generation: What is kept up to date.
        target_seqs: What the server had accepted, by shard, when this began.
        lost: Why it is not any more: its place in a log is gone, or a record cannot be applied. None while all is well.
    """

    def __init__(
        self,
        generation: Generation,
        reader: EmbeddingReader,
        config: ReplicaConfig,
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
            target_seqs: See the attribute.
            on_change: Called when something has become visible.
            on_lost: Called once, when following has ended.
        """
        self.generation = generation
        self.target_seqs = tuple(target_seqs)
        self.lost: HeadraceError | None = None
        self._reader = reader
        self._config = config
        self._on_change = on_change
        self._on_lost = on_lost
        self._changed = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._follow(tail.shard), name=f"headrace-follow-{tail.shard}")
            for tail in generation.tails
        ]

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Return when something holds; it is asked again whenever records have come.

        Raises:
            HeadraceError: Following has ended before.

        Cancellation: harmless.
        """
        while not is_so():
            if self.lost is not None:
                raise self.lost
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Stop following; the generation stays as it is. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._reader.close()

    async def _follow(self, shard: int) -> None:
        generation, config = self.generation, self._config
        follower = ShardFollower(
            self._reader.links[shard],
            from_seq=generation.tails[shard].seq + 1,
            name=config.name,
            lease_s=config.lease_s,
            wait_s=config.fetch_wait_s,
        )
        try:
            while True:
                await self.wait_until(lambda: not generation.is_waiting(shard, config.max_pending_bytes))
                updates = await follower.fetch()
                if generation.take(shard, updates, follower.last_seq):
                    self._on_change()
                self._changed.set()
        except HeadraceError as exc:
            self._end(exc)
        except Exception as exc:  # a bug of ours: the copy stays, and says so
            self._end(HeadraceError(f"following shard {shard} failed: {exc!r}"))

    def _end(self, error: HeadraceError) -> None:
        if self.lost is None:
            self.lost = error
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()
            self._changed.set()
            self._on_lost(self, error)
