"""Keeps the server's logs from where a copy begins until it has caught up: a fast writer's would be gone by then."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Self

from headrace.paramserver.reading.follower import ShardFollower
from headrace.paramserver.reading.shard_link import ShardLink
from headrace.paramserver.replica.config import ReplicaConfig
from headrace.schemas.errors import HeadraceError

__all__ = ["CopyLease", "LogHold"]

# Of a replica that was given no name. It ends soon after the replica has.
_UNNAMED, _UNNAMED_LEASE_S = "unnamed", 60.0
# Of each lease: one may come late.
_RENEWALS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyLease:
    """By what the shards know one copy, and for how long they keep what it needs.

    Attributes:
        name: The replica's; replicas may have one in common.
        copy_id: This copy's alone: a replica has two while it changes from one to the other.
        lease_s: For so long at a time, seconds.
        is_lasting: For as long as the copy follows; else until lookups see it.
    """

    name: str
    copy_id: str
    lease_s: float
    is_lasting: bool

    @classmethod
    def of(cls, config: ReplicaConfig) -> Self:
        """Return that of a new copy."""
        is_named = config.name is not None
        return cls(
            name=config.name or _UNNAMED,
            copy_id=secrets.token_hex(8),
            lease_s=config.lease_s if is_named else min(config.lease_s, _UNNAMED_LEASE_S),
            is_lasting=is_named,
        )

    @property
    def renewal_s(self) -> float:
        """How often to renew it, seconds."""
        return self.lease_s / _RENEWALS

    def follower(
        self, link: ShardLink, *, from_seq: int, mark: int | None = None, wait_s: float = 10.0
    ) -> ShardFollower:
        """Return a follower of one shard's log that keeps it."""
        return ShardFollower(
            link,
            from_seq=from_seq,
            mark=mark,
            name=self.name,
            copy_id=self.copy_id,
            lease_s=self.lease_s,
            wait_s=wait_s,
        )


class LogHold:
    """Has every shard keep its log for a copy that is being loaded. Use it with `async with` around the loading.

    Thread: the event loop's, but for `check`.
    """

    def __init__(
        self,
        links: Sequence[ShardLink],
        from_seqs: Sequence[int],
        lease: CopyLease,
        *,
        marks: Sequence[int | None] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Ask for nothing yet.

        Args:
            links: To all shards.
            from_seqs: First record of each that the copy will need.
            lease: Whose.
            marks: Tell the records before those, which the copy has; None where that is not known.
            sleep: Waits for some seconds.
        """
        places = zip(links, from_seqs, marks or [None] * len(links), strict=True)
        self._followers = [lease.follower(link, from_seq=seq, mark=mark) for link, seq, mark in places]
        self._renewal_s = lease.renewal_s
        self._sleep = sleep
        self._error: HeadraceError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Get the leases.

        Raises:
            GoneError: A shard has no log from there on.
            HeadraceError: A shard refuses.
        """
        await asyncio.gather(*(follower.register() for follower in self._followers))
        # A task each: while one shard is away, the leases of the others must not end.
        self._tasks = [
            asyncio.create_task(self._keep(follower), name="headrace-log-hold") for follower in self._followers
        ]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Renew the leases no more; they end when they end, or when the follower's take their place."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    @property
    def marks(self) -> list[int | None]:
        """What tells the records before those that the copy will need, once the leases are there."""
        return [follower.mark for follower in self._followers]

    def check(self) -> None:
        """Check that the log is still there, as far as is known. Thread: any.

        Raises:
            GoneError: It is not: what is being loaded could not be followed from.
            HeadraceError: A shard has refused to keep it.
        """
        if self._error is not None:
            raise self._error

    async def _keep(self, follower: ShardFollower) -> None:
        try:
            while True:
                await self._sleep(self._renewal_s)
                await follower.register()
        except HeadraceError as exc:
            self._error = exc
