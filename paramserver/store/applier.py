"""Apply acked batches from the update log to the store, and read rows whether they are applied or not.

A batch is submitted when it is durable. Its rows can be read at once, from the memtable. They reach RocksDB a window of
batches at a time, with the log position last: a hot row is written once per window, and large files need less
compaction.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.paramserver.store.backlog import Backlog, Entry
from headrace.paramserver.store.coalescing import coalesce_all
from headrace.paramserver.store.deltas import Batch, Part
from headrace.paramserver.store.fair_semaphore import ROWS_PER_TABLE, Asker, FairSemaphore
from headrace.paramserver.store.memtable import EpochReclaimer, Memtable, PendingRows, ShardSource
from headrace.paramserver.store.row_reader import RowsRead, read_rows
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.system.event_loop import lower_thread_priority
from headrace.paramserver.system.tracing import span
from headrace.schemas.errors import ConfigError, HeadraceError, InvariantError, StorageError, UnavailableError
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import TableSpec

__all__ = ["Applier", "ApplierConfig"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplierConfig:
    """Settings of an applier.

    Attributes:
        window_bytes: Memory of the batches that are coalesced and written together. A larger window writes a hot row
            less often; as much again waits while a window is being written.
        hold_s: How long rows wait for others to fill the window, seconds; 0 does not wait. Neither reads nor acks wait
            for it; it costs memory, and more log to apply after a crash.
        quiet_s: Rows stop waiting when no batch has come for this long, seconds.
        flush_bytes: RocksDB is flushed after this much has been written, so that a restart replays no more.
        flush_interval_s: RocksDB is flushed at least this often when something was written, seconds.
        num_read_threads: Lookups of many rows that run at a time; one more, of few rows, can run beside them.
    """

    window_bytes: int = 96 << 20
    hold_s: float = 0.0
    quiet_s: float = 0.1
    flush_bytes: int = 256 << 20
    flush_interval_s: float = 30.0
    num_read_threads: int = 2

    def __post_init__(self) -> None:
        for name in ("window_bytes", "flush_bytes", "flush_interval_s", "num_read_threads"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"applier setting {name} is {getattr(self, name)}, not above 0")


@dataclass(slots=True)
class _Task:
    """A call that waits for one position of the log."""

    seq: int
    work: Callable[[], None]
    done: asyncio.Future[None]


class Applier:
    """Applies batches to a store, and reads across memtable and store. Use it with `async with`.

    The caller closes the store after the applier, and nobody else writes to it meanwhile. Methods that wait raise
    `failed`, or UnavailableError when the applier is closed first; a canceled wait changes nothing.

    Attributes:
        applied_seq: Every batch up to here is in RocksDB.
        submitted_seq: Every batch up to here can be read.
        pending_bytes: Memory of batches that are not in RocksDB yet, or that readers may still use.
        failed: Why the applier has stopped; None while it works.
        may_flush: Says whether a flush that is only due by the clock may begin: one that fails would stop the applier.

    Thread: the loop's, for every method.
    """

    def __init__(
        self, store: RowStore, *, config: ApplierConfig | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._config = config or ApplierConfig()
        self._clock = clock
        self.applied_seq = self.submitted_seq = self._writing_seq = store.applied_seq
        self.pending_bytes = 0
        self.failed: HeadraceError | None = None
        self.may_flush: Callable[[], bool] = lambda: True
        self._memtable = Memtable(store.layouts)
        self._backlog = Backlog(
            newest_seq=store.applied_seq,
            window_bytes=self._config.window_bytes,
            hold_s=self._config.hold_s,
            quiet_s=self._config.quiet_s,
            clock=clock,
        )
        self._to_write = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []
        self._tasks_at: deque[_Task] = deque()  # by seq
        self._unreleased: deque[Batch] = deque()  # oldest first
        self._readers = EpochReclaimer()
        self._semaphore = FairSemaphore(num_long=self._config.num_read_threads)
        self._flushed_at_s = clock()
        self._flushing: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._is_closing = self._is_closed = False

    async def __aenter__(self) -> Applier:
        self._loop = asyncio.get_running_loop()
        # Low priority: acks wait for the event loop and the log's writer, not for this thread.
        self._write_pool = ThreadPoolExecutor(1, "headrace-apply", initializer=lower_thread_priority)
        self._flush_pool = ThreadPoolExecutor(1, "headrace-flush")
        self._read_pool = ThreadPoolExecutor(self._config.num_read_threads + 1, "headrace-read")
        self._task = asyncio.create_task(self._guard(self._write_forever()), name="headrace-apply")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def submit(self, batch: Batch) -> None:
        """Take a durable batch with a higher seq; it can be read from now on. Never blocks: see `wait_below`.

        Raises:
            HeadraceError: `failed`, or UnavailableError after `close`; the batch was not taken.
            InvariantError: It is not behind the last one, or its rows are not the record's; applying stops.
        """
        self._check()
        try:
            if batch.seq <= self.submitted_seq:  # records between them may be the log's own
                raise InvariantError(f"log → memtable: record {batch.seq} has come after {self.submitted_seq}")
            parts = self._memtable.add(batch)
        except InvariantError as exc:
            self._fail(exc)
            raise
        self.submitted_seq = batch.seq
        self.pending_bytes += batch.size_bytes
        self._unreleased.append(batch)
        if self._backlog.add(batch, parts):
            self._to_write.set()
        if batch.dropped:
            self.run_at(batch.seq, partial(self._store.erase, batch.dropped)).add_done_callback(self._erased)

    async def read(self, table_id: int, spec: TableSpec, row_ids: npt.NDArray[np.int64]) -> RowsRead:
        """Return rows of one table; see `read_many`."""
        return (await self.read_many([(table_id, spec, row_ids)]))[0]

    async def read_many(
        self, wanted: Sequence[tuple[int, TableSpec, npt.NDArray[np.int64]]], *, asker: Asker | None = None
    ) -> list[RowsRead]:
        """Return the newest acked rows of several tables, applied or not; each row is of one moment.

        Args:
            wanted: For each table its number, its spec and int64[n] valid row ids, which may repeat.
            asker: Who asks; askers take turns.

        Raises:
            StorageError: RocksDB could not be read.
            UnavailableError: The applier is closed, or the asker was gone when its turn came.

        Cancellation: changes nothing; the lookup may finish in its thread.
        """

        def begin() -> Callable[[], list[RowsRead]]:
            seq, get, layouts = self.submitted_seq, self._store.get, self._store.layouts
            sources = [self._memtable.sources_of(number, spec, layouts(number)) for number, spec, _ in wanted]
            pairs = list(zip(wanted, sources, strict=True))
            return lambda: [read_rows(number, spec, of, ids, get, seq=seq) for (number, spec, ids), of in pairs]

        # Each column shard has keys of its own.
        weights = [(row_ids.size + ROWS_PER_TABLE) * (len(self._store.layouts(n)) or 1) for n, _, row_ids in wanted]
        found = await self._look(begin, asker, sum(weights))
        for (number, spec, row_ids), rows in zip(wanted, found, strict=True):
            # What was in the memtable as the look-up began tears nothing: it hides all layouts of columns in RocksDB.
            if rows.may_be_torn is not None and rows.may_be_torn.any() and self._writing_seq > rows.seq:
                at = np.flatnonzero(rows.may_be_torn)
                rows.replace(at, await self._read_still(number, spec, row_ids[at]))
        return found

    async def _read_still(self, table_id: int, spec: TableSpec, row_ids: npt.NDArray[np.int64]) -> RowsRead:
        """Return rows while nothing is written.

        Rejected: a snapshot of RocksDB for each look-up. Rocksdict's has no multi-get, and holds the GIL at each key.
        """
        found: list[RowsRead] = []
        seq, layouts, get = self.submitted_seq, self._store.layouts, self._store.get

        def look() -> None:
            sources = [ShardSource(RecordLayout(spec, of), None, True) for of in layouts(table_id) or (spec.whole,)]
            found.append(read_rows(table_id, spec, sources, row_ids, get, seq=seq))

        await self.run_at(seq, look)
        return found[0]

    async def _look(self, begin: Callable[[], Callable[[], _T]], asker: Asker | None, num_rows: int) -> _T:
        """Run a lookup that weighs `num_rows` in a thread, and keep the buffers that it refers to until it ends.

        `begin` takes the views and returns the lookup; it is called on the loop when the asker's turn comes.
        """
        self._check_readable()
        is_long = await self._semaphore.take(None if asker is None else asker.who, num_rows)
        try:
            self._check_readable()
            # A client that gave up dials again and asks anew: what it left behind must not delay live clients.
            if asker is not None and not asker.is_connected:
                raise UnavailableError("the client that asked for these rows has disconnected")
            ticket = self._readers.begin()
            try:
                future = self._read_pool.submit(begin())
            except BaseException:
                self._readers.end(ticket)
                raise
        except BaseException:
            self._semaphore.end(is_long)
            raise

        def ended() -> None:
            self._readers.end(ticket)
            self._semaphore.end(is_long)

        # Not when the caller stops waiting: the thread reads the frames until it is done.
        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(ended))
        return await asyncio.wrap_future(future)

    def _check_readable(self) -> None:
        if self._is_closing or self._task is None:
            raise UnavailableError("the store is closing")

    async def readers_ended(self) -> None:
        """Wait until the lookups that have begun have ended: later ones see all that is applied by now.

        Cancellation: harmless.
        """
        ended = asyncio.Event()
        self._readers.when_none_older(ended.set)
        await ended.wait()

    def run_at(self, seq: int, work: Callable[[], None]) -> asyncio.Future[None]:
        """Call blocking `work` in the applier's thread while RocksDB holds exactly the batches up to `seq`.

        Applying waits for it; acks go on. `seq` is not below `submitted_seq`. The future ends with `work`, or fails
        with its exception, or when the applier fails or closes first.

        Raises:
            HeadraceError: `failed`, or UnavailableError after `close`.
        """
        self._check()
        assert seq >= self.submitted_seq
        task = _Task(seq, work, self._loop.create_future())
        # A batch with a drop may come before one at which somebody waits already.
        bisect.insort(self._tasks_at, task, key=lambda task: task.seq)
        self._apply_now(seq)
        return task.done

    async def wait_applied(self, seq: int) -> None:
        """Wait until every batch up to `seq` is in RocksDB; its rows do not wait for a full window."""
        self._apply_now(seq)
        await self._wait_until(lambda: self.applied_seq >= seq)

    async def wait_failed(self) -> HeadraceError:
        """Wait for the applier to stop; return `failed`, or UnavailableError when it was closed."""
        try:
            await self._wait_until(lambda: False)
        except HeadraceError as exc:
            return exc
        raise AssertionError("unreachable")

    async def wait_below(self, max_bytes: int) -> None:
        """Wait until `pending_bytes` is at most `max_bytes`. Admission delays acks with it."""
        if self.pending_bytes > max_bytes:
            self._apply_now(self.submitted_seq)
        await self._wait_until(lambda: self.pending_bytes <= max_bytes)

    async def close(self) -> None:
        """Apply what has been submitted, flush, and stop; after a failure only stop. Idempotent.

        Buffers of batches that could not be applied are released too: the log has them. After a StorageError of the
        last flush, the log still has the rows.

        Cancellation: closing goes on; call it again to wait for it.
        """
        if self._task is None:
            return
        self._is_closing = True
        self._apply_now(self.submitted_seq)
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(self._task), name="headrace-applier-close")
        await asyncio.shield(self._closing)

    async def _close(self, task: asyncio.Task[None]) -> None:
        try:
            await asyncio.wait([task])
            if self._flushing is not None:
                await asyncio.wait([self._flushing])
            if self.failed is None and self._store.durable_seq < self.applied_seq:
                await self._loop.run_in_executor(self._flush_pool, self._store.flush)
        finally:
            for pool in (self._read_pool, self._flush_pool, self._write_pool):
                await asyncio.to_thread(pool.shutdown)
            while self._unreleased:
                self._release_oldest()
            self._is_closed = True
            self._wake_waiters()

    def _check(self) -> None:
        if self.failed is not None:
            raise self.failed
        if self._is_closing or self._task is None:
            raise UnavailableError("the store is closing")

    def _apply_now(self, seq: int) -> None:
        self._backlog.apply_now(seq)
        self._to_write.set()

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except HeadraceError as exc:
            self._fail(exc)
        except Exception as exc:
            failure = HeadraceError(f"applying stopped at log position {self.applied_seq}: {exc!r}")
            failure.__cause__ = exc
            self._fail(failure)

    def _fail(self, failure: HeadraceError) -> None:
        if self.failed is None:
            self.failed = failure
            # A disk error's line says it all; a traceback is for bugs.
            exc_info = None if isinstance(failure, StorageError) else failure
            _log.error("the applier has stopped: %s", failure, exc_info=exc_info)
        self._to_write.set()
        self._wake_waiters()

    async def _write_forever(self) -> None:
        try:
            while self.failed is None and (self.applied_seq < self.submitted_seq or not self._is_closing):
                if self._tasks_at and self._tasks_at[0].seq == self.applied_seq:
                    await self._run_task(self._tasks_at.popleft())
                elif self._backlog.is_window_due:
                    await self._write_window(self._backlog.take_entries(task.seq for task in self._tasks_at))
                else:
                    await self._wait_for_work()
                self._flush_if_due()
        finally:
            self._drop_tasks()

    async def _write_window(self, entries: list[Entry]) -> None:
        parts: dict[PendingRows, list[Part]] = {}
        meta: dict[bytes, bytes] = {}
        for entry in entries:
            meta |= entry.batch.meta
            for rows, part in entry.parts:
                parts.setdefault(rows, []).append(part)
        self._writing_seq = seq = entries[-1].batch.seq
        await self._loop.run_in_executor(self._write_pool, self._write, parts, meta, seq)
        for rows, of_rows in parts.items():
            rows.applied(len(of_rows))
        self.applied_seq = seq
        for _ in entries:
            self._readers.when_none_older(self._release_oldest)
        self._wake_waiters()

    def _write(self, parts: dict[PendingRows, list[Part]], meta: dict[bytes, bytes], seq: int) -> None:
        runs = coalesce_all((rows.table_id, of_rows) for rows, of_rows in parts.items())
        with span("headrace.apply", num_rows=sum(run.row_ids.size for run in runs), seq=seq):
            self._store.write_runs(runs, meta=meta, applied_seq=seq)

    async def _run_task(self, task: _Task) -> None:
        try:
            await self._loop.run_in_executor(self._write_pool, task.work)
        except Exception as exc:  # the caller's error, not the applier's
            if not task.done.done():
                task.done.set_exception(exc)
        else:
            if not task.done.done():
                task.done.set_result(None)

    async def _wait_for_work(self) -> None:
        """Wait for something to write or flush, at most until the next deadline of either."""
        self._to_write.clear()
        hold_ends_s = self._backlog.hold_ends_s
        deadlines = [] if hold_ends_s is None else [hold_ends_s]
        if self._store.durable_seq < self.applied_seq and self._flushing is None:
            deadlines.append(self._flushed_at_s + self._config.flush_interval_s)
        try:
            async with asyncio.timeout(max(min(deadlines) - self._clock(), 0.0) if deadlines else None):
                await self._to_write.wait()
        except TimeoutError:
            pass  # the caller checks the clock
        if self._backlog.end_hold():
            self._to_write.set()

    def _release_oldest(self) -> None:
        batch = self._unreleased.popleft()
        self.pending_bytes -= batch.size_bytes
        batch.release()
        self._wake_waiters()

    def _flush_if_due(self) -> None:
        if self._flushing is not None or self._store.durable_seq >= self.applied_seq:
            return
        is_late = self._clock() - self._flushed_at_s >= self._config.flush_interval_s
        if is_late and not self.may_flush():
            self._flushed_at_s, is_late = self._clock(), False
        if is_late or self._store.unflushed_bytes >= self._config.flush_bytes:
            self._flushing = self._loop.run_in_executor(self._flush_pool, self._store.flush)
            self._flushing.add_done_callback(self._flushed)

    def _flushed(self, flushing: asyncio.Future[None]) -> None:
        self._flushing = None
        self._flushed_at_s = self._clock()
        exc = flushing.exception()
        if exc is not None:
            self._fail(exc if isinstance(exc, HeadraceError) else StorageError(f"flushing failed: {exc!r}"))
        self._to_write.set()
        self._wake_waiters()

    async def _wait_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            if self.failed is not None:
                raise self.failed
            if self._task is None or self._is_closed:
                raise UnavailableError("the store is closed")
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def _erased(self, erasing: asyncio.Future[None]) -> None:
        """Stop after a failure to erase; the next start erases what is left."""
        if not erasing.cancelled() and isinstance(exc := erasing.exception(), HeadraceError):
            self._fail(exc)

    def _drop_tasks(self) -> None:
        while self._tasks_at:
            task = self._tasks_at.popleft()
            if not task.done.done():
                task.done.set_exception(UnavailableError("the store has stopped applying"))

    def _wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
