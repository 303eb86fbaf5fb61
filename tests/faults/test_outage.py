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
from streamed_bags import StreamedBags
from waiting import WAIT_S, wait_until

from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import UnavailableError

# Ten minutes of a trainer that makes one step a second; here they follow one another as fast as they can.
NUM_STEPS = 600
ROWS, DIM = 2000, 8
STAGING_BYTES = 1 << 18
MAX_GROWTH_BYTES = 4 << 20


def _bags(address: str, **settings: Any) -> StreamedBags:
    settings |= {"staging_bytes": STAGING_BYTES, "retry_min_s": 0.01, "retry_max_s": 0.1}
    return StreamedBags(address, ("left", "right"), num_rows=ROWS, dim=DIM, **settings)


def _restart(server: ServerProcess, path: Path) -> ServerProcess:
    port = int(server.address.rpartition(":")[2])
    server.close()
    return ServerProcess.start(path, port=port)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A directory; meanwhile torch takes one thread, as tables this small need."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(num_threads)


@pytest.mark.timeout(300)
def test_ten_minutes_of_steps_without_a_server(path: Path) -> None:
    """Training goes on, memory stays flat, rows stay dirty, and all arrives afterwards."""
    server = ServerProcess.start(path / "data", port=hold_ports())
    trainer = _bags(server.address, policy="coalesce")
    streamer = trainer.streamer

    def is_backed_up() -> bool:
        """Whether all that can wait does, however far the thread that sends is behind the steps; after one more."""
        trainer.train()
        stats = streamer.stats()
        return stats.num_connected == 0 and stats.num_dirty_rows > ROWS

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
        assert stats.inflight_bytes <= 2 * STAGING_BYTES
        assert max(after, peak) - before < MAX_GROWTH_BYTES
        server = _restart(server, path / "data")
        trainer.flush_and_check()
    finally:
        streamer.close(flush=False)
        server.close()


@pytest.mark.timeout(300)
def test_the_policy_block_waits_and_then_says_why(path: Path) -> None:
    """Under `block` a step waits and then fails, naming the shard; rows stay dirty, and all arrives afterwards."""
    server = ServerProcess.start(path / "data", port=hold_ports())
    trainer = _bags(server.address, policy="block", block_timeout_s=WAIT_S)
    streamer = trainer.streamer
    try:
        trainer.train(20)
        streamer.flush(WAIT_S)
        server.kill()
        trainer.train()
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
        trainer.flush_and_check()
    finally:
        streamer.close(flush=False)
        server.close()
