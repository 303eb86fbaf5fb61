"""Servers with more shards than they were made with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_nodes import Cluster
from hellos import hello_of_nobody, hello_of_writer
from set_embeddings import delta_of, request_of
from shard_servers import serve_shards
from watched_server import wait_until

from headrace.paramserver.observe.status_query import StatusAccess, ask_shards
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.shard.service import Shard
from headrace.schemas.errors import (
    ConfigError,
    ProtocolMismatchError,
    RequestError,
    UnavailableError,
    WrongRoutingError,
)
from headrace.schemas.idl import idl
from headrace.schemas.move_records import Move, MoveRecord, MoveStep, Position
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.row_records import PRESENT
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="items.weight", num_rows=0, dim=4, dtype=DType.FLOAT32)
FIRST = PartitionMap.first(2)
ROWS = np.arange(200)
OWN = ROWS[FIRST.shards_of_rows(SPEC.seed, ROWS) == 0]
MOVE = Move.of_map(FIRST, tuple(range(0, 1024, 2)), move_id="a", destination=2)
COPY = MoveRecord(step=MoveStep.COPY, move=MOVE, position=Position(seq=0, mark=None))


def _read(row_ids: Any) -> Any:
    data = np.asarray(row_ids, "<i8").tobytes()
    return idl.GetEmbeddingsRequest(fqn=SPEC.fqn, row_ids=data, with_states=False, with_versions=False)


async def test_new_shards_own_nothing_and_change_nothing(tmp_path: Path) -> None:
    """Rows stay where the first number of shards puts them; clients without maps see only the shards from then."""
    async with serve_shards(tmp_path, 2) as ports, await ParamServerClient.connect("127.0.0.1", ports[0]) as writer:
        await writer.hello(hello_of_writer(SPEC))
        await writer.set_embeddings(request_of(delta_of(SPEC, OWN, 1.0), client_seq=1))
    async with AsyncExitStack() as stack:
        ports = await stack.enter_async_context(serve_shards(tmp_path, 3, first_shards=2, num_partitions=1024))
        clients = [
            await stack.enter_async_context(await ParamServerClient.connect("127.0.0.1", port)) for port in ports
        ]
        old = await clients[0].hello(hello_of_nobody())
        assert [place.shard for place in old.shards] == [0, 1]
        assert list((await clients[0].get_embeddings(_read(OWN))).presence) == [PRESENT] * OWN.size
        for refused in (clients[2].hello(hello_of_nobody()), clients[2].get_embeddings(_read(OWN))):
            with pytest.raises(ProtocolMismatchError, match=r"shard 2 was added to this server, .*upgrade it"):
                await refused

        for shard, client in enumerate(clients):
            told = await client.hello(hello_of_writer(SPEC, epoch=2, knows_partitions=True))
            assert (told.shard, len(told.shards), PartitionMap.decode(told.partitions)) == (shard, 3, FIRST)
            status = await client.status()
            assert (status.num_shards, list(status.without_partitions)) == (3, [])
        with pytest.raises(WrongRoutingError, match="belongs to shard 0, this is shard 2"):
            await clients[2].get_embeddings(_read(OWN))
        with pytest.raises(WrongRoutingError, match="belongs to shard 0, this is shard 2"):
            await clients[2].set_embeddings(request_of(delta_of(SPEC, OWN, 1.0), epoch=2, client_seq=1))
        await clients[0].set_embeddings(request_of(delta_of(SPEC, OWN, 2.0), epoch=2, client_seq=1))


async def test_a_shard_notes_whether_the_server_needs_it(tmp_path: Path) -> None:
    """A shard notes in its directory that it owns nothing, takes that back before a move begins, and notes it again."""
    note = tmp_path / "shard-0002" / "NEEDLESS"
    shards: list[Shard] = []
    changes = {"first_shards": 2, "num_partitions": 1024}
    async with serve_shards(tmp_path, 3, opened=shards, **changes):
        assert [(tmp_path / f"shard-000{n}" / "NEEDLESS").exists() for n in range(3)] == [False, False, True]
        ingest = shards[2]._ingest
        with pytest.raises(RequestError):
            await ingest.write_move(MoveRecord(step=MoveStep.PURGE, move=MOVE))
        assert note.exists()
        await ingest.write_move(COPY)
        assert not note.exists()
        await ingest.write_move(MoveRecord(step=MoveStep.PURGE, move=MOVE))
        assert note.exists()
        again = replace(MOVE, move_id="b")
        await ingest.write_move(MoveRecord(step=MoveStep.COPY, move=again, position=Position(seq=0, mark=None)))
        note.touch()  # as after a crash between a record and its note
        await ingest.write_move(MoveRecord(step=MoveStep.ACTIVATE, move=again, position=Position(seq=1, mark=None)))
        assert not note.exists()
        note.touch()
    shards.clear()
    async with serve_shards(tmp_path, 3, opened=shards, **changes):
        assert not note.exists()
        assert shards[2]._ingest.partitions.num_shards_like_it() == 2
        assert shards[1]._ingest.partitions.num_shards_like_it() == 2
    with pytest.raises(ConfigError, match=r"shard 2 owns partitions, and the settings name 2 shards: name all"):
        async with serve_shards(tmp_path / "other", 2, opened=(others := [])):
            await others[0]._hear_partitions(MOVE.apply_to(FIRST).encode())
            assert others[0]._ingest.partitions.known.num_shards == 3
            others.clear()
        async with serve_shards(tmp_path / "other", 2):
            pass


async def test_a_note_is_taken_back_before_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a move is in the log while the shard's directory still says that nobody needs the shard."""
    shards: list[Shard] = []
    async with serve_shards(tmp_path, 3, opened=shards, first_shards=2, num_partitions=1024):
        ingest, begun, goes_on = shards[2]._ingest, asyncio.Event(), asyncio.Event()
        ingest.before_first_move = None
        before, note = ingest.accepted_seq, ingest.note_needless

        async def slow(is_needless: bool) -> None:
            begun.set()
            await goes_on.wait()
            await note(is_needless)

        monkeypatch.setattr(ingest, "note_needless", slow)
        writing = asyncio.create_task(ingest.write_move(COPY))
        await begun.wait()
        assert ingest.accepted_seq == before
        goes_on.set()
        assert await writing == before + 1


def _num_shards(address: str) -> list[tuple[int, str | None]]:
    states = asyncio.run(ask_shards(StatusAccess.load(address, timeout_s=30.0)))
    return [(state.shard, state.error) for state in states]


def test_a_server_grows_and_shrinks_by_a_flag(tmp_path: Path) -> None:
    """`--shards 3` of a directory of 2 says in its log what it does; without the flag 3 stay; `--shards 2` ends it."""
    for shards, expected, is_told in ((2, 2, False), (3, 3, True), (None, 3, False), (2, 2, False)):
        with ServerProcess.start(tmp_path / "data", shards=shards, block_cache_bytes="32MiB") as server:
            assert _num_shards(server.address) == [(shard, None) for shard in range(expected)]
            told = [fact for fact in server.read_log() if fact["message"].startswith("server has grown; ")]
            assert [(fact["had_shards"], fact["has_shards"]) for fact in told] == [(2, 3)] * is_told
    with pytest.raises(UnavailableError, match=r"--shards 1: shard 1 of .* owns partitions"):
        ServerProcess.start(tmp_path / "data", shards=1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two shards on two nodes, with claims in an object store."""
    made = Cluster(tmp_path, num_shards=2, object_store=f"file://{tmp_path}/bucket")
    made.place(a=[0], b=[1])
    yield made
    made.close()


def test_nodes_of_a_cluster_learn_of_new_shards(cluster: Cluster) -> None:
    """A node that runs by the file from before learns the places of shards on a node that runs by the new one."""
    for name in "ab":
        cluster.start(name)
    cluster.more["first_shards"] = 2
    cluster.place(a=[0], b=[1], c=[2, 3])
    cluster.start("c")  # tells all others while it starts, and nobody waits for that
    all_four: list[tuple[int, str | None]] = [(shard, None) for shard in range(4)]
    wait_until(lambda: _num_shards(f"127.0.0.1:{cluster.port}") == all_four, "the places of the new shards")
    assert _num_shards(f"127.0.0.3:{cluster.port + 1}") == all_four
    for name in "ab":
        cluster.stop(name)
        cluster.start(name)
    assert _num_shards(f"127.0.0.2:{cluster.port}") == all_four
