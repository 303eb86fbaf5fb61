"""Which readers may still look at buffers, so that nobody frees those under them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

__all__ = ["BufferReaders"]


class BufferReaders:
    """Who may still look at buffers.

    Thread: the loop's.
    """

    def __init__(self) -> None:
        """Start with nobody."""
        self._next = 0
        self._active: dict[int, None] = {}
        self._deferred: deque[tuple[int, Callable[[], None]]] = deque()

    def begin(self) -> int:
        """Return a ticket for `end`."""
        ticket = self._next
        self._active[ticket] = None
        self._next += 1
        return ticket

    def end(self, ticket: int) -> None:
        """Take a ticket back, and call what waited for it."""
        del self._active[ticket]
        oldest = next(iter(self._active), self._next)
        while self._deferred and self._deferred[0][0] <= oldest:
            self._deferred.popleft()[1]()

    def when_none_older(self, callback: Callable[[], None]) -> None:
        """Call back, in the order of these calls, when all readers that have begun have ended."""
        if self._active:
            self._deferred.append((self._next, callback))
        else:
            callback()
