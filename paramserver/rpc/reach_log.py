"""What is known, and said in the log, of peers that cannot be reached: soon, then rarely, and once they are back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from headrace.schemas.durations import format_seconds
from headrace.schemas.errors import HeadraceError

__all__ = ["ReachLog"]

_log = logging.getLogger(__name__)

# A restart of a shard is shorter, and is no news.
_NOTICE_S = 2.0
_AGAIN_S = 60.0
# Pauses between attempts are shorter than that: where none has begun or ended for so long, and for as long as one
# takes, nobody tries any more.
_FORGOTTEN_S = 20.0


@dataclass(slots=True)
class _Outage:
    """Attempts that have all failed.

    Attributes:
        since_s: When the first of them began, monotonic.
        last_s: When the last of them began or failed.
        error: What the last one failed with.
        attempt_s: How long the longest of them took, seconds.
        said_s: When the log last spoke of it; None before.
        said: What kind of error it named then.
    """

    since_s: float
    last_s: float
    error: HeadraceError
    attempt_s: float = 0.0
    said_s: float | None = None
    said: type[HeadraceError] | None = None

    def is_over(self, now_s: float) -> bool:
        """Return whether nobody tries any more."""
        return now_s - self.last_s > _FORGOTTEN_S + self.attempt_s

    def due_s(self) -> float:
        """Return when the log speaks of it next: soon where the trouble is new, or of another kind than it has said."""
        if self.said_s is None:
            return self.since_s + _NOTICE_S
        return self.said_s + (_AGAIN_S if self.said is type(self.error) else _NOTICE_S)


class ReachLog:
    """Peers that some readers try to reach, by address. Readers that come and go share one: each would begin anew.

    Thread: any.
    """

    def __init__(self, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Know of no trouble.

        Args:
            clock_s: Monotonic seconds.
        """
        self._clock_s = clock_s
        self._outages: dict[str, _Outage] = {}
        self._lock = threading.Lock()

    def trying(self, address: str) -> float:
        """Note that an attempt to reach a peer begins, and return when, monotonic seconds.

        Here is said what has failed before: after a last attempt the caller gets the error, and says it.
        """
        now_s = self._clock_s()
        with self._lock:
            outage = self._outages.get(address)
            if outage is None or outage.is_over(now_s):
                return now_s
            outage.last_s = now_s
            if now_s < outage.due_s():
                return now_s
            outage.said_s, outage.said = now_s, type(outage.error)
        # No fields: programs that have set up no logging see the text alone.
        _log.warning("%s; it is tried again", _describe(address, outage, now_s))
        return now_s

    def failed(self, address: str, error: HeadraceError, *, began_s: float) -> None:
        """Note an attempt to reach a peer that has failed.

        Args:
            address: Of the peer.
            error: What the attempt failed with.
            began_s: What `trying` has returned.
        """
        now_s = self._clock_s()
        with self._lock:
            outage = self._outages.get(address)
            # By when it began, whatever it took: `trying` has noted that somebody tries.
            if outage is None or outage.is_over(began_s):
                outage = self._outages[address] = _Outage(began_s, now_s, error)
            outage.last_s, outage.error = now_s, error
            outage.attempt_s = max(outage.attempt_s, now_s - began_s)

    def reached(self, address: str) -> None:
        """Note that a peer has answered."""
        with self._lock:
            outage = self._outages.pop(address, None)
        if outage is not None and outage.said_s is not None:
            # A warning, too: whoever has read of the outage is to read of its end.
            _log.warning("%s is reached again, after %s", address, format_seconds(self._clock_s() - outage.since_s))

    def trouble(self, of: Collection[str] | None = None) -> str | None:
        """Return what cannot be reached, since when and why, of several the longest; None when all is well.

        Args:
            of: Addresses that matter; None for all that somebody tries.
        """
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
