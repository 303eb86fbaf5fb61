"""The headline test behind relays: after a drain, every row of a replica equals the trainer's, whatever was killed."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from counted_training import Training, assert_equal, make_snapshot, settle
from held_ports import hold_ports
from replica_endpoint import Endpoint, get, relay_endpoint
from set_back_training import ROWS, Trainer, put_back
from stored_rows import read_rows
from watched_server import wait_until

from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.shard.launch import ServerProcess
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
        streamer.attach(trainer.model, trainer.optimizer)
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
