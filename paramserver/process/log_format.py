"""Log lines: one a fact, text for people and JSON for machines.

A fact is a short sentence and its fields: `fact(logger, logging.INFO, "shard is ready", shard=1, pid=4711)`. Records of
plain `logger.info(...)` calls, ours and other libraries', come out in the same form without fields.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any, TextIO

__all__ = ["configure_logging", "fact", "resolve_log_format"]

_FIELDS = "headrace_fields"


def fact(logger: logging.Logger, level: int, message: str, /, **fields: Any) -> None:
    """Log one fact.

    Args:
        logger: Where it belongs.
        level: A level of `logging`.
        message: Short sentence; the same for every fact of its kind, so that it can be searched for.
        fields: What differs: numbers, texts and paths. No secrets.
    """
    logger.log(level, "%s", message, extra={_FIELDS: fields}, stacklevel=2)


def resolve_log_format(log_format: str, stream: TextIO) -> str:
    """Return `text` or `json`: what `auto` means for a stream, and the other two as they are."""
    if log_format != "auto":
        return log_format
    return "text" if stream.isatty() else "json"


def configure_logging(
    *, level: str, log_format: str, stream: TextIO | None = None, always: dict[str, Any] | None = None
) -> None:
    """Send all log records of this process to one stream.

    Args:
        level: debug, info, warning or error.
        log_format: auto, text or json.
        stream: Default stderr.
        always: Fields that every line of this process carries.
    """
    stream = sys.stderr if stream is None else stream
    is_text = resolve_log_format(log_format, stream) == "text"
    handler = logging.StreamHandler(stream)
    handler.setFormatter((_TextFormatter if is_text else _JsonFormatter)(always or {}))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)


class _FactFormatter(logging.Formatter):
    def __init__(self, always: dict[str, Any]) -> None:
        super().__init__()
        self._always = always

    def fields_of(self, record: logging.LogRecord) -> dict[str, Any]:
        return {**self._always, **getattr(record, _FIELDS, {})}

    def traceback_of(self, record: logging.LogRecord) -> str | None:
        return self.formatException(record.exc_info) if record.exc_info else None


class _TextFormatter(_FactFormatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        message = " ".join(record.getMessage().splitlines())
        fields = "".join(f"  {name}={_show(value)}" for name, value in self.fields_of(record).items())
        line = f"{time} {record.levelname.lower():7} {message}{fields}"
        traceback = self.traceback_of(record)
        # The one thing of several lines: on a terminal it is for reading.
        return f"{line}\n{traceback}" if traceback else line


class _JsonFormatter(_FactFormatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        # A field cannot hide what every line has.
        line |= {name: value for name, value in self.fields_of(record).items() if name not in line}
        traceback = self.traceback_of(record)
        if traceback:
            line["traceback"] = traceback
        return json.dumps(line, default=str, ensure_ascii=False)


def _show(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c.isspace() or c in '"=' for c in text) else text
