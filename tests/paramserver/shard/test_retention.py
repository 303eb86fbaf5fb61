"""Log retention, with a fake store and a clock that stands still."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fact_log import FactLog, collect_facts
from memory_update_log import MemoryUpdateLog

from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.ingest.feed import UpdateFeed
from headrace.paramserver.log.interface import UpdateLogConfig
from headrace.paramserver.log.leases import LogLeases
from headrace.paramserver.shard.membership import Membership
from headrace.paramserver.shard.retention import LogRetention, trim_log
from headrace.paramserver.snapshots.directory import SnapshotFiles
from headrace.schemas.errors import GoneError, StorageError
from headrace.schemas.idl import idl
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest

RECORD_BYTES = 1 << 18
WAIT_S = 20.0
BROKEN = "log was removed that is still needed: --log-hold-bytes was reached"


@pytest.fixture
def facts() -> Iterator[FactLog]:
    yield from collect_facts("headrace.paramserver.shard.retention")


def shard_config(folder: Path) -> ShardConfig:
    """Return the config of a shard that keeps four records, or sixteen while somebody needs them."""
    config = ShardConfig(directory=folder / "shard-0000", shard=0, server_id="s", addresses=(("h", 1),))
    return dataclasses.replace(config, log_retention_bytes=4 * RECORD_BYTES, log_hold_bytes=16 * RECORD_BYTES)


class Logged:
    """A log with one record per segment, all in the store, and its retention."""

    def __init__(self, log: MemoryUpdateLog, config: ShardConfig) -> None:
        self.now_s = 0.0
        self.sleeps: asyncio.Queue[tuple[float, asyncio.Future[None]]] = asyncio.Queue()
        self.log = log
        self.followers = LogLeases(clock=lambda: self.now_s)
        self._store = SimpleNamespace(durable_seq=0)
        self.config = config
        self.begin()

    def begin(self) -> None:
        """Create retention, as at the start of a shard."""
        store = cast("Any", self._store)
        self.retention = LogRetention(
            self.log, store, self.followers, self.config, clock=lambda: self.now_s, sleep=self._sleep
        )

    async def _sleep(self, duration_s: float) -> None:
        self.sleeps.put_nowait((duration_s, turn := asyncio.get_running_loop().create_future()))
        await turn

    async def pass_time(self, more_s: float) -> None:
        """Let retention's next sleep take this much longer, and return when it sleeps again."""
        duration_s, turn = await asyncio.wait_for(self.sleeps.get(), WAIT_S)
        self.now_s += duration_s + more_s
        turn.set_result(None)
        self.sleeps.put_nowait(await asyncio.wait_for(self.sleeps.get(), WAIT_S))

    async def append(self, num_records: int) -> None:
        for _ in range(num_records):
            await self.log.append(epoch=1, header={}, body=[bytes(RECORD_BYTES)]).durable
        self._store.durable_seq = self.log.last_seq

    async def first_seq(self) -> int:
        """Run retention and return the first seq of the log."""
        await self.retention.trim()
        return self.log.first_seq


@asynccontextmanager
async def logged(folder: Path, log: MemoryUpdateLog | None = None) -> AsyncIterator[Logged]:
    log = log or MemoryUpdateLog(config=UpdateLogConfig(segment_bytes=RECORD_BYTES))
    yield Logged(log, shard_config(folder))
    await log.close()


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[Logged]:
    async with logged(tmp_path) as made:
        yield made


def publish(folder: Path, name: str, *, seq: int, created_us: int = 1, server_id: str = "s") -> None:
    """Publish a snapshot of one shard without files."""
    files = SnapshotFiles(folder / "snapshots")
    files.new_folder(name).mkdir(parents=True)
    part = ShardPart(shard=0, server_id=server_id, seq=seq, epoch=1, step=1, tables=(), files=())
    files.publish(SnapshotManifest(name=name, created_us=created_us, parts=(part,)))


async def test_a_lease_keeps_log_within_the_bound(it: Logged, tmp_path: Path) -> None:
    """Needed records stay until the log exceeds the bound."""
    config = shard_config(tmp_path)
    await it.append(12)
    trim_log(it.log, 12, 3, config)
    assert it.log.first_seq == 3
    await it.append(8)
    trim_log(it.log, 20, 3, config)
    assert 3 < it.log.first_seq < 10
    trim_log(it.log, 20, None, config)
    assert it.log.first_seq > 15


async def test_records_that_the_store_lacks_are_never_removed(it: Logged, tmp_path: Path) -> None:
    """Records that a restart must replay stay beyond every bound."""
    await it.append(40)
    for needed_seq in (None, 30):
        trim_log(it.log, 5, needed_seq, shard_config(tmp_path))
        assert it.log.first_seq == 6


async def test_the_log_behind_a_cut_is_kept_until_its_snapshot_is_published(it: Logged, tmp_path: Path) -> None:
    """The log continues from the cut however much is written before the snapshot is published."""
    await it.append(2)
    it.retention.snapshot_leases.renew("snapshot first", 3, 100.0)
    await it.append(10)
    assert await it.first_seq() == 3
    publish(tmp_path, "first", seq=2)
    it.now_s = 100.0  # the lease ends
    assert await it.first_seq() == 3
    SnapshotFiles(tmp_path / "snapshots").remove("first")
    assert await it.first_seq() > 8


async def test_the_newest_snapshot_is_the_one_with_the_highest_seq(it: Logged, tmp_path: Path) -> None:
    """A snapshot with a wrong clock, or of another store, keeps no log."""
    await it.append(12)
    publish(tmp_path, "by-a-clock-ahead", seq=2, created_us=10**15)
    publish(tmp_path, "newest", seq=6)
    publish(tmp_path, "other", seq=1, created_us=10**15, server_id="another")
    assert await it.first_seq() == 7


async def test_at_the_bound_log_is_removed_and_that_is_logged(it: Logged, tmp_path: Path, facts: FactLog) -> None:
    """A holder that loses records is named once and counted, and keeps no log any more."""
    it.followers.renew("slow", 2, 600.0)
    it.followers.renew("fast", 19, 600.0)
    publish(tmp_path, "old", seq=3)
    await it.append(12)
    assert await it.first_seq() == 2 and not facts.facts
    await it.append(12)
    first_seq = await it.first_seq()
    assert 4 < first_seq <= 10  # as much as the bound allows
    fields = {"first_seq": first_seq}
    assert facts.facts == [
        (BROKEN, {"needed_by": "slow", "from_seq": 2} | fields),
        (BROKEN, {"needed_by": "snapshot old", "from_seq": 4} | fields),
    ]
    assert it.retention.num_broken == 2
    assert await it.first_seq() == 19  # for the holder that has lost nothing
    assert it.retention.num_broken == 2 == len(facts.facts)


async def test_after_a_start_the_log_is_kept_for_ten_minutes(it: Logged, facts: FactLog) -> None:
    """Leases are in memory, so everything within the bound is kept, and no loss is logged."""
    await it.append(12)
    it.begin()
    it.now_s = 599.0
    assert await it.first_seq() == 1
    await it.append(20)
    assert 1 < await it.first_seq() < 20 and not facts.facts
    it.now_s = 600.0
    assert await it.first_seq() > 25


async def test_after_a_pause_of_the_process_the_log_is_kept(it: Logged, tmp_path: Path) -> None:
    """A long pause counts like a start; a loop that is a little late does not."""
    (tmp_path / "shard-0000").mkdir()
    it.followers.renew("replica", 4, 60.0)
    await it.append(12)
    async with it.retention:
        await it.pass_time(more_s=0.0)
        assert it.log.first_seq == 4
        await it.pass_time(more_s=3600.0)
        assert not it.followers.held() and it.log.first_seq == 4
        it.followers.renew("replica", 6, 60.0)  # it continues
        for _ in range(39):
            await it.pass_time(more_s=0.0)
        assert it.log.first_seq == 4
        it.followers.renew("replica", 6, 60.0)
        await it.pass_time(more_s=0.0)
        assert it.log.first_seq == 6
        await it.pass_time(more_s=14.0)
        await it.pass_time(more_s=14.0)
        await it.pass_time(more_s=14.0)
        assert it.log.first_seq > 6


async def test_a_long_lease_survives_a_restart(it: Logged, tmp_path: Path) -> None:
    """Its holder may be away for longer than everything is kept after a start."""
    (tmp_path / "shard-0000").mkdir()
    async with it.retention:
        it.followers.renew("away", 4, 3600.0)
        await it.append(12)
    it.followers = LogLeases(clock=lambda: it.now_s)
    it.begin()
    async with it.retention:
        it.now_s = 3000.0
        assert await it.first_seq() == 4
        it.now_s = 3600.0
        assert await it.first_seq() > 6


async def test_a_new_log_has_no_followers(it: Logged) -> None:
    """A new server keeps no extra log in its first minutes."""
    await it.append(12)
    assert await it.first_seq() > 6


class SlowLog(MemoryUpdateLog):
    """A log whose removal takes until the test allows it."""

    def __init__(self) -> None:
        super().__init__(config=UpdateLogConfig(segment_bytes=RECORD_BYTES))
        self.removing, self.may_remove = threading.Event(), threading.Event()

    def trim(self, before_seq: int, **bounds: Any) -> int:
        self.removing.set()
        assert self.may_remove.wait(WAIT_S)
        return super().trim(before_seq, **bounds)


async def test_a_lease_on_records_being_removed_is_refused(tmp_path: Path) -> None:
    """A request during the removal learns that the log is gone."""
    log = SlowLog()
    async with logged(tmp_path, log) as it:
        await it.append(12)
        feed = UpdateFeed(it.log, cast("Any", None), server_id="s", max_frame_bytes=1 << 20)
        feed.followers = it.followers
        trimming = asyncio.create_task(it.retention.trim())
        assert await asyncio.to_thread(log.removing.wait, WAIT_S)
        request = idl.FetchUpdatesRequest(
            server_id="s", from_seq=2, max_bytes=1, wait_ms=0, follower="replica", lease_ms=60_000
        )
        asking = asyncio.create_task(feed.fetch(request))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not asking.done()
        log.may_remove.set()
        await trimming
        with pytest.raises(GoneError, match="seq 2 has been removed"):
            await asking


async def test_a_start_with_a_lower_bound_removes_log_first(it: Logged, tmp_path: Path) -> None:
    """On a full disk, a lower bound makes room before the shard serves."""
    await it.append(12)
    publish(tmp_path, "monday", seq=2)
    it.begin()
    async with it.retention:
        assert it.log.first_seq == 1
    it.config = dataclasses.replace(it.config, log_hold_bytes=6 * RECORD_BYTES)
    it.begin()
    async with it.retention:
        assert it.log.first_seq > 6
        assert it.retention.num_broken == 1


async def test_log_that_nobody_needs_makes_room(it: Logged, tmp_path: Path) -> None:
    """While the disk has little room, log within its bounds goes too, but none that somebody needs."""
    await it.append(3)
    publish(tmp_path, "monday", seq=1)
    it.begin()
    it.now_s = 1000.0  # behind the first minutes, in which followers may still come
    async with it.retention:
        assert it.log.first_seq == 1
        await it.retention.free_unneeded()
        assert it.log.first_seq == 2
        (tmp_path / "snapshots" / "monday").rename(tmp_path / "gone")
        await it.retention.trim()
        assert it.log.first_seq == 3


async def test_a_failure_ends_the_shard(it: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed removal ends the shard, because the disk would fill up."""

    def fail(*_: Any, **__: Any) -> int:
        raise StorageError("the disk is on fire")

    async with it.retention, asyncio.timeout(WAIT_S):
        monkeypatch.setattr(it.log, "trim", fail)
        _, turn = await it.sleeps.get()
        turn.set_result(None)
        assert str(await it.retention.wait_failed()) == "the disk is on fire"


@pytest.mark.parametrize("shard", [0, 1])
async def test_the_first_shard_removes_abandoned_snapshots(tmp_path: Path, facts: FactLog, shard: int) -> None:
    """Shard 0 removes snapshots whose lease has ended, and logs it."""
    config = dataclasses.replace(shard_config(tmp_path), shard=shard)
    files = SnapshotFiles(config.snapshots_path)
    part = ShardPart(shard=0, server_id="s", seq=1, epoch=0, step=-1, tables=(), files=())
    for name, lease_s in (("stays", 0), ("left", 60)):
        files.new_folder(name).mkdir(parents=True)
        files.publish(SnapshotManifest(name=name, created_us=1, parts=(part,), lease_s=lease_s))
        os.utime(files.folder_of(name), (0, 0))
    async with logged(tmp_path) as at:
        retention = LogRetention(at.log, cast("Any", SimpleNamespace(durable_seq=0)), at.followers, config)
        await retention.trim()
    left = [manifest.name for manifest in files.list()[0]]
    assert left == (["stays"] if shard == 0 else ["left", "stays"])
    logged_removals = [fact for fact in facts.facts if "nobody has read of it" in fact[0]]
    assert len(logged_removals) == (shard == 0)


async def test_a_snapshot_keeps_all_log_of_a_shard_that_is_younger(tmp_path: Path) -> None:
    """A copy made from a snapshot of fewer shards follows the others from their first record on."""
    publish(tmp_path, "first", seq=2)
    async with logged(tmp_path) as at:
        config = dataclasses.replace(shard_config(tmp_path), shard=1)
        retention = LogRetention(at.log, cast("Any", SimpleNamespace(durable_seq=12)), at.followers, config)
        await at.append(12)
        await retention.trim()
        assert at.log.first_seq == 1
        SnapshotFiles(tmp_path / "snapshots").remove("first")
        await retention.trim()
        assert at.log.first_seq > 8


async def test_what_a_standby_lacks_is_kept_within_the_bound(tmp_path: Path) -> None:
    """All log before the standby tells, then what it has not applied; beyond the bound the disk comes first."""
    config = dataclasses.replace(
        shard_config(tmp_path),
        log="nats://n",
        copies=((0, "127.0.0.1", 7001, "a"), (0, "127.0.0.2", 7002, "b"), (1, "127.0.0.2", 7003, "b")),
        addresses=(("127.0.0.1", 7001),),
    )
    membership = Membership(config, 1)
    (standby,) = membership.standbys
    assert standby.address == "127.0.0.2:7002"
    assert [lease.seq for lease in membership.standby_leases(3)] == [3]
    standby.applied_seq = 9
    assert [(lease.name, lease.seq) for lease in membership.standby_leases(3)] == [("standby 127.0.0.2:7002", 10)]
    async with logged(tmp_path) as it:
        await it.append(12)
        trim_log(it.log, 12, membership.standby_leases(1)[0].seq, config)
        assert it.log.first_seq == 10
