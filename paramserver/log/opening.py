"""Open an update log by its settings: the one place that chooses the implementation.

Rooms above `log/` call these functions and use the protocols of `interface.py`; they know nothing of segments.
"""

from __future__ import annotations

from pathlib import Path

from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.interface import LogSource, UpdateLog, UpdateLogConfig
from headrace.paramserver.log.segment_reader import LogReader

__all__ = ["open_log", "open_source"]


def open_log(directory: Path, *, config: UpdateLogConfig | None = None) -> UpdateLog:
    """Open a shard's log to append to; create it if it is missing. Raises and blocks as `FileUpdateLog.open`."""
    return FileUpdateLog.open(directory, config=config)


def open_source(directory: Path, *, to_seq: int | None = None) -> LogSource:
    """Open a log to read it as it is now, also beside a running server; ignore damage after `to_seq`.

    Raises:
        CorruptionError: The log is damaged, or a part of it is missing.
        StorageError: A file cannot be read.
    """
    return LogReader(directory, to_seq)
