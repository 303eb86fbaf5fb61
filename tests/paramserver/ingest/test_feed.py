"""The update feed: replies within a frame, long polls, leases, and what ends a follower's position."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from held_ports import hold_ports
from memory_update_log import MemoryUpdateLog
from served_shard import SPEC, link_to, serving, values_of

from headrace.paramserver.ingest import feed as update_feed
from headrace.paramserver.ingest.feed import UpdateFeed
from headrace.paramserver.log.interface import UpdateLogConfig
from headrace.paramserver.reading.follower import ShardFollower
from headrace.schemas.errors import CorruptionError, GoneError, RequestError, SetBackError
from headrace.schemas.idl import idl
from headrace.schemas.messages import REPLY, encode_message, size_of_segments

WAIT_S = 60.0
MAX_FRAME_BYTES = 1 << 16


async def _feed(bodies: list[bytes], *, num_tables: int = 1) -> UpdateFeed:
    """Return a feed of a log with these bodies; each record names so many tables."""
    log = MemoryUpdateLog()
    header = {"kind": 1, "tables": [f"sparse.embedding_bag_{n:05d}.weight" for n in range(num_tables)]}
    for body in bodies:
        await log.append(epoch=1, header=header, body=[body]).durable
    return UpdateFeed(log, None, server_id="s", max_frame_bytes=MAX_FRAME_BYTES)  # type: ignore[arg-type]


async def _ask(feed: UpdateFeed, from_seq: int, *, offset: int = 0, max_bytes: int = 1 << 30) -> list[Any]:
    """Return the records of a reply, which must fit a frame."""
    request = idl.FetchUpdatesRequest(
        server_id="s", from_seq=from_seq, max_bytes=max_bytes, wait_ms=0, body_offset=offset or None
    )
    reply = await feed.fetch(request)
    result = idl.ParameterServer.fetchUpdates_result(success=reply)
    assert size_of_segments(encode_message("fetchUpdates", REPLY, 1, result)) <= MAX_FRAME_BYTES
    return list(reply.records)


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


async def test_the_number_of_records_in_a_reply_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Very small records are bounded by number, because a decoder accepts only so many."""
    monkeypatch.setattr(update_feed, "_MAX_RECORDS", 5)
    feed = await _feed([b"x"] * 12)
    assert [record.seq for record in await _ask(feed, 1)] == [1, 2, 3, 4, 5]
    assert [record.seq for record in await _ask(feed, 11)] == [11, 12]


async def test_a_reply_has_the_nonces_of_its_last_record_and_of_the_one_before_it() -> None:
    """Each opening of the log has another nonce; a record that is not there has none."""
    log = MemoryUpdateLog(config=UpdateLogConfig(segment_bytes=4096))
    for _ in range(2):
        await log.append(epoch=1, header={"kind": 1}, body=[b"x"]).durable
    await log.close()
    log = log.reopen()
    for size in (1, 4000):  # the second begins another segment
        await log.append(epoch=1, header={"kind": 1}, body=[b"x" * size]).durable
    feed = UpdateFeed(log, None, server_id="s", max_frame_bytes=MAX_FRAME_BYTES)  # type: ignore[arg-type]
    first, _, third, fourth = (log.nonce_of(seq) for seq in range(1, 5))
    assert first is not None and third is not None and fourth is not None and len({first, third, fourth}) == 3

    async def nonces(from_seq: int, max_bytes: int) -> tuple[int | None, int | None]:
        request = idl.FetchUpdatesRequest(server_id="s", from_seq=from_seq, max_bytes=max_bytes, wait_ms=0)
        reply = await feed.fetch(request)
        return reply.mark_before, reply.mark

    assert await nonces(1, 1 << 20) == (None, fourth)
    assert await nonces(1, 1) == (None, first)
    assert await nonces(3, 1) == (first, third)
    log.trim(3)
    assert await nonces(3, 1 << 20) == (None, fourth)


@pytest.mark.parametrize("is_readable", [True, False])
async def test_followers_that_ask_for_the_same_share_one_read(
    monkeypatch: pytest.MonkeyPatch, is_readable: bool
) -> None:
    """Each gets the records, or the error, also if one that asked gives up meanwhile; the next asks anew."""
    feed = await _feed([b"a", b"b", b"c"])
    reads: list[int] = []
    goes_on = threading.Event()
    read_log = update_feed._read

    def read(log: Any, from_seq: int, *more: int) -> list[Any]:
        reads.append(from_seq)
        assert goes_on.wait(WAIT_S)
        if not is_readable:
            raise CorruptionError("a record is damaged")
        return read_log(log, from_seq, *more)

    monkeypatch.setattr(update_feed, "_read", read)
    first, *others = [asyncio.create_task(_ask(feed, 2)) for _ in range(5)]
    other = asyncio.create_task(_ask(feed, 3))
    async with asyncio.timeout(WAIT_S):
        while len(reads) < 2:  # noqa: ASYNC110 (threads do it)
            await asyncio.sleep(0.001)
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


def fetch_request(from_seq: int, **changes: Any) -> Any:
    fields = {"server_id": "a-server", "max_bytes": 1 << 20, "wait_ms": 0} | changes
    return idl.FetchUpdatesRequest(from_seq=from_seq, **fields)


async def test_every_record_comes_once_and_in_order(tmp_path: Path) -> None:
    """A follower from seq 1 gets the hello with its tables, then each batch with the bytes that were written."""
    async with serving(tmp_path) as served:
        for i in range(1, 21):
            await served.write([i, i + 100], float(i))
        async with served.follow(max_bytes=600) as follower:
            updates = []
            while follower.next_seq <= 21:
                updates += await follower.fetch()
    assert [update.seq for update in updates] == list(range(1, 22))
    assert updates[0].kind == idl.UpdateKind.HELLO and updates[0].header["tables"][0][0] == SPEC.fqn
    assert {update.kind for update in updates[1:]} == {idl.UpdateKind.BATCH}
    assert [values_of(update.body) for update in updates[1:]] == [([i, i + 100], float(i)) for i in range(1, 21)]
    assert [update.header["step"] for update in updates[1:]] == list(range(1, 21))


async def test_a_long_poll_waits_for_the_next_record_and_blocks_nobody(tmp_path: Path) -> None:
    """A writer writes while a hundred followers wait; then all of them are answered."""
    async with serving(tmp_path) as served:
        request = fetch_request(2, wait_ms=60_000)
        waiting = [asyncio.create_task(served.client.fetch_updates(request)) for _ in range(100)]
        async with asyncio.timeout(WAIT_S):
            while served.shard.feed.num_waiting < 100:
                await served.client.status()
            assert not any(task.done() for task in waiting)
            await served.write([7], 1.0)
            for task in waiting:
                assert [record.seq for record in (await task).records] == [2]


async def test_a_long_poll_ends_without_a_record(tmp_path: Path) -> None:
    """After its wait, and when the shard drains, a follower gets an empty answer and keeps its position."""
    async with serving(tmp_path) as served, served.follow(2, wait_s=0.05) as follower:
        assert await follower.fetch() == [] and follower.next_seq == 2
        async with served.follow(2, wait_s=60.0) as patient:
            task = asyncio.create_task(patient.fetch())
            async with asyncio.timeout(WAIT_S):
                while not served.shard.feed.num_waiting:
                    await served.client.status()
                served.shard.begin_drain()
                assert await task == []


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


async def test_another_store_at_the_address_ends_the_position(tmp_path: Path) -> None:
    """A follower that meets another server id must start over."""
    port = hold_ports()
    async with serving(tmp_path / "a", port=port) as served:
        link = await link_to(port)
        follower = ShardFollower(link, from_seq=1, wait_s=0.0)
        await follower.fetch()
    async with serving(tmp_path / "b", port=port, server_id="another") as served:
        with pytest.raises(GoneError, match="another"):
            await follower.fetch()
        # The request's own field has the same effect without a hello on the connection.
        with pytest.raises(GoneError, match="this is store another, not a-server"):
            await served.client.fetch_updates(fetch_request(1))
        await link.close()


async def test_a_position_beyond_the_log_is_refused(tmp_path: Path) -> None:
    """A store that was set back with its log refuses positions that it does not have."""
    async with serving(tmp_path) as served:
        for i in range(3):
            await served.write([i], 1.0)
    shutil.rmtree(tmp_path)
    async with serving(tmp_path) as served:
        with pytest.raises(SetBackError, match="the log ends at seq 1, seq 3 is not in it"):
            await served.client.fetch_updates(fetch_request(4))


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


async def test_removed_records_are_gone(tmp_path: Path) -> None:
    """A follower that asks for trimmed records learns where the log begins."""
    async with serving(tmp_path, log_segment_bytes=1 << 20) as served:
        for i in range(8):
            await served.write(range(20_000), float(i))
        await served.shard.applied()
        served.shard.log.trim(9, max_bytes=1 << 20)
        first_seq = served.shard.log.first_seq
        assert first_seq > 1
        with pytest.raises(GoneError, match=f"begins at seq {first_seq}"):
            await served.client.fetch_updates(fetch_request(1))
        reply = await served.client.fetch_updates(fetch_request(first_seq))
        assert reply.records[0].seq == reply.first_seq == first_seq


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


async def test_a_record_larger_than_a_reply_comes_in_parts(tmp_path: Path) -> None:
    """A batch as long as the longest frame arrives whole, in replies of at most that length."""
    rows = list(range(2600))
    async with serving(tmp_path, max_frame_bytes=1 << 16) as served:
        await served.write(rows, 1.5)
        async with served.follow(2, max_bytes=10_000) as follower:
            (update,) = await follower.fetch()
    assert len(update.body) > 62_000 and values_of(update.body) == (rows, 1.5)


async def test_records_around_one_that_comes_in_parts(tmp_path: Path) -> None:
    """The last part of a record comes alone, so that the reply's nonce is the one of its segment."""
    sizes = [10, 40_000, 6_000, 10]
    async with serving(tmp_path, log_segment_bytes=1 << 20) as served:
        for i, size in enumerate(sizes):
            await served.write(range(size), float(i))
        log = served.shard.log
        assert log.nonce_of(3) != log.nonce_of(4)
        size_bytes = next(log.read(3)).body.nbytes
        reply = await served.client.fetch_updates(fetch_request(3, body_offset=size_bytes - 10))
        assert [record.seq for record in reply.records] == [3]
        async with served.follow(2, max_bytes=600_000) as follower:
            updates = []
            while follower.next_seq <= 5:
                updates += await follower.fetch()
    assert [values_of(update.body) for update in updates] == [(list(range(size)), i) for i, size in enumerate(sizes)]


async def test_a_bad_request_is_refused(tmp_path: Path) -> None:
    """A field out of range is an error that names it."""
    async with serving(tmp_path) as served:
        for change in ({"from_seq": 0}, {"max_bytes": 0}, {"wait_ms": -1}, {"body_offset": -1}):
            with pytest.raises(RequestError):
                await served.client.fetch_updates(fetch_request(**{"from_seq": 1} | change))
        with pytest.raises(RequestError, match="offset 99999"):
            await served.client.fetch_updates(fetch_request(1, body_offset=99_999))
