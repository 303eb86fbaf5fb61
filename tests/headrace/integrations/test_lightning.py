"""Lightning's own trainer, streamed by the callback to a real server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from framework_loops import (
    Tower,
    assert_stored,
    fit_on_rank,
    lightning_module,
    lightning_trainer,
    loader,
    num_rows_written,
)
from ranks import run_ranks

from headrace.paramserver.shard.launch import ServerProcess

pytest.importorskip("lightning")

from headrace.integrations.lightning import StreamingCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # the framework's, which are raised in torch's name


def test_a_checkpoint_of_fit_resumes(server: ServerProcess, tmp_path: Path) -> None:
    """After `fit` the store has every row; a `fit` from its checkpoint sends rows that differ, and streams on."""
    path, tower = tmp_path / "last.ckpt", Tower()
    callback = StreamingCallback(server.address, run="resumed", model="resumed")
    trainer = lightning_trainer(tmp_path, [callback])
    trainer.fit(lightning_module(tower), loader())
    assert callback.streamer is None
    assert_stored(server.address, "resumed:tower.user.weight", tower.rows)
    trainer.save_checkpoint(path)
    before = num_rows_written(server.address)
    for max_epochs in (2, 3):
        again = Tower()
        callback = StreamingCallback(server.address, run="resumed", model="resumed")
        trainer = lightning_trainer(tmp_path, [callback], max_epochs=max_epochs)
        trainer.fit(lightning_module(again), loader(), ckpt_path=path, weights_only=False)
        assert_stored(server.address, "resumed:tower.user.weight", again.rows)
        assert (num_rows_written(server.address) > before) == (max_epochs == 3)
        assert torch.equal(again.user.weight, tower.user.weight) == (max_epochs == 2)


def test_fit_runs_again_after_an_exception(server: ServerProcess, tmp_path: Path) -> None:
    """A failing batch closes the streamer; the same cell once more streams every row."""
    tower = Tower()
    tower.fails_at = 3
    module = lightning_module(tower)
    callback = StreamingCallback(server.address, run="failing", model="failing")
    with pytest.raises(RuntimeError, match="this batch is bad"):
        lightning_trainer(tmp_path, [callback]).fit(module, loader())
    assert callback.streamer is None
    assert callback.state_dict() == {}
    tower.fails_at = -1
    lightning_trainer(tmp_path, [callback]).fit(module, loader())
    assert_stored(server.address, "failing:tower.user.weight", tower.rows)


def test_ranks_of_fit_stream_together(server: ServerProcess, tmp_path: Path) -> None:
    """Two ranks under DDP stream each row, and the checkpoint has the states of both."""
    (rows, states), _ = run_ranks(fit_on_rank, 2, server.address, str(tmp_path))
    assert_stored(server.address, "lightning-ranks:tower.user.weight", rows)
    assert [state["client"] for state in states] == ["rank0", "rank1"]
