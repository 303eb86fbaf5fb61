"""What carries changed rows from the tables to the shards, and what has ended it when it has ended."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref

from headrace.schemas.durations import format_seconds
from headrace.schemas.errors import ConfigError, HeadraceError, UnavailableError
from headrace.schemas.sizes import format_size
from headrace.schemas.tables import TableSpec
from headrace.streamer.config import StreamerConfig
from headrace.streamer.delivery.sender import Sender
from headrace.streamer.delivery.takeover import connector, take_over
from headrace.streamer.flush.flusher import Flusher
from headrace.streamer.flush.staging import StagingPool
from headrace.streamer.stats import StreamerStats
from headrace.streamer.taps.tapped_table import TappedTable
from headrace.streamer.world import World

__all__ = ["Delivery"]

_log = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 5.0


class Delivery:
    """A flusher on the training thread, a sender on a thread of its own, and the staging buffers between them.

    Thread: the training thread's, but `stats`.

    Attributes:
        store: The shards.
        writer: Who writes, in which epoch.
        flusher: Cuts flushes out of the tables.
        sender: Delivers them.
        failure: What has ended streaming for good, once a call has met it.
    """

    def __init__(self, host: str, port: int, *, run: str, world: World, config: StreamerConfig) -> None:
        """Connect to every shard and take the run over.

        Args:
            host: Of any shard.
            port: Of it.
            run: Name of the run.
            world: All ranks call this together.
            config: The streamer's settings.

        Raises:
            HeadraceError: As from `take_over`; no thread is left.
        """
        self._config = config
        self._generation = 0
        # Of one thread, so it is never waited for; unlike a flag, an interrupt cannot leave it behind.
        self._flushing = threading.Lock()
        self.failure: HeadraceError | None = None
        pool = StagingPool(config.staging_bytes)
        self.sender = Sender(config=config, pool=pool, connect=connector(config))
        self.sender.start()
        try:
            self.store, self.writer = take_over(self.sender, host, port, run=run, world=world, config=config)
        except BaseException:
            self.sender.stop(_STOP_TIMEOUT_S)
            raise
        self.flusher = Flusher(
            config=config,
            num_shards=len(self.store.shards),
            pool=pool,
            submit=self.sender.submit,
            describe_delay=self.sender.describe_delay,
            withdraw=self.sender.withdraw,
        )
        # Runs when nobody refers to the streamer any more (its hooks do, as long as the model lives), or at exit.
        # It must not hold the flusher, whose tables hold the model.
        self._finalizer = weakref.finalize(
            self, _abandon, self.writer.run, self.sender, weakref.ref(self.flusher), os.getpid()
        )

    def add_tables(self, tables: list[TappedTable]) -> None:
        """Register tables on all shards, and deliver their rows from now on.

        Raises:
            ConfigError: Or another `HeadraceError`: they cannot be delivered; nothing was added.
        """
        self.flusher.check_tables(tables, max_frame_bytes=self.store.max_frame_bytes)
        self.sender.register(_specs_of(tables))
        self.flusher.add_tables(tables)

    def on_step(self, step: int, *, is_paused: bool) -> None:
        """Hand over what is dirty at the end of a step, as far as there is room.

        Args:
            step: The step that is over.
            is_paused: Hand nothing over.

        Raises:
            HeadraceError: Streaming has ended, or this flush has failed, and `on_error` says so.
        """
        if self.failure is not None and self._config.on_error == "log":
            return
        try:
            self.raise_failure()
            self._check_alone()
            with self._flushing:
                self._heed_new_store()
                if not is_paused:
                    self.flusher.on_step(step)
        except HeadraceError as exc:
            exc = self.sender.error or exc
            if self._config.on_error == "raise":
                raise exc
            self.failure = exc
            _log.error("streaming has stopped, training goes on: %s", exc)

    def flush(self, step: int, timeout_s: float) -> None:
        """Hand everything over and return when it is durable on every shard.

        Args:
            step: The last step that is over.
            timeout_s: How long to wait; what is not handed over by then stays marked.

        Raises:
            UnavailableError: Not all is durable in time.
            ConfigError: It is called amid a flush.
            HeadraceError: Streaming has ended.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            self._check_alone()
            with self._flushing:
                while True:
                    self._heed_new_store()
                    self.flusher.flush_all(step, deadline_s - time.monotonic())
                    self.sender.wait_durable(deadline_s - time.monotonic())
                    if self._generation == self.sender.generation:
                        return
        except UnavailableError as exc:
            self.raise_failure()
            raise UnavailableError(f"flush within {format_seconds(timeout_s)}: {exc}") from exc
        except HeadraceError:
            self.raise_failure()
            raise

    def settle(self) -> None:
        """Wait until no flush is on its way from a device; those that are with the sender are not waited for.

        Raises:
            UnavailableError: The device is not done within `flush_timeout_s`.
        """
        self.flusher.settle(self._config.flush_timeout_s)

    @property
    def accounts_for_all(self) -> bool:
        """Whether each row that the store may lack is marked, or on its way.

        Amid a flush, as in a signal handler, rows are neither; and those that an empty store lacks, which was found in
        the old one's place, are marked with the next flush.
        """
        return not self._flushing.locked() and self._generation == self.sender.generation

    def raise_failure(self) -> None:
        """Raise what has ended streaming.

        An outage under `block`, or a NaN, has not where `on_error` is `raise`: the next step tries again. Under `log`
        it has, because to try again would hold up each step for as long.
        """
        self.failure = self.failure or self.sender.error
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def stats(self, step: int) -> StreamerStats:
        """Return what has been done and what is on its way.

        Thread: any.
        """
        return self.sender.stats(step=step, num_dirty_rows=self.flusher.num_dirty_rows, failure=self.failure)

    def stop(self, *, is_child: bool) -> None:
        """End the sender's thread; what is not durable stays undelivered, and is said once. Idempotent.

        Args:
            is_child: This is a forked child, which has no such thread.
        """
        if self._finalizer.detach() is not None and not is_child:
            if self.failure is None:
                _tell_what_is_left(f"the streamer of run {self.writer.run!r} was closed", self.sender, self.flusher)
            self.sender.stop(_STOP_TIMEOUT_S)

    def _check_alone(self) -> None:
        """Refuse to begin amid a flush, whose rows are neither dirty nor on their way: another would miss them."""
        if self._flushing.locked():
            raise ConfigError(
                "a flush of this streamer is under way, and this call came amid it, as from a signal handler: set a "
                "flag there, and flush or close between two steps"
            )

    def _heed_new_store(self) -> None:
        generation = self.sender.generation
        if generation != self._generation:
            self._generation = generation
            self.flusher.mark_all(generation=generation)


def _specs_of(tables: list[TappedTable]) -> list[TableSpec]:
    """Return each table's spec once: a rank may have several column shards of one table."""
    return list({table.spec.fqn: table.spec for table in tables}.values())


def _abandon(run: str, sender: Sender, flusher: weakref.ref[Flusher], pid: int) -> None:
    """End the thread of a streamer that was never closed; must not hold up the interpreter's exit."""
    if os.getpid() != pid:
        return
    _tell_what_is_left(f"the streamer of run {run!r} was never closed", sender, flusher())
    sender.stop(1.0)


def _tell_what_is_left(what: str, sender: Sender, flusher: Flusher | None) -> None:
    """Log what an end of streaming leaves undelivered, if anything."""
    stats = sender.stats()
    left = []
    if flusher is not None and (num_rows := flusher.num_dirty_rows):
        left.append(f"{num_rows} rows that had changed were not sent")
    if stats.num_inflight_flushes:
        size = format_size(stats.inflight_bytes)
        left.append(f"{stats.num_inflight_flushes} flushes ({size}) may not have been delivered")
    if left:
        _log.warning("%s: %s", what, ", ".join(left))
