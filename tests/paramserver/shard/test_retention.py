"""Log retention, with a fake store and a clock that stands still."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fact_log import FactLog, collect_facts
from memory_update_log import MemoryUpdateLog
from text_scripts import Script, scripts
from waiting import WAIT_S

from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.ingest.feed import UpdateFeed
from headrace.paramserver.log.interface import UpdateLogConfig
from headrace.paramserver.log.leases import LogLeases
from headrace.paramserver.rpc.dispatch import Peer
from headrace.paramserver.shard.membership import Membership
from headrace.paramserver.shard.retention import LogRetention, trim_log
from headrace.paramserver.snapshots.directory import SnapshotFiles
from headrace.schemas.errors import GoneError, StorageError
from headrace.schemas.idl import idl
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest

RECORD_BYTES = 1 << 18
BROKEN = "log was removed that is still needed: --log-hold-bytes was reached"


@pytest.fixture
def facts() -> Iterator[FactLog]:
    yield from collect_facts("headrace.paramserver.shard.retention")


def shard_config(folder: Path) -> ShardConfig:
    """Return the config of a shard that keeps four records, or sixteen while somebody needs them."""
    config = ShardConfig(directory=folder / "shard-0000", shard=0, server_id="s", addresses=(("h", 1),))
    return dataclasses.replace(config, log_retention_bytes=4 * RECORD_BYTES, log_hold_bytes=16 * RECORD_BYTES)


class Logged:
    """A log with one record a segment, and its retention."""

    def __init__(self, folder: Path, log: MemoryUpdateLog, facts: FactLog) -> None:
        self.log, self.facts, self._folder, self.config = log, facts, folder, shard_config(folder)
        self.config.directory.mkdir()
        self.now_s = 0.0
        self.sleeps: asyncio.Queue[tuple[float, asyncio.Future[None]]] = asyncio.Queue()
        self._store = SimpleNamespace(durable_seq=0)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Logged:
        self.followers = LogLeases(clock=lambda: self.now_s)
        clocks: Any = {"clock": lambda: self.now_s, "sleep": self._sleep}
        retention = LogRetention(self.log, cast("Any", self._store), self.followers, self.config, **clocks)
        self.retention = await self._stack.enter_async_context(retention)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        await self.log.close()

    async def _sleep(self, duration_s: float) -> None:
        self.sleeps.put_nowait((duration_s, turn := asyncio.get_running_loop().create_future()))
        await turn

    async def pass_time(self, more_s: float) -> None:
        """Let retention's next sleep take this much longer, and return when it sleeps again."""
        duration_s, turn = await asyncio.wait_for(self.sleeps.get(), WAIT_S)
        self.now_s += duration_s + more_s
        turn.set_result(None)
        self.sleeps.put_nowait(await asyncio.wait_for(self.sleeps.get(), WAIT_S))

    async def restart(self, *, hold: int = 16) -> str:
        """Start again, with this bound."""
        await self._stack.aclose()
        self.config = dataclasses.replace(self.config, log_hold_bytes=hold * RECORD_BYTES)
        await self.__aenter__()
        return self._told()

    async def append(self, num_records: int, *, stored: int | None = None) -> None:
        """Append records that the store has, up to `stored`."""
        for _ in range(num_records):
            await self.log.append(epoch=1, header={}, body=[bytes(RECORD_BYTES)]).durable
        self._store.durable_seq = self.log.last_seq if stored is None else stored

    def lease(self, name: str, seq: int, seconds: int) -> None:
        self.followers.renew(name, seq, float(seconds))

    def cut(self, snapshot: str, seq: int, seconds: int) -> None:
        """Begin to make a snapshot, which needs log from a record on."""
        self.retention.snapshot_leases.renew(snapshot, seq, float(seconds))

    def publish(self, name: str, seq: int, *, created_us: int = 1, server_id: str = "s") -> None:
        """Publish a snapshot of one shard without files."""
        files = SnapshotFiles(self._folder / "snapshots")
        files.new_folder(name).mkdir(parents=True)
        part = ShardPart(shard=0, server_id=server_id, seq=seq, epoch=1, step=1, tables=(), files=())
        files.publish(SnapshotManifest(name=name, created_us=created_us, parts=(part,)))

    def unpublish(self, name: str) -> None:
        SnapshotFiles(self._folder / "snapshots").remove(name)

    def clock(self, seconds: int) -> None:
        self.now_s = float(seconds)

    async def trim(self) -> str:
        await self.retention.trim()
        return self._told()

    async def free(self) -> str:
        """Remove what nobody needs: the disk has little room."""
        await self.retention.free_unneeded()
        return self._told()

    def _told(self) -> str:
        """Tell where the log begins, and who has lost some of it, as was logged and counted."""
        facts, self.facts.facts = self.facts.facts, []
        assert {message for message, _ in facts} <= {BROKEN}
        assert {fields["first_seq"] for _, fields in facts} <= {self.log.first_seq}
        lost = [f"lost to {fields['needed_by']} from {fields['from_seq']}" for _, fields in facts]
        return ", ".join([f"log from {self.log.first_seq}, {self.retention.num_broken} broken", *lost])


@pytest.fixture
async def it(tmp_path: Path, facts: FactLog) -> AsyncIterator[Logged]:
    async with Logged(tmp_path, MemoryUpdateLog(config=UpdateLogConfig(segment_bytes=RECORD_BYTES)), facts) as made:
        yield made


@scripts(__file__, "retention")
async def test_retention(script: Script, it: Logged) -> None:
    """Log goes that nobody needs, and beyond the bound what somebody needs, which is logged."""
    await script.run_async(it)


async def test_after_a_pause_of_the_process_the_log_is_kept(it: Logged) -> None:
    """A long pause counts like a start; a loop that is a little late does not."""
    it.followers.renew("replica", 4, 60.0)
    await it.append(12)
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


class SlowLog(MemoryUpdateLog):
    """A log whose removal takes until the test allows it."""

    def __init__(self) -> None:
        super().__init__(config=UpdateLogConfig(segment_bytes=RECORD_BYTES))
        self.removing, self.may_remove = threading.Event(), threading.Event()
        self.may_remove.set()

    def trim(self, before_seq: int, **bounds: Any) -> int:
        self.removing.set()
        assert self.may_remove.wait(WAIT_S)
        return super().trim(before_seq, **bounds)


async def test_a_lease_on_records_being_removed_is_refused(tmp_path: Path, facts: FactLog) -> None:
    """A request during the removal learns that the log is gone."""
    log = SlowLog()
    async with Logged(tmp_path, log, facts) as it:
        await it.append(12)
        log.removing.clear()
        log.may_remove.clear()
        feed = UpdateFeed(it.log, cast("Any", SimpleNamespace(end_seq=12)), server_id="s", max_frame_bytes=1 << 20)
        feed.followers = it.followers
        trimming = asyncio.create_task(it.retention.trim())
        assert await asyncio.to_thread(log.removing.wait, WAIT_S)
        request = idl.FetchUpdatesRequest(
            server_id="s", from_seq=2, max_bytes=1, wait_ms=0, follower="replica", lease_ms=60_000
        )
        asking = asyncio.create_task(feed.fetch(request, Peer("10.0.0.1:5000")))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not asking.done()
        log.may_remove.set()
        await trimming
        with pytest.raises(GoneError, match="seq 2 has been removed"):
            await asking


async def test_a_failure_ends_the_shard(it: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed removal ends the shard, because the disk would fill up."""

    def fail(*_: Any, **__: Any) -> int:
        raise StorageError("the disk is on fire")

    async with asyncio.timeout(WAIT_S):
        monkeypatch.setattr(it.log, "trim", fail)
        _, turn = await it.sleeps.get()
        turn.set_result(None)
        assert str(await it.retention.wait_failed()) == "the disk is on fire"


@pytest.mark.parametrize("shard", [0, 1])
async def test_the_first_shard_removes_abandoned_snapshots(
    it: Logged, tmp_path: Path, facts: FactLog, shard: int
) -> None:
    """Shard 0 removes snapshots whose lease has ended, and logs it."""
    config = dataclasses.replace(shard_config(tmp_path), shard=shard)
    files = SnapshotFiles(config.snapshots_path)
    parts = tuple(ShardPart(shard=each, server_id="s", seq=1, epoch=0, step=-1, tables=(), files=()) for each in (0, 1))
    for name, lease_s in (("stays", 0), ("left", 60)):
        files.new_folder(name).mkdir(parents=True)
        files.publish(SnapshotManifest(name=name, created_us=1, parts=parts, lease_s=lease_s))
        os.utime(files.folder_of(name), (0, 0))
    await LogRetention(it.log, cast("Any", SimpleNamespace(durable_seq=0)), it.followers, config).trim()
    left = [manifest.name for manifest in files.list()[0]]
    assert left == (["stays"] if shard == 0 else ["left", "stays"])
    logged_removals = [fact for fact in facts.facts if "nobody has read of it" in fact[0]]
    assert len(logged_removals) == (shard == 0)


async def test_a_snapshot_of_fewer_shards_keeps_no_log(it: Logged, facts: FactLog) -> None:
    """It is no copy of this shard's rows: it is logged, and does not end the shard."""
    it.config = dataclasses.replace(it.config, shard=1)
    await it.restart()
    it.publish("small", 1)
    await it.append(12)
    await it.retention.trim()
    assert (it.log.first_seq, it.retention.num_broken) == (10, 0)
    assert ("the newest snapshot lacks this shard; no log is kept for it", {"name": "small"}) in facts.facts


async def test_what_a_standby_lacks_is_kept_within_the_bound(it: Logged, tmp_path: Path) -> None:
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
    await it.append(12)
    trim_log(it.log, 12, membership.standby_leases(1)[0].seq, config)
    assert it.log.first_seq == 10
