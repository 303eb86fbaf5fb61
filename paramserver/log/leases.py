"""Log leases: who needs the update log from where, and until when. Retention keeps leased records, within its bound.

A lease belongs to one copy of a follower; if two copies share a name, the slower one keeps what it needs. Leases are in
memory and use the monotonic clock, so no wall-clock change ends one.

After a start every lease counts for some minutes, whoever held it (`shard/retention.py`). Only longer leases are saved,
in `shard-0000/leases.json`, at most a minute out of date; a stale entry keeps the same log or more. The file holds the
time that is left, not the time of the end: a shard's downtime does not count, and no wall clock matters.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.paramserver.system.durable import write_file
from headrace.paramserver.system.log_lines import fact
from headrace.schemas.errors import RequestError
from headrace.schemas.idl import MAX_NAME_BYTES
from headrace.schemas.table_names import has_controls

__all__ = ["MAX_LEASE_S", "LogLease", "LogLeases", "SavedLeases"]

_log = logging.getLogger(__name__)

MAX_LEASE_S = 86_400.0
_MAX_LEASES = 1024
# ON DISK: never change what a version means.
_FORMAT, _FORMAT_VERSION = "headrace-leases", 1
_SAVE_INTERVAL_S = 60.0

_Saved = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class LogLease:
    """One lease on the records from `seq` on. `copy_id` distinguishes copies of one name.

    `expires_s` is its end by the monotonic clock, seconds. `address` is where its holder called from, host and port;
    empty for the shard's own and for those in the file.
    """

    name: str
    seq: int
    expires_s: float
    copy_id: str = ""
    address: str = ""


class LogLeases:
    """The leases on one shard's log. Thread: the event loop's.

    Attributes:
        removing: Locked while log is removed according to an earlier state of the leases. After getting a lease, lock
            it once and check that the log still begins where it did.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without leases; `clock` returns monotonic seconds."""
        self.removing = asyncio.Lock()
        self._clock = clock
        self._leases: dict[tuple[str, str], LogLease] = {}  # the least recently renewed first

    def renew(self, name: str, seq: int, lease_s: float, *, copy_id: str = "", address: str = "") -> bool:
        """Keep the log from a seq on; a lease of 0 seconds releases it.

        There is always room: of too many leases, those of the host with the most lose one, and of these the connection
        with the most: nobody can push out the leases of others. It is the least recently renewed, so dead holders'
        leases go first.

        Returns:
            Whether more log is needed than before; see `removing`.

        Raises:
            RequestError: A name or the duration is out of range.
        """
        is_name = 1 <= len(name.encode()) <= MAX_NAME_BYTES and len(copy_id.encode()) <= MAX_NAME_BYTES
        is_name = is_name and not has_controls(name + copy_id)
        if not is_name or not 0 <= lease_s <= MAX_LEASE_S:
            raise RequestError(f"follower {name!r} with a lease of {lease_s:g} s: not a name, or not 0..{MAX_LEASE_S}")
        self._expire()
        before = self._leases.pop((name, copy_id), None)
        if not lease_s:
            return False
        if len(self._leases) >= _MAX_LEASES:
            forgotten = self._leases.pop(self._least_needed())
            fact(_log, logging.WARNING, "too many leases; the oldest is forgotten", held_by=forgotten.name)
        self._leases[name, copy_id] = LogLease(name, seq, self._clock() + lease_s, copy_id, address)
        return before is None or seq < before.seq

    def held(self) -> list[LogLease]:
        """Return the leases that have not ended."""
        self._expire()
        return list(self._leases.values())

    def __len__(self) -> int:
        return len(self.held())

    def _least_needed(self) -> tuple[str, str]:
        keys = list(self._leases)
        addresses = {key: lease.address for key, lease in self._leases.items()}
        hosts = {key: address.rpartition(":")[0] for key, address in addresses.items()}
        for holders in (hosts, addresses):
            counts = Counter(holders[key] for key in keys)
            most = max(counts.values())
            keys = [key for key in keys if counts[holders[key]] == most]
        return keys[0]

    def _expire(self) -> None:
        now_s = self._clock()
        self._leases = {key: lease for key, lease in self._leases.items() if lease.expires_s > now_s}


class SavedLeases:
    """The file of one shard's long leases. Thread: the event loop's.

    If the file cannot be read or written, that is logged, and its leases end with the process, as shorter ones do.
    """

    def __init__(
        self, path: Path, leases: LogLeases, *, min_lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepare to save leases with more than `min_lease_s` seconds left; `clock` is the leases' own."""
        self._path, self._leases, self._min_lease_s, self._clock = path, leases, min_lease_s, clock
        self._keys: set[tuple[str, str]] = set()  # the leases in the file
        self._saved_s = -math.inf
        self._writing = threading.Lock()  # the thread of a cancelled `save` may still write when the next one begins

    async def restore(self) -> None:
        """Renew the leases in the file. Cancellation: some are renewed."""
        try:
            saved = await asyncio.to_thread(_read, self._path)
            for lease in saved:
                self._leases.renew(lease["name"], lease["seq"], lease["lease_s"], copy_id=lease["copy_id"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, RequestError) as exc:
            fact(_log, logging.WARNING, "saved leases cannot be read", path=str(self._path), error=str(exc))
            return
        self._keys = _keys_of(saved)

    async def save(self, *, at_end: bool = False) -> None:
        """Write the long leases if they differ from those in the file, if a minute has passed, or `at_end`.

        Cancellation: the file is the old one or the new one.
        """
        now_s = self._clock()
        saved: _Saved = [
            {"name": lease.name, "copy_id": lease.copy_id, "seq": lease.seq, "lease_s": lease.expires_s - now_s}
            for lease in self._leases.held()
            if lease.expires_s - now_s > self._min_lease_s
        ]
        keys = _keys_of(saved)
        if keys == self._keys and (not keys or not (at_end or now_s - self._saved_s >= _SAVE_INTERVAL_S)):
            return
        try:
            await asyncio.to_thread(self._write, saved)
        except OSError as exc:
            fact(_log, logging.WARNING, "leases cannot be saved", path=str(self._path), error=str(exc))
            return
        self._keys, self._saved_s = keys, now_s

    def _write(self, saved: _Saved) -> None:
        values = {"format": _FORMAT, "format_version": _FORMAT_VERSION, "leases": saved}
        content = (json.dumps(values, indent=2) + "\n").encode()
        with self._writing:
            write_file(self._path, content, aside=self._path.with_suffix(".new"))


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
        raise ValueError("a seq is not a positive integer")
    return leases
