"""Who needs the update log from where on, and until when: what retention leaves alone, within its bound.

A lease belongs to one copy of a follower: of two that have a name in common the slower one keeps what it needs. Leases
are in memory and go by a clock that nobody sets, so no jump of the wall clock ends one; what becomes of them at a
restart is in `log_retention.py` and `saved_leases.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.paramserver.process.log_format import fact
from headrace.schemas.errors import RequestError

__all__ = ["MAX_LEASE_S", "LogLease", "LogLeases"]

_log = logging.getLogger(__name__)

MAX_LEASE_S = 86_400.0
_MAX_NAME_BYTES = 256
_MAX_LEASES = 1024


@dataclass(frozen=True, slots=True)
class LogLease:
    """One lease.

    Attributes:
        name: Who has it, for people.
        seq: First record that is needed.
        expires_s: When it ends, by the monotonic clock, seconds.
        copy_id: Tells copies of one name apart.
    """

    name: str
    seq: int
    expires_s: float
    copy_id: str = ""


class LogLeases:
    """Leases on one shard's log.

    Thread: the event loop's.

    Attributes:
        removing: Held while log is removed, by what the leases were before: who has got a lease takes it once and then
            looks whether the log still begins where it was told.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Know of nobody.

        Args:
            clock: Monotonic seconds.
        """
        self.removing = asyncio.Lock()
        self._clock = clock
        # The one that was renewed the longest ago first.
        self._leases: dict[tuple[str, str], LogLease] = {}

    def renew(self, name: str, seq: int, lease_s: float, *, copy_id: str = "") -> bool:
        """Keep the log from a seq on; a lease of 0 seconds lets go of it.

        There is always room: of too many leases the one that was renewed the longest ago is forgotten, which is a dead
        one's as long as there are any.

        Args:
            name: Who needs it.
            seq: First record needed.
            lease_s: For how long from now, seconds.
            copy_id: Tells copies of one name apart.

        Returns:
            Whether more is to be kept than before: see `removing`.

        Raises:
            RequestError: A name or the lease is out of range.
        """
        is_name = 1 <= len(name.encode()) <= _MAX_NAME_BYTES and len(copy_id.encode()) <= _MAX_NAME_BYTES
        if not is_name or not 0 <= lease_s <= MAX_LEASE_S:
            raise RequestError(f"follower {name!r} with a lease of {lease_s:g} s: not a name, or not 0..{MAX_LEASE_S}")
        self._expire()
        before = self._leases.pop((name, copy_id), None)
        if not lease_s:
            return False
        if len(self._leases) >= _MAX_LEASES:
            forgotten = self._leases.pop(next(iter(self._leases)))
            fact(_log, logging.WARNING, "too many leases; the oldest is forgotten", held_by=forgotten.name)
        self._leases[name, copy_id] = LogLease(name, seq, self._clock() + lease_s, copy_id)
        return before is None or seq < before.seq

    def held(self) -> list[LogLease]:
        """Return the leases that have not ended."""
        self._expire()
        return list(self._leases.values())

    def __len__(self) -> int:
        self._expire()
        return len(self._leases)

    def _expire(self) -> None:
        now_s = self._clock()
        for key in [key for key, lease in self._leases.items() if lease.expires_s <= now_s]:
            del self._leases[key]
