"""Several models on one server: they are kept apart, and two runs never write one table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from held_ports import hold_ports
from stored_rows import read_rows
from torch import nn

from headrace import cli
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, FencedError, OwnedError, RequestError
from headrace.streamer import RawEmbeddingStreamer

NUM_ROWS, DIM = 40, 4
ROWS = torch.arange(NUM_ROWS)


class Trainer:
    """A bare embedding, as the smallest program has it: its table is named `weight`."""

    def __init__(self, server: ServerProcess, run: str, **settings: object) -> None:
        self.model = nn.Embedding(NUM_ROWS, DIM)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.streamer = RawEmbeddingStreamer(server.address, run=run, **settings)
        try:
            self.streamer.attach(self.model, self.optimizer, publish="all")
        except BaseException:
            self.streamer.close(flush=False)
            raise

    def step(self, rows: torch.Tensor = ROWS) -> None:
        self.optimizer.zero_grad()
        self.model(rows).pow(2).sum().backward()
        self.optimizer.step()

    def weights(self) -> np.ndarray:
        return self.model.weight.detach().numpy()


@pytest.fixture(autouse=True)
def _models_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name no model for the whole process, unlike the rest of the suite."""
    monkeypatch.delenv("HEADRACE_STREAMER_MODEL")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path / "data", shards=2) as process:
        yield process


def test_two_models_of_one_table_name_are_kept_apart(server: ServerProcess) -> None:
    """Without any settings, each run's tables are its own model's, and none is mixed."""
    ctr, cvr = Trainer(server, "ctr-model"), Trainer(server, "cvr-model")
    for trainer in (ctr, cvr, ctr):
        trainer.step()
        trainer.streamer.flush()
    for trainer in (ctr, cvr):
        with trainer.streamer:
            assert [table.spec.fqn for table in trainer.streamer.tables] == [f"{trainer.streamer.model}:weight"]
            assert np.array_equal(
                read_rows(server.address, f"{trainer.streamer.model}:weight", ROWS).weights, trainer.weights()
            )
            assert np.array_equal(
                read_rows(server.address, "weight", ROWS, model=trainer.streamer.model).weights, trainer.weights()
            )
            assert trainer.streamer.audit(only_present=False).is_equal
    with pytest.raises(RequestError, match=r"several models have a table 'weight' \(ctr-model, cvr-model\)"):
        read_rows(server.address, "weight", ROWS)


def test_a_second_run_of_a_model_is_refused_and_can_take_over(server: ServerProcess) -> None:
    """The refusal names the owner and the ways on; a takeover fences the owner, whose rows change nothing any more."""
    first = Trainer(server, "a", model="ctr")
    first.step()
    first.streamer.flush()
    with pytest.raises(
        OwnedError, match=r"'ctr:weight' belongs to run 'a', which is connected and ended step 1 .* ago; "
    ):
        Trainer(server, "b", model="ctr")
    first.step()
    first.streamer.flush()
    second = Trainer(server, "b", model="ctr", takes_over=True)
    second.step()
    second.streamer.flush()
    first.step()
    with pytest.raises(FencedError, match="run 'b' has taken it over from run 'a'"):
        first.streamer.flush()
    first.streamer.close(flush=False)
    assert np.array_equal(read_rows(server.address, "weight", ROWS).weights, second.weights())
    second.streamer.close(flush=False)
    with pytest.raises(OwnedError, match="belongs to run 'b', which is not connected"):
        Trainer(server, "a", model="ctr")
    with Trainer(server, "b", model="ctr").streamer:
        pass  # a restart of the owner goes on as before


def test_a_displaced_run_that_reconnects_ends(tmp_path: Path) -> None:
    """Over a new connection, too, the former owner is fenced, and is not told to take the table back."""
    port = hold_ports()
    with ServerProcess.start(tmp_path / "data", port=port) as server:
        first = Trainer(server, "a", model="ctr")
        first.streamer.flush()
        second = Trainer(server, "b", model="ctr", takes_over=True)
        second.streamer.flush()
        second.streamer.close(flush=False)
    first.step()
    with ServerProcess.start(tmp_path / "data", port=port), pytest.raises(FencedError, match="a table was taken over"):
        first.streamer.flush()
    first.streamer.close(flush=False)


def test_owners_are_restored_on_any_number_of_shards(server: ServerProcess, tmp_path: Path) -> None:
    """A snapshot has the owners, and which of them have ended, on as many shards or others."""
    Trainer(server, "a", model="ctr").streamer.close(flush=False)
    with Trainer(server, "c", model="cvr").streamer:
        pass
    assert cli.main(["snapshot", "create", "--server", server.address, "--name", "s", "--now"]) == 0
    for shards in (2, 3):
        data = tmp_path / str(shards)
        snapshot = str(server.data_dir / "snapshots" / "s")
        assert cli.main(["restore", snapshot, "--data", str(data), "--shards", str(shards)]) == 0
        with ServerProcess.start(data) as restored:
            with pytest.raises(OwnedError, match="belongs to run 'a'"):
                Trainer(restored, "b", model="ctr")
            with Trainer(restored, "b", model="cvr").streamer:
                pass


def test_ownership_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    """Owners are in the log and in the store."""
    for _ in range(2):  # the second time, the first start has applied the log to the store
        with ServerProcess.start(tmp_path / "data", shards=2) as server:
            Trainer(server, "a", model="ctr").streamer.close(flush=False)
            with pytest.raises(OwnedError, match="belongs to run 'a'"):
                Trainer(server, "b", model="ctr")


def test_a_run_goes_on_with_tables_without_an_owner(server: ServerProcess) -> None:
    """Tables of the default model that are nobody's, or this run's, are gone on with; another run's are not."""
    with Trainer(server, "a", model="default").streamer as streamer:
        assert streamer.model == "default"
    with Trainer(server, "a").streamer as streamer:
        assert streamer.model == "default", "its own"
    with Trainer(server, "b").streamer as streamer:
        assert streamer.model == "b", "another run's"


def test_a_run_whose_name_is_no_model_is_told_to_name_one(server: ServerProcess) -> None:
    """A run's name that cannot be a model's is refused with the way on."""
    with pytest.raises(ConfigError, match=r"pass another one as model=…"):
        RawEmbeddingStreamer(server.address, run="12:00")
    with Trainer(server, "12:00", model="ctr").streamer as streamer:
        assert streamer.model == "ctr"


def test_a_replica_by_step_shows_the_steps_of_its_model(server: ServerProcess) -> None:
    """Steps of the other model neither show nor hold up rows of this one."""
    with Trainer(server, "a").streamer as streamer:
        streamer.flush()
    a, b = Trainer(server, "a"), Trainer(server, "b")
    a.step()
    a.streamer.flush()
    b.streamer.flush()
    with pytest.raises(ConfigError, match=r"the models a, b, .* name it \(model=…\)"):
        EmbeddingReplica(server.address, consistency="step")
    with EmbeddingReplica(server.address, consistency="step", model="a") as replica:
        assert list(replica.tables) == ["a:weight"]
        for step in range(2, 6):
            b.step()
            b.streamer.flush()
            a.step(ROWS[step:])
            a.streamer.flush()
            replica.wait_for(step, 30.0, epoch=a.streamer.epoch)
            assert (replica.epoch, replica.step) == (a.streamer.epoch, step)
            assert np.array_equal(replica.lookup("weight", ROWS).numpy(), a.weights())
            assert np.array_equal(replica.lookup("a:weight", ROWS).numpy(), a.weights())
    a.streamer.close()
    b.streamer.close()


def test_a_replica_of_all_models_has_all_tables(server: ServerProcess) -> None:
    """Without steps, one replica serves several models; a path that several have needs its model."""
    a, b = Trainer(server, "a"), Trainer(server, "b")
    for trainer in (a, b):
        trainer.streamer.flush()
    with EmbeddingReplica(server.address) as replica:
        for trainer in (a, b):
            name = f"{trainer.streamer.model}:weight"
            assert np.array_equal(replica.lookup(name, ROWS).numpy(), trainer.weights())
        with pytest.raises(RequestError, match="several models have a table 'weight'"):
            replica.lookup("weight", ROWS)
    a.streamer.close()
    b.streamer.close()
