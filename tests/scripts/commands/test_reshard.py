"""`headrace reshard` against real servers, while rows are written."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from command_line import CommandLine
from hellos import hello_of_nobody
from restartable_shards import MapWriter, RestartableShards, Rows, read_rows

from headrace.paramserver.observe.status_query import StatusAccess, ask_shards
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.idl import idl
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="items.weight", num_rows=0, dim=4, dtype=DType.FLOAT32, has_identities=True)
ROWS = np.arange(3000)


def _start(directory: Path, shards: int) -> ServerProcess:
    return ServerProcess.start(directory, shards=shards, block_cache_bytes="32MiB", memtable_bytes="16MiB")


def _ports(address: str) -> list[int]:
    states = asyncio.run(ask_shards(StatusAccess.load(address, timeout_s=60.0)))
    return [parse_address(state.address)[1] for state in states]


class _Writing:
    """Writes random rows from a thread until it is told to stop; `rows` is what is acked then."""

    def __init__(self, ports: list[int], earlier: MapWriter | None = None) -> None:
        self.writer = MapWriter(cast(RestartableShards, SimpleNamespace(ports=ports)), SPEC)
        if earlier is not None:
            self.writer.step, self.writer.rows = earlier.step, earlier.rows
            self.writer._client_seqs = earlier._client_seqs
        self._stop, self.has_begun = threading.Event(), threading.Event()

    def run(self) -> None:
        asyncio.run(self._write())

    async def _write(self) -> None:
        random = np.random.default_rng(7)
        await self.writer.write(ROWS)
        self.has_begun.set()
        while not self._stop.is_set():
            await self.writer.write(np.unique(random.choice(ROWS, 100)))
        await self.writer.close()

    @contextmanager
    def in_background(self) -> Iterator[None]:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self.run)
            try:
                assert self.has_begun.wait(200) or running.result()
                yield
            finally:
                self._stop.set()
            running.result()


async def _read(ports: list[int]) -> Rows:
    """Return all rows, each from the shard that owns it."""
    found: Rows = {}
    known: PartitionMap | None = None
    for shard, port in enumerate(ports):
        async with await ParamServerClient.connect("127.0.0.1", port) as client:
            told = PartitionMap.decode(
                (await client.hello(hello_of_nobody(idl.Role.ADMIN, knows_partitions=True))).partitions
            )
            known = told if known is None else known.merged(told)
            assert known == told
            if (owned := ROWS[known.shards_of_rows(SPEC.seed, ROWS) == shard]).size:
                found |= await read_rows(client, SPEC, owned)
    return found


def _counts(run: CommandLine, address: str) -> list[int]:
    return cast(list[int], run.json("reshard", "status", address)["partitions_by_shard"])


def test_a_server_grows_and_shrinks_under_writes(tmp_path: Path, run: CommandLine) -> None:
    """2 shards become 3 and 2 again; every acked row is where its owner is, whatever is killed meanwhile."""
    with _start(tmp_path / "data", 2) as server:
        first = _Writing(_ports(server.address))
        with first.in_background():
            assert "restart it with so many first" in run.refused("reshard", "start", server.address, "--shards", 3)
            assert _counts(run, server.address) == [512, 512]
    with _start(tmp_path / "data", 3) as server:
        ports = _ports(server.address)
        writing = _Writing(ports, first.writer)
        with writing.in_background():
            plan = run.json("reshard", "start", server.address, "--shards", 3, "--plan")
            assert (plan["is_started"], plan["without_partitions"]) == (False, [])
            assert sum(len(stage["moves"]) for stage in plan["plan"]["stages"]) >= 1024 // 3 - 60
            assert run.json("reshard", "status", server.address)["reshard"] is None
            assert "Started" in run("reshard", "start", server.address, "--shards", 3)
            pids = [
                state.sample.pid for state in asyncio.run(ask_shards(StatusAccess.load(server.address, timeout_s=60)))
            ]  # type: ignore[union-attr]
            os.kill(pids[0], signal.SIGKILL)
            assert "All partitions have moved" in run("reshard", "resume", server.address, "--wait")
            counts = _counts(run, server.address)
            assert sum(counts) == 1024 and min(counts) > 300
            assert "All partitions have moved" in run("reshard", "start", server.address, "--shards", 2, "--wait")
            assert _counts(run, server.address) == [512, 512, 0]
            assert "nothing to move" in run("reshard", "start", server.address, "--shards", 2)
        assert asyncio.run(_read(ports)) == writing.writer.rows
    with _start(tmp_path / "data", 2) as server:
        assert asyncio.run(_read(_ports(server.address))) == writing.writer.rows


def test_what_is_in_the_way_is_named(tmp_path: Path, run: CommandLine) -> None:
    """A client that does not know partitions, a node that is not there, and a reshard that is not: one line each."""
    with _start(tmp_path / "data", 2) as server:
        says = {
            ("start", server.address, "--drain", "x"): "there is no node x; there are",
            ("start", server.address, "--move", "1024", "--to", 1): "there are partitions 0 to 1023",
            ("start", server.address, "--move", "1", "--to", 2): "there are shards 0 to 1",
            ("pause", server.address): "no reshard is under way",
        }
        for arguments, text in says.items():
            assert text in run.refused("reshard", *arguments)

        async def with_stranger() -> None:
            host, port = parse_address(server.address)
            async with await ParamServerClient.connect(host, port) as client:
                await client.hello(hello_of_nobody(run="old", client="reader"))
                ask: Any = await asyncio.to_thread(run, "reshard", "start", server.address, "--shards", 1, "--plan")
                assert "It cannot start yet: old/reader: connected, and do not know partitions" in ask
                refused = await asyncio.to_thread(run.refused, "reshard", "start", server.address, "--shards", 1)
                assert "old/reader: connected, and of a release that does not know partitions" in refused

        asyncio.run(with_stranger())
        assert "No reshard is under way." in run("reshard", "status", server.address)


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
