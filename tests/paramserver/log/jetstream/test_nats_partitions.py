"""The engine amid network partitions: servers cut from each other and from us, each in a network namespace."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats_cluster import access_of, append_surely
from nats_network import NatsNetwork, nats_network, needs_network
from nats_servers import NatsServer

from headrace.paramserver.log.jetstream.engine import PublishOutcome, PublishReply
from headrace.paramserver.log.jetstream.nats_address import NatsAccess, NatsLogAddress
from headrace.paramserver.log.jetstream.nats_engine import NatsConnection, NatsEngine
from headrace.paramserver.log.jetstream.nats_stream import open_engine
from headrace.paramserver.log.jetstream.stream_log import JetStreamUpdateLog
from headrace.schemas.errors import UnavailableError
from headrace.schemas.stream_records import StreamRecordKind, encode_stream_note

_DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsNetwork]:
    with nats_network(tmp_path_factory.mktemp("nats")) as made:
        yield made


def _only(engine: NatsEngine, *servers: NatsServer) -> NatsEngine:
    address = NatsLogAddress.parse("nats://" + ",".join(server.address for server in servers))
    return NatsEngine(NatsAccess(address=address), engine.stream)


async def _read_everywhere(engine: NatsEngine, servers: list[NatsServer], num_messages: int) -> list[list[bytes]]:
    """Return the messages as each server has them, once it has so many."""
    found = []
    async with asyncio.timeout(_DEADLINE_S):
        for server in servers:
            messages: list[bytes] = []
            while len(messages) < num_messages:
                connection: NatsConnection | None = None
                try:
                    connection = await _only(engine, server).connect()
                    while len(messages) < num_messages:
                        read = await connection.read(len(messages) + 1, max_bytes=1 << 20)
                        messages += [bytes(each.payload) for each in read]
                except UnavailableError:
                    pass
                finally:
                    if connection is not None:
                        await connection.close()
            found.append(messages)
    return found


@needs_network
async def test_isolated_leader_acks_nothing_and_keeps_nothing(network: NatsNetwork) -> None:
    """A leader that is cut off acks nothing, the others go on, and what it took alone is not there afterwards."""
    cluster = network.servers
    engine = await open_engine(access_of(cluster), server_id="s", shard=0, max_bytes=16 << 20)
    await append_surely(engine, b"before", 0)
    leader = cluster.wait_leader(engine.stream)
    others = [server for server in cluster.servers if server is not leader]
    replies: list[PublishReply] = []
    minority = await _only(engine, leader).connect()
    try:
        network.isolate(leader)
        for number in range(5):
            minority.publish([b"alone"], expected_last=1 + number, on_reply=replies.append)
        await append_surely(_only(engine, *others), b"after", 1)
        assert [reply for reply in replies if reply.outcome is PublishOutcome.ACKED] == []
    finally:
        network.mend()
        await minority.close()
    await append_surely(engine, b"last", 2)
    for messages in await _read_everywhere(engine, cluster.servers, 3):
        assert messages == [b"before", b"after", b"last"]


@needs_network
async def test_standby_leaves_a_server_that_is_cut_off(network: NatsNetwork, tmp_path: Path) -> None:
    """A standby whose server is cut off reads on from the others, and notices there that the owner is silent."""
    cluster = network.servers
    engine = await open_engine(access_of(cluster), server_id="s", shard=3, max_bytes=16 << 20)
    cut_off = cluster.wait_leader(engine.stream)
    others = [server for server in cluster.servers if server is not cut_off]
    note = {"term": 1, "mark": 5, "owner": "a:1"}
    opened = encode_stream_note(StreamRecordKind.OPEN, seq=1, previous=(0, 0), **note)
    await append_surely(engine, opened, 0)
    await _read_everywhere(engine, cluster.servers, 1)
    engine._next = cluster.servers.index(cut_off) - 1  # over one the log begins to read, over the next it follows
    standby = await JetStreamUpdateLog.open(engine, tmp_path, begin_seq=1)
    try:
        async with asyncio.timeout(_DEADLINE_S):
            await standby.wait_beyond(0)
            assert standby._connection is not None and standby._connection.server.startswith(cut_off.name)
            network.isolate(cut_off)
            heartbeat = encode_stream_note(StreamRecordKind.HEARTBEAT, seq=2, **note)
            await append_surely(_only(engine, *others), heartbeat, 1)
            await standby.wait_beyond(1)
            await standby.wait_silent()
    finally:
        network.mend()
        await standby.close()
