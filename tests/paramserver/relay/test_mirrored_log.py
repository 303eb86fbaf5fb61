"""A mirror and its disk: followers are ahead of a slow one, and a full one stops nothing for good."""

from __future__ import annotations

import asyncio
import errno
import functools
import shutil
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from held_ports import hold_ports
from mirrored_shard import address_of, assert_mirrored, facts_of, following, take, wait_for_seq
from relays import relay_of, until
from served_shard import link_to, serving

from headrace.paramserver.log.mirror import LogMirror
from headrace.paramserver.log.segments import FileOps
from headrace.paramserver.reading.follower import ShardFollower
from headrace.paramserver.relay import mirrored_log
from headrace.paramserver.relay.runner import RelayProcess
from headrace.paramserver.system import durable
from headrace.paramserver.system.direct_file import BLOCK_BYTES
from headrace.schemas.errors import GoneError, HeadraceError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.messages import Segment

WAIT_S = 60.0


class RelayDisk(FileOps):
    """The disk of a relay's mirrors.

    Attributes:
        goes_on: Cleared, it holds every write of a log back until it is set.
        is_full: It takes no more blocks for a log.
        refuses_files: It takes no other files either.
    """

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.is_full = self.refuses_files = False

    def pwritev(self, fd: int, buffers: Sequence[Segment], offset: int) -> int:
        # A seal fits where reserved blocks were given back.
        self._check(is_refused=self.is_full and sum(len(buffer) for buffer in buffers) >= BLOCK_BYTES)
        return super().pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, size_bytes: int) -> None:
        self._check(is_refused=self.is_full)
        super().allocate(fd, offset, size_bytes)

    def write_file(self, path: Path, content: bytes) -> None:
        self._check(is_refused=self.refuses_files)
        durable.write_file(path, content)

    def _check(self, *, is_refused: bool) -> None:
        assert self.goes_on.wait(WAIT_S), "the disk never went on"
        if is_refused:
            raise OSError(errno.ENOSPC, "No space left on device")


@asynccontextmanager
async def relay_on(disk: RelayDisk, server: str, data: Path, port: int = 0) -> AsyncIterator[tuple[str, RelayProcess]]:
    """Run a relay on a disk; it goes on when the relay ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirrored_log.LogMirror, "open", functools.partial(LogMirror.open, ops=disk))
        patch.setattr(mirrored_log, "write_file", disk.write_file)
        async with relay_of(server, data, port=port) as running:
            try:
                yield running
            finally:
                disk.goes_on.set()
                disk.is_full = disk.refuses_files = False


@pytest.mark.parametrize("then", ["the shard goes on", "the shard comes back", "the shard was set back"])
async def test_a_killed_relay_gives_followers_no_other_history(tmp_path: Path, then: str) -> None:
    """Followers get records before the relay's disk has them; what a kill takes from the relay comes again, or is told.

    The follower has all that it was given, once and in order; only where the shard itself was set back it starts over.
    """
    data, older, killed = tmp_path / "data", tmp_path / "older", tmp_path / "killed"
    port, relay_port = hold_ports(), hold_ports()
    async with serving(data, port=port) as served:
        await served.write([1], 1.0)
    shutil.copytree(data, older)
    disk = RelayDisk()
    async with serving(data, port=port, client_seq=1) as served:
        async with relay_on(disk, address_of(served), tmp_path / "relay", relay_port) as (_, relay):
            link = await link_to(relay_port)
            follower = ShardFollower(link, from_seq=1, wait_s=1.0)
            durable_seq = served.shard.log.last_seq
            updates = await take(follower, durable_seq)
            log = relay.mirrors[0].log
            assert log is not None
            await until(lambda: log.durable_seq == durable_seq)
            disk.goes_on.clear()
            for row in (2, 3):
                await served.write([row], 2.0)
            updates += await take(follower, durable_seq + 2)
            assert log.durable_seq == durable_seq and log.pending_bytes > 0
            shutil.copytree(tmp_path / "relay", killed)
        if then == "the shard goes on":
            async with relay_of(address_of(served), killed, port=relay_port) as (_, relay):
                await served.write([4], 3.0)
                updates += await take(follower, durable_seq + 3)
                assert_mirrored(relay, served.shard)
                assert facts_of(updates) == facts_of(served.shard.log.read(1))
    if then == "the shard was set back":
        shutil.rmtree(data)
        shutil.copytree(older, data)
    if then != "the shard goes on":
        async with relay_of(f"127.0.0.1:{port}", killed, port=relay_port) as (address, relay):
            async with following(address) as late:
                assert facts_of(await take(late, durable_seq)) == facts_of(updates[:durable_seq])
            request = idl.FetchUpdatesRequest(server_id="a-server", from_seq=follower.next_seq, max_bytes=1, wait_ms=0)
            with pytest.raises(UnavailableError, match=f"does not have seq {durable_seq + 2} yet"):
                await link.fetch_updates(request)
            async with serving(data, port=port, client_seq=3 if then == "the shard comes back" else 1) as served:
                for row in (4, 5, 6, 7):
                    await served.write([row], 3.0)
                if then == "the shard comes back":
                    updates += await take(follower, served.shard.log.last_seq)
                    assert facts_of(updates) == facts_of(served.shard.log.read(1))
                else:
                    with pytest.raises(GoneError, match="start over"):
                        await take(follower, served.shard.log.last_seq + 1)
                await wait_for_seq(relay, served.shard.log.last_seq)
                assert_mirrored(relay, served.shard)
    await link.close()


@pytest.mark.parametrize("refuses_files", [True, False], ids=["it takes nothing", "it takes small files"])
async def test_a_full_disk_is_told_and_overcome(tmp_path: Path, refuses_files: bool) -> None:
    """With a full disk the relay serves what it has, says why it has no more, and goes on when there is room."""
    disk = RelayDisk()
    async with (
        serving(tmp_path / "shard") as served,
        relay_on(disk, address_of(served), tmp_path / "relay") as (address, relay),
        following(address, wait_s=1.0) as follower,
    ):
        await served.write([1], 1.0)
        mirror = relay.mirrors[0]
        await until(lambda: mirror.log is not None and mirror.log.durable_seq == 2)
        updates = await take(follower, 2)
        disk.is_full, disk.refuses_files = True, refuses_files
        await served.write([2], 2.0)
        await until(lambda: mirror.failure is not None and mirror.lag_s > 0)
        failed = mirror.log
        if not refuses_files:  # it opens the log again, and fails again
            await until(lambda: mirror.log not in (None, failed))
        link = await link_to(int(address.rpartition(":")[2]))
        async with following(address, wait_s=0.0) as late:
            assert facts_of(await take(late, 2))[:2] == facts_of(updates)
        assert "its disk failed: " in (await link.status()).relay.failure
        assert (mirror.log is failed) == refuses_files
        await link.close()
        disk.is_full = disk.refuses_files = False
        await served.write([3], 3.0)
        updates += await take(follower, 4)
        await until(lambda: mirror.failure is None and mirror.lag_s == 0)
        assert_mirrored(relay, served.shard)
        assert facts_of(updates) == facts_of(served.shard.log.read(1))
        assert mirror.num_restarts == 0


async def test_a_record_that_the_disk_has_altered_is_not_served(tmp_path: Path) -> None:
    """A follower that needs it gets an error, whose file the relay's log names; those behind it go on."""
    async with serving(tmp_path / "shard") as served:
        for row in range(3):
            await served.write([row], 1.0)
        async with relay_of(address_of(served), tmp_path / "relay") as (_, relay):
            await wait_for_seq(relay, 4)
        (segment,) = (tmp_path / "relay").rglob("*.hrlog")
        content = bytearray(segment.read_bytes())
        content[len(content) // 2] ^= 1
        segment.write_bytes(content)
        async with (
            relay_of(address_of(served), tmp_path / "relay") as (address, _),
            following(address) as follower,
            following(address, 5) as behind,
        ):
            with pytest.raises(HeadraceError, match="its log names the file"):
                await take(follower, 4)
            await served.write([5], 2.0)
            assert facts_of(await take(behind, 5)) == facts_of(served.shard.log.read(5))


async def test_what_a_slow_disk_lacks_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk takes nothing, the relay fetches only as much as it may hold in memory; then it catches up."""
    monkeypatch.setattr("headrace.paramserver.relay.shard_mirror._MAX_PENDING_BYTES", 1 << 20)
    monkeypatch.setattr("headrace.paramserver.relay.shard_mirror._FETCH_BYTES", 1 << 20)
    disk = RelayDisk()
    async with (
        serving(tmp_path / "shard") as served,
        relay_on(disk, address_of(served), tmp_path / "relay") as (_, relay),
    ):
        await served.write([1], 1.0)
        log = relay.mirrors[0].log
        assert log is not None
        await until(lambda: log.durable_seq == 2)
        disk.goes_on.clear()
        for i in range(10):
            await served.write(range(20_000), float(i))
        await until(lambda: log.pending_bytes > 1 << 20)
        with pytest.raises(TimeoutError):  # the next fetch would be answered at once
            await asyncio.wait_for(log.wait_durable(served.shard.log.last_seq), 1.0)
        assert log.pending_bytes < 3 << 20
        disk.goes_on.set()
        await wait_for_seq(relay, served.shard.log.last_seq)
        assert_mirrored(relay, served.shard)
