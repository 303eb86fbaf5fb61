"""Served models return what the trained ones do: keys, their order, types and all bits, at the step that they show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from served_outputs import CASES, Case, Table, compare_on_rank, follow_on_rank
from torch import nn

from headrace.paramserver.reading.blocking_reader import BlockingReader
from headrace.paramserver.replica import EmbeddingReplica, serve_model
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.restore import restore

_TABLES = {"user": (60, 8), "item": (90, 4)}
_WAIT_S = 60.0


class _Ranker(nn.Module):
    """Bags of two tables, a norm with buffers, and a small tower."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(*_TABLES["user"], mode="sum", sparse=True)
        self.item = nn.EmbeddingBag(*_TABLES["item"], mode="mean", sparse=True)
        self.norm = nn.BatchNorm1d(12)
        self.top = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.top(self.norm(torch.cat([self.user(users), self.item(items)], dim=1)))
        return outputs


def _outputs(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        outputs: torch.Tensor = model(*batch)
    model.train()
    return outputs


@pytest.mark.parametrize("consistency", ["step", "latest"])
def test_a_served_copy_computes_what_the_trainer_does(server: ServerProcess, consistency: str) -> None:
    """After each flush the copy's rows and dense part are those of the trainer's step, and so are its outputs."""
    torch.manual_seed(0)
    some = np.random.default_rng(0)
    model = _Ranker()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    probe = [torch.from_numpy(some.integers(0, rows, (16, 3))) for rows, _ in _TABLES.values()]
    with RawEmbeddingStreamer(server.address, run="nightly", model=consistency, dense_interval_s=0.05) as streamer:
        streamer.attach(model, optimizer, publish="all", dense=True)
        streamer.flush()
        with EmbeddingReplica(server.address, model=consistency, consistency=consistency) as replica:  # type: ignore[arg-type]
            served = serve_model(_Ranker(), replica, model=consistency)
            for _ in range(5):
                for _ in range(7):
                    batch = [torch.from_numpy(some.integers(0, rows, (8, 3))) for rows, _ in _TABLES.values()]
                    optimizer.zero_grad()
                    (model(*batch) - 1).pow(2).mean().backward()
                    optimizer.step()
                streamer.flush()
                step = streamer.stats().step
                replica.wait_for(step, _WAIT_S, epoch=streamer.epoch)
                dense = replica.dense()
                assert (dense.epoch, dense.step) == (streamer.epoch, step)
                assert torch.equal(served(*probe), _outputs(model, probe))


@pytest.fixture(scope="module")
def found(server: ServerProcess) -> dict[str, str]:
    """Return by case what differs: all of one number of ranks in one run, because ranks take seconds to begin."""
    problems: dict[str, str] = {}
    for world_size in (1, 2):
        cases = {name: case for name, case in CASES.items() if case.world_size == world_size}
        for of_rank in run_ranks(compare_on_rank, world_size, cases, server.address, timeout_s=300.0):
            problems |= {name: problem for name, problem in of_rank.items() if problem}
    return problems


@pytest.mark.torchrec
@pytest.mark.parametrize("name", CASES)
def test_served_is_what_was_trained(found: dict[str, str], name: str) -> None:
    """The plain model and the sharded one, given to `serve_model`, return what the trained module returns."""
    assert name not in found, found[name]


@pytest.mark.torchrec
def test_a_served_model_follows_the_next_start(server: ServerProcess) -> None:
    """When the trainer starts with another sharding, a served model returns what that returns from then on."""
    dims = {"a": 4, "b": 8, "c": 4}
    cases = [
        Case(world_size=1, tables={name: Table(dims[name], (kind, {})) for name, kind in kinds.items()})
        for kinds in (
            {"a": "row_wise", "b": "data_parallel", "c": "row_wise"},
            {"a": "data_parallel", "b": "row_wise", "c": "data_parallel"},
            {"a": "row_wise", "b": "row_wise", "c": "row_wise"},
        )
    ]
    (problems,) = run_ranks(follow_on_rank, 1, cases, server.address)
    assert problems == ["", "", ""]


class _Before(nn.Module):
    """A ranker whose top is beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.old = _Ranker()
        self.head, self.old.top = self.old.top, nn.Sequential()

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.old(users, items))
        return outputs


class _After(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = _Ranker()

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.tower(users, items)
        return outputs


def test_a_renamed_tower_goes_on_whole(server: ServerProcess) -> None:
    """With `names=` a renamed module's tables, dense tensors and states are restored, streamed and served as before."""
    names, some = {"tower": "old", "tower.top": "head"}, np.random.default_rng(2)
    batches = [[torch.from_numpy(some.integers(0, n, (8, 3))) for n, _ in _TABLES.values()] for _ in range(4)]

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, **given: Any) -> set[str]:
        with RawEmbeddingStreamer(server.address, run="towers", model="towers", dense_interval_s=0.01) as streamer:
            streamer.attach(model, optimizer, dense=True, dense_states=True, **given)
            for batch in batches:
                optimizer.zero_grad()
                (model(*batch) - 1).pow(2).mean().backward()
                optimizer.step()
            streamer.flush()
            assert streamer.audit().is_equal
        with BlockingReader(server.address, model="towers") as reader:
            return {*reader.tables, *reader.dense().tensors}

    before, after = _Before(), _After()
    trained = torch.optim.Adagrad(before.parameters(), lr=0.1)
    stored = train(before, trained)
    optimizer = torch.optim.Adagrad(after.parameters(), lr=0.1)
    report = restore(after, optimizer, server.address, model_name="towers", names=names)
    assert (report.skipped, report.dense.kept, report.dense.without_states) == ({}, (), ())
    for ours, theirs in zip(after.state_dict().values(), before.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(after.parameters(), before.parameters(), strict=True):
        assert torch.equal(optimizer.state[ours]["sum"], trained.state[theirs]["sum"])
    assert train(after, optimizer, names=names) == stored
    with EmbeddingReplica(server.address, model="towers", consistency="step") as replica:
        parts = serve_model(_Ranker(), replica, names={"": "old", "top": "head"})
        for each in (serve_model(_After(), replica, names=names), parts):
            assert torch.equal(each(*batches[0]), _outputs(after, batches[0]))
        with pytest.raises(ConfigError, match="'towre'"):
            serve_model(_After(), replica, names={"towre": "old"})
