"""A follower of a shard that is silent, or whose replies are wrong; `ingest/test_feed.py` follows real shards."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.paramserver.reading import follower
from headrace.paramserver.reading.follower import ShardFollower
from headrace.paramserver.reading.link import Dial, ShardLink
from headrace.schemas.errors import HeadraceError, ProtocolError, SetBackError
from headrace.schemas.idl import idl


class _Link:
    """A shard that answers when the test says so."""

    address = "10.0.0.7:7601"
    hello = SimpleNamespace(server_id="s")
    failure: HeadraceError | None = None
    moved_s = -math.inf

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.mark_before: int | None = None

    async def fetch_updates(self, _: Any) -> Any:
        await self.may_answer.wait()
        return idl.FetchUpdatesReply(records=[], first_seq=1, last_seq=0, mark_before=self.mark_before)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [1000.0]
    monkeypatch.setattr(follower, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


async def _ask(place: ShardFollower) -> asyncio.Task[Any]:
    """Send a request and return the task that waits for its reply."""
    asking: asyncio.Task[Any] = asyncio.create_task(place.register())
    await asyncio.sleep(0)
    return asking


async def test_silence_counts_from_the_oldest_unanswered_request(clock: list[float]) -> None:
    """A later request does not hide an earlier one; after all replies there is no silence."""
    link = _Link()
    place = ShardFollower(link, from_seq=1, name="replica")  # type: ignore[arg-type]
    assert place.silence(0.0) is None  # no request yet
    asking = [await _ask(place)]
    clock[0] += 50.0
    asking.append(await _ask(place))
    clock[0] += 10.0
    assert place.silence(60.0) is None
    clock[0] += 1.0
    assert place.silence(60.0) == "10.0.0.7:7601 has not answered for 61 s"
    link.may_answer.set()
    await asyncio.gather(*asking)
    clock[0] += 1000.0
    assert place.silence(60.0) is None


def test_a_link_reports_the_progress_of_its_connection() -> None:
    """Before the first connection there is no progress."""
    link = ShardLink(Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=10.0), "somewhere", 1)
    assert link.moved_s == -math.inf
    link._client = SimpleNamespace(moved_s=1234.5)  # type: ignore[assignment]
    assert link.moved_s == 1234.5


async def test_a_server_that_is_set_back_before_the_first_record_is_noticed() -> None:
    """A follower that starts without a mark adopts the shard's and compares later ones with it."""
    link = _Link()
    link.may_answer.set()
    place = ShardFollower(link, from_seq=8)  # type: ignore[arg-type]
    link.mark_before = 5
    assert await place.fetch() == [] and place.mark == 5
    assert await place.fetch() == [] and place.mark == 5
    link.mark_before = 6
    with pytest.raises(SetBackError, match="record 7 differs from the one that was taken"):
        await place.fetch()


def _record(seq: int, body: bytes = b"", **fields: Any) -> Any:
    return idl.UpdateRecord(seq=seq, epoch=1, kind=1, header=b"\x80", body=memoryview(body), **fields)


def _part(seq: int, body: bytes) -> Any:
    return _record(seq, body, body_size_bytes=6)


def _follower_of(*replies: Any) -> tuple[ShardFollower, list[int | None]]:
    """Return a follower that gets (records, fields of the reply) in turn, and the offsets that it asks for."""
    offsets: list[int | None] = []

    async def fetch_updates(request: Any) -> Any:
        records, fields = replies[len(offsets)]
        offsets.append(request.body_offset)
        return idl.FetchUpdatesReply(records=records, first_seq=1, last_seq=9, **fields)

    hello = idl.HelloReply(server_id="s")
    link: Any = SimpleNamespace(address="somewhere:1", hello=hello, fetch_updates=fetch_updates)
    return ShardFollower(link, from_seq=1), offsets


async def test_parts_of_two_records_are_not_mixed() -> None:
    """A server that is set back between two parts of a record does not yield a record of both."""
    follower, _ = _follower_of(([_part(1, b"abc")], {"mark": 7}), ([_part(1, b"abc")], {"mark": 8}))
    with pytest.raises(SetBackError, match="record 1 differs"):
        await follower.fetch()


async def test_the_last_part_of_a_record_may_bring_others() -> None:
    """Records after the last part have another mark, which is not taken for the part's."""
    last = [_part(1, b"def"), _part(2, b"ghi")]
    follower, _ = _follower_of(([_part(1, b"abc")], {"mark": 7}), (last, {"mark": 8}))
    (update,) = await follower.fetch()
    assert (update.body, follower.next_seq) == (b"abcdef", 2)


async def test_a_server_without_marks_is_followed() -> None:
    """A server from before marks existed is believed, and so is one that has removed the record before."""
    marks = [(None, 5), (None, None), (6, 6), (None, 7), (8, None)]
    replies = [([_record(seq)], {"mark_before": before, "mark": mark}) for seq, (before, mark) in enumerate(marks, 1)]
    follower, _ = _follower_of(*replies[:4], ([], replies[4][1]))
    for mark in (5, None, 6, 7):
        await follower.fetch()
        assert follower.mark == mark
    with pytest.raises(SetBackError, match="record 4 differs"):
        await follower.fetch()


async def test_a_gap_is_noticed() -> None:
    """A reply that skips a record is refused."""
    follower, _ = _follower_of(([_record(1), _record(3)], {}))
    with pytest.raises(ProtocolError, match="record 3 where 2 was expected"):
        await follower.fetch()
    assert follower.next_seq == 1


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ([_part(1, b"")], "do not fit together"),
        ([_part(1, b"defgh")], "do not fit together"),
        ([], "has not come"),
        ([_part(2, b"def")], "has not come"),
    ],
    ids=["an empty part", "too much", "no part", "of another record"],
)
async def test_an_incomplete_record_is_not_returned(second: list[Any], reason: str) -> None:
    """A shard that does not send the rest of a record is refused, and not asked forever."""
    follower, offsets = _follower_of(([_part(1, b"abc")], {}), (second, {}))
    with pytest.raises(ProtocolError, match=reason):
        await follower.fetch()
    assert (follower.next_seq, offsets) == (1, [None, 3])


@pytest.mark.parametrize("size_bytes", [-1, 2**30 + 1, 2**62])
async def test_a_record_of_an_impossible_size_takes_no_memory(size_bytes: int) -> None:
    """A shard that announces a body which no log can hold is refused."""
    follower, _ = _follower_of(([_record(1, b"abc", body_size_bytes=size_bytes)], {}), ([], {}))
    with pytest.raises(ProtocolError, match=f"record 1 of {size_bytes} bytes"):
        await follower.fetch()
