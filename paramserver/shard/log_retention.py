"""What is removed of a shard's update log, and what is kept for whom.

Kept whatever the settings say: what the store would need to recover. Kept as long as the log is not larger than
`log_hold_bytes`: what a follower has a lease on, what lies behind the newest snapshot, and behind one that is being
made. Beyond that bound the disk wins: the oldest log goes, whoever needs it, and that is logged and counted. A lease
whose log is gone keeps nothing any more.

Leases are in memory. So for some minutes after a start all is kept within the bound, as if somebody needed it: those
who had leases ask for them again. Those that last longer are in a file (`saved_leases.py`). The same minutes follow a
time in which the process stood still, or its machine, and could not be asked.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn, Self

from headrace.paramserver.config.shard_config import ShardConfig
from headrace.paramserver.log.log_leases import LogLease, LogLeases
from headrace.paramserver.log.saved_leases import SavedLeases
from headrace.paramserver.log.update_log import UpdateLog
from headrace.paramserver.process.log_format import fact
from headrace.paramserver.snapshots.snapshot_files import SnapshotFiles
from headrace.paramserver.store.row_store import RowStore
from headrace.schemas.errors import HeadraceError

__all__ = ["LogRetention", "trim_log"]

_log = logging.getLogger(__name__)

_INTERVAL_S = 15.0
# As long as a replica's lease by default.
_GRACE_S = 600.0
# No lease ends while a process stands still for less: the shortest are of a minute, and renewed every twenty seconds.
_STALL_S = 15.0


class LogRetention:
    """Removes log that has outlived its settings, every quarter of a minute. Use it with `async with`.

    Thread: the event loop's.

    Attributes:
        cuts: Leases behind the cuts of snapshots that are being made.
        num_broken: Leases and snapshots whose log was removed since the start, as the bound was reached.
    """

    def __init__(
        self,
        log: UpdateLog,
        store: RowStore,
        followers: LogLeases,
        config: ShardConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Remove nothing yet.

        Args:
            log: The shard's log.
            store: Says what of the log it has.
            followers: Leases of those who follow the log.
            config: The bounds.
            clock: Monotonic seconds.
            sleep: Waits for some seconds.
        """
        self.cuts = LogLeases(clock=clock)
        self.num_broken = 0
        self._log = log
        self._store = store
        self._followers = followers
        self._config = config
        self._snapshots = SnapshotFiles(config.snapshots_path)
        self._clock = clock
        self._sleep = sleep
        self._saved = SavedLeases(config.directory / "leases.json", followers, min_lease_s=_GRACE_S, clock=clock)
        # An empty log was followed by nobody.
        self._grace_until_s = clock() + _GRACE_S if log.last_seq else -math.inf
        self._task: asyncio.Task[NoReturn] | None = None

    async def __aenter__(self) -> Self:
        await self._saved.restore()
        # Before the first record wants room: on a full disk a start with lower bounds makes it.
        await self._trim_log()
        self._task = asyncio.create_task(self._keep_trimming(), name="headrace-retention")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._saved.save(at_end=True)

    async def wait_failed(self) -> HeadraceError:
        """Return the error that has ended retention, once there is one.

        Cancellation: harmless.
        """
        assert self._task is not None
        try:
            await asyncio.shield(self._task)
        except HeadraceError as exc:
            return exc
        raise AssertionError("what never ends has ended")

    async def trim(self) -> None:
        """Remove what may go now, and save the leases that a restart should know.

        Raises:
            StorageError: A segment could not be removed.

        Cancellation: what has been chosen is removed.
        """
        if self._config.shard == 0:  # the snapshots are those of all shards
            await asyncio.to_thread(self._sweep)
        await self._trim_log()
        await self._saved.save()

    async def _trim_log(self) -> None:
        published = await asyncio.to_thread(self._published)
        async with self._followers.removing:
            leases = [*self._followers.held(), *self.cuts.held(), *published]
            broken = await asyncio.to_thread(self._remove, leases)
        for lease in broken:
            self.num_broken += 1
            fact(
                _log,
                logging.WARNING,
                "log was removed that is still needed: --log-hold-bytes was reached",
                needed_by=lease.name,
                from_seq=lease.seq,
                first_seq=self._log.first_seq,
            )

    async def _keep_trimming(self) -> NoReturn:
        while True:
            began_s = self._clock()
            await self._sleep(_INTERVAL_S)
            now_s = self._clock()
            if now_s - began_s > _INTERVAL_S + _STALL_S:
                self._grace_until_s = now_s + _GRACE_S
            await self.trim()

    def _sweep(self) -> None:
        """Remove snapshots that somebody has made for himself and then left. Thread: any; it blocks."""
        try:
            for name in self._snapshots.sweep():
                fact(_log, logging.INFO, "snapshot was removed: nobody has read of it for its lease", name=name)
        except HeadraceError as exc:
            fact(_log, logging.WARNING, "snapshots that nobody reads cannot be removed", error=str(exc))

    def _published(self) -> list[LogLease]:
        """Return the lease that the newest snapshot stands for. Thread: any; it blocks."""
        try:
            newest = self._snapshots.newest(self._config.server_id)
        except HeadraceError as exc:  # snapshots are others' copies: no reason for a shard to stop
            fact(_log, logging.WARNING, "the snapshots cannot be read; no log is kept for them", error=str(exc))
            return []
        if newest is None or self._config.shard >= len(newest.parts):
            return []
        return [LogLease(f"snapshot {newest.name}", newest.parts[self._config.shard].seq + 1, math.inf)]

    def _remove(self, leases: list[LogLease]) -> list[LogLease]:
        """Remove log; return the leases that this has broken. Thread: any; it blocks."""
        first_seq = self._log.first_seq
        # Who has lost its place cannot go on there, and what is behind it is of no use for it.
        leases = [lease for lease in leases if lease.seq >= first_seq]
        needed = [lease.seq for lease in leases]
        if self._clock() < self._grace_until_s:
            needed.append(first_seq)
        trim_log(self._log, self._store.durable_seq, min(needed, default=None), self._config)
        return [lease for lease in leases if lease.seq < self._log.first_seq]


def trim_log(log: UpdateLog, durable_seq: int, needed_seq: int | None, config: ShardConfig) -> None:
    """Remove log that has outlived its settings, and never what the store would need to recover.

    Args:
        log: The log.
        durable_seq: What the store has for good.
        needed_seq: First record that somebody else needs; kept as long as the log is not larger than the bound for it.
        config: The bounds.

    Raises:
        StorageError: A segment could not be removed.

    Thread: any; it blocks.
    """
    floor = durable_seq + 1
    wanted = floor if needed_seq is None else min(floor, needed_seq)
    log.trim(wanted, max_bytes=config.log_retention_bytes, max_age_s=config.log_retention_s)
    if wanted < floor:
        log.trim(floor, max_bytes=max(config.log_hold_bytes, config.log_retention_bytes))
