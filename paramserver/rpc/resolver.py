"""Finds the shards of a server again after their addresses have changed.

A client that cannot reach a shard, or meets an old copy of it, asks the shards that it knows and the addresses that it
was given (*seeds*), and takes the places with the highest terms. Many clients of a lost host do this at once: each asks
a few shards at random, one round at a time for all its connections, and not more often than every second or so.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headrace.paramserver.rpc.address import Address
from headrace.paramserver.rpc.shard_places import ShardPlaces
from headrace.schemas.errors import HeadraceError

__all__ = ["Resolver"]

# Nodes tell each other within seconds, so a few of them know what any knows.
_MAX_ASKED = 8
_MIN_INTERVAL_S = 0.5
# Once one shard has answered, the others get this much longer: one may be on the host that is lost.
_GRACE_S = 1.0


class Resolver:
    """The places of one server's shards, as all connections of one client see them.

    Thread: the event loop's.

    Attributes:
        places: What is known.
    """

    def __init__(
        self,
        places: ShardPlaces,
        seeds: Sequence[Address],
        ask: Callable[[str, int], Awaitable[Any]],
        *,
        random: Callable[[], float] = random.random,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Know some places.

        Args:
            places: The server's, as a first hello told them.
            seeds: Addresses of any of its shards.
            ask: Says hello at an address, without a writer's session, and returns the `idl.HelloReply`.
            random: Returns numbers in [0, 1).
            clock_s: Monotonic, seconds.
        """
        self.places = places
        self._seeds, self._ask = list(seeds), ask
        self._random, self._clock_s = random, clock_s
        self._sought: dict[int, Address] = {}  # where nobody was found since the last round
        self._lock = asyncio.Lock()
        self._next_s = -math.inf

    def lost(self, shard: int, address: Address) -> None:
        """Note that a shard was not found at an address: another statement of the same term wins from now on."""
        self.places.doubt(shard, address)
        self._sought[shard] = address

    async def refresh(self) -> None:
        """Ask around, unless that was just done; concurrent calls share one round. Errors of those asked are ignored.

        Cancellation: harmless.
        """
        asked_s = self._clock_s()
        async with self._lock:
            # The round that others waited for was ours, too.
            if self._next_s > asked_s:
                return
            try:
                await self._ask_around()
            finally:
                self._sought.clear()
                self._next_s = self._clock_s() + _MIN_INTERVAL_S * (1 + self._random())

    async def _ask_around(self) -> None:
        standbys = [(host, port) for _, host, port in self.places.standbys]
        known = [address for address in dict.fromkeys(self.places.addresses + standbys) if address not in self._seeds]
        picked = sorted(self._seeds, key=lambda _: self._random())[: _MAX_ASKED // 2]
        picked += sorted(known, key=lambda _: self._random())[: _MAX_ASKED - len(picked)]
        waiting = {asyncio.create_task(self._ask_one(address), name="headrace-resolve") for address in picked}
        deadline_s: float | None = None
        try:
            while waiting:
                timeout_s = None if deadline_s is None else max(deadline_s - self._clock_s(), 0)
                done, waiting = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    return
                if self._sought and all(self.places[shard].address != was for shard, was in self._sought.items()):
                    return
                if deadline_s is None and any(task.result() for task in done):
                    deadline_s = self._clock_s() + _GRACE_S
        finally:
            for task in waiting:
                task.cancel()
            if waiting:
                await asyncio.wait(waiting)

    async def _ask_one(self, address: Address) -> bool:
        try:
            reply = await self._ask(*address)
            self.places.learn(reply, *address)
        except HeadraceError:
            return False
        return bool(reply.server_id == self.places.server_id)  # another server's word ends no round
