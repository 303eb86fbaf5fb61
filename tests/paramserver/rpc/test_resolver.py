"""Finding shards again: whom a client asks, how often, and what it believes."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.paramserver.rpc import resolver as resolver_module
from headrace.paramserver.rpc.resolver import Resolver
from headrace.paramserver.rpc.shard_places import ShardPlace, ShardPlaces
from headrace.schemas.errors import UnavailableError
from headrace.schemas.idl import idl


class _Cluster:
    """Shards at addresses that know where all shards are; those that are away do not answer, others may hang."""

    def __init__(self, num_shards: int) -> None:
        self.places = {shard: (f"h{shard}", 7601, 1) for shard in range(num_shards)}
        self.away: set[str] = set()
        self.hangs: set[str] = set()
        self.asked: list[str] = []

    async def ask(self, host: str, port: int) -> Any:
        self.asked.append(host)
        await asyncio.sleep(0)
        if host in self.hangs:
            await asyncio.Event().wait()
        shards = [shard for shard, (at, _, _) in self.places.items() if at == host]
        if host in self.away or not shards:
            raise UnavailableError(f"{host} is away")
        told = [idl.ShardAddress(shard=n, host=h, port=p, term=t) for n, (h, p, t) in sorted(self.places.items())]
        return idl.HelloReply(server_id="s", shard=shards[0], shards=told, term=self.places[shards[0]][2])

    def resolver(self, *seeds: str, **more: Any) -> Resolver:
        places = (ShardPlace(host, port, term) for host, port, term in self.places.values())
        return Resolver(ShardPlaces("s", places), [(seed, 7601) for seed in seeds], self.ask, **more)


async def test_where_shards_are_found() -> None:
    """One shard that is still where it was tells where the others are now; else an address that the user gave, or one
    at which a lost shard may have been opened since."""
    cluster = _Cluster(3)
    resolver = cluster.resolver()
    cluster.places[1] = ("new", 7700, 2)
    cluster.away = {"h2"}
    await resolver.refresh()
    assert resolver.places[1].address == ("new", 7700)
    cluster = _Cluster(2)
    resolver = cluster.resolver("gate", "h9")
    cluster.places = {0: ("gate", 7601, 2), 1: ("h9", 7601, 2)}
    await resolver.refresh()
    assert resolver.places.addresses == [("gate", 7601), ("h9", 7601)]
    cluster = _Cluster(2)
    resolver = cluster.resolver()
    told = await cluster.ask("h0", 7601)
    told.standbys = [idl.ShardAddress(shard=0, host="spare", port=7601), idl.ShardAddress(shard=1, host="", port=0)]
    resolver.places.learn(told, "h0", 7601)
    assert resolver.places.standbys == ((0, "spare", 7601),)
    cluster.places = {0: ("spare", 7601, 2), 1: ("spare", 7602, 2)}
    await resolver.refresh()
    assert resolver.places.addresses == [("spare", 7601), ("spare", 7602)]


async def test_many_connections_share_a_round() -> None:
    """All channels of a trainer lose their shards at once; it asks once, and few shards of many."""
    cluster = _Cluster(200)
    now_s = [0.0]
    resolver = cluster.resolver("h0", clock_s=lambda: now_s[0], random=lambda: 0.5)
    await asyncio.gather(*(resolver.refresh() for _ in range(200)))
    assert len(cluster.asked) == 8 and "h0" in cluster.asked
    now_s[0] = 0.1
    await resolver.refresh()  # too soon
    assert len(cluster.asked) == 8
    now_s[0] = 0.8
    await resolver.refresh()
    assert len(cluster.asked) == 16


async def test_a_host_that_hangs_does_not_hold_up_the_answer(monkeypatch: Any) -> None:
    """Once one shard has answered, the others get a moment longer; none once the place that is sought is known."""
    monkeypatch.setattr(resolver_module, "_GRACE_S", 0.01)
    cluster = _Cluster(2)
    resolver = cluster.resolver()
    cluster.places[0], cluster.hangs = ("new", 1, 2), {"h0"}
    async with asyncio.timeout(60):
        await resolver.refresh()
    assert resolver.places[0].address == ("new", 1)
    monkeypatch.setattr(resolver_module, "_GRACE_S", 3600.0)
    cluster = _Cluster(3)
    resolver = cluster.resolver()
    cluster.hangs = {"h2"}
    resolver.lost(0, ("h0", 7601))
    cluster.places[0] = ("new", 1, 2)
    async with asyncio.timeout(60):
        await resolver.refresh()
    assert resolver.places[0].address == ("new", 1)


async def test_another_server_at_an_old_address_does_not_end_the_round(monkeypatch: Any) -> None:
    """A stranger that answers at once leaves the server's own shards the time that they need."""
    monkeypatch.setattr(resolver_module, "_GRACE_S", 0.0)
    cluster = _Cluster(2)

    async def ask(host: str, port: int) -> Any:
        if host == "h0":
            here = [idl.ShardAddress(shard=0, host=host, port=port, term=9)] * 2
            return idl.HelloReply(server_id="other", shard=0, shards=here)
        for _ in range(10):
            await asyncio.sleep(0)
        return await cluster.ask(host, port)

    resolver = Resolver(cluster.resolver().places, [("h0", 7601), ("h1", 7601)], ask)
    cluster.places[0] = ("new", 1, 2)
    await resolver.refresh()
    assert resolver.places[0].address == ("new", 1)


async def test_nobody_answers() -> None:
    """While all are away nothing changes, and no error comes of it; a cancelled round lets the next one ask."""
    cluster = _Cluster(2)
    resolver = cluster.resolver()
    cluster.away = {"h0", "h1"}
    await resolver.refresh()
    assert resolver.places.addresses == [("h0", 7601), ("h1", 7601)]
    cluster.hangs = {"h0", "h1"}
    resolver = cluster.resolver(clock_s=lambda: 1.0)
    round_ = asyncio.create_task(resolver.refresh())
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(cluster.asked) == 4
    round_.cancel()
    await asyncio.wait([round_])
    assert len(asyncio.all_tasks()) == 1


async def test_a_place_where_nobody_is_found_gives_way() -> None:
    """Without terms: once the shard is not where it said, another shard's word is enough."""
    cluster = _Cluster(2)
    cluster.places = {0: ("h0", 1, 0), 1: ("h1", 1, 0)}
    resolver = cluster.resolver(clock_s=iter(range(0, 1000, 10)).__next__)
    await resolver.refresh()
    cluster.places[1] = ("new", 1, 0)
    cluster.away = {"h1", "new"}
    await resolver.refresh()
    assert resolver.places[1].address == ("h1", 1)
    resolver.lost(1, ("h1", 1))
    await resolver.refresh()
    assert resolver.places[1].address == ("new", 1)
