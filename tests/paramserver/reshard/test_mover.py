"""Moves between real shards, each with its log, store and socket, while a trainer writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hellos import hello_of_nobody
from restartable_shards import MapWriter, RestartableShards, read_rows

from headrace.paramserver.reshard import mover
from headrace.paramserver.reshard.move_messages import move_to_idl
from headrace.paramserver.reshard.moving_shard import MovingShard
from headrace.paramserver.reshard.remote_source import RemoteSource
from headrace.schemas.errors import RequestError, UnauthorizedError, WrongRoutingError
from headrace.schemas.idl import idl
from headrace.schemas.move_records import Move
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.tables import DType, TableSpec

pytestmark = pytest.mark.timeout(120)

SPEC = TableSpec(fqn="items.weight", num_rows=0, dim=4, dtype=DType.FLOAT32, has_identities=True)
ROWS = np.arange(300)
FIRST = PartitionMap.first(2)
MOVE = Move.of_map(FIRST, tuple(range(0, 1024, 4)), move_id="a", destination=1)
MOVED = MOVE.apply_to(FIRST)
STATE, KIND = idl.MoveState, idl.MoveRequestKind


async def _ask(shards: RestartableShards, move: Move, kind: int) -> Any:
    request = idl.MovePartitionsRequest(server_id=shards.server_id, move=move_to_idl(move), kind=kind)
    async with await shards.connect(move.destination) as client:
        return await client.move_partitions(request)


async def _reach(shards: RestartableShards, move: Move, state: int) -> None:
    while (await _ask(shards, move, KIND.LOOK)).state != state:  # noqa: ASYNC110 - as a coordinator asks
        await asyncio.sleep(0.02)


@asynccontextmanager
async def _training(shards: RestartableShards) -> AsyncIterator[MapWriter]:
    """Write rows while the block lasts; all of them are acked when it ends."""
    writer, is_over = MapWriter(shards, SPEC), False

    async def train() -> None:
        rng = np.random.default_rng(1)
        while not is_over:
            await writer.write(np.sort(rng.choice(ROWS, 20, replace=False)))

    await writer.write(ROWS)
    task = asyncio.create_task(train())
    try:
        yield writer
        is_over = True
        await task
    finally:
        task.cancel()
        await asyncio.wait([task])
        await writer.close()


async def _check(shards: RestartableShards, writer: MapWriter, partition_map: PartitionMap) -> None:
    """Check that each row is as it was acked, where the map says, and nowhere else."""
    owners, counts, found = partition_map.shards_of_rows(SPEC.seed, ROWS), 0, {}
    for shard in range(2):
        async with await shards.connect(shard) as client:
            found |= await read_rows(client, SPEC, ROWS[owners == shard])
            with pytest.raises(WrongRoutingError) as caught:
                await read_rows(client, SPEC, ROWS[owners != shard][:1])
            assert PartitionMap.decode(caught.value.partitions) == partition_map
            digest = idl.DigestRowsRequest(SPEC.fqn, 0, 2**63 - 1, 0, 4, 256, with_presence=False)
            counts += int(np.frombuffer((await client.digest_rows(digest)).counts, "<i8").sum())
            request = idl.FindRowsRequest(fqn=SPEC.fqn, identities=ROWS.astype("<i8").tobytes())
            at = np.frombuffer((await client.find_rows(request)).row_ids, "<i8")
            assert np.array_equal(at, np.where(owners == shard, ROWS, -1))
    assert found == writer.rows
    assert counts == ROWS.size


async def test_partitions_move_there_and_back_while_a_trainer_writes(tmp_path: Path) -> None:
    """Each acked row is there afterwards, in its version, once; a repeated request changes nothing."""
    async with RestartableShards(tmp_path) as shards:
        async with _training(shards) as writer:
            assert (await _ask(shards, MOVE, KIND.CARRY_OUT)).state == STATE.UNDER_WAY
            await _reach(shards, MOVE, STATE.DONE)
            assert (await _ask(shards, MOVE, KIND.CARRY_OUT)).state == STATE.DONE
        await _check(shards, writer, MOVED)
        back = Move.of_map(MOVED, MOVE.partitions, move_id="b", destination=0)
        async with await shards.connect(1) as client:
            assert not (await client.status()).moves
        await _ask(shards, back, KIND.CARRY_OUT)
        await _reach(shards, back, STATE.DONE)
        await _check(shards, writer, back.apply_to(MOVED))


class _Stop:
    """Stops the first call of a method of a move's source, before it is sent or when it is answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, *, is_answered: bool) -> None:
        self.is_reached, self.goes_on = asyncio.Event(), asyncio.Event()
        method: Callable[..., Any] = getattr(RemoteSource, name)

        async def stopped(source: RemoteSource, *args: Any) -> Any:
            result = await method(source, *args) if is_answered else None
            if not self.is_reached.is_set():
                self.is_reached.set()
                await self.goes_on.wait()
            return result if is_answered else await method(source, *args)

        monkeypatch.setattr(RemoteSource, name, stopped)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("phase", ["copy", "digest", "follow", "seal", "release", "purge"])
async def test_a_shard_that_ends_amid_a_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, side: int
) -> None:
    """Whichever side starts again, at whatever step, the move goes on to its end and loses nothing."""
    async with RestartableShards(tmp_path) as shards:
        async with _training(shards) as writer:
            stop = _Stop(monkeypatch, phase, is_answered=side == 1)
            await _ask(shards, MOVE, KIND.CARRY_OUT)
            await stop.is_reached.wait()
            await shards.stop(side)
            await shards.start(side)
            stop.goes_on.set()
            if phase == "copy" and side == 1:  # nothing of it was durable there
                await _ask(shards, MOVE, KIND.CARRY_OUT)
            await _reach(shards, MOVE, STATE.DONE)
        await _check(shards, writer, MOVED)


async def test_a_move_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is released it can be; the source serves on, the destination keeps nothing, and its id is used up."""
    async with RestartableShards(tmp_path) as shards:
        async with _training(shards) as writer:
            stop = _Stop(monkeypatch, "follow", is_answered=True)
            await _ask(shards, MOVE, KIND.CARRY_OUT)
            await stop.is_reached.wait()
            (status,) = (await (client := await shards.connect(1)).status()).moves
            await client.close()
            assert (status.move_id, status.step, status.phase) == ("a", "copy", "follow")
            assert status.copied_rows >= np.isin(FIRST.partitions_of_rows(SPEC.seed, ROWS), MOVE.partitions).sum()
            await _ask(shards, MOVE, KIND.ABORT)
            stop.goes_on.set()
            await _reach(shards, MOVE, STATE.UNKNOWN)
        await _check(shards, writer, FIRST)
        with pytest.raises(RequestError, match="was given up"):
            await _ask(shards, MOVE, KIND.CARRY_OUT)
        again = Move.of_map(FIRST, MOVE.partitions, move_id="again", destination=1)
        await _ask(shards, again, KIND.CARRY_OUT)
        await _reach(shards, again, STATE.DONE)
        await _check(shards, writer, again.apply_to(FIRST))


async def test_a_copy_that_differs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never served, the source goes on, and status says why."""

    async def other(shard: MovingShard, move: Move, like: bytes) -> bytes:
        return b"other"

    monkeypatch.setattr(MovingShard, "digest_incoming", other)
    async with RestartableShards(tmp_path) as shards, _training(shards) as writer:
        await _ask(shards, MOVE, KIND.CARRY_OUT)
        await _reach(shards, MOVE, STATE.UNKNOWN)
        assert "differs from the source" in (await _ask(shards, MOVE, KIND.LOOK)).error
        assert writer.map == FIRST


async def test_a_silent_destination_loses_its_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that is sealed for a destination that is gone takes writes again."""
    monkeypatch.setattr(mover, "_SILENCE_S", 0.5)
    monkeypatch.setattr(mover, "_LOOK_S", 0.05)
    async with RestartableShards(tmp_path) as shards:
        async with _training(shards) as writer:
            stop = _Stop(monkeypatch, "seal", is_answered=True)
            await _ask(shards, MOVE, KIND.CARRY_OUT)
            await stop.is_reached.wait()
            await shards.stop(1)
            source = shards.shards[0]._ingest.partitions
            while source.moves.find("a").step != "unseal":  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.02)
            await shards.start(1)
            await _reach(shards, MOVE, STATE.UNKNOWN)
        await _check(shards, writer, FIRST)


async def test_who_may_move_what(tmp_path: Path) -> None:
    """Only an admin, of this server, at the move's own shards, partitions that are where the move says."""
    async with RestartableShards(tmp_path) as shards:
        other = Move.of_map(MOVED, (1,), move_id="c", destination=0)
        for move, server_id in ((MOVE, "another"), (other, shards.server_id)):
            request = idl.MovePartitionsRequest(server_id=server_id, move=move_to_idl(move), kind=KIND.CARRY_OUT)
            async with await shards.connect(1) as client:
                with pytest.raises(RequestError):
                    await client.move_partitions(request)
        wrong = Move(move_id="d", source=0, destination=1, partitions=(1,), versions=(1,))
        with pytest.raises(RequestError, match="not at the source"):
            await _ask(shards, wrong, KIND.CARRY_OUT)
        writer = hello_of_nobody(idl.Role.WRITER, knows_partitions=True)
        async with await shards.connect(1, writer) as client:
            with pytest.raises(UnauthorizedError):
                await client.move_partitions(request)
        request = idl.StepMoveRequest(server_id=shards.server_id, move=move_to_idl(MOVE), step=idl.SourceStep.PURGE)
        async with await shards.connect(0) as client:
            with pytest.raises(RequestError, match="is not released"):
                await client.step_move(request)
