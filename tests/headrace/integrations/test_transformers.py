"""Transformers' own trainer, streamed to a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from framework_loops import Tower, assert_stored, num_rows_written, trainer_on_rank, transformers_trainer
from ranks import run_ranks

from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from headrace.integrations.transformers import streaming

pytestmark = pytest.mark.filterwarnings("ignore")  # the framework's, which are raised in torch's name


def test_a_checkpoint_of_train_resumes(server: ServerProcess, tmp_path: Path) -> None:
    """After `train` the store has every row; from its checkpoint, only rows that differ are sent."""
    tower = Tower()
    trainer = transformers_trainer(tower, tmp_path, save_strategy="epoch")
    with streaming(trainer, server.address, run="resumed", model="resumed") as loop:
        trainer.train()
        assert loop.streamer is None
    assert_stored(server.address, "resumed:user.weight", tower.rows)
    before = num_rows_written(server.address)
    for num_epochs in (2, 3):
        again = Tower()
        trainer = transformers_trainer(again, tmp_path, num_train_epochs=num_epochs)
        with streaming(trainer, server.address, run="resumed", model="resumed"):
            trainer.train(resume_from_checkpoint=True)
        assert_stored(server.address, "resumed:user.weight", again.rows)
        assert (num_rows_written(server.address) > before) == (num_epochs == 3)


@pytest.mark.parametrize("strategy", ["steps", "epoch", "best"])
def test_each_checkpoint_has_the_state_of_its_step(server: ServerProcess, tmp_path: Path, strategy: str) -> None:
    """Whenever the trainer saves, the streamer's state is there and is of that step."""
    settings: dict[str, Any] = {"save_strategy": strategy, "save_steps": 3}
    if strategy == "best":
        settings |= {"eval_strategy": "steps", "eval_steps": 5, "metric_for_best_model": "loss"}
    tower = Tower()
    trainer = transformers_trainer(tower, tmp_path, **settings)
    with streaming(trainer, server.address, run=strategy, model=strategy):
        trainer.train()
    saved = [json.loads(path.read_text()) for path in tmp_path.glob("checkpoint-*/trainer_state.json")]
    assert len(saved) >= 2
    for state in saved:
        kept = state["stateful_callbacks"]["headrace"]
        (rank,) = kept["state"]["ranks"]
        assert kept["global_step"] == state["global_step"] == rank["acked_step"]


def test_a_checkpoint_without_a_state_of_its_own_resends_every_row(server: ServerProcess, tmp_path: Path) -> None:
    """A callback that saves unforeseen leaves an older step's state in the checkpoint, which is not used."""
    tower = Tower()
    trainer = transformers_trainer(tower, tmp_path, save_strategy="epoch")
    with streaming(trainer, server.address, run="stale", model="stale"):
        trainer.train()
    path = tmp_path / f"checkpoint-{trainer.state.global_step}" / "trainer_state.json"
    state = json.loads(path.read_text())
    state["stateful_callbacks"]["headrace"]["global_step"] -= 1
    path.write_text(json.dumps(state))
    before = num_rows_written(server.address)
    trainer = transformers_trainer(Tower(), tmp_path)
    with streaming(trainer, server.address, run="stale", model="stale"):
        trainer.train(resume_from_checkpoint=True)
    assert num_rows_written(server.address) == before + tower.user.num_embeddings


def test_train_runs_again_after_an_exception(server: ServerProcess, tmp_path: Path) -> None:
    """A failing batch closes the streamer and takes the callback away; the same cell once more streams every row."""
    tower = Tower()
    trainer = transformers_trainer(tower, tmp_path)
    num_callbacks = len(trainer.callback_handler.callbacks)

    def cell() -> None:
        with streaming(trainer, server.address, run="failing", model="failing"):
            trainer.train()

    tower.fails_at = 3
    with pytest.raises(RuntimeError, match="this batch is bad"):
        cell()
    assert len(trainer.callback_handler.callbacks) == num_callbacks
    tower.fails_at = -1
    cell()
    assert_stored(server.address, "failing:user.weight", tower.rows)


def test_a_hyperparameter_search_is_refused(server: ServerProcess, tmp_path: Path) -> None:
    """Trials are of many models under one name: the first one raises."""
    trainer = transformers_trainer(Tower(), tmp_path)
    with (
        streaming(trainer, server.address, run="search", model="search"),
        pytest.raises(ConfigError, match="search outside of the block"),
    ):
        trainer.state.is_hyper_param_search = True
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)


def test_ranks_of_a_trainer_stream_together(server: ServerProcess, tmp_path: Path) -> None:
    """Two ranks under DDP stream each row, and the checkpoint has the states of both."""
    (rows, states), _ = run_ranks(trainer_on_rank, 2, server.address, str(tmp_path))
    assert_stored(server.address, "transformers-ranks:user.weight", rows)
    assert [state["client"] for state in states] == ["rank0", "rank1"]
