"""How long an event loop has been away: the worst delay of a timer, which is what every client waits at least."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Self

__all__ = ["LoopProbe"]

_INTERVAL_S = 0.005
_NUM_BUCKETS = 12


class LoopProbe:
    """Sets a timer every 5 ms and notes how late it fires. Use it with `async with`.

    It costs about a thousandth of the loop's time.

    A pause is anything that keeps the loop from running: a long callback, another thread that holds the GIL, or a core
    that the system gives to somebody else.

    Thread: the loop's.
    """

    def __init__(self, *, window_s: float = 60.0) -> None:
        """Watch the running loop once entered.

        Args:
            window_s: `worst_pause_s` looks back this far, seconds, up to a twelfth more.
        """
        self._bucket_s = window_s / _NUM_BUCKETS
        self._worst: deque[float] = deque([0.0], maxlen=_NUM_BUCKETS + 1)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._bucket_end_s = self._loop.time() + self._bucket_s
        self._set_timer()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def worst_pause_s(self) -> float:
        """The longest pause of late, seconds; one that lasts yet is not in it."""
        return max(self._worst)

    def _set_timer(self) -> None:
        self._timer = self._loop.call_later(_INTERVAL_S, self._fire, self._loop.time() + _INTERVAL_S)

    def _fire(self, due_s: float) -> None:
        now_s = self._loop.time()
        while now_s >= self._bucket_end_s:
            self._worst.append(0.0)
            self._bucket_end_s += self._bucket_s
        self._worst[-1] = max(self._worst[-1], now_s - due_s)
        self._set_timer()
