"""How fast a copy is built while another one answers look-ups."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["BuildPace"]


class BuildPace:
    """Keeps a thread that builds a copy to a share of one core.

    At full speed the builder and the server's other readers fill the cores, and look-ups wait for one: not for the
    interpreter's lock, and not for long, but one in a hundred for several times as long as it takes.

    Thread: call `pause` in the thread that builds, of which there may be several, one after the other.
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
        """Sleep as long as the calling thread's processor time since its last call demands; call it every few MB."""
        thread, now_s = threading.get_ident(), self._spent_s()
        if thread == self._thread and self._idle_per_busy:
            self._sleep((now_s - self._since_s) * self._idle_per_busy)
        self._thread, self._since_s = thread, now_s
