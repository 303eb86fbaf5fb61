"""Stream from a training loop of any framework: a streamer that lives as long as the loop, and has a state."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Unpack, cast

import torch
from torch import nn

from headrace.schemas.errors import ConfigError, HeadraceError, UnavailableError
from headrace.streamer.api import RawEmbeddingStreamer
from headrace.streamer.config import StreamerConfig, StreamerSettings
from headrace.streamer.delivery.first_rows import Publish
from headrace.streamer.taps.guards.tapped_modules import Left, leave
from headrace.streamer.taps.optimizer_rules import Dirty
from headrace.streamer.world import current_world, together

__all__ = ["LoopOptions", "LoopStreaming"]

_log = logging.getLogger(__name__)
_OF_ATTACH = ("publish", "tables", "dense", "dense_states", "dirty", "names")


class LoopOptions(StreamerSettings, total=False):
    """Options of every integration: those of `attach`, and settings of the streamer."""

    publish: Publish
    tables: Iterable[str] | None
    dense: bool | Iterable[str]
    dense_states: bool
    dirty: Dirty | None
    names: Mapping[str, str] | None
    config: StreamerConfig | None


class LoopStreaming:
    """Streams the model of a training loop from its start to its end, and again when the loop runs again.

    With Accelerate:

        streaming = LoopStreaming("127.0.0.1:7601", run="ctr-v7")
        accelerator.register_for_checkpointing(streaming)
        ...  # accelerator.prepare, and load_state to resume
        with streaming.attached(model, optimizer):
            ...  # the loop as it was, with save_state; after unfreezing layers streaming.attach_new(model, optimizer)

    All ranks make every call together. Thread: the training thread's.

    Attributes:
        streamer: Of the loop that runs; None between loops.
    """

    def __init__(self, address: str | None = None, *, run: str, **options: Unpack[LoopOptions]) -> None:
        """Take what `start` will use, and connect to nothing yet.

        Args:
            address: `host:port` of any shard, or of several with commas; None takes the environment's
                `HEADRACE_SERVER`.
            run: Name of the training job.
            **options: `publish`, `tables`, `dense`, `dense_states`, `dirty` and `names` of
                `RawEmbeddingStreamer.attach`; `config`, or settings of the streamer.
        """
        settings = cast("dict[str, Any]", dict(options))
        self._attach = {name: settings.pop(name) for name in _OF_ATTACH if name in settings}
        self._address, self._run, self._settings = address, run, settings
        # What the next loop resumes from. None before the first one. Empty while a loop runs, after one that has failed
        # and from a checkpoint without states: the store may then lack any row.
        self._saved: list[dict[str, Any]] | None = None
        self._has_warned = False
        self.streamer: RawEmbeddingStreamer | None = None

    def start(
        self,
        model: nn.Module,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Attach a new streamer, in place of any other of the model in this process.

        With a state it sends rows that differ from the store's; after a loop that has failed, and from a checkpoint
        without states, every row; else what `publish` says.

        Args:
            model: As the loop trains it: on several ranks the wrapper that keeps their tables equal.
            optimizers: The loop's.
            state: Of a checkpoint; None takes what was loaded, or the state of an earlier loop's end.

        Raises:
            HeadraceError: What the streamer's constructor, `attach` and `load_state_dict` raise. Nothing is streamed.
        """
        before, saved = self.streamer, self._saved if state is None else _states_in(state)
        attach = self._attach
        if saved is not None and (not saved or attach.get("publish") == "all"):
            attach = attach | {"publish": "auto" if saved else "all"}
        streamer = RawEmbeddingStreamer(self._address, run=self._run, **self._settings)
        try:
            streamer.attach(model, optimizers, replace=True, **attach)
            if saved:
                streamer.load_state_dict(saved)
        except BaseException:
            _abandon(streamer)
            raise
        self.streamer, self._saved, self._has_warned = streamer, [], False
        if before is not None:
            _abandon(before)  # the loop began again without an end, with another model

    def attach_new(self, model: nn.Module, optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> None:
        """Attach tables that are trained by now and were not when the loop started, as after layers were unfrozen.

        Does nothing where there are none, and between loops. Arguments and errors are those of `start`; after an error
        the loop's other tables stream on.
        """
        streamer = self.streamer
        if streamer is None:
            return
        try:
            if any(together(current_world(), streamer.new_tables, "cannot look for new tables")):
                streamer.attach(model, optimizers, **self._attach)
        except HeadraceError as exc:
            if streamer.config.on_error != "log":
                raise
            _log.warning("tables that are new are not streamed: %s", exc)

    @contextlib.contextmanager
    def attached(
        self, model: nn.Module, optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
    ) -> Iterator[RawEmbeddingStreamer]:
        """Call `start`, and at the end of a `with` block `stop`: with its exception, if there is one."""
        self.start(model, optimizers)
        assert self.streamer is not None
        try:
            yield self.streamer
        except BaseException as exc:
            self.stop(exc)
            raise
        self.stop()

    def state_dict(self) -> dict[str, Any]:
        """Flush, and return the state of all ranks for a checkpoint; between loops, that of the last one's end.

        If the server is away, training goes on: the state says what was not durable, and a resumed run sends it.

        Returns:
            Plain values: `ranks`, a list by rank, or empty after a failure; nothing at all before the first loop.

        Raises:
            HeadraceError: Streaming has ended, or another rank has failed. With `on_error="log"` a loop warns of that
                once instead, and there are no states.
        """
        states = self._saved if self.streamer is None else self._flushed_states(self.streamer, must_be_durable=False)
        return {} if states is None else {"ranks": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint's `state_dict` when the next loop starts; if one runs, now.

        Best before the loop: to a streamer, loading a model changes every row, and all are sent.

        Raises:
            ConfigError: The state is none of a loop's, or of another run.
            UnavailableError: A shard does not answer.
        """
        states = _states_in(state)
        if self.streamer is None:
            self._saved = states
        elif states:
            self.streamer.load_state_dict(states)

    def stop(self, exception: BaseException | None = None) -> None:
        """Flush, keep the state for the next loop, and close. Does nothing between loops.

        After an exception of the loop it only closes, since rows may be half updated, and keeps no state. Then, and
        after an error of its own, the next streamer of the model sends every row.

        Raises:
            UnavailableError: Not everything is durable in time.
            HeadraceError: Streaming has ended, or another rank has failed. With `on_error="log"` it warns of either
                error instead, unless the loop has done so.
        """
        if self.streamer is None:
            return
        streamer, self.streamer = self.streamer, None
        try:
            if exception is None:
                self._saved = self._flushed_states(streamer, must_be_durable=True)
        finally:
            if self._saved:
                streamer.close()
            else:
                _abandon(streamer)

    def _flushed_states(self, streamer: RawEmbeddingStreamer, *, must_be_durable: bool) -> list[dict[str, Any]]:
        def flushed_state() -> dict[str, Any]:
            try:
                streamer.flush()
            except UnavailableError as exc:
                if must_be_durable:
                    raise
                _log.warning("the checkpoint is ahead of the store: %s", exc)
            return streamer.state_dict()

        try:
            return together(current_world(), flushed_state, "cannot save its state")
        except HeadraceError as exc:  # on all ranks
            if streamer.config.on_error != "log":
                raise
            if not self._has_warned:
                _log.warning("training goes on without a state of the streamer: %s", exc)
            self._has_warned = True
            return []


def _states_in(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the states by rank in a `LoopStreaming.state_dict`, and none of an empty one."""
    if state and "ranks" not in state:
        raise ConfigError(
            f"this is no state of a loop: load what LoopStreaming.state_dict returned, or all ranks' own states as "
            f"{{'ranks': [state, ...]}}; got {state!r:.60}"
        )
    return list(state.get("ranks", ()))


def _abandon(streamer: RawEmbeddingStreamer) -> None:
    """Close a streamer that may not have sent all rows; whichever streamer attaches its modules next sends all."""
    leave(streamer, Left(-1, {}))
    try:
        streamer.close(flush=False)
    except HeadraceError as exc:
        _log.warning("closing the streamer: %s", exc)
