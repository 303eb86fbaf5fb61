"""A server on two hosts with its log in NATS: training and serving go on while hosts and their disks vanish."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import numpy as np
import pytest
from cluster_nodes import HOSTS, Cluster
from cluster_trainer import Trainer
from counted_training import make_snapshot
from held_ports import hold_ports
from nats_cluster import nats_cluster, needs_nats_server, remove_streams
from nats_servers import NatsServers
from stored_rows import read_rows
from watched_server import WAIT_S, wait_until

from headrace import cli
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import HeadraceError, UnavailableError

pytestmark = [needs_nats_server, pytest.mark.timeout(300)]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[NatsServers]:
    with nats_cluster(tmp_path / "nats") as running:
        yield running


@pytest.fixture
def cluster(servers: NatsServers, tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes of a shard each, and each a standby of the other's."""
    made = Cluster(tmp_path, num_shards=2, log=servers.url)
    made.standbys = {"a": [1], "b": [0]}
    made.place(a=[0], b=[1])
    try:
        for name in ("a", "b"):
            _start(made, servers, name)
        yield made
    finally:
        made.close()


def _start(cluster: Cluster, servers: NatsServers, name: str) -> None:
    cluster.start(name, log_max_bytes="128MiB", log_monitor=",".join(servers.monitors))


class Lookups:
    """Looks rows up without a pause, in a thread; `failures` has what went wrong."""

    def __init__(self, replica: EmbeddingReplica) -> None:
        self.failures: list[BaseException] = []
        self.num_done = 0
        self._replica, self._ends = replica, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Lookups:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ends.set()
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        while not self._ends.wait(0.005):
            try:
                self._replica.lookup("weight", np.arange(60))
                self.num_done += 1
            except HeadraceError as exc:
                self.failures.append(exc)


def test_a_node_and_its_disk_vanish_amid_training(
    cluster: Cluster, servers: NatsServers, capsys: pytest.CaptureFixture[str]
) -> None:
    """No step and no lookup fails; after a flush every row of trainer, server and replica is equal, bit for bit.

    The node comes back with an empty directory, follows, and gets its shard again by a move.
    """
    trainer = Trainer(cluster.seeds)
    with trainer.streamer, EmbeddingReplica(cluster.seeds) as replica:
        trainer.settle(replica)
        with Lookups(replica) as lookups:
            for _ in range(20):
                trainer.step()
            cluster.running.pop("a").close()
            shutil.rmtree(cluster.path / "a")
            for _ in range(20):
                trainer.step()
            trainer.settle(replica)
            wait_until(lambda: _nodes(cluster, capsys) == ["b", "b"], "the map")

            _start(cluster, servers, "a")
            trainer.settle(replica)
            assert cli.main(["promote", "--shard", "0", "--to", "a", "--server", cluster.seeds]) == 0
            assert "shard 0 is on node a" in capsys.readouterr().out
            trainer.settle(replica)
            wait_until(lambda: _nodes(cluster, capsys) == ["a", "b"], "the map")

            cluster.running.pop("b").close()
            shutil.rmtree(cluster.path / "b")
            trainer.settle(replica)
        assert lookups.num_done > 100
        assert lookups.failures == []


def test_a_standby_feeds_replicas_and_begins_by_itself(
    servers: NatsServers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A replica at a standby costs the owner nothing; a standby of a log without its beginning takes a snapshot."""
    cluster = Cluster(tmp_path, num_shards=2, log=servers.url, object_store=f"file://{tmp_path / 'store'}")
    cluster.standbys = {"a": [1], "b": [0]}
    cluster.place(a=[0], b=[1])
    try:
        for name in ("a", "b"):
            _start(cluster, servers, name)
        trainer = Trainer(cluster.seeds)
        with trainer.streamer, EmbeddingReplica(f"{HOSTS['b']}:{cluster.port + 1}") as replica:
            trainer.settle(replica)
            followers = _status(cluster, capsys)["followers"]
            assert [each["name"] for each in followers if each["shard"] == 0] == ["standby"]
            for _ in range(20):
                trainer.step()
                trainer.streamer.flush()
            assert cli.main(["snapshot", "create", "--server", cluster.seeds, "--now"]) == 0
            cluster.running.pop("b").close()
            shutil.rmtree(cluster.path / "b")
            asyncio.run(_purge(servers.url, before_seq=5))
            _start(cluster, servers, "b")
            log = cluster.running["b"].log_path
            wait_until(lambda: log.read_text().count("the shard begins with a snapshot") == 2, "the new copies")
            trainer.settle(replica)
    finally:
        cluster.close()


async def _purge(url: str, *, before_seq: int) -> None:
    """Remove the first messages of every stream."""
    client = await nats.connect(url.removeprefix("nats://").split(","))
    try:
        streams = client.jetstream()
        for info in await streams.streams_info():
            await streams.purge_stream(info.config.name, seq=before_seq)
    finally:
        await client.close()


def _status(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert cli.main(["status", "--server", cluster.seeds, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def _nodes(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    cli.main(["status", "--server", cluster.seeds, "--json"])
    said = capsys.readouterr().out  # nothing while no shard answers in time
    return [shard["node"] for shard in json.loads(said)["shards"]] if said else []


def test_a_shard_that_was_paused_serves_nothing_from_before(
    cluster: Cluster, servers: NatsServers, capsys: pytest.CaptureFixture[str]
) -> None:
    """While its process stands still another one takes its shard; awake again it steps down, and follows that one."""
    trainer = Trainer(cluster.seeds)
    with trainer.streamer, EmbeddingReplica(cluster.seeds) as replica, Lookups(replica) as lookups:
        trainer.settle(replica)
        paused = cluster.running["a"].shard_pids[0]
        os.kill(paused, signal.SIGSTOP)
        try:
            for _ in range(5):
                trainer.step()
            trainer.settle(replica)
            wait_until(lambda: _nodes(cluster, capsys)[:1] == ["b"], "the map")
        finally:
            os.kill(paused, signal.SIGCONT)
        wait_until(lambda: "becomes a standby" in cluster.running["a"].log_path.read_text(), "the fenced shard")
        trainer.settle(replica)
        for back in ("a", "b"):
            wait_until(
                lambda to=back: cli.main(["promote", "--shard=0", "--to", to, "--server", cluster.seeds]) == 0,
                "the move",
            )
            trainer.settle(replica)
            wait_until(lambda to=back: _nodes(cluster, capsys)[:1] == [to], "the map")
    assert lookups.failures == []


def test_a_server_on_one_host_comes_back_on_a_new_disk(servers: NatsServers, tmp_path: Path) -> None:
    """Its snapshot and archive make the directory, and its streams have what was acked since: nothing is lost."""
    settings = {**servers.log_settings, "port": hold_ports(1)}
    settings |= {"object_store": f"file://{tmp_path / 'store'}", "archive_segment_s": 3600}
    with ServerProcess.start(tmp_path / "data", **settings) as server:
        trainer = Trainer(server.address)
        with trainer.streamer:
            trainer.step()
            trainer.streamer.flush()
            make_snapshot(server)
            trainer.step()
            trainer.streamer.flush()  # acked, and archived nowhere
            rows = read_rows(server.address, "weight", range(60))
            server.kill()
            shutil.rmtree(tmp_path / "data")
            with pytest.raises(UnavailableError, match=r"start with --restore, or run headrace restore .* --log nats:"):
                ServerProcess.start(tmp_path / "data", **settings)
            command = ["restore", str(settings["object_store"]), "--data", str(tmp_path / "data"), "--log", servers.url]
            assert cli.main([*command, "--at", "step=1"]) == 1
            assert cli.main(command) == 0
            with ServerProcess.start(tmp_path / "data", **settings) as restored:
                again = read_rows(restored.address, "weight", range(60))
                assert np.array_equal(again.weights, rows.weights)
                assert np.array_equal(again.presence, rows.presence)
                trainer.step()
                trainer.streamer.flush()
                assert trainer.streamer.audit().is_equal


def test_a_stream_that_is_lost_is_made_anew_from_the_archive(servers: NatsServers, tmp_path: Path) -> None:
    """Four commands bring back a server whose engine has lost all disks; trainers send what was not archived."""
    store, data = f"file://{tmp_path / 'store'}", tmp_path / "data"
    settings = {**servers.log_settings, "port": hold_ports(1), "object_store": store, "archive_segment_s": 3600}
    with ServerProcess.start(data, **settings) as server:
        trainer = Trainer(server.address)
        with trainer.streamer, EmbeddingReplica(server.address) as replica, Lookups(replica) as lookups:
            trainer.settle(replica)
            make_snapshot(server)
            trainer.settle(replica)  # acked, and archived nowhere
            server.kill()
            asyncio.run(remove_streams(servers.url))
            with pytest.raises(HeadraceError, match="'The engine has lost data' in docs"):
                ServerProcess.start(data, **settings)
            data.rename(tmp_path / "lost")
            assert cli.main(["restore", store, "--data", str(tmp_path / "restored")]) == 0
            in_files = {"port": settings.pop("port"), "object_store": store}
            with (
                ServerProcess.start(tmp_path / "restored", **in_files) as restored,
                ServerProcess.start(data, follow=restored.address, **settings) as anew,
            ):
                assert cli.main(["promote", "--server", anew.address]) == 0
                trainer.settle(replica)
                assert trainer.streamer.audit().is_equal
    assert lookups.failures == []


def test_four_shards_fit_small_servers(
    servers: NatsServers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a bound, the streams of four shards share what the engine's servers have room for, here below 2 GB."""
    monitors = ",".join(servers.monitors)
    for _ in range(2):  # the second start finds the streams
        with ServerProcess.start(tmp_path / "data", shards=4, log=servers.url, log_monitor=monitors) as server:
            wait_until(lambda at=server.address: len(_stream_bounds(at, capsys)) == 4, "all shards")
            bounds = _stream_bounds(server.address, capsys)
            assert len(set(bounds)) == 1
            assert 0 < bounds[0] <= 384 << 20


def _stream_bounds(address: str, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """Return the bounds of all shards' streams; none while one does not answer yet."""
    capsys.readouterr()
    if cli.main(["status", "--server", address, "--json"]):
        return []
    return [shard["log"]["stream_max_bytes"] for shard in json.loads(capsys.readouterr().out)["shards"]]


def test_a_full_stream_loses_nothing(servers: NatsServers, tmp_path: Path) -> None:
    """While the stream has no room trainers keep their rows and go on; with room again everything is there."""
    with ServerProcess.start(
        tmp_path / "data", log=servers.url, log_monitor=",".join(servers.monitors), log_max_bytes="1MiB"
    ) as server:
        trainer = Trainer(server.address, num_rows=4000)
        with trainer.streamer, EmbeddingReplica(server.address) as replica:
            trainer.settle(replica)

            def is_full() -> bool:
                trainer.step()
                return "no room" in str(trainer.streamer.stats().last_error)

            wait_until(is_full, "the full stream")
            trainer.step()
            asyncio.run(_widen(servers.url, 16 << 20))
            trainer.settle(replica)


async def _widen(url: str, max_bytes: int) -> None:
    """Raise the bound of every stream."""
    client = await nats.connect(url.removeprefix("nats://").split(","))
    try:
        streams = client.jetstream()
        for info in await streams.streams_info():
            await streams.update_stream(dataclasses.replace(info.config, max_bytes=max_bytes))
    finally:
        await client.close()
