"""A loop that starts, fails, begins again, saves and ends, without any framework."""

from __future__ import annotations

import logging

import pytest
from fake_shard import FakeStore, hosted
from framework_loops import Tower, assert_stored, loader, num_rows_written, optimizer_of
from streamed_training import sender_threads

from headrace.integrations.training_loop import LoopStreaming
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import UnavailableError


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


def test_a_loop_that_failed_sends_every_row_again(server: ServerProcess) -> None:
    """An exception leaves no state that a checkpoint could have, and the next loop sends every row."""
    cell, streaming = Cell(), LoopStreaming(server.address, run="failed", model="failed")
    with streaming.attached(cell.tower, cell.optimizer):
        cell.train()
    assert streaming.state_dict()
    cell.tower.fails_at = cell.tower.num_forwards + 3
    with pytest.raises(RuntimeError, match="this batch is bad"), streaming.attached(cell.tower, cell.optimizer):
        cell.train()
    assert streaming.streamer is None and not sender_threads()
    assert streaming.state_dict() == {}
    before = num_rows_written(server.address)
    with streaming.attached(cell.tower, cell.optimizer):
        pass
    assert num_rows_written(server.address) == before + cell.tower.user.num_embeddings
    assert_stored(server.address, "failed:user.weight", cell.tower.rows)


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
        cell.train()
        store.do(store.shards[0].gate.clear)
        with caplog.at_level(logging.WARNING):
            (state,) = streaming.state_dict()["ranks"]
        assert "the checkpoint is ahead of the store" in caplog.text
        assert not state["is_drained"]
        with pytest.raises(UnavailableError):
            streaming.stop()
        assert streaming.streamer is None and streaming.state_dict() == {}
