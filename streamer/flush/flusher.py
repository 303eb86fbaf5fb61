"""The training thread's part of a flush: at a step boundary, take dirty rows, gather their values, and submit them."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from headrace.paramserver.system.text import format_seconds
from headrace.paramserver.system.tracing import span
from headrace.schemas.errors import ConfigError, UnavailableError, UnsupportedModelError
from headrace.streamer.config import StreamerConfig
from headrace.streamer.device.runtime import RuntimeOf, cuda_runtime
from headrace.streamer.flush.dense_copy import DenseCopy
from headrace.streamer.flush.dense_schedule import DenseSchedule, Readiness, Turn
from headrace.streamer.flush.device_pipeline import DeviceDrain, DevicePipeline
from headrace.streamer.flush.gather import RowGatherer
from headrace.streamer.flush.importance import ImportanceFilter
from headrace.streamer.flush.layout import Flush, FlushedDeletions, FlushedTable, TableFormat
from headrace.streamer.flush.pace import FlushPace
from headrace.streamer.flush.staging import StagingBuffer, StagingPool
from headrace.streamer.flush.step_marks import NO_REMAINDER, FlushOutcome, Judgment, Remainder, StepMarkPolicy
from headrace.streamer.taps.dense_tensors import DenseTensors, publishers
from headrace.streamer.taps.tapped_table import TappedTable
from headrace.streamer.world import SoloWorld, World

__all__ = ["Flusher", "TakenRows"]

# Upper bound for a message with one delta, without the delta.
_REST_BYTES = 4096


class _Dense(enum.Enum):
    # Whether a flush has the dense part.
    NO = enum.auto()
    IF_EXACT = enum.auto()  # with it, the flush is an exact cut
    YES = enum.auto()


class TakenRows:
    """The rows taken for one flush, which are given back if the flush fails.

    Attributes:
        deleted: Rows to be deleted, by table.
        cursor: Table and row at which the next flush continues.
        drain: The device part of the flush.
        has_dense: The flush has the dense part.
        on_give_back: Called after the rows were given back.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._parts_of: dict[RowGatherer, list[torch.Tensor]] = {}
        self.deleted: dict[RowGatherer, torch.Tensor] = {}
        self.cursor = (0, 0)
        self.drain: DeviceDrain | None = None
        self.has_dense = False
        self.on_give_back: Callable[[], None] = lambda: None

    def add(self, source: RowGatherer, row_ids: torch.Tensor) -> None:
        """Note rows of a table, int64[n], local, on the CPU; in any order, in one or several calls."""
        if row_ids.numel():
            self._parts_of.setdefault(source, []).append(row_ids)

    def hold_back(self, source: RowGatherer, row_ids: torch.Tensor, is_sent: torch.Tensor) -> torch.Tensor:
        """Have rows wait that were just added, int64[n], except those that are sent, bool[n]; return these."""
        assert source.filter is not None
        # All of them first: an interrupt between these statements loses none.
        source.filter.hold_back(row_ids)
        parts, sent, num_left = self._parts_of.get(source, []), row_ids[is_sent], row_ids.numel()
        while num_left:
            num_left -= parts.pop().numel()
        self.add(source, sent)
        source.filter.let_go(sent)
        return sent

    def by_table(self) -> Iterator[tuple[RowGatherer, npt.NDArray[np.int64]]]:
        """Yield each table with its local rows, unique and ascending."""
        for source, parts in self._parts_of.items():
            # A pass takes a table's end before its beginning, and a long table is taken in parts.
            yield source, parts[0].numpy() if len(parts) == 1 else np.sort(torch.cat(parts).numpy())

    def note_sent(self) -> None:
        """Note that the rows go out; evicted ones are in use again."""
        for source, parts in self._parts_of.items():
            for part in parts:
                source.table.deleted.note_sent(part)
                if source.filter is not None:
                    source.filter.note_sent(part)

    def give_back(self) -> None:
        """Make the rows dirty again, and the deletions pending."""
        for source, parts in self._parts_of.items():
            for part in parts:
                source.table.dirty.mark(part)
        for source, row_ids in self.deleted.items():
            source.table.deleted.give_back(row_ids)
        self.on_give_back()


class Flusher:
    """Takes flushes from tapped tables.

    A flush that leaves nothing dirty is an exact cut at its step. If the buffer is too small for all dirty rows, a
    flush pass begins: in the following steps each flush continues, table by table and by ascending row, where the last
    one ended. A row that becomes dirty behind that place waits for the next pass, so hot low rows do not starve high
    ones, and the dirty rows stay one set. When the pass reaches the end, everything that was dirty at its first step
    has gone out: that flush marks this step as complete, but not exact. See `StepMarkPolicy`.

    Of tables with a `send_share`, a flush holds back the rows that changed least, and completes no step while any wait.
    After `max_staleness_s`, and for `flush_all`, tables that were added, rows that a shard has lost and dense parts,
    a *release* begins: waiting rows become dirty, and nothing is held back until a flush has a mark.

    Dense tensors, if there are any, go out all together in one flush, from time to time. Other flushes then are no
    exact cuts, because the store has dense tensors of an earlier step.

    A `DevicePipeline` may drain tables on their device. Then a flush is complete, and has its mark, only when these
    rows have come. Thread: the training thread's.

    Attributes:
        dense: The dense tensors.
        pace: Says when a flush is due.
        dense_step: Step of the last dense part that was submitted; -1 before the first. Thread: any.
        last_step: Step of the last flush that was submitted; -1 before the first. No mark is of a later step.
        num_unstreamed: What is trained and not streamed, as shards are told; the caller sets it.
    """

    def __init__(
        self,
        *,
        config: StreamerConfig,
        num_shards: int,
        pool: StagingPool,
        submit: Callable[[Flush], None],
        describe_delay: Callable[[], str],
        pace: FlushPace | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
        withdraw: Callable[[Flush], bool] | None = None,
        runtime_of: RuntimeOf = cuda_runtime,
        world: World | None = None,
        writer: str = "",
    ) -> None:
        """Begin without tables.

        Args:
            config: The streamer's settings.
            num_shards: Shards of the store.
            pool: Source of buffers; `submit` takes them over with the flush.
            submit: Takes a flush and its buffer, both or neither; never blocks.
            describe_delay: Says which shard is behind, for errors.
            pace: Says when a flush is due; None for one by the settings that knows of no other thread's cost.
            monotonic_s: Clock for intervals.
            withdraw: Takes back a flush whose `submit` was interrupted; returns False if it is on its way already.
                None if a `submit` that raises has never taken it.
            runtime_of: Returns a device's runtime, see `DevicePipeline`.
            world: The ranks that publish dense tensors together; None for one rank.
            writer: Names the run and its epoch among all that these ranks may do.
        """
        self._config, self._num_shards, self._pool = config, num_shards, pool
        self._submit, self._describe_delay = submit, describe_delay
        self._withdraw = withdraw or (lambda flush: True)
        self._monotonic_s, self._writer = monotonic_s, writer
        self._sources: list[RowGatherer] = []
        # Table and row at which the next flush begins; (0, 0) outside of a pass.
        self._cursor = (0, 0)
        self._marks = StepMarkPolicy()
        self._device: DevicePipeline | None = None
        rejects_non_finite = config.non_finite == "reject"
        has_pipeline = torch.version.hip is None if config.device_pipeline is None else config.device_pipeline
        if has_pipeline:
            self._device = DevicePipeline(pool, num_shards, rejects_non_finite, self._marks, runtime_of)
        self._world = SoloWorld() if world is None else world
        self._schedule = DenseSchedule(self._world)
        self.dense = DenseCopy(num_shards, rejects_non_finite=rejects_non_finite, monotonic_s=monotonic_s)
        # The last dense part was in no exact cut; and its drain, while that is not known.
        self._owes_dense = False
        self._dense_drain: DeviceDrain | None = None
        self.pace = FlushPace.of(config) if pace is None else pace
        # Time of the first step after the last flush.
        self._changed_s: float | None = None
        # Number of marks after which all rows of a table that was added or marked whole have gone out.
        self._urgent_until = 0
        # Of the oldest change that waits, the time at which it was made; and the number of marks after which all that
        # waited when the last release began has gone out.
        self._waiting_since_s: float | None = None
        self._release_until = 0
        self._num_losses = 0
        self._restarts = False  # a running pass begins anew with the next flush
        # Step of the last flush if it was an exact cut and no table was added or marked since.
        self._exact_step: int | None = None
        self._last_drain: DeviceDrain | None = None
        self.dense_step = self.last_step = -1
        self.num_unstreamed = 0

    @property
    def num_dirty_rows(self) -> int:
        """Rows that have changed, or have to be deleted, and are in no flush.

        For tables on a device this is what is known without waiting; 0 means none. Thread: any.
        """
        num_rows = sum(source.table.dirty.count + source.table.deleted.num_pending for source in self._sources)
        return num_rows if self._device is None else num_rows + self._device.num_dirty_rows

    @property
    def num_waiting_rows(self) -> int:
        """Rows that were dirty at a flush and wait; those that have changed since are dirty too. Thread: any."""
        return sum(source.filter.num_waiting for source in self._sources if source.filter is not None)

    def count_dirty_rows(self) -> int:
        """Return `num_dirty_rows` exactly; waits for the device."""
        return sum(source.table.dirty.count + source.table.deleted.num_pending for source in self._all_sources())

    def check_tables(self, tables: list[TappedTable], *, max_frame_bytes: int) -> None:
        """Check that tables of one model can be added, if every shard reads frames of `max_frame_bytes`.

        Raises:
            ConfigError: One row of a table is too long for a frame or a staging buffer.
            UnsupportedModelError: Another model has a table of the same name.
        """
        names = self._names()
        for source in map(self._gatherer, tables):
            fmt, row_bytes = source.format, source.longest_row_bytes
            _check_format(fmt, row_bytes, names, max_frame_bytes)
            if row_bytes > self._pool.buffer_bytes // 2:  # deletions may take the other half
                raise ConfigError(
                    f"staging_bytes: {self._config.staging_bytes} cannot hold two rows of table {fmt.spec.fqn!r}, "
                    f"{row_bytes} bytes each: set it to {2 * row_bytes} or more"
                )

    def check_dense(self, tensors: DenseTensors, *, max_frame_bytes: int) -> None:
        """Check that dense tensors of one model can be added; raise as `check_tables`."""
        names = self._names()
        for each in tensors.all:
            fmt = TableFormat(each.spec, each.spec.whole)
            _check_format(fmt, fmt.row_bytes, names, max_frame_bytes)

    def _names(self) -> set[str]:
        return self.dense.names.union(source.format.spec.fqn for source in self._all_sources())

    def add_dense(self, tensors: DenseTensors) -> None:
        """Add the dense tensors of a model, of which this rank publishes its share. REQUIRES: as `add_tables`."""
        ranks = publishers(tensors.all, self._world.size)
        self.dense.add(
            tensors, [each for each, rank in zip(tensors.all, ranks, strict=True) if rank == self._world.rank]
        )
        self._schedule.begin_anew()
        self._exact_step = self._last_drain = None

    def add_tables(self, tables: list[TappedTable]) -> None:
        """Add tables. REQUIRES: `check_tables` accepted them.

        Raises:
            ConfigError: A device has no room for staging buffers; no table was added.
        """
        for table in tables:
            table.limit_bitmap(self._config.bitmap_bytes)
        sources = [self._gatherer(table) for table in tables]
        for source in sources:
            source.filter = None if source.table.waiting is None else ImportanceFilter(source.table)
        self._sources += sources if self._device is None else self._device.adopt(sources)
        self._exact_step = self._last_drain = None
        self._make_urgent()

    def mark_all(self, tables: Iterable[TappedTable] | None = None, *, num_losses: int = 0) -> None:
        """Mark every row of some tables, or of all, except those that were evicted and not used since.

        Later flushes carry `num_losses`, which never falls.
        """
        for table in [source.table for source in self._all_sources()] if tables is None else tables:
            table.mark_all(spares_evicted=True)
        self._begin_resending(num_losses)

    def mark_shards(self, shards: Collection[int], *, num_losses: int) -> None:
        """Mark every row that lives on some shards, and delete evicted ones there again; see `mark_all`.

        It costs a hash of each row id.
        """
        for source in self._all_sources():
            source.table.mark_shards(shards, self._num_shards)
        self._begin_resending(num_losses)

    def mark_again(self, rows: Iterable[tuple[TableFormat, npt.NDArray[np.int64]]], *, num_losses: int) -> None:
        """Have rows of a flush that was dropped go out by their present state, and the dense part; see `mark_all`.

        They are given by the formats and global ids that the flush had.
        """
        tables = {source.format: source.table for source in self._all_sources()}
        for fmt, row_ids in rows:
            if not fmt.spec.is_dense:
                table = tables[fmt]
                table.mark_again(torch.from_numpy(row_ids) - table.row_offset)
        self._begin_resending(num_losses)

    def change_shards(self, num_shards: int, *, num_losses: int) -> None:
        """Make later flushes for another server, with so many shards; they carry `num_losses`. Between two flushes.

        Raises:
            UnavailableError: An earlier flush is not done with in time; repeat the call before the next flush.
            ConfigError: As `add_tables`; repeat it, too.
        """
        timeout_s = self._config.flush_timeout_s
        self.settle(timeout_s)
        self._wait_for_dense(self._monotonic_s() + timeout_s)
        self._num_shards = num_shards
        for source in self._all_sources():
            source.num_shards = num_shards
        if self._device is not None:
            self._device.change_shards(num_shards)
        self.dense.change_shards(num_shards)
        self._begin_resending(num_losses)

    def _begin_resending(self, num_losses: int) -> None:
        self._num_losses = max(self._num_losses, num_losses)
        # A pass that runs would end without the rows before its cursor, and its mark would be false.
        self._restarts = True
        self._exact_step = self._last_drain = None
        self._make_urgent()
        self._schedule.make_due()

    def _make_urgent(self) -> None:
        """Flush without regard to cost until what is dirty, or about to be marked, has gone out."""
        self._urgent_until = self._next_mark

    @property
    def _next_mark(self) -> int:
        """Number of marks after which what is dirty now has gone out. The next one may be of an earlier drain."""
        return self._marks.num_complete + 1 + (self._device is not None and self._device.is_active)

    def on_step(self, step: int) -> None:
        """Flush at the end of a training step if a staging buffer is free. Steps never decrease.

        Raises:
            NonFiniteError: Under `non_finite="reject"`; nothing of the flush was sent and its rows stay dirty. For rows
                drained on a device it comes a step later, when they are dirty again.
            UnavailableError: Under the policy `block`, after `block_timeout_s`, naming the shard that is behind.
        """
        now_s = self._monotonic_s()
        if self._changed_s is None:
            self._changed_s = now_s
        if self._device is not None:
            self._device.check_boundary()
            self._device.raise_failure(self._config.flush_timeout_s)
        turn = self._dense_turn(step, now_s)
        is_urgent = self._marks.num_complete < self._urgent_until
        is_behind = self._is_release_due(step, now_s) or self._marks.is_in_pass or self._cursor != (0, 0)
        is_due = self.pace.is_due(step, now_s, self._changed_s, is_behind=is_behind, is_urgent=is_urgent)
        if turn is Turn.WAIT or (turn is Turn.NOT_DUE and not is_due):
            return
        buffer = self._reserve(step)
        if buffer is None:
            return
        dense = _Dense.IF_EXACT if self._owes_dense and not self._schedule.is_agreed else _Dense.NO
        if turn is Turn.DUE:
            # Before any row is taken: whatever fails here, the other ranks wait for what DTensors exchange.
            self.dense.capture()
            dense = _Dense.YES
            # Or few steps, of several ranks none, would have both dense tensors and all rows: a replica by step keeps a
            # few dense parts, until a mark shows which of them belongs to its rows.
            self._release_until = self._next_mark
        with self.pace.counting(is_urgent=is_urgent):
            self._flush_into(buffer, step, now_s, dense)

    def _is_release_due(self, step: int, now_s: float) -> bool:
        """Return whether a release is to go on, or to begin because the first row has waited long enough."""
        since_s = self._waiting_since_s
        if since_s is not None and self.pace.is_release_due(step, now_s, since_s, self._config.max_staleness_s):
            self._release_until = self._next_mark
        return self._marks.num_complete < self._release_until

    def pass_step(self, step: int) -> None:
        """End a step without a flush, because streaming is paused or has ended; other ranks are told."""
        if self._changed_s is None:
            self._changed_s = self._monotonic_s()
        if self.dense.is_attached and self._schedule.is_agreed:
            now_s, interval_s = self._monotonic_s(), self._dense_interval_s()
            if self._schedule.is_asked(step, now_s, interval_s):
                self._schedule.turn(step, now_s, interval_s, Readiness.IS_ABSENT)

    def _dense_turn(self, step: int, now_s: float) -> Turn:
        self.dense.is_current = False
        if self._dense_drain is not None and self._dense_drain.is_judged:
            self._owes_dense = self._dense_drain.exact_step is None
            self._dense_drain = None
        interval_s = self._dense_interval_s()
        if not self.dense.is_attached or not self._schedule.is_asked(step, now_s, interval_s):
            return Turn.NOT_DUE
        readiness = Readiness.IS_READY if self.dense.is_free else Readiness.IS_ABSENT
        if readiness is Readiness.IS_READY and self._reserve(step) is None:
            readiness = Readiness.LACKS_BUFFER
        return self._schedule.turn(step, now_s, interval_s, readiness)

    def _reserve(self, step: int) -> StagingBuffer | None:
        """Return a staging buffer for a step's flush, under `block` as soon as there is one; else None without one."""
        buffer = self._pool.reserve()
        if buffer is None and self._config.policy == "block":
            buffer = self._pool.reserve(self._config.block_timeout_s)
            if buffer is None:
                raise UnavailableError(
                    f"step {step} has waited {format_seconds(self._config.block_timeout_s)} for a staging buffer: "
                    f"{self._describe_delay()}"
                )
        return buffer

    def flush_all(self, step: int, timeout_s: float, *, is_repeated: bool = False, is_recorded: bool = False) -> None:
        """Submit everything that is dirty now, all dense tensors, and a mark of `step`, which is not below any before.

        The timeout is for all staging buffers together. With `is_repeated`, nothing has changed since the last call,
        and DTensors are not read again. If there are any, all ranks call it. With `is_recorded`, the mark says that
        there is a recording of the step; it goes out even if the step has an exact one already.

        Raises:
            NonFiniteError: As from `on_step`.
            UnavailableError: No buffer became free in time, naming the shard that is behind; or a rank did not come.
        """
        deadline_s = self._monotonic_s() + timeout_s
        self.settle(timeout_s, raises=True)
        has_dense = self.dense.is_attached
        if has_dense and not (is_repeated and self.dense.is_current):
            self._capture_dense(f"{'record' if is_recorded else 'flush'}() at step {step}", deadline_s)
        is_done = not has_dense and self._exact_step == step and self._is_clean and not is_recorded
        while not is_done:
            self._release_until = self._next_mark  # each time: one may be the mark of a pass that began before
            if has_dense:
                self._wait_for_dense(deadline_s)
            buffer = self._pool.reserve() or self._pool.reserve(deadline_s - self._monotonic_s())
            if buffer is None:
                raise UnavailableError(
                    f"{self.num_dirty_rows} rows are not handed over, no staging buffer is free: "
                    f"{self._describe_delay()}"
                )
            with self.pace.counting(is_urgent=True):
                dense = _Dense.IF_EXACT if has_dense else _Dense.NO
                self._flush_into(buffer, step, self._monotonic_s(), dense, is_recorded=is_recorded)
            self.settle(deadline_s - self._monotonic_s(), raises=True)
            # An exact cut leaves nothing dirty. `_is_clean` could stay false: with a captured graph, the device's
            # tables always count as marked.
            is_done = self._exact_step == step

    def _capture_dense(self, call: str, deadline_s: float) -> None:
        self._wait_for_dense(deadline_s)
        if self.dense.is_sharded:
            # Reading DTensors has no deadline, and would take part in whatever the other ranks exchange meanwhile.
            self._world.meet(f"{call} of {self._writer}", deadline_s - self._monotonic_s())
        self.dense.capture()

    def _wait_for_dense(self, deadline_s: float) -> None:
        if not self._pool.wait_until(lambda: self.dense.is_free, deadline_s - self._monotonic_s()):
            raise UnavailableError(f"earlier dense parameters are on their way: {self._describe_delay()}")

    def settle(self, timeout_s: float, *, raises: bool = False) -> None:
        """Wait until no flush is on its way from the device, if there is one.

        Why a flush was not sent is raised here with `raises`, else by the next step.

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
        if self._last_drain is not None:
            self._exact_step = self._last_drain.exact_step

    def _all_sources(self) -> list[RowGatherer]:
        return self._sources if self._device is None else [*self._sources, *self._device.sources]

    @property
    def _is_clean(self) -> bool:
        # REQUIRES: it is settled.
        return self._is_host_clean and (self._device is None or not self._device.num_dirty_rows)

    @property
    def _is_host_clean(self) -> bool:
        return (
            not self._has_deletions
            and not self._has_waiting
            and all(source.table.dirty.is_empty for source in self._sources)
        )

    @property
    def _has_waiting(self) -> bool:
        return any(source.filter is not None and not source.filter.is_empty for source in self._sources)

    def _release(self) -> None:
        for source in self._sources:
            if source.filter is not None:
                source.filter.release()

    @property
    def _has_deletions(self) -> bool:
        return any(source.table.deleted.is_pending for source in self._sources)

    def _gatherer(self, table: TappedTable) -> RowGatherer:
        rejects = self._config.non_finite == "reject"
        return RowGatherer(table, num_shards=self._num_shards, rejects_non_finite=rejects)

    def _dense_interval_s(self) -> float:
        percent, cost_s = self._config.max_cost_percent, self.dense.cost_s
        by_cost_s = cost_s * 100 / percent if percent < 100 else 0.0
        return max(self._config.dense_interval_s, self._config.flush_interval_s, by_cost_s)

    def _flush_into(
        self,
        buffer: StagingBuffer,
        step: int,
        now_s: float,
        dense: _Dense,
        *,
        is_recorded: bool = False,
    ) -> None:
        """Make and submit a flush; whatever fails, no row is lost and the buffer becomes free again."""
        taken = TakenRows()
        flush: Flush | None = None
        judgment: Judgment | None = None
        is_submitted = False
        try:
            with span("headrace.gather", step=step):
                flush, judgment = self._make_flush(buffer, step, now_s, taken, dense, is_recorded=is_recorded)
            self._pool.remove(buffer)
            self._submit(flush)
            is_submitted = True
            self._note_sent(flush, judgment, taken, now_s)
        except BaseException as exc:
            # An interrupt may come after the flush was taken: then its buffer is being sent.
            if not is_submitted and (flush is None or self._withdraw(flush)):
                taken.give_back()
                if self._device is not None and taken.drain is not None:
                    self._device.take_back(taken.drain)
                self._pool.release(buffer)
            elif flush is not None:
                self._note_sent(flush, judgment, taken, now_s)
            if not isinstance(exc, Exception) and flush is None and self._device is not None:
                # An interrupt amid the device's drain may leave rows neither dirty nor taken, and nothing says which.
                for source in self._device.sources:
                    source.table.mark_all()
            raise

    def _make_flush(
        self,
        buffer: StagingBuffer,
        step: int,
        now_s: float,
        taken: TakenRows,
        dense: _Dense,
        *,
        is_recorded: bool,
    ) -> tuple[Flush, Judgment | None]:
        """Return the flush and its judgment; None if that comes with the device part."""
        time_us = time.time_ns() // 1000
        device = self._device if self._device is not None and self._device.is_active else None
        if device is not None:
            self._sources += device.take_leavers()
        for source in self._sources:
            source.table.limit_bitmap(self._config.bitmap_bytes)
        changed_s = now_s if self._changed_s is None else self._changed_s
        holds_back = self._marks.num_complete >= max(self._release_until, self._urgent_until)
        if not holds_back:
            self._release()
        has_wrapped = self._take(buffer.free_bytes, taken, holds_back=holds_back)
        host = Remainder(is_clean=self._is_host_clean, has_wrapped=has_wrapped, began_at_start=self._cursor == (0, 0))
        tables: list[FlushedTable | FlushedDeletions] = []
        with torch.no_grad():
            for source, row_ids in taken.deleted.items():
                tables.append(source.deletions(row_ids.numpy(), buffer))
            for source, ids in taken.by_table():
                tables += source.gather(ids, buffer)
        # A device's remainder is not known yet; in a pass it may not be the last flush.
        seems_exact = host.is_clean and (device is None or not self._marks.is_in_pass)
        if dense is _Dense.YES or (dense is _Dense.IF_EXACT and self.dense.is_free and seems_exact):
            if not self.dense.is_current:
                with self.pace.apart():
                    self.dense.capture()
            taken.has_dense, taken.on_give_back = True, self._schedule.make_due
            tables += self.dense.lend(buffer)
        outcome = FlushOutcome(
            step=step,
            time_us=time_us,
            now_s=now_s,
            changed_s=changed_s,
            remainders=(host, NO_REMAINDER),
            restarts=self._restarts,
            holds_back=self._has_waiting,
            lacks_dense=self.dense.is_attached and not taken.has_dense,
            is_recorded=is_recorded,
        )
        judgment = None
        if device is None:
            judgment = self._marks.judge(outcome)
        else:
            # Last, so that a failure of the host part does not have to give back what the device has taken.
            taken.drain = device.drain(buffer, outcome, taken.give_back)
        dirty_since_s = judgment.dirty_since_s if judgment else outcome.changed_s
        flush = Flush(
            step=step,
            time_us=time_us,
            tables=tables,
            mark=judgment.mark if judgment else None,
            dirty_since_s=dirty_since_s,
            oldest_us=outcome.wall_us(dirty_since_s),
            num_rows=sum(table.bounds[-1] for table in tables),
            size_bytes=sum(table.bounds[-1] * table.row_bytes for table in tables),
            staging=buffer,
            num_losses=self._num_losses,
            pending=taken.drain,
            cost_percent=self.pace.cost_percent,
            is_cost_bound=self.pace.has_waited,
            num_unstreamed=self.num_unstreamed,
        )
        return flush, judgment

    def _take(self, free_bytes: int, taken: TakenRows, *, holds_back: bool) -> bool:
        """Take deletions and rows until the bytes are used up; return whether the running pass reached its end.

        With `holds_back`, rows wait that a table's filter takes for less important.
        """
        free_bytes = self._take_deletions(free_bytes, taken)
        at, row = self._cursor
        last = len(self._sources)
        # From the cursor to the end, then what became dirty behind it.
        turns = [(number, 0 if number > at else row, False) for number in range(at, last)]
        turns += [(number, 0, True) for number in range(min(at + 1, last))]
        for number, first_row, is_behind in turns:
            source = self._sources[number]
            if source.table.dirty.is_empty:
                continue
            least_bytes, is_full = free_bytes // 2, False
            while not is_full:
                max_rows = source.rows_that_fit(free_bytes)
                row_ids = source.table.dirty.take(max_rows, first_row=first_row, note=partial(taken.add, source))
                num_taken = row_ids.numel()
                if num_taken:
                    first_row = int(row_ids[-1]) + 1
                    if holds_back and source.filter is not None:
                        if self._waiting_since_s is None:  # before any row waits, in case this flush is interrupted
                            self._waiting_since_s = self._changed_s
                        row_ids = taken.hold_back(source, row_ids, source.filter.important(row_ids))
                    free_bytes -= source.bytes_of_rows(row_ids.numel())
                if num_taken < max_rows:
                    break
                # Rows that wait leave room for others, until looking for these would find few.
                is_full = free_bytes < least_bytes or row_ids.numel() == num_taken
            if is_full:
                taken.cursor = (number, first_row)
                return is_behind and not self._has_deletions
        return not self._has_deletions

    def _take_deletions(self, free_bytes: int, taken: TakenRows) -> int:
        """Take deletions, and return the bytes left for rows: at least half, if any row is dirty."""
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

    def _note_sent(self, flush: Flush, judgment: Judgment | None, taken: TakenRows, now_s: float) -> None:
        taken.note_sent()
        self._restarts = False
        if not self._has_waiting:
            self._waiting_since_s = None
        self.pace.note_sent(now_s)
        self.last_step = flush.step
        self._cursor = taken.cursor
        self._changed_s = None
        self._last_drain = taken.drain
        if taken.has_dense:
            self._schedule.note_sent(now_s)
            self.dense_step, self._dense_drain = flush.step, taken.drain
            self._owes_dense = judgment is not None and not (judgment.mark and judgment.mark.is_exact_cut)
        if judgment is not None:
            self._marks.accept(judgment)
            self._exact_step = flush.step if judgment.mark and judgment.mark.is_exact_cut else None


def _check_format(fmt: TableFormat, row_bytes: int, names: set[str], max_frame_bytes: int) -> None:
    """Refuse a table or dense tensor whose name is taken, or whose rows are too long for a frame."""
    what = f"{'dense tensor' if fmt.spec.is_dense else 'table'} {fmt.spec.fqn!r}"
    if fmt.spec.fqn in names:
        raise UnsupportedModelError(
            f"{what} of another model is streamed already: give one of them another name, or put both models into one "
            "module"
        )
    if row_bytes + fmt.overhead_bytes + _REST_BYTES > max_frame_bytes:
        raise ConfigError(
            f"one row of {what} has {row_bytes} bytes, and the server's max_frame_bytes is {max_frame_bytes}: raise it "
            "there"
        )
