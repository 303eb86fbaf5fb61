"""The sender: a thread with its own event loop, and one channel per shard, that delivers flushes."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.paramserver.rpc.address import Address
from headrace.paramserver.rpc.outages import Backoff
from headrace.paramserver.system.text import first_of, format_seconds, format_size
from headrace.schemas.errors import (
    HeadraceError,
    InvariantError,
    ReshardedError,
    StorageError,
    UnauthorizedError,
    UnavailableError,
)
from headrace.schemas.tables import TableSpec
from headrace.streamer.config import StreamerConfig
from headrace.streamer.delivery.channel import ShardChannel
from headrace.streamer.delivery.first_rows import FirstRows
from headrace.streamer.delivery.outstanding import OutstandingFlush, OutstandingFlushes
from headrace.streamer.delivery.rendezvous import Rendezvous, Store, Writer, connector
from headrace.streamer.flush.layout import Flush, TableFormat
from headrace.streamer.flush.staging import StagingPool
from headrace.streamer.stats import StreamerStats

__all__ = ["DroppedRows", "Loss", "Sender", "Switch"]

_log = logging.getLogger(__name__)
# A process that is paused for less still hears why its server was not found.
_LATE_S = 10.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Switch:
    """A server with another number of shards has taken the place of the one before: flushes go to that one now."""

    store: Store


@dataclass(frozen=True, slots=True)
class DroppedRows:
    """Rows of flushes that were not durable on every shard at a switch: formats of tables and global ids, int64[n]."""

    rows: list[tuple[TableFormat, npt.NDArray[np.int64]]]

    @classmethod
    def of(cls, flushes: Iterable[Flush]) -> Self:
        """Copy the ids out of the flushes' buffers."""
        tables = [table for flush in flushes for table in flush.tables]
        return cls([(table.format, np.frombuffer(table.row_ids.data, "<i8").copy()) for table in tables])


Loss = int | Switch | DroppedRows | None
"""What must be sent again: the rows of a shard that lacks what it had acked; every row (None), after an empty store
replaced the old one; or the rows of dropped flushes. And a switch, after which a mark has to be sent again."""


class Sender:
    """Delivers flushes to all shards from a daemon thread.

    The staging buffers bound what is outstanding.

    When the server tells of a successor with another number of shards, the sender goes on there, with all shards at
    once. What was not durable on every shard by then is dropped, and `losses` has its rows. So are flushes that were
    made for the old number of shards, until the flusher knows the new one.

    Thread: the training thread's, except where a method says otherwise.

    Attributes:
        losses: What must be sent again, in the order in which it was noticed. Thread: any; only appended to.
        seeds: Addresses of shards, one of which is asked for all others. Thread: any.
        cpu_s: Processor time that flushes have taken of our threads, as of the last one that became durable. Thread:
            any.
    """

    def __init__(self, *, config: StreamerConfig, pool: StagingPool) -> None:
        """Prepare; `start` begins. Staging buffers return to `pool`.

        Raises:
            ConfigError: A file for TLS cannot be used, or a library is missing.
        """
        self._config, self._pool = config, pool
        self._connect = connector(config)
        self._random = random.Random(os.urandom(16)).random
        self._rendezvous = Rendezvous(self._connect, timeout_s=config.connect_timeout_s, random=self._random)
        self._channels: list[ShardChannel] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._channel_tasks: list[asyncio.Task[None]] = []
        self._switching: asyncio.Task[None] | None = None
        self.seeds: Sequence[Address] = ()
        self._writer: Writer | None = None
        self._outstanding = OutstandingFlushes()
        # Once a flush was incomplete, all go through this queue, which keeps their order.
        self._incomplete: asyncio.Queue[OutstandingFlush] | None = None
        self._has_begun = self._is_stopping = False
        self.losses: list[Loss] = []
        # Flushes with fewer losses are for the server before; and lack rows of dropped flushes before them.
        self._num_at_switch = self._num_at_drop = 0
        self._num_earlier_reconnects = 0  # of channels that are gone
        self.cpu_s = self._aside_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        # A daemon: a trainer without `close` must be able to exit.
        self._thread = threading.Thread(target=self._run, name="headrace-sender", daemon=True)

    @property
    def error(self) -> HeadraceError | None:
        """The error that has ended streaming for good."""
        return self._outstanding.error

    def delivery_s(self) -> float:
        """Return `OutstandingFlushes.delivery_s`. Thread: any."""
        return self._outstanding.delivery_s

    @property
    def server_ids(self) -> tuple[str, ...]:
        """Identity of each shard's present store, in the order of the shards."""
        return tuple(channel.server_id for channel in self._channels)

    @property
    def whereabouts(self) -> tuple[Address, ...]:
        """Host and port of each shard, as far as its channel knows."""
        return tuple((channel.shard.host, channel.shard.port) for channel in self._channels)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Each shard's `ShardChannel.place`."""
        return tuple(channel.place for channel in self._channels)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        self._started.wait()

    def find_store(self, seeds: Sequence[Address], writer: Writer) -> Store:
        """Return the store at addresses of any shards, see `Rendezvous.find_store`."""
        self.seeds = seeds
        return self._call(lambda: self._rendezvous.find_store(seeds, writer))

    def present_store(self) -> Store:
        """Return the store that the writer delivers to, as it is now; raises as `Rendezvous.find_store`."""
        writer = self._writer
        assert writer is not None
        return self._call(lambda: self._following(lambda: self._rendezvous.find_store(self.seeds, writer)))

    def switch(self, reason: ReshardedError) -> None:
        """Go on at another server, as somebody else was told to, and return once it was found."""
        self._call(lambda: self._switched(reason))

    def acquire_epoch(self, store: Store, writer: Writer) -> Writer:
        """Return the writer in an epoch of its own, which fences nobody yet, see `Rendezvous.acquire_epoch`."""
        return self._call(lambda: self._rendezvous.acquire_epoch(store, writer))

    def open(self, store: Store, writer: Writer) -> None:
        """Prepare to deliver as a writer. Its first tables, or flush, open its session, which fences older epochs."""
        self._writer = writer
        self._channels = self._channels_to(store, writer)

    def _channels_to(self, store: Store, writer: Writer) -> list[ShardChannel]:
        return [
            ShardChannel(
                shard,
                writer=writer,
                config=self._config,
                connect=self._connect,
                random=self._random,
                on_durable=self._on_durable,
                on_loss=self._on_loss,
                resolver=self._rendezvous.resolver,
            )
            for shard in store.shards
        ]

    def check(self, specs: list[TableSpec], first_rows: FirstRows) -> None:
        """Raise what `drop_dense` and `register` would raise on any shard, and change nothing."""
        self._call(lambda: self._following(lambda: self._check(specs, first_rows)))

    def register(self, specs: list[TableSpec], first_rows: FirstRows | None = None) -> None:
        """Register tables on all shards, and say of which all rows come. Raises as `Rendezvous.open_session`."""
        self._call(lambda: self._following(lambda: self._register(specs, first_rows)))

    def drop_dense(self, names: Iterable[str]) -> None:
        """Drop dense tensors of the run on all shards. Raises as `Rendezvous.open_session`."""
        dropped = sorted(names)
        self._call(lambda: self._following(lambda: self._say_hello([], dropped=dropped)))

    def end_run(self, timeout_s: float) -> None:
        """Say to all shards that this rank writes no more, see `Rendezvous.end_run`. REQUIRES: all is durable."""
        writer = self._writer
        assert writer is not None

        async def end() -> None:
            async with asyncio.timeout(timeout_s):
                await self._following(
                    lambda: self._rendezvous.end_run([channel.shard for channel in self._channels], writer)
                )

        self._call(end, timeout_s=timeout_s)

    def submit(self, flush: Flush) -> None:
        """Take over a flush and its staging buffer, unless streaming has ended with an error. Never blocks."""
        if self.error is not None:
            raise self.error
        loop = self._loop
        assert loop is not None and not self._is_stopping, "the sender is not running"
        entry = self._outstanding.add(flush)
        # This raises if the loop has just ended; then the trainer is ending too.
        loop.call_soon_threadsafe(self._accept, entry)

    def withdraw(self, flush: Flush) -> bool:
        """Take back a flush whose `submit` was interrupted; return False if the sender keeps it, and its buffer."""
        return self._outstanding.withdraw(flush)

    def deletions_on_their_way(self) -> dict[str, list[int]]:
        """Return, by fqn, the global ids of rows whose deletion was submitted and is not durable on every shard."""
        return self._outstanding.deletions()

    def wait_durable(self, timeout_s: float) -> None:
        """Wait until everything submitted is durable on every shard.

        Raises:
            UnavailableError: Not in time; the message names the shards that are behind.
            HeadraceError: Streaming has ended.
        """
        num_flushes, size_bytes = self._outstanding.wait_durable(timeout_s)
        if num_flushes:
            flushes = f"{num_flushes} flushes ({format_size(size_bytes)})"
            raise UnavailableError(f"{flushes} are not durable on every shard: {self.describe_delay()}")

    def describe_delay(self) -> str:
        """Name the shards that have not acked everything, in one line."""
        late = [channel for channel in self._channels if channel.num_behind]
        return "; ".join(channel.describe() for channel in late) or "no shard is behind"

    def stats(
        self,
        *,
        step: int = 0,
        num_dirty_rows: int = 0,
        num_waiting_rows: int = 0,
        dense_step: int = -1,
        dense_bytes: int = 0,
        cost_percent: float = 0.0,
        is_cost_bound: bool = False,
        failure: HeadraceError | None = None,
    ) -> StreamerStats:
        """Return what was done so far, completed with the caller's figures. Thread: any."""
        outage = next((channel.last_error for channel in self._channels if channel.last_error), None)
        error = failure or self.error or outage
        return StreamerStats(
            **self._outstanding.figures(),
            step=step,
            num_dirty_rows=num_dirty_rows,
            num_waiting_rows=num_waiting_rows,
            dense_step=dense_step,
            dense_bytes=dense_bytes,
            cost_percent=cost_percent,
            is_cost_bound=is_cost_bound,
            num_reconnects=self._num_earlier_reconnects + sum(channel.num_reconnects for channel in self._channels),
            num_connected=sum(not channel.is_away for channel in self._channels),
            last_error=None if error is None else str(error),
        )

    def stop(self, timeout_s: float) -> None:
        """End the thread; what is not durable stays undelivered. Idempotent. Thread: any."""
        self._is_stopping = True
        self._pool.discard()
        loop, stop = self._loop, self._stop
        if not self._thread.is_alive() or loop is None or stop is None:
            return
        try:
            loop.call_soon_threadsafe(stop.set)
        except RuntimeError:
            return  # the loop has just ended
        if threading.current_thread() is self._thread:
            return  # the garbage collector runs finalizers on any thread
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("the sender's thread has not ended within %g s", timeout_s)

    def _call(self, start: Callable[[], Coroutine[Any, Any, _T]], *, timeout_s: float | None = None) -> _T:
        """Run a coroutine on the sender's loop and return its result, or raise `UnavailableError` at the deadline."""
        timeout_s = self._config.connect_timeout_s if timeout_s is None else timeout_s
        assert self._loop is not None
        if self.error is not None:
            raise self.error

        async def limited() -> _T:
            # Each call has an earlier deadline with a better message.
            async with asyncio.timeout(timeout_s + _LATE_S):
                return await start()

        future: Future[_T] = asyncio.run_coroutine_threadsafe(limited(), self._loop)
        try:
            return future.result()
        except TimeoutError as exc:
            raise UnavailableError(f"the parameter server has not answered within {format_seconds(timeout_s)}") from exc
        finally:
            future.cancel()  # has an effect only if an interrupt ended the wait

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:  # uvloop, say, knows less
                runner.run(self._main())
        except BaseException as exc:
            _log.exception("the sender's thread has failed")
            self._fail(exc)
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        await self._stop.wait()
        # `asyncio.run` then cancels the channels, which close their connections.

    def _begin(self) -> None:
        """Have the channels connect, unless they have begun."""
        if not self._has_begun:
            self._has_begun = True
            self._run_channels()

    def _run_channels(self) -> None:
        if self._has_begun and self._switching is None:
            self._channel_tasks = [asyncio.create_task(self._guarded(self._run_channel(c))) for c in self._channels]

    async def _run_channel(self, channel: ShardChannel) -> None:
        try:
            await channel.run()
        except ReshardedError as exc:
            self._begin_switch(exc)

    def _begin_switch(self, reason: ReshardedError) -> asyncio.Task[None]:
        """Go on at the server that is named, unless that has begun; return the task that does so."""
        if self._switching is None:
            _log.warning("%s; going on there", reason)
            self._switching = asyncio.create_task(self._guarded(self._switch(reason)))
        return self._switching

    async def _switched(self, reason: ReshardedError) -> None:
        await asyncio.shield(self._begin_switch(reason))
        if self.error is not None:
            raise self.error

    async def _following(self, ask: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Return the result of `ask`, if need be of the server that has taken the place of this one."""
        while True:
            if self._switching is not None:
                await asyncio.shield(self._switching)
            if self.error is not None:
                raise self.error
            try:
                return await ask()
            except ReshardedError as exc:
                await self._switched(exc)

    async def _switch(self, reason: ReshardedError) -> None:
        """Find the server that has taken the place of this one, as long as it takes, and go on there."""
        writer = self._writer
        assert writer is not None
        for task in self._channel_tasks:
            task.cancel()
        if self._channel_tasks:
            await asyncio.wait(self._channel_tasks)
        store = await self._find_successor(reason, writer)
        self._switching = None
        if tuple(shard.server_id for shard in store.shards) != self.server_ids:
            self._go_on(store, writer)
        self._run_channels()

    async def _find_successor(self, reason: ReshardedError, writer: Writer) -> Store:
        backoff = Backoff(min_s=self._config.retry_min_s, max_s=self._config.retry_max_s, random=self._random)
        error: HeadraceError
        while True:
            try:
                return await self._rendezvous.find_store([reason.successor], writer)
            except ReshardedError as exc:
                error = reason = exc
            except (UnavailableError, UnauthorizedError) as exc:  # as for a connection that was lost
                error = exc
            for channel in self._channels:
                channel.last_error = error
            await asyncio.sleep(backoff.next_s())

    def _go_on(self, store: Store, writer: Writer) -> None:
        """Deliver to another server, which has what all shards have acked, from now on."""
        before = self._channels
        lacking = self._lacking(store)
        known = {(name, spec.fingerprint) for name, spec in store.tables.items()}
        unknown = [spec.fqn for spec in before[0].tables if (spec.fqn, spec.fingerprint) not in known]
        if unknown:
            raise StorageError(
                f"{store.shards[0]} has taken the place of {before[0].shard}, and does not have {first_of(unknown)} as "
                "the trainer has: is it a copy of that server? Restart the trainer"
            )
        entries = self._outstanding.begun()
        switch, dropped = Switch(store), DroppedRows.of(entry.flush for entry in entries)
        self._num_at_switch = len(self.losses) + len(lacking) + 1
        # First, so that whoever sees the new server's identity or places also sees that it is new.
        self.losses += [*lacking, switch, dropped]
        self._num_at_drop = len(self.losses)
        self._num_earlier_reconnects += sum(channel.num_reconnects + 1 for channel in before)
        self._channels = self._channels_to(store, writer)
        for channel in self._channels:
            channel.name_tables_of(before[0])
        self.seeds = [(shard.host, shard.port) for shard in store.shards]
        self._give_up(entries)
        _log.warning("goes on at %s of %d shards", store.shards[0], len(store.shards))

    def _lacking(self, store: Store) -> list[int]:
        """Return the shards of the present server of which another one lacks what was acked."""
        predecessor = store.predecessor(self.server_ids, self.places)
        lacking = [] if predecessor is None else predecessor.lacking([seq for _, seq in self.places])
        if lacking:
            what = f"{store.shards[0]} lacks acked data of shards {lacking} of the server before"
            if self._config.on_set_back == "raise":
                raise StorageError(f"{what}: restart the trainer, or set on_set_back to resend")
            _log.warning("%s: sending all rows of these again", what)
        return lacking

    def _give_up(self, entries: Collection[OutstandingFlush]) -> None:
        self._outstanding.drop(entries)
        for entry in entries:
            if entry.flush.staging is not None:
                self._pool.release(entry.flush.staging)

    async def _say_hello(
        self,
        specs: list[TableSpec],
        after_step: int | None = None,
        updated_only: frozenset[str] = frozenset(),
        dropped: Sequence[str] = (),
        checks_only: bool = False,
    ) -> list[Any]:
        assert self._writer is not None
        shards = [channel.shard for channel in self._channels]
        takes_over = self._config.takes_over
        return await self._rendezvous.open_session(
            shards,
            self._writer,
            specs,
            takes_over=takes_over,
            after_step=after_step,
            updated_only=updated_only,
            dropped=dropped,
            checks_only=checks_only,
        )

    async def _check(self, specs: list[TableSpec], first_rows: FirstRows) -> None:
        if first_rows.replaced:
            await self._say_hello([], dropped=sorted(first_rows.replaced), checks_only=True)
        kept = [spec for spec in specs if spec.fqn not in first_rows.replaced]
        await self._say_hello(kept, first_rows.after_step, first_rows.updated_only, checks_only=True)

    async def _register(self, specs: list[TableSpec], first_rows: FirstRows | None) -> None:
        after_step = -1 if first_rows is None else first_rows.after_step
        updated_only = frozenset(spec.fqn for spec in specs) if first_rows is None else first_rows.updated_only
        while specs:  # a rank without tables is heard of with its first flush
            channels = self._channels
            replies = await self._say_hello(specs, after_step, updated_only)
            if channels is not self._channels:  # switched meanwhile
                continue
            for channel, reply in zip(channels, replies, strict=True):
                if reply.last_client_seq and not self._has_begun:
                    raise channel.other_writer_error(reply.last_client_seq)
                channel.add_tables(specs, after_step=after_step, updated_only=updated_only)
            self._begin()
            return

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException as exc:
            self._fail(exc)

    def _fail(self, exc: BaseException) -> None:
        """End streaming for good; the training thread meets the error at its next call."""
        if isinstance(exc, HeadraceError):
            error = exc
        else:
            _log.error("streaming has failed by a bug", exc_info=exc)
            error = HeadraceError(f"streaming has failed: {type(exc).__name__}: {exc}")
            error.__cause__ = exc
        incomplete = self._outstanding.fail(error)
        self._pool.close()
        for task in (*self._tasks, *self._channel_tasks, *([self._switching] if self._switching else [])):
            task.cancel()
        for pending in incomplete:
            pending.abandon()

    def _accept(self, entry: OutstandingFlush) -> None:
        if not self._outstanding.take(entry):
            return
        if entry.flush.pending is not None and self.error is not None:
            entry.flush.pending.abandon()  # streaming has ended meanwhile
            return
        if entry.flush.pending is not None and self._incomplete is None:
            self._incomplete = asyncio.Queue()
            self._tasks.append(asyncio.create_task(self._guarded(self._run_completion(self._incomplete))))
        if self._incomplete is None:
            self._enqueue(entry)
        else:
            self._incomplete.put_nowait(entry)

    async def _run_completion(self, incomplete: asyncio.Queue[OutstandingFlush]) -> None:
        """Complete flushes that are on their way from a device, in order."""
        while True:
            entry = await incomplete.get()
            if entry.flush.pending is not None:
                completed = await self._aside(entry.flush.pending.complete, entry.flush)
                self._outstanding.complete(entry, completed)
                if completed is None:
                    continue  # it failed, and its owner takes its buffer back
            self._enqueue(entry)

    def _enqueue(self, entry: OutstandingFlush) -> None:
        flush = entry.flush
        if flush.num_losses < self._num_at_switch:  # made for the server before
            self.losses.append(DroppedRows.of([flush]))
            self._num_at_drop = len(self.losses)
            self._give_up([entry])
            return
        if flush.num_losses < self._num_at_drop:
            flush.mark = None  # not true: it counts rows of a dropped flush as sent
        if any(len(table.bounds) != len(self._channels) + 1 for table in flush.tables):
            self._fail(InvariantError(f"step {flush.step}: a table was laid out for another number of shards"))
            return
        self._begin()
        entry.num_shards_left = len(self._channels)
        for channel in self._channels:
            channel.enqueue(flush)

    async def _aside(self, work: Callable[[Flush], _T], flush: Flush) -> _T:
        """Run something that blocks on another thread, and count its processor time."""

        def measured() -> tuple[_T, float]:
            begin_s = time.thread_time()
            return work(flush), time.thread_time() - begin_s

        result, cost_s = await asyncio.to_thread(measured)
        self._aside_s += cost_s
        return result

    def _on_durable(self, flush: Flush) -> None:
        self.cpu_s = time.thread_time() + self._aside_s
        entry = self._outstanding.entry_of(flush)
        entry.num_shards_left -= 1
        if entry.num_shards_left:
            return
        self._outstanding.note_durable(entry)
        if flush.staging is not None:
            self._pool.release(flush.staging)

    def _on_loss(self, shard: int | None) -> int:
        self.losses.append(shard)
        return len(self.losses)
