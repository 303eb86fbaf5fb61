"""Tables whose optimizer states go out with flushes alone: behind each, weights and states equal the trainer's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from equality_tables import TorchModel, batch_of, table_batched
from stored_rows import read_rows
from torch import nn

import headrace
from headrace import TableAdmin, cli
from headrace.kernels.dtypes import bits_of
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, RequestError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.compare import compare_with_store

ALWAYS: dict[str, Any] = {"freshness_s": 0, "max_cost_percent": 100}
USERS = "bags.users.weight"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "sparse_adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path_factory.mktemp("server"), shards=2) as running:
        yield running


class Training:
    """A model, its optimizer and the batches of its steps."""

    def __init__(self, optimizer_name: str = "adam", *, seed: int = 3) -> None:
        torch.manual_seed(seed)
        self.model = TorchModel(sparse=optimizer_name != "adam")
        self.optimizer = OPTIMIZERS[optimizer_name](self.model.parameters())
        self._generator = torch.Generator().manual_seed(4)

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = (self.model(batch_of(self._generator)) - 1).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def steps(self, streamer: RawEmbeddingStreamer, count: int) -> None:
        """Train, and wait until all weights are durable."""
        for _ in range(count):
            self.step()
        streamer.step()
        while streamer.stats().num_dirty_rows or streamer.stats().num_inflight_flushes:
            streamer._delivery.sender.wait_durable(5.0)
            streamer.step()

    @property
    def users(self) -> torch.Tensor:
        weight: torch.Tensor = self.model.bags["users"].weight
        return weight.detach()

    def bits(self) -> list[bytes]:
        """Return all weights and states."""
        values = []
        for weight in self.model.parameters():
            states = self.optimizer.state[weight]
            values += [weight.detach(), *(torch.as_tensor(states[name]) for name in sorted(states))]
        return [bits_of(value).tobytes() for value in values]


@pytest.mark.parametrize("share", [None, 0.3])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_torch_optimizers(server: ServerProcess, optimizer_name: str, share: float | None) -> None:
    """Weights go out as they change and states stay away; a flush makes both equal; fewer bytes are sent."""
    training = Training(optimizer_name)
    name = f"{optimizer_name}-{share}"
    with RawEmbeddingStreamer(server.address, run=name, model=name, **ALWAYS) as streamer:
        streamer.attach(training.model, training.optimizer, publish="all", states="on_flush", send_share=share)
        streamer.flush()
        assert compare_with_store(streamer.tables, server.address).is_equal
        for _ in range(3):
            before = read_rows(server.address, f"{name}:{USERS}@states", with_states=True)
            training.steps(streamer, 8)
            assert streamer.stats().num_owed_rows > 0
            assert "waiting for flush()" in repr(streamer)
            assert share is not None or streamer.stats().acked_step == streamer.stats().step
            if share is None:
                stored = read_rows(server.address, f"{name}:{USERS}", with_states=True)
                assert stored.weights.tobytes() == bits_of(training.users).tobytes()
                assert not stored.states
            after = read_rows(server.address, f"{name}:{USERS}@states", with_states=True)
            assert after.weights.tobytes() == before.weights.tobytes()
            streamer.flush()
            assert streamer.stats().num_owed_rows == 0
            assert streamer.audit(only_present=False).is_equal
            assert compare_with_store(streamer.tables, server.address).is_equal
            num_rows = streamer.stats().num_rows_sent
            streamer.flush()
            assert streamer.stats().num_rows_sent == num_rows  # nothing twice


@pytest.mark.torchrec
@pytest.mark.parametrize("optimizer_name", ["EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"])
def test_fused_tables(server: ServerProcess, optimizer_name: str) -> None:
    """So it is for tables of FBGEMM, with states of a value an element or a row; some tables' states go at once."""
    tbe, forward = table_batched(optimizer_name)
    model, generator = nn.ModuleDict({"tbe": tbe}), torch.Generator().manual_seed(4)
    with RawEmbeddingStreamer(server.address, run=optimizer_name, model=optimizer_name, **ALWAYS) as streamer:
        streamer.attach(model, publish="all", states={"*films*": True, "*": "on_flush"})
        assert sum(table.name.endswith("@states") for table in streamer.tables) == 2
        for number in range(10):
            (forward(batch_of(generator)) - 1).pow(2).mean().backward()
            if number % 5 == 4:
                streamer.flush()
                assert streamer.audit(only_present=False).is_equal
                assert compare_with_store(streamer.tables, server.address).is_equal


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_a_restored_trainer_goes_on(server: ServerProcess, optimizer_name: str) -> None:
    """Behind a flush, weights, states and scalars come back bit for bit, and losses go on as they would have."""
    training, name = Training(optimizer_name), f"restored-{optimizer_name}"
    with RawEmbeddingStreamer(server.address, run=name, model=name, **ALWAYS) as streamer:
        streamer.attach(training.model, training.optimizer, publish="all", states="on_flush")
        training.steps(streamer, 10)
    again = Training(optimizer_name, seed=5)
    report = headrace.restore(again.model, again.optimizer, server.address, model_name=name)
    assert again.bits() == training.bits()
    assert [table.states.num_restored for table in report.tables if table.states] == [303, 1500, 7]
    assert len(report.tables) == 3
    again._generator.set_state(training._generator.get_state())
    assert [again.step() for _ in range(5)] == [training.step() for _ in range(5)]


def test_a_trainer_that_was_killed(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    """Its newest weights come back with the states of the last flush, and a warning says so."""
    training = Training()
    with RawEmbeddingStreamer(server.address, run="killed", model="killed", **ALWAYS) as streamer:
        streamer.attach(training.model, training.optimizer, publish="all", states="on_flush")
        training.steps(streamer, 5)
        streamer.flush()
        flushed_step = streamer.stats().step
        sums = training.optimizer.state[training.model.bags["users"].weight]["exp_avg"].clone()
        training.steps(streamer, 5)
        with caplog.at_level(logging.WARNING):
            streamer.close(flush=False)
        assert "optimizer states of 669 rows were not sent" in caplog.text
    again = Training(seed=5)
    with caplog.at_level(logging.WARNING):
        report = headrace.restore(again.model, again.optimizer, server.address, model_name="killed")
    assert torch.equal(again.users, training.users)
    assert torch.equal(again.optimizer.state[again.model.bags["users"].weight]["exp_avg"], sums)
    users = next(table for table in report.tables if table.name == f"killed:{USERS}")
    assert users.states is not None
    assert users.step > users.states.step == flushed_step
    assert f"optimizer states are of step {flushed_step} or earlier, since the trainer ended" in caplog.text


def test_evictions(server: ServerProcess) -> None:
    """Evicted rows leave both tables; one that is used again comes back with its weights, and its states by a flush."""
    training = Training("adagrad")
    with RawEmbeddingStreamer(server.address, run="evicts", model="evicts", **ALWAYS) as streamer:
        streamer.attach(training.model, training.optimizer, publish="all", states="on_flush")
        training.steps(streamer, 20)
        assert streamer.evict(USERS, range(1500)) == 1500
        state = streamer.state_dict()
        assert list(state["evicted"]) == [f"evicts:{USERS}"]
        training.steps(streamer, 1)
        weights = read_rows(server.address, f"evicts:{USERS}")
        states = read_rows(server.address, f"evicts:{USERS}@states")
        assert 0 < (weights.presence == 1).sum() <= 48
        assert not (states.presence == 1).any()
        state = streamer.state_dict()
        streamer.flush()
        states = read_rows(server.address, f"evicts:{USERS}@states")
        assert states.presence.tolist() == weights.presence.tolist()
        assert streamer.audit().is_equal
        streamer.close()
    with RawEmbeddingStreamer(server.address, run="evicts", model="evicts", **ALWAYS) as streamer:
        streamer.attach(training.model, training.optimizer, states="on_flush")
        streamer.load_state_dict(state)
        streamer.flush()
        again = read_rows(server.address, f"evicts:{USERS}@states")
        assert again.presence.tolist() == weights.presence.tolist()


def test_a_checkpoint_with_owed_states_is_not_drained(server: ServerProcess) -> None:
    """A run that goes on from it compares states too, and sends those that differ."""
    training = Training()
    with RawEmbeddingStreamer(server.address, run="resumed", model="resumed", **ALWAYS) as streamer:
        streamer.attach(training.model, training.optimizer, publish="all", states="on_flush")
        streamer.flush()
        assert streamer.state_dict()["is_drained"]
        training.steps(streamer, 5)
        state = streamer.state_dict()
        assert not state["is_drained"]
        streamer.close(flush=False)
    with RawEmbeddingStreamer(server.address, run="resumed", model="resumed", **ALWAYS) as streamer:
        streamer.attach(training.model, training.optimizer, states="on_flush")
        assert streamer.load_state_dict(state) > 10
        training.steps(streamer, 1)
        streamer.flush()
        assert streamer.audit(only_present=False).is_equal


def test_tables_of_states_are_for_restores(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replicas and exports leave them out unless they are named; they go with the table that is dropped."""
    training = Training()
    with RawEmbeddingStreamer(server.address, run="dropped", model="dropped") as streamer:
        streamer.attach(training.model, training.optimizer, publish="all", states="on_flush")
        streamer.flush()
    names = {f"dropped:{name}" for name in ("bags.films.weight", USERS, "one.weight")}
    with EmbeddingReplica(server.address, model="dropped") as replica:
        assert replica.tables.keys() == names
    with EmbeddingReplica(server.address, model="dropped", tables=frozenset({f"{USERS}@states", "one.*"})) as replica:
        assert replica.tables.keys() == {f"dropped:{USERS}@states", "dropped:one.weight"}
    options = ["--server", server.address, "--model", "dropped", "--format", "parquet", "--now"]
    for to, more in (("weights", []), ("all", ["--with-states"])):
        assert cli.main(["export", "--to", str(tmp_path / to), *options, *more]) == 0
        assert ("one.weight@states: 7 rows" in capsys.readouterr().out) == bool(more)

    async def drop() -> list[str]:
        async with await TableAdmin.connect(server.address) as admin:
            return await admin.drop([f"dropped:{USERS}"])

    assert asyncio.run(drop()) == [f"dropped:{USERS}", f"dropped:{USERS}@states"]


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ("at_times", "states 'at_times' is not a list"),
        ({"*": "at_times"}, "states: 'at_times' is neither True, False nor 'on_flush'"),
        ({"bags.usrs.weight": "on_flush"}, r"states: .*bags.usrs.weight.*bags.users.weight"),
    ],
)
def test_wrong_arguments(server: ServerProcess, states: Any, words: str) -> None:
    """Each is one line, and nothing is attached."""
    training = Training()
    with RawEmbeddingStreamer(server.address, run="wrong", model="wrong") as streamer:
        with pytest.raises(ConfigError, match=words):
            streamer.attach(training.model, training.optimizer, states=states)
        streamer.attach(training.model, training.optimizer)


def test_other_optimizers_restore_what_they_can(server: ServerProcess) -> None:
    """One without states takes the weights; one with other states is refused, or takes weights alone."""
    training = Training()
    with RawEmbeddingStreamer(server.address, run="other", model="other") as streamer:
        streamer.attach(training.model, training.optimizer, publish="all", states="on_flush")
        training.step()
    again = Training(seed=5)
    report = headrace.restore(
        again.model, torch.optim.SGD(again.model.parameters()), server.address, model_name="other"
    )
    assert torch.equal(again.users, training.users)
    assert [table.states for table in report.tables] == [None] * 3
    again = Training("adagrad", seed=5)
    with pytest.raises(RequestError, match=r"table 'bags\.users\.weight@states' differs"):
        headrace.restore(again.model, again.optimizer, server.address, model_name="other")
    report = headrace.restore(again.model, again.optimizer, server.address, model_name="other", strict=False)
    assert report.skipped.keys() == {
        f"{name}@states" for name in ("bags.users.weight", "bags.films.weight", "one.weight")
    }
    assert torch.equal(again.users, training.users)
