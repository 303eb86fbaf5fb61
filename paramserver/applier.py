"""From the update log to RocksDB: acked batches are coalesced and applied behind the acks, and read meanwhile.

A batch is submitted when it is durable. Its rows can be read at once, from the overlay (`pending.py`), and get into
RocksDB a window of batches at a time: coalesced, sorted, with the log position in the same atomic write. While one
window is written the next one gathers, so the more behind the applier is, the more it coalesces.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt

from headrace.paramserver.pending import Batch, Part, PendingRows, Run, coalesce
from headrace.paramserver.row_reader import RowsRead, ShardSource, read_rows, settle
from headrace.paramserver.store import RowStore
from headrace.schemas.errors import ConfigError, HeadraceError, StorageError, UnavailableError
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import ColumnShard, TableSpec

__all__ = ["Applier", "ApplierConfig"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplierConfig:
    """Settings of an applier.

    Attributes:
        window_bytes: Batches that are coalesced together, at most, but one at least. A larger window writes a hot row
            less often; the rows of one window are in memory twice.
        gather_s: How long batches wait for others to fill a window, seconds; 0 does not wait. Neither reads nor acks
            wait for it: it costs memory, and that much more log to apply after a crash.
        flush_bytes: RocksDB is flushed after this much has been written to it, so that a restart replays no more.
        flush_interval_s: It is flushed at least this often when something has been written, seconds.
        num_read_threads: Reads that look things up at the same time.
    """

    window_bytes: int = 64 << 20
    gather_s: float = 0.0
    flush_bytes: int = 256 << 20
    flush_interval_s: float = 30.0
    num_read_threads: int = 2

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: One is out of range.
        """
        for name in ("window_bytes", "flush_bytes", "flush_interval_s", "num_read_threads"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"applier setting {name} is {getattr(self, name)}, not above 0")


@dataclass(slots=True)
class _Entry:
    batch: Batch
    parts: list[tuple[PendingRows, Part]]


@dataclass(slots=True)
class _Window:
    """Consecutive batches that are applied together."""

    entries: list[_Entry]

    @property
    def seq(self) -> int:
        return self.entries[-1].batch.seq

    def parts(self) -> dict[PendingRows, list[Part]]:
        parts: dict[PendingRows, list[Part]] = {}
        for entry in self.entries:
            for rows, part in entry.parts:
                parts.setdefault(rows, []).append(part)
        return parts

    def meta(self) -> dict[bytes, bytes]:
        meta: dict[bytes, bytes] = {}
        for entry in self.entries:
            meta |= entry.batch.meta
        return meta


@dataclass(slots=True)
class _Task:
    """Something to do with the store at one position of the log."""

    seq: int
    work: Callable[[], None]
    done: asyncio.Future[None]


class Applier:
    """Applies batches to a store, and reads rows whether they are applied or not. Use it with `async with`.

    Attributes:
        applied_seq: Every batch up to here is in RocksDB.
        submitted_seq: Every batch up to here can be read.
        pending_bytes: What batches and runs that are not in RocksDB hold in memory.
        num_rows_submitted: Rows of all batches that have been applied, before coalescing.
        num_rows_applied: Rows that were written for them.
        failed: Why nothing is applied any more; None while all is well.

    Thread: the loop's, for every method.
    """

    def __init__(
        self, store: RowStore, *, config: ApplierConfig | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Apply to `store`, which the caller closes after this.

        Args:
            store: Where rows go; nobody else writes to it meanwhile.
            config: Settings.
            clock: Monotonic seconds.
        """
        self._store = store
        self._config = config or ApplierConfig()
        self._clock = clock
        self.applied_seq = self.submitted_seq = store.applied_seq
        self.pending_bytes = 0
        self.num_rows_submitted = self.num_rows_applied = 0
        self.failed: HeadraceError | None = None
        self._queue: deque[_Entry] = deque()
        self._pending: dict[tuple[int, ColumnShard], PendingRows] = {}
        self._work = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []
        self._tasks_at: deque[_Task] = deque()  # by seq
        self._held: deque[Batch] = deque()  # not released yet, oldest first
        self._readers = _Readers()
        self._flushed_at_s = clock()
        self._flushing: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._is_closing = self._is_closed = False

    async def __aenter__(self) -> Applier:
        self._loop = asyncio.get_running_loop()
        self._write_pool = ThreadPoolExecutor(1, "headrace-apply")
        self._flush_pool = ThreadPoolExecutor(1, "headrace-flush")
        self._read_pool = ThreadPoolExecutor(self._config.num_read_threads, "headrace-read")
        self._task = asyncio.create_task(self._apply_forever(), name="headrace-applier")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def submit(self, batch: Batch) -> None:
        """Take a durable batch; from now on it can be read. Never blocks: see `wait_below`.

        Args:
            batch: Of a higher seq than all before.

        Raises:
            HeadraceError: `failed`, or UnavailableError after `close`; the batch was not taken.
        """
        self._check()
        assert batch.seq > self.submitted_seq, f"batch {batch.seq} after {self.submitted_seq}"
        entry = _Entry(batch, [])
        for delta in batch.deltas:
            part = Part(delta, batch)
            if part.ids.size:
                rows = self._rows_of(delta.table_id, delta.layout)
                rows.add(part)
                entry.parts.append((rows, part))
        self._queue.append(entry)
        self.submitted_seq = batch.seq
        self.pending_bytes += batch.size_bytes
        self._held.append(batch)
        self._work.set()

    async def read(self, table_id: int, spec: TableSpec, row_ids: npt.NDArray[np.int64]) -> RowsRead:
        """Return the newest acked values of rows, applied or not, in the order asked for.

        Args:
            table_id: Number of the table.
            spec: What the table is.
            row_ids: int64[n], valid ids of the table; may repeat.

        Raises:
            StorageError: RocksDB could not be read.
            UnavailableError: After `close`.

        Cancellation: nothing changes; the look-up may end by itself later.
        """
        if self._is_closing or self._task is None:
            raise UnavailableError("the store is closing")
        shards = dict.fromkeys(self._store.layouts(table_id), True)
        shards.update((shard, False) for table, shard in self._pending if table == table_id and shard not in shards)
        sources = []
        for shard in shards or {spec.whole: False}:
            rows = self._pending.get((table_id, shard))
            layout = rows.layout if rows else RecordLayout(spec, shard)
            # One that is being applied for the first time may get into RocksDB after this: the snapshot has its rows.
            sources.append(ShardSource(layout, rows.snapshot() if rows else None, shards.get(shard, False)))
        seq, ticket = self.submitted_seq, self._readers.begin()
        future = self._read_pool.submit(read_rows, table_id, spec, sources, row_ids, self._store.get, seq=seq)
        # Not when the caller stops waiting: the thread looks at the frames until it is done.
        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._readers.end, ticket))
        return await asyncio.wrap_future(future)

    def run_at(self, seq: int, work: Callable[[], None]) -> asyncio.Future[None]:
        """Call something in the applier's thread while RocksDB holds exactly the batches up to `seq`.

        Applying waits for it; acks go on.

        Args:
            seq: Not below `submitted_seq`, nor below that of an earlier call.
            work: Blocking; it may read and flush the store.

        Returns:
            Done when `work` has returned; fails with what it raised, or when the applier fails or closes first.

        Raises:
            HeadraceError: `failed`, or UnavailableError after `close`.
        """
        self._check()
        assert seq >= max(self.submitted_seq, self._tasks_at[-1].seq if self._tasks_at else 0)
        task = _Task(seq, work, self._loop.create_future())
        self._tasks_at.append(task)
        self._work.set()
        return task.done

    async def wait_applied(self, seq: int) -> None:
        """Return when every batch up to `seq` is in RocksDB.

        Raises:
            HeadraceError: `failed`, or UnavailableError when closed first.

        Cancellation: atomic.
        """
        await self._wait_until(lambda: self.applied_seq >= seq)

    async def wait_below(self, max_bytes: int) -> None:
        """Return when `pending_bytes` is at most `max_bytes`: admission holds back acks with it.

        Raises:
            HeadraceError: `failed`, or UnavailableError when closed first.

        Cancellation: atomic.
        """
        await self._wait_until(lambda: self.pending_bytes <= max_bytes)

    async def close(self) -> None:
        """Apply what has been submitted, flush, and stop; after a failure only stop. Idempotent.

        Buffers of batches that could not be applied are released too: the log has them.

        Raises:
            StorageError: The last flush failed; the update log has the rows.

        Cancellation: the closing goes on; call it again to wait for it.
        """
        if self._task is None:
            return
        self._is_closing = True
        self._work.set()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(self._task), name="headrace-applier-close")
        await asyncio.shield(self._closing)

    async def _close(self, task: asyncio.Task[None]) -> None:
        try:
            await task
            if self._flushing is not None:
                await asyncio.wait([self._flushing])
            if self.failed is None and self._store.durable_seq < self.applied_seq:
                await self._loop.run_in_executor(self._flush_pool, self._store.flush)
        finally:
            for pool in (self._read_pool, self._flush_pool, self._write_pool):
                await asyncio.to_thread(pool.shutdown)
            while self._held:
                self._release_oldest()
            self._is_closed = True
            self._wake_waiters()

    def _check(self) -> None:
        if self.failed is not None:
            raise self.failed
        if self._is_closing or self._task is None:
            raise UnavailableError("the store is closing")

    def _rows_of(self, table_id: int, layout: RecordLayout) -> PendingRows:
        rows = self._pending.get((table_id, layout.shard))
        if rows is None:
            rows = self._pending[table_id, layout.shard] = PendingRows(table_id, layout)
        return rows

    async def _apply_forever(self) -> None:
        try:
            while self._queue or not self._is_closing:
                if self._tasks_at and self._tasks_at[0].seq == self.applied_seq:
                    await self._run_task(self._tasks_at.popleft())
                elif self._queue:
                    await self._gather()
                    await self._apply_window(self._take_window())
                else:
                    await self._wait_for_work()
                self._flush_if_due()
        except HeadraceError as exc:
            self.failed = exc
        except Exception as exc:
            self.failed = HeadraceError(f"applying stopped at log position {self.applied_seq}: {exc!r}")
            self.failed.__cause__ = exc
        if self.failed is not None:
            _log.error("nothing is applied any more: %s", self.failed, exc_info=self.failed)
        self._drop_tasks()
        self._wake_waiters()

    async def _run_task(self, task: _Task) -> None:
        try:
            await self._loop.run_in_executor(self._write_pool, task.work)
        except Exception as exc:  # its caller's affair, not the applier's
            if not task.done.done():
                task.done.set_exception(exc)
        else:
            if not task.done.done():
                task.done.set_result(None)

    async def _wait_for_work(self) -> None:
        self._work.clear()
        is_dirty = self._store.durable_seq < self.applied_seq and self._flushing is None
        due_s = self._flushed_at_s + self._config.flush_interval_s - self._clock()
        try:
            async with asyncio.timeout(max(due_s, 0.0) if is_dirty else None):
                await self._work.wait()
        except TimeoutError:
            pass  # a flush is due

    async def _gather(self) -> None:
        """Let a window fill: a large one coalesces more, and becomes a file instead of many small writes."""
        try:
            async with asyncio.timeout(self._config.gather_s):
                while not (self._is_closing or self._tasks_at or self._is_window_full):
                    self._work.clear()
                    await self._work.wait()
        except TimeoutError:
            pass  # then a small one it is

    @property
    def _is_window_full(self) -> bool:
        return sum(entry.batch.size_bytes for entry in self._queue) >= self._config.window_bytes

    def _take_window(self) -> _Window:
        entries = [self._queue.popleft()]
        size = entries[0].batch.size_bytes
        last_seq = self._tasks_at[0].seq if self._tasks_at else None
        while self._queue and size + self._queue[0].batch.size_bytes <= self._config.window_bytes:
            if entries[-1].batch.seq == last_seq:
                break
            entries.append(self._queue.popleft())
            size += entries[-1].batch.size_bytes
        return _Window(entries)

    async def _apply_window(self, window: _Window) -> None:
        parts = window.parts()
        runs = await self._loop.run_in_executor(self._write_pool, _coalesce, parts)
        for rows, run in runs:
            rows.coalesced(run, len(parts[rows]))
            self.pending_bytes += run.size_bytes
        # The runs are copies: the frames may go as soon as no reader looks at them.
        for _ in window.entries:
            self._readers.when_none_older(self._release_oldest)
        ordered = sorted((run for _, run in runs), key=lambda run: (run.table_id, run.layout.shard))
        await self._loop.run_in_executor(self._write_pool, self._write, ordered, window.meta(), window.seq)
        for rows, run in runs:
            rows.applied(run)
            self.pending_bytes -= run.size_bytes
            self.num_rows_applied += run.row_ids.size
        self.num_rows_submitted += sum(part.ids.size for shard_parts in parts.values() for part in shard_parts)
        self.applied_seq = window.seq
        self._wake_waiters()

    def _write(self, runs: list[Run], meta: dict[bytes, bytes], seq: int) -> None:
        self._store.write_runs([settle(run, self._store.get) for run in runs], meta=meta, applied_seq=seq)

    def _release_oldest(self) -> None:
        batch = self._held.popleft()
        self.pending_bytes -= batch.size_bytes
        batch.release()
        self._wake_waiters()

    def _flush_if_due(self) -> None:
        if self._flushing is not None or self._store.durable_seq >= self.applied_seq:
            return
        is_late = self._clock() - self._flushed_at_s >= self._config.flush_interval_s
        if is_late or self._store.unflushed_bytes >= self._config.flush_bytes:
            self._flushing = self._loop.run_in_executor(self._flush_pool, self._store.flush)
            self._flushing.add_done_callback(self._flushed)

    def _flushed(self, flushing: asyncio.Future[None]) -> None:
        self._flushing = None
        self._flushed_at_s = self._clock()
        exc = flushing.exception()
        if exc is not None and self.failed is None:
            self.failed = exc if isinstance(exc, HeadraceError) else StorageError(f"flushing failed: {exc!r}")
            self._is_closing = True
            self._queue.clear()
        self._work.set()
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

    def _drop_tasks(self) -> None:
        """Fail what can no longer be run."""
        while self._tasks_at:
            task = self._tasks_at.popleft()
            if not task.done.done():
                task.done.set_exception(UnavailableError("the store has stopped applying"))

    def _wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class _Readers:
    """Which readers may still look at buffers, so that nobody frees those under them."""

    def __init__(self) -> None:
        self._next = 0
        self._active: dict[int, None] = {}
        self._deferred: deque[tuple[int, Callable[[], None]]] = deque()

    def begin(self) -> int:
        """Return a ticket for `end`."""
        ticket = self._next
        self._active[ticket] = None
        self._next += 1
        return ticket

    def end(self, ticket: int) -> None:
        """Take a ticket back, and call what waited for it."""
        del self._active[ticket]
        oldest = next(iter(self._active), self._next)
        while self._deferred and self._deferred[0][0] <= oldest:
            self._deferred.popleft()[1]()

    def when_none_older(self, callback: Callable[[], None]) -> None:
        """Call back, in the order of these calls, when all readers that have begun have ended."""
        if self._active:
            self._deferred.append((self._next, callback))
        else:
            callback()


def _coalesce(parts: dict[PendingRows, list[Part]]) -> list[tuple[PendingRows, Run]]:
    return [(rows, coalesce(rows.table_id, of_rows)) for rows, of_rows in parts.items()]
