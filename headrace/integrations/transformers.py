"""Stream what Transformers' `Trainer` trains. Needs the packages `transformers` and `accelerate`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Unpack, cast

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from headrace.integrations.training_loop import LoopOptions, LoopStreaming
from headrace.schemas.errors import ConfigError

__all__ = ["streaming"]

_KEY = "headrace"  # ON DISK: in `stateful_callbacks` of trainer_state.json


@contextlib.contextmanager
def streaming(
    trainer: Trainer, address: str | None = None, *, run: str, **options: Unpack[LoopOptions]
) -> Iterator[LoopStreaming]:
    """Stream a trainer's model in a `with` block; when `train` ends everything is durable.

        with streaming(trainer, "127.0.0.1:7601", run="ctr-v7"):
            trainer.train()

    The trainer's checkpoints have the streamer's state: with `train(resume_from_checkpoint=...)` only rows that differ
    are sent. After an exception, rows that were not sent yet go out when `train` runs again.

    A block, and no bare callback, since a trainer tells callbacks of no exception and does not give them the wrapped
    model.

    Args:
        trainer: Gets a callback, last of all, until the block ends.
        address: `host:port` of any shard, or of several with commas; None takes the environment's `HEADRACE_SERVER`.
        run: Name of the training job.
        **options: See `LoopStreaming`.

    Yields:
        What streams; its `streamer` is there while `train` runs.

    Raises:
        HeadraceError: In `train`: the streamer cannot start, or not everything is durable in time.
    """
    loop = LoopStreaming(address, run=run, **options)
    callback = _Callback(trainer, loop)
    trainer.add_callback(callback)
    try:
        yield loop
    except BaseException as exc:
        loop.stop(exc)
        raise
    finally:
        trainer.remove_callback(callback)
    loop.stop()


class _Callback(TrainerCallback):
    def __init__(self, trainer: Trainer, loop: LoopStreaming) -> None:
        self._trainer, self._loop = trainer, loop

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        if state.is_hyper_param_search:
            raise ConfigError("trials of a hyperparameter search are not streamed: search outside of the block")
        optimizer = self._trainer.optimizer
        assert optimizer is not None
        saved = _stored(state).get(_KEY, {})
        resumed = saved["state"] if saved.get("global_step") == state.global_step else {}
        # Not `others["model"]`: on several ranks the wrapper keeps their tables equal.
        self._loop.start(self._trainer.model_wrapped, optimizer, state=resumed if state.global_step else None)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        self._keep_state(state, control.should_save)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self._keep_state(state, control.should_save)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        # Only after this call the trainer knows whether this is the best model.
        self._keep_state(state, control.should_save or args.save_strategy == SaveStrategy.BEST)

    def _keep_state(self, state: TrainerState, is_saved: bool) -> None:
        """Put the state where the next checkpoint has it. A later step's checkpoint must not take it for its own."""
        if is_saved and self._loop.streamer is not None:
            _stored(state)[_KEY] = {"global_step": state.global_step, "state": self._loop.state_dict()}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self._loop.stop()


def _stored(state: TrainerState) -> dict[str, Any]:
    """Return the states of callbacks that a checkpoint has; a list only until the state is made."""
    return cast("dict[str, Any]", state.stateful_callbacks)
