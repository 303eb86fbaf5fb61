"""A start that is refused, or ends before its first step, takes nothing from what the run has on the server."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from headrace.cli import main
from headrace.paramserver.reading.blocking_reader import BlockingReader
from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, FencedError, HeadraceError, OwnedError, SpecMismatchError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.restore import restore
from headrace.streamer.world import SoloWorld, World


class Model(nn.Module):
    """Two tables and a dense layer, with names and a width of choice."""

    def __init__(self, *, users: str = "users", top: str = "top", dim: int = 4, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self._names = users, top
        self.items = nn.Embedding(30, dim)
        self.add_module(users, nn.Embedding(20, dim))
        self.add_module(top, nn.Linear(dim, 1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        users, top = (self.get_submodule(name) for name in self._names)
        scores: torch.Tensor = top(users(rows) * self.items(rows)).sum()
        return scores


def start(address: str, model: Model, *, num_steps: int, is_restored: bool = False) -> None:
    """Start the run with a model, train, and end as an interrupt does, unless it trains."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.closing(RawEmbeddingStreamer(address, run="ctr")) as streamer:
        if is_restored:
            report = restore(model, optimizer, address)
            assert (report.num_kept, report.step, len(report.dense.tensors)) == (0, 3, 2)
        try:
            streamer.attach(model, optimizer, dense=True)
            for _ in range(num_steps):
                optimizer.zero_grad()
                model(torch.arange(10)).backward()
                optimizer.step()
        finally:
            streamer.close(flush=bool(num_steps))


def test_a_start_that_sends_nothing_leaves_the_run_as_it_is(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tables, owners and last step stay: new replicas by step, snapshots and the old model's restart all go on."""
    trained = Model()
    start(server.address, trained, num_steps=3)

    def registered() -> list[tuple[str, int, int]]:
        with BlockingReader(server.address) as reader:
            tables = [table for status in reader.status() for table in status.tables]
            return [(table.spec.fqn, table.spec.dim, table.owner.epoch) for table in tables]

    before = registered()
    assert len(before) == 2 * 4 and {epoch for *_, epoch in before} == {1}
    refused: list[tuple[Model, type[HeadraceError]]] = [
        (Model(dim=5), SpecMismatchError),
        (Model(users="people", seed=1), ConfigError),
        (Model(top="head", seed=1), ConfigError),
    ]
    for model, error in refused:
        with pytest.raises(error):
            start(server.address, model, num_steps=1)
    with contextlib.closing(RawEmbeddingStreamer(server.address, run="ctr")) as streamer:
        streamer.close(flush=False)
    assert registered() == before

    def step_of_new_replica() -> tuple[int, int]:
        with EmbeddingReplica(server.address, consistency="step") as replica:
            assert torch.equal(replica.lookup("items.weight", torch.arange(30)), trained.items.weight.detach())
            return replica.epoch, replica.step

    assert step_of_new_replica() == (1, 3)
    assert main(["snapshot", "create", "--server", server.address, "--timeout-s", "5"]) == 0
    assert "step 3 of epoch 1" in capsys.readouterr().out
    start(server.address, trained := Model(seed=2), num_steps=0, is_restored=True)  # interrupted before its first step
    assert step_of_new_replica() == (1, 3)
    assert main(["doctor", "--server", server.address]) == 0, capsys.readouterr().out
    start(server.address, trained, num_steps=2)
    epoch, step = step_of_new_replica()
    assert epoch > 1 and step == 2


class Between(SoloWorld):
    """Calls a function once, after the comparison with the server's rows and before anything is registered."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call, self._num_empty = call, 0

    def gather(self, value: Any) -> list[Any]:
        self._num_empty += value == {}  # no table has another name, and then none has other rows
        if value == {} and self._num_empty == 2:
            self._call()
        return super().gather(value)


def test_a_start_fences_the_one_before_once_it_is_accepted(server: ServerProcess) -> None:
    """Starts that are refused leave the running trainer streaming. One that attaches fences it, and misses no row."""

    def begin(run: str, world: World | None = None) -> contextlib.closing[RawEmbeddingStreamer]:
        return contextlib.closing(RawEmbeddingStreamer(server.address, run=run, model="live", world=world))

    def train() -> None:
        optimizer.zero_grad()
        model(torch.arange(10)).backward()
        optimizer.step()
        streamer.flush()

    def attach_and_step(second: RawEmbeddingStreamer, model: nn.Module) -> None:
        second.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        second.step()

    with begin("live") as streamer:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        streamer.attach(model, optimizer)
        train()
        refused: list[tuple[str, Model, type[HeadraceError], str]] = [
            ("live", Model(dim=5), SpecMismatchError, "dim"),
            ("live", Model(seed=1), ConfigError, "older start of this run, rank0 of epoch"),
            ("else", copy.deepcopy(model), OwnedError, "belongs to run"),
        ]
        for run, other, error, words in refused:
            with begin(run) as second:
                with pytest.raises(error, match=words) as told:
                    attach_and_step(second, other)
                assert len(told.traceback) == 3, "the two functions here, and the public one"
                assert second.epoch > streamer.epoch
                train()
            train()
        with begin("live", Between(train)) as late:
            with pytest.raises(ConfigError, match="other rows of"):
                attach_and_step(late, copy.deepcopy(model))
            with pytest.raises(FencedError):
                train()
        streamer.close(flush=False)
    with begin("live") as newest:
        restore(model, optimizer, server.address, model_name="live")
        attach_and_step(newest, model)
        assert newest.audit().is_equal


def test_a_start_that_is_refused_drops_no_dense_tensor(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that would be replaced stays where another run owns a table of the model."""

    def attach(run: str, model: nn.Module, **arguments: Any) -> None:
        with contextlib.closing(RawEmbeddingStreamer(server.address, run=run, model="mixed")) as streamer:
            streamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), **arguments)
            streamer.flush()
            streamer.close(flush=False)  # as when it is killed: the run keeps its tables

    attach("other", nn.ModuleDict({"extra": nn.Embedding(5, 4)}))
    attach("ours", nn.ModuleDict({"users": nn.Embedding(5, 4), "top": nn.Linear(4, 1)}), dense=True)
    changed = nn.ModuleDict({"extra": nn.Embedding(5, 4), "top": nn.Linear(4, 2)})
    with pytest.raises(OwnedError):
        attach("ours", changed, dense=True, publish="all")
    with BlockingReader(server.address) as reader:
        assert reader.tables["mixed:top.weight"].shape == (1, 4)
    assert main(["verify", "--server", server.address, "--model", "mixed"]) == 0
    assert "of 2 tables and 2 dense tensors, in" in capsys.readouterr().out
