"""A model that is not what the server has is refused before anything is sent, unless somebody says what counts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from stored_rows import read_rows
from torch import nn
from two_starts import start_on_rank

from headrace import restore
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError
from headrace.streamer import RawEmbeddingStreamer

NUM_ROWS = 40
ROWS = list(range(NUM_ROWS))


class Trainer:
    """An embedding with Adagrad's sums."""

    def __init__(self, seed: int, num_rows: int = NUM_ROWS) -> None:
        torch.manual_seed(seed)
        self.model = nn.Embedding(num_rows, 4)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)

    def step(self, *rows: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.tensor(rows)).sum().backward()
        self.optimizer.step()

    def attach(self, address: str, *, settings: dict[str, Any] | None = None, **arguments: Any) -> RawEmbeddingStreamer:
        streamer = RawEmbeddingStreamer(address, run="ctr", model="ctr", **(settings or {}))
        streamer.attach(self.model, self.optimizer, **arguments)
        return streamer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        yield server


@pytest.fixture
def first(server: ServerProcess) -> Trainer:
    """Return a trainer that has ended, whose rows are on the server."""
    trainer = Trainer(1)
    with trainer.attach(server.address) as streamer:
        trainer.step(3, 4)
        streamer.flush()
    return trainer


def _stored(server: ServerProcess) -> Any:
    return read_rows(server.address, "ctr:weight", ROWS).weights


@pytest.mark.parametrize("ends", ["step", "flush", "audit", "close"])
def test_new_weights_over_the_rows_of_a_run_before_are_refused(
    server: ServerProcess, first: Trainer, ends: str
) -> None:
    """Before anything is sent, with the ways on; the server keeps its rows."""
    before, second = _stored(server), Trainer(2)
    streamer = second.attach(server.address)
    words = r"other rows of ctr:weight than the model, as in rows 0, .*restore.*load_state_dict.*'all'.*'updated'"
    with pytest.raises(ConfigError, match=words):
        if ends == "step":
            second.step(5)
        else:
            getattr(streamer, ends)()
    streamer.close()
    assert np.array_equal(_stored(server), before)


def test_only_logged_where_training_has_to_go_on(
    server: ServerProcess, first: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    """With `on_error="log"` training goes on, once told, and nothing is sent."""
    before, second = _stored(server), Trainer(2)
    streamer = second.attach(server.address, settings={"on_error": "log"})
    for _ in range(3):
        second.step(5)
    assert [record.levelno for record in caplog.records if "other rows of" in record.message] == [logging.ERROR]
    with pytest.raises(ConfigError, match="other rows"):
        streamer.flush()
    streamer.close()
    assert np.array_equal(_stored(server), before)


@pytest.mark.parametrize("way", ["same", "restore", "load_state_dict", "all", "updated"])
def test_each_way_on_is_open(server: ServerProcess, first: Trainer, way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Equal rows need no word: those of the same model, of a restored one, and of a resumed one."""
    state: Any = None
    if way == "load_state_dict":
        with first.attach(server.address) as streamer:
            streamer.flush()
            state = streamer.state_dict()
    trainer = first if way == "same" else Trainer(2)
    if way == "restore":
        restore(trainer.model, trainer.optimizer, server.address, model_name="ctr")
    with trainer.attach(server.address, publish=way if way in ("all", "updated") else "auto") as streamer:
        assert streamer.stats().num_dirty_rows == (NUM_ROWS if way == "all" else 0)
        if way == "load_state_dict":
            assert streamer.load_state_dict(state) == NUM_ROWS
        trainer.step(7)
        assert streamer.audit().is_equal is (way != "updated")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_run_that_takes_over_is_compared_too(server: ServerProcess, first: Trainer) -> None:
    """Its rows are the owner's, or somebody says what counts."""
    takes_over = {"takes_over": True}
    for trainer, is_refused in ((first, False), (Trainer(2), True)):
        streamer = RawEmbeddingStreamer(server.address, run="other", model="ctr", **takes_over)
        streamer.attach(trainer.model, trainer.optimizer)
        if is_refused:
            with pytest.raises(ConfigError, match="other rows of ctr:weight"):
                streamer.step()
        streamer.close()


def test_a_grown_model_must_have_the_rows_that_are_there(server: ServerProcess, first: Trainer) -> None:
    """Only its new rows may be anything."""
    second = Trainer(2, NUM_ROWS + 5)
    streamer = second.attach(server.address)
    with pytest.raises(ConfigError, match="other rows of ctr:weight"):
        second.step(NUM_ROWS)
    streamer.close()
    restore(second.model, second.optimizer, server.address, model_name="ctr")
    with second.attach(server.address) as streamer:
        second.step(NUM_ROWS)
        assert streamer.audit().is_equal


def test_rows_that_the_server_has_deleted_are_no_difference(server: ServerProcess, first: Trainer) -> None:
    """A trainer that was evicting goes on with the same model."""
    with first.attach(server.address) as streamer:
        streamer.evict("weight", [8, 9])
        streamer.flush()
    with first.attach(server.address) as streamer:
        first.step(3)
        assert streamer.audit().is_equal


@pytest.mark.parametrize(
    "arguments",
    [{"weights_dtype": torch.bfloat16, "states": False}, {"weights_dtype": torch.int8}, {"send_share": 0.5}],
)
def test_what_is_stored_is_compared(server: ServerProcess, arguments: dict[str, Any]) -> None:
    """Rounded weights are the server's if they round to its rows, and states that are not sent count for nothing."""
    trainer = Trainer(1)
    for seed in (1, 2):
        with trainer.attach(server.address, **arguments) as streamer:
            trainer.step(seed)
            streamer.flush()
    other = Trainer(2)
    streamer = other.attach(server.address, **arguments)
    with pytest.raises(ConfigError, match="other rows of ctr:weight"):
        other.step(1)
    streamer.close()


def test_all_ranks_refuse_what_differs_on_one(server: ServerProcess) -> None:
    """The others would train on, and wait for it in the next step."""
    assert run_ranks(start_on_rank, 2, server.address, False) == ["equal", "equal"]
    assert run_ranks(start_on_rank, 2, server.address, False) == ["equal", "equal"]
    for told in run_ranks(start_on_rank, 2, server.address, True):
        assert "other rows of" in told and "on rank 1" in told


def test_a_recording_sends_nothing_either(server: ServerProcess, first: Trainer, tmp_path: Path) -> None:
    """It is refused like a step, before its rows and the dense part go out."""
    before, second = _stored(server), Trainer(2)
    streamer = second.attach(server.address, settings={"recordings": str(tmp_path / "recordings")})
    with pytest.raises(ConfigError, match="other rows of ctr:weight"):
        streamer.record(torch.tensor([1]), second.model)
    streamer.close()
    assert np.array_equal(_stored(server), before)


class Two(nn.Module):
    """Two tables, of which the second may be frozen."""

    def __init__(self, seed: int, *, is_frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Embedding(NUM_ROWS, 4), nn.Embedding(NUM_ROWS, 4)
        self.b.requires_grad_(not is_frozen)
        self.optimizer = torch.optim.Adagrad([each for each in self.parameters() if each.requires_grad], lr=0.1)

    def unfreeze(self) -> None:
        self.b.requires_grad_(True)
        self.optimizer.add_param_group({"params": [*self.b.parameters()]})

    def step(self, *names: str) -> None:
        self.optimizer.zero_grad()
        torch.stack([self.get_submodule(name)(torch.arange(5)).sum() for name in names]).sum().backward()
        self.optimizer.step()


@pytest.mark.filterwarnings("ignore:.*was frozen:RuntimeWarning")
def test_a_table_that_is_attached_after_a_checkpoint_was_loaded(server: ServerProcess) -> None:
    """Its rows that the store has otherwise are sent, as those of the tables before it, and streaming goes on."""
    model = Two(1, is_frozen=False)
    with RawEmbeddingStreamer(server.address, run="ctr", model="ctr") as streamer:
        streamer.attach(model, model.optimizer)
        model.step("a", "b")
        streamer.flush()
        state, saved = streamer.state_dict(), {name: each.clone() for name, each in model.state_dict().items()}
        model.step("a", "b")
    resumed = Two(2, is_frozen=True)
    with RawEmbeddingStreamer(server.address, run="ctr", model="ctr") as streamer:
        resumed.load_state_dict(saved)
        streamer.attach(resumed, resumed.optimizer)
        streamer.load_state_dict(state)
        resumed.step("a")
        resumed.unfreeze()
        streamer.attach(resumed, resumed.optimizer)
        resumed.step("a", "b")
        assert streamer.audit().is_equal


@pytest.mark.filterwarnings("ignore:.*was frozen:RuntimeWarning")
def test_a_later_table_that_differs_is_refused_alone(server: ServerProcess) -> None:
    """Its attach raises and attaches nothing; the tables that stream already go on."""
    model = Two(1, is_frozen=False)
    with RawEmbeddingStreamer(server.address, run="ctr", model="ctr") as streamer:
        streamer.attach(model, model.optimizer)
        model.step("a", "b")
    second = Two(2, is_frozen=True)
    second.a.load_state_dict(model.a.state_dict())
    with RawEmbeddingStreamer(server.address, run="ctr", model="ctr") as streamer:
        streamer.attach(second, second.optimizer, publish="updated")
        second.step("a")
        streamer.flush()
        second.unfreeze()
        with pytest.raises(ConfigError, match=r"other rows of ctr:b\.weight"):
            streamer.attach(second, second.optimizer)
        second.step("a", "b")
        assert [*streamer.audit().unstreamed] == ["b.weight"]
        streamer.attach(second, second.optimizer, publish="all")
        second.step("a", "b")
        assert all(not table.differing_row_ids for table in streamer.audit().tables)
