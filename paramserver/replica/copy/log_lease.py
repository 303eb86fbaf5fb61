"""Log leases of a copy: the server keeps the log that the copy needs while it loads and until it has caught up."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Self

from headrace.paramserver.reading.follower import ShardFollower
from headrace.paramserver.reading.link import ShardLink
from headrace.paramserver.replica.api.config import ReplicaConfig
from headrace.schemas.errors import HeadraceError

__all__ = ["CopyLease", "LogLeaseKeeper"]

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
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Prepare leases on each shard's log from `from_seqs` on; none is taken yet.

        `marks` has the nonces of the records before those, which the copy has; None where unknown.
        """
        places = zip(links, from_seqs, marks or [None] * len(links), strict=True)
        self._followers = [lease.follower(link, from_seq=seq, mark=mark) for link, seq, mark in places]
        self._renewal_s = lease.renewal_s
        self._sleep = sleep
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
                await self._sleep(self._renewal_s)
                await follower.register()
        except HeadraceError as exc:
            self._error = exc
