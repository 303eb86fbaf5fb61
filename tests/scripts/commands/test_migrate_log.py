"""What `headrace migrate-log` refuses, and what it does to a cluster's node, on the scripted engine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from log_files import make_log
from scripted_shard_streams import ScriptedShardStreams

from headrace.paramserver.config.cluster_file import ClusterFile
from headrace.paramserver.config.data_dir import FORMAT_VERSION, DataDir
from headrace.paramserver.config.server_settings import ShardSettings
from headrace.paramserver.log.jetstream.appender import StreamTimes
from headrace.paramserver.log.jetstream.moving import LogMover
from headrace.paramserver.shard.migration import MovedLog, move_to_files, move_to_stream
from headrace.schemas.errors import ConfigError, CorruptionError
from headrace.scripts.commands.migrate_log import _LogPlace

_SERVER_ID = "3f0c6e0e-8a55-4c6f-9f0f-2d6a6a1f7a11"
_URL = "nats://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3"
_TIMES = StreamTimes(heartbeat_s=0.05, lease_s=0.1, silence_s=0.2, ack_s=0.2, retry_s=0.01, idle_poll_s=0.01)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The directory of a server of one shard that has never been started."""
    path = tmp_path / "data"
    with DataDir.claim(path, num_shards=1) as directory:
        directory.prepare()
    return path


def _cluster(tmp_path: Path, *, log: str = "") -> ClusterFile:
    file = tmp_path / "cluster.yaml"
    standbys = ", standbys: [2]" if log else ""
    file.write_text(
        f"server_id: {_SERVER_ID}\nshards: 3\n{log}nodes:\n"
        f"  a: {{host: a.example, data: {tmp_path}/a, shards: [0, 1]{standbys}}}\n"
        f"  b: {{host: b.example, data: {tmp_path}/b, shards: [2]}}\n"
    )
    return ClusterFile.load(file)


def _manifest(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((path / "headrace.json").read_bytes())
    return values


def test_a_wrong_order_is_one_line(command: CommandLine, data: Path, tmp_path: Path) -> None:
    """Each mistake says what is missing or in the way; the directory stays as it was."""
    before = _manifest(data)
    assert "no server in it" in command.refused("migrate-log", "--data", tmp_path / "none", "--to", _URL)
    assert "--data DIR is missing" in command.refused("migrate-log", "--to", _URL)
    assert "--to kafka://x" in command.refused("migrate-log", "--data", data, "--to", "kafka://x")
    assert "--log URL is missing" in command.refused("migrate-log", "--data", data, "--to", "file")
    both = ("--to", _URL, "--log", _URL)
    assert "goes with --to file" in command.refused("migrate-log", "--data", data, *both)
    assert "127.0.0.1:8222 does not answer" in command.refused("migrate-log", "--data", data, "--to", _URL)
    with DataDir.claim(data, num_shards=None) as running:
        running.prepare()
        assert "in use by another server" in command.refused("migrate-log", "--data", data, "--to", _URL)
    assert _manifest(data) == before


def test_a_nodes_directory_is_moved_with_its_cluster_file(command: CommandLine, tmp_path: Path) -> None:
    """Without the file the message says that all nodes move together, and how."""
    cluster = _cluster(tmp_path)
    with DataDir.claim(tmp_path / "a", num_shards=None, cluster=cluster, node=cluster.nodes["a"]) as directory:
        directory.prepare()
    told = command.refused("migrate-log", "--data", tmp_path / "a", "--to", _URL)
    assert "stop all nodes, and on each host run this with --cluster FILE --node NAME" in told


async def test_a_node_goes_into_streams_and_back(tmp_path: Path) -> None:
    """Only its own shards move, and a standby's copy must be out of the way before the log is in files again."""
    cluster = _cluster(tmp_path)
    path, node = tmp_path / "a", cluster.nodes["a"]
    with DataDir.claim(path, num_shards=None, cluster=cluster, node=node) as directory:
        directory.prepare()
    await make_log(path / "shard-0001" / "log", 5)
    mover = LogMover(streams := ScriptedShardStreams(), times=_TIMES)
    told: list[MovedLog] = []
    await move_to_stream(path, mover, cluster=cluster, node=node, on_moved=told.append)
    assert [(each.shard, each.last_seq, each.stream) for each in told] == [(0, 0, "stream-0"), (1, 5, "stream-1")]
    assert {shard: stream.first_seq for shard, stream in streams.streams.items()} == {0: 1, 1: 6}
    assert _manifest(path) == {
        "format": "headrace-data",
        "format_version": FORMAT_VERSION,
        "server_id": _SERVER_ID,
        "num_shards": 3,
        "shards": [0, 1],
        "log": "nats",
    }

    replicated = _cluster(tmp_path, log=f"log: {_URL}\n")
    with DataDir.claim(path, num_shards=None, cluster=replicated, node=replicated.nodes["a"], log="nats") as directory:
        directory.prepare()
    node = replicated.nodes["a"]
    with pytest.raises(ConfigError, match=r"shard-0002 is a standby's copy, .* move it away first"):
        await move_to_files(path, mover, cluster=replicated, node=node)
    (path / "shard-0002").rename(tmp_path / "aside")
    ended = await move_to_files(path, mover, cluster=replicated, node=node)
    assert [each.shard for each in ended] == [0, 1]
    assert not streams.streams
    assert "log" not in _manifest(path)
    # Clients that have seen the stream's terms would take a lower one for an old copy's.
    assert json.loads((path / "shard-0001" / "claim.json").read_bytes())["term"] == 1
    with DataDir.claim(path, num_shards=None, cluster=cluster, node=cluster.nodes["a"]) as directory:
        directory.prepare()


async def test_an_unfit_engine_gets_no_log(data: Path) -> None:
    """It is found before anything is made."""
    before, streams = _manifest(data), ScriptedShardStreams()
    streams.fault = "server n1 acks before its disk has the message"
    with pytest.raises(ConfigError, match="n1 acks before its disk"):
        await move_to_stream(data, LogMover(streams))
    assert not streams.streams
    assert _manifest(data) == before


async def test_a_shard_whose_disk_is_not_mounted_is_not_taken_for_an_empty_one(data: Path) -> None:
    """Its stream would begin where its log does not end."""
    before, streams = _manifest(data), ScriptedShardStreams()
    (data / "shard-0000" / "log").rmdir()
    with pytest.raises(CorruptionError, match="the shard's log is missing; is its disk mounted"):
        await move_to_stream(data, LogMover(streams))
    assert not streams.streams
    assert _manifest(data) == before


def test_its_settings_are_those_of_the_server() -> None:
    """A flag that `serve` has too means the same, with the same default."""
    of_server = ShardSettings()
    for field in dataclasses.fields(_LogPlace):
        assert getattr(_LogPlace(), field.name) == getattr(of_server, field.name)
