"""The headline test behind relays: after a drain, every row of a replica equals the trainer's, whatever was killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from counted_training import Training, assert_equal, make_snapshot, settle
from file_modes import open_to_others
from held_ports import hold_ports
from replica_endpoint import Endpoint, get, relay_endpoint, replica_endpoint
from set_back_training import ROWS, Trainer, put_back
from stored_rows import read_rows
from streamed_training import attached
from watched_server import scrape, wait_until

from headrace.cli import main
from headrace.paramserver.archive.objects import ShardArchive
from headrace.paramserver.reading.link import Dial
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.system.object_store import ObjectStore
from headrace.streamer import RawEmbeddingStreamer


@contextlib.contextmanager
def chain(folder: Path, server: str, length: int) -> Iterator[list[Endpoint]]:
    """Run relays that follow each other; the first follows the server."""
    with contextlib.ExitStack() as stack:
        relays: list[Endpoint] = []
        for number in range(length):
            relays.append(stack.enter_context(relay_endpoint(folder / f"relay-{number}", server)))
            server = relays[-1].address
        yield relays


def wait_for_snapshot(relay: Endpoint) -> None:
    wait_until(lambda: "headrace_relay_snapshot_offered 1.0" in get(relay.health, "/metrics")[1], "a snapshot")


@pytest.mark.parametrize("consistency", ["latest", "step"])
@pytest.mark.parametrize("length", [1, 2])
def test_replica_behind_relays_equals_the_trainer(tmp_path: Path, consistency: str, length: int) -> None:
    """A replica starts from a relay's snapshot and follows its log, while relay and server are killed and restarted."""
    port, relay_port = hold_ports(2), hold_ports(2)
    data, folder = tmp_path / "data", tmp_path / "relays"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess.start(data, shards=2, port=port))
        training = Training(server.address)
        stack.callback(training.close)
        for _ in range(3):
            training.step()
            training.flush()
        make_snapshot(server)
        first = f"--port={relay_port}"
        relay = stack.enter_context(relay_endpoint(folder / "first", server.address, first))
        last = relay
        if length > 1:
            (last,) = stack.enter_context(chain(folder, relay.address, length - 1))
        wait_for_snapshot(last)
        replica = stack.enter_context(
            EmbeddingReplica(last.address, consistency=consistency, fetch_wait_s=0.2)  # type: ignore[arg-type]
        )
        training.step()
        settle(replica, training)
        assert_equal(replica, training)

        relay.process.kill()
        relay.process.wait()
        training.step()
        training.flush()
        relay = stack.enter_context(relay_endpoint(folder / "first", server.address, first))
        settle(replica, training)
        assert_equal(replica, training)

        server.stop()
        with ServerProcess.start(data, port=port):
            for _ in range(3):
                training.step()
                settle(replica, training)
            assert_equal(replica, training)
            assert replica.failure is None
            training.close()
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


@pytest.mark.parametrize("length", [1, 2])
def test_replica_behind_relays_finds_out_that_the_server_was_set_back(tmp_path: Path, length: int) -> None:
    """A replica ends equal to a server that was set back and has written other rows beyond the replica's place."""
    data, older, port = tmp_path / "data", tmp_path / "older", hold_ports(2)
    with ServerProcess.start(data, shards=2) as server:
        train(server.address, (0, 100))
        make_snapshot(server)
    shutil.copytree(data, older)
    with contextlib.ExitStack() as stack:
        with ServerProcess.start(data, port=port) as server:
            train(server.address, (50, 150), (50, 150))
            relay = stack.enter_context(chain(tmp_path / "relays", server.address, length))[-1]
            wait_for_snapshot(relay)
            replica = stack.enter_context(EmbeddingReplica(relay.address, fetch_wait_s=0.2))
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
    """Return the term that each shard of a server or relay tells."""

    async def ask() -> list[int]:
        dial = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=60.0)
        shards = (await dial.ask(*parse_address(address))).shards
        hellos = [await dial.ask(shard.host, shard.port) for shard in shards]
        return [hello.term for hello in hellos]

    return asyncio.run(ask())


@pytest.mark.parametrize("restarts", [False, True], ids=["the relays run on", "the relays restart"])
@pytest.mark.parametrize("length", [1, 2])
def test_replica_behind_relays_equals_a_restored_shard(tmp_path: Path, length: int, restarts: bool) -> None:
    """A shard is lost with rows that the replica has, and restored: all have its new term, and the replica its rows.

    The relays fetch their snapshots from the object store, which the server tells them.
    """
    data, url = tmp_path / "data", f"file://{tmp_path / 'store'}"
    settings = {"object_store": url, "port": hold_ports(2)}
    relay_ports = [hold_ports(2) for _ in range(length)]
    trainer = Trainer()

    def start(stack: contextlib.ExitStack, source: str) -> list[Endpoint]:
        relays: list[Endpoint] = []
        for port in relay_ports:
            relays.append(stack.enter_context(relay_endpoint(tmp_path / f"relay-{port}", source, f"--port={port}")))
            source = relays[-1].address
        return relays

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
            relays = start(stack, server.address)
            wait_for_snapshot(relays[-1])
            replica = stack.enter_context(EmbeddingReplica(relays[-1].address, fetch_wait_s=0.2))
            trainer.step(100, 300)
            streamer.flush()
            ids, expected = torch.arange(ROWS), rows_of(server.address)
            wait_until(lambda: torch.equal(replica.lookup("t.weight", ids), expected), "what the server has")
            server.kill()
        if restarts:
            for relay in relays:
                relay.process.kill()
                relay.process.wait()
        shutil.rmtree(data / "shard-0001")
        assert main(["restore", url, "--data", str(data), "--shard", "1"]) == 0
        with ServerProcess.start(data, archive_segment_s=0.1, **settings) as server:
            if restarts:
                relays = start(stack, server.address)
            trainer.step(290, 310)
            streamer.flush()  # the restored shard gets again what it lacks
            expected = rows_of(server.address)
            wait_until(lambda: torch.equal(replica.lookup("t.weight", ids), expected), "what the server has")
            wait_until(lambda: replica.failure is None)
            assert terms_of(server.address) == [3, 3]
            for relay in relays:
                wait_until(lambda relay=relay: terms_of(relay.address) == [3, 3], "the new terms")
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
    """With the relay's disk bound reached, a replica is told to fetch a snapshot, does so, and ends equal."""
    bounds = ("--log-segment-bytes=1MiB", "--log-retention-bytes=1MiB", "--log-hold-bytes=2MiB")
    trainer = Trainer(num_rows=20_000)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess.start(tmp_path / "data", shards=1))
        streamer = stack.enter_context(attached(server.address, trainer, run="run"))
        trainer.step(0, 20_000)
        streamer.flush()
        make_snapshot(server)
        relay = stack.enter_context(relay_endpoint(tmp_path / "relay", server.address, *bounds))
        wait_for_snapshot(relay)
        assert open_to_others(tmp_path / "relay" / "data") == []
        replica = stack.enter_context(replica_endpoint(tmp_path / "replica", relay.address, "--name=slow"))
        os.kill(replica.process.pid, signal.SIGSTOP)
        for _ in range(12):
            trainer.step(0, 20_000)
            streamer.flush()
        make_snapshot(server)
        trainer.step(0, 100)
        streamer.flush()
        wait_until(lambda: scrape(relay.health)["headrace_relay_log_holds_broken_total"][("shard", "0"),] > 0)
        os.kill(replica.process.pid, signal.SIGCONT)
        expected = torch.from_numpy(read_rows(server.address, "t.weight", range(20_000)).weights)

        def is_equal() -> bool:
            return torch.equal(
                torch.from_numpy(read_rows(replica.address, "t.weight", range(20_000)).weights), expected
            )

        wait_until(is_equal, "what the server has")
        assert "has been removed: start over from a snapshot" in replica.log.read_text()
        assert torch.equal(expected, trainer.table.weight.detach())
