"""Writes recordings of a model, off the training thread, and keeps the newest ones."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from headrace.kernels.plain_context import users_context, without_autocast
from headrace.kernels.recordings import Recording, RecordingName, flatten
from headrace.paramserver.system.object_store import ObjectStore
from headrace.paramserver.system.text import format_size
from headrace.schemas.errors import ConfigError, HeadraceError

__all__ = ["Recorder", "answer_of"]

_log = logging.getLogger(__name__)
# Recordings that wait for the one that is being written, and the size of each.
_MAX_WAITING, _MAX_BYTES = 2, 256 << 20
_CLOSE_TIMEOUT_S = 10.0


def answer_of(model: Any, inputs: Any) -> Any:
    """Return what a model answers to inputs, without gradients and autocast, in the caller's other modes.

    A module answers in eval mode, and is then as before.
    """
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    eval_mode = _in_eval_mode(model) if isinstance(model, nn.Module) else contextlib.nullcontext()
    with users_context(), without_autocast(), torch.no_grad(), eval_mode:
        return model(*arguments)


@contextlib.contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


class Recorder:
    """Says when a recording is due, and writes it.

    Its queue has room for two recordings. One more is dropped and counted: training never waits for the folder.

    Thread: the training thread's; any may read the counts.

    Attributes:
        num_written: Recordings that are in the folder, or were.
        num_dropped: Recordings that were due and are not.
    """

    def __init__(
        self,
        place: str,
        *,
        run: str,
        model: str,
        epoch: int,
        every_steps: int,
        max_kept: int,
        writes: bool = True,
        store: ObjectStore | None = None,
    ) -> None:
        """Begin with one due; without `writes`, another rank writes them. `store` stands for that at `place`.

        Raises:
            ConfigError: The place is no folder or URL, or something is not installed.
        """
        self._store = ObjectStore.at(place) if store is None else store
        self._run, self._model, self._epoch = run, model, epoch
        self._every_steps, self._max_kept, self._writes = every_steps, max_kept, writes
        self._next_step = 0
        self._waiting: queue.Queue[Recording | None] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self.num_written = self.num_dropped = 0

    def is_due(self, step: int) -> bool:
        """Return whether the step is to be recorded."""
        return step >= self._next_step

    def take(self, step: int, inputs: Any, outputs: Any) -> Recording:
        """Return a recording of a step that is due: copies of the inputs, and of the outputs or a function's of them.

        Raises:
            ConfigError: Something in there cannot be recorded, or it is too large.
        """
        self._next_step = step + self._every_steps
        given = flatten(inputs, "inputs")  # before the model sees them
        answer = answer_of(outputs, inputs) if callable(outputs) else outputs
        recording = Recording(
            run=self._run,
            model=self._model,
            epoch=self._epoch,
            step=step,
            time_us=time.time_ns() // 1000,
            inputs=given,
            outputs=flatten(answer, "outputs"),
        )
        if recording.size_bytes > _MAX_BYTES:
            size, limit = format_size(recording.size_bytes), format_size(_MAX_BYTES)
            raise ConfigError(f"record: inputs and outputs take {size}, more than {limit}: give fewer examples")
        return recording

    def write(self, recording: Recording) -> bool:
        """Have a recording written in the background; return whether there was room for it."""
        if not self._writes:
            return True
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="headrace-recorder", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(recording)
        except queue.Full:
            self.drop(recording.step, "earlier recordings are being written")
            return False
        return True

    def drop(self, step: int, why: object) -> None:
        """Count a recording that is not made, and log why."""
        self.num_dropped += 1
        _log.warning("step %d is not recorded: %s", step, why)

    def close(self) -> None:
        """Write what waits, for some seconds, and end the thread. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=_CLOSE_TIMEOUT_S)
            thread.join(_CLOSE_TIMEOUT_S)
        self._store.close()  # what is being repeated fails now
        if thread is not None:
            thread.join(1.0)

    def _write_all(self) -> None:
        while (recording := self._waiting.get()) is not None:
            try:
                self._store.put(str(recording.name), recording.encode())
                self.num_written += 1
                self._remove_old(recording.name.model)
            except Exception as exc:  # the next one may be of other types, or have room
                self.drop(recording.step, exc if isinstance(exc, HeadraceError) else f"{type(exc).__name__}: {exc}")

    def _remove_old(self, model: str) -> None:
        found = [RecordingName.parse(each.path) for each in self._store.list("")]
        ours = sorted((name.epoch, name.step) for name in found if name is not None and name.model == model)
        for epoch, step in ours[: -self._max_kept]:
            self._store.delete(str(RecordingName(model, epoch, step)))
