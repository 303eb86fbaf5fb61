"""Keeps a log readable when something goes wrong a thousand times a second.

Of warnings and errors that say the same, a burst is let through and the rest of a window counted; then one line says
how many there were. Info is never held back: each of its facts is one event.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from headrace.paramserver.process.log_format import fact

__all__ = ["RepeatFilter", "limit_repeats"]

_log = logging.getLogger(__name__)
_MAX_KINDS = 256
# Logger, level and message.
_Kind = tuple[str, int, str]


class RepeatFilter(logging.Filter):
    """Lets a burst of each kind of record through in a window of time. Kinds differ by logger, level and message.

    Thread: any.
    """

    def __init__(
        self, *, burst: int = 20, window_s: float = 10.0, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Hold nothing back yet.

        Args:
            burst: Records of one kind in a window.
            window_s: Its length, seconds.
            clock_s: Monotonic seconds.
        """
        super().__init__()
        self._burst, self._window_s, self._clock_s = burst, window_s, clock_s
        # A handler asks its filters before it takes a lock of its own.
        self._lock = threading.Lock()
        self._began_s = clock_s()
        self._counts: dict[_Kind, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a record goes out; tell first what was held back in a window that has ended."""
        if record.name == _log.name:
            return True
        is_limited = logging.WARNING <= record.levelno < logging.CRITICAL
        kind = (record.name, record.levelno, record.getMessage()) if is_limited else None
        with self._lock:
            ended, within_s = self._end_window()
            count = 0
            if kind is not None:
                self._counts[kind] = count = self._counts.get(kind, 0) + 1
        for (name, level, message), times in ended.items():
            fact(_log, level, "repeated", what=message, of=name, times=times, within_s=within_s)
        return count <= self._burst

    def _end_window(self) -> tuple[dict[_Kind, int], float]:
        """Return what a window that has ended held back, and its length in seconds."""
        seconds = (now_s := self._clock_s()) - self._began_s
        if seconds < self._window_s and len(self._counts) < _MAX_KINDS:
            return {}, 0.0
        held_back = {kind: count - self._burst for kind, count in self._counts.items() if count > self._burst}
        self._counts.clear()
        self._began_s = now_s
        return held_back, round(seconds, 1)


def limit_repeats() -> None:
    """Put a `RepeatFilter` before each handler of the root logger, as `configure_logging` has made them."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(RepeatFilter())
