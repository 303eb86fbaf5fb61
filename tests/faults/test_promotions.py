"""Servers in a chain take each other's place all the time, and their shards are killed and paused meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from held_ports import hold_ports
from nats_cluster import nats_cluster, needs_nats_server, remove_streams
from nats_servers import NatsServers
from processes import stopped
from set_back_training import ROWS, Trainer
from stored_rows import read_rows
from streamed_training import attached
from waiting import WAIT_S, pause, wait_until

from headrace.cli import main
from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import HeadraceError

_NUM_SHARDS, _NUM_CYCLES = 2, 6


class Chain:
    """Three servers: the first takes updates, each other one follows the one before it. Chance comes from a seed.

    With an `engine`, every second server's log is there.
    """

    def __init__(self, directory: Path, seed: int, engine: NatsServers | None = None) -> None:
        self.random = random.Random(seed)
        self.servers: list[ServerProcess] = []
        self._ports = [hold_ports(_NUM_SHARDS) for _ in range(3)]
        self._directory, self._num_made, self._engine = directory, 0, engine
        for port in self._ports:
            self._add(port)

    @property
    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._ports)

    def _add(self, port: int) -> None:
        self._num_made += 1
        source = {"follow": self.servers[-1].address} if self.servers else {"shards": _NUM_SHARDS}
        settings = {"log_segment_bytes": "1MiB", "log_retention_bytes": "4MiB", **source}
        if self._engine is not None and self._num_made % 2 == 0:
            settings |= self._engine.log_settings
        server = ServerProcess.start(self._directory / str(self._num_made), port=port, timeout_s=WAIT_S, **settings)
        self.servers.append(server)

    def promote(self) -> None:
        """Let the second server take the place of the first, which comes last, with a new directory."""
        first, second, _ = self.servers
        hurting = threading.Thread(target=self._hurt, args=(first, second))
        hurting.start()
        try:
            wait_until(lambda: self._has_promoted(second), "the new owner", within_s=WAIT_S, poll_s=0.2)
        finally:
            hurting.join()
        wait_until(lambda: self._has_promoted(second), "the new owner", within_s=WAIT_S, poll_s=0.2)
        port = int(first.address.rpartition(":")[2])
        first.close()
        if self._engine is not None and int(first.data_dir.name) % 2 == 0:
            asyncio.run(remove_streams(self._engine.url))
        self.servers.remove(first)
        self._add(port)

    def _has_promoted(self, server: ServerProcess) -> bool:
        for shard in range(_NUM_SHARDS):
            with contextlib.suppress(HeadraceError):
                if _status(server, shard).following is None:
                    continue
            if main(["promote", "--server", server.address, "--shard", str(shard)]) != 0:
                return False
        return True

    def _hurt(self, *servers: ServerProcess) -> None:
        for _ in range(self.random.randint(0, 3)):
            pause(self.random.uniform(0, 0.8))
            if self._engine is not None and self.random.random() < 0.2:
                with stopped(self.random.choice(self._engine.servers).pid):
                    pause(self.random.uniform(0.1, 2.5))
                continue
            server, shard = self.random.choice(servers), self.random.randrange(_NUM_SHARDS)
            with contextlib.suppress(HeadraceError, ProcessLookupError):
                pid = _status(server, shard).pid
                if self.random.random() < 0.5:
                    os.kill(pid, signal.SIGKILL)
                else:
                    with stopped(pid):
                        pause(self.random.uniform(0.1, 2.5))

    def close(self) -> None:
        for server in reversed(self.servers):
            server.close()


def _status(server: ServerProcess, shard: int) -> object:
    async def ask() -> object:
        host, port = server.address.rsplit(":", 1)
        async with await ParamServerClient.connect(host, int(port) + shard, timeout_s=10) as client:
            return await client.status()

    return asyncio.run(ask())


@contextlib.contextmanager
def _going_on(step: Callable[[], None]) -> Iterator[None]:
    """Do something over and over in a thread while the block lasts, and raise what it raised."""
    ends, failed = threading.Event(), []

    def run() -> None:
        try:
            while not ends.wait(0.005):
                step()
        except BaseException as exc:
            failed.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
    if failed:
        raise failed[0]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1])
def test_servers_take_each_others_place_among_kills(tmp_path: Path, seed: int) -> None:
    """No step and no look-up fails, and at the end each server, and a replica, has the trainer's rows, bit for bit."""
    _keep_promoting(tmp_path, Chain(tmp_path, seed), _NUM_CYCLES)


@needs_nats_server
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1])
def test_logs_go_into_nats_and_back_among_kills(tmp_path: Path, seed: int) -> None:
    """The same, where each server's log is of another kind than that of the server before it."""
    with nats_cluster(tmp_path / "nats") as engine:
        _keep_promoting(tmp_path, Chain(tmp_path, seed, engine), 4)


def _keep_promoting(tmp_path: Path, chain: Chain, num_cycles: int) -> None:
    trainer, chance = Trainer(), random.Random(1)
    every = list(range(ROWS))
    try:
        with (
            attached(chain.addresses, trainer, run="run") as streamer,
            EmbeddingReplica(chain.addresses, open_timeout_s=WAIT_S) as replica,
        ):

            def step() -> None:
                trainer.train(chance.sample(every, 60))

            def look_up() -> None:
                replica.lookup(trainer.fqn, chance.sample(every, 20))

            with _going_on(step), _going_on(look_up):
                for _ in range(num_cycles):
                    chain.promote()
            streamer.flush()
            assert streamer.audit().is_equal
            replica.wait_for(streamer.stats().step, WAIT_S)
            rows = trainer.table.weight.detach()
            assert replica.lookup(trainer.fqn, every).equal(rows)
            for server in chain.servers:
                wait_until(
                    lambda server=server: np.array_equal(
                        read_rows(server.address, trainer.fqn, every).weights, rows.numpy()
                    ),
                    f"the rows of {server.address}",
                )
    finally:
        chain.close()
        shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.timeout(600)
def test_a_follower_takes_over_from_a_lost_server(tmp_path: Path) -> None:
    """A trainer and a replica that were ahead of it go on; its log, of both owners, is intact and makes another one."""
    trainer, every = Trainer(), list(range(ROWS))
    ports = [hold_ports(_NUM_SHARDS), hold_ports(_NUM_SHARDS)]
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    source = ServerProcess.start(tmp_path / "source", shards=_NUM_SHARDS, port=ports[0])
    follower = ServerProcess.start(tmp_path / "follower", follow=source.address, port=ports[1])
    try:
        with (
            attached(addresses, trainer, run="run") as streamer,
            EmbeddingReplica(source.address, open_timeout_s=WAIT_S) as replica,
        ):
            trainer.train(every)
            streamer.flush()
            assert main(["promote", "--server", follower.address, "--shard", "0"]) == 0
            pid = _status(follower, 1).pid
            with stopped(pid):
                trainer.train(every)
                streamer.flush()
                replica.wait_for(streamer.stats().step, WAIT_S)
                source.kill()
            wait_until(lambda: main(["promote", "--force", "--server", follower.address]) == 0, "it", poll_s=0.5)
            trainer.train(range(50))
            streamer.flush()
            assert streamer.audit().is_equal
            replica.wait_for(streamer.stats().step, WAIT_S)
            rows = trainer.table.weight.detach()
            wait_until(lambda: replica.lookup(trainer.fqn, every).equal(rows), "the replica")
        assert np.array_equal(read_rows(follower.address, trainer.fqn, every).weights, rows.numpy())
    finally:
        follower.close()
        source.close()
    assert main(["log", "inspect", str(tmp_path / "follower")]) == 0
    shutil.rmtree(tmp_path / "follower" / "shard-0000" / "store")
    assert main(["restore", str(tmp_path / "follower"), "--data", str(tmp_path / "new")]) == 0
    with ServerProcess.start(tmp_path / "new") as new:
        assert np.array_equal(read_rows(new.address, trainer.fqn, every).weights, rows.numpy())


def test_a_new_trainer_finds_shards_at_two_servers(tmp_path: Path) -> None:
    """While one of two shards has been handed over, who knows the follower alone finds the other one at the source."""
    trainer = Trainer()
    with (
        ServerProcess.start(tmp_path / "source", shards=_NUM_SHARDS, port=hold_ports(_NUM_SHARDS)) as source,
        ServerProcess.start(tmp_path / "follower", follow=source.address, port=hold_ports(_NUM_SHARDS)) as follower,
    ):
        assert main(["promote", "--server", follower.address, "--shard", "0"]) == 0
        with attached(follower.address, trainer, run="run") as streamer:
            trainer.train(range(ROWS))
            streamer.flush()
            assert streamer.audit().is_equal
        assert main(["promote", "--server", follower.address]) == 0  # the rest
