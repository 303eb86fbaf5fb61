"""When the next flush may begin: early enough for `freshness_s`, and no earlier than `max_cost_percent` allows.

*Wanted.* A change is to be durable `freshness_s` after it was made. A flush begins once its oldest change would be
older than that if it waited for another step, counting the time that flushes take until they are durable. It begins no
earlier: a row that changes again meanwhile goes out once instead of twice.

*Allowed.* What flushes cost is a debt, paid off by `max_cost_percent` of the time that passes; a flush begins once
nothing is owed. The cost is an estimate of the time that it takes from the steps: processor time of a flush on the
training thread counts whole, because the step waits for it. That of our other threads is divided by the number of
processors that the process keeps busy. Where that is too much, flushes are rarer, and more changes of a row go out as
one.

*Several ranks.* A replica that shows whole steps needs one that all ranks have flushed at, and each rank has its own
clock. So they flush at steps whose number is a multiple of a power of two, the greatest that keeps rows fresh: ranks
that take different powers have the multiples of the greater one in common. So have releases of waiting rows, by
`max_staleness_s`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.streamer.config import StreamerConfig

__all__ = ["MAX_DEBT_S", "FlushPace"]

MAX_DEBT_S = 10.0
"""Longest pause that one flush can cause by its cost, seconds: the first ones may be very slow."""

# What the cost is averaged over, seconds.
_WINDOW_S = 60.0


class FlushPace:
    """Decides at the end of a step whether a flush is due. Thread: the training thread's; attributes: any.

    Attributes:
        cost_percent: What streaming has lately taken of the steps' time, percent, as estimated here.
        has_waited: The next flush is later than wanted, because of its cost.
        is_cost_bound: The last one was.
    """

    def __init__(
        self,
        freshness_s: float,
        max_cost_percent: float,
        *,
        is_alone: bool = True,
        least_interval_s: float = 0.0,
        delivery_s: Callable[[], float] = lambda: 0.0,
        background_s: Callable[[], float] = lambda: 0.0,
        thread_s: Callable[[], float] = time.thread_time,
        process_s: Callable[[], float] = time.process_time,
    ) -> None:
        """Begin with nothing owed.

        Args:
            freshness_s: As the setting.
            max_cost_percent: As the setting; 100 allows everything.
            is_alone: The run has one rank.
            least_interval_s: Least time from the beginning of one flush to that of the next.
            delivery_s: Returns how long a flush takes from its beginning until it is durable.
            background_s: Returns the processor time of our other threads so far; never falls.
            thread_s: Clock of the processor time of the calling thread.
            process_s: Clock of the processor time of the process.
        """
        self._freshness_s, self._share, self._least_interval_s = freshness_s, max_cost_percent / 100, least_interval_s
        self._delivery_s, self._background_s = delivery_s, background_s
        self._thread_s, self._process_s = thread_s, process_s
        self._is_alone = is_alone
        self._seen: tuple[float, float, float] | None = None  # time, background's, process's, at the last step
        self._step_s = 0.0
        self._last_flush_s = -math.inf
        self._debt_s = 0.0
        self._spent_s = self._passed_s = self._num_steps = 0.0  # of the window
        self.has_waited = False
        self._is_urgent = False  # of the last flush, to which other threads' cost belongs until the next one
        self.cost_percent = 0.0
        self.is_cost_bound = False

    @classmethod
    def of(cls, config: StreamerConfig, *, is_alone: bool = True, **clocks: Callable[[], float]) -> FlushPace:
        """Return the pace of a streamer's settings; others as in the constructor."""
        least_s = config.flush_interval_s
        return cls(config.freshness_s, config.max_cost_percent, is_alone=is_alone, least_interval_s=least_s, **clocks)

    def is_due(
        self, step: int, now_s: float, changed_s: float, *, is_behind: bool = False, is_urgent: bool = False
    ) -> bool:
        """Return whether a flush should begin at the end of this step; called at each.

        Args:
            step: Its number, the same on all ranks.
            now_s: Monotonic time.
            changed_s: When the oldest change was made that is in no flush.
            is_behind: More was dirty than the last flush held, so what is left is older than that.
            is_urgent: A flush is wanted now, whatever it costs.
        """
        step_s = self._step_s = self._pass_time(now_s)
        if now_s - self._last_flush_s < self._least_interval_s:
            return False
        left_s = self._freshness_s - self._delivery_s()
        is_old = now_s + step_s - changed_s >= left_s
        if not self._is_alone:
            # Numbers that are no such multiples go out when they are old, or very old where the cost holds them back.
            patience_s = 2 * self._freshness_s + MAX_DEBT_S if self.has_waited else 0.0
            is_old = step % self._common_steps(left_s) == 0 or (is_old and now_s - changed_s >= patience_s)
        if not (is_urgent or is_behind or is_old):
            return False
        if is_urgent or self._share >= 1 or self._debt_s <= 0:
            return True
        self.has_waited = True
        return False

    def is_release_due(self, step: int, now_s: float, waiting_since_s: float, max_staleness_s: float) -> bool:
        """Return whether rows that wait have to go out with the next flush, to be durable in time.

        Args:
            step: As of `is_due`, which is called next.
            now_s: Monotonic time.
            waiting_since_s: When the oldest change was made that waits.
            max_staleness_s: As the setting.
        """
        left_s = max_staleness_s - self._delivery_s()
        if self._is_alone:
            return now_s + self._step_s - waiting_since_s >= left_s
        return step % self._common_steps(left_s) == 0

    @contextmanager
    def counting(self, *, is_urgent: bool) -> Iterator[None]:
        """Count what happens within as cost of a flush, whatever becomes of it; an urgent one's delays no other."""
        self._is_urgent = is_urgent
        begin_s = self._thread_s()
        try:
            yield
        finally:
            self._spend(self._thread_s() - begin_s)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within `counting`, leave out what has a budget of its own."""
        begin_s = self._thread_s()
        try:
            yield
        finally:
            self._spend(begin_s - self._thread_s())

    def note_sent(self, now_s: float) -> None:
        """Note that a flush which began at `now_s` goes out."""
        self._last_flush_s = now_s
        self.is_cost_bound, self.has_waited = self.has_waited, False

    def _common_steps(self, left_s: float) -> int:
        """Return the greatest power of two of steps that take no longer, at least 1."""
        num_steps = int(left_s * self._num_steps / self._passed_s) if self._passed_s else 1
        return 1 << (max(1, num_steps).bit_length() - 1)

    def _pass_time(self, now_s: float) -> float:
        """Count what has happened since the last step; return how long ago that was, seconds, 0 at first."""
        background_s, process_s = self._background_s(), self._process_s()
        before_s, background_before_s, process_before_s = self._seen or (now_s, background_s, process_s)
        self._seen = now_s, background_s, process_s
        step_s = now_s - before_s
        if step_s > 0:
            kept = math.exp(-step_s / _WINDOW_S)
            self._spent_s, self._passed_s = self._spent_s * kept, self._passed_s * kept + step_s
            self._num_steps = self._num_steps * kept + 1
            num_busy = max(1.0, (process_s - process_before_s) / step_s)
            self._spend((background_s - background_before_s) / num_busy)
            # After the cost of the same time, or a rest of it would hold back a flush after any pause.
            self._debt_s = min(max(0.0, self._debt_s - self._share * step_s), self._share * MAX_DEBT_S)
            self.cost_percent = 100 * self._spent_s / self._passed_s
        return step_s

    def _spend(self, cost_s: float) -> None:
        self._spent_s += cost_s
        if not self._is_urgent:
            self._debt_s += cost_s
