"""The headline test behind followers: after a drain a replica equals the trainer bit for bit, whatever was killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from counted_training import Training, assert_equal, make_snapshot, settle
from file_modes import open_to_others
from held_ports import hold_ports
from replica_endpoint import replica_endpoint
from set_back_training import ROWS, Trainer, put_back
from stored_rows import read_rows
from streamed_training import attached
from waiting import pause, wait_until
from watched_server import scrape, watched_server

from headrace.cli import main
from headrace.paramserver.archive.objects import ShardArchive
from headrace.paramserver.reading.link import Dial
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.system.object_store import ObjectStore
from headrace.streamer import RawEmbeddingStreamer


def chain(stack: contextlib.ExitStack, folder: Path, server: str, ports: list[int]) -> list[ServerProcess]:
    """Start followers that follow each other, one at each port; the first follows the server."""
    followers = []
    for port in ports:
        follower = ServerProcess.start(folder / f"follower-{port}", follow=server, port=port)
        followers.append(stack.enter_context(follower))
        server = follower.address
    return followers


@pytest.mark.parametrize(("length", "consistency"), [(1, "latest"), (2, "step")])
def test_replica_behind_followers_equals_the_trainer(tmp_path: Path, consistency: str, length: int) -> None:
    """A trainer and a replica know followers alone, and are equal whatever is killed at any time."""
    port, ports = hold_ports(2), [hold_ports(2) for _ in range(length)]
    data = tmp_path / "data"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess.start(data, shards=2, port=port))
        followers = chain(stack, tmp_path, server.address, ports)
        training = Training(followers[-1].address)
        stack.callback(training.close)
        for _ in range(3):
            training.step()
            training.flush()
        replica = stack.enter_context(
            EmbeddingReplica(followers[-1].address, consistency=consistency, fetch_wait_s=0.2)  # type: ignore[arg-type]
        )
        training.step()
        settle(replica, training)
        assert_equal(replica, training)
        for number in range(4):
            if number % 2:
                server.kill()
                server = stack.enter_context(ServerProcess.start(data, port=port))
            else:
                followers[0].kill()
                training.step()
                training.flush()
                (followers[0],) = chain(stack, tmp_path, f"127.0.0.1:{port}", ports[:1])
            training.step()
            training.flush()
            pause(0.05 * number)
        settle(replica, training)
        assert_equal(replica, training)
        assert replica.failure is None
        for name in ("left.weight", "right.weight"):
            stored = read_rows(server.address, name, with_versions=True)
            for follower in followers:
                copied = read_rows(follower.address, name, with_versions=True)
                assert (copied.weights == stored.weights).all() and (copied.steps == stored.steps).all()
        stack.pop_all().close()


def rows_of(address: str) -> torch.Tensor:
    """Return a server's rows; zeros for missing ones."""
    return torch.from_numpy(read_rows(address, "t.weight", range(ROWS)).weights)


def train(address: str, *steps: tuple[int, int]) -> None:
    """Train rows in a run that begins and ends here."""
    trainer = Trainer()
    with RawEmbeddingStreamer(address, run="run") as streamer:
        streamer.attach(trainer.model, trainer.optimizer, publish="updated")
        for first, end in steps:
            trainer.step(first, end)
            streamer.flush()


def test_replica_behind_followers_finds_out_that_the_server_was_set_back(tmp_path: Path) -> None:
    """A replica ends equal to a server that was set back and has written other rows beyond the replica's place."""
    data, older, port = tmp_path / "data", tmp_path / "older", hold_ports(2)
    with ServerProcess.start(data, shards=2) as server:
        train(server.address, (0, 100))
    shutil.copytree(data, older)
    with contextlib.ExitStack() as stack:
        with ServerProcess.start(data, port=port) as server:
            train(server.address, (50, 150), (50, 150))
            follower = chain(stack, tmp_path, server.address, [hold_ports(2), hold_ports(2)])[-1]
            replica = stack.enter_context(EmbeddingReplica(follower.address, fetch_wait_s=0.2))
            expected = rows_of(server.address)
            ids = torch.arange(ROWS)
            wait_until(lambda: torch.equal(replica.lookup("t.weight", ids), expected))
        put_back(older, data)
        with ServerProcess.start(data) as server:  # elsewhere
            train(server.address, *[(200, 250)] * 5)
            expected = rows_of(server.address)
        with ServerProcess.start(data, port=port) as server:
            wait_until(lambda: torch.equal(replica.lookup("t.weight", ids), expected), "what the server has")
            wait_until(lambda: replica.failure is None)
            train(server.address, (250, 300))
            wait_until(lambda: torch.equal(replica.lookup("t.weight", ids), rows_of(server.address)))


def terms_of(address: str) -> list[int]:
    """Return the term that each shard of a server or follower tells."""

    async def ask() -> list[int]:
        dial = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=60.0)
        shards = (await dial.ask(*parse_address(address))).shards
        hellos = [await dial.ask(shard.host, shard.port) for shard in shards]
        return [hello.term for hello in hellos]

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("length", "restarts"), [(1, True), (2, False)], ids=["the follower restarts", "the followers run on"]
)
def test_replica_behind_followers_equals_a_restored_shard(tmp_path: Path, length: int, restarts: bool) -> None:
    """A shard is lost with rows that the replica has, and restored: all have its new term, and the replica its rows.

    The first follower fetches its snapshot from the object store, which the server tells it.
    """
    data, url = tmp_path / "data", f"file://{tmp_path / 'store'}"
    settings = {"object_store": url, "port": hold_ports(2)}
    ports = [hold_ports(2) for _ in range(length)]
    trainer = Trainer()
    with contextlib.ExitStack() as stack:
        with ServerProcess.start(data, shards=2, archive_segment_s=0.1, **settings) as server:
            streamer = stack.enter_context(attached(server.address, trainer, run="run"))
            trainer.step(0, 100)
            streamer.flush()
            make_snapshot(server)
            trainer.step(50, 150)
            streamer.flush()
            wait_until(lambda: all_archived(server, url), "the archive")
        # From here on the archive gets nothing: what is acked now is lost with the disk.
        with ServerProcess.start(data, archive_segment_s=3600, **settings) as server:
            followers = chain(stack, tmp_path, server.address, ports[:1])
            if length > 1:  # the first has no log before its snapshot, and so it needs one of its own
                make_snapshot(followers[0])
                followers += chain(stack, tmp_path, followers[0].address, ports[1:])
            replica = stack.enter_context(EmbeddingReplica(followers[-1].address, fetch_wait_s=0.2))
            trainer.step(100, 300)
            streamer.flush()
            ids, expected = torch.arange(ROWS), rows_of(server.address)
            wait_until(lambda: torch.equal(replica.lookup("t.weight", ids), expected), "what the server has")
            server.kill()
        if restarts:
            for follower in followers:
                follower.kill()
        shutil.rmtree(data / "shard-0001")
        assert main(["restore", url, "--data", str(data), "--shard", "1"]) == 0
        with ServerProcess.start(data, archive_segment_s=0.1, **settings) as server:
            if restarts:
                followers = chain(stack, tmp_path, server.address, ports)
            trainer.step(290, 310)
            streamer.flush()  # the restored shard gets again what it lacks
            expected = rows_of(server.address)
            wait_until(lambda: torch.equal(replica.lookup("t.weight", ids), expected), "what the server has")
            wait_until(lambda: replica.failure is None)
            assert terms_of(server.address) == [3, 3]
            for follower in followers:
                wait_until(lambda follower=follower: terms_of(follower.address) == [3, 3], "the new terms")
            trainer.step(0, 400)
            streamer.flush()
            expected = rows_of(server.address)
            wait_until(lambda: torch.equal(replica.lookup("t.weight", ids), expected), "what the server has")


def all_archived(server: ServerProcess, url: str) -> bool:
    async def seqs() -> list[int]:
        reader = await EmbeddingReader.connect(server.address)
        statuses = await reader.status()
        await reader.close()
        return [status.log_seq for status in statuses]

    store = ObjectStore.of_url(url, deadline_s=1.0)
    archived = [ShardArchive(store, shard).segments() for shard in range(2)]
    return all(
        segments and segments[-1].last_seq >= seq for segments, seq in zip(archived, asyncio.run(seqs()), strict=True)
    )


def test_a_replica_that_is_too_slow_builds_a_new_copy(tmp_path: Path) -> None:
    """With the follower's disk bound reached, a replica is told to begin anew, does so, and ends equal."""
    bounds = {"log_segment_bytes": "1MiB", "log_retention_bytes": "1MiB", "log_hold_bytes": "2MiB"}
    trainer = Trainer(num_rows=20_000)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess.start(tmp_path / "data", shards=1))
        streamer = stack.enter_context(attached(server.address, trainer, run="run"))
        trainer.step(0, 20_000)
        streamer.flush()
        copy = tmp_path / "copy"
        follower, metrics = stack.enter_context(watched_server(copy, follow=server.address, **bounds))
        assert open_to_others(copy) == []
        replica = stack.enter_context(replica_endpoint(tmp_path / "replica", follower.address, "--name=slow"))
        os.kill(replica.process.pid, signal.SIGSTOP)
        for _ in range(12):
            trainer.step(0, 20_000)
            streamer.flush()
        wait_until(lambda: scrape(metrics)["headrace_log_holds_broken_total"][("shard", "0"),] > 0)
        os.kill(replica.process.pid, signal.SIGCONT)
        expected = torch.from_numpy(read_rows(server.address, "t.weight", range(20_000)).weights)

        def is_equal() -> bool:
            return torch.equal(
                torch.from_numpy(read_rows(replica.address, "t.weight", range(20_000)).weights), expected
            )

        wait_until(is_equal, "what the server has")
        assert "has been removed: start over from a snapshot" in replica.log.read_text()
        assert torch.equal(expected, trainer.table.weight.detach())
