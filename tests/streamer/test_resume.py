"""What rides in a checkpoint, what a resumed run sends, and rows fetched out of the trainer; with a real server."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator

import pytest
import torch
from evicting_training import read_rows
from torch import nn

from headrace.paramserver.supervisor.launch import ServerProcess
from headrace.schemas.errors import ConfigError, RowRangeError, UnknownTableError
from headrace.schemas.idl import idl
from headrace.streamer import RawEmbeddingStreamer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path_factory.mktemp("resume") / "data", shards=2) as server:
        yield server


class Trainer:
    """A table that is trained, and can be put back."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.add_module(name, nn.Embedding(70_000, 5, sparse=True))
        self.table: nn.Embedding = self.model.get_submodule(name)  # type: ignore[assignment]
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)

    def step(self, ids: list[int]) -> None:
        self.optimizer.zero_grad()
        self.table(torch.tensor(ids)).pow(2).sum().backward()
        self.optimizer.step()

    def save(self) -> dict[str, object]:
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load(self, state: dict[str, object]) -> None:
        self.model.load_state_dict(state["model"])  # type: ignore[arg-type]
        self.optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]


def test_resume_sends_what_differs(server: ServerProcess) -> None:
    """A run that resumes from a drained checkpoint sends the rows that the store has newer, and no other."""
    first = Trainer("a")
    with RawEmbeddingStreamer(server.address, run="a") as streamer:
        streamer.attach(first.model, first.optimizer)
        first.step([1, 2, 3, 69_999])
        streamer.flush()
        checkpoint, state = first.save(), json.loads(json.dumps(streamer.state_dict()))
        assert len(json.dumps(state)) < 400
        assert state["is_drained"]
        old_epoch = streamer.epoch
        first.step([3, 4])
    second = Trainer("a")
    second.load(checkpoint)
    with RawEmbeddingStreamer(server.address, run="a") as streamer:
        streamer.attach(second.model, second.optimizer)
        assert streamer.epoch > old_epoch
        assert not streamer.audit().is_equal
        assert streamer.load_state_dict(state) == 2
        report = streamer.audit()
        assert report.is_equal, str(report)
        assert report.num_rows == 5
        second.step([5])
        assert streamer.stats().step == state["step"] + 1


def test_resume_of_an_undrained_checkpoint_sends_what_is_absent(server: ServerProcess) -> None:
    """A checkpoint that was made before all was acked leads to whole tables in the store."""
    trainer = Trainer("b")
    with RawEmbeddingStreamer(server.address, run="b") as streamer:
        streamer.attach(trainer.model, trainer.optimizer)
        trainer.step([1, 2, 3])
        streamer.flush()
        state = {**streamer.state_dict(), "is_drained": False}
    with RawEmbeddingStreamer(server.address, run="b") as streamer:
        streamer.attach(trainer.model, trainer.optimizer)
        assert streamer.load_state_dict(state) == 70_000 - 3
        assert streamer.audit(only_present=False).is_equal


def test_resume_of_an_older_state_says_why_it_sends_so_much(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """A drained state that does not say which rows it is of: rows that the store lacks go, and one line says so."""
    trainer = Trainer("older")
    with RawEmbeddingStreamer(server.address, run="older") as streamer:
        streamer.attach(trainer.model, trainer.optimizer)
        trainer.step([1, 2, 3])
        streamer.flush()
        state = streamer.state_dict()
    older = {name: value for name, value in state.items() if name not in ("world_size", "tables", "layout")}
    with RawEmbeddingStreamer(server.address, run="older") as streamer:
        streamer.attach(trainer.model, trainer.optimizer)
        assert streamer.load_state_dict(state) == 0
        assert "sending rows that the store lacks" not in caplog.text
        assert streamer.load_state_dict(older) == 70_000 - 3
    told = [
        record.getMessage() for record in caplog.records if "sending rows that the store lacks" in record.getMessage()
    ]
    assert len(told) == 1
    assert "older.weight: the state is of an older version" in told[0]


def test_resume_with_more_tables_sends_those_whole(server: ServerProcess) -> None:
    """Of a table that was not streamed when a drained checkpoint was made, all rows go; of the others what differs."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"old": nn.Embedding(50, 4, sparse=True), "new": nn.Embedding(60, 4, sparse=True)})
    root = nn.ModuleDict({"more": model})
    optimizer = torch.optim.SGD(root.parameters(), lr=0.1)
    with RawEmbeddingStreamer(server.address, run="more") as streamer:
        streamer.attach(root, optimizer, tables=["more.old.*"])
        (model["old"](torch.tensor([1, 2])) + model["new"](torch.tensor([3, 4]))).sum().backward()
        optimizer.step()
        streamer.flush()
        state = streamer.state_dict()
        assert state["is_drained"]
    for expected in (60, 0):  # the second time the server knows the table, and has rows of it
        with RawEmbeddingStreamer(server.address, run="more") as streamer:
            streamer.attach(root, optimizer)
            assert streamer.load_state_dict(state) == expected
            rows = {table.fqn: table.num_rows for table in streamer.audit().tables}
            assert rows == {"more.old.weight": 2, "more.new.weight": 60}


def test_resume_onto_another_store_sends_every_row(server: ServerProcess) -> None:
    """A store that is not the checkpoint's gets every row."""
    trainer = Trainer("c")
    with RawEmbeddingStreamer(server.address, run="c") as streamer:
        with pytest.raises(ConfigError, match="attach the model"):
            streamer.load_state_dict(streamer.state_dict())
        streamer.attach(trainer.model, trainer.optimizer)
        with pytest.raises(ConfigError, match="run 'other'"):
            streamer.load_state_dict({**streamer.state_dict(), "run": "other"})
        with pytest.raises(ConfigError, match="version 7"):
            streamer.load_state_dict({**streamer.state_dict(), "version": 7})
        with pytest.raises(ConfigError, match=f"step {2**70} after"):
            streamer.load_state_dict({**streamer.state_dict(), "step": 2**70})
        with pytest.raises(ConfigError, match="lacks 'epoch'"):
            streamer.load_state_dict({"version": 1, "run": "c"})
        assert streamer.load_state_dict({**streamer.state_dict(), "server_ids": ["x", "y"]}) == 70_000
        assert streamer.audit(only_present=False).is_equal


def test_fetch_and_eviction_hooks(server: ServerProcess) -> None:
    """Rows are fetched as they are, in any order; hooks see them before they are evicted."""
    trainer = Trainer("d")
    with RawEmbeddingStreamer(server.address, run="d") as streamer:
        streamer.attach(trainer.model, trainer.optimizer)
        trainer.step([7, 8])
        rows = streamer.fetch("d.weight", torch.tensor([[8, 69_999], [8, 7]], dtype=torch.int32))
        ids = torch.tensor([8, 69_999, 8, 7])
        assert torch.equal(rows.row_ids, ids)
        assert torch.equal(rows.weights, trainer.table.weight[ids])
        assert torch.equal(rows.states["sum"], trainer.optimizer.state[trainer.table.weight]["sum"][ids])
        assert rows.columns == ((0, 5),)
        with pytest.raises(RowRangeError, match="row 70000"):
            streamer.fetch("d.weight", torch.tensor([1, 70_000]))
        with pytest.raises(UnknownTableError, match=r"the nearest is 'd\.weight'"):
            streamer.fetch("d.wait", torch.tensor([1]))
        seen: list[tuple[str, list[int], float]] = []
        handle = streamer.register_pre_eviction_hook(
            lambda fqn, ids: seen.append((fqn, ids.tolist(), float(streamer.fetch(fqn, ids).weights[0, 0])))
        )
        streamer.notify_eviction("d.weight", torch.tensor([7], dtype=torch.int32))
        streamer.notify_eviction("d.weight", torch.tensor([], dtype=torch.int64))
        handle.remove()
        streamer.notify_eviction("d.weight", torch.tensor([8]))
        assert seen == [("d.weight", [7], float(trainer.table.weight.detach()[7, 0]))]


def test_what_no_hook_has_seen_is_not_drained(server: ServerProcess) -> None:
    """A write by hand after the flush makes the checkpoint one of what the store lacks; a resumed run sends it."""
    trainer = Trainer("f")
    with RawEmbeddingStreamer(server.address, run="f") as streamer:
        streamer.attach(trainer.model, trainer.optimizer)
        trainer.step([1, 2, 3])
        streamer.flush()
        assert streamer.state_dict()["is_drained"]
        with torch.no_grad():
            trainer.table.weight.clamp_(-0.1, 0.1)
        checkpoint, state = trainer.save(), streamer.state_dict()
        assert not state["is_drained"]
        streamer.close(flush=False)
    resumed = Trainer("f")
    resumed.load(checkpoint)
    with RawEmbeddingStreamer(server.address, run="f") as streamer:
        streamer.attach(resumed.model, resumed.optimizer)
        assert streamer.load_state_dict(state) == 70_000
        assert streamer.audit(only_present=False).is_equal


@pytest.mark.parametrize("loads_first", [True, False])
def test_evicted_rows_stay_deleted_wherever_the_model_was_loaded(server: ServerProcess, loads_first: bool) -> None:
    """Model and optimizer may be loaded before `attach` or after it: evicted rows do not come back."""
    name = f"g{loads_first:d}"
    first = Trainer(name)
    with RawEmbeddingStreamer(server.address, run=name) as streamer:
        streamer.attach(first.model, first.optimizer)
        first.step(list(range(20)))
        streamer.evict(f"{name}.weight", range(10))
        streamer.flush()
        checkpoint, state = first.save(), streamer.state_dict()
    second = Trainer(name)
    with RawEmbeddingStreamer(server.address, run=name) as streamer:
        if loads_first:
            second.load(checkpoint)
        streamer.attach(second.model, second.optimizer)
        if not loads_first:
            second.load(checkpoint)
        streamer.load_state_dict(state)
        streamer.flush()
        presence = read_rows(server.address, f"{name}.weight", range(20)).presence
        assert presence.tolist() == [int(idl.RowPresence.DELETED)] * 10 + [int(idl.RowPresence.PRESENT)] * 10
        assert streamer.audit().is_equal
