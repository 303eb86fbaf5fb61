"""Nodes of a cluster made again from the object store, with real servers and a directory as the store."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from held_ports import hold_ports
from killed_process import run_killed
from set_back_training import ROWS, Trainer
from stored_rows import read_rows
from streamed_training import attached
from watched_server import wait_until

from headrace.cli import main
from headrace.paramserver.archive.objects import ShardArchive
from headrace.paramserver.archive.recovery import restore_server
from headrace.paramserver.config.cluster_file import ClusterFile
from headrace.paramserver.config.data_dir import check_data_dir
from headrace.paramserver.log.opening import open_source
from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.system.object_store import ObjectStore
from headrace.schemas.errors import ConfigError, UnavailableError

FQN = "t.weight"
_SERVER_ID = "3f0c6e0e-8a55-4c6f-9f0f-2d6a6a1f7a11"
_HOSTS = {"a": "127.0.0.1", "b": "127.0.0.2"}
_OTHER_COPY = r"another copy of shard \d is the right one"


class Nodes:
    """Nodes a, with shards 0 and 1, and b, with shard 2, and their object store."""

    def __init__(self, path: Path) -> None:
        self.path, self.url = path, f"file://{path / 'store'}"
        self.file = path / "cluster.yaml"
        self.port = hold_ports(3, hosts=tuple(_HOSTS.values()))
        self.place(a=[0, 1], b=[2])

    def place(self, *, server_id: str = _SERVER_ID, **shards: list[int]) -> ClusterFile:
        """Write the cluster file."""
        nodes = {
            name: {"host": _HOSTS[name], "port": self.port, "data": str(self.path / name), "shards": own}
            for name, own in shards.items()
        }
        num_shards = sum(map(len, shards.values()))
        values = {"server_id": server_id, "shards": num_shards, "object_store": self.url, "nodes": nodes}
        self.file.write_text(json.dumps(values))
        return ClusterFile.load(self.file)

    @property
    def store(self) -> ObjectStore:
        return ObjectStore.of_url(self.url, deadline_s=1.0)

    @property
    def seeds(self) -> str:
        return ",".join(f"{host}:{self.port}" for host in _HOSTS.values())

    def serve(self, name: str, **settings: Any) -> ServerProcess:
        settings = {"archive_segment_s": 0.1, "cluster": self.file, "node": name, **settings}
        return ServerProcess.start(self.path / name, port=None, **settings)

    def restore(self, name: str, *words: str) -> int:
        return main(["restore", self.url, "--cluster", str(self.file), "--node", name, *words])

    def wait_archived(self) -> None:
        """Wait until the archive has what is in the logs now."""
        for shard in range(3):
            seq = open_source(next(self.path.glob(f"?/shard-{shard:04d}/log"))).last_seq
            archive = ShardArchive(self.store, shard)
            is_there = lambda: max((each.last_seq for each in archive.segments()), default=0) >= seq  # noqa: B023, E731
            wait_until(is_there, "the archive")


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """Stopped nodes with a full archive, and the trainer's rows."""
    nodes, trainer = Nodes(tmp_path_factory.mktemp("original")), Trainer()
    with nodes.serve("a"), nodes.serve("b"), attached(nodes.seeds, trainer, run="run") as streamer:
        trainer.step(0, ROWS)
        streamer.flush()
        nodes.wait_archived()
    return nodes.path, trainer.table.weight.detach().numpy()


@pytest.fixture
def archived(original: tuple[Path, np.ndarray], tmp_path: Path) -> tuple[Nodes, np.ndarray]:
    """A copy of them, which the test may change."""
    shutil.copytree(original[0], tmp_path, dirs_exist_ok=True)
    return Nodes(tmp_path), original[1]


@pytest.mark.parametrize("by_serve", [True, False], ids=["serve --restore", "restore"])
def test_a_lost_node_is_restored_amid_training(
    nodes: Nodes, by_serve: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bare node is refused with the command to run; after it, trainer, server and replica become equal again."""
    trainer = Trainer()
    with nodes.serve("b"):
        lost = nodes.serve("a")
        with lost, attached(nodes.seeds, trainer, run="run", retry_max_s=0.2) as streamer:
            trainer.step(0, 200)
            streamer.flush()
            nodes.wait_archived()
            with EmbeddingReplica(nodes.seeds, fetch_wait_s=0.2) as replica:
                trainer.step(100, 300)
                streamer.flush()
                lost.close()
                shutil.rmtree(nodes.path / "a")
                trainer.step(290, 310)
                with pytest.raises(
                    UnavailableError, match=r"/a is empty, and file:\S+ has a shard of node a"
                ) as refused:
                    nodes.serve("a")
                assert not (nodes.path / "a").exists()
                if not by_serve:
                    command = re.search(r"or run headrace (restore .*?); for a new", str(refused.value))
                    assert command is not None
                    assert main(shlex.split(command[1])) == 0
                    printed = capsys.readouterr().out
                    assert re.search(
                        r"Shard 0: the whole log and .*\. Takes over from node a \(127.0.0.1:\d+\), term 1", printed
                    )
                    assert "A copy that still runs stops soon after this one starts" in printed
                    assert printed.endswith(
                        f"Next: headrace serve --cluster {nodes.file} --node a --data {nodes.path / 'a'}\n"
                    )
                with nodes.serve("a", restore=by_serve):
                    trainer.step(300, 310)
                    streamer.flush()
                    assert streamer.audit().is_equal
                    wanted = torch.zeros(ROWS, 4)
                    wanted[:310] = trainer.table.weight.detach()[:310]
                    wait_until(
                        lambda: torch.equal(replica.lookup(trainer.fqn, torch.arange(ROWS)), wanted), "an equal replica"
                    )


def test_single_shards_make_a_node(archived: tuple[Nodes, np.ndarray]) -> None:
    """Shards are restored one by one, whether the others of the node are there or not; then the node starts."""
    nodes, rows = archived
    shutil.rmtree(nodes.path / "a")
    assert nodes.restore("a", "--shard", "1") == 0
    with pytest.raises(
        UnavailableError, match=r"lacks shard 0, .* or run headrace (restore \S+ .* --shard 0)$"
    ) as refused:
        nodes.serve("a")
    assert nodes.restore("a") == 1  # it would have to replace shard 1
    command = str(refused.value).rpartition("run headrace ")[2]
    assert main(shlex.split(command)) == 0
    with nodes.serve("a"), nodes.serve("b"):
        assert np.array_equal(read_rows(nodes.seeds, FQN, range(ROWS)).weights, rows)
    shutil.rmtree(nodes.path / "a" / "shard-0001")
    assert main(["restore", nodes.url, "--data", str(nodes.path / "a"), "--shard", "1"]) == 0
    with nodes.serve("a"), nodes.serve("b"):
        assert np.array_equal(read_rows(nodes.seeds, FQN, range(ROWS)).weights, rows)


def test_another_node_takes_over_a_shard(
    archived: tuple[Nodes, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    """A shard is restored on another node, by a changed file; the old copy stops if it lives, and is refused later."""
    nodes, rows = archived
    with nodes.serve("b") as old:
        nodes.place(a=[0, 1, 2])
        assert nodes.restore("a", "--shard", "2") == 0
        printed = capsys.readouterr().out
        assert "Takes over from node b" in printed and "A copy that still runs stops soon after" in printed
        with nodes.serve("a"):
            assert old.wait(timeout_s=60) == 4
            assert np.array_equal(read_rows(nodes.seeds, FQN, range(ROWS)).weights, rows)
    nodes.place(a=[0, 1], b=[2])
    with pytest.raises(UnavailableError, match=_OTHER_COPY):
        nodes.serve("b")


def test_each_mistake_is_one_line(archived: tuple[Nodes, np.ndarray], capsys: pytest.CaptureFixture[str]) -> None:
    """A file, a node, a shard or a directory that does not fit is named, and nothing is made."""
    nodes, _ = archived
    shutil.move(nodes.path / "a", nodes.path / "kept")

    def refused(*words: str) -> str:
        assert main(["restore", nodes.url, *words]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        return line

    of_file = ("--cluster", str(nodes.file))
    assert "--data DIR is missing" in refused()
    assert "which of its nodes is this? --node a or b" in refused(*of_file)
    assert "--node a: goes with --cluster FILE" in refused("--node", "a")
    assert f"--node c: {nodes.file} has no such node" in refused(*of_file, "--node", "c")
    assert f"--shard 2: {nodes.file} gives it to node b" in refused(*of_file, "--node", "a", "--shard", "2")
    assert "--shard 3: the server at" in refused(*of_file, "--node", "a", "--shard", "3")
    assert "not a server's directory; restore all" in refused("--data", str(nodes.path / "a"), "--shard", "1")
    assert "/b: not empty: it has shards of a server; move it away" in refused(*of_file, "--node", "b")
    kept = str(nodes.path / "kept")
    shutil.rmtree(nodes.path / "kept" / "shard-0001")
    assert "restore what it lacks with --shard 1, or" in refused(*of_file, "--node", "a", "--data", kept)
    assert "is of a cluster's node that has other shards" in refused("--data", kept, "--shard", "2")
    nodes.place(a=[0], b=[1])
    assert "shards: 2: the server at " in refused(*of_file, "--node", "a")
    nodes.place(server_id="0" * 8 + _SERVER_ID[8:], a=[0, 1], b=[2])
    assert f"is of another server, {_SERVER_ID}" in refused(*of_file, "--node", "a")
    with pytest.raises(UnavailableError, match=f"is of another server, {_SERVER_ID}"):
        nodes.serve("a")
    assert not (nodes.path / "a").exists()


def test_a_node_that_has_archived_nothing(nodes: Nodes) -> None:
    """It starts anew before its first claim; after it, it is restored empty, and no other way."""
    with nodes.serve("b"):
        pass
    with pytest.raises(UnavailableError, match="has no shard of node a; start without --restore to make it"):
        nodes.serve("a", restore=True)
    with nodes.serve("a"):
        pass
    shutil.rmtree(nodes.path / "a")
    with pytest.raises(UnavailableError, match="start with --restore"):
        nodes.serve("a")
    cluster = ClusterFile.load(nodes.file)
    restored = restore_server(nodes.store, nodes.path / "a", cluster=cluster, node=cluster.node("a"))
    assert [(shard.shard, shard.seq, shard.claim.term) for shard in restored if shard.claim] == [(0, 0, 1), (1, 0, 1)]
    trainer = Trainer()
    with nodes.serve("a"), nodes.serve("b"), attached(nodes.seeds, trainer, run="run") as streamer:
        trainer.step(0, ROWS)
        streamer.flush()
        assert streamer.audit().is_equal
    # A copy that began behind records says that there were some: an archive without them has lost them.
    with nodes.serve("a"), nodes.serve("b"):
        pass
    shutil.rmtree(nodes.path / "store" / "archive" / "0000")
    shutil.rmtree(nodes.path / "a")
    with pytest.raises(ConfigError, match=r"shard 0: .* has no snapshot, and the archive is empty"):
        restore_server(nodes.store, nodes.path / "a", cluster=cluster, node=cluster.node("a"))


@pytest.mark.parametrize("words", [(), ("--shard", "1")], ids=["node", "shard"])
@pytest.mark.parametrize(
    "name", ["archive.recovery._fetch", "archive.recovery._settle", "snapshots.new_data_dir.move_into_place"]
)
def test_a_killed_restore_is_run_again(archived: tuple[Nodes, np.ndarray], words: tuple[str, ...], name: str) -> None:
    """Wherever it is killed, the directory or the shard is missing, and running it again makes it."""
    nodes, _ = archived
    whole = nodes.path / "a"
    lost = whole / "shard-0001" if words else whole
    seqs = [open_source(whole / f"shard-000{shard}" / "log").last_seq for shard in range(2)]
    shutil.rmtree(whole)
    command = ["restore", nodes.url, "--cluster", str(nodes.file), "--node", "a", *words]
    at = f"headrace.paramserver.{name}"
    assert run_killed(f"from headrace.cli import main; main({command!r})", at=at)
    assert not lost.exists()
    assert main(command) == 0
    if words:
        assert nodes.restore("a", "--shard", "0") == 0
    cluster = ClusterFile.load(nodes.file)
    manifest = check_data_dir(whole, num_shards=None, cluster=cluster, node=cluster.node("a"))
    assert manifest is not None and manifest.shards == (0, 1)
    assert {path.name for path in whole.iterdir()} - {"headrace.json"} == {"shard-0000", "shard-0001"}
    assert [open_source(whole / f"shard-000{shard}" / "log").last_seq for shard in range(2)] == seqs
