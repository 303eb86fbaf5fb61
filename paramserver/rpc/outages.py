"""Peers that cannot be reached: pauses between attempts, and log lines soon, then rarely, and once they are back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from headrace.paramserver.system.text import format_seconds
from headrace.schemas.errors import HeadraceError

__all__ = ["Backoff", "OutageLog", "tell_of_waiting"]

_log = logging.getLogger(__name__)

_NOTICE_S = 2.0  # longer than a shard's restart, which is no news
_AGAIN_S = 60.0
_FIRST_WORD_S = 1.0  # by then a user wonders whether anything happens
# Longer than any pause between attempts: without one for so long, plus an attempt's time, nobody tries.
_FORGOTTEN_S = 20.0


@contextlib.contextmanager
def tell_of_waiting(what: str, timeout_s: float, why: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Log one line if the block, on an event loop, takes longer than a second.

    It says what the block tries to reach, when it gives up, `timeout_s` seconds after its start, and why it waits if
    that is known.
    """

    def tell() -> None:
        reason = why()
        # A warning, so that programs without our logging setup show it.
        text = "still trying to reach %s, giving up after %s%s"
        _log.warning(text, what, format_seconds(timeout_s), "" if reason is None else f": {reason}")

    timer = asyncio.get_running_loop().call_later(_FIRST_WORD_S, tell)
    try:
        yield
    finally:
        timer.cancel()


class Backoff:
    """Pauses of a client whose peer keeps failing: doubling, capped, jittered. It neither sleeps nor reads a clock.

    Each pause lies between half of its ceiling and the ceiling, which doubles from `min_s` to `max_s`, so that the many
    clients of a failed server come back neither in step nor at once.
    """

    def __init__(self, *, min_s: float, max_s: float, random: Callable[[], float]) -> None:
        """Begin with the shortest pause; `random` returns numbers in [0, 1)."""
        assert 0 < min_s <= max_s
        self._min_s, self._max_s, self._random = min_s, max_s, random
        self._ceiling_s = min_s

    def next_s(self, *, at_least_s: float = 0.0, at_most_s: float = math.inf) -> float:
        """Return the pause before the next attempt, seconds, and lengthen the one after.

        The peer may ask for a pause of `at_least_s`, even above the cap. `at_most_s` is another cap, for this time.
        """
        pause_s = min(self._ceiling_s, at_most_s) * (0.5 + 0.5 * self._random())
        self._ceiling_s = min(self._max_s, 2 * self._ceiling_s)
        return max(pause_s, at_least_s)

    def reset(self) -> None:
        """Return to the shortest pause: the peer has made progress."""
        self._ceiling_s = self._min_s


@dataclass(slots=True)
class _Outage:
    """Consecutive failed attempts; times are monotonic."""

    since_s: float  # when the first one began
    last_s: float  # when the last one began or failed
    error: HeadraceError  # of the last one
    attempt_s: float = 0.0  # how long the longest one took
    logged_s: float | None = None  # when the log last mentioned the outage
    logged: type[HeadraceError] | None = None  # kind of error that it mentioned then

    def is_over(self, now_s: float) -> bool:
        """Return whether nobody tries any more."""
        return now_s - self.last_s > _FORGOTTEN_S + self.attempt_s

    def due_s(self) -> float:
        """Return when to log next: soon if the outage is new or the kind of error has changed, else rarely."""
        if self.logged_s is None:
            return self.since_s + _NOTICE_S
        return self.logged_s + (_AGAIN_S if self.logged is type(self.error) else _NOTICE_S)


class OutageLog:
    """Outages by address, shared by all readers of a process: a reader of its own would start each outage anew.

    Thread: any.
    """

    def __init__(self, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Know of no outage."""
        self._clock_s = clock_s
        self._outages: dict[str, _Outage] = {}
        self._lock = threading.Lock()

    def trying(self, address: str) -> float:
        """Note the start of an attempt, and return its time, monotonic seconds.

        This logs the previous failure if it is due. The failure of a last attempt reaches the caller as an error.
        """
        now_s = self._clock_s()
        with self._lock:
            outage = self._outages.get(address)
            if outage is None or outage.is_over(now_s):
                return now_s
            outage.last_s = now_s
            if now_s < outage.due_s():
                return now_s
            outage.logged_s, outage.logged = now_s, type(outage.error)
        # No fields: programs without our logging setup see the text alone.
        _log.warning("%s; it is tried again", _describe(address, outage, now_s))
        return now_s

    def failed(self, address: str, error: HeadraceError, *, began_s: float) -> None:
        """Note a failed attempt; `began_s` is from `trying`."""
        now_s = self._clock_s()
        with self._lock:
            outage = self._outages.get(address)
            # Judged by when the attempt began, however long it took: `trying` has noted it.
            if outage is None or outage.is_over(began_s):
                outage = self._outages[address] = _Outage(began_s, now_s, error)
            outage.last_s, outage.error = now_s, error
            outage.attempt_s = max(outage.attempt_s, now_s - began_s)

    def reached(self, address: str) -> None:
        """Note that a peer has answered."""
        with self._lock:
            outage = self._outages.pop(address, None)
        if outage is not None and outage.logged_s is not None:
            # A warning too, so that everyone who has read of the outage reads of its end.
            _log.warning("%s is reached again, after %s", address, format_seconds(self._clock_s() - outage.since_s))

    def trouble(self, of: Collection[str] | None = None) -> str | None:
        """Return the longest outage of some or all addresses, for a message, or None."""
        now_s = self._clock_s()
        with self._lock:
            tried = {a: o for a, o in self._outages.items() if not o.is_over(now_s)}
            found = [(o.since_s, a, o) for a, o in tried.items() if of is None or a in of]
            if not found:
                return None
            _, address, outage = min(found)
            return _describe(address, outage, now_s)


def _describe(address: str, outage: _Outage, now_s: float) -> str:
    return f"{address} has not been reached for {format_seconds(now_s - outage.since_s)}: {outage.error}"
