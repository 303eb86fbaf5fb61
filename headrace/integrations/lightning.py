"""A callback that streams what Lightning's `Trainer.fit` trains. Needs the package `lightning`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from lightning.pytorch import Callback, LightningModule, Trainer

from headrace.integrations.training_loop import LoopOptions, LoopStreaming
from headrace.streamer.api import RawEmbeddingStreamer

__all__ = ["StreamingCallback"]


class StreamingCallback(Callback):
    """Streams a module while `Trainer.fit` trains it.

        trainer = lightning.Trainer(callbacks=[StreamingCallback("127.0.0.1:7601", run="ctr-v7")])

    The trainer's checkpoints have its state: with `fit(ckpt_path=...)` only rows that differ are sent. When training
    ends everything is durable, also averages that other callbacks copy into the model then; not what the module's own
    `on_train_end` writes. After an exception or Ctrl-C, rows that were not sent yet go out when `fit` runs again.
    """

    def __init__(self, address: str | None = None, *, run: str, **options: Unpack[LoopOptions]) -> None:
        """Take what `fit` will use; see `LoopStreaming`."""
        self._loop = LoopStreaming(address, run=run, **options)

    @property
    def streamer(self) -> RawEmbeddingStreamer | None:
        """The streamer during `fit`, from the start of training on; None otherwise."""
        return self._loop.streamer

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach: the optimizers are made, and a checkpoint is loaded. Become the last of the callbacks."""
        holder: Any = trainer  # whose class does not declare its callbacks
        # A new list: the trainer goes through the old one.
        holder.callbacks = [*(each for each in holder.callbacks if each is not self), self]
        # Not `pl_module`: on several ranks the strategy's model is the wrapper that keeps their tables equal.
        model = trainer.strategy.model
        assert model is not None
        self._loop.start(model, trainer.optimizers)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach tables that callbacks before this one have unfrozen, as `BaseFinetuning` does."""
        model = trainer.strategy.model
        assert model is not None
        self._loop.attach_new(model, trainer.optimizers)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Flush and close. Not when `fit` ends: the module is on the CPU by then, which is a write to every row."""
        self._loop.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close without a flush."""
        self._loop.stop(exception)

    def state_dict(self) -> dict[str, Any]:
        """Flush, and return the state of all ranks; see `LoopStreaming.state_dict`."""
        return self._loop.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep a checkpoint's state for the start of training."""
        self._loop.load_state_dict(state_dict)
