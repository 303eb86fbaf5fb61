"""The background half: a thread with its own event loop, one channel a shard, and what becomes of a flush."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import random
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.durations import format_seconds
from headrace.schemas.errors import HeadraceError, UnavailableError
from headrace.schemas.sizes import format_size
from headrace.schemas.tables import TableSpec
from headrace.streamer.config import StreamerConfig
from headrace.streamer.delivery.outstanding import OutstandingFlush, OutstandingFlushes
from headrace.streamer.delivery.rendezvous import Connect, Store, Writer, claim_epoch, find_store, open_session
from headrace.streamer.delivery.shard_channel import ShardChannel
from headrace.streamer.delivery.spool import Spool
from headrace.streamer.flush.flush import Flush
from headrace.streamer.flush.staging import StagingPool
from headrace.streamer.stats import StreamerStats

__all__ = ["Sender"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Sender:
    """Delivers flushes to all shards from a daemon thread.

    How much is outstanding is bounded by the staging buffers, and by the spool's size and count.

    Thread: the training thread's, except where a method says otherwise.
    """

    def __init__(self, *, config: StreamerConfig, pool: StagingPool, connect: Connect | None = None) -> None:
        """Prepare; `start` begins.

        Args:
            config: The streamer's settings.
            pool: Where staging buffers go back to.
            connect: Opens a connection; None for a plain one.

        Raises:
            ConfigError: The spool's directory cannot be used.
        """
        self._config, self._pool = config, pool
        self._connect = connect or functools.partial(ParamServerClient.connect, timeout_s=config.connect_timeout_s)
        self._random = random.Random(os.urandom(16)).random
        self._spool = None
        if config.policy == "spool" and config.spool_dir is not None:
            self._spool = Spool(config.spool_dir, max_bytes=config.spool_bytes)
        self._channels: list[ShardChannel] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._writer: Writer | None = None
        self._outstanding = OutstandingFlushes()
        self._unspooled: asyncio.Queue[OutstandingFlush] | None = None
        # Once a flush was incomplete all go this way, in their order.
        self._incomplete: asyncio.Queue[OutstandingFlush] | None = None
        self._is_stopping = False
        self._generation = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        # A daemon: a trainer that ends without `close` must end.
        self._thread = threading.Thread(target=self._run, name="headrace-sender", daemon=True)

    @property
    def error(self) -> HeadraceError | None:
        """What has ended streaming for good."""
        return self._outstanding.error

    @property
    def server_ids(self) -> tuple[str, ...]:
        """Identity of each shard's store, in the order of the shards: another one's, once that has taken its place."""
        return tuple(channel.server_id for channel in self._channels)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """What each shard has acked last, see `ShardChannel.place`."""
        return tuple(channel.place for channel in self._channels)

    @property
    def generation(self) -> int:
        """How often an empty store has been found in the place of the old one: then every row is wanted again."""
        return self._generation

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        self._started.wait()

    def find_store(self, host: str, port: int, writer: Writer) -> Store:
        """Return the store at an address, see `rendezvous.find_store`."""
        timeout_s = self._config.connect_timeout_s
        return self._call(
            lambda: find_store(host, port, writer, self._connect, timeout_s=timeout_s, random=self._random),
            timeout_s=timeout_s,
        )

    def claim_epoch(self, store: Store, writer: Writer) -> Writer:
        """Return the writer in an epoch of its own, see `rendezvous.claim_epoch`."""
        timeout_s = self._config.connect_timeout_s
        return self._call(
            lambda: claim_epoch(store, writer, self._connect, timeout_s=timeout_s, random=self._random),
            timeout_s=timeout_s,
        )

    def open(self, store: Store, writer: Writer) -> None:
        """Open the writer's session on all shards, which fences older epochs off, and begin to deliver.

        Raises:
            FencedError: A newer epoch holds the run.
            UnavailableError: A shard cannot be reached.
        """
        self._writer = writer
        self._channels = [
            ShardChannel(
                shard,
                writer=writer,
                config=self._config,
                connect=self._connect,
                random=self._random,
                on_durable=self._on_durable,
                on_new_store=self._on_new_store,
            )
            for shard in store.shards
        ]
        self._call(self._open, timeout_s=self._config.connect_timeout_s)

    def register(self, specs: list[TableSpec]) -> None:
        """Register tables on all shards.

        Raises:
            SpecMismatchError: A shard has a table of that name with another spec.
            UnavailableError: A shard cannot be reached.
        """
        self._call(lambda: self._register(specs), timeout_s=self._config.connect_timeout_s)

    def submit(self, flush: Flush) -> None:
        """Take a flush and its staging buffer, whole or not at all; never blocks.

        Raises:
            HeadraceError: Streaming has ended.
        """
        if self.error is not None:
            raise self.error
        loop = self._loop
        assert loop is not None and not self._is_stopping, "the sender is not running"
        entry = self._outstanding.add(flush, num_shards=len(self._channels))
        # If the loop ends between the check and here, this raises; then the trainer is ending too.
        loop.call_soon_threadsafe(self._accept, entry)

    def withdraw(self, flush: Flush) -> bool:
        """Take back a flush whose `submit` was interrupted (Ctrl-C); return False when it is on its way already.

        Then it will be delivered, and its staging buffer is not the caller's.
        """
        return self._outstanding.withdraw(flush)

    def deletions_on_their_way(self) -> dict[str, list[int]]:
        """Return, by fqn, the global ids of rows whose deletion is handed over and not durable on every shard."""
        return self._outstanding.deletions()

    def wait_durable(self, timeout_s: float) -> None:
        """Return when all that was submitted is durable on every shard.

        Raises:
            UnavailableError: It is not, within the time; the message names the shards that are behind.
            HeadraceError: Streaming has ended.
        """
        num_flushes, size_bytes = self._outstanding.wait_durable(timeout_s)
        if not num_flushes:
            return
        raise UnavailableError(
            f"{num_flushes} flushes ({format_size(size_bytes)}) are not durable on every shard: {self.describe_delay()}"
        )

    def describe_delay(self) -> str:
        """Name the shards that keep the oldest flush from being durable; one line."""
        late = [channel for channel in self._channels if channel.num_behind]
        return "; ".join(channel.describe() for channel in late) or "no shard is behind"

    def stats(self, *, step: int = 0, num_dirty_rows: int = 0, failure: HeadraceError | None = None) -> StreamerStats:
        """Return what has been done so far, with what only the caller knows.

        Thread: any.
        """
        held_up = next((channel.last_error for channel in self._channels if channel.last_error), None)
        error = failure or self.error or held_up
        return StreamerStats(
            **self._outstanding.figures(),
            step=step,
            num_dirty_rows=num_dirty_rows,
            spooled_bytes=self._spool.used_bytes if self._spool else 0,
            num_reconnects=sum(channel.num_reconnects for channel in self._channels),
            num_connected=sum(channel.is_connected for channel in self._channels),
            last_error=None if error is None else str(error),
        )

    def stop(self, timeout_s: float) -> None:
        """End the thread; what is not durable stays undelivered. Idempotent.

        Thread: any.

        Args:
            timeout_s: How long to wait for its end; it is a daemon, so giving up is harmless.
        """
        self._is_stopping = True
        self._pool.close()
        loop, stop = self._loop, self._stop
        if not self._thread.is_alive() or loop is None or stop is None:
            return
        try:
            loop.call_soon_threadsafe(stop.set)
        except RuntimeError:
            return  # the loop has just ended by itself
        if threading.current_thread() is self._thread:
            return  # the garbage collector may run a streamer's finalizer on any thread
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("the sender's thread has not ended within %g s", timeout_s)

    def _call(self, start: Callable[[], Coroutine[Any, Any, _T]], *, timeout_s: float) -> _T:
        """Run a coroutine on the sender's loop and return its result, or raise `UnavailableError` at the deadline."""
        assert self._loop is not None
        if self.error is not None:
            raise self.error

        async def limited() -> _T:
            async with asyncio.timeout(timeout_s + 1):  # each call has its own, nearer deadline and better words
                return await start()

        future: Future[_T] = asyncio.run_coroutine_threadsafe(limited(), self._loop)
        try:
            return future.result()
        except TimeoutError as exc:
            raise UnavailableError(f"the parameter server has not answered within {format_seconds(timeout_s)}") from exc
        finally:
            future.cancel()  # without effect when it is done; matters when an interrupt ends the wait

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as exc:
            _log.exception("the sender's thread has failed")
            self._fail(exc)
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        await self._stop.wait()
        # What is left of the channels is cancelled, and their connections closed, as `asyncio.run` ends.

    async def _open(self) -> None:
        replies = await self._say_hello([])
        for channel, reply in zip(self._channels, replies, strict=True):
            if reply.server_id != channel.shard.server_id:
                raise UnavailableError(f"{channel.shard} has changed while it was being asked; try again")
            if reply.last_client_seq:
                raise channel.impostor(reply.last_client_seq)
        self._tasks = [asyncio.create_task(self._guarded(channel.run())) for channel in self._channels]
        if self._spool is not None:
            self._unspooled = asyncio.Queue()
            self._tasks.append(asyncio.create_task(self._guarded(self._run_spool(self._spool, self._unspooled))))

    async def _say_hello(self, specs: list[TableSpec]) -> list[Any]:
        assert self._writer is not None
        return await open_session(
            [channel.shard for channel in self._channels],
            self._writer,
            specs,
            self._connect,
            timeout_s=self._config.connect_timeout_s,
            random=self._random,
        )

    async def _register(self, specs: list[TableSpec]) -> None:
        await self._say_hello(specs)
        for channel in self._channels:
            channel.add_tables(specs)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException as exc:
            self._fail(exc)

    def _fail(self, exc: BaseException) -> None:
        """End streaming for good; the training thread is told at its next call."""
        if not isinstance(exc, HeadraceError):
            _log.error("streaming has failed by a bug", exc_info=exc)
            error: HeadraceError = HeadraceError(f"streaming has failed: {type(exc).__name__}: {exc}")
            error.__cause__ = exc
        else:
            error = exc
        incomplete = self._outstanding.fail(error)
        self._pool.close()
        for task in self._tasks:
            task.cancel()
        for pending in incomplete:
            pending.abandon()

    def _accept(self, entry: OutstandingFlush) -> None:
        if not self._outstanding.take(entry):
            return
        if entry.flush.pending is not None and self.error is not None:
            entry.flush.pending.abandon()  # streaming has ended while it was submitted
            return
        if entry.flush.pending is not None and self._incomplete is None:
            self._incomplete = asyncio.Queue()
            self._tasks.append(asyncio.create_task(self._guarded(self._run_completion(self._incomplete))))
        if self._incomplete is None:
            self._pass_on(entry)
        else:
            self._incomplete.put_nowait(entry)

    async def _run_completion(self, incomplete: asyncio.Queue[OutstandingFlush]) -> None:
        """Wait for what of the flushes is on its way from a device, in order."""
        while True:
            entry = await incomplete.get()
            if await self._complete(entry):
                self._pass_on(entry)

    async def _complete(self, entry: OutstandingFlush) -> bool:
        """Return whether a flush is whole; else it has come to nothing, and its owner takes its buffer back."""
        flush = entry.flush
        if flush.pending is None:
            return True
        completed = await asyncio.to_thread(flush.pending.complete, flush)
        self._outstanding.complete(entry, completed)
        return completed is not None

    def _pass_on(self, entry: OutstandingFlush) -> None:
        if self._unspooled is None:
            self._enqueue(entry)
        else:
            self._unspooled.put_nowait(entry)

    def _enqueue(self, entry: OutstandingFlush) -> None:
        for channel in self._channels:
            channel.enqueue(entry.flush)

    async def _run_spool(self, spool: Spool, unspooled: asyncio.Queue[OutstandingFlush]) -> None:
        """Move flushes that would wait for others to disk, in order."""
        while True:
            entry = await unspooled.get()
            # The only one there is goes out from memory: as long as the server keeps up, nothing is written.
            if len(self._outstanding) > 1:
                await self._spool_one(spool, entry)
            self._enqueue(entry)

    async def _spool_one(self, spool: Spool, entry: OutstandingFlush) -> None:
        try:
            tables = await asyncio.to_thread(spool.store, entry.flush)
        except OSError as exc:
            _log.warning("spool_dir %s: %s; coalescing instead", self._config.spool_dir, exc.strerror)
            return
        staging = entry.flush.staging
        if tables is None or staging is None:
            return
        entry.flush = dataclasses.replace(entry.flush, tables=tables, staging=None)
        entry.is_spooled = True
        self._pool.release(staging)

    def _on_durable(self, flush: Flush) -> None:
        """Note, on the loop's thread, that one more shard has all of a flush."""
        entry = self._outstanding.entry_of(flush)
        entry.num_shards_left -= 1
        if entry.num_shards_left:
            return
        if entry.is_spooled and self._spool is not None:
            self._spool.remove(flush)
        self._outstanding.note_durable(entry)
        if flush.staging is not None:
            self._pool.release(flush.staging)

    def _on_new_store(self) -> int:
        self._generation += 1
        return self._generation
