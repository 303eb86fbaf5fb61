"""A loop that starts, fails, begins again, saves and ends, without any framework."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
from fake_shard import FakeStore, hosted
from framework_loops import Tower, assert_stored, loader, num_rows_written, optimizer_of
from streamed_training import sender_threads
from torch import nn

from headrace.integrations import training_loop
from headrace.integrations.training_loop import LoopStreaming
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, FencedError, UnavailableError
from headrace.streamer.api import RawEmbeddingStreamer
from headrace.streamer.world import SoloWorld


class Cell:
    """What a notebook runs again and again: the loop over one model."""

    def __init__(self) -> None:
        self.tower = Tower()
        self.optimizer = optimizer_of(self.tower)

    def train(self) -> None:
        for batch in loader():
            self.optimizer.zero_grad()
            self.tower(**batch)["loss"].backward()
            self.optimizer.step()


def test_a_second_loop_sends_what_differs(server: ServerProcess) -> None:
    """The first loop sends every row; a second one of the same model rows that differ from the store's."""
    cell, streaming = Cell(), LoopStreaming(server.address, run="second", model="second")
    with streaming.attached(cell.tower, cell.optimizer):
        cell.train()
    assert streaming.streamer is None and not sender_threads()
    before = num_rows_written(server.address)
    with streaming.attached(cell.tower, cell.optimizer):
        pass
    assert num_rows_written(server.address) == before
    cell.train()
    with streaming.attached(cell.tower, cell.optimizer):
        pass
    assert 0 < num_rows_written(server.address) - before < cell.tower.user.num_embeddings
    assert_stored(server.address, "second:user.weight", cell.tower.rows)


def test_layers_that_are_unfrozen_are_attached(server: ServerProcess) -> None:
    """A table that the loop unfreezes and gives to its optimizer is taken in, with the loop's options."""
    cell, streaming = Cell(), LoopStreaming(server.address, run="thawed", model="thawed", dense=True)
    table = next(each for each in cell.tower.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag))
    table.requires_grad_(False)
    trained = [each for each in cell.tower.parameters() if each.requires_grad]
    cell.optimizer = torch.optim.SGD(trained, lr=0.1)
    streaming.attach_new(cell.tower, cell.optimizer)  # between loops
    with streaming.attached(cell.tower, cell.optimizer) as streamer:
        streaming.attach_new(cell.tower, cell.optimizer)
        before = {each.path for each in streamer.tables}
        table.requires_grad_(True)
        cell.optimizer.add_param_group({"params": [table.weight]})
        streaming.attach_new(cell.tower, cell.optimizer)
        cell.train()
        assert len({each.path for each in streamer.tables} - before) == 1
        assert streamer.audit().is_equal


@pytest.mark.parametrize("is_same_cell", [True, False])
def test_a_loop_that_failed_sends_every_row_again(
    server: ServerProcess, caplog: pytest.LogCaptureFixture, is_same_cell: bool
) -> None:
    """An exception leaves no states that a checkpoint could have, and the next loop over the model sends every row."""
    name = f"failed-{is_same_cell}"
    cell, streaming = Cell(), LoopStreaming(server.address, run=name, model=name, publish="updated")
    with streaming.attached(cell.tower, cell.optimizer):
        cell.train()
    assert streaming.state_dict()
    cell.tower.fails_at = cell.tower.num_forwards + 3
    with pytest.raises(RuntimeError, match="this batch is bad"), streaming.attached(cell.tower, cell.optimizer):
        cell.train()
    assert streaming.streamer is None and not sender_threads()
    assert streaming.state_dict() == {"ranks": []}
    before = num_rows_written(server.address)
    if not is_same_cell:
        streaming = LoopStreaming(server.address, run=name, model=name, publish="updated")
    with caplog.at_level(logging.WARNING), streaming.attached(cell.tower, cell.optimizer) as streamer:
        streamer.step()
    assert "its rows stay as they are" not in caplog.text
    assert num_rows_written(server.address) == before + cell.tower.user.num_embeddings
    assert_stored(server.address, f"{name}:user.weight", cell.tower.rows)


@pytest.mark.parametrize("is_same_model", [True, False])
def test_a_loop_begins_again_without_an_end(server: ServerProcess, is_same_model: bool) -> None:
    """A loop that was cut off without a word is replaced, and every row is sent, of a new model too."""
    name = f"cut-{is_same_model}"
    cell, streaming = Cell(), LoopStreaming(server.address, run=name, model=name)
    streaming.start(cell.tower, cell.optimizer)
    first = streaming.streamer
    cell.train()
    if not is_same_model:
        cell = Cell()
    streaming.start(cell.tower, cell.optimizer)
    assert first is not None and "closed" in repr(first)
    streaming.stop()
    assert not sender_threads()
    assert_stored(server.address, f"{name}:user.weight", cell.tower.rows)


def test_a_checkpoint_does_not_wait_for_a_server_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    """While nothing is acked, a checkpoint warns and says so in its state; the end of the loop raises."""
    cell = Cell()
    with hosted(FakeStore(num_shards=2)) as store:
        streaming = LoopStreaming(store.address, run="away", flush_timeout_s=0.05)
        streaming.start(cell.tower, cell.optimizer)
        store.do(store.shards[0].gate.clear)
        cell.train()
        with caplog.at_level(logging.WARNING):
            (state,) = streaming.state_dict()["ranks"]
        assert "the checkpoint is ahead of the store" in caplog.text
        assert not state["is_drained"]
        with pytest.raises(UnavailableError):
            streaming.stop()
        assert streaming.streamer is None and streaming.state_dict() == {"ranks": []}


def test_a_loop_that_could_not_flush_at_its_end_sends_every_row_again() -> None:
    """What a server that is away misses at the end of one loop, it gets at the start of the next."""
    cell = Cell()
    with hosted(FakeStore()) as store:
        streaming = LoopStreaming(store.address, run="late", publish="updated", flush_timeout_s=0.05)
        streaming.start(cell.tower, cell.optimizer)
        store.do(store.shards[0].gate.clear)
        cell.train()
        with pytest.raises(UnavailableError):
            streaming.stop()
        store.do(store.shards[0].gate.set)
        streaming.start(cell.tower, cell.optimizer)
        assert streaming.streamer is not None
        streaming.streamer.flush(timeout_s=60)
        assert streaming.streamer.stats().num_rows_sent == cell.tower.user.num_embeddings
        streaming.stop()


def test_a_start_that_failed_keeps_the_state(server: ServerProcess) -> None:
    """If the first try to resume reaches no server, the second one has the state still."""
    cell, name = Cell(), "kept"
    streaming = LoopStreaming("127.0.0.1:1", run=name, model=name, connect_timeout_s=0.05)
    with LoopStreaming(server.address, run=name, model=name).attached(cell.tower, cell.optimizer) as streamer:
        cell.train()
        streamer.flush()
        streaming.load_state_dict({"ranks": [streamer.state_dict()]})
    with pytest.raises(UnavailableError):
        streaming.start(cell.tower, cell.optimizer)
    assert [state["run"] for state in streaming.state_dict()["ranks"]] == [name]


def fence(server: ServerProcess, run: str) -> None:
    """Start a run once more, with a model of another table."""
    table = nn.Embedding(1, 1)
    with contextlib.closing(RawEmbeddingStreamer(server.address, run=run, model=run)) as streamer:
        streamer.attach(table, torch.optim.SGD(table.parameters(), lr=0.1), publish="updated")
        streamer.close(flush=False)


def test_a_fenced_loop_trains_on_and_saves_no_state(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    """With `on_error="log"` neither a checkpoint nor the end raises, one warning says why, and all rows go out next."""
    cell, name = Cell(), "fenced"
    streaming = LoopStreaming(server.address, run=name, model=name, publish="updated", on_error="log")
    streaming.start(cell.tower, cell.optimizer)
    fence(server, name)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            cell.train()
            assert streaming.state_dict() == {"ranks": []}
        streaming.stop()
    assert caplog.text.count("training goes on without a state of the streamer") == 1
    assert not sender_threads()
    with streaming.attached(cell.tower, cell.optimizer):
        pass
    assert_stored(server.address, f"{name}:user.weight", cell.tower.rows)


def test_a_fenced_loop_fails_by_default(server: ServerProcess) -> None:
    """A checkpoint raises what ended streaming."""
    cell = Cell()
    streaming = LoopStreaming(server.address, run="fenced-too", model="fenced-too")
    streaming.start(cell.tower, cell.optimizer)
    fence(server, "fenced-too")
    with pytest.raises(FencedError):
        streaming.state_dict()
    with pytest.raises(FencedError):
        streaming.stop()


class OtherRankFails(SoloWorld):
    """Two ranks, of which the other one's call raises."""

    def gather(self, value: Any) -> list[Any]:
        return [value, training_loop.together.__globals__["_Failure"]("fenced")]


def test_no_rank_saves_a_state_if_one_cannot(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `on_error="log"` a rank on which all is well has no states either, and ends without an error."""
    cell = Cell()
    streaming = LoopStreaming(server.address, run="other", model="other", on_error="log")
    streaming.start(cell.tower, cell.optimizer)
    monkeypatch.setattr(training_loop, "current_world", OtherRankFails)
    assert streaming.state_dict() == {"ranks": []}
    streaming.stop()
    assert streaming.state_dict() == {"ranks": []}


def test_foreign_states_are_refused(server: ServerProcess) -> None:
    """What a streamer or anything else has saved is no state of a loop, and the message says what to load."""
    cell, streaming = Cell(), LoopStreaming(server.address, run="foreign", model="foreign")
    with streaming.attached(cell.tower, cell.optimizer) as streamer:
        for state in (streamer.state_dict(), {"step": 3}):
            with pytest.raises(ConfigError, match=r"load what LoopStreaming.state_dict returned"):
                streaming.load_state_dict(state)
    with pytest.raises(ConfigError, match="no state of a loop"):
        streaming.start(cell.tower, cell.optimizer, state={"step": 3})


def test_the_first_loop_publishes_as_attach_does(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default rows of unknown tables go out whole and changed rows of others; the variable names the server."""
    monkeypatch.setenv("HEADRACE_SERVER", server.address)
    cell = Cell()
    with LoopStreaming(run="first", model="first").attached(cell.tower, cell.optimizer):
        pass
    assert_stored(server.address, "first:user.weight", cell.tower.rows)
    before = num_rows_written(server.address)
    with LoopStreaming(run="first", model="first").attached(cell.tower, cell.optimizer):
        pass
    assert num_rows_written(server.address) == before
    checkpoint: dict[str, Any] = {}
    streaming = LoopStreaming(run="first", model="first")
    streaming.load_state_dict(checkpoint)
    with streaming.attached(cell.tower, cell.optimizer):
        pass
    assert num_rows_written(server.address) == before + cell.tower.user.num_embeddings
