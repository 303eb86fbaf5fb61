"""Log lines: one per fact, as text for people or JSON for machines, and few of them when something keeps failing.

A fact is a short sentence with fields: `fact(logger, logging.INFO, "shard is ready", shard=1, pid=4711)`. Plain
`logger.info(...)` records, ours and other libraries', are formatted the same way without fields.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from headrace.paramserver.system.text import visible
from headrace.schemas.table_names import CONTROLS

__all__ = ["RepeatFilter", "WarningThrottle", "configure_logging", "fact", "limit_repeats", "resolve_log_format"]

_log = logging.getLogger(__name__)
_FIELDS = "headrace_fields"
_MAX_KINDS = 256
# Codes of a terminal, by level; lines of other levels have no colour.
_COLORS = {logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "1;31"}

_RecordKind = tuple[str, int, str]  # logger, level, message


def fact(logger: logging.Logger, level: int, message: str, /, **fields: Any) -> None:
    """Log one fact.

    Args:
        logger: Of the module that knows the fact.
        level: A level of `logging`.
        message: Short sentence, the same for every fact of its kind, so that it can be searched for.
        fields: What differs: numbers, texts and paths. No secrets.
    """
    logger.log(level, "%s", message, extra={_FIELDS: fields}, stacklevel=2)


def resolve_log_format(log_format: str, stream: TextIO) -> str:
    """Return `text` or `json`; `auto` means text on a terminal and JSON elsewhere."""
    if log_format != "auto":
        return log_format
    return "text" if stream.isatty() else "json"


def configure_logging(
    *, level: str, log_format: str, stream: TextIO | None = None, always: dict[str, Any] | None = None
) -> None:
    """Send all log records of this process to one stream, stderr by default, with the fields `always` in every line."""
    stream = sys.stderr if stream is None else stream
    is_text = resolve_log_format(log_format, stream) == "text"
    handler = logging.StreamHandler(stream)
    always = always or {}
    is_colored = is_text and _shows_colors(stream)
    handler.setFormatter(_TextFormatter(always, is_colored=is_colored) if is_text else _JsonFormatter(always))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)


def _shows_colors(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that shows colours, and its user wants them (no-color.org)."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


class _FactFormatter(logging.Formatter):
    def __init__(self, always: dict[str, Any]) -> None:
        super().__init__()
        self._always = always

    def fields_of(self, record: logging.LogRecord) -> dict[str, Any]:
        return {**self._always, **getattr(record, _FIELDS, {})}

    def traceback_of(self, record: logging.LogRecord) -> str | None:
        return self.formatException(record.exc_info) if record.exc_info else None


class _TextFormatter(_FactFormatter):
    def __init__(self, always: dict[str, Any], *, is_colored: bool) -> None:
        super().__init__(always)
        self._is_colored = is_colored

    def format(self, record: logging.LogRecord) -> str:
        time_text = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        message = visible(" ".join(record.getMessage().splitlines()))
        fields = "".join(f"  {name}={_show(value)}" for name, value in self.fields_of(record).items())
        level = f"{record.levelname.lower():7}"
        if self._is_colored and record.levelno in _COLORS:
            level = f"\x1b[{_COLORS[record.levelno]}m{level}\x1b[0m"
        line = f"{time_text} {level} {message}{fields}"
        # Only a traceback takes several lines: on a terminal people read it.
        traceback = (self.traceback_of(record) or "").split("\n")
        return "\n".join([line, *map(visible, traceback)]) if traceback != [""] else line


class _JsonFormatter(_FactFormatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        # A fact's field never replaces one of the four above.
        line |= {name: value for name, value in self.fields_of(record).items() if name not in line}
        traceback = self.traceback_of(record)
        if traceback:
            line["traceback"] = traceback
        # JSON itself escapes only those below the space.
        return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(line, default=str, ensure_ascii=False))


def _show(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return visible(
        json.dumps(text, ensure_ascii=False) if not text or any(c.isspace() or c in '"=' for c in text) else text
    )


class RepeatFilter(logging.Filter):
    """Let a burst of equal warnings or errors through per time window, count the rest, then log the counts.

    Records are equal if logger, level and message are. Info is never dropped: each such fact is an event of its own.

    Thread: any.
    """

    def __init__(
        self, *, burst: int = 20, window_s: float = 10.0, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Let `burst` equal records through per `window_s` seconds."""
        super().__init__()
        self._burst, self._window_s, self._clock_s = burst, window_s, clock_s
        # A handler asks its filters before it takes a lock of its own.
        self._lock = threading.Lock()
        self._began_s = clock_s()
        self._counts: dict[_RecordKind, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record; first log what a window that has ended dropped."""
        if record.name == _log.name:
            return True
        is_limited = logging.WARNING <= record.levelno < logging.CRITICAL
        kind = (record.name, record.levelno, record.getMessage()) if is_limited else None
        with self._lock:
            dropped, within_s = self._end_window()
            count = 0
            if kind is not None:
                self._counts[kind] = count = self._counts.get(kind, 0) + 1
        for (name, level, message), times in dropped.items():
            fact(_log, level, "repeated", what=message, of=name, times=times, within_s=within_s)
        return count <= self._burst

    def _end_window(self) -> tuple[dict[_RecordKind, int], float]:
        """Return what an ended window dropped, and its length in seconds; nothing if the window goes on."""
        seconds = (now_s := self._clock_s()) - self._began_s
        if seconds < self._window_s and len(self._counts) < _MAX_KINDS:
            return {}, 0.0
        dropped = {kind: count - self._burst for kind, count in self._counts.items() if count > self._burst}
        self._counts.clear()
        self._began_s = now_s
        return dropped, round(seconds, 1)


def limit_repeats() -> None:
    """Add a `RepeatFilter` to each handler of the root logger; call it after `configure_logging`."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(RepeatFilter())


class WarningThrottle:
    """Log at most one warning of each kind per interval, so that no peer can fill the disk with them.

    Unlike `RepeatFilter` it counts warnings of a kind together even if their texts differ.

    Thread: one at a time.
    """

    def __init__(
        self, logger: logging.Logger, *, interval_s: float = 1.0, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Log to `logger` at most every `interval_s` seconds per kind."""
        self._logger, self._interval_s, self._clock_s = logger, interval_s, clock_s
        self._last_s: dict[str, float] = {}
        self._num_dropped: dict[str, int] = {}
        self._newest_s: float | None = None

    @property
    def quiet_s(self) -> float | None:
        """Seconds since the last warning, logged or not; None without one."""
        return None if self._newest_s is None else self._clock_s() - self._newest_s

    def warn(self, kind: str, address: str, reason: object) -> None:
        """Log a warning about a peer, or count it for the next line of its kind."""
        self._newest_s = now_s = self._clock_s()
        if now_s - self._last_s.get(kind, -self._interval_s) < self._interval_s:
            self._num_dropped[kind] = self._num_dropped.get(kind, 0) + 1
            return
        self._last_s[kind] = now_s
        dropped = self._num_dropped.pop(kind, 0)
        more = f" ({dropped} more since the last such line)" if dropped else ""
        self._logger.warning("%s: %s: %s%s", address, kind, reason, more)
