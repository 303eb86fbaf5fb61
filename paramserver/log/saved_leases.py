"""Long leases on the update log, beside it, so that a restart forgets none: `shard-0000/leases.json`.

Every lease counts for some minutes after a start, whoever had one (`log_retention.py`). So only those that last longer
are written, within a minute of what they are: what lies on the disk needs the same log or more. What is left of a lease
is written, not when it ends: the time that a shard is away does not count, and no wall clock matters.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.paramserver.files.durable_files import fsync_path
from headrace.paramserver.log.log_leases import LogLeases
from headrace.paramserver.process.log_format import fact
from headrace.schemas.errors import RequestError

__all__ = ["SavedLeases"]

_log = logging.getLogger(__name__)

# ON DISK: never change what a version means.
_FORMAT, _FORMAT_VERSION = "headrace-leases", 1
_INTERVAL_S = 60.0

_Saved = list[dict[str, Any]]


class SavedLeases:
    """The file of one shard's leases.

    A file that cannot be written or read is told in the log: its leases end with the process, as shorter ones do.

    Thread: the event loop's.
    """

    def __init__(
        self, path: Path, leases: LogLeases, *, min_lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read and write nothing yet.

        Args:
            path: The file; its directory is there.
            leases: What is saved, and restored to.
            min_lease_s: Leases with less left are not saved, seconds.
            clock: Monotonic seconds, that of the leases.
        """
        self._path = path
        self._leases = leases
        self._min_lease_s = min_lease_s
        self._clock = clock
        self._keys: set[tuple[str, str]] = set()  # of those in the file
        self._saved_s = -math.inf
        self._writing = threading.Lock()  # a cancelled `save` may still be writing when the next one comes

    async def restore(self) -> None:
        """Give those who are in the file their leases.

        Cancellation: some have theirs.
        """
        try:
            saved = await asyncio.to_thread(_read, self._path)
            for lease in saved:
                self._leases.renew(lease["name"], lease["seq"], lease["lease_s"], copy_id=lease["copy_id"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, RequestError) as exc:
            fact(_log, logging.WARNING, "saved leases cannot be read", path=str(self._path), error=str(exc))
            return
        self._keys = _keys_of(saved)

    async def save(self, *, at_end: bool = False) -> None:
        """Write the long leases if they are others than those in the file, or a minute has gone.

        Args:
            at_end: Write them whatever has changed.

        Cancellation: the file is the old one or the new one.
        """
        now_s = self._clock()
        saved: _Saved = [
            {"name": lease.name, "copy_id": lease.copy_id, "seq": lease.seq, "lease_s": lease.expires_s - now_s}
            for lease in self._leases.held()
            if lease.expires_s - now_s > self._min_lease_s
        ]
        keys = _keys_of(saved)
        if keys == self._keys and (not keys or not (at_end or now_s - self._saved_s >= _INTERVAL_S)):
            return
        try:
            await asyncio.to_thread(self._write, saved)
        except OSError as exc:
            fact(_log, logging.WARNING, "leases cannot be saved", path=str(self._path), error=str(exc))
            return
        self._keys, self._saved_s = keys, now_s

    def _write(self, saved: _Saved) -> None:
        """Write the file beside its place and move it there: it is whole, or the one before."""
        values = {"format": _FORMAT, "format_version": _FORMAT_VERSION, "leases": saved}
        temporary = self._path.with_suffix(".new")
        with self._writing:
            temporary.write_text(json.dumps(values, indent=2) + "\n")
            fsync_path(temporary)
            os.replace(temporary, self._path)
            fsync_path(self._path.parent)


def _keys_of(leases: _Saved) -> set[tuple[str, str]]:
    return {(lease["name"], lease["copy_id"]) for lease in leases}


def _read(path: Path) -> _Saved:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return []
    if (values["format"], values["format_version"]) != (_FORMAT, _FORMAT_VERSION):
        raise ValueError(f"not leases of version {_FORMAT_VERSION}")
    leases: _Saved = values["leases"]
    if not all(isinstance(lease["seq"], int) and lease["seq"] > 0 for lease in leases):
        raise ValueError("a seq is none")
    return leases
