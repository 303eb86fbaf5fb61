"""The update feed: replies within a frame, long polls, leases, and what ends a follower's position."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from held_ports import hold_ports
from memory_update_log import MemoryUpdateLog
from served_shard import SPEC, link_to, serving, values_of
from set_embeddings import delta_of, request_of
from text_scripts import Script, scripts
from waiting import WAIT_S, until

from headrace.paramserver.ingest import feed as update_feed
from headrace.paramserver.ingest.feed import UpdateFeed
from headrace.paramserver.log.interface import LogRecord
from headrace.paramserver.reading.follower import ShardFollower
from headrace.paramserver.rpc.dispatch import Peer
from headrace.schemas.errors import CorruptionError, SetBackError
from headrace.schemas.idl import idl
from headrace.schemas.messages import REPLY, encode_message, size_of_segments

MAX_FRAME_BYTES = 1 << 16


async def _feed(bodies: list[bytes], *, num_tables: int = 1, log: MemoryUpdateLog | None = None) -> UpdateFeed:
    """Return a feed of a log with these bodies; each record names so many tables."""
    log = log or MemoryUpdateLog()
    header = {"kind": 1, "tables": [f"sparse.embedding_bag_{n:05d}.weight" for n in range(num_tables)]}
    for body in bodies:
        await log.append(epoch=1, header=header, body=[body]).durable
    ingest: Any = SimpleNamespace(end_seq=log.last_seq)
    return UpdateFeed(log, ingest, server_id="s", max_frame_bytes=MAX_FRAME_BYTES)


async def _ask(feed: UpdateFeed, from_seq: int, *, offset: int = 0, max_bytes: int = 1 << 30) -> list[Any]:
    """Return the records of a reply, which must fit a frame."""
    request = idl.FetchUpdatesRequest(
        server_id="s", from_seq=from_seq, max_bytes=max_bytes, wait_ms=0, body_offset=offset or None
    )
    reply = await feed.fetch(request, Peer("10.0.0.9:5000"))
    result = idl.ParameterServer.fetchUpdates_result(success=reply)
    assert size_of_segments(encode_message("fetchUpdates", REPLY, 1, result)) <= MAX_FRAME_BYTES
    return list(reply.records)


async def test_a_followers_leases_count_for_its_host() -> None:
    """However many leases one follower takes, by any names, those of followers elsewhere stay."""
    feed = await _feed([b"a", b"b"])
    fields = {"server_id": "s", "max_bytes": 1, "wait_ms": 0, "lease_ms": 60_000}
    await feed.fetch(idl.FetchUpdatesRequest(follower="replica", from_seq=1, **fields), Peer("10.0.0.1:5000"))
    for number in range(1050):
        request = idl.FetchUpdatesRequest(follower=f"many-{number}", from_seq=2, **fields)
        await feed.fetch(request, Peer(f"10.0.0.2:{number}"))
    assert {lease.name for lease in feed.followers.held() if lease.seq == 1} == {"replica"}


@pytest.mark.parametrize("max_bytes", [1, 10_000, 1 << 30])
@pytest.mark.parametrize("num_tables", [1, 1000])
async def test_every_record_comes_in_replies_of_a_frame(max_bytes: int, num_tables: int) -> None:
    """The parts of a record add up to it, each in a frame, however long the record and its header are."""
    sizes = [10, 200, 30_000, 30_000, 65_400, 0, 61_000] if max_bytes > 1 else [10, 0, 30]
    bodies = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    feed = await _feed(bodies, num_tables=num_tables)
    found: list[bytes] = []
    while len(found) < len(bodies):
        seq = len(found) + 1
        records = await _ask(feed, seq, max_bytes=max_bytes)
        assert [record.seq for record in records] == list(range(seq, seq + len(records)))
        for record in records:
            body = bytes(record.body)
            while len(body) < (record.body_size_bytes or 0):
                (part,) = (await _ask(feed, record.seq, offset=len(body), max_bytes=max_bytes))[:1]
                assert part.seq == record.seq and len(part.body)
                body += bytes(part.body)
            found.append(body)
    assert found == bodies


class Feed:
    """The feed of a log in memory, each opening of which begins a segment with another mark: `a`, `b`, …"""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch, self._log, self._marks = patch, MemoryUpdateLog(), list[int]()
        self._open()

    def _open(self) -> None:
        self._feed = UpdateFeed(self._log, self, server_id="s", max_frame_bytes=MAX_FRAME_BYTES)

    @property
    def end_seq(self) -> int:
        return self._log.last_seq

    async def wait_durable(self, seq: int) -> None:
        await asyncio.Event().wait()

    async def reopen(self) -> None:
        await self._log.close()
        self._log = self._log.reopen()
        self._open()

    async def append(self, sizes: int | list[int]) -> None:
        """Append records with bodies of these sizes."""
        for size in [sizes] if isinstance(sizes, int) else sizes:
            await self._log.append(epoch=1, header={"kind": 1}, body=[bytes(size)]).durable

    def trim(self, seq: int) -> None:
        self._log.trim(seq)

    def most(self, number: int) -> None:
        """Let a reply have at most so many records."""
        self._patch.setattr(update_feed, "_MAX_RECORDS", number)

    async def fetch(self, from_seq: int, *, offset: int | None = None, **fields: Any) -> str:
        fields = {"server_id": "s", "max_bytes": 1 << 20, "wait_ms": 0} | fields
        request = idl.FetchUpdatesRequest(from_seq=from_seq, body_offset=offset, **fields)
        reply = await self._feed.fetch(request, Peer("10.0.0.9:5000"))
        result = idl.ParameterServer.fetchUpdates_result(success=reply)
        assert size_of_segments(encode_message("fetchUpdates", REPLY, 1, result)) <= MAX_FRAME_BYTES
        records = [
            f"{each.seq}" + (f" ({len(each.body)} of {each.body_size_bytes})" if each.body_size_bytes else "")
            for each in reply.records
        ]
        marks = f"marks {self._name_of(reply.mark_before)} {self._name_of(reply.mark)}"
        return f"{', '.join(records) or 'none'} in {reply.first_seq}..{reply.last_seq}, {marks}"

    def _name_of(self, mark: int | None) -> str:
        if mark is None:
            return "-"
        if mark not in self._marks:
            self._marks.append(mark)
        return "abcdef"[self._marks.index(mark)]

    async def poll(self, from_seq: int) -> None:
        """Begin to wait for a record."""
        self._polling = asyncio.create_task(self.fetch(from_seq, wait_ms=60_000))
        await until(lambda: self._feed.num_waiting)

    def drain(self) -> None:
        self._feed.stop()

    async def polled(self) -> str:
        return await self._polling


@scripts(__file__, "feed")
async def test_feed(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """What followers get from a place in a log, and which places end theirs."""
    await script.run_async(Feed(monkeypatch))


@pytest.mark.parametrize("is_readable", [True, False])
async def test_followers_that_ask_for_the_same_share_one_read(is_readable: bool) -> None:
    """Each gets the records, or the error, also if one that asked gives up meanwhile; the next asks anew."""
    reads: list[int] = []
    goes_on = threading.Event()

    class SlowLog(MemoryUpdateLog):
        def read(self, from_seq: int, *, past_cache: bool = False) -> Iterator[LogRecord]:
            reads.append(from_seq)
            assert goes_on.wait(WAIT_S)
            if not is_readable:
                raise CorruptionError("a record is damaged")
            return super().read(from_seq, past_cache=past_cache)

    feed = await _feed([b"a", b"b", b"c"], log=SlowLog())
    first, *others = [asyncio.create_task(_ask(feed, 2)) for _ in range(5)]
    other = asyncio.create_task(_ask(feed, 3))
    await until(lambda: len(reads) == 2)
    first.cancel()
    goes_on.set()
    results = await asyncio.gather(first, *others, other, return_exceptions=True)
    assert isinstance(results.pop(0), asyncio.CancelledError)
    assert sorted(reads) == [2, 3]
    if is_readable:
        assert [[bytes(record.body) for record in records] for records in results] == [[b"b", b"c"]] * 4 + [[b"c"]]
        assert len(await _ask(feed, 2)) == 2
        assert sorted(reads) == [2, 2, 3]
    else:
        assert all(isinstance(result, CorruptionError) for result in results)


async def test_a_long_poll_waits_for_the_next_record_and_blocks_nobody(tmp_path: Path) -> None:
    """A writer writes while a hundred followers wait; then all of them are answered."""
    async with serving(tmp_path) as served:
        request = idl.FetchUpdatesRequest(server_id="a-server", from_seq=2, max_bytes=1 << 20, wait_ms=60_000)
        waiting = [asyncio.create_task(served.client.fetch_updates(request)) for _ in range(100)]
        async with asyncio.timeout(WAIT_S):
            while served.shard.feed.num_waiting < 100:
                await served.client.status()
            assert not any(task.done() for task in waiting)
            await served.write([7], 1.0)
            for task in waiting:
                assert [record.seq for record in (await task).records] == [2]


async def test_status_tells_how_far_each_follower_is_behind(tmp_path: Path) -> None:
    """A follower that lacks nothing is current; another lacks as many records, as old as the first one's oldest update.

    One that has gone is not told, nor is a client that only looks at a record. A standby's place is told by the owner.
    """
    async with serving(tmp_path) as served:

        async def behind() -> list[tuple[str, int]]:
            followers = (await served.client.status()).followers
            return [(follower.name, follower.records_behind) for follower in followers]

        async with served.follow(name="fast") as fast, served.follow(name="slow") as slow:
            assert len(await slow.fetch()) == 1
            slow.let_go()  # of the lease: it has been told its name
            assert len(await fast.fetch()) == 1
            waiting = asyncio.create_task(fast.fetch())
            async with asyncio.timeout(WAIT_S):
                while await behind() != [("slow", 1), ("fast", 0)]:
                    pass
            now_us = time.time_ns() // 1000
            times = {"time_us": now_us, "oldest_us": now_us - 500_000_000}
            await served.client.set_embeddings(request_of(delta_of(SPEC, [1], 1.0), **times))
            assert [update.seq for update in await waiting] == [2]
            look = idl.FetchUpdatesRequest(server_id="a-server", from_seq=1, max_bytes=1, wait_ms=0)
            await served.client.fetch_updates(look)
            first, second = (await served.client.status()).followers
            assert (first.name, first.records_behind, second.name, second.records_behind) == ("slow", 2, "fast", 1)
            with_standby = await served.shard.feed.followers_status([("10.0.0.5:7601", 1)])
            assert {(each.name, each.address, each.records_behind) for each in with_standby} == {
                ("standby", "10.0.0.5:7601", 1),
                *((each.name, each.address, each.records_behind) for each in (first, second)),
            }
            # The hello before has no rows, so both lack the same update.
            assert 500 <= first.age_s < 500 + WAIT_S and 500 <= second.age_s < 500 + WAIT_S
        async with asyncio.timeout(WAIT_S):
            while await behind():
                pass


async def test_a_follower_goes_on_after_the_shard_was_restarted(tmp_path: Path) -> None:
    """It reconnects and gets the next record, nothing twice."""
    port = hold_ports()
    async with serving(tmp_path, port=port) as served:
        link = await link_to(port)
        follower = ShardFollower(link, from_seq=1, wait_s=1.0)
        await served.write([1], 1.0)
        assert [update.seq for update in await follower.fetch()] == [1, 2]
    async with serving(tmp_path, port=port, client_seq=1) as served:
        await served.write([2], 2.0)
        async with asyncio.timeout(WAIT_S):
            assert [values_of(update.body) for update in await follower.fetch()] == [([2], 2.0)]
        await link.close()


@asynccontextmanager
async def _set_back(directory: Path, *, num_taken: int, num_written: int) -> AsyncIterator[ShardFollower]:
    """Yield a follower that has taken `num_taken` of four records of a store, set back to three plus other ones."""
    data, older, port = directory / "data", directory / "older", hold_ports()
    async with serving(data) as served:
        for row in (1, 2):
            await served.write([row], 1.0)
    shutil.copytree(data, older)
    async with serving(data, port=port, client_seq=2) as served:
        await served.write([3], 1.0)
        link = await link_to(port)
        follower = ShardFollower(link, from_seq=num_taken, name="replica", wait_s=0.0, max_bytes=1)
        assert [update.seq for update in await follower.fetch()] == [num_taken]
    shutil.rmtree(data)
    shutil.copytree(older, data)
    async with serving(data, port=port, client_seq=2) as served:
        for row in range(num_written):
            await served.write([row + 10], 2.0)
        try:
            yield follower
        finally:
            await link.close()


@pytest.mark.parametrize("num_written", [0, 1, 5], ids=["its log ends before", "at the place", "beyond it"])
async def test_a_place_in_a_log_that_was_set_back_is_gone(tmp_path: Path, num_written: int) -> None:
    """A follower whose last record is not in the log is refused, however far the log has gone on since."""
    async with _set_back(tmp_path, num_taken=4, num_written=num_written) as follower:
        for ask in (follower.fetch, follower.register):
            with pytest.raises(SetBackError, match="start over"):
                await ask()
        assert follower.next_seq == 5


async def test_a_place_that_is_in_the_older_copy_too_goes_on(tmp_path: Path) -> None:
    """A follower that was not beyond the older copy has lost nothing, and gets the next record."""
    async with _set_back(tmp_path, num_taken=3, num_written=1) as follower:
        (update,) = await follower.fetch()
        assert (update.seq, values_of(update.body)) == (4, ([10], 2.0))
        assert await follower.fetch() == []


async def test_copies_of_one_name_hold_the_log_each_for_itself(tmp_path: Path) -> None:
    """Of two replicas with one name, the fast one does not cost the slow one its log."""
    async with (
        serving(tmp_path, log_segment_bytes=1 << 20, log_retention_bytes=1 << 20) as served,
        served.follow(2, name="replica", copy_id="slow") as slow,
        served.follow(name="replica", copy_id="fast", max_bytes=1 << 24) as fast,
        served.follow(9, name="replica") as other,
    ):
        for i in range(8):
            await served.write(range(20_000), float(i))
        await slow.register()
        while fast.next_seq <= 9:
            await fast.fetch()
        await fast.register()
        await other.register()  # an old version, without copy ids
        await served.shard.applied()
        await asyncio.to_thread(served.shard.store.flush)
        await served.shard._retention.trim()
        assert [lease.seq for lease in served.shard.feed.followers.held()] == [2, 10, 9]
        assert (await slow.fetch())[0].seq == 2
