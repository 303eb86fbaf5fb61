"""Moves between the processes of a server."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from hellos import hello_of_nobody
from restartable_shards import Places, ask, check_rows, training
from waiting import until

from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.move_records import Move
from headrace.schemas.partition_map import PartitionMap

pytestmark = pytest.mark.timeout(300)

STATE, KIND = idl.MoveState, idl.MoveRequestKind


async def _places(server: ServerProcess) -> Places:
    host, port = parse_address(server.address, default_port=0)
    async with await ParamServerClient.connect(host, port) as client:
        hello = await client.hello(hello_of_nobody())
    return Places(hello.server_id, [place.port for place in hello.shards])


async def _carry_out(
    shards: Places, before: PartitionMap, destination: int, kill: int | None, server: ServerProcess
) -> PartitionMap:
    """Move half of shard 0's first partitions to a shard, as a coordinator does; kill a shard once it is under way."""
    move_id = str(before.versions.sum())
    move = Move.of_map(before, tuple(range(0, 1024, 4)), move_id=move_id, destination=destination)

    async def is_done() -> bool:
        nonlocal kill
        with contextlib.suppress(UnavailableError):
            state = (await ask(shards, move, KIND.CARRY_OUT)).state
            if state == STATE.UNDER_WAY and kill is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server.shard_pids[kill], signal.SIGKILL)
                kill = None
            return bool(state == STATE.DONE)
        return False

    await until(is_done, f"the end of move {move_id}")
    return move.apply_to(before)


async def test_half_a_shard_goes_to_and_fro_while_shards_are_killed(tmp_path: Path) -> None:
    """A trainer writes all the while; whichever process is killed, each acked row is there, in its version, once."""
    with ServerProcess.start(tmp_path / "data", shards=2, max_quick_deaths=100) as server:
        shards, partition_map = await _places(server), PartitionMap.first(2)
        async with training(shards) as writer:
            for destination, kill in ((1, None), (0, 0), (1, 1), (0, None), (1, 0), (0, 1)):
                partition_map = await _carry_out(shards, partition_map, destination, kill, server)
        await check_rows(shards, writer, partition_map)
