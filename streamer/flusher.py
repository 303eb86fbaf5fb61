"""The training thread's half: at a step boundary, take what is dirty, gather its values, and hand them over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.dirty_rows import DirtyRows
from headrace.schemas.errors import ConfigError, NonFiniteError, UnavailableError, UnsupportedModelError
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.tables import DType
from headrace.streamer.config import StreamerConfig
from headrace.streamer.flush import Column, Flush, FlushedTable, StepMark, TableFormat
from headrace.streamer.staging import ALIGNMENT_BYTES, TORCH_DTYPES, StagingBuffer, StagingPool
from headrace.streamer.tapped_table import TappedTable

__all__ = ["Flusher"]

_Ids = npt.NDArray[np.int64]

# Flushes whose time on the training thread decides when the next one is due.
_NUM_COSTS = 5


class _Source:
    """A tapped table with what a flush needs to know of it, computed once."""

    def __init__(self, table: TappedTable) -> None:
        self.table = table
        self.format = TableFormat(table.spec, table.shard)
        self.seed = table_seed(table.spec.fqn)
        # Rows that were dirty when the running sweep began and have not been sent; None outside of a sweep.
        self.backlog: DirtyRows | None = None

    @property
    def num_dirty_rows(self) -> int:
        return self.table.dirty.count + (self.backlog.count if self.backlog else 0)

    @property
    def is_clean(self) -> bool:
        return self.table.dirty.is_empty and (self.backlog is None or self.backlog.is_empty)

    def rows_that_fit(self, free_bytes: int) -> int:
        return max(0, free_bytes - self.format.num_columns * ALIGNMENT_BYTES) // self.format.row_bytes

    def set_aside(self) -> None:
        """Make what is dirty now the backlog; later changes are another set.

        Taking lowest rows first out of one set would starve the high rows of a table whose low rows are hot.
        """
        if not self.table.dirty.is_empty:
            self.backlog, self.table.dirty = self.table.dirty, DirtyRows(self.table.num_local_rows)


class _Taken:
    """Rows taken for one flush: gives them back if the flush comes to nothing."""

    def __init__(self) -> None:
        self._parts_of: dict[_Source, list[torch.Tensor]] = {}

    def add(self, source: _Source, row_ids: torch.Tensor) -> None:
        self._parts_of.setdefault(source, []).append(row_ids)

    def by_table(self) -> Iterator[tuple[_Source, _Ids]]:
        """Yield each table with its local rows, unique and ascending."""
        for source, parts in self._parts_of.items():
            # A row of the backlog may have changed again: once is enough, with its present value.
            ids = parts[0].numpy() if len(parts) == 1 else np.unique(np.concatenate([part.numpy() for part in parts]))
            yield source, ids

    def give_back(self) -> None:
        for source, parts in self._parts_of.items():
            for part in parts:
                (source.table.dirty if source.backlog is None else source.backlog).mark(part)


class Flusher:
    """Cuts flushes out of tapped tables.

    A flush that leaves nothing dirty is an exact cut at its step. When the buffer is too small for all that is dirty, a
    *sweep* begins: the rows dirty at that step go out in parts over the following steps, before any row that becomes
    dirty meanwhile; its last part marks the step at which it began, as complete but not exact.

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
        """
        self._config, self._num_shards, self._pool = config, num_shards, pool
        self._submit, self._describe_delay = submit, describe_delay
        self._monotonic_s, self._wall_ns = monotonic_s, wall_ns
        self._sources: list[_Source] = []
        self._sweep_mark: StepMark | None = None
        self._sweep_began_s = 0.0
        self._dirty_since_s: float | None = None
        self._last_flush_s = float("-inf")
        self._costs_s: deque[float] = deque(maxlen=_NUM_COSTS)
        self._generation = 0
        self._cut_at: int | None = None

    @property
    def num_dirty_rows(self) -> int:
        """Rows that have changed and are not in any flush."""
        return sum(source.num_dirty_rows for source in self._sources)

    def check_tables(self, tables: list[TappedTable], *, max_frame_bytes: int) -> None:
        """Check that tables can be added.

        Args:
            tables: Of one model.
            max_frame_bytes: Longest frame that every shard reads.

        Raises:
            ConfigError: One row of a table is too long for a frame or a staging buffer.
            UnsupportedModelError: Another model has a table of its name.
        """
        names = {source.format.spec.fqn for source in self._sources}
        for source in [_Source(table) for table in tables]:
            fmt = source.format
            if fmt.spec.fqn in names:
                raise UnsupportedModelError(
                    f"table {fmt.spec.fqn!r} of another model is streamed already: give one of them another name, or "
                    "put both models into one module"
                )
            if not source.rows_that_fit(self._pool.buffer_bytes):
                raise ConfigError(
                    f"staging_bytes: {self._config.staging_bytes} cannot hold one row of table {fmt.spec.fqn!r}, "
                    f"{fmt.row_bytes} bytes"
                )
            if (
                fmt.row_bytes + fmt.overhead_bytes + 4096 > max_frame_bytes
            ):  # 4096: the rest of a message, names and all
                raise ConfigError(
                    f"one row of table {fmt.spec.fqn!r} has {fmt.row_bytes} bytes, and the server's max_frame_bytes is "
                    f"{max_frame_bytes}: raise it there"
                )

    def add_tables(self, tables: list[TappedTable]) -> None:
        """Take tables in. REQUIRES: `check_tables` has found nothing wrong with them."""
        self._sources += [_Source(table) for table in tables]
        self._cut_at = None

    def mark_all(self, *, generation: int = 0) -> None:
        """Make every row of every table dirty.

        Args:
            generation: What later flushes carry as their `Flush.generation`; never falls.
        """
        for source in self._sources:
            source.table.dirty.mark_all()
        self._generation = max(self._generation, generation)
        self._cut_at = None

    def on_step(self, step: int) -> None:
        """Flush if a staging buffer is free, at the end of a training step.

        Args:
            step: Not below any step before.

        Raises:
            NonFiniteError: Under `non_finite="reject"`; nothing of the flush was sent and its rows stay dirty.
            UnavailableError: Under the policy `block`, after `block_timeout_s`, naming the shard that is behind.
        """
        now_s = self._monotonic_s()
        if self._dirty_since_s is None:
            self._dirty_since_s = now_s
        if now_s - self._last_flush_s < self._interval_s():
            return
        buffer = self._pool.acquire()
        if buffer is None:
            if self._config.policy != "block":
                return
            buffer = self._pool.acquire(self._config.block_timeout_s)
            if buffer is None:
                raise UnavailableError(
                    f"step {step} has waited {self._config.block_timeout_s:g} s for a staging buffer: "
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
        while self._cut_at != step or not self._is_clean:
            buffer = self._pool.acquire() or self._pool.acquire(deadline_s - self._monotonic_s())
            if buffer is None:
                raise UnavailableError(
                    f"{self.num_dirty_rows} rows are not handed over, no staging buffer is free: "
                    f"{self._describe_delay()}"
                )
            self._flush_into(buffer, step, self._monotonic_s())

    @property
    def _is_clean(self) -> bool:
        return all(source.is_clean for source in self._sources)

    def _interval_s(self) -> float:
        """Return the least time from one flush to the next."""
        least_s = self._config.flush_interval_s
        if self._sweep_mark is not None or not self._costs_s or self._config.flush_percent == 100:
            # In a sweep more is dirty than a buffer holds: to hold it back would only make the backlog longer.
            return least_s
        # The median: one flush that the system has interrupted says nothing of the next one.
        cost_s = sorted(self._costs_s)[len(self._costs_s) // 2]
        return max(least_s, cost_s * 100 / self._config.flush_percent)

    def _flush_into(self, buffer: StagingBuffer, step: int, now_s: float) -> None:
        """Cut a flush and submit it; whatever fails, no row is forgotten and the buffer is free again."""
        taken = _Taken()
        begin_s = self._monotonic_s()
        try:
            flush = self._cut(buffer, step, now_s, taken)
            self._submit(flush)
        except BaseException:
            taken.give_back()
            self._pool.release(buffer)
            raise
        self._settle(flush, now_s)
        self._costs_s.append(self._monotonic_s() - begin_s)

    def _cut(self, buffer: StagingBuffer, step: int, now_s: float, taken: _Taken) -> Flush:
        time_us = self._wall_ns() // 1000
        has_swept = self._take(buffer.free_bytes, taken)
        is_exact = self._is_clean
        with torch.no_grad():
            tables = [self._gather(source, ids, buffer) for source, ids in taken.by_table()]
        mark = StepMark(step, time_us, True) if is_exact else self._sweep_mark if has_swept else None
        return Flush(
            step=step,
            time_us=time_us,
            tables=tables,
            mark=mark,
            dirty_since_s=now_s if self._dirty_since_s is None else self._dirty_since_s,
            num_rows=sum(table.bounds[-1] for table in tables),
            size_bytes=sum(table.bounds[-1] * table.format.row_bytes for table in tables),
            staging=buffer,
            generation=self._generation,
        )

    def _take(self, free_bytes: int, taken: _Taken) -> bool:
        """Take rows until the bytes are used up; return whether all of the backlog is taken."""
        for is_backlog in (True, False):
            for source in self._sources:
                dirty = source.backlog if is_backlog else source.table.dirty
                if dirty is None or dirty.is_empty:
                    continue
                row_ids = dirty.take(source.rows_that_fit(free_bytes))
                if row_ids.numel():
                    taken.add(source, row_ids)
                    free_bytes -= row_ids.numel() * source.format.row_bytes
                    free_bytes -= source.format.num_columns * ALIGNMENT_BYTES
                if not dirty.is_empty:
                    return not is_backlog
        return True

    def _settle(self, flush: Flush, now_s: float) -> None:
        """Note what a submitted flush has left; begin a sweep when it did not hold all that was dirty."""
        self._last_flush_s = now_s
        self._cut_at = flush.step if flush.mark and flush.mark.is_exact_cut else None
        if flush.mark is None and self._sweep_mark is not None:
            return  # the sweep goes on
        self._sweep_mark = None
        for source in self._sources:
            source.backlog = None
        if self._cut_at is None:
            self._sweep_mark = StepMark(flush.step, flush.time_us, False)
            for source in self._sources:
                source.set_aside()
            if flush.mark is not None:
                # A sweep has ended: what is left became dirty after it had begun.
                self._dirty_since_s = self._sweep_began_s
            self._sweep_began_s = now_s
        else:
            self._dirty_since_s = None

    def _gather(self, source: _Source, local_ids: _Ids, buffer: StagingBuffer) -> FlushedTable:
        """Copy rows into the buffer, ordered by shard and within it by id."""
        fmt, table = source.format, source.table
        local_ids, bounds = self._route(source, local_ids)
        num_rows, ids = local_ids.size, torch.from_numpy(local_ids)
        row_ids = buffer.carve(DType.INT64, num_rows, 1)
        torch.add(ids, table.row_offset, out=row_ids.tensor.view(-1))
        weights = buffer.carve(fmt.spec.dtype, num_rows, fmt.shard.width)
        _gather_rows(table.weights(), ids, weights.tensor)
        self._check_finite(fmt, "weights", weights.tensor, row_ids.tensor)
        columns = [Column(row_ids.data, 8), Column(weights.data, fmt.shard.width * fmt.spec.dtype.size_bytes)]
        live_states = table.states() if fmt.states else {}
        for state, width in fmt.states:
            carved = buffer.carve(state.dtype, num_rows, width)
            _gather_rows(live_states[state.name], ids, carved.tensor)
            self._check_finite(fmt, f"state {state.name!r}", carved.tensor, row_ids.tensor)
            columns.append(Column(carved.data, width * state.dtype.size_bytes))
        identities = None
        if fmt.spec.has_identities:
            carved = buffer.carve(DType.INT64, num_rows, 1)
            _gather_rows(table.identities().view(-1, 1), ids, carved.tensor)
            identities = Column(carved.data, 8)
        scalars = tuple(table.scalars().items())
        return FlushedTable(
            fmt,
            bounds,
            columns[0],
            columns[1],
            tuple(columns[2:]),
            identities,
            tuple((name, *_scalar(value)) for name, value in scalars),
        )

    def _route(self, source: _Source, local_ids: _Ids) -> tuple[_Ids, list[int]]:
        """Return (local ids by shard, where each shard's begin and the last one's end)."""
        if self._num_shards == 1:
            return local_ids, [0, local_ids.size]
        shards = shards_of_rows(source.seed, local_ids + source.table.row_offset, self._num_shards)
        # 16 bits: numpy sorts these by radix, several times as fast as 64.
        order = np.argsort(shards.astype(np.uint16), kind="stable")
        ends = np.cumsum(np.bincount(shards, minlength=self._num_shards))
        return local_ids[order], [0, *ends.tolist()]

    def _check_finite(self, fmt: TableFormat, column: str, values: torch.Tensor, row_ids: torch.Tensor) -> None:
        if self._config.non_finite == "accept" or not values.dtype.is_floating_point:
            return
        is_finite = torch.isfinite(values)
        if not bool(is_finite.all()):
            first = int((~is_finite.all(dim=1)).nonzero()[0])
            raise NonFiniteError(
                f"table {fmt.spec.fqn!r}: {column} of row {int(row_ids[first])} is NaN or Inf; "
                "nothing of this flush was sent"
            )


def _scalar(value: torch.Tensor) -> tuple[DType, bytes]:
    """Return the type and the bytes of a tensor of one element."""
    dtype = next(dtype for dtype, of_torch in TORCH_DTYPES.items() if of_torch is value.dtype)
    return dtype, value.detach().cpu().reshape(1).view(torch.uint8).numpy().tobytes()


def _gather_rows(source: torch.Tensor, row_ids: torch.Tensor, out: torch.Tensor) -> None:
    """Copy rows of a tensor on any device into CPU memory."""
    if source.device.type == "cpu":
        torch.index_select(source, 0, row_ids, out=out)
    else:
        out.copy_(source.index_select(0, row_ids.to(source.device)))
