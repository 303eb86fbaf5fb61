"""The device part of a flush: drained on the training stream, copied aside, and completed by a background thread.

At a step boundary the training thread queues `drain_dirty` into device memory and the copy of its header, records an
event, and goes on. The drain runs on the training stream, because only there it is ordered before the next writes to
the tables; it takes as long as the device needs to read and write the bytes. The background thread starts the long copy
to the host, on a side stream, once the header says how many bytes there are.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from headrace.kernels.dirty_drain import HEADER_WORDS, DrainPlan, drain_dirty, header_words
from headrace.kernels.dtypes import DTYPES, TORCH_DTYPES
from headrace.kernels.packing import MAX_PACKED_BYTES, PackedTable, layout_of
from headrace.schemas.errors import ConfigError, HeadraceError, NonFiniteError, UnavailableError, UnsupportedModelError
from headrace.schemas.row_tally import RowTally
from headrace.schemas.tables import DType
from headrace.streamer.device.runtime import DeviceEvent, DeviceRuntime, RuntimeOf
from headrace.streamer.flush.device_tables import DeviceTables
from headrace.streamer.flush.gather import RowGatherer, check_finite, scalar_bytes
from headrace.streamer.flush.layout import Column, Flush, FlushedTable
from headrace.streamer.flush.staging import NUM_STAGING_BUFFERS, StagingBuffer, StagingPool
from headrace.streamer.flush.step_marks import FlushOutcome, Remainder, StepMarkPolicy

__all__ = ["DeviceDrain", "DevicePipeline"]

# Of one table: name, type, and the bytes or the number of the word behind the header that has them.
_Scalars = list[tuple[str, DType, bytes | int]]


@dataclass(kw_only=True, slots=True)
class _DeviceStaging:
    # A staging buffer's memory on the device, and as much pinned memory; in use as long as the buffer. The header,
    # int64[n], has one more word per scalar.

    out: Tensor
    host: Tensor
    header: Tensor
    header_host: Tensor


@dataclass(eq=False, kw_only=True, slots=True)
class DeviceDrain:
    """A drain whose rows are on their way from the device: `Flush.pending`.

    Attributes:
        plan: As given to `drain_dirty`; None without tables.
        staging: Memory that holds the rows.
        header_host: Receives the header; a staging may have another one by now.
        event: Comes when the header is on the host.
        outcome: Of the flush, without the device's remainder.
        give_back: Makes the flush's rows of the host part dirty again.
        is_judged: Its step mark is known.
        exact_step: Step at which the flush was an exact cut; None before that is known, and if it was not.
    """

    pipeline: DevicePipeline
    sources: list[RowGatherer]
    plan: DrainPlan | None
    staging: _DeviceStaging
    header_host: Tensor
    buffer: StagingBuffer
    event: DeviceEvent
    scalars: list[_Scalars]
    outcome: FlushOutcome
    give_back: Callable[[], None]
    is_judged: bool = False
    exact_step: int | None = None

    def complete(self, flush: Flush) -> Flush | None:
        """Wait for the rows, and return the flush with them; None if its rows become dirty again instead.

        Thread: any but the training thread; one drain after the other.

        Raises:
            HeadraceError: The device has failed.
        """
        return self.pipeline._complete(self, flush)

    def abandon(self) -> None:
        """Note that nobody will complete the drain, because streaming has ended. Thread: any."""
        self.pipeline._abandon()

    def layout(self) -> tuple[list[PackedTable], int]:
        """Return each table's place, and the bytes of all. REQUIRES: the event has come."""
        tables = () if self.plan is None else self.plan.tables
        num_rows = self._counts().sum(1).tolist()
        return layout_of([t.columns[0] for t in tables], num_rows, [t.columns[1:] for t in tables])

    def tables(self, places: list[PackedTable]) -> Iterator[FlushedTable]:
        """Yield the tables that have rows; their columns are views of the pinned memory."""
        data = self.staging.host.numpy().data
        words = self.header_host[self._num_words :].view(torch.uint8).numpy()

        def bytes_of(value: bytes | int, dtype: DType) -> bytes:
            return value if isinstance(value, bytes) else words[8 * value :][: dtype.size_bytes].tobytes()

        for source, place, counts, scalars in zip(self.sources, places, self._counts(), self.scalars, strict=True):
            if not place.row_ids.num_rows:
                continue
            row_ids, weights, *states = (
                Column(data[column.offset : column.end], column.row_bytes) for column in (place.row_ids, *place.columns)
            )
            bounds = [0, *counts.cumsum(0).tolist()]
            yield FlushedTable(
                format=source.format,
                bounds=bounds,
                row_ids=row_ids,
                weights=weights,
                states=tuple(states),
                scalars=tuple((name, dtype, bytes_of(value, dtype)) for name, dtype, value in scalars),
                tallies=[RowTally.of([row_ids.rows(first, end)]) for first, end in pairwise(bounds)],
            )

    def check_finite(self, places: list[PackedTable]) -> None:
        """Check every value. REQUIRES: all are on the host.

        Raises:
            NonFiniteError: One is NaN or Inf.
        """
        for source, place in zip(self.sources, places, strict=True):
            if not place.row_ids.num_rows:
                continue
            row_ids = self.staging.host[place.row_ids.offset : place.row_ids.end].view(torch.int64)
            names = ["weights", *(f"state {state.name!r}" for state, _ in source.format.states)]
            dtypes = [source.format.spec.dtype, *(state.dtype for state, _ in source.format.states)]
            for name, dtype, column in zip(names, dtypes, place.columns, strict=True):
                values = self.staging.host[column.offset : column.end].view(TORCH_DTYPES[dtype])
                check_finite(source.format, name, values.view(column.num_rows, -1), row_ids)

    @property
    def _num_words(self) -> int:
        return header_words(len(self.sources), self.pipeline.num_shards)

    def _counts(self) -> Tensor:
        # Rows, int64[tables, shards].
        return self.header_host[HEADER_WORDS : self._num_words].view(len(self.sources), self.pipeline.num_shards)


class DevicePipeline:
    """Drains the tables on one device, and completes flushes with their rows.

    At most two drains are on their way, because each needs a staging buffer. A row that a drain has taken is in the
    store, on its way there, or dirty again. Thread: the training thread's, except `num_dirty_rows`.
    """

    def __init__(
        self, pool: StagingPool, num_shards: int, rejects_non_finite: bool, marks: StepMarkPolicy, runtime_of: RuntimeOf
    ) -> None:
        """Begin without tables; nothing is allocated."""
        self.num_shards = num_shards
        self._pool, self._marks = pool, marks
        self._rejects_non_finite = rejects_non_finite
        self._tables = DeviceTables(num_shards, runtime_of)
        self._spare: list[_DeviceStaging] = []
        self._staging_of: dict[StagingBuffer, _DeviceStaging] = {}
        # The next drain reports these for the ones that were taken back.
        self._restarts, self._changed_s = False, math.inf
        # Guards what both threads use, and signals its changes.
        self._changed = threading.Condition()
        self._num_pending = 0
        self._is_abandoned = False
        self._failure: HeadraceError | None = None
        self._returned: list[DeviceDrain] = []
        # From the header of the last completed drain.
        self._num_left = self._next_slot = 0

    @property
    def is_active(self) -> bool:
        """Whether it has had tables: then each flush has a device part, which gives the mark."""
        return self._tables.bitmap is not None

    @property
    def sources(self) -> list[RowGatherer]:
        """Its tables, in the order of their slots."""
        return self._tables.sources

    @property
    def num_dirty_rows(self) -> int:
        """Dirty rows as far as known without asking the device; 0 only if none is dirty.

        It counts the rows that the last drain left, and one more if rows were marked since. Thread: any.
        """
        bitmap = self._tables.bitmap
        return self._num_left + (bitmap is not None and bitmap.is_marked)

    def adopt(self, sources: Sequence[RowGatherer]) -> list[RowGatherer]:
        """Take over tables whose dirty rows are on the host; return those that it cannot take. The log says why.

        Raises:
            ConfigError: The device, or the host, has no room for the staging buffers; no table is taken over.
        """
        bitmap, taken = self._tables.choose(sources)
        if bitmap is None or not taken:
            return list(sources)
        self._allocate(bitmap.runtime, len(self.sources) + len(taken))
        self._tables.take_over(taken, bitmap)
        return [source for source in sources if source not in taken]

    def change_shards(self, num_shards: int) -> None:
        """Order rows by the shards of another server from the next drain on. REQUIRES: it is settled.

        Raises:
            ConfigError: As `adopt`; a call that succeeds has to follow before the next drain.
        """
        self.num_shards = num_shards
        self._tables.change_shards(num_shards)
        if (bitmap := self._tables.bitmap) is not None:
            self._allocate(bitmap.runtime, len(self.sources))

    def take_leavers(self) -> list[RowGatherer]:
        """Remove and return tables that the host has to gather from now on; call it before each drain."""
        leavers = self._tables.take_leavers()
        # The host's cursor may be behind their rows.
        self._restarts = self._restarts or bool(leavers)
        return leavers

    def check_boundary(self) -> None:
        """Check that a step can end here.

        Raises:
            UnsupportedModelError: A CUDA graph is being captured.
        """
        bitmap = self._tables.bitmap
        if bitmap is not None and bitmap.runtime.is_capturing():
            raise UnsupportedModelError(
                "a step ends while a CUDA graph is captured, and a replay would not end its step: call "
                "streamer.step() before the capture and after each replay, and step torch optimizers outside of it"
            )

    def drain(self, buffer: StagingBuffer, outcome: FlushOutcome, give_back: Callable[[], None]) -> DeviceDrain:
        """Queue a drain of all tables without waiting. REQUIRES: `take_leavers` has just been called.

        The arguments are those of `DeviceDrain`. The caller completes, abandons or takes back the drain.
        """
        bitmap = self._tables.bitmap
        assert bitmap is not None
        if buffer not in self._staging_of:
            self._staging_of[buffer] = self._spare.pop()
        staging, plan, runtime = self._staging_of[buffer], self._tables.plan(), bitmap.runtime
        num_words = header_words(len(self.sources), self.num_shards)
        header, words = staging.header[:num_words], staging.header[num_words:]
        scalars, on_device = self._scalars(runtime)

        def run() -> None:
            for number, value in enumerate(on_device):
                word = words[number : number + 1].view(torch.uint8)[: value.element_size()]
                word.view(value.dtype).copy_(value.reshape(1))
            if plan is None:
                header.zero_()
            else:
                drain_dirty(bitmap.bits, bitmap.cursor, plan, staging.out, header)

        with torch.no_grad():
            runtime.enqueue(run)
            runtime.copy_to_host(staging.header, staging.header_host)
        bitmap.note_drain()
        changed_s = min(outcome.changed_s, self._changed_s)
        drain = DeviceDrain(
            pipeline=self,
            sources=self.sources,
            plan=plan,
            staging=staging,
            header_host=staging.header_host,
            buffer=buffer,
            event=runtime.record(),
            scalars=scalars,
            outcome=dataclasses.replace(outcome, changed_s=changed_s, restarts=outcome.restarts or self._restarts),
            give_back=give_back,
        )
        self._restarts, self._changed_s = False, math.inf
        with self._changed:
            self._num_pending += 1
        return drain

    def _complete(self, drain: DeviceDrain, flush: Flush) -> Flush | None:
        failure: HeadraceError | None = None
        completed: Flush | None = None
        try:
            drain.event.synchronize()
            # After a failure, nothing is sent before the failed rows are dirty again: a mark would be false.
            if self._failure is None:
                completed = self._fetch(drain, flush)
        except NonFiniteError as exc:
            failure = exc
        except RuntimeError as exc:
            raise HeadraceError(f"device_pipeline: the device has failed: {exc}") from exc
        with self._changed:
            if completed is None:
                self._failure = self._failure or failure
                self._returned.append(drain)
            self._num_pending -= 1
            self._changed.notify_all()
        return completed

    def _abandon(self) -> None:
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()

    def settle(self, timeout_s: float) -> None:
        """Wait until no drain is on its way, and make the rows of those that are not sent dirty again.

        Raises:
            UnavailableError: The device is not done in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._num_pending or self._is_abandoned, max(0.0, timeout_s)):
                raise UnavailableError(f"{self._num_pending} flushes are on their way from the device")
            returned, self._returned = self._returned, []
        for drain in returned:
            drain.give_back()
            self._mark_again(drain)
            self._pool.release(drain.buffer)

    def raise_failure(self, timeout_s: float) -> None:
        """Settle and raise, once, why a flush was not sent; do nothing, and do not wait, if none failed.

        Raises:
            NonFiniteError: The flush had NaN or Inf; its rows, and those of the flush after it, are dirty again.
            UnavailableError: The device is not done in time.
        """
        if self._failure is None:
            return
        self.settle(timeout_s)
        failure, self._failure = self._failure, None
        raise failure

    def take_back(self, drain: DeviceDrain) -> None:
        """Wait for a drain that was not submitted, and make its rows dirty again."""
        with self._changed:
            self._num_pending -= 1
        drain.event.synchronize()
        self._mark_again(drain)

    def _mark_again(self, drain: DeviceDrain) -> None:
        bitmap = self._tables.bitmap
        assert bitmap is not None
        places, _ = drain.layout()
        for source, place in zip(drain.sources, places, strict=True):
            if place.row_ids.num_rows:
                ids = drain.staging.out[place.row_ids.offset : place.row_ids.end].view(torch.int64)
                source.table.dirty.mark(ids - source.table.row_offset)
        # The rows may lie before the cursor, where no running pass comes by.
        bitmap.runtime.enqueue(bitmap.cursor.zero_)
        self._next_slot, self._restarts = 0, True
        self._changed_s = min(self._changed_s, drain.outcome.changed_s)

    def _fetch(self, drain: DeviceDrain, flush: Flush) -> Flush:
        bitmap, staging = self._tables.bitmap, drain.staging
        assert bitmap is not None
        size_bytes, num_left, next_slot = drain.header_host[:HEADER_WORDS].tolist()
        places, layout_bytes = drain.layout()
        assert layout_bytes == size_bytes, "the header does not fit its own counts"
        if size_bytes:
            bitmap.runtime.copy_aside(staging.out[:size_bytes], staging.host[:size_bytes]).synchronize()
        if self._rejects_non_finite:
            drain.check_finite(places)
        tables = [*flush.tables, *drain.tables(places)]
        device = Remainder(is_clean=not num_left, has_wrapped=not next_slot, began_at_start=not self._next_slot)
        host, _ = drain.outcome.remainders
        judgment = self._marks.judge(dataclasses.replace(drain.outcome, remainders=(host, device)))
        self._marks.accept(judgment)
        self._num_left, self._next_slot = num_left, next_slot
        if judgment.mark is not None and judgment.mark.is_exact_cut:
            drain.exact_step = flush.step
        drain.is_judged = True
        return dataclasses.replace(
            flush,
            tables=tables,
            mark=judgment.mark,
            dirty_since_s=judgment.dirty_since_s,
            oldest_us=drain.outcome.wall_us(judgment.dirty_since_s),
            num_rows=sum(table.bounds[-1] for table in tables),
            size_bytes=sum(table.bounds[-1] * table.row_bytes for table in tables),
            pending=None,
        )

    def _scalars(self, runtime: DeviceRuntime) -> tuple[list[_Scalars], list[Tensor]]:
        """Return the tables' scalars, and the distinct tensors of them that only the device can read."""
        word_of: dict[tuple[int, torch.dtype], int] = {}
        on_device: list[Tensor] = []
        scalars: list[_Scalars] = []
        for source in self.sources:
            of_table: _Scalars = []
            for name, value in source.table.scalars().items():
                if not runtime.holds(value):
                    of_table.append((name, *scalar_bytes(value)))
                    continue
                # Table-batched tables share theirs.
                key = (value.data_ptr(), value.dtype)
                if key not in word_of:
                    word_of[key] = len(on_device)
                    on_device.append(value.detach())
                of_table.append((name, DTYPES[value.dtype], word_of[key]))
            scalars.append(of_table)
        return scalars, on_device

    def _allocate(self, runtime: DeviceRuntime, num_tables: int) -> None:
        # For the tables' headers, and at the first call for rows.
        num_words = header_words(num_tables, self.num_shards) + num_tables  # no table has more than one scalar
        size_bytes = min(self._pool.buffer_bytes, MAX_PACKED_BYTES)

        def header() -> tuple[Tensor, Tensor]:
            on_device = torch.zeros(num_words, dtype=torch.int64, device=runtime.device)
            return on_device, runtime.pinned(8 * num_words).view(torch.int64)

        def rows() -> tuple[Tensor, Tensor]:
            on_device = torch.empty(size_bytes, dtype=torch.uint8, device=runtime.device)
            return on_device, runtime.pinned(size_bytes)

        try:
            headers = [header() for _ in range(NUM_STAGING_BUFFERS)]
            if not self._spare and not self._staging_of:
                self._spare = [
                    _DeviceStaging(out=out, host=host, header=on_device, header_host=on_host)
                    for (on_device, on_host), (out, host) in ((header, rows()) for header in headers)
                ]
                return
        except torch.OutOfMemoryError as exc:
            raise ConfigError(
                f"device_pipeline: {runtime.device} has no room for 2 × {size_bytes} bytes: lower staging_bytes, "
                f"or set device_pipeline=False"
            ) from exc
        # A drain on its way keeps the old ones.
        for staging, (on_device, on_host) in zip([*self._spare, *self._staging_of.values()], headers, strict=True):
            staging.header, staging.header_host = on_device, on_host
