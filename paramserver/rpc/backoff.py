"""Pauses between attempts: doubling, capped, jittered."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Backoff"]


class Backoff:
    """The pauses of one peer that fails again and again. Pure: it neither sleeps nor knows the time.

    Each pause lies between half of its ceiling and the ceiling, which doubles from `min_s` to `max_s`: the many clients
    of a server that has died do not come back in step, and none comes back at once.
    """

    def __init__(self, *, min_s: float, max_s: float, random: Callable[[], float]) -> None:
        """Begin with the shortest pause.

        Args:
            min_s: First ceiling, seconds, > 0.
            max_s: Highest ceiling, seconds, ≥ `min_s`.
            random: Source of numbers in [0, 1).
        """
        assert 0 < min_s <= max_s
        self._min_s, self._max_s, self._random = min_s, max_s, random
        self._ceiling_s = min_s

    def next_s(self, *, at_least_s: float = 0.0) -> float:
        """Return the pause before the next attempt, seconds, and lengthen the one after.

        Args:
            at_least_s: What the peer asked for, seconds; heeded even above the cap.
        """
        pause_s = self._ceiling_s * (0.5 + 0.5 * self._random())
        self._ceiling_s = min(self._max_s, 2 * self._ceiling_s)
        return max(pause_s, at_least_s)

    def reset(self) -> None:
        """Begin with the shortest pause again: the peer has made progress."""
        self._ceiling_s = self._min_s
