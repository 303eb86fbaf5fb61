"""Remove records of a shard's update log that nobody needs.

Whatever the settings say, retention keeps what the store needs to recover. Up to `log_hold_bytes` it also keeps what
followers have leases on, what follows the newest snapshot or one that is being made, and what is not archived yet. Of a
replicated log, whose other machines know nothing of this one's disk, also what follows the snapshot before the newest,
and what a standby lacks.
Beyond that bound the disk comes first: the oldest records go, which is logged and counted, and the leases on them keep
nothing any more.

Leases are in memory; only long ones are in a file, too (`log/leases.py`). So for some minutes after a start, retention
keeps everything within the bound, until the holders have asked for their leases again. It does the same after a pause
of the process or the machine, during which nobody could renew a lease.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn, Protocol, Self

from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.log.interface import CommittedLog
from headrace.paramserver.log.leases import LogLease, LogLeases, SavedLeases
from headrace.paramserver.snapshots.directory import SnapshotFiles
from headrace.paramserver.snapshots.uploader import SnapshotUploader
from headrace.paramserver.system.event_loop import failure_of
from headrace.paramserver.system.log_lines import fact
from headrace.schemas.errors import HeadraceError

__all__ = ["DurableCopy", "LogRetention", "trim_log"]

_log = logging.getLogger(__name__)

_INTERVAL_S = 15.0
# The default length of a replica's lease.
_GRACE_S = 600.0
# A shorter pause ends no lease: the shortest last a minute and are renewed every twenty seconds.
_STALL_S = 15.0


class DurableCopy(Protocol):
    """What does not need the log up to `durable_seq` any more: a shard's store."""

    @property
    def durable_seq(self) -> int: ...  # noqa: D102 - documented above


class LogRetention:
    """Removes unneeded log every quarter of a minute. Use it with `async with`.

    Thread: the event loop's.

    Attributes:
        snapshot_leases: Leases on the log behind snapshots that are being made.
        uploader: Tells the leases behind snapshots in the object store; None without one.
        num_broken: Leases and snapshots that have lost their log to the bound since the start.
        keeps_unneeded: Whether log that nobody needs stays within its bounds; not while the disk has little room.
    """

    def __init__(
        self,
        log: CommittedLog,
        store: DurableCopy,
        followers: LogLeases,
        config: ShardConfig,
        *,
        uploader: SnapshotUploader | None = None,
        archived: Callable[[], Sequence[LogLease]] = tuple,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Prepare to remove records of `log` that are durable in `store`, within the bounds of `config`.

        `archived` returns the leases on what is not archived yet, or that a standby lacks.
        """
        self.snapshot_leases = LogLeases(clock=clock)
        self.uploader = uploader
        self.num_broken = 0
        self.keeps_unneeded = True
        self._log, self._store, self._followers, self._config = log, store, followers, config
        self._snapshots = SnapshotFiles(config.snapshots_path)
        self._archived, self._clock, self._sleep = archived, clock, sleep
        self._saved = SavedLeases(config.directory / "leases.json", followers, min_lease_s=_GRACE_S, clock=clock)
        # An empty log had no followers.
        self._grace_until_s = clock() + _GRACE_S if log.last_seq else -math.inf
        self._task: asyncio.Task[NoReturn] | None = None

    async def __aenter__(self) -> Self:
        await self._saved.restore()
        # Before the first write: on a full disk, a start with lower bounds makes room.
        await self._trim_log()
        self._task = asyncio.create_task(self._keep_trimming(), name="headrace-retention")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._saved.save(at_end=True)

    async def wait_failed(self) -> HeadraceError:
        """Wait for an error that ends retention, and return it. Cancellation: harmless."""
        assert self._task is not None
        return await failure_of(self._task)

    async def free_unneeded(self) -> None:
        """Remove log that nobody needs now, and as long as not `keeps_unneeded`; raises and is cancelled as `trim`."""
        self.keeps_unneeded = False
        await self._trim_log()

    async def trim(self) -> None:
        """Remove what may go now, and save leases for a restart; `StorageError` if a segment cannot be removed.

        Cancellation: a removal that has started is finished.
        """
        if self._config.is_first_here:  # snapshots belong to all shards of the directory
            await asyncio.to_thread(self._prune_snapshots)
        await self._trim_log()
        await self._saved.save()

    async def _trim_log(self) -> None:
        published = await asyncio.to_thread(self._published_leases)
        async with self._followers.removing:
            stored = [] if self.uploader is None else self.uploader.leases()
            held = [*self._followers.held(), *self.snapshot_leases.held()]
            leases = [*held, *published, *stored, *self._archived()]
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

    def _prune_snapshots(self) -> None:
        try:
            for name in self._snapshots.prune_abandoned():
                fact(_log, logging.INFO, "snapshot was removed: nobody has read of it for its lease", name=name)
        except HeadraceError as exc:
            fact(_log, logging.WARNING, "snapshots that nobody reads cannot be removed", error=str(exc))

    def _published_leases(self) -> list[LogLease]:
        """Return a lease on the log behind the newest snapshot. Thread: any; it blocks."""
        try:
            newest = self._snapshots.newest(self._config.server_id)
        except HeadraceError as exc:  # snapshots are only copies, no reason for the shard to stop
            fact(_log, logging.WARNING, "the snapshots cannot be read; no log is kept for them", error=str(exc))
            return []
        if newest is None:
            return []
        if self._config.shard >= len(newest.parts):
            fact(_log, logging.WARNING, "the newest snapshot lacks this shard; no log is kept for it", name=newest.name)
            return []
        return [LogLease(f"snapshot {newest.name}", newest.parts[self._config.shard].seq + 1, math.inf)]

    def _remove(self, leases: list[LogLease]) -> list[LogLease]:
        """Remove log; return the leases that lost records by it. Thread: any; it blocks."""
        first_seq = self._log.first_seq
        # A holder whose first record is gone cannot continue, so the records after it do not help either.
        leases = [lease for lease in leases if lease.seq >= first_seq]
        needed = [lease.seq for lease in leases]
        if self._clock() < self._grace_until_s:
            needed.append(first_seq)
        floor, needed_seq = self._store.durable_seq + 1, min(needed, default=None)
        if not self.keeps_unneeded:
            self._log.trim(floor if needed_seq is None else min(floor, needed_seq))
        trim_log(self._log, floor - 1, needed_seq, self._config)
        return [lease for lease in leases if lease.seq < self._log.first_seq]


def trim_log(log: CommittedLog, durable_seq: int, needed_seq: int | None, config: ShardConfig) -> None:
    """Remove log beyond the limits of `config`, but no record after `durable_seq`: the store needs them to recover.

    Records from `needed_seq` on, which somebody else needs, are kept within `log_hold_bytes`. `StorageError` if a
    segment cannot be removed. Thread: any; it blocks.
    """
    floor = durable_seq + 1
    wanted = floor if needed_seq is None else min(floor, needed_seq)
    log.trim(wanted, max_bytes=config.log_retention_bytes, max_age_s=config.log_retention_s)
    if wanted < floor:
        log.trim(floor, max_bytes=max(config.log_hold_bytes, config.log_retention_bytes))
