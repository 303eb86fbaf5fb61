"""How long a server's connection may take: for a hello, for the next part of a frame, for anything at all.

One timer a connection watches all three. It is set when the connection begins and looks again when it fires, so that a
request costs no timer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.frames import PROGRESS_BYTES

__all__ = ["Deadlines"]

# How long a connection that is finished waits for the peer to close, before it does so itself.
_LINGER_S = 1.0


class Deadlines:
    """The deadlines of one connection.

    Thread: the loop's.
    """

    def __init__(
        self,
        limits: ServerLimits,
        *,
        is_waiting: Callable[[], bool],
        is_stranger: Callable[[], bool],
        expire: Callable[[bool], None],
    ) -> None:
        """Begin with a connection that has just been made; `watch` sets the timer.

        Args:
            limits: The times.
            is_waiting: Whether the peer waits for us: the connection is not idle then.
            is_stranger: Whether the peer has not said hello.
            expire: Called once a deadline is over, with whether a frame was too slow.
        """
        self._limits = limits
        self._is_waiting = is_waiting
        self._is_stranger = is_stranger
        self._expire = expire
        self._loop = asyncio.get_running_loop()
        self._active_s = self._loop.time()
        self._frame_since_s: float | None = None
        self._frames_seen = self._moved_seen = 0
        self._finished_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def touch(self) -> None:
        """Note that the connection is alive."""
        self._active_s = self._loop.time()

    def note_input(self, *, is_mid_frame: bool, num_begun: int, num_moved: int) -> None:
        """Note how far the reader has come: a frame that has begun has to end in time, a long one to move on.

        On a slow link a long frame takes longer than any time that is short enough for a peer that is stuck; cut off
        there, it would be begun again for ever.

        Args:
            is_mid_frame: A part of a frame is there.
            num_begun: Frames that were begun so far.
            num_moved: Bytes of long frames that have come so far.
        """
        if not is_mid_frame:
            self._frame_since_s = None
        elif self._frame_since_s is None or num_begun != self._frames_seen or self._has_moved_on(num_moved):
            self._frame_since_s = self._active_s
            self._frames_seen, self._moved_seen = num_begun, num_moved
            self._set(self._active_s + self._limits.frame_timeout_s)
        if self._timer is None:
            self.watch()

    def note_pause(self) -> None:
        """Note that we do not read: whatever the peer has begun, it cannot end it."""
        self._frame_since_s = None

    def note_finish(self) -> None:
        """Note that nothing more is sent: only the peer's own closing is waited for."""
        self._finished_s = self._loop.time()
        self.watch()

    def watch(self) -> None:
        """Look not later than the deadline that holds now."""
        self._set(self._deadline_s())

    def cancel(self) -> None:
        """Look no more: the connection is gone."""
        if self._timer is not None:
            self._timer.cancel()

    def _has_moved_on(self, num_moved: int) -> bool:
        # A stranger's longest frame is short enough to be whole in time.
        return num_moved - self._moved_seen >= PROGRESS_BYTES and not self._is_stranger()

    def _deadline_s(self) -> float:
        if self._finished_s is not None:
            return self._finished_s + _LINGER_S
        if self._frame_since_s is not None:
            return self._frame_since_s + self._limits.frame_timeout_s
        if self._is_waiting():
            return math.inf
        idle_s = self._limits.idle_timeout_s or math.inf
        if self._is_stranger():
            idle_s = min(idle_s, self._limits.hello_timeout_s)
        return self._active_s + idle_s

    def _set(self, deadline_s: float) -> None:
        if deadline_s == math.inf:
            return
        if self._timer is not None:
            if self._timer.when() <= deadline_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline_s, self._look)

    def _look(self) -> None:
        self._timer = None
        deadline_s = self._deadline_s()
        if deadline_s > self._loop.time():
            self._set(deadline_s)
        else:
            self._expire(self._frame_since_s is not None and self._finished_s is None)
