"""A loop that uses Accelerate itself, streamed to a real server."""

from __future__ import annotations

from pathlib import Path

import pytest
from framework_loops import (
    Tower,
    accelerate_on_rank,
    assert_stored,
    loader,
    num_rows_written,
    optimizer_of,
    train_by_accelerate,
)
from ranks import run_ranks

from headrace.integrations.training_loop import LoopStreaming
from headrace.paramserver.shard.launch import ServerProcess

pytest.importorskip("accelerate")

from accelerate import Accelerator

pytestmark = pytest.mark.filterwarnings("ignore")  # the framework's, which are raised in torch's name


def test_a_saved_state_resumes(server: ServerProcess, tmp_path: Path) -> None:
    """After the block the store has every row; from a state that was loaded before, only rows that differ are sent."""
    tower, accelerator = Tower(), Accelerator(cpu=True)
    model, optimizer, batches = accelerator.prepare(tower, optimizer_of(tower), loader())
    streaming = LoopStreaming(server.address, run="resumed", model="resumed")
    accelerator.register_for_checkpointing(streaming)
    with streaming.attached(model, optimizer):
        train_by_accelerate(accelerator, model, optimizer, batches)
        accelerator.save_state(str(tmp_path))
    assert_stored(server.address, "resumed:user.weight", tower.rows)
    before = num_rows_written(server.address)

    again, accelerator = Tower(), Accelerator(cpu=True)
    model, optimizer, batches = accelerator.prepare(again, optimizer_of(again), loader())
    streaming = LoopStreaming(server.address, run="resumed", model="resumed")
    accelerator.register_for_checkpointing(streaming)
    accelerator.load_state(str(tmp_path))
    with streaming.attached(model, optimizer) as streamer:
        streamer.flush()
        assert num_rows_written(server.address) == before
        train_by_accelerate(accelerator, model, optimizer, batches)
    assert num_rows_written(server.address) > before
    assert_stored(server.address, "resumed:user.weight", again.rows)


def test_ranks_of_a_loop_stream_together(server: ServerProcess, tmp_path: Path) -> None:
    """Two ranks under DDP stream each row, and the saved state has both."""
    (rows, states), _ = run_ranks(accelerate_on_rank, 2, server.address, str(tmp_path))
    assert_stored(server.address, "accelerate-ranks:user.weight", rows)
    assert [state["client"] for state in states] == ["rank0", "rank1"]
