"""How long requests over a link are retried."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.paramserver.reading import link as shard_link
from headrace.paramserver.reading.link import Dial, ShardLink, retry
from headrace.paramserver.rpc.outages import OutageLog
from headrace.paramserver.rpc.resolver import Resolver
from headrace.paramserver.rpc.shard_places import ShardPlace, ShardPlaces
from headrace.schemas.errors import HeadraceError, UnavailableError

_AWAY, _SLOW, _ANSWERED = "away", "slow", "answered"


class _Client:
    """A connection whose calls each take some time on the test's clock, make progress or not, and end."""

    is_closed = False

    def __init__(self, clock: list[float], *calls: tuple[float, str]) -> None:
        self.clock, self.calls = clock, [*calls]
        self.moved_s = -math.inf

    async def fetch_snapshot(self, request: Any, *, timeout_s: float) -> str:
        took_s, end = self.calls.pop(0)
        self.clock[0] += took_s
        if end != _AWAY:
            self.moved_s = self.clock[0]
        if end != _ANSWERED:
            raise UnavailableError("the connection broke")
        return "a piece"

    async def close(self) -> None:
        """Stay open for the next call."""


@pytest.mark.parametrize(
    ("calls", "num_left"),
    [
        ([(0.0, _AWAY), (100.0, _SLOW), (100.0, _SLOW), (0.0, _AWAY), (5.0, _ANSWERED)], 0),
        ([(0.0, _AWAY), (10.1, _AWAY), (40.0, _SLOW), (30.0, _SLOW), (5.0, _ANSWERED)], 0),
        ([(0.0, _AWAY), *[(10.1, _AWAY)] * 6, (5.0, _ANSWERED)], 1),
        ([(0.0, _AWAY), (100.0, _SLOW), *[(10.1, _AWAY)] * 6, (5.0, _ANSWERED)], 1),
    ],
    ids=["slow", "slow at times", "away", "away at last"],
)
async def test_patience_is_for_a_shard_that_is_away(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[float, str]], num_left: int
) -> None:
    """Progress, however slow, resets the patience."""
    clock = [0.0]
    monkeypatch.setattr(shard_link, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(shard_link, "_FIRST_PAUSE_S", 1e-9)
    link = ShardLink(Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=10.0), "somewhere", 1)
    client: Any = _Client(clock, *calls)
    monkeypatch.setattr(link, "_client", client)
    try:
        piece = await retry(lambda: link.fetch_snapshot(None), patience_s=60.0, moved_s=lambda: link.pieces_moved_s)
        assert piece == "a piece"
    except HeadraceError as exc:
        assert num_left, exc
    assert len(client.calls) == num_left


class _Told:
    """A dial whose port 1 is a standby that knows where the shards are, at ports 2 and 3."""

    reach_log = OutageLog()

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def connect(self, host: str, port: int, **_: Any) -> Any:
        self.asked.append(port)
        shards = [SimpleNamespace(shard=shard, host=host, port=2 + shard, term=2, node=None) for shard in range(2)]
        hello = SimpleNamespace(server_id="ours", shard=port - 2, shards=shards, term=2)
        return SimpleNamespace(close=_nothing, is_closed=False), hello


async def _nothing() -> None:
    pass


async def test_a_new_client_at_a_standby_goes_where_the_standby_says() -> None:
    """A link to any shard, whose only address is a standby's, connects to a shard."""
    dial = _Told()
    link = ShardLink(cast("Dial", dial), "somewhere", 1)
    hello = await link._connected() and link.hello
    assert (hello.shard, link.port, dial.asked) == (0, 2, [1, 2])


async def test_a_standby_in_the_place_of_a_shard_tells_where_it_is() -> None:
    """A link whose shard's place is now a standby's learns the new place, and is connected there next."""
    dial = _Told()
    link = ShardLink(cast("Dial", dial), "somewhere", 1, SimpleNamespace(server_id="ours", shard=1))
    places = ShardPlaces("ours", [ShardPlace("somewhere", 9, 1), ShardPlace("somewhere", 1, 1)])

    async def ask(host: str, port: int) -> Any:
        return (await dial.connect(host, port))[1]

    link.resolver = Resolver(places, [], ask)
    with pytest.raises(UnavailableError, match="somewhere:1 is a standby"):
        await link._connected()
    assert places.addresses[1] == ("somewhere", 3)
    await link._connected()
    assert link.port == 3
