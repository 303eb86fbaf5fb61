"""The delivery of changed rows from the tables to the shards, and how a trainer's ranks begin together."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from headrace.paramserver.rpc.address import Address, format_address
from headrace.paramserver.system.text import first_of, format_seconds, format_size
from headrace.schemas.errors import (
    ConfigError,
    FencedError,
    HeadraceError,
    ReshardedError,
    StorageError,
    UnavailableError,
)
from headrace.schemas.tables import TableSpec
from headrace.streamer.config import StreamerConfig
from headrace.streamer.delivery.first_rows import FirstRows
from headrace.streamer.delivery.rendezvous import Store, Writer
from headrace.streamer.delivery.sender import DroppedRows, Sender, Switch
from headrace.streamer.flush.flusher import Flusher
from headrace.streamer.flush.pace import FlushPace
from headrace.streamer.flush.staging import StagingPool
from headrace.streamer.stats import StreamerStats
from headrace.streamer.taps.dense_tensors import DenseTensors
from headrace.streamer.taps.tapped_table import TappedTable
from headrace.streamer.world import World, together

__all__ = ["Delivery", "begin_run"]

_log = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Agreed:
    epoch: int
    server_ids: tuple[str, ...]
    model: str = ""
    error: str | None = None


class Delivery:
    """A flusher on the training thread, a sender on its own, and the staging buffers between them.

    Thread: the training thread's, except `stats`.

    Attributes:
        store: The shards, as they were found at the start, or at the last switch to another server.
        writer: This rank and its epoch.
        flusher: Takes dirty rows from the tables.
        sender: Delivers flushes.
        failure: The error that has ended streaming, once a call has met it.
    """

    def __init__(self, seeds: Sequence[Address], *, run: str, world: World, config: StreamerConfig) -> None:
        """Find every shard, from addresses of any of them, and take an epoch; all ranks call this together.

        Raises:
            HeadraceError: As from `begin_run`; no thread is left.
        """
        self._config, self._world = config, world
        self._num_losses = 0  # known to the flusher
        # One thread uses it, so nobody waits for it; unlike a flag, an interrupt cannot leave it set.
        self._flushing = threading.Lock()
        self.failure: HeadraceError | None = None
        # By table of an attach that has failed after shards may have heard of it: the first row to send, and why.
        self._half_made: dict[str, tuple[int, str]] = {}
        self._held: list[tuple[list[TableSpec], FirstRows]] = []  # what attaches have not registered yet
        self._is_alone_now = False  # another rank has ended, too
        pool = StagingPool(config.staging_bytes)
        self.sender = sender = Sender(config=config, pool=pool)
        sender.start()
        try:
            self.store, self.writer = begin_run(self.sender, seeds, run=run, world=world, config=config)
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
            world=world,
            writer=f"run {self.writer.run!r} in epoch {self.writer.epoch}",
            pace=FlushPace.of(
                config,
                is_alone=world.size == 1,
                delivery_s=self.sender.delivery_s,
                background_s=lambda: sender.cpu_s,  # not of `self`, whose finalizer would wait for the collector
            ),
        )
        # Runs at exit, or when the last reference to the streamer is gone; its hooks hold one while the model lives.
        # It must not hold the flusher, whose tables hold the model.
        self._finalizer = weakref.finalize(
            self, _abandon, self.writer.run, self.sender, weakref.ref(self.flusher), os.getpid()
        )

    def find_store(self) -> Store:
        """Return the shards with their present tables; raise `UnavailableError` if one cannot be reached."""
        return self.sender.present_store()

    @property
    def address(self) -> str:
        """Addresses of shards, with commas: those that were given, or those of the server that was switched to."""
        return ",".join(format_address(*seed) for seed in self.sender.seeds)

    @property
    def addresses(self) -> str:
        """Where the shards are by now, and `address`, with commas: a shard that was promoted may be elsewhere."""
        return ",".join(dict.fromkeys(format_address(*each) for each in (*self.sender.whereabouts, *self.sender.seeds)))

    def switch(self, reason: ReshardedError) -> None:
        """Go on at another server, as a reader was told to."""
        self.sender.switch(reason)
        self._take_losses()

    def add_tables(
        self,
        tables: list[TappedTable],
        dense: DenseTensors | None,
        *,
        first_rows: FirstRows,
        world: World,
        compare: Callable[[frozenset[str]], bool],
    ) -> frozenset[str]:
        """Register tables and dense tensors on all shards, and deliver them from now on; a call of a world's ranks.

        Dense tensors that `first_rows` replace are dropped before. The tables that they fill are delivered whole, and
        returned. Nothing is registered or dropped before every shard has said for every rank that it would accept that,
        and `compare`, which gets these tables, has not raised. If it returns False, nothing is registered yet, unless
        something is replaced: the caller must not step or flush before `register_held`. Once something is registered,
        older starts of the run are fenced. `compare` is then called again: until then they may have written.

        An error on one rank, or of `compare`, is raised on all and adds nothing. If the shards may wait for rows by
        then, the next step or flush ends streaming unless the tables were added after all: its mark would say that the
        shards have the rows.
        """
        together(world, partial(self._check_fit, tables, dense), "cannot attach")
        # Each spec once: a rank may have several column shards of a table. Dense tensors of other ranks too, so that a
        # shard knows all of them whichever rank comes first.
        known = [*tables, *(() if dense is None else dense.all)]
        specs = list({each.spec.fqn: each.spec for each in known}.values())
        together(world, partial(self.sender.check, specs, first_rows), "cannot attach")
        awaited = {**dict.fromkeys(first_rows.filled, 0), **first_rows.grown}  # the first row to send, by table
        for name in self._half_made.keys() & first_rows.names:
            first_row, _ = self._half_made[name]
            awaited[name] = min(first_row, awaited.get(name, first_row))
        filled = frozenset(name for name, first_row in awaited.items() if not first_row)
        is_held, is_registered = not compare(filled) and not first_rows.replaced, False
        try:
            if first_rows.replaced:
                together(world, partial(self._drop_dense, first_rows.replaced, world), "cannot attach")
            if is_held:
                self._held.append((specs, first_rows))
            else:
                together(world, partial(self.sender.register, specs, first_rows), "cannot attach")
            is_registered = True
            if first_rows.writers and not is_held:
                compare(filled)
            self._deliver(tables, dense, world)
        except BaseException as exc:
            # Shard 0 goes first, and what it refuses has changed nothing; unless another rank was not refused.
            is_refused = isinstance(exc, HeadraceError) and not exc.retriable and not is_registered
            if not is_refused or self.writer.world_size > 1:
                why = str(exc) or type(exc).__name__
                self._half_made |= {name: (first_row, why) for name, first_row in awaited.items()}
            raise
        for name in awaited:
            self._half_made.pop(name, None)
        for table in tables:
            if table.spec.fqn in filled:
                table.mark_all()
            elif table.spec.fqn in awaited:
                table.mark_from(awaited[table.spec.fqn])
        return filled

    def register_held(self) -> None:
        """Register what attaches have held back, if anything, for this rank alone.

        Raises as `Rendezvous.open_session`; what is not registered then stays held.
        """
        while self._held:
            self.sender.register(*self._held[0])
            self._held.pop(0)

    def _check_fit(self, tables: list[TappedTable], dense: DenseTensors | None) -> None:
        self.flusher.check_tables(tables, max_frame_bytes=self.store.max_frame_bytes)
        if dense is not None:
            self.flusher.check_dense(dense, max_frame_bytes=self.store.max_frame_bytes)

    def _drop_dense(self, names: Iterable[str], world: World) -> None:
        if world.rank == 0:
            self.sender.drop_dense(names)

    def _deliver(self, tables: list[TappedTable], dense: DenseTensors | None, world: World) -> None:
        try:
            together(world, partial(self.flusher.add_tables, tables), "cannot attach")
        except Exception as exc:
            if world.size > 1:  # other ranks deliver theirs by now
                self.failure = HeadraceError(f"streaming has ended: an attach has failed: {exc}")
            raise
        if dense is not None:
            self.flusher.add_dense(dense)

    def _check_made(self) -> None:
        """End streaming, and say so, if a shard may wait for all rows of a table whose attach has failed."""
        if self._half_made:
            names, (_, why) = first_of(sorted(self._half_made)), next(iter(self._half_made.values()))
            self.failure = HeadraceError(f"streaming has ended: an attach could not make {names}: {why}")
            raise self.failure

    def on_step(self, step: int, *, is_paused: bool) -> None:
        """Hand over what is dirty at the end of a step, as far as there is room; nothing if `is_paused`.

        With `on_error="raise"`, raise the error that has ended streaming or failed this flush.
        """
        if self.failure is not None and self._config.on_error == "log":
            self._pass_step(step)
            return
        try:
            self.raise_failure()
            self._check_made()
            self._check_alone()
            with self._flushing:
                self._take_losses()
                if is_paused:
                    self.flusher.pass_step(step)
                else:
                    self.flusher.on_step(step)
        except HeadraceError as exc:
            exc = self.sender.error or exc
            if self._config.on_error == "raise":
                raise exc
            self.failure = exc
            _log.error("streaming has stopped, training goes on: %s", exc)

    def flush(self, step: int, timeout_s: float) -> None:
        """Hand over everything up to a step that has ended; return when it is durable on every shard.

        Rows that are not handed over within `timeout_s` stay dirty.

        Raises:
            UnavailableError: Not all is durable in time.
            ConfigError: Another flush is under way.
            HeadraceError: Streaming has ended.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            self._check_made()
            self._check_alone()
            with self._flushing:
                is_repeated = False
                while True:
                    self._take_losses()
                    self.flusher.flush_all(step, deadline_s - time.monotonic(), is_repeated=is_repeated)
                    is_repeated = True
                    self.sender.wait_durable(deadline_s - time.monotonic())
                    if self._num_losses == len(self.sender.losses):
                        return
        except UnavailableError as exc:
            self.raise_failure()
            raise UnavailableError(f"flush within {format_seconds(timeout_s)}: {exc}") from exc
        except HeadraceError:
            self.raise_failure()
            raise

    def end_run(self, timeout_s: float) -> None:
        """Say that this rank writes no more; nothing if the run goes on in a newer epoch. REQUIRES: all is durable.

        Raises:
            UnavailableError: Not all shards have answered within `timeout_s`, in seconds.
            HeadraceError: Streaming has ended.
        """
        with suppress(FencedError):
            self.sender.end_run(timeout_s)

    @property
    def is_half_made(self) -> bool:
        """Whether a shard may wait for all rows of a table whose attach has failed."""
        return bool(self._half_made)

    def end_recorded(self, step: int, timeout_s: float) -> None:
        """Hand over everything up to a step that has ended, with a mark that there is a recording of it.

        If a dense parameter is a DTensor, all ranks call it, and do it or not as all of them can.

        Raises:
            UnavailableError: A shard is away, another rank cannot do it, or not all is handed over in time.
            ConfigError: Another flush is under way.
            HeadraceError: Streaming has ended.
        """
        error: HeadraceError | None = None
        try:
            self._check_recordable()
        except HeadraceError as exc:
            error = exc
        if self.flusher.dense.is_sharded and self._world.size > 1:
            self._world.meet(
                f"record() at step {step} of run {self.writer.run!r}, epoch {self.writer.epoch}", timeout_s
            )
            is_able = [of_rank == [True] for of_rank in self._world.exchange([error is None])]
            if error is None and not all(is_able):
                error = UnavailableError(f"rank {is_able.index(False)} cannot record it")
        if error is not None:
            raise error
        with self._flushing:
            self._take_losses()
            self.flusher.flush_all(step, timeout_s, is_recorded=True)

    def _check_recordable(self) -> None:
        self.raise_failure()
        self._check_made()
        self._check_alone()
        if self.sender.stats().num_connected < len(self.store.shards):
            raise UnavailableError("a shard is away")

    def settle(self) -> None:
        """Wait until no flush is on its way from a device; raise `UnavailableError` after `flush_timeout_s`.

        Rows of flushes that were dropped are marked again. Not during a flush, as in a signal handler.
        """
        self.flusher.settle(self._config.flush_timeout_s)
        if not self._flushing.locked():
            self._take_losses()

    @property
    def accounts_for_all(self) -> bool:
        """Whether each row that the store may lack is dirty or on its way.

        Not during a flush, as in a signal handler, nor before the next flush has marked what a shard has lost.
        """
        return not self._flushing.locked() and self._num_losses == len(self.sender.losses)

    def raise_failure(self) -> None:
        """Raise the error that has ended streaming; with `on_error="log"`, also an outage under `block`, or a NaN."""
        self.failure = self.failure or self.sender.error
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def stats(self, step: int) -> StreamerStats:
        """Return what was done and what is on its way. Thread: any."""
        flusher = self.flusher
        return self.sender.stats(
            step=step,
            num_dirty_rows=flusher.num_dirty_rows,
            num_waiting_rows=flusher.num_waiting_rows,
            dense_step=flusher.dense_step,
            dense_bytes=flusher.dense.size_bytes,
            cost_percent=flusher.pace.cost_percent,
            is_cost_bound=flusher.pace.is_cost_bound,
            failure=self.failure,
        )

    def stop(self, *, is_child: bool, is_replaced: bool = False) -> None:
        """End the sender's thread, which a forked child lacks, and log what stays undelivered. Idempotent.

        What stays is no loss if another streamer of the run has replaced this one (`is_replaced`).
        """
        if self._finalizer.detach() is not None and not is_child:
            if self.failure is None and not is_replaced:
                _log_undelivered(f"the streamer of run {self.writer.run!r} was closed", self.sender, self.flusher)
            self.sender.stop(_STOP_TIMEOUT_S)

    def _pass_step(self, step: int) -> None:
        """End a step after streaming has ended: other ranks hear that this one publishes nothing, until one is gone."""
        if not self._is_alone_now:
            try:
                self.flusher.pass_step(step)
            except HeadraceError as exc:
                self._is_alone_now = True
                _log.error("%s", exc)

    def _check_alone(self) -> None:
        """Refuse to begin within another flush, whose rows are neither dirty nor on their way and would be missed."""
        if self._flushing.locked():
            raise ConfigError(
                "a flush of this streamer is under way, and this call came during it, as from a signal handler: set a "
                "flag there, and flush or close between two steps"
            )

    def _take_losses(self) -> None:
        """Mark what must be sent again, and make later flushes for the server that has come in place of another.

        Raises:
            UnavailableError: A flush for the server before is not done with in time; the next call goes on.
        """
        while new := self.sender.losses[self._num_losses :]:
            match new[0]:
                case Switch(store):
                    self.flusher.change_shards(len(store.shards), num_losses=self._num_losses + 1)
                    self.store = store
                case DroppedRows(rows):
                    self.flusher.mark_again(rows, num_losses=self._num_losses + 1)
                    rows.clear()  # `losses` keeps them
                case None:
                    self.flusher.mark_all(num_losses=self._num_losses + 1)
                case _:
                    shards = list[int]()
                    for loss in new:  # those that were lost together, with one hash of each row
                        if not isinstance(loss, int):
                            break
                        shards.append(loss)
                    self.flusher.mark_shards(set(shards), num_losses=self._num_losses + len(shards))
                    self._num_losses += len(shards) - 1
            self._num_losses += 1


def _abandon(run: str, sender: Sender, flusher: weakref.ref[Flusher], pid: int) -> None:
    """End the thread of a streamer that was never closed, without delaying the interpreter's exit."""
    if os.getpid() != pid:
        return
    _log_undelivered(f"the streamer of run {run!r} was never closed", sender, flusher())
    sender.stop(1.0)


def _log_undelivered(reason: str, sender: Sender, flusher: Flusher | None) -> None:
    stats = sender.stats()
    left = []
    if flusher is not None and (num_rows := flusher.num_dirty_rows):
        left.append(f"{num_rows} rows that had changed were not sent")
    if flusher is not None and (num_rows := flusher.num_waiting_rows):
        left.append(f"{num_rows} rows that had hardly changed were not sent")
    if stats.num_inflight_flushes:
        size = format_size(stats.inflight_bytes)
        left.append(f"{stats.num_inflight_flushes} flushes ({size}) may not have been delivered")
    if left:
        _log.warning(
            "%s: %s. To go on, load a checkpoint and call load_state_dict, which sends what differs; without one, "
            "headrace.restore brings back the server's rows",
            reason,
            ", ".join(left),
        )


def begin_run(
    sender: Sender, seeds: Sequence[Address], *, run: str, world: World, config: StreamerConfig
) -> tuple[Store, Writer]:
    """Agree with the other ranks on an epoch above all that the store has seen, which fences nobody yet.

    All ranks call this together, each with a started sender and addresses of any shards.

    Raises:
        UnavailableError: A shard cannot be reached, here or by rank 0.
        StorageError: This rank finds another store than rank 0.
        HeadraceError: A shard refuses.
    """
    asks = Writer(run=run, client=f"rank{world.rank}", epoch=0, rank=world.rank, world_size=world.size)
    if world.rank == 0:
        return _lead(sender, seeds, asks, world, config)
    agreed: _Agreed = world.share(None)
    if agreed.error is not None:
        raise UnavailableError(f"rank 0 could not begin to stream: {agreed.error}")
    store, writer = sender.find_store(seeds, asks), asks.with_epoch(agreed.epoch).with_model(agreed.model)
    if tuple(shard.server_id for shard in store.shards) != agreed.server_ids:
        raise StorageError(f"rank {world.rank} finds another store at {format_address(*seeds[0])} than rank 0")
    sender.open(store, writer)
    return store, writer


def _lead(
    sender: Sender, seeds: Sequence[Address], asks: Writer, world: World, config: StreamerConfig
) -> tuple[Store, Writer]:
    """Acquire epoch and model, as rank 0, and share them with the other ranks, or the failure they would wait for."""
    try:
        store = sender.find_store(seeds, asks)
        model = store.model_of(asks.run) if config.model is None else config.model
        writer = sender.acquire_epoch(store, asks).with_model(model)
        sender.open(store, writer)
    except BaseException as exc:
        world.share(_Agreed(0, (), error=str(exc) or type(exc).__name__))
        raise
    world.share(_Agreed(writer.epoch, tuple(shard.server_id for shard in store.shards), model))
    return store, writer
