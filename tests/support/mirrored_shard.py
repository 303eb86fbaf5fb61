"""A shard's log and a relay's mirror of it, compared; followers of either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from relays import until
from served_shard import Served, link_to

from headrace.paramserver.reading.follower import ShardFollower, Update
from headrace.paramserver.relay.runner import RelayProcess
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.shard.service import Shard

__all__ = ["address_of", "assert_mirrored", "facts_of", "following", "take", "wait_for_seq"]

_WAIT_S = 60.0


def address_of(served: Served) -> str:
    return f"127.0.0.1:{served.port}"


def facts_of(records: Any) -> list[tuple[int, int, dict[str, Any], bytes]]:
    """Return what must be equal wherever a record is."""
    return [(record.seq, record.epoch, record.header, bytes(record.body)) for record in records]


async def wait_for_seq(relay: RelayProcess, seq: int) -> None:
    def has_it() -> bool:
        log = relay.mirrors[0].log
        return log is not None and log.last_seq >= seq

    await until(has_it)


def assert_mirrored(relay: RelayProcess, shard: Shard, from_seq: int = 1) -> None:
    log = relay.mirrors[0].log
    assert log is not None
    assert facts_of(log.read(from_seq)) == facts_of(shard.log.read(from_seq))
    seqs = range(from_seq, shard.log.last_seq + 1)
    assert [log.nonce_of(seq) for seq in seqs] == [shard.log.nonce_of(seq) for seq in seqs]


@asynccontextmanager
async def following(address: str, from_seq: int = 1, **settings: Any) -> AsyncIterator[ShardFollower]:
    link = await link_to(parse_address(address)[1])
    try:
        yield ShardFollower(link, from_seq=from_seq, **settings)
    finally:
        await link.close()


async def take(follower: ShardFollower, last_seq: int) -> list[Update]:
    """Return all records up to a seq."""
    updates: list[Update] = []
    async with asyncio.timeout(_WAIT_S):
        while follower.next_seq <= last_seq:
            updates += await follower.fetch()
    return updates
