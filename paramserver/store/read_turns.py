"""Whose look-up is next: askers take turns, and look-ups of few rows do not wait for those of many.

A look-up runs in a thread from its beginning to its end, and one of many rows takes as long as thousands of others. So
only some of them run at a time, with one thread more than that; and an asker that has hundreds of them waiting has its
next one when each of the others has had one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from typing import Protocol

__all__ = ["ROWS_PER_TABLE", "Asker", "ReadTurns"]

# Some ten milliseconds of a thread, where rows lie apart.
_MANY_ROWS = 512
ROWS_PER_TABLE = 32
"""Rows that take as long to read as one more table does."""

_Waiting = dict[Hashable, deque[asyncio.Future[None]]]


class Asker(Protocol):
    """Who asks for a look-up, as a `Peer` does."""

    @property
    def who(self) -> Hashable:
        """Equal for all of those that share turns."""

    @property
    def is_connected(self) -> bool:
        """Whether an answer can still reach it."""


class ReadTurns:
    """At most `num_long` look-ups of many rows at a time, and one look-up more in all.

    Thread: the loop's.
    """

    def __init__(self, *, num_long: int) -> None:
        """Begin with none; `num_long` ≥ 1."""
        self._num_long, self._num_all = num_long, num_long + 1
        self._running = {True: 0, False: 0}  # by whether they are long
        self._waiting: dict[bool, _Waiting] = {True: {}, False: {}}  # by asker, in the order of their turns

    async def take(self, asker: Hashable, num_rows: int) -> bool:
        """Wait for a turn; return what `end` is to be told when the look-up has ended.

        Args:
            asker: Who waits for the answer.
            num_rows: That are looked up, and `ROWS_PER_TABLE` for each table: what the look-up weighs.

        Cancellation: the turn goes to the next.
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
        """Let the next ones begin."""
        self._running[is_long] -= 1
        # Long ones first: one thread is never theirs, so short ones get on; the other way round, long ones might not.
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
