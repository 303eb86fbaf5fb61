"""A server on several hosts, its logs in files: shards move between nodes while a trainer and a replica go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_nodes import HOSTS, Cluster
from cluster_trainer import Trainer
from waiting import wait_until

from headrace import cli
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.schemas.errors import HeadraceError


@pytest.fixture(params=["no terms", "object store"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    stored = {"object_store": f"file://{tmp_path}/bucket"} if request.param == "object store" else {}
    made = Cluster(tmp_path, **stored)
    made.standbys = {"b": [0], "c": [0]}
    made.place(a=[0], b=[1], c=[2])
    try:
        for name in HOSTS:
            made.start(name)
        yield made
    finally:
        made.close()


def _status(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> dict[int, Any]:
    capsys.readouterr()
    cli.main(["status", "--server", cluster.seeds, "--json"])
    return {shard["shard"]: shard for shard in json.loads(capsys.readouterr().out)["shards"]}


def _promote(cluster: Cluster, node: str, *more: str) -> int:
    return cli.main(["promote", "--server", cluster.seeds, "--shard", "0", "--to", node, *more])


def test_a_shard_moves_there_and_back(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Its node's name and term are told everywhere; the disks decide over restarts, whatever the file says of it."""
    trainer = Trainer(cluster.seeds)
    with trainer.streamer, EmbeddingReplica(cluster.seeds) as replica:
        trainer.settle(replica)
        wait_until(lambda: _promote(cluster, "b") == 0, "the standby's beginning")
        assert "shard 0 is on node b at 127.0.0.2" in capsys.readouterr().out
        trainer.settle(replica)
        shard = _status(cluster, capsys)[0]
        assert (shard["node"], shard["address"]) == ("b", f"127.0.0.2:{cluster.port + 1}")
        for name in ("a", "b"):
            cluster.stop(name)
            if name == "a" and "object_store" in cluster.more:  # its claim is not the highest: it has nothing to serve
                with pytest.raises(HeadraceError, match="exit code 4"):
                    cluster.start(name)
            else:
                cluster.start(name)
        trainer.settle(replica)

        # The file says what the disks say; the directory that was taken over is refused until it is removed.
        cluster.standbys = {"a": [0], "c": [0]}
        cluster.place(b=[1, 0], c=[2])
        if "a" in cluster.running:
            cluster.stop("a")
        with pytest.raises(HeadraceError, match="remove the directory, and it follows"):
            cluster.start("a")
        shutil.rmtree(cluster.path / "a" / "shard-0000")
        cluster.start("a")
        wait_until(lambda: _promote(cluster, "a") == 0, "the standby's beginning")
        trainer.settle(replica)
        assert _promote(cluster, "b") == 1
        assert "follows nobody" in capsys.readouterr().err

        # A standby has followed all the while, and the disk of a former owner is none.
        cluster.standbys = {"b": [0], "c": [0]}
        cluster.place(a=[0], b=[1], c=[2])
        cluster.stop("b")
        former = cluster.start("b")
        wait_until(lambda: "remove" in former.log_path.read_text(), "the advice")
        wait_until(lambda: _promote(cluster, "c") == 0, "the standby")
        trainer.settle(replica)
        assert _status(cluster, capsys)[0]["node"] == "c"


def test_a_standby_takes_over_from_a_lost_node(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Only where somebody says that it is gone; the node comes back with an empty directory, as a standby alone."""
    trainer = Trainer(cluster.seeds)
    with trainer.streamer, EmbeddingReplica(cluster.seeds) as replica:
        trainer.settle(replica)

        def is_refused() -> bool:
            return _promote(cluster, "b", "--force") == 1 and "leave --force out" in capsys.readouterr().err

        wait_until(is_refused, "the refusal")
        cluster.running.pop("a").close()
        shutil.rmtree(cluster.path / "a")
        trainer.step()
        with pytest.raises(HeadraceError, match="--force --shard 0 --to b"):
            cluster.start("a")
        wait_until(lambda: _promote(cluster, "b", "--force") == 0, "the standby")
        trainer.settle(replica)
        with pytest.raises(HeadraceError, match=r"shard 0 is at 127\.0\.0\.2"):
            cluster.start("a")
        cluster.standbys = {"a": [0], "c": [0]}
        cluster.place(b=[1, 0], c=[2])
        cluster.start("a")
        wait_until(lambda: _promote(cluster, "a") == 0, "the standby's beginning")
        trainer.settle(replica)
        cluster.stop("b")
        wait_until(lambda: _promote(cluster, "c", "--force") == 1, "the owner")
