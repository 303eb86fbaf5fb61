"""Moves between real shards, each with its log, store and socket, while a trainer writes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hellos import hello_of_nobody
from restartable_shards import MOVED_SPEC, ROWS, RestartableShards, ask, check_rows, reach, read_rows, training
from waiting import until

from headrace.paramserver.ingest.pipeline import Ingest
from headrace.paramserver.reshard import mover, moving_shard
from headrace.paramserver.reshard.move_messages import move_to_idl
from headrace.paramserver.reshard.moving_shard import MovingShard
from headrace.paramserver.reshard.partition_contents import PartitionContents
from headrace.paramserver.reshard.remote_source import RemoteSource
from headrace.schemas.errors import (
    CorruptionError,
    GoneError,
    OverloadedError,
    RequestError,
    StorageError,
    UnauthorizedError,
    UnavailableError,
    WrongRoutingError,
)
from headrace.schemas.idl import idl
from headrace.schemas.move_records import LoadRecord, Move, MoveStep, step_of
from headrace.schemas.partition_map import PartitionMap

pytestmark = pytest.mark.timeout(120)

FIRST = PartitionMap.first(2)
MOVE = Move.of_map(FIRST, tuple(range(0, 1024, 4)), move_id="a", destination=1)
MOVED = MOVE.apply_to(FIRST)
STATE, KIND = idl.MoveState, idl.MoveRequestKind


async def test_partitions_move_there_and_back_while_a_trainer_writes(tmp_path: Path) -> None:
    """Each acked row is there afterwards, in its version, once; a repeated request changes nothing."""
    async with RestartableShards(tmp_path) as shards:
        async with training(shards) as writer:
            assert (await ask(shards, MOVE, KIND.CARRY_OUT)).state == STATE.UNDER_WAY
            await reach(shards, MOVE, STATE.DONE)
            assert (await ask(shards, MOVE, KIND.CARRY_OUT)).state == STATE.DONE
        await check_rows(shards, writer, MOVED)
        back = Move.of_map(MOVED, MOVE.partitions, move_id="b", destination=0)
        async with await shards.connect(1) as client:
            assert not (await client.status()).moves
        await ask(shards, back, KIND.CARRY_OUT)
        await reach(shards, back, STATE.DONE)
        await check_rows(shards, writer, back.apply_to(MOVED))


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
    monkeypatch.setattr(mover, "_SILENCE_S", 1000.0)  # however long a start takes
    async with RestartableShards(tmp_path) as shards:
        async with training(shards) as writer:
            stop = _Stop(monkeypatch, phase, is_answered=side == 1)
            await ask(shards, MOVE, KIND.CARRY_OUT)
            await stop.is_reached.wait()
            await shards.stop(side)
            await shards.start(side)
            stop.goes_on.set()
            if phase == "copy" and side == 1:  # nothing of it was durable there
                await ask(shards, MOVE, KIND.CARRY_OUT)
            await reach(shards, MOVE, STATE.DONE)
        await check_rows(shards, writer, MOVED)


async def test_a_move_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is released it can be; the source serves on, the destination keeps nothing, and its id is used up."""
    async with RestartableShards(tmp_path) as shards:
        async with training(shards) as writer:
            stop = _Stop(monkeypatch, "follow", is_answered=True)
            await ask(shards, MOVE, KIND.CARRY_OUT)
            await stop.is_reached.wait()
            (status,) = (await (client := await shards.connect(1)).status()).moves
            await client.close()
            assert (status.move_id, status.step, status.phase) == ("a", "copy", "follow")
            assert status.copied_rows >= np.isin(FIRST.partitions_of_rows(MOVED_SPEC.seed, ROWS), MOVE.partitions).sum()
            await ask(shards, MOVE, KIND.ABORT)
            stop.goes_on.set()
            await reach(shards, MOVE, STATE.UNKNOWN)
        await check_rows(shards, writer, FIRST)
        with pytest.raises(RequestError, match="was given up"):
            await ask(shards, MOVE, KIND.CARRY_OUT)
        again = Move.of_map(FIRST, MOVE.partitions, move_id="again", destination=1)
        await ask(shards, again, KIND.CARRY_OUT)
        await reach(shards, again, STATE.DONE)
        await check_rows(shards, writer, again.apply_to(FIRST))


async def test_a_store_that_is_lost_is_made_anew_from_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has the rows that moves have loaded, and what of them to remove before others of the partitions come."""
    async with RestartableShards(tmp_path) as shards:
        async with training(shards) as writer:
            stop = _Stop(monkeypatch, "follow", is_answered=True)
            await ask(shards, MOVE, KIND.CARRY_OUT)
            await stop.is_reached.wait()
            await ask(shards, MOVE, KIND.ABORT)
            stop.goes_on.set()
            await reach(shards, MOVE, STATE.UNKNOWN)
            again = Move.of_map(FIRST, MOVE.partitions, move_id="again", destination=1)
            await ask(shards, again, KIND.CARRY_OUT)
            await reach(shards, again, STATE.DONE)
        await shards.stop(1)
        await asyncio.to_thread(shutil.rmtree, tmp_path / "shard-0001" / "store")
        await shards.start(1)
        ingest = shards.shards[1]._ingest
        assert 0 < ingest._loaded_seq <= ingest._applier.applied_seq  # reads do not look for them anywhere else
        assert not ingest.partitions.moves.unpurged
        await check_rows(shards, writer, again.apply_to(FIRST))


async def test_a_copy_that_differs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never served, the source goes on, and status says why."""

    async def other(shard: MovingShard, move: Move, like: bytes) -> bytes:
        return b"other"

    monkeypatch.setattr(MovingShard, "digest_incoming", other)
    async with RestartableShards(tmp_path) as shards, training(shards) as writer:
        await ask(shards, MOVE, KIND.CARRY_OUT)
        await reach(shards, MOVE, STATE.UNKNOWN)
        assert "differs from the source" in (await ask(shards, MOVE, KIND.LOOK)).error
        assert writer.map == FIRST


async def test_a_full_log_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of a copy that has no room is appended again, and the copy does not begin anew."""
    write_imports, num_full = Ingest.write_imports, 0

    async def full_at_first(ingest: Ingest, records: Any) -> None:
        nonlocal num_full
        if records and isinstance(records[0][0], LoadRecord) and num_full < 2:
            num_full += 1
            raise OverloadedError("no room")
        await write_imports(ingest, records)

    monkeypatch.setattr(Ingest, "write_imports", full_at_first)
    monkeypatch.setattr(moving_shard, "_ROOM_S", 0.01)
    async with RestartableShards(tmp_path) as shards:
        async with training(shards) as writer:
            await ask(shards, MOVE, KIND.CARRY_OUT)
            await reach(shards, MOVE, STATE.DONE)
        steps = [step_of(record.header) for record in shards.shards[1].log.read(1)]
        assert num_full == 2 and steps.count(MoveStep.COPY) == 1
        await check_rows(shards, writer, MOVED)


async def test_a_copy_waits_for_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no further ahead than it may, however often the archive fails, and then goes on from there."""
    monkeypatch.setattr(moving_shard, "_LOAD_BYTES", 1024)
    async with RestartableShards(tmp_path) as shards:
        async with training(shards) as writer:
            shard = shards.shards[1]._mover._shard
            failures = [UnavailableError("the object store is away")] * 3
            is_waited_for, goes_on = asyncio.Event(), asyncio.Event()

            async def wait_archived(first_seq: int, seq: int) -> None:
                if failures:
                    raise failures.pop()
                is_waited_for.set()
                await goes_on.wait()

            shard._load_ahead_bytes, shard._wait_archived = 1024, wait_archived
            await ask(shards, MOVE, KIND.CARRY_OUT)
            await is_waited_for.wait()
            progress = shards.shards[1]._ingest.partitions.moves.find("a")
            assert 1 <= progress.num_loads <= 2 and not progress.is_loaded
            goes_on.set()
            await reach(shards, MOVE, STATE.DONE)
        assert [step_of(record.header) for record in shards.shards[1].log.read(1)].count(MoveStep.COPY) == 1
        await check_rows(shards, writer, MOVED)


async def test_a_purge_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A move is over when its source has no row of it any more, and the source comes to that by itself."""
    monkeypatch.setattr(mover, "_LONGEST_PAUSE_S", 0.2)
    remove, num_failed = PartitionContents._remove, 0

    async def fails_at_first(contents: PartitionContents, partitions: Any) -> None:
        nonlocal num_failed
        if num_failed < 2:
            num_failed += 1
            raise StorageError("the disk is full")
        await remove(contents, partitions)

    async with RestartableShards(tmp_path) as shards:
        async with training(shards) as writer:
            stop = _Stop(monkeypatch, "purge", is_answered=False)
            await ask(shards, MOVE, KIND.CARRY_OUT)
            await stop.is_reached.wait()
            monkeypatch.setattr(PartitionContents, "_remove", fails_at_first)
            stop.goes_on.set()
            await reach(shards, MOVE, STATE.DONE)
        assert num_failed == 2
        assert not shards.shards[0]._ingest.partitions.moves.unpurged
        await check_rows(shards, writer, MOVED)


async def test_a_copy_is_kept_for_a_destination_that_is_slow(tmp_path: Path) -> None:
    """Which may scan its own store between two chunks; a copy that nobody reads for an hour is let go."""
    async with RestartableShards(tmp_path) as shards:
        async with training(shards):
            pass
        shard, now_s = shards.shards[0]._mover._shard, 0.0
        shard._clock_s = lambda: now_s
        async with await shards.connect(0) as client:
            move = move_to_idl(MOVE)
            first = await client.copy_partitions(idl.CopyPartitionsRequest(shards.server_id, move, 0, 0))
            request = idl.CopyPartitionsRequest(shards.server_id, move, first.copy_id, 1)
            for _ in range(2):
                now_s += 3599.0
                await shard.close_idle()
                assert (await client.copy_partitions(request)).data
            now_s += 3601.0
            await shard.close_idle()
            with pytest.raises(GoneError):
                await client.copy_partitions(request)


async def test_a_move_that_cannot_go_on_can_be_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is damaged, or a bug, ends no move by itself; status says why it does not go on."""
    errors: list[Exception] = [ValueError("a bug"), CorruptionError("a block is damaged")]

    async def fails(shard: MovingShard, move: Move, like: bytes) -> bytes:
        raise errors[-1]

    monkeypatch.setattr(MovingShard, "digest_incoming", fails)
    async with RestartableShards(tmp_path) as shards, training(shards):
        while errors:
            move = Move.of_map(FIRST, MOVE.partitions, move_id=str(len(errors)), destination=1)
            await ask(shards, move, KIND.CARRY_OUT)

            async def tells(move: Move = move) -> bool:
                return str(errors[-1]) in str((await ask(shards, move, KIND.LOOK)).error)

            await until(tells)
            assert (await ask(shards, move, KIND.ABORT)).state == STATE.UNDER_WAY
            await reach(shards, move, STATE.UNKNOWN)
            assert (await ask(shards, move, KIND.LOOK)).error == "somebody has asked for that"
            errors.pop()


async def test_a_silent_destination_loses_its_seal_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source takes writes again while its destination is gone; when that is back, the same move comes to its end."""
    monkeypatch.setattr(mover, "_SILENCE_S", 0.5)
    monkeypatch.setattr(mover, "_LOOK_S", 0.05)
    async with RestartableShards(tmp_path) as shards:
        async with training(shards) as writer:
            stop = _Stop(monkeypatch, "seal", is_answered=True)
            await ask(shards, MOVE, KIND.CARRY_OUT)
            await stop.is_reached.wait()
            await shards.stop(1)
            source = shards.shards[0]._ingest.partitions
            await until(lambda: source.moves.find("a").step == "lapse")
            await shards.start(1)
            await reach(shards, MOVE, STATE.DONE)
        await check_rows(shards, writer, MOVED)


@pytest.mark.parametrize("is_destination_up", [True, False])
async def test_a_source_that_is_restored_from_before_a_move(tmp_path: Path, is_destination_up: bool) -> None:
    """It asks the others before it answers for rows; while the destination is away, it does not wait for that one."""
    older, data = tmp_path / "older", tmp_path / "shard-0000"
    reader = hello_of_nobody(knows_partitions=True)
    async with RestartableShards(tmp_path) as shards:
        async with training(shards) as writer:
            await shards.stop(0)
            await asyncio.to_thread(shutil.copytree, data, older)
            await shards.start(0)
            await ask(shards, MOVE, KIND.CARRY_OUT)
            await reach(shards, MOVE, STATE.DONE)
        await shards.stop(0)
        if not is_destination_up:
            await shards.stop(1)
        await asyncio.to_thread(shutil.rmtree, data)
        await asyncio.to_thread(shutil.copytree, older, data)
        await shards.start(0)
        if not is_destination_up:
            async with await shards.connect(0, reader) as client:
                assert PartitionMap.decode((await client.hello(reader)).partitions) == FIRST
            await shards.start(1)
        moved = ROWS[np.isin(FIRST.partitions_of_rows(MOVED_SPEC.seed, ROWS), MOVE.partitions)]
        async with await shards.connect(1, reader) as client:
            assert await read_rows(client, moved) == {row: writer.rows[row] for row in moved.tolist()}
        async with await shards.connect(0, reader) as client:
            with pytest.raises(WrongRoutingError):
                await read_rows(client, moved[:1])


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
            await ask(shards, wrong, KIND.CARRY_OUT)
        writer = hello_of_nobody(idl.Role.WRITER, knows_partitions=True)
        async with await shards.connect(1, writer) as client:
            with pytest.raises(UnauthorizedError):
                await client.move_partitions(request)
        request = idl.StepMoveRequest(server_id=shards.server_id, move=move_to_idl(MOVE), step=idl.SourceStep.PURGE)
        async with await shards.connect(0) as client:
            with pytest.raises(RequestError, match="is not released"):
                await client.step_move(request)


async def test_a_source_tells_only_what_is_behind_a_place_of_its_log(tmp_path: Path) -> None:
    """Another record at the seq, or none, is a place that is lost; the records behind one that is there come cut."""
    async with RestartableShards(tmp_path) as shards:
        async with training(shards):
            pass
        async with await shards.connect(0) as client:
            move = move_to_idl(MOVE)
            first = await client.copy_partitions(idl.CopyPartitionsRequest(shards.server_id, move, 0, 0))
            log = shards.shards[0].log
            assert (first.position.seq, first.position.mark) == (log.last_seq, log.nonce_of(log.last_seq))

            async def follow(seq: int, mark: int | None) -> Any:
                at = idl.MovePosition(seq=seq, mark=mark)
                request = idl.FollowPartitionsRequest(shards.server_id, move, at, log.last_seq)
                return await client.follow_partitions(request)

            for seq, mark in (
                (1, log.nonce_of(1) + 1),
                (1, None),
                (log.last_seq + 1, log.nonce_of(1)),
                (0, log.nonce_of(1)),
            ):
                assert (await follow(seq, mark)).is_lost
            reply = await follow(1, log.nonce_of(1))
            assert not reply.is_lost
            assert reply.position == first.position
            assert reply.records[0].position.seq == 2
            assert (await follow(log.last_seq, log.nonce_of(log.last_seq))).records == []
            (lease,) = shards.shards[0].feed.followers.held()
            assert (lease.name, lease.seq) == ("move a", log.last_seq)
            for copy_id, chunk in ((first.copy_id + 1, 0), (first.copy_id, 2), (0, 1)):
                with pytest.raises(GoneError):
                    await client.copy_partitions(idl.CopyPartitionsRequest(shards.server_id, move, copy_id, chunk))
