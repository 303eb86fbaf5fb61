"""A semaphore for lookups that is fair to askers and keeps long lookups from delaying short ones.

A lookup occupies a thread from start to end, and one of many rows takes as long as thousands of small ones. So only
some long ones run at a time, with one thread more than that for short ones. An asker with hundreds of lookups waiting
gets its next turn after each of the others has had one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from typing import Protocol

__all__ = ["ROWS_PER_TABLE", "Asker", "FairSemaphore"]

# About ten milliseconds of a thread when the rows are scattered.
_MANY_ROWS = 512
ROWS_PER_TABLE = 32
"""How many rows cost as much as one more table."""

_Waiting = dict[Hashable, deque[asyncio.Future[None]]]


class Asker(Protocol):
    """The source of a lookup, such as a `Peer`."""

    @property
    def who(self) -> Hashable:
        """Equal for askers that share turns."""

    @property
    def is_connected(self) -> bool:
        """Whether an answer can still reach it."""


class FairSemaphore:
    """Admits at most `num_long` lookups of many rows at a time, and one lookup more in all.

    Thread: the loop's.
    """

    def __init__(self, *, num_long: int) -> None:
        self._num_long, self._num_all = num_long, num_long + 1
        self._running = {True: 0, False: 0}  # by whether they are long
        self._waiting: dict[bool, _Waiting] = {True: {}, False: {}}  # by asker, in the order of their turns

    async def take(self, asker: Hashable, num_rows: int) -> bool:
        """Wait for a turn; return the value to pass to `end` after the lookup. A canceled turn goes to the next.

        `num_rows` is the lookup's weight: its rows, plus `ROWS_PER_TABLE` for each table.
        """
        is_long = num_rows > _MANY_ROWS
        waiting = self._waiting[is_long]
        if not waiting and self._has_room(is_long):
            self._running[is_long] += 1
            return is_long
        turn = asyncio.get_running_loop().create_future()
        waiting.setdefault(asker, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.end(is_long)
            elif asker in waiting and turn in waiting[asker]:
                waiting[asker].remove(turn)
                if not waiting[asker]:
                    del waiting[asker]
            raise
        return is_long

    def end(self, is_long: bool) -> None:
        """End a lookup, and let the next ones begin."""
        self._running[is_long] -= 1
        # Long ones first: they never get the last thread, so short ones still get on. With short ones first, long ones
        # might starve.
        for kind in (True, False):
            while self._waiting[kind] and self._has_room(kind):
                self._begin_next(kind)

    def _has_room(self, is_long: bool) -> bool:
        if is_long and self._running[True] >= self._num_long:
            return False
        return sum(self._running.values()) < self._num_all

    def _begin_next(self, is_long: bool) -> None:
        waiting = self._waiting[is_long]
        asker = next(iter(waiting))
        turns = waiting.pop(asker)
        turn = turns.popleft()
        if turns:
            waiting[asker] = turns  # behind the others
        if not turn.cancelled():
            self._running[is_long] += 1
            turn.set_result(None)
