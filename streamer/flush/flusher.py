"""The training thread's half: at a step boundary, take what is dirty, gather its values, and hand them over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from headrace.paramserver.process.tracing import span
from headrace.schemas.durations import format_seconds
from headrace.schemas.errors import ConfigError, UnavailableError, UnsupportedModelError
from headrace.streamer.config import StreamerConfig
from headrace.streamer.device.device_runtime import DeviceRuntime, cuda_runtime
from headrace.streamer.flush.device_cut import DeviceCut
from headrace.streamer.flush.device_pipeline import DevicePipeline
from headrace.streamer.flush.flush import Flush, FlushedDeletions, FlushedTable
from headrace.streamer.flush.gather import RowGatherer
from headrace.streamer.flush.staging import StagingBuffer, StagingPool
from headrace.streamer.flush.sweep_marks import NOTHING_CUT, Cut, Half, Marked, SweepMarks
from headrace.streamer.flush.taken_rows import TakenRows
from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["Flusher"]

# What a message has besides one delta, names and all, at most.
_REST_BYTES = 4096
# Flushes whose time on the training thread decides when the next one is due.
_NUM_COSTS = 5


class Flusher:
    """Cuts flushes out of tapped tables.

    A flush that leaves nothing dirty is an exact cut at its step. When the buffer is too small for all that is dirty, a
    *sweep* begins: over the following steps each flush goes on, table by table and by ascending row, where the last one
    has ended. A row that becomes dirty behind that place waits for the next sweep, so hot low rows do not starve high
    ones, and what is dirty stays one set. When the end is reached, all that was dirty at the step at which the sweep
    began is out: that flush marks this step, as complete but not exact. See `SweepMarks`.

    Tables on a device may be cut there (`DevicePipeline`): then a flush is whole, and marked, only when their rows have
    come.

    Thread: the training thread's.
    """

    def __init__(
        self,
        *,
        config: StreamerConfig,
        num_shards: int,
        pool: StagingPool,
        submit: Callable[[Flush], None],
        describe_delay: Callable[[], str],
        monotonic_s: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        withdraw: Callable[[Flush], bool] | None = None,
        runtime_of: Callable[[torch.device], DeviceRuntime | str] = cuda_runtime,
    ) -> None:
        """Begin with no tables.

        Args:
            config: The streamer's settings.
            num_shards: Shards of the store.
            pool: Where buffers come from; `submit` takes them over with the flush.
            submit: Takes a flush and its buffer, whole or not at all; never blocks.
            describe_delay: Says which shard is behind, for errors.
            monotonic_s: Clock for intervals.
            wall_ns: Clock for `time_us`.
            withdraw: Takes a flush back whose `submit` was interrupted; returns False when it is on its way already.
                None when a `submit` that raises has never taken it.
            runtime_of: What drives a device, see `DevicePipeline`.
        """
        self._config, self._num_shards, self._pool = config, num_shards, pool
        self._submit, self._describe_delay = submit, describe_delay
        self._withdraw = withdraw or (lambda flush: True)
        self._monotonic_s, self._wall_ns = monotonic_s, wall_ns
        self._sources: list[RowGatherer] = []
        # Table and row at which the next flush begins; (0, 0) outside of a sweep.
        self._cursor = (0, 0)
        self._marks = SweepMarks()
        self._device: DevicePipeline | None = None
        if config.device_pipeline:
            self._device = DevicePipeline(
                pool=pool,
                num_shards=num_shards,
                rejects_non_finite=config.non_finite == "reject",
                marks=self._marks,
                runtime_of=runtime_of,
            )
        # Of the first step after the last flush.
        self._changed_s: float | None = None
        self._last_flush_s = float("-inf")
        self._costs_s: deque[float] = deque(maxlen=_NUM_COSTS)
        self._generation = 0
        self._cut_at: int | None = None
        self._last_cut: DeviceCut | None = None

    @property
    def num_dirty_rows(self) -> int:
        """Rows that have changed, or have to be deleted, and are not in any flush.

        Of tables that are cut on a device only what is known without waiting for it: 0 means none.

        Thread: any.
        """
        num_rows = sum(source.table.dirty.count + source.table.deleted.num_pending for source in self._sources)
        return num_rows if self._device is None else num_rows + self._device.num_dirty_rows

    def count_dirty_rows(self) -> int:
        """Return what `num_dirty_rows` is about, counted: waits for the device."""
        return sum(source.table.dirty.count + source.table.deleted.num_pending for source in self._all_sources())

    def check_tables(self, tables: list[TappedTable], *, max_frame_bytes: int) -> None:
        """Check that tables can be added.

        Args:
            tables: Of one model.
            max_frame_bytes: Longest frame that every shard reads.

        Raises:
            ConfigError: One row of a table is too long for a frame or a staging buffer.
            UnsupportedModelError: Another model has a table of its name.
        """
        names = {source.format.spec.fqn for source in self._all_sources()}
        for source in map(self._gatherer, tables):
            fmt, row_bytes = source.format, source.longest_row_bytes
            if fmt.spec.fqn in names:
                raise UnsupportedModelError(
                    f"table {fmt.spec.fqn!r} of another model is streamed already: give one of them another name, or "
                    "put both models into one module"
                )
            if row_bytes > self._pool.buffer_bytes // 2:  # the other half may be deletions
                raise ConfigError(
                    f"staging_bytes: {self._config.staging_bytes} cannot hold two rows of table {fmt.spec.fqn!r}, "
                    f"{row_bytes} bytes each"
                )
            if row_bytes + fmt.overhead_bytes + _REST_BYTES > max_frame_bytes:
                raise ConfigError(
                    f"one row of table {fmt.spec.fqn!r} has {row_bytes} bytes, and the server's max_frame_bytes is "
                    f"{max_frame_bytes}: raise it there"
                )

    def add_tables(self, tables: list[TappedTable]) -> None:
        """Take tables in. REQUIRES: `check_tables` has found nothing wrong with them.

        Raises:
            ConfigError: A device has no room for staging buffers; nothing was taken in.
        """
        for table in tables:
            table.limit_bitmap(self._config.bitmap_bytes)
        sources = [self._gatherer(table) for table in tables]
        self._sources += sources if self._device is None else self._device.adopt(sources)
        self._cut_at = self._last_cut = None

    def mark_all(self, *, generation: int = 0) -> None:
        """Make every row of every table dirty, but those that were evicted and not used since.

        Args:
            generation: What later flushes carry as their `Flush.generation`; never falls.
        """
        for source in self._all_sources():
            source.table.mark_all(spares_evicted=True)
        self._generation = max(self._generation, generation)
        self._cut_at = self._last_cut = None

    def on_step(self, step: int) -> None:
        """Flush if a staging buffer is free, at the end of a training step.

        Args:
            step: Not below any step before.

        Raises:
            NonFiniteError: Under `non_finite="reject"`; nothing of the flush was sent and its rows stay dirty. Of rows
                that are cut on a device it is the step after, at which they are dirty again.
            UnavailableError: Under the policy `block`, after `block_timeout_s`, naming the shard that is behind.
        """
        now_s = self._monotonic_s()
        if self._changed_s is None:
            self._changed_s = now_s
        if self._device is not None:
            self._device.check_boundary()
            self._device.raise_failure(self._config.flush_timeout_s)
        if now_s - self._last_flush_s < self._interval_s():
            return
        buffer = self._pool.reserve()
        if buffer is None:
            if self._config.policy != "block":
                return
            buffer = self._pool.reserve(self._config.block_timeout_s)
            if buffer is None:
                raise UnavailableError(
                    f"step {step} has waited {format_seconds(self._config.block_timeout_s)} for a staging buffer: "
                    f"{self._describe_delay()}"
                )
        self._flush_into(buffer, step, now_s)

    def flush_all(self, step: int, timeout_s: float) -> None:
        """Hand over everything that is dirty now, and a mark of `step`.

        Args:
            step: Not below any step before.
            timeout_s: How long to wait for staging buffers, together.

        Raises:
            NonFiniteError: As from `on_step`.
            UnavailableError: No buffer became free in time, naming the shard that is behind.
        """
        deadline_s = self._monotonic_s() + timeout_s
        self.settle(timeout_s, raises=True)
        is_done = self._cut_at == step and self._is_clean
        while not is_done:
            buffer = self._pool.reserve() or self._pool.reserve(deadline_s - self._monotonic_s())
            if buffer is None:
                raise UnavailableError(
                    f"{self.num_dirty_rows} rows are not handed over, no staging buffer is free: "
                    f"{self._describe_delay()}"
                )
            self._flush_into(buffer, step, self._monotonic_s())
            self.settle(deadline_s - self._monotonic_s(), raises=True)
            # Exact, so nothing is dirty, though a captured graph may have the device's tables count as marked for ever.
            is_done = self._cut_at == step

    def settle(self, timeout_s: float, *, raises: bool = False) -> None:
        """Wait until no flush is on its way from the device; without one this does nothing.

        Args:
            timeout_s: How long.
            raises: Raise what has kept one from being sent; else the next step does.

        Raises:
            NonFiniteError: As from `on_step`.
            UnavailableError: The device is not done in time.
        """
        if self._device is None:
            return
        self._device.check_boundary()
        self._device.settle(timeout_s)
        if raises:
            self._device.raise_failure(timeout_s)
        self._sources += self._device.take_leavers()
        if self._last_cut is not None:
            self._cut_at = self._last_cut.exact_step

    def _all_sources(self) -> list[RowGatherer]:
        return self._sources if self._device is None else [*self._sources, *self._device.sources]

    @property
    def _is_clean(self) -> bool:
        """Whether nothing is dirty. REQUIRES: it is settled."""
        return self._is_host_clean and (self._device is None or not self._device.num_dirty_rows)

    @property
    def _is_host_clean(self) -> bool:
        return all(source.table.dirty.is_empty and not source.table.deleted.is_pending for source in self._sources)

    def _gatherer(self, table: TappedTable) -> RowGatherer:
        rejects = self._config.non_finite == "reject"
        return RowGatherer(table, num_shards=self._num_shards, rejects_non_finite=rejects)

    def _interval_s(self) -> float:
        """Return the least time from one flush to the next."""
        least_s = self._config.flush_interval_s
        if self._marks.is_sweeping or not self._costs_s or self._config.flush_percent == 100:
            # In a sweep more is dirty than a buffer holds: to hold it back would only make the backlog longer.
            return least_s
        # The median: one flush that the system has interrupted says nothing of the next one.
        cost_s = sorted(self._costs_s)[len(self._costs_s) // 2]
        return max(least_s, cost_s * 100 / self._config.flush_percent)

    def _flush_into(self, buffer: StagingBuffer, step: int, now_s: float) -> None:
        """Cut a flush and submit it; whatever fails, no row is forgotten and the buffer is free again."""
        taken = TakenRows()
        begin_s = self._monotonic_s()
        flush: Flush | None = None
        marked: Marked | None = None
        is_submitted = False
        try:
            with span("headrace.gather", step=step):
                flush, marked = self._cut(buffer, step, now_s, taken)
            self._pool.remove(buffer)
            self._submit(flush)
            is_submitted = True
            self._note_sent(flush, marked, taken, now_s)
        except BaseException as exc:
            # An interrupt may come when the flush has been taken already: its buffer is being sent then.
            if not is_submitted and (flush is None or self._withdraw(flush)):
                taken.give_back()
                if self._device is not None and taken.cut is not None:
                    self._device.take_back(taken.cut)
                self._pool.release(buffer)
            elif flush is not None:
                self._note_sent(flush, marked, taken, now_s)
            if not isinstance(exc, Exception) and flush is None and self._device is not None:
                # One that came amid the device's cut has left rows neither dirty nor taken, and nothing says which.
                for source in self._device.sources:
                    source.table.mark_all()
            raise
        self._costs_s.append(self._monotonic_s() - begin_s)

    def _cut(self, buffer: StagingBuffer, step: int, now_s: float, taken: TakenRows) -> tuple[Flush, Marked | None]:
        """Return the flush, and what it completes; None where that is told when the device's rows have come."""
        time_us = self._wall_ns() // 1000
        device = self._device if self._device is not None and self._device.is_active else None
        if device is not None:
            self._sources += device.take_leavers()
        for source in self._sources:
            source.table.limit_bitmap(self._config.bitmap_bytes)
        has_swept = self._take(buffer.free_bytes, taken)
        host = Half(is_clean=self._is_host_clean, has_wrapped=has_swept, began_at_start=self._cursor == (0, 0))
        tables: list[FlushedTable | FlushedDeletions] = []
        with torch.no_grad():
            for source, row_ids in taken.deleted.items():
                tables.append(source.deletions(row_ids.numpy(), buffer))
            for source, ids in taken.by_table():
                tables += source.gather(ids, buffer)
        changed_s = now_s if self._changed_s is None else self._changed_s
        marked = None
        if device is None:
            cut = Cut(step=step, time_us=time_us, now_s=now_s, changed_s=changed_s, halves=(host, NOTHING_CUT))
            marked = self._marks.judge(cut)
        else:
            # Last: nothing that the device takes has to be given back because the host's half has failed.
            taken.cut = device.cut(buffer, host=host, now_s=now_s, changed_s=changed_s, give_back=taken.give_back)
        flush = Flush(
            step=step,
            time_us=time_us,
            tables=tables,
            mark=marked.mark if marked else None,
            dirty_since_s=marked.dirty_since_s if marked else changed_s,
            num_rows=sum(table.bounds[-1] for table in tables),
            size_bytes=sum(table.bounds[-1] * table.row_bytes for table in tables),
            staging=buffer,
            generation=self._generation,
            pending=taken.cut,
        )
        return flush, marked

    def _take(self, free_bytes: int, taken: TakenRows) -> bool:
        """Take deletions and rows until the bytes are used up; return whether the running sweep is at its end."""
        free_bytes = self._take_deletions(free_bytes, taken)
        at, row = self._cursor
        last = len(self._sources)
        # From the cursor to the end, and then what has become dirty behind it.
        turns = [(number, 0 if number > at else row, False) for number in range(at, last)]
        turns += [(number, 0, True) for number in range(min(at + 1, last))]
        for number, first_row, is_behind in turns:
            source = self._sources[number]
            if source.table.dirty.is_empty:
                continue
            max_rows = source.rows_that_fit(free_bytes)
            row_ids = source.table.dirty.take(max_rows, first_row=first_row, note=partial(taken.add, source))
            if row_ids.numel():
                free_bytes -= source.bytes_of_rows(row_ids.numel())
                first_row = int(row_ids[-1]) + 1
            if row_ids.numel() == max_rows:
                taken.cursor = (number, first_row)
                return is_behind and not self._has_deletions
        return not self._has_deletions

    def _take_deletions(self, free_bytes: int, taken: TakenRows) -> int:
        """Take deletions, and return the bytes that are left for rows: at least half, if there are any."""
        least_left = 0 if all(source.table.dirty.is_empty for source in self._sources) else free_bytes // 2
        for source in self._sources:
            table = source.table
            if table.deleted.is_pending:
                max_rows = source.deletions_that_fit(free_bytes - least_left)
                note = partial(taken.deleted.__setitem__, source)
                taken.deleted[source] = row_ids = table.deleted.take(max_rows, table.dirty, note=note)
                if row_ids.numel():
                    free_bytes -= source.bytes_of_deletions(row_ids.numel())
                else:
                    del taken.deleted[source]
        return free_bytes

    @property
    def _has_deletions(self) -> bool:
        return any(source.table.deleted.is_pending for source in self._sources)

    def _note_sent(self, flush: Flush, marked: Marked | None, taken: TakenRows, now_s: float) -> None:
        """Note that a flush is submitted."""
        taken.note_sent()
        self._last_flush_s = now_s
        self._cursor = taken.cursor
        self._changed_s = None
        self._last_cut = taken.cut
        if marked is not None:
            self._marks.accept(marked)
            self._cut_at = flush.step if marked.mark and marked.mark.is_exact_cut else None
