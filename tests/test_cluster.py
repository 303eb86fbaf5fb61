"""A server on three hosts: a trainer and a replica go on while its shards and nodes come, go and move."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_nodes import HOSTS, Cluster
from cluster_trainer import Trainer

from headrace import cli
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.schemas.errors import HeadraceError


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, object_store=f"file://{tmp_path}/bucket")
    try:
        for name in HOSTS:
            made.start(name)
        yield made
    finally:
        made.close()


def test_training_and_serving_go_on_while_shards_move(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """A shard that comes back on another host is found by a living trainer and replica; an old copy is ignored."""
    trainer = Trainer(f"127.0.0.9:1,{cluster.seeds.partition(',')[0]}")  # the first seed does not answer
    with trainer.streamer, EmbeddingReplica(cluster.seeds) as replica:
        trainer.settle(replica)

        # A node is killed and comes back at its place.
        cluster.running.pop("c").close()
        trainer.step()
        cluster.start("c")
        trainer.settle(replica)

        # A shard moves to another host.
        cluster.stop("b")
        trainer.step()
        shutil.copytree(cluster.path / "b", cluster.path / "old")
        cluster.place(a=[0], c=[2, 1])
        cluster.stop("c")
        cluster.move(1, "b", "c")
        cluster.start("c")
        trainer.settle(replica)

        # Somebody starts the old copy at the old place, with the old file.
        cluster.place(a=[0], b=[1], c=[2])
        with pytest.raises(HeadraceError, match="exit code 4"):
            cluster.start("b", cluster.path / "old")
        trainer.settle(replica)
        assert cli.main(["status", "--server", cluster.seeds, "--json"]) == 0
        shards = json.loads(capsys.readouterr().out)["shards"]
        assert all(shard["term"] for shard in shards)
        assert [shard["address"] for shard in shards] == [
            f"127.0.0.1:{cluster.port}",
            f"127.0.0.3:{cluster.port + 1}",
            f"127.0.0.3:{cluster.port}",
        ]
        cluster.place(a=[0], c=[2, 1])
        cli.main(["doctor", "--cluster", str(cluster.file), "--node", "a", "--data", str(cluster.path / "a"), "--json"])
        found = json.loads(capsys.readouterr().out)["findings"]
        assert [finding["text"] for finding in found if finding["subject"] == "directory"] == [
            f"{cluster.path / 'a'}: a store of 1 shard",
        ]


def test_a_snapshot_over_hosts_needs_an_object_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without one, `snapshot create` says in one line what is needed, and leaves nothing."""
    cluster = Cluster(tmp_path)
    try:
        for name in HOSTS:
            cluster.start(name)
        assert cli.main(["snapshot", "create", "--server", cluster.seeds, "--now"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "give the cluster file one (object_store: s3://bucket/prefix)" in line
        assert not list(tmp_path.glob("*/snapshots"))
    finally:
        cluster.close()
