"""A trainer that runs on while its server gets more shards and fewer: every row equal, bit for bit, nothing failed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import CommandLine
from counted_training import make_snapshot
from held_ports import hold_ports
from replica_endpoint import relay_endpoint
from torch import nn
from watched_server import WAIT_S, scrape, wait_until

from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import HeadraceError, WrongRoutingError
from headrace.streamer import RawEmbeddingStreamer

_NUM_ROWS, _DIM = 20_000, 8
_SETTINGS = {"block_cache_bytes": "32MiB", "memtable_bytes": "16MiB"}


class _Training:
    """Trains an embedding without a pause, in a thread; `failures` has what a step has raised."""

    def __init__(self, address: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Embedding(_NUM_ROWS, _DIM, sparse=True)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        self.streamer = RawEmbeddingStreamer(address, run="ctr", model="ctr", retry_max_s=0.2)
        self.streamer.attach(self.model, self.optimizer, publish="all")
        self.failures: list[BaseException] = []
        self.num_steps = 0
        self._rng = np.random.default_rng(0)
        self._ends = threading.Event()

    def step(self) -> None:
        self.optimizer.zero_grad()
        rows = torch.from_numpy(self._rng.integers(0, _NUM_ROWS, 256))
        self.model(rows).pow(2).sum().backward()
        self.optimizer.step()
        self.num_steps += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Train while the block runs."""
        self._ends.clear()
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._ends.set()
            thread.join(WAIT_S)

    def _run(self) -> None:
        try:
            while not self._ends.wait(0.01):
                self.step()
        except BaseException as exc:
            self.failures.append(exc)

    def settle(self, replicas: list[EmbeddingReplica]) -> None:
        """Wait until server and replicas have every row, bit for bit."""
        self.step()
        self.streamer.flush(timeout_s=WAIT_S)
        assert self.streamer.audit(only_present=False).is_equal
        wanted, rows = self.model.weight.detach().numpy(), np.arange(_NUM_ROWS)
        for replica in replicas:
            wait_until(lambda it=replica: bool((it.lookup("weight", rows).numpy() == wanted).all()), "the replica")


@contextmanager
def _lookups(replica: EmbeddingReplica) -> Iterator[list[BaseException]]:
    """Look rows up while the block runs; the list has what has failed."""
    failures: list[BaseException] = []
    ends = threading.Event()

    def run() -> None:
        while not ends.wait(0.005):
            try:
                replica.lookup("weight", np.arange(0, _NUM_ROWS, 64))
            except HeadraceError as exc:
                failures.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield failures
    finally:
        ends.set()
        thread.join(WAIT_S)


@pytest.mark.timeout(600)
def test_a_trainer_runs_through_reshards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """2 shards become 3, 5 and 2 again amid training; trainer, server and replicas end equal, and no lookup fails.

    Nor does the trainer's log warn of rows that move.
    """
    run = CommandLine(capsys)
    with ServerProcess.start(tmp_path / "data", shards=2, **_SETTINGS) as server:
        trainer = _Training(server.address)
        with trainer.streamer:
            trainer.settle([])
    with ServerProcess.start(tmp_path / "data", shards=5, **_SETTINGS) as server:
        assert run.json("reshard", "status", "--server", server.address)["partitions_by_shard"] == [512, 512, 0, 0, 0]
        trainer = _Training(server.address)
        trainer.settle([])
        with (
            trainer.streamer,
            EmbeddingReplica(server.address) as newest,
            EmbeddingReplica(server.address, consistency="step") as stepped,
            _lookups(newest) as failures,
            _lookups(stepped) as others,
        ):
            trainer.settle([newest, stepped])
            for shards in (3, 5, 2):
                with trainer.running():
                    assert "All partitions have moved" in run(
                        "reshard", "start", "--server", server.address, "--shards", shards, "--wait"
                    )
                trainer.settle([newest, stepped])
                owned = run.json("reshard", "status", "--server", server.address)["partitions_by_shard"]
                assert all(owned[:shards]) and not any(owned[shards:])
        assert trainer.failures == failures == others == []
        told = [argument for each in caplog.records for argument in each.args or ()]
        assert not [argument for argument in told if isinstance(argument, WrongRoutingError)]
        assert trainer.num_steps > 100


@pytest.mark.timeout(600)
def test_replicas_behind_a_relay_follow_reshards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2 shards become 3 and 2 again behind a relay that runs on: replicas end equal, also one that comes later."""
    run, port = CommandLine(capsys), hold_ports(3)
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess.start(tmp_path / "data", shards=2, port=port, **_SETTINGS))
        trainer = _Training(server.address)
        stack.enter_context(trainer.streamer)
        trainer.settle([])
        make_snapshot(server)
        relay = stack.enter_context(relay_endpoint(tmp_path / "relay", server.address, f"--port={hold_ports(3)}"))
        wait_until(lambda: scrape(relay.health)["headrace_relay_snapshot_offered"][()] == 1, "a snapshot")
        replicas = [
            stack.enter_context(EmbeddingReplica(relay.address, consistency=consistency, fetch_wait_s=0.2))  # type: ignore[arg-type]
            for consistency in ("latest", "step")
        ]
        looked_up = [stack.enter_context(_lookups(replica)) for replica in replicas]
        trainer.settle(replicas)
        server.stop()
        server = stack.enter_context(ServerProcess.start(tmp_path / "data", shards=3, port=port, **_SETTINGS))
        for shards in (3, 2):
            with trainer.running():
                answer = run("reshard", "start", "--server", server.address, "--shards", shards, "--wait")
                assert "All partitions have moved" in answer
            trainer.settle(replicas)
            # From the snapshot of two shards, and then all of the third one's log.
            replicas.append(stack.enter_context(EmbeddingReplica(relay.address, fetch_wait_s=0.2)))
            trainer.settle(replicas)
        assert len(run.json("status", "--server", relay.address)["shards"]) == 3
        assert trainer.failures == [] and all(failures == [] for failures in looked_up)
        assert all(replica.failure is None for replica in replicas)
