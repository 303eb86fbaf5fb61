"""How fast a copy is built while another one answers look-ups."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["BuildPace"]


class BuildPace:
    """Keeps a thread that builds a copy to a share of one core.

    At full speed the builder fills a core, and the slowest one in a hundred look-ups takes several times as long: it
    waits for a core, not for the interpreter's lock.

    Thread: the one that builds, of which there may be several, one after the other.
    """

    def __init__(
        self,
        percent: int,
        *,
        spent_s: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Take the share in percent, 1 to 100; 100 never pauses.

        `spent_s` returns the calling thread's processor time, seconds.
        """
        self._idle_per_busy = 100 / percent - 1
        self._spent_s, self._sleep = spent_s, sleep
        self._thread: int | None = None
        self._since_s = 0.0

    def pause(self) -> None:
        """Sleep for what the calling thread has spent since it called last; call it every few MB of a loop.

        If another thread called last, it sleeps not: see `paced`.
        """
        thread, now_s = threading.get_ident(), self._spent_s()
        if thread == self._thread and self._idle_per_busy:
            self._sleep((now_s - self._since_s) * self._idle_per_busy)
        self._thread, self._since_s = thread, now_s

    @contextmanager
    def paced(self) -> Iterator[None]:
        """Sleep, at the end, for what the calling thread has spent within."""
        begin_s = self._spent_s()
        yield
        if self._idle_per_busy:
            self._sleep((self._spent_s() - begin_s) * self._idle_per_busy)
