"""A server whose logs move from files into NATS and back, with real servers, a trainer and a replica that go on."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_trainer import Trainer
from held_ports import hold_ports
from nats_cluster import nats_cluster, needs_nats_server
from nats_servers import NatsServers
from watched_server import WAIT_S, wait_until

from headrace import cli
from headrace.paramserver.archive.recovery import restore_server
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.system.object_store import ObjectStore
from headrace.schemas.errors import UnavailableError

pytestmark = needs_nats_server

_MAX_BYTES = 128 << 20
_KILLED = """
import os, sys
from headrace import cli
from headrace.paramserver.config.data_dir import DataDir
from headrace.paramserver.log.jetstream.moving import LogMover
from headrace.paramserver.log.jetstream.shard_streams import NatsShardStreams
from headrace.paramserver.log.jetstream.stream_log import JetStreamUpdateLog
from headrace.paramserver.shard import migration
where, name = sys.argv[1].split(".")
number, calls = int(sys.argv[2]), 0
place = globals()[where]
work = getattr(place, name)
def killed(*args, **options):
    global calls
    calls += 1
    if calls > number:
        os._exit(9)
    return work(*args, **options)
setattr(place, name, killed)
sys.exit(cli.main(sys.argv[3:]))
"""
# Each step, and before which of its calls the process is killed.
_INTO_NATS = [("NatsShardStreams.make", 0), ("NatsShardStreams.make", 1), ("DataDir.set_log", 0)]
_INTO_FILES = [
    ("JetStreamUpdateLog.take_over", 0),
    ("NatsShardStreams.seal", 0),
    ("migration.raise_term", 0),
    ("NatsShardStreams.seal", 0),  # of the second shard: the first one's is sealed by now
    ("migration.raise_term", 1),
    ("LogMover.own_log", 0),
    ("LogMover.own_log", 1),
    ("DataDir.set_log", 0),
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServers]:
    with nats_cluster(tmp_path_factory.mktemp("nats")) as running:
        yield running


class Place:
    """A server's directory and port, and the NATS servers to which its logs may go."""

    def __init__(self, directory: Path, servers: NatsServers) -> None:
        self.data, self.port, self.servers = directory / "data", hold_ports(2), servers
        self.address = f"127.0.0.1:{self.port}"
        self.flags = ["--log-monitor", ",".join(servers.monitors), "--log-max-bytes", str(_MAX_BYTES)]

    def serve(self, **settings: Any) -> ServerProcess:
        """Start the server as its manifest says."""
        if self.data.exists() and self.log == "nats":
            settings |= {"log": self.servers.url, "log_monitor": ",".join(self.servers.monitors)}
            settings |= {"log_max_bytes": _MAX_BYTES}
        return ServerProcess.start(self.data, shards=2, port=self.port, **settings)

    @property
    def log(self) -> str:
        """Where the manifest says that the logs are: `file` or `nats`."""
        values: dict[str, str] = json.loads((self.data / "headrace.json").read_bytes())
        return values.get("log", "file")

    def command(self, to: str) -> list[str]:
        """Return the arguments of the migration to `nats` or `file`."""
        where = ["--to", self.servers.url] if to == "nats" else ["--to", "file", "--log", self.servers.url]
        return ["migrate-log", "--data", str(self.data), *where, *self.flags]

    def kill_at(self, step: str, number: int, to: str) -> None:
        """Run the migration, and kill it before a call of a step."""
        arguments = [sys.executable, "-c", _KILLED, step, str(number), *self.command(to)]
        done = subprocess.run(arguments, timeout=120, check=False, capture_output=True)
        assert done.returncode == 9, done.stderr.decode()


@pytest.fixture
def place(tmp_path: Path, servers: NatsServers) -> Place:
    return Place(tmp_path, servers)


@pytest.mark.timeout(400)  # the command is killed eleven times, and most times waits for an owner's sign
def test_a_log_goes_into_nats_and_back_under_a_living_trainer_and_replica(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed at each step, it goes on when it is repeated; rows stay equal, and the replica needs no new copy."""
    with place.serve():
        trainer = Trainer(place.address)
        replica = EmbeddingReplica(place.address)
        trainer.settle(replica)
    with trainer.streamer, replica:
        copy = replica._copies.current
        trainer.step()  # nobody is there
        for step, number in _INTO_NATS:
            place.kill_at(step, number, "nats")
            assert place.log == "file"
        with place.serve():  # as before
            trainer.settle(replica)
            _refused(place, capsys, "nats", "in use by another server")
        assert cli.main(place.command("nats")) == 0
        said = capsys.readouterr().out
        assert "Shard 1: files up to record " in said
        assert "The server may start: it was kept waiting for " in said
        assert place.log == "nats"
        assert cli.main(place.command("nats")) == 0
        assert "the logs are in NATS already" in capsys.readouterr().out

        with place.serve() as server:
            trainer.settle(replica)
            _refused(place, capsys, "file", "in use by another server")
            trainer.step()
            server.kill()
        with place.serve():
            trainer.settle(replica)

        for step, number in _INTO_FILES:
            place.kill_at(step, number, "file")
            assert place.log == "nats"
        with pytest.raises(UnavailableError, match=r"sealed is true, .*headrace migrate-log --to file"):
            place.serve()
        place.kill_at("NatsShardStreams.remove", 1, "file")
        assert place.log == "file"
        with place.serve():
            trainer.settle(replica)
            # What was left to do after the decision is done beside the server, too.
            assert cli.main(place.command("file")) == 0
            assert "the logs are in files already" in capsys.readouterr().out
            trainer.settle(replica)
        assert replica._copies.current is copy


def test_the_archive_goes_on_and_a_restore_crosses_the_moves(place: Place, tmp_path: Path) -> None:
    """What was archived from files, from the stream, and from files again is one log, and makes the server again."""
    settings = {"object_store": f"file://{tmp_path}/store", "archive_segment_s": 0.1}
    with place.serve(**settings) as server:
        trainer = Trainer(place.address)
        trainer.step()
        trainer.streamer.flush(timeout_s=WAIT_S)
        _wait_archived(place)
        trainer.step()
        trainer.streamer.flush(timeout_s=WAIT_S)
        server.kill()  # what is not archived by now is archived after the move
    with trainer.streamer:
        for to in ("nats", "file"):
            assert cli.main(place.command(to)) == 0
            with place.serve(**settings):
                trainer.step()
                trainer.streamer.flush(timeout_s=WAIT_S)
                _wait_archived(place)
        place.data.rename(tmp_path / "lost")
        restore_server(ObjectStore.of_url(settings["object_store"]), place.data)
        with place.serve(**settings):
            trainer.step()
            trainer.streamer.flush(timeout_s=WAIT_S)
            assert trainer.streamer.audit(only_present=False).is_equal


def _wait_archived(place: Place) -> None:
    """Wait until the archive has all that the shards have now."""
    seqs = [reply.log_seq for reply in _statuses(place)]
    wait_until(
        lambda: all(reply.archive.archived_seq >= seq for reply, seq in zip(_statuses(place), seqs, strict=True)),
        "the archive",
    )


def _statuses(place: Place) -> list[Any]:
    async def ask() -> list[Any]:
        replies = []
        for shard in range(2):
            client = await ParamServerClient.connect("127.0.0.1", place.port + shard, timeout_s=WAIT_S)
            async with client:
                replies.append(await client.status())
        return replies

    return asyncio.run(ask())


def _refused(place: Place, capsys: pytest.CaptureFixture[str], to: str, what: str) -> None:
    """Run the migration, which must end with one line that says `what`."""
    assert cli.main(place.command(to)) != 0
    said = capsys.readouterr().err
    assert what in said
    assert len(said.strip().splitlines()) == 1
