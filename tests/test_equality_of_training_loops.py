"""Training loops of many kinds stream each change once, and pauses delay it; with a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from streamed_training import attached
from torch import nn
from watched_server import wait_until

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.shard.launch import ServerProcess
from headrace.streamer import RawEmbeddingStreamer


class Loop:
    """A training loop over two tables, and the number of rows that it should have streamed."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(1)
        self.users = nn.EmbeddingBag(60, 4, mode="sum", sparse=True)
        self.films = nn.EmbeddingBag(40, 4, mode="sum", sparse=True)
        self.dense = nn.Linear(8, 1)
        self.core = Towers(self)
        self.model = nn.ModuleDict({name: self.core})
        self.optimizer = torch.optim.Adagrad([self.users.weight, self.films.weight], lr=0.1)
        self.num_rows = 0

    def backward(self, *ids: int) -> None:
        self.core(torch.tensor([ids])).backward()

    def step(self, *ids: int) -> None:
        """Train on the given ids, and on the gradients so far."""
        if ids:
            self.backward(*ids)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Towers(nn.Module):
    """The loop's model."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.users, self.films, self.dense = loop.users, loop.films, loop.dense

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.dense(torch.cat([self.users(ids), self.films(ids % 40)], dim=1))
        return output.pow(2).sum()


def rows_written(server: ServerProcess) -> int:
    """Return how many rows all shards have taken since the server's start."""

    async def ask() -> int:
        async with await EmbeddingReader.connect(server.address) as reader:
            return sum(shard.num_rows_written for shard in await reader.status())

    return asyncio.run(ask())


def test_rows_that_change_in_a_pause_go_out_after_it(server: ServerProcess) -> None:
    """During a pause steps are counted and nothing is sent; after it everything that changed is."""
    loop = Loop("paused")
    with attached(server.address, loop, run="paused") as streamer:
        loop.step(1, 2)
        streamer.flush()
        before = rows_written(server)
        streamer.pause()
        assert streamer.is_paused
        for turn in range(5):
            loop.step(2, 10 + turn)
        assert streamer.stats().step == 6
        assert streamer.stats().num_dirty_rows == 2 * 6
        assert rows_written(server) == before
        streamer.resume()
        loop.step(3)
        streamer.flush()
        assert rows_written(server) == before + 2 * 7
        assert streamer.audit().is_equal


def test_a_share_sends_fewer_rows(server: ServerProcess) -> None:
    """Rows wait, which the streamer tells, and a flush makes the store equal; a checkpoint before it is not drained.

    A run that goes on from that compares its rows, and sends those that had waited.
    """
    at_once = {"freshness_s": 0, "max_cost_percent": 100}
    for share in (None, 0.2):
        loop, run = Loop(f"share-{share}".replace(".", "_")), f"share-{share}"
        streamer = RawEmbeddingStreamer(server.address, run=run, **at_once)
        streamer.attach(loop.model, loop.optimizer, publish="all", send_share=share)
        streamer.flush()
        before = streamer.stats().num_rows_sent
        for step in range(10):
            loop.step(*range(step, step + 20))
            wait_until(lambda streamer=streamer: not streamer.stats().num_inflight_flushes, "durable flushes")
        stats, state = streamer.stats(), streamer.state_dict()
        assert bool(stats.num_waiting_rows) == ("waiting for at most 60 s" in repr(streamer)) == (share is not None)
        assert (stats.acked_step < stats.step) == (not state["is_drained"]) == (share is not None)
        assert (stats.num_rows_sent - before == 2 * 10 * 20) == (share is None)
        streamer.close(flush=False)
    with RawEmbeddingStreamer(server.address, run=run) as streamer:
        streamer.attach(loop.model, loop.optimizer, send_share=0.2)
        assert streamer.load_state_dict(state) > 10
        streamer.flush()
        assert streamer.audit(only_present=False).is_equal


def plain(loop: Loop) -> None:
    loop.step(1, 1, 2)
    loop.num_rows += 4


def evaluation(loop: Loop) -> None:
    loop.model.eval()
    loop.core(torch.tensor([[5, 6]]))
    loop.model.train()
    plain(loop)


def without_gradients(loop: Loop) -> None:
    with torch.no_grad():
        loop.core(torch.tensor([[7]]))
    with torch.inference_mode():
        loop.core(torch.tensor([[8]]))
    plain(loop)


def accumulation(loop: Loop) -> None:
    loop.backward(1, 2)
    loop.step(2, 3)
    loop.num_rows += 6


def scaler_that_skips(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf")):
        scaler.scale(loop.core(torch.tensor([[1, 2]])) * factor).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
    loop.num_rows += 4


def compiled_dense_part(loop: Loop) -> None:
    loop.dense.compile(backend="eager")
    plain(loop)


def compiled_model(loop: Loop) -> None:
    torch.compile(loop.core, backend="eager")(torch.tensor([[1, 1, 2]])).backward()
    loop.step()
    loop.num_rows += 4


def compiled_optimizer(loop: Loop) -> None:
    loop.backward(1, 1, 2)
    torch.compile(loop.optimizer.step, backend="eager")()
    loop.optimizer.zero_grad()
    loop.num_rows += 4


MODES = [plain, evaluation, without_gradients, accumulation, scaler_that_skips]
MODES += [compiled_dense_part, compiled_model, compiled_optimizer]


@pytest.mark.parametrize("mode", MODES)
def test_what_a_training_loop_does_streams_each_change_once(
    server: ServerProcess, mode: Callable[[Loop], None]
) -> None:
    """Each kind of training loop sends each row that it changes once, and the store equals the tables."""
    loop = Loop(mode.__name__)
    with attached(server.address, loop, run=mode.__name__) as streamer:
        before = rows_written(server)
        for _ in range(3):
            mode(loop)
            streamer.flush()
        assert rows_written(server) - before == loop.num_rows
        report = streamer.audit()
    assert report.is_equal and sum(table.num_rows for table in report.tables) > 0
