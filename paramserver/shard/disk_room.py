"""Refuse updates while a shard's disk has little room, so that its log and store never meet a full one.

    free space  ≥  reserve + what is accepted and not in the store's files yet     updates are taken
                <                                                                  log that nobody needs is removed;
                                                                                   if that is not enough, no updates

Reads, followers and status go on. So does what has no rows: drops of tables, and the steps of moves that let rows go.
Updates are taken again once a quarter of the reserve more is free, so a disk at the edge does not flap. A shard
assumes that the others on its disk are as large as it is: rows are hashed.

Another process may fill the disk all the same. Then the log or the store fails, and the supervisor starts the shard
again until there is room.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn, Protocol, Self

from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.log.interface import UpdateLog
from headrace.paramserver.shard.retention import LogRetention
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.rocksdb import largest_compaction_bytes
from headrace.paramserver.system.durable import disk_error
from headrace.paramserver.system.event_loop import failure_of
from headrace.paramserver.system.log_lines import fact
from headrace.paramserver.system.text import format_size
from headrace.schemas.errors import HeadraceError, OverloadedError

__all__ = ["DiskRoom"]

_log = logging.getLogger(__name__)

_LOOK_S = 0.5
# Once a look has found room, it holds for this long at any rate: clients that ask more often find nothing new.
_RETRY_AFTER_S = 1.0
# Blocks that the log reserves ahead (32 MiB), RocksDB's own files, and a flush of half-full memtables at a restart.
_OWN_FILES_BYTES = 128 << 20
# A flush of RocksDB's also writes an index and filters, and new versions of its own files.
_FLUSH_BYTES = 8 << 20
# Part of the reserve that must also be free before updates are taken again.
_RESUME_PART = 4
# An update is in the log and in the store.
_NUM_COPIES = 2


class _Store(Protocol):
    def rocksdb_property(self, name: str) -> str: ...


class DiskRoom:
    """Watches the free space of a shard's disk. Use it with `async with`, before the shard serves.

    Thread: the event loop's.

    Attributes:
        refusal: Why updates are refused; None while they are taken.
        free_bytes: Free space when it was looked at last.
        reserve_bytes: What updates leave free for all shards on the disk, as of then.
    """

    def __init__(
        self,
        config: ShardConfig,
        *,
        log: UpdateLog,
        applier: Applier,
        store: _Store,
        retention: LogRetention,
        free_space: Callable[[Path], int] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Prepare to watch the disk of `config.directory`, whose free bytes `free_space` returns in a thread."""
        self.refusal: str | None = None
        self.free_bytes = self.reserve_bytes = 0
        self._config, self._log, self._applier, self._store = config, log, applier, store
        self._retention, self._sleep = retention, sleep
        self._free_space = free_space or _free_space
        self._left_bytes = self._memtable_bytes = 0
        self._num_sharing = 1
        self._task: asyncio.Task[NoReturn] | None = None

    async def __aenter__(self) -> Self:
        self._num_sharing = await asyncio.to_thread(_num_shards_on_disk, self._config)
        await self.look()
        self._applier.may_flush = lambda: self.free_bytes > self._memtable_bytes + _FLUSH_BYTES
        self._task = asyncio.create_task(self._keep_looking(), name="headrace-disk-room")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def wait_failed(self) -> HeadraceError:
        """Wait for an error that ends the watch, and return it. Cancellation: harmless."""
        assert self._task is not None
        return await failure_of(self._task)

    def check(self) -> None:
        """Raise `OverloadedError` if there is no room for an update."""
        if self.refusal is not None or self._left_bytes < 0:
            raise OverloadedError(self.refusal or self._describe_burst(), retry_after_s=_RETRY_AFTER_S)

    def take(self, size_bytes: int) -> None:
        """Count an accepted update against what is left until the next look."""
        self._left_bytes -= _NUM_COPIES * size_bytes

    async def look(self) -> None:
        """Look at the disk, and decide whether updates are taken.

        Raises:
            StorageError: The file system does not answer, or log that nobody needs cannot be removed.

        Cancellation: harmless.
        """
        await self._measure()
        if self._left_bytes < 0 and self._retention.keeps_unneeded:
            await self._retention.free_unneeded()
            await self._measure()
        if self._left_bytes < 0:
            if self.refusal is None:
                fact(_log, logging.ERROR, "shard takes no updates: its disk has little room", **self._facts())
            self.refusal = self._describe()
        elif self._left_bytes * self._num_sharing >= self.reserve_bytes // _RESUME_PART:
            self._retention.keeps_unneeded = True
            if self.refusal is not None:
                fact(_log, logging.INFO, "shard takes updates again: its disk has room", **self._facts())
            self.refusal = None

    async def _measure(self) -> None:
        self.free_bytes, store_bytes, self._memtable_bytes = await asyncio.to_thread(self._read_figures)
        config = self._config
        window_bytes = config.max_backlog_bytes // 3
        compaction_bytes = min(store_bytes, largest_compaction_bytes(window_bytes))
        reserve_bytes = config.disk_reserve_bytes or _OWN_FILES_BYTES + compaction_bytes
        self.reserve_bytes = self._num_sharing * reserve_bytes
        accepted_bytes = _NUM_COPIES * self._log.pending_bytes + self._applier.pending_bytes + self._memtable_bytes
        # Each shard may take its part of what is left until it looks again.
        self._left_bytes = (self.free_bytes - self.reserve_bytes) // self._num_sharing - accepted_bytes

    def _read_figures(self) -> tuple[int, int, int]:
        """Return free bytes of the disk, and those of RocksDB's files and memtables. Thread: any; it blocks."""
        directory = self._config.directory
        try:
            free_bytes = self._free_space(directory)
        except OSError as exc:
            raise disk_error(f"{directory}: cannot read its free space: {exc.strerror or exc}", exc) from exc
        names = ("rocksdb.live-sst-files-size", "rocksdb.cur-size-all-mem-tables")
        store_bytes, memtable_bytes = (int(self._store.rocksdb_property(name) or 0) for name in names)
        return free_bytes, store_bytes, memtable_bytes

    def _facts(self) -> dict[str, str]:
        free, reserve = format_size(self.free_bytes), format_size(self.reserve_bytes)
        return {"directory": str(self._config.directory), "free": free, "reserve": reserve}

    def _describe(self) -> str:
        free, reserve = format_size(self.free_bytes), format_size(self.reserve_bytes)
        return (
            f"shard {self._config.shard} takes no updates: the disk of {self._config.directory} has {free} free, and "
            f"{reserve} stay free for what is accepted (--disk-reserve-bytes); make room, and it goes on by itself"
        )

    def _describe_burst(self) -> str:
        return (
            f"shard {self._config.shard} has taken what the disk of {self._config.directory} had room for when it was "
            "looked at last: try again"
        )

    async def _keep_looking(self) -> NoReturn:
        while True:
            await self._sleep(_LOOK_S)
            await self.look()


def _free_space(directory: Path) -> int:
    files = os.statvfs(directory)
    return files.f_bavail * files.f_frsize


def _num_shards_on_disk(config: ShardConfig) -> int:
    """Return how many shards of this server have their directories on the disk of this one. Thread: any; it blocks."""
    here = config.directory.stat().st_dev
    paths = [path for path in config.directory.parent.glob("shard-[0-9]*") if path.is_dir()]
    return max(sum(path.stat().st_dev == here for path in paths), 1)
