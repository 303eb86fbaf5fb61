"""What a follower knows of a shard that gives nothing new; what comes is tested in `test_fetch_updates.py`."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.paramserver.reading import follower
from headrace.paramserver.reading.follower import ShardFollower
from headrace.paramserver.reading.shard_link import Dial, ShardLink
from headrace.schemas.errors import HeadraceError, OverloadedError, SetBackError
from headrace.schemas.idl import idl


class _Link:
    """A shard that answers when the test lets it."""

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
    """Ask once more, and return what waits for the answer."""
    asking: asyncio.Task[Any] = asyncio.create_task(place.register())
    await asyncio.sleep(0)
    return asking


async def test_silence_is_counted_from_the_answer_that_is_owed_for_longest(clock: list[float]) -> None:
    """A later question hides no earlier one that has no answer; once all are answered nothing is owed."""
    link = _Link()
    place = ShardFollower(link, from_seq=1, name="replica")  # type: ignore[arg-type]
    assert place.silence(0.0) is None  # nothing was asked
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


async def test_a_long_answer_that_moves_on_is_no_silence(clock: list[float]) -> None:
    """It is counted from when it last moved on, and why the attempt before has failed is told."""
    link = _Link()
    place = ShardFollower(link, from_seq=1, name="replica")  # type: ignore[arg-type]
    asking = await _ask(place)
    clock[0] += 100.0
    link.moved_s = clock[0] - 60.0
    assert place.silence(60.0) is None
    clock[0] += 5.0
    link.failure = OverloadedError("too many requests")
    assert place.silence(60.0) == "10.0.0.7:7601 has not answered for 65 s: too many requests"
    asking.cancel()
    await asyncio.wait([asking])
    assert place.silence(60.0) is None


def test_a_message_moves_on_where_its_connection_does() -> None:
    """A shard's link tells of the connection there is; before there is one, nothing has moved."""
    link = ShardLink(Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=10.0), "somewhere", 1)
    assert link.moved_s == -math.inf
    link._client = SimpleNamespace(moved_s=1234.5)  # type: ignore[assignment]
    assert link.moved_s == 1234.5


async def test_a_server_that_is_set_back_before_anything_has_come_is_told() -> None:
    """Who begins at a place without knowing what is before it takes what the shard has there, and keeps to that."""
    link = _Link()
    link.may_answer.set()
    place = ShardFollower(link, from_seq=8)  # type: ignore[arg-type]
    link.mark_before = 5
    assert await place.fetch() == [] and place.mark == 5
    assert await place.fetch() == [] and place.mark == 5
    link.mark_before = 6
    with pytest.raises(SetBackError, match="record 7 is another than the one that was taken"):
        await place.fetch()
