"""When a shard refuses updates because of its disk, and when it takes them again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from waiting import WAIT_S

from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.shard.disk_room import DiskRoom
from headrace.schemas.errors import OverloadedError, StorageError

MIB = 1 << 20


class _Disk:
    """A disk of a shard with made-up figures, and log that nobody needs."""

    def __init__(self, path: Path, *, num_shards: int = 1, **settings: Any) -> None:
        for shard in range(num_shards):
            (path / f"shard-{shard:04d}").mkdir()
        self.free_bytes, self.unneeded_bytes = 10_000 * MIB, 0
        self.properties = {"rocksdb.live-sst-files-size": 0, "rocksdb.cur-size-all-mem-tables": 0}
        self.log = SimpleNamespace(pending_bytes=0)
        self.applier = SimpleNamespace(pending_bytes=0, may_flush=None)
        self.retention = SimpleNamespace(keeps_unneeded=True, free_unneeded=self._free_unneeded)
        addresses = (("h", 1),) * num_shards
        self.room = DiskRoom(
            ShardConfig(directory=path / "shard-0000", shard=0, server_id="s", addresses=addresses, **settings),
            log=cast("Any", self.log),
            applier=cast("Any", self.applier),
            store=cast("Any", SimpleNamespace(rocksdb_property=lambda name: str(self.properties[name]))),
            retention=cast("Any", self.retention),
            free_space=self._free_space,
            sleep=self._sleep,
        )
        self.may_look = asyncio.Event()

    def _free_space(self, _: Path) -> int:
        if self.free_bytes < 0:
            raise OSError(5, "Input/output error")
        return self.free_bytes

    async def _free_unneeded(self) -> None:
        self.retention.keeps_unneeded = False
        self.free_bytes, self.unneeded_bytes = self.free_bytes + self.unneeded_bytes, 0

    async def _sleep(self, _: float) -> None:
        await self.may_look.wait()
        self.may_look.clear()

    async def look_at(self, free_bytes: int) -> bool:
        """Set what is free; return whether an update is taken after a look."""
        self.free_bytes = free_bytes
        await self.room.look()
        try:
            self.room.check()
        except OverloadedError as exc:
            assert exc.retry_after_s > 0 and self.room.refusal is not None
            return False
        return True


async def test_updates_are_refused_below_the_reserve_and_taken_well_above(tmp_path: Path) -> None:
    """Below the reserve updates are refused, with disk, room and advice; a quarter more is needed to end that."""
    disk = _Disk(tmp_path, disk_reserve_bytes=100 * MIB)
    async with disk.room:
        assert await disk.look_at(100 * MIB)
        assert not await disk.look_at(99 * MIB)
        says = rf"{tmp_path}/shard-0000 has 99.0 MiB free, and 100.0 MiB stay free .*--disk-reserve-bytes.*make room"
        with pytest.raises(OverloadedError, match=says):
            disk.room.check()
        assert not await disk.look_at(124 * MIB)
        assert await disk.look_at(125 * MIB) and disk.room.refusal is None


async def test_what_is_accepted_counts(tmp_path: Path) -> None:
    """What is on its way to the log and the store takes room beyond the reserve, twice where it is in neither."""
    disk = _Disk(tmp_path, disk_reserve_bytes=100 * MIB)
    async with disk.room:
        disk.log.pending_bytes, disk.applier.pending_bytes = 10 * MIB, 30 * MIB
        disk.properties["rocksdb.cur-size-all-mem-tables"] = 5 * MIB
        assert not await disk.look_at(154 * MIB)
        assert await disk.look_at(180 * MIB)
        disk.log.pending_bytes = 0
        assert await disk.look_at(135 * MIB)


async def test_a_burst_between_two_looks_is_bounded(tmp_path: Path) -> None:
    """Updates take no more than what was left when the disk was looked at last, and their part of it."""
    disk = _Disk(tmp_path, num_shards=2, disk_reserve_bytes=100 * MIB)
    async with disk.room:
        assert await disk.look_at(240 * MIB)  # 20 MiB a shard
        disk.room.take(11 * MIB)
        with pytest.raises(OverloadedError, match="had room for when it was looked at last: try again"):
            disk.room.check()
        assert disk.room.refusal is None
        assert await disk.look_at(240 * MIB)


async def test_the_default_grows_with_the_store_up_to_a_compaction(tmp_path: Path) -> None:
    """By default the reserve is what a compaction of the store may take, and some more."""
    disk = _Disk(tmp_path, max_backlog_bytes=300 * MIB)
    async with disk.room:
        for store_bytes, reserve_bytes in ((0, 128 * MIB), (500 * MIB, 628 * MIB), (1 << 40, (128 + 1024 + 800) * MIB)):
            disk.properties["rocksdb.live-sst-files-size"] = store_bytes
            await disk.room.look()
            assert disk.room.reserve_bytes == reserve_bytes


async def test_log_that_nobody_needs_goes_first(tmp_path: Path) -> None:
    """No update is refused while removing unneeded log is enough, and it is kept again once there is room."""
    disk = _Disk(tmp_path, disk_reserve_bytes=100 * MIB)
    async with disk.room:
        disk.unneeded_bytes = 10 * MIB
        assert await disk.look_at(95 * MIB)
        assert not disk.retention.keeps_unneeded
        assert await disk.look_at(200 * MIB)
        assert disk.retention.keeps_unneeded


async def test_a_flush_waits_for_room(tmp_path: Path) -> None:
    """RocksDB does not flush by the clock what the disk cannot take."""
    disk = _Disk(tmp_path, disk_reserve_bytes=1)
    async with disk.room:
        disk.properties["rocksdb.cur-size-all-mem-tables"] = 5 * MIB
        await disk.look_at(12 * MIB)
        assert not disk.applier.may_flush()
        await disk.look_at(14 * MIB)
        assert disk.applier.may_flush()


async def test_a_disk_that_does_not_answer_ends_the_shard(tmp_path: Path) -> None:
    """If the free space cannot be read, the watch fails and says so."""
    disk = _Disk(tmp_path)
    async with disk.room, asyncio.timeout(WAIT_S):
        disk.free_bytes = -1
        disk.may_look.set()
        error = await disk.room.wait_failed()
        assert isinstance(error, StorageError) and "Input/output error" in str(error)
