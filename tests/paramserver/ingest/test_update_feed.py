"""What one reply to a follower holds: within a frame, and all of the log over as many replies as it takes."""

from __future__ import annotations

from typing import Any

import pytest
from memory_update_log import MemoryUpdateLog

from headrace.paramserver.ingest import update_feed
from headrace.paramserver.ingest.update_feed import UpdateFeed
from headrace.paramserver.log.update_log import UpdateLogConfig
from headrace.schemas.idl import idl
from headrace.schemas.messages import REPLY, encode_message, size_of_segments

MAX_FRAME_BYTES = 1 << 16


async def _feed(bodies: list[bytes], *, num_tables: int = 1) -> UpdateFeed:
    """Return a feed of a log that has these bodies; each record names so many tables."""
    log = MemoryUpdateLog()
    header = {"kind": 1, "tables": [f"sparse.embedding_bag_{n:05d}.weight" for n in range(num_tables)]}
    for body in bodies:
        await log.append(epoch=1, header=header, body=[body]).durable
    return UpdateFeed(log, None, server_id="s", max_frame_bytes=MAX_FRAME_BYTES)  # type: ignore[arg-type]


async def _ask(feed: UpdateFeed, from_seq: int, *, offset: int = 0, max_bytes: int = 1 << 30) -> list[Any]:
    """Return the records of a reply, which is not longer than a frame."""
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
    """However long a record, and what it says of its tables, its parts add up to it, each in a frame."""
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


async def test_a_reply_has_so_many_records_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Very small records are counted, not only weighed: a decoder takes only so many."""
    monkeypatch.setattr(update_feed, "_MAX_RECORDS", 5)
    feed = await _feed([b"x"] * 12)
    assert [record.seq for record in await _ask(feed, 1)] == [1, 2, 3, 4, 5]
    assert [record.seq for record in await _ask(feed, 11)] == [11, 12]


async def test_a_reply_tells_its_last_record_and_the_one_before_it() -> None:
    """Each opening of the log tells its records by another mark; of what is not there, nothing is told."""
    log = MemoryUpdateLog(config=UpdateLogConfig(segment_bytes=4096))
    for _ in range(2):
        await log.append(epoch=1, header={"kind": 1}, body=[b"x"]).durable
    await log.close()
    log = log.reopen()
    for size in (1, 4000):  # the second begins another segment
        await log.append(epoch=1, header={"kind": 1}, body=[b"x" * size]).durable
    feed = UpdateFeed(log, None, server_id="s", max_frame_bytes=MAX_FRAME_BYTES)  # type: ignore[arg-type]
    first, _, third, fourth = (log.mark_of(seq) for seq in range(1, 5))
    assert first is not None and third is not None and fourth is not None and len({first, third, fourth}) == 3

    async def marks(from_seq: int, max_bytes: int) -> tuple[int | None, int | None]:
        request = idl.FetchUpdatesRequest(server_id="s", from_seq=from_seq, max_bytes=max_bytes, wait_ms=0)
        reply = await feed.fetch(request)
        return reply.mark_before, reply.mark

    assert await marks(1, 1 << 20) == (None, fourth)
    assert await marks(1, 1) == (None, first)
    assert await marks(3, 1) == (first, third)
    log.trim(3)
    assert await marks(3, 1 << 20) == (None, fourth)
