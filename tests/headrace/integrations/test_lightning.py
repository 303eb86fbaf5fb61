"""Lightning's own trainer, streamed by the callback to a real server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
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
    stored_rows,
    trained_rows,
)
from ranks import run_ranks

from headrace.paramserver.shard.launch import ServerProcess

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy

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
    assert callback.state_dict() == {"ranks": []}
    tower.fails_at = -1
    lightning_trainer(tmp_path, [callback]).fit(module, loader())
    assert_stored(server.address, "failing:tower.user.weight", tower.rows)


class MovingStrategy(SingleDeviceStrategy):
    """Gives the parameters new storage when `fit` ends, as the move from a GPU to the CPU does."""

    def teardown(self) -> None:
        for parameter in self.model.parameters():
            parameter.data = parameter.data.clone()
        super().teardown()


def test_the_end_of_fit_sends_no_rows_that_were_not_trained(server: ServerProcess, tmp_path: Path) -> None:
    """The streamer is closed before the module moves to the CPU, which changes every row to a streamer."""
    tower = Tower()
    callback = StreamingCallback(server.address, run="moved", model="moved", publish="updated")
    lightning_trainer(tmp_path, [callback], strategy=MovingStrategy()).fit(lightning_module(tower), loader())
    ids, weights = stored_rows(server.address, "moved:tower.user.weight")
    assert np.array_equal(ids, trained_rows())
    assert np.array_equal(weights, tower.rows[ids])


def test_averages_are_streamed_that_another_callback_copies(server: ServerProcess, tmp_path: Path) -> None:
    """A callback that is listed later copies averages into the model when training ends; the store gets them."""
    tower, address = Tower(), server.address
    callbacks = [StreamingCallback(address, run="averaged", model="averaged"), EMAWeightAveraging(decay=0.5)]
    lightning_trainer(tmp_path, callbacks).fit(lightning_module(tower), loader())
    assert_stored(address, "averaged:tower.user.weight", tower.rows)


def test_ranks_of_fit_stream_together(server: ServerProcess, tmp_path: Path) -> None:
    """Two ranks under DDP stream each row, and the checkpoint has the states of both."""
    (rows, states), _ = run_ranks(fit_on_rank, 2, server.address, str(tmp_path))
    assert_stored(server.address, "lightning-ranks:tower.user.weight", rows)
    assert [state["client"] for state in states] == ["rank0", "rank1"]
