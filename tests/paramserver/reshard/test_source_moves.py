"""A move at its source: requests that come late, twice, or for a seal that has lapsed."""

from __future__ import annotations

import random

import pytest
from move_shards import ModelShard

from headrace.paramserver.reshard.source_moves import SourceMoves
from headrace.schemas.move_records import Move, MoveRecord, MoveStep, Position
from headrace.schemas.partition_map import PartitionMap

FIRST = PartitionMap.first(2, 8)
MOVE = Move.of_map(FIRST, (0, 2), move_id="a", destination=1)


def _source() -> tuple[ModelShard, SourceMoves]:
    shard = ModelShard(0, FIRST, random.Random(1), commit_s=0.001)
    return shard, shard.source


def _steps(shard: ModelShard) -> list[str]:
    return [entry.header["transition"] for entry in shard.log]


async def test_a_seal_that_has_lapsed_is_not_released() -> None:
    """A destination that is ready at an earlier seal lacks what was written behind it."""
    shard, source = _source()
    earlier = await source.seal(MOVE)
    assert earlier is not None and await source.seal(MOVE) == earlier
    await source.expire(MOVE)
    assert not await source.release(MOVE, earlier)
    later = await source.seal(MOVE)
    assert later is not None and later.seq > earlier.seq
    assert not await source.release(MOVE, earlier)
    for _ in range(2):
        assert await source.release(MOVE, later)
    assert not await source.release(MOVE, earlier)
    await source.expire(MOVE)
    assert not await source.unseal(MOVE)
    assert _steps(shard) == ["seal", "lapse", "seal", "release"]


async def test_a_move_that_is_given_up_stays_so() -> None:
    """Also one whose seal had lapsed: its id is used up."""
    shard, source = _source()
    sealed = await source.seal(MOVE)
    assert sealed is not None and not await source.release(Move.of_map(FIRST, (4,), move_id="b", destination=1), sealed)
    await source.expire(MOVE)
    for _ in range(2):
        assert await source.unseal(MOVE)
    assert await source.seal(MOVE) is None
    assert not await source.release(MOVE, sealed)
    await source.expire(MOVE)
    assert _steps(shard) == [MoveStep.SEAL, MoveStep.LAPSE, MoveStep.UNSEAL]


async def test_a_transition_that_another_one_overtakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records get their places one after the other: a release that finds the seal lapsed then does nothing."""
    shard, source = _source()
    sealed = await source.seal(MOVE)
    assert sealed is not None
    append, overtakes = shard.append, [source.expire]

    async def overtaken(record: MoveRecord) -> Position:
        if overtakes:
            await overtakes.pop()(MOVE)
        return await append(record)

    monkeypatch.setattr(shard, "append", overtaken)
    assert not await source.release(MOVE, sealed)
    overtakes.append(source.seal)
    later = await source.seal(MOVE)
    assert later is not None and await source.release(MOVE, later)
    assert _steps(shard) == ["seal", "lapse", "seal", "release"]
