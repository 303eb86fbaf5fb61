"""A reader of shards among which partitions move, and which become more."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from fake_service import WAIT_S, FakeService
from held_ports import hold_ports

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.rpc.server import Call, ThriftServer
from headrace.schemas.errors import WrongRoutingError
from headrace.schemas.idl import idl, spec_to_idl
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.row_digest import TableDigest
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="items.weight", num_rows=1500, dim=2, dtype=DType.FLOAT32, has_identities=True)
ROWS = np.arange(SPEC.num_rows)
FIRST = PartitionMap.first(2)


def _moved(before: PartitionMap, owner: int, stride: int) -> PartitionMap:
    """Return the map with some of shard 0's partitions at another shard."""
    partitions = before.partitions_of(0)[::stride]
    return before.moved(partitions, before.versions[partitions] + 1, owner)


MOVED = _moved(FIRST, 1, 2)
GROWN = _moved(MOVED, 2, 3)


class _Shard(FakeService):
    """A shard that answers for the rows that are its own by the map that it knows, and refuses others.

    Attributes:
        partition_map: What it knows; after each refusal the next of `next_maps`.
        refused: Number of refused reads.
        gate: Searches and digests wait for it.
    """

    def __init__(self, shard: int, places: list[tuple[str, int]]) -> None:
        super().__init__()
        self.shard, self.places = shard, places
        self.partition_map, self.next_maps = FIRST, list[PartitionMap]()
        self.refused = 0

    async def hello(self, call: Call, request: Any) -> Any:
        assert request.knows_partitions
        reply = await super().hello(call, request)
        reply.shard, reply.shards, reply.tables = self.shard, self._places(), [spec_to_idl(SPEC)]
        reply.partitions = self.partition_map.encode()
        return reply

    async def get_embeddings(self, call: Call, request: Any) -> Any:
        ids = np.frombuffer(request.row_ids, "<i8")
        self.begun.append(len(ids))
        if (self.partition_map.shards_of_rows(SPEC.seed, ids) != self.shard).any():
            self.refused += 1
            told = self.partition_map.encode()
            if self.next_maps:
                self.partition_map = self.next_maps.pop(0)
            raise WrongRoutingError("elsewhere", partitions=told, shards=self._places())
        weights = np.repeat(ids, SPEC.dim).astype(np.float32)
        return idl.GetEmbeddingsReply(
            presence=np.ones(ids.size, np.uint8), weights=weights, states=[], seq=0, identities=ids
        )

    async def digest_rows(self, call: Call, request: Any) -> Any:
        await self._wait(self.gate)
        ids = ROWS[self.partition_map.shards_of_rows(SPEC.seed, ROWS) == self.shard]
        digest = TableDigest(spec=SPEC, columns=SPEC.whole)
        digest.add_rows(ids, [np.zeros((ids.size, SPEC.dim), np.float32)])
        reply = digest.to_idl(next_row=request.end_row, seq=1, with_presence=False)
        reply.served = self._served()
        self.begun.append(len(ids))
        return reply

    def _served(self) -> bytes | None:
        if self.partition_map.is_first:
            return None
        return np.packbits(self.partition_map.owners == self.shard, bitorder="little").tobytes()

    def _places(self) -> list[Any]:
        return [idl.ShardAddress(shard=n, host=h, port=p) for n, (h, p) in enumerate(self.places)]


@asynccontextmanager
async def _reading() -> AsyncIterator[tuple[list[_Shard], EmbeddingReader]]:
    """Yield three shards, of which the last is in nobody's hello, and a reader of the first two."""
    places = [("127.0.0.1", hold_ports()) for _ in range(3)]
    shards = [_Shard(shard, places[:2]) for shard in range(3)]
    async with AsyncExitStack() as stack:
        for shard, place in zip(shards, places, strict=True):
            server = ThriftServer(shard, limits=shard.limits)
            await server.start(socket.create_server(place))
            stack.push_async_callback(server.close, drain_s=0)
        reader = await stack.enter_async_context(await EmbeddingReader.connect(f"127.0.0.1:{places[0][1]}"))
        for shard in shards:
            shard.places = places
        yield shards, reader


async def _get_all(reader: EmbeddingReader) -> None:
    rows = await reader.get(SPEC.fqn, ROWS, timeout_s=WAIT_S)
    assert (rows.presence == 1).all()
    assert np.array_equal(rows.weights[:, 1], ROWS.astype(np.float32))


async def test_refused_rows_are_read_from_their_new_shard() -> None:
    """One refusal tells the map and a shard that has appeared; the next read asks nobody in vain."""
    async with _reading() as (shards, reader):
        await _get_all(reader)
        for shard in shards:
            shard.partition_map = GROWN
        await _get_all(reader)
        assert reader.partition_map == GROWN and len(reader.links) == 3
        assert [shard.refused for shard in shards] == [1, 0, 0]
        await _get_all(reader)
        assert [shard.refused for shard in shards] == [1, 0, 0] and len(await reader.status()) == 3


async def test_a_map_is_never_taken_back() -> None:
    """A new owner that does not know yet is asked again, and its older map changes nothing."""
    async with _reading() as (shards, reader):
        shards[0].partition_map = MOVED
        shards[1].next_maps = [FIRST, FIRST, MOVED]
        await _get_all(reader)
        assert reader.partition_map == MOVED
        assert (shards[0].refused, shards[1].refused) == (1, 3)


async def test_a_hello_tells_the_map_too() -> None:
    """A reader that connects after a move asks nobody in vain, whichever shard knows of it."""
    async with _reading() as (shards, _):
        shards[2].partition_map = shards[1].partition_map = shards[0].partition_map = GROWN
        for known in (FIRST, GROWN):
            shards[2].partition_map = known
            async with await EmbeddingReader.connect(f"127.0.0.1:{shards[2].places[2][1]}") as reader:
                shards[2].partition_map = GROWN
                await _get_all(reader)
        assert [shard.refused for shard in shards] == [0, 0, 0]


async def _while_moving(shards: list[_Shard], asking: asyncio.Task[Any], late: _Shard) -> Any:
    """Move partitions from shard 0 to 1 when all shards but one have answered."""
    (early,) = (shard for shard in shards[:2] if shard is not late)
    await early._wait_until(lambda: bool(early.begun))
    for shard in shards:
        shard.partition_map = MOVED
    late.gate.set()
    return await asking


@pytest.mark.parametrize("late", [0, 1], ids=["in none", "in both"])
async def test_each_row_is_in_one_digest_while_it_moves(late: int) -> None:
    """Rows that are in the digests of no shard, or of two, are added up again."""
    async with _reading() as (shards, reader):
        expected = await reader.digest(SPEC.fqn, timeout_s=WAIT_S)
        for shard in shards:
            shard.begun.clear()
        shards[late].gate.clear()
        asking = asyncio.create_task(reader.digest(SPEC.fqn, timeout_s=WAIT_S))
        digest = await _while_moving(shards, asking, shards[late])
        assert digest.buckets == expected.buckets and digest.num_rows == ROWS.size
