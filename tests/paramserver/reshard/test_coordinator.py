"""A reshard is carried out stage by stage, by whoever runs, and ends as the operator wants."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from headrace.paramserver.reshard.coordinator import Coordinator, MoveState, Reshard, Wish, change_wish, start
from headrace.paramserver.reshard.inventory import Cluster, Goal, Loads, Node, Shard
from headrace.paramserver.reshard.planner import Plan, make_plan
from headrace.schemas.errors import CorruptionError, RequestError, UnavailableError
from headrace.schemas.move_records import Move
from headrace.schemas.partition_map import PartitionMap

NUM_PARTITIONS = 8


class Scripted:
    """A server whose moves advance by one look each: under way, then done, at once released."""

    def __init__(self) -> None:
        self.map = PartitionMap.first(2, NUM_PARTITIONS)
        self.kept: bytes | None = None
        self.strangers: list[str] = []
        self.states: dict[str, MoveState] = {}
        self.begun: list[Move] = []
        self.aborted: list[str] = []
        self.calls_left = inf

    def _call(self) -> None:
        if self.calls_left <= 0:
            raise UnavailableError("the coordinator is killed here")
        self.calls_left -= 1

    async def load(self) -> bytes | None:
        self._call()
        return self.kept

    async def save(self, data: bytes | None, *, instead_of: bytes | None) -> None:
        self._call()
        if self.kept != instead_of:
            raise RequestError("another reshard is kept")
        self.kept = data

    async def partition_map(self) -> PartitionMap:
        return self.map

    async def without_partitions(self) -> list[str]:
        return self.strangers

    async def begin(self, move: Move) -> None:
        self._call()
        if move.move_id not in self.states:
            assert set(self.map.owners[list(move.partitions)]) == {move.source}
            assert list(self.map.versions[list(move.partitions)] + 1) == list(move.versions)
            self.states[move.move_id] = MoveState.UNDER_WAY
            self.begun.append(move)

    async def abort(self, move: Move) -> None:
        self._call()
        self.aborted.append(move.move_id)
        del self.states[move.move_id]

    async def state_of(self, move: Move) -> MoveState:
        self._call()
        return self.states.get(move.move_id, MoveState.UNKNOWN)

    async def pass_time(self, _: float) -> None:
        """Finish all moves that are under way."""
        for move in self.begun:
            if self.states.get(move.move_id) is MoveState.UNDER_WAY:
                self.states[move.move_id] = MoveState.DONE
                self.map = move.apply_to(self.map)


def _plan(partition_map: PartitionMap, *shards: int) -> Plan:
    nodes = tuple(Node(name=f"n{n}", free_bytes=10**9, read_bytes_s=1e6, write_bytes_s=1e6) for n in range(3))
    cluster = Cluster(
        nodes=nodes,
        shards=tuple(Shard(node=n) for n in range(3)),
        link_bytes_s=np.full((3, 3), 1e6),
        apply_rows_s=1e6,
        round_trip_s=0.001,
        follow_lag_s=0.01,
    )
    loads = Loads(
        owner=partition_map.owners,
        size_bytes=np.full(NUM_PARTITIONS, 1000),
        num_rows=np.full(NUM_PARTITIONS, 10),
        updates_s=np.ones(NUM_PARTITIONS),
    )
    return make_plan(cluster, loads, Goal(shards=shards))


async def _start(server: Scripted, *shards: int) -> Reshard | None:
    return await start(server, lambda known: _plan(known, *shards))


async def test_all_stages_are_carried_out() -> None:
    """A stage begins when all moves of the one before are done; then nothing of the reshard is left."""
    server, told = Scripted(), []

    def in_two_stages(known: PartitionMap) -> Plan:
        plan = _plan(known, 2)
        (stage,) = plan.stages
        parts = ([move for move in stage.moves if move.source == source] for source in range(2))
        return replace(plan, stages=tuple(replace(stage, moves=tuple(moves)) for moves in parts))

    made = await start(server, in_two_stages)
    assert made is not None and len(made.stages) == 2
    server.calls_left = 1 + 2 + 1  # load, look, begin
    with pytest.raises(UnavailableError):
        await Coordinator(server, sleep=server.pass_time).run()
    assert server.begun == list(made.stages[0])
    server.calls_left = inf
    assert server.kept is not None and Reshard.decode(server.kept) == made
    coordinator = Coordinator(server, on_progress=lambda *counts: told.append(counts), sleep=server.pass_time)
    assert await coordinator.run() is None
    assert server.kept is None
    assert set(server.map.owners) == {2}
    assert (told[0], told[-1]) == ((NUM_PARTITIONS // 2, NUM_PARTITIONS), (NUM_PARTITIONS, NUM_PARTITIONS))
    assert await _start(server, 2) is None


async def test_a_coordinator_that_is_killed_anywhere_is_replaced() -> None:
    """Whatever call a coordinator does not survive, the next one takes the same moves to the same end."""
    survived = False
    for calls in range(1, 60):
        server = Scripted()
        made = await _start(server, 0, 1, 2)
        server.calls_left = calls
        try:
            await Coordinator(server, sleep=server.pass_time).run()
            survived = True
        except UnavailableError:
            server.calls_left = inf
            assert await Coordinator(server, sleep=server.pass_time).run() is None
        assert made is not None and [move for stage in made.stages for move in stage] == server.begun
        assert server.kept is None and set(server.map.owners) == {0, 1, 2}
        if survived:
            return
    raise AssertionError("no run was long enough")


async def test_two_coordinators_do_no_harm() -> None:
    """Both begin the same moves, and one of them finds the reshard ended."""
    server = Scripted()
    await _start(server, 2)
    both = [Coordinator(server, sleep=server.pass_time).run() for _ in range(2)]
    assert await asyncio.gather(*both) == [None, None]
    assert len({move.move_id for move in server.begun}) == len(server.begun)


async def test_a_pause_lets_the_stage_end() -> None:
    """A paused reshard that has not begun stays so; one amid a stage finishes that; resumed, it goes on."""
    server = Scripted()
    await _start(server, 2)
    assert (await change_wish(server, Wish.PAUSE)).wish is Wish.PAUSE
    assert await Coordinator(server, sleep=server.pass_time).run() is Wish.PAUSE
    assert not server.begun and server.kept is not None
    await change_wish(server, Wish.RUN)

    async def pause_amid(_: float) -> None:
        await change_wish(server, Wish.PAUSE)
        await server.pass_time(_)

    assert await Coordinator(server, sleep=pause_amid).run() is None  # the only stage was begun, so it has ended
    assert set(server.map.owners) == {2}


async def test_an_abort_gives_up_what_is_under_way() -> None:
    """What has moved stays; what is under way is given up, nothing else begins, and another reshard may start."""
    server = Scripted()
    await _start(server, 2)

    async def abort_amid(_: float) -> None:
        await change_wish(server, Wish.ABORT)
        first = server.begun[0]
        if server.states.get(first.move_id) is MoveState.UNDER_WAY:
            server.states[first.move_id] = MoveState.DONE
            server.map = first.apply_to(server.map)

    assert await Coordinator(server, sleep=abort_amid).run() is Wish.ABORT
    assert server.aborted == [move.move_id for move in server.begun[1:]] and server.aborted
    assert server.kept is None
    with pytest.raises(RequestError, match="no reshard is under way"):
        await change_wish(server, Wish.PAUSE)
    assert await _start(server, 0, 1, 2) is not None
    await change_wish(server, Wish.ABORT)
    with pytest.raises(RequestError, match="is being aborted"):
        await change_wish(server, Wish.RUN)


async def test_what_start_refuses() -> None:
    """A second reshard, and one while somebody is connected who does not know partitions, are refused with one line."""
    server = Scripted()
    server.strangers = ["run/rank0", "node b"]
    with pytest.raises(RequestError, match=r"^run/rank0, node b: connected, and .* does not know partitions"):
        await _start(server, 2)
    assert server.kept is None
    server.strangers = []
    await _start(server, 2)
    with pytest.raises(RequestError, match=r"^a reshard of 1 stages is under way \(run\)"):
        await _start(server, 0, 1)


@pytest.mark.parametrize(("partitions", "owner"), [([0, 2, 4, 6], 1), (range(0, NUM_PARTITIONS, 2), 2), ([0, 2], 2)])
async def test_a_plan_of_another_map_is_refused(partitions: Sequence[int], owner: int) -> None:
    """Partitions that have moved since the plan was made have another owner, perhaps the one that the plan wants."""
    known = PartitionMap.first(2, NUM_PARTITIONS)
    plan, moved = _plan(known, 2), known.moved(partitions, [1] * len(partitions), owner)
    with pytest.raises(RequestError, match="from shard 0, which owns them no more"):
        Reshard.of_plan(plan, moved, reshard_id="x")


@pytest.mark.parametrize("data", [b"", b"\x93\x02\xa3run\x90", b"\x93\x01\xa4rush\x90", b"\x93\x01\xa3run\x91\x91\x80"])
def test_damage_is_noticed(data: bytes) -> None:
    """Bytes that are no reshard, or one of a later release, are an error."""
    with pytest.raises(CorruptionError, match="are no reshard"):
        Reshard.decode(data)
