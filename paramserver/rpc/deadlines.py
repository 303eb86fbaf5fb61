"""Deadlines of a server's connection: for the hello, for the next part of a frame, and for idleness.

One timer per connection watches all three. It checks and re-arms itself when it fires, so requests cost no timer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.frames import PROGRESS_BYTES

__all__ = ["Deadlines"]

# How long a finished connection waits for the peer to close first.
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
        """Begin with a new connection; `watch` sets the timer.

        Args:
            limits: The times.
            is_waiting: Whether the peer waits for us, so the connection is not idle.
            is_stranger: Whether the peer has not said hello.
            expire: Called when a deadline has passed; its argument says whether a frame was too slow.
        """
        self._limits, self._expire = limits, expire
        self._is_waiting, self._is_stranger = is_waiting, is_stranger
        self._loop = asyncio.get_running_loop()
        self._active_s = self._loop.time()
        self._frame_since_s: float | None = None
        self._frames_seen = self._moved_seen = 0
        self._finished_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def touch(self) -> None:
        """Note activity."""
        self._active_s = self._loop.time()

    def note_input(self, *, is_mid_frame: bool, num_begun: int, num_moved: int) -> None:
        """Note the reader's progress: a short frame must end in time, a long one must move on.

        A long frame on a slow link takes longer than a timeout that would notice a stuck peer. Cut off, it would be
        sent again for ever. The arguments are those of `FrameReader`.
        """
        if not is_mid_frame:
            self._frame_since_s = None
        elif (
            self._frame_since_s is None
            or num_begun != self._frames_seen
            # A stranger's longest frame is short enough to arrive whole in time.
            or (num_moved - self._moved_seen >= PROGRESS_BYTES and not self._is_stranger())
        ):
            self._frame_since_s = self._active_s
            self._frames_seen, self._moved_seen = num_begun, num_moved
            self._set(self._active_s + self._limits.frame_timeout_s)
        if self._timer is None:
            self.watch()

    def note_pause(self) -> None:
        """Note that we do not read, so the peer cannot finish a frame."""
        self._frame_since_s = None

    def note_finish(self) -> None:
        """Note that nothing more is sent: only the peer's close is awaited."""
        self._finished_s = self._loop.time()
        self.watch()

    def watch(self) -> None:
        """Check no later than the current deadline."""
        self._set(self._deadline_s())

    def cancel(self) -> None:
        """Stop checking: the connection is gone."""
        if self._timer is not None:
            self._timer.cancel()

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
        self._timer = self._loop.call_at(deadline_s, self._check)

    def _check(self) -> None:
        self._timer = None
        deadline_s = self._deadline_s()
        if deadline_s > self._loop.time():
            self._set(deadline_s)
        else:
            self._expire(self._frame_since_s is not None and self._finished_s is None)
