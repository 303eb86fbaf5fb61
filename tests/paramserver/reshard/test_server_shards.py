"""The reshard is kept by shard 0, and carried out over connections; shards are real, moves scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hellos import hello_of_nobody
from shard_servers import serve_shards

from headrace.paramserver.reading.link import Dial
from headrace.paramserver.reshard.coordinator import MoveState, Reshard, Wish, change_wish
from headrace.paramserver.reshard.move_messages import move_from_idl
from headrace.paramserver.reshard.server_shards import ServerShards
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.service import Shard
from headrace.schemas.errors import RequestError
from headrace.schemas.idl import idl
from headrace.schemas.move_records import Move
from headrace.schemas.partition_map import PartitionMap

FIRST = PartitionMap.first(2)
MOVE = Move.of_map(FIRST, (0, 2), move_id="a", destination=1)
_PATIENCE_S = 100.0
PLAN = Reshard(stages=((MOVE,),)).encode()


def _dial(role: int = idl.Role.ADMIN) -> Dial:
    return Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=60.0, role=role, knows_partitions=True)


@asynccontextmanager
async def _reached(ports: Sequence[int]) -> AsyncIterator[ServerShards]:
    async with await ServerShards.reach(_dial(), [("127.0.0.1", port) for port in ports]) as shards:
        yield shards


class Destination:
    """A shard's `movePartitions`, whose moves end when the test says so."""

    def __init__(self, shard: Shard) -> None:
        self.begun, self.is_done = dict[str, Move](), asyncio.Event()
        self.error: str | None = None
        self.asked = asyncio.Event()
        shard._mover.move_partitions = self.move_partitions  # type: ignore[method-assign]

    async def move_partitions(self, request: Any) -> Any:
        move = move_from_idl(request.move)
        if request.kind == idl.MoveRequestKind.CARRY_OUT:
            self.begun[move.move_id] = move
        if request.kind == idl.MoveRequestKind.ABORT:
            self.begun.pop(move.move_id, None)
        state = idl.MoveState.UNKNOWN
        if move.move_id in self.begun:
            self.asked.set()
            state = idl.MoveState.DONE if self.is_done.is_set() else idl.MoveState.UNDER_WAY
        return idl.MovePartitionsReply(state=state, error=self.error)


async def test_a_reshard_is_kept_until_another_takes_its_place(tmp_path: Path) -> None:
    """Who has not seen the last one changes nothing, repeating a change is harmless, and a restart loses nothing."""
    opened: list[Shard] = []
    async with serve_shards(tmp_path, 2, opened=opened) as ports, _reached(ports) as shards:
        Destination(opened[1])
        assert await shards.load() is None
        with pytest.raises(RequestError, match="bytes are no reshard"):
            await shards.save(b"x", instead_of=None)
        assert not opened[0]._ingest.partitions.has_moves
        for _ in range(2):
            await shards.save(PLAN, instead_of=None)
        with pytest.raises(RequestError, match="changed the reshard meanwhile"):
            await shards.save(None, instead_of=b"another")
        paused = Reshard(stages=((MOVE,),), wish=Wish.PAUSE).encode()
        assert (await change_wish(shards, Wish.PAUSE)).wish is Wish.PAUSE
        assert await shards.load() == paused
        assert opened[0]._ingest.partitions.reshard.number == 2
        request = idl.KeepReshardRequest(server_id=str(tmp_path))
        for link, wrong in ((shards.links[1], request), (shards.links[0], idl.KeepReshardRequest(server_id="other"))):
            with pytest.raises(RequestError, match=r"shard 0 keeps the reshard"):
                await link.keep_reshard(wrong)
    opened.clear()
    async with serve_shards(tmp_path, 2, opened=opened) as ports, _reached(ports) as shards:
        Destination(opened[1])
        assert await shards.load() == paused
        assert opened[0]._ingest.partitions.has_moves
        await shards.save(None, instead_of=paused)
        await opened[0].applied()
    opened.clear()
    async with serve_shards(tmp_path, 2, opened=opened) as ports, _reached(ports) as shards:
        assert await shards.load() is None
        assert opened[0]._ingest.partitions.has_moves  # releases before partitions cannot read this log
        assert opened[0]._ingest.partitions.reshard.number == 3


async def test_two_changes_at_once_cannot_both_count(tmp_path: Path) -> None:
    """Of two clients that saw the same reshard, one is refused, even if both ask before anything is durable."""
    opened: list[Shard] = []
    async with serve_shards(tmp_path, 1, opened=opened) as ports, _reached(ports) as one, _reached(ports) as other:
        plans = [Reshard(stages=((MOVE,),) * n).encode() for n in (1, 2)]
        results = await asyncio.gather(
            *(shards.save(plan, instead_of=None) for shards, plan in zip((one, other), plans, strict=True)),
            return_exceptions=True,
        )
        assert sorted(isinstance(result, RequestError) for result in results) == [False, True], results
        assert await one.load() == plans[[result is None for result in results].index(True)]


async def test_shard_0_carries_the_reshard_out(tmp_path: Path) -> None:
    """It begins moves at their destination, shows what keeps them from going on, and forgets the reshard at the end."""
    opened: list[Shard] = []
    async with serve_shards(tmp_path, 2, opened=opened) as ports, _reached(ports) as shards:
        destination = Destination(opened[1])
        destination.error = "the source does not answer"
        await shards.save(PLAN, instead_of=None)
        async with asyncio.timeout(_PATIENCE_S):
            await destination.asked.wait()
        assert destination.begun == {"a": MOVE}
        assert await shards.state_of(MOVE) is MoveState.UNDER_WAY
        assert shards.move_errors == {"a": "the source does not answer"}
        async with asyncio.timeout(_PATIENCE_S):
            while not (found := (await shards.links[0].status()).reshard).failure:
                pass
        assert (found.wish, found.num_stages, found.num_moved, found.num_partitions) == ("run", 1, 0, 2)
        assert found.failure == "move a: the source does not answer"
        assert (await shards.links[1].status()).reshard is None
        destination.error = None
        destination.is_done.set()
        async with asyncio.timeout(_PATIENCE_S):
            while await shards.load() is not None:
                pass
        assert (await shards.links[0].status()).reshard is None


async def test_a_reshard_shows_nothing_of_the_one_before(tmp_path: Path) -> None:
    """A reshard that has just begun has no progress and no failure yet, though the last one was aborted with one."""
    opened: list[Shard] = []
    async with serve_shards(tmp_path, 2, opened=opened) as ports, _reached(ports) as shards:
        Destination(opened[1]).error = "the source does not answer"
        await shards.save(PLAN, instead_of=None)
        async with asyncio.timeout(_PATIENCE_S):
            while not (await shards.links[0].status()).reshard.failure:
                pass
        await change_wish(shards, Wish.ABORT)
        driver = opened[0]._reshards
        assert driver is not None
        async with asyncio.timeout(_PATIENCE_S):
            while await shards.load() is not None or driver._failure is not None:
                pass
        assert (driver._moved, driver._total) == (0, 0)


async def test_a_start_goes_on_and_a_wish_wakes_it(tmp_path: Path) -> None:
    """A process that opens shard 0 goes on with the reshard; a pause that is taken back begins moves again."""
    opened: list[Shard] = []
    async with serve_shards(tmp_path, 2, opened=opened) as ports, _reached(ports) as shards:
        first = Destination(opened[1])
        await shards.save(Reshard(stages=((MOVE,),), wish=Wish.PAUSE).encode(), instead_of=None)
        await opened[0]._ingest.wait_durable(opened[0]._ingest.accepted_seq)
    assert not first.begun
    opened.clear()
    async with serve_shards(tmp_path, 2, opened=opened) as ports, _reached(ports) as shards:
        second = Destination(opened[1])
        await change_wish(shards, Wish.RUN)
        async with asyncio.timeout(_PATIENCE_S):
            await second.asked.wait()
        await change_wish(shards, Wish.ABORT)
        async with asyncio.timeout(_PATIENCE_S):
            while await shards.load() is not None:
                pass
        assert not second.begun


async def test_maps_and_strangers_are_found(tmp_path: Path) -> None:
    """The map is what all shards know together; whoever is connected and does not know partitions is named."""
    opened: list[Shard] = []
    async with (
        serve_shards(tmp_path, 2, opened=opened) as ports,
        _reached(ports) as shards,
        await ParamServerClient.connect("127.0.0.1", ports[1]) as stranger,
    ):
        assert await shards.partition_map() == FIRST
        assert await shards.without_partitions() == []
        await stranger.hello(hello_of_nobody(run="old", client="trainer"))
        assert await shards.without_partitions() == ["old/trainer"]
        await opened[1]._hear_partitions(MOVE.apply_to(FIRST).encode())
        assert await shards.partition_map() == MOVE.apply_to(FIRST)
