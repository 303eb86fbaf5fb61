"""Real NATS servers, whose streams a follower cannot begin, or which others take over while a follower may."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_nodes import SERVER_ID, Cluster
from cluster_trainer import Trainer
from machines import admin_dial, listening
from nats_cluster import nats_cluster, needs_nats_server, remove_streams
from nats_servers import NatsServers
from scripted_follower import DECLINED, ScriptedFollower
from waiting import WAIT_S, until, wait_until

from headrace import cli
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.rpc.address import parse_addresses
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.idl import idl

pytestmark = [needs_nats_server, pytest.mark.timeout(300)]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[NatsServers]:
    with nats_cluster(tmp_path / "nats") as running:
        yield running


def test_a_stream_that_is_there_or_nats_that_is_away_leaves_the_shard_where_it_is(
    engine: NatsServers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The follower declines and says why; it takes over once the stream was removed, or NATS is back."""
    with (
        ServerProcess.start(tmp_path / "0") as first,
        ServerProcess.start(tmp_path / "1", follow=first.address, **engine.log_settings) as second,
    ):
        trainer = Trainer(first.address)
        with trainer.streamer, EmbeddingReplica(first.address) as replica:
            trainer.settle(replica)
            for server in engine.servers:
                server.kill()
            assert _promote(second) != 0
            trainer.settle(replica)
            for server in engine.servers:
                server.start()
            wait_until(lambda: _promote(second) == 0, "NATS")
            trainer.settle(replica)
            with (
                ServerProcess.start(tmp_path / "2", follow=second.address) as third,
                ServerProcess.start(tmp_path / "3", follow=third.address, **engine.log_settings) as fourth,
            ):
                assert _promote(third) == 0
                trainer.settle(replica)
                second.stop()
                wait_until(lambda: _promote(fourth) != 0 and "nats stream rm" in capsys.readouterr().err, "the advice")
                trainer.settle(replica)
                asyncio.run(remove_streams(engine.url))
                wait_until(lambda: _promote(fourth) == 0, "the stream's end")
                trainer.settle(replica)
                trainer.streamer.close()


def _promote(server: ServerProcess) -> int:
    return cli.main(["promote", "--server", server.address])


def test_a_standby_that_takes_the_stream_over_asks_the_follower(engine: NatsServers, tmp_path: Path) -> None:
    """An owner offers its shard and is lost: its standby takes updates once the follower has declined, not before."""
    cluster = Cluster(tmp_path, num_shards=2, log=engine.url)
    cluster.standbys = {"a": [], "b": [0]}
    cluster.place(a=[0], b=[1])
    try:
        for name in ("a", "b"):
            cluster.start(name, log_max_bytes="128MiB", log_monitor=",".join(engine.monitors))
        trainer = Trainer(cluster.seeds)
        with trainer.streamer, EmbeddingReplica(cluster.seeds) as replica:
            trainer.settle(replica)
            asyncio.run(_offer_and_lose(cluster, trainer))
            trainer.settle(replica)
    finally:
        cluster.close()


async def _offer_and_lose(cluster: Cluster, trainer: Trainer) -> None:
    follower = ScriptedFollower()
    follower.server_id = SERVER_ID
    async with listening(follower, follower.port):
        client, _ = await admin_dial().connect(*parse_addresses(cluster.seeds)[0])
        async with client:
            offer = idl.PromoteShardRequest(shard=0, to=follower.address, hold_ms=60_000)
            await client.promote_shard(offer)
        follower.state = None
        await asyncio.to_thread(cluster.running.pop("a").close)
        num_asked = len(follower.offers)
        await asyncio.to_thread(trainer.step)
        flushing = asyncio.create_task(asyncio.to_thread(trainer.streamer.flush, timeout_s=WAIT_S))
        await until(lambda: len(follower.offers) >= num_asked + 3, "the standby's questions")
        assert not flushing.done()
        follower.state = DECLINED
        await flushing
