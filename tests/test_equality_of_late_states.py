"""Tables whose optimizer states go out with flushes alone: behind each, weights and states equal the trainer's."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from equality_tables import TorchModel, batch_of, table_batched
from late_states_training import train_on_rank
from ranks import run_ranks
from restored_dense_training import WholeJob, go_on_with_all_on_rank, stream_all_on_rank
from sharded_training import Job, everywhere
from stored_rows import read_rows
from torch import nn
from watched_server import WAIT_S

import headrace
from headrace import TableAdmin, cli
from headrace.kernels.dtypes import bits_of
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, RequestError
from headrace.schemas.table_names import is_states_name, states_name
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.compare import compare_with_store
from headrace.streamer.resume import digest_of

ALWAYS: dict[str, Any] = {"freshness_s": 0, "max_cost_percent": 100}
USERS = "bags.users.weight"
FIRST = {"adagrad": "sum", "adam": "exp_avg", "sparse_adam": "exp_avg"}
"""The state that stands for weights in a states table, by optimizer."""
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
        while streamer.stats().num_dirty_rows:
            streamer._delivery.sender.wait_durable(WAIT_S)
            streamer.step()
        streamer._delivery.sender.wait_durable(WAIT_S)

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
            before = read_rows(server.address, states_name(f"{name}:{USERS}", FIRST[optimizer_name]))
            training.steps(streamer, 8)
            assert streamer.stats().num_owed_rows > 0
            assert "waiting for flush()" in repr(streamer)
            assert share is not None or streamer.stats().acked_step == streamer.stats().step
            if share is None:
                stored = read_rows(server.address, f"{name}:{USERS}", with_states=True)
                assert stored.weights.tobytes() == bits_of(training.users).tobytes()
                assert not stored.states
            after = read_rows(server.address, states_name(f"{name}:{USERS}", FIRST[optimizer_name]))
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
        assert sum(is_states_name(table.name) for table in streamer.tables) == 2
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
    assert 0 < users.states.num_older <= 1500
    says = f"killed:{USERS}: optimizer states of {users.states.num_older} rows are older than their weights, or missing"
    assert says in caplog.text
    assert f"of {users.states.num_older} older than their weights" in str(report)


def test_states_that_went_out_in_part(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    """Of a flush that was cut short, the rows are counted whose states had not gone out; others are as new."""
    training = Training("adagrad")
    with RawEmbeddingStreamer(server.address, run="cut", model="cut", **ALWAYS) as streamer:
        streamer.attach(training.model, training.optimizer, publish="all", states="on_flush")
        training.steps(streamer, 5)
        streamer.flush()
        training.steps(streamer, 3)
        table = next(table for table in streamer.tables if table.name == f"cut:{USERS}@states.sum")
        assert table.owed is not None
        some = table.owed.take(20)
        table.dirty.mark(some)
        num_left = table.owed.count
        training.steps(streamer, 1)
        changed = table.owed.count - num_left
        streamer.close(flush=False)
    again = Training("adagrad", seed=5)
    report = headrace.restore(again.model, again.optimizer, server.address, model_name="cut", tables=[USERS])
    (users,) = report.tables
    assert users.states is not None
    assert num_left <= users.states.num_older <= num_left + changed < 1500


def test_rows_without_weights_take_no_states(server: ServerProcess) -> None:
    """A row that the store has forgotten, as one that expired, keeps the new model's states with its weights."""
    training = Training("adagrad")
    with RawEmbeddingStreamer(server.address, run="gone", model="gone", **ALWAYS) as streamer:
        streamer.attach(training.model, training.optimizer, publish="all", states="on_flush")
        training.steps(streamer, 30)
        streamer.flush()
        weights = next(table for table in streamer.tables if table.name == f"gone:{USERS}")
        weights.states_table = None  # the eviction below is of the weights alone, as an expiry is
        assert streamer.evict(USERS, range(700)) == 700
    again = Training("adagrad", seed=5)
    before = again.users.clone()
    report = headrace.restore(again.model, again.optimizer, server.address, model_name="gone")
    sums = again.optimizer.state[again.model.bags["users"].weight]["sum"]
    assert torch.equal(again.users[:700], before[:700])
    assert not sums[:700].any()
    assert torch.equal(sums[700:], training.optimizer.state[training.model.bags["users"].weight]["sum"][700:])
    users = next(table for table in report.tables if table.name == f"gone:{USERS}")
    assert users.states is not None
    assert (users.num_restored, users.states.num_restored, users.states.num_older) == (800, 800, 0)


def test_a_run_that_sends_states_no_more(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    """What an earlier run has left of states comes back with a warning, which counts the rows."""
    training = Training("adagrad")
    for states in ("on_flush", False):
        with RawEmbeddingStreamer(server.address, run="no-more", model="no-more", **ALWAYS) as streamer:
            streamer.attach(training.model, training.optimizer, states=states)  # type: ignore[arg-type]
            training.steps(streamer, 3)
    again = Training("adagrad", seed=5)
    report = headrace.restore(again.model, again.optimizer, server.address, model_name="no-more")
    assert torch.equal(again.users, training.users)
    for table in report.tables:
        assert table.states is not None and table.states.num_older > 0
        assert f"{table.name}: optimizer states of {table.states.num_older} rows are older" in caplog.text


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
        states = read_rows(server.address, f"evicts:{USERS}@states.sum")
        assert 0 < (weights.presence == 1).sum() <= 48
        assert not (states.presence == 1).any()
        state = streamer.state_dict()
        streamer.flush()
        states = read_rows(server.address, f"evicts:{USERS}@states.sum")
        assert states.presence.tolist() == weights.presence.tolist()
        assert streamer.audit().is_equal
        streamer.close()
    with RawEmbeddingStreamer(server.address, run="evicts", model="evicts", **ALWAYS) as streamer:
        streamer.attach(training.model, training.optimizer, states="on_flush")
        streamer.load_state_dict(state)
        streamer.flush()
        again = read_rows(server.address, f"evicts:{USERS}@states.sum")
        assert again.presence.tolist() == weights.presence.tolist()


@pytest.mark.parametrize("publish", ["all", "updated"])
def test_a_checkpoint_with_owed_states(server: ServerProcess, publish: Any) -> None:
    """A run that goes on from it compares states too, and sends those that differ; of weights none that are equal."""
    training, run = Training("adagrad"), f"resumed-{publish}"
    with RawEmbeddingStreamer(server.address, run=run, model=run, **ALWAYS) as streamer:
        streamer.attach(training.model, training.optimizer, publish=publish, states="on_flush")
        streamer.flush()
        assert not streamer.state_dict()["owes_states"]
        training.steps(streamer, 5)
        state = streamer.state_dict()
        assert state["is_drained"] and state["owes_states"]
        streamer.close(flush=False)
    with RawEmbeddingStreamer(server.address, run=run, model=run, **ALWAYS) as streamer:
        streamer.attach(training.model, training.optimizer, publish="updated", states="on_flush")
        assert streamer.load_state_dict(state) > 10
        assert not any(table.dirty.count for table in streamer.tables if not is_states_name(table.name))
        training.steps(streamer, 1)
        streamer.flush()
        assert streamer.audit(only_present=publish == "updated").is_equal
        assert compare_with_store(streamer.tables, server.address, only_present=publish == "updated").is_equal


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
    with EmbeddingReplica(
        server.address, model="dropped", tables=frozenset({f"{USERS}@states.exp_avg", "one.*"})
    ) as replica:
        assert replica.tables.keys() == {f"dropped:{USERS}@states.exp_avg", "dropped:one.weight"}
    options = ["--server", server.address, "--model", "dropped", "--format", "parquet", "--now"]
    for to, more in (("weights", []), ("all", ["--with-states"])):
        assert cli.main(["export", "--to", str(tmp_path / to), *options, *more]) == 0
        assert ("one.weight@states.exp_avg: 7 rows" in capsys.readouterr().out) == bool(more)

    async def drop() -> list[str]:
        async with await TableAdmin.connect(server.address) as admin:
            return await admin.drop([f"dropped:{USERS}"])

    assert asyncio.run(drop()) == [f"dropped:{USERS}", f"dropped:{USERS}@states.exp_avg"]


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
    """One without states takes the weights; one with other states is refused unless it wants weights alone."""
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
    for make in (OPTIMIZERS["adagrad"], torch.optim.RMSprop):  # of as many states, and of another number
        again = Training("adagrad", seed=5)
        again.optimizer = make(again.model.parameters())
        before = again.users.clone()
        with pytest.raises(RequestError, match=r"table 'bags\.users\.weight' differs .*states .*@states\.exp_avg"):
            headrace.restore(again.model, again.optimizer, server.address, model_name="other")
        assert torch.equal(again.users, before)
        headrace.restore(again.model, again.optimizer, server.address, model_name="other", states=False)
        assert torch.equal(again.users, training.users)


@pytest.mark.torchrec
def test_states_that_wait_on_ranks(server: ServerProcess) -> None:
    """They are in tables of their own, split by rows and columns as the weights.

    A checkpoint of any rank names the tables of all ranks.
    """
    shardings = everywhere("row_wise", "users", "clicks") | everywhere("column_wise", "films", ranks=[1, 0])
    job = Job(run="ranks", module="ranks", shardings=shardings, optimizer="adagrad")
    results = run_ranks(train_on_rank, 2, server.address, job)
    assert any(result["num_owed"] for result in results)
    assert all(result["is_equal"] for result in results)
    names = [name for result in results for name in result["tables"]]
    assert len([name for name in names if "@states." in name]) == len(names) / 2 > 0
    digests = sorted(map(digest_of, set(names)))
    assert all(result["checkpoint"]["tables"] == digests for result in results)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", pytest.param("dmp", marks=pytest.mark.torchrec)])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 2)])
def test_states_that_went_out_with_the_flush_are_restored_on_ranks(
    server: ServerProcess, kind: str, before: int, after: int
) -> None:
    """From tables of their own, on as many ranks and on more; in TorchRec also in other columns."""
    tables = ("users", "shops")
    first: dict[str, Any] = {"users": ("row_wise", {}), "shops": ("table_wise", {"rank": 0})}
    then: dict[str, Any] = first
    if before == 1:
        first = everywhere("table_wise", *tables, rank=0)
        then = {"users": ("column_wise", {"ranks": [1, 0]}), "shops": ("row_wise", {})}
    job = WholeJob(address=server.address, name=f"late-{kind}-{before}", kind=kind, shardings=first, states="on_flush")
    endless = run_ranks(stream_all_on_rank, before, job)
    again = dataclasses.replace(job, shardings=then)
    for result in run_ranks(go_on_with_all_on_rank, after, again, [each["state"] for each in endless]):
        assert result["losses"] == result["expected_losses"]
        assert any(table.states is not None and table.states.num_restored for table in result["report"].tables)
        assert result["warnings"] == []
