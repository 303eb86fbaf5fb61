"""`headrace reshard` against real servers, while rows are written."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any, cast

import pytest
from command_line import CommandLine
from file_modes import open_to_others, open_umask
from hellos import hello_of_nobody
from restartable_shards import Places, check_rows, training

from headrace.paramserver.observe.sample import ShardSample
from headrace.paramserver.observe.status_query import StatusAccess, ask_shards
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import UnavailableError
from headrace.schemas.partition_map import PartitionMap


def _start(directory: Path, shards: int) -> ServerProcess:
    return ServerProcess.start(directory, shards=shards, block_cache_bytes="32MiB", memtable_bytes="16MiB")


async def _samples(address: str) -> list[ShardSample]:
    states = await ask_shards(StatusAccess.load(address, timeout_s=60.0))
    assert all(state.sample is not None for state in states)
    return [cast(ShardSample, state.sample) for state in states]


async def _places(address: str) -> Places:
    states = await ask_shards(StatusAccess.load(address, timeout_s=60.0))
    server_id = cast(ShardSample, states[0].sample).server_id
    return Places(server_id, [parse_address(state.address)[1] for state in states])


async def _map(places: Places) -> PartitionMap:
    """Return the shards' map, once each has heard of all moves."""
    while True:
        maps = []
        for shard in range(len(places.ports)):
            async with await places.connect(shard) as client:
                maps.append(PartitionMap.decode((await client.status()).partitions))
        if all(known == maps[0] for known in maps):
            return maps[0]
        await asyncio.sleep(0.1)


async def _wait_over(places: Places) -> None:
    """Return once no reshard is under way, however often shard 0 goes away."""
    while True:
        try:
            async with await places.connect(0) as client:
                if (await client.status()).reshard is None:
                    return
        except UnavailableError:
            pass
        await asyncio.sleep(0.1)


async def test_a_server_grows_and_shrinks_under_writes(tmp_path: Path, run: CommandLine) -> None:
    """2 shards become 3 and 2 again; every acked row is where its owner is, whatever is killed meanwhile."""
    with _start(tmp_path / "data", 2) as server:
        assert "restart it with so many first" in await asyncio.to_thread(
            run.refused, "reshard", "start", "--server", server.address, "--shards", 3
        )
    with _start(tmp_path / "data", 3) as server:

        async def tell(action: str, *arguments: object) -> str:
            return await asyncio.to_thread(run, "reshard", action, "--server", server.address, *arguments)

        async def tell_json(action: str, *arguments: object) -> Any:
            return await asyncio.to_thread(run.json, "reshard", action, "--server", server.address, *arguments)

        places = await _places(server.address)
        async with training(places) as writer:
            plan = await tell_json("start", "--shards", 3, "--plan")
            assert (plan["is_started"], plan["without_partitions"]) == (False, [])
            assert sum(len(stage["moves"]) for stage in plan["plan"]["stages"]) > 280
            status = await tell_json("status")
            assert (status["reshard"], status["partitions_by_shard"]) == (None, [512, 512, 0])
            assert "Started" in await tell("start", "--shards", 3)
            os.kill((await _samples(server.address))[0].pid, signal.SIGKILL)
            await _wait_over(places)
            grown = (await tell_json("status"))["partitions_by_shard"]
            assert sum(grown) == 1024
            assert min(grown) > 300
        await check_rows(places, writer, await _map(places))
        assert "All partitions have moved" in await tell("start", "--shards", 2, "--wait")
        assert (await tell_json("status"))["partitions_by_shard"] == [512, 512, 0]
        assert "nothing to move" in await tell("start", "--shards", 2)
        await check_rows(places, writer, await _map(places))
    with _start(tmp_path / "data", 2) as server:
        places = await _places(server.address)
        await check_rows(places, writer, await _map(places))


async def test_rows_that_have_moved_are_in_the_object_store(tmp_path: Path, run: CommandLine) -> None:
    """The archive has them before they leave the old shard, so a server that loses its disk has every row."""
    store, data = f"file://{tmp_path / 'store'}", tmp_path / "data"
    settings = {"object_store": store, "block_cache_bytes": "32MiB", "memtable_bytes": "16MiB"}
    with ServerProcess.start(data, shards=2, **settings) as server:
        places = await _places(server.address)
        async with training(places) as writer:
            moved = await asyncio.to_thread(
                run, "reshard", "start", "--server", server.address, "--move", "0-511", "--to", 1, "--wait"
            )
            assert "All partitions have moved" in moved
        partition_map = await _map(places)
        await check_rows(places, writer, partition_map)
    await asyncio.to_thread(shutil.rmtree, data)
    with open_umask():
        await asyncio.to_thread(run, "restore", store, "--data", data)
    assert open_to_others(data) == []
    with ServerProcess.start(data, **settings) as server:
        places = await _places(server.address)
        assert await _map(places) == partition_map
        await check_rows(places, writer, partition_map)


def test_what_is_in_the_way_is_named(tmp_path: Path, run: CommandLine) -> None:
    """A client that does not know partitions, a node that is not there, and a reshard that is not: one line each."""
    with _start(tmp_path / "data", 2) as server:
        says = {
            ("start", "--server", server.address, "--drain", "x"): "there is no node x; there are",
            ("start", "--server", server.address, "--move", "1024", "--to", 1): "there are partitions 0 to 1023",
            ("start", "--server", server.address, "--move", "1", "--to", 2): "there are shards 0 to 1",
            ("pause", "--server", server.address): "no reshard is under way",
        }
        for arguments, text in says.items():
            assert text in run.refused("reshard", *arguments)

        async def with_stranger() -> None:
            host, port = parse_address(server.address)
            async with await ParamServerClient.connect(host, port) as client:
                await client.hello(hello_of_nobody(run="old", client="reader"))
                ask: Any = await asyncio.to_thread(
                    run, "reshard", "start", "--server", server.address, "--shards", 1, "--plan"
                )
                assert "It cannot start yet: old/reader: connected, and do not know partitions" in ask
                refused = await asyncio.to_thread(
                    run.refused, "reshard", "start", "--server", server.address, "--shards", 1
                )
                assert "old/reader: connected, and of a release that does not know partitions" in refused

        asyncio.run(with_stranger())
        assert "No reshard is under way." in run("reshard", "status", "--server", server.address)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["start"], "say what shall move"),
        (["start", "--move", "1"], "--move and --to go together"),
        (["start", "--move", "3-1", "--to", "0"], "give numbers and ranges"),
        (["start", "--move", "x", "--to", "0"], "give numbers and ranges"),
        (["start", "--move", "1", "--to", "0", "--balance", "rows"], "--move says itself what moves"),
        (["start", "--shards", "2", "--drain", "a"], "--shards and --drain: give one of them"),
        (["pause", "--shards", "2"], "--shards goes with start"),
        (["status", "--plan"], "--plan goes with start"),
    ],
)
def test_flags_that_do_not_go_together(arguments: list[str], text: str, run: CommandLine) -> None:
    """Wrong flags are refused before anybody is asked."""
    assert text in run.refused("reshard", *arguments)
