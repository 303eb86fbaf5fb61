"""Without a server for long: training goes on or waits as its policy says, memory is bounded, and all arrives later."""

from __future__ import annotations

import dataclasses
import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from held_ports import hold_ports
from torch import nn
from watched_server import WAIT_S, wait_until

from headrace import RawEmbeddingStreamer
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import UnavailableError
from headrace.streamer.compare import compare_with_store

# Ten minutes of a trainer that makes one step a second; here they follow one another as fast as they can.
NUM_STEPS = 600
ROWS, DIM, BATCH = 2000, 8, 16
STAGING_BYTES = 1 << 18
MAX_GROWTH_BYTES = 4 << 20


class _Trainer:
    """A model of two tables, streamed."""

    def __init__(self, address: str, **settings: Any) -> None:
        torch.manual_seed(3)
        self._generator = torch.Generator().manual_seed(4)
        self.model = nn.ModuleDict(
            {name: nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True) for name in ("left", "right")}
        )
        self._optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        # Every step that finds a free buffer flushes: on a busy machine flushes are slow, and would be held back.
        settings |= {
            "freshness_s": 0,
            "max_cost_percent": 100,
            "staging_bytes": STAGING_BYTES,
            "retry_min_s": 0.01,
            "retry_max_s": 0.1,
        }
        settings |= {"connect_timeout_s": WAIT_S}
        self.streamer = RawEmbeddingStreamer(address, run="outage", **settings)
        self.streamer.attach(self.model, self._optimizer, publish="all")

    def step(self) -> None:
        ids = torch.randint(0, ROWS, (BATCH, 3), generator=self._generator)
        self._optimizer.zero_grad()
        sum(table(ids).pow(2).mean() for table in self.model.values()).backward()  # type: ignore[union-attr]
        self._optimizer.step()

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()


def _restart(server: ServerProcess, path: Path) -> ServerProcess:
    port = int(server.address.rpartition(":")[2])
    server.close()
    return ServerProcess.start(path, port=port)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A directory with a spool; meanwhile torch takes one thread, as tables this small need."""
    (tmp_path / "spool").mkdir()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(num_threads)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", ["coalesce", "spool"])
def test_ten_minutes_of_steps_without_a_server(path: Path, policy: str) -> None:
    """Training goes on, memory stays flat, rows stay dirty or lie in the bounded spool, and all arrives afterwards."""
    spool_bytes = 1 << 20
    server = ServerProcess.start(path / "data", port=hold_ports())
    trainer = _Trainer(server.address, policy=policy, spool_dir=path / "spool", spool_bytes=spool_bytes)
    streamer = trainer.streamer

    def is_backed_up() -> bool:
        """Whether all that can wait does, however far the thread that sends is behind the steps; after one more."""
        trainer.step()
        stats = streamer.stats()
        is_spooled = stats.spooled_bytes > spool_bytes // 2
        return stats.num_connected == 0 and stats.num_dirty_rows > ROWS and is_spooled == (policy == "spool")

    try:
        trainer.train(20)
        streamer.flush(WAIT_S)
        server.kill()
        trainer.train(NUM_STEPS // 2)
        wait_until(is_backed_up)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        trainer.train(NUM_STEPS // 2)
        gc.collect()
        after, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        wait_until(is_backed_up)
        stats = streamer.stats()
        assert stats.step >= NUM_STEPS
        assert stats.inflight_bytes <= 2 * STAGING_BYTES + spool_bytes * (policy == "spool")
        assert max(after, peak) - before < MAX_GROWTH_BYTES
        server = _restart(server, path / "data")
        streamer.flush(WAIT_S)
        assert streamer.stats().spooled_bytes == 0
        comparison = compare_with_store(streamer.tables, server.address)
        assert comparison.is_equal, str(comparison)
        assert comparison.num_compared == 2 * ROWS
    finally:
        streamer.close(flush=False)
        server.close()


@pytest.mark.timeout(300)
def test_the_policy_block_waits_and_then_says_why(path: Path) -> None:
    """Under `block` a step waits and then fails, naming the shard; rows stay dirty, and all arrives afterwards."""
    server = ServerProcess.start(path / "data", port=hold_ports())
    trainer = _Trainer(server.address, policy="block", block_timeout_s=WAIT_S)
    streamer = trainer.streamer
    try:
        trainer.train(20)
        streamer.flush(WAIT_S)
        server.kill()
        trainer.step()
        delivery = streamer._delivery
        wait_until(lambda: "has not acked" in delivery.sender.describe_delay())
        # Only now: the server that was there might have been slower.
        hasty = dataclasses.replace(delivery.flusher._config, block_timeout_s=0.3)
        says = r"has waited 0\.3 s for a staging buffer: shard 0 .* has not acked"
        with pytest.MonkeyPatch.context() as patch, pytest.raises(UnavailableError, match=says):
            patch.setattr(delivery.flusher, "_config", hasty)
            trainer.train(NUM_STEPS)
        stats = streamer.stats()
        assert stats.num_dirty_rows > 0
        assert stats.inflight_bytes <= 2 * STAGING_BYTES
        server = _restart(server, path / "data")
        trainer.train(20)  # waits for the server's return, and goes on
        streamer.flush(WAIT_S)
        comparison = compare_with_store(streamer.tables, server.address)
        assert comparison.is_equal, str(comparison)
    finally:
        streamer.close(flush=False)
        server.close()
