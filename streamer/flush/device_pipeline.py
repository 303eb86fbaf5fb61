"""The device's half of a flush: cut on the training stream, copied aside, and handed over by a background thread.

At a step boundary the training thread starts `cut_dirty` into device memory and the copy of its header, records an
event, and goes on. On the training stream, because only there the cut is ordered before whatever writes the tables
next; it takes as long as the device needs to read and write the bytes. The long part, the copy to the host, is
started by the background thread once the header says how much there is, and runs on a side stream.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.kernels.cut_plan import HEADER_WORDS, header_words
from headrace.kernels.dirty_cut import cut_dirty
from headrace.kernels.row_packing import MAX_PACKED_BYTES
from headrace.kernels.torch_dtypes import DTYPES
from headrace.schemas.errors import ConfigError, HeadraceError, NonFiniteError, UnavailableError, UnsupportedModelError
from headrace.streamer.device.device_runtime import DeviceRuntime, cuda_runtime
from headrace.streamer.flush.device_cut import DeviceCut, DeviceStaging, Scalars
from headrace.streamer.flush.device_tables import DeviceTables
from headrace.streamer.flush.flush import Flush
from headrace.streamer.flush.gather import RowGatherer, scalar_bytes
from headrace.streamer.flush.staging import NUM_STAGING_BUFFERS, StagingBuffer, StagingPool
from headrace.streamer.flush.sweep_marks import Cut, Half, SweepMarks

__all__ = ["DevicePipeline"]


class DevicePipeline:
    """Cuts the tables on one device, and has their rows handed over.

    Two cuts are on their way at most: each needs a staging buffer. A row that a cut has taken is in the store, or on
    its way there, or dirty again.

    Thread: the training thread's, but `complete`, `abandon` and `num_dirty_rows`.
    """

    def __init__(
        self,
        *,
        pool: StagingPool,
        num_shards: int,
        rejects_non_finite: bool,
        marks: SweepMarks,
        runtime_of: Callable[[torch.device], DeviceRuntime | str] = cuda_runtime,
    ) -> None:
        """Begin without tables; nothing is allocated.

        Args:
            pool: The staging buffers.
            num_shards: Shards of the store.
            rejects_non_finite: A flush with NaN or Inf is not sent.
            marks: Says what each flush completes.
            runtime_of: Returns what a device is driven by, or why it cannot be.
        """
        self._pool, self._num_shards, self._marks = pool, num_shards, marks
        self._rejects_non_finite = rejects_non_finite
        self._tables = DeviceTables(num_shards, runtime_of)
        self._spare: list[DeviceStaging] = []
        self._staging_of: dict[StagingBuffer, DeviceStaging] = {}
        # What the next cut has to say of those that were taken back.
        self._restarts, self._changed_s = False, math.inf
        # Guards what both threads use; whoever waits for a change of it waits on the condition.
        self._changed = threading.Condition()
        self._num_pending = 0
        self._is_abandoned = False
        self._failure: HeadraceError | None = None
        self._returned: list[DeviceCut] = []
        # As the header of the last completed cut has them.
        self._num_left = self._next_slot = 0

    @property
    def is_active(self) -> bool:
        """Whether it has had tables: then each flush has a cut of it, in which marks are given."""
        return self._tables.bitmap is not None

    @property
    def sources(self) -> list[RowGatherer]:
        """Its tables, in the order of their slots."""
        return self._tables.sources

    @property
    def num_dirty_rows(self) -> int:
        """Dirty rows of its tables, as far as is known without asking the device.

        Those that the last cut has left, and one more when rows were marked since: 0 only when none is dirty.

        Thread: any.
        """
        bitmap = self._tables.bitmap
        return self._num_left + (bitmap is not None and bitmap.is_marked)

    def adopt(self, sources: Sequence[RowGatherer]) -> list[RowGatherer]:
        """Take tables over, and return those that have to go the host's way; the log says why.

        Args:
            sources: Tables with changed rows on the host.

        Raises:
            ConfigError: The device, or the host, has no room for the staging buffers; nothing is taken over.
        """
        bitmap, taken = self._tables.choose(sources)
        if bitmap is None or not taken:
            return list(sources)
        self._allocate(bitmap.runtime, len(self.sources) + len(taken))
        self._tables.take_over(taken, bitmap)
        return [source for source in sources if source not in taken]

    def take_leavers(self) -> list[RowGatherer]:
        """Return tables that have to go the host's way from now on; before each cut."""
        leavers = self._tables.take_leavers()
        # The host's cursor may stand behind rows of theirs.
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

    def cut(
        self, buffer: StagingBuffer, *, host: Half, now_s: float, changed_s: float, give_back: Callable[[], None]
    ) -> DeviceCut:
        """Queue a cut of all tables; does not wait. REQUIRES: `take_leavers` has just been called.

        Args:
            buffer: The flush's staging buffer.
            host: What is left of the host's tables.
            now_s: Monotonic time.
            changed_s: Monotonic time of the first step after the cut before.
            give_back: Makes the host's rows of the flush dirty again; called on the training thread.

        Returns:
            The cut; it has to be completed, abandoned or taken back.
        """
        bitmap = self._tables.bitmap
        assert bitmap is not None
        if buffer not in self._staging_of:
            self._staging_of[buffer] = self._spare.pop()
        staging, plan, runtime = self._staging_of[buffer], self._tables.plan(), bitmap.runtime
        num_words = header_words(len(self.sources), self._num_shards)
        header, words = staging.header[:num_words], staging.header[num_words:]
        scalars, late = self._scalars(runtime)

        def run() -> None:
            for number, value in enumerate(late):
                word = words[number : number + 1].view(torch.uint8)[: value.element_size()]
                word.view(value.dtype).copy_(value.reshape(1))
            if plan is None:
                header.zero_()
            else:
                cut_dirty(bitmap.bits, bitmap.cursor, plan, staging.out, header)

        with torch.no_grad():
            runtime.enqueue(run)
            runtime.copy_to_host(staging.header, staging.header_host)
        bitmap.note_cut()
        cut = DeviceCut(
            pipeline=self,
            sources=self.sources,
            plan=plan,
            num_shards=self._num_shards,
            staging=staging,
            header_host=staging.header_host,
            buffer=buffer,
            event=runtime.record(),
            scalars=scalars,
            host=host,
            restarts=self._restarts,
            now_s=now_s,
            changed_s=min(changed_s, self._changed_s),
            give_back=give_back,
        )
        self._restarts, self._changed_s = False, math.inf
        with self._changed:
            self._num_pending += 1
        return cut

    def complete(self, cut: DeviceCut, flush: Flush) -> Flush | None:
        """Do what `DeviceCut.complete` says."""
        failure: HeadraceError | None = None
        completed: Flush | None = None
        try:
            cut.event.synchronize()
            # After a failure nothing is sent before its rows are dirty again: a mark would be untrue.
            if self._failure is None:
                completed = self._fetch(cut, flush)
        except NonFiniteError as exc:
            failure = exc
        except RuntimeError as exc:
            raise HeadraceError(f"device_pipeline: the device has failed: {exc}") from exc
        with self._changed:
            if completed is None:
                self._failure = self._failure or failure
                self._returned.append(cut)
            self._num_pending -= 1
            self._changed.notify_all()
        return completed

    def abandon(self) -> None:
        """Do what `DeviceCut.abandon` says."""
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()

    def settle(self, timeout_s: float) -> None:
        """Wait until no cut is on its way, and make the rows of those that are not sent dirty again.

        Raises:
            UnavailableError: The device is not done in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._num_pending or self._is_abandoned, max(0.0, timeout_s)):
                raise UnavailableError(f"{self._num_pending} flushes are on their way from the device")
            returned, self._returned = self._returned, []
        for cut in returned:
            cut.give_back()
            self._mark_again(cut)
            self._pool.release(cut.buffer)

    def raise_failure(self, timeout_s: float) -> None:
        """Raise, once, why a flush was not sent. Waits only when there is something to raise, until it is settled.

        Raises:
            NonFiniteError: The flush had NaN or Inf; its rows, and those of the flush after it, are dirty again.
            UnavailableError: The device is not done in time.
        """
        if self._failure is None:
            return
        self.settle(timeout_s)
        failure, self._failure = self._failure, None
        raise failure

    def take_back(self, cut: DeviceCut) -> None:
        """Make the device's rows of a cut that was not submitted dirty again; waits for it."""
        with self._changed:
            self._num_pending -= 1
        cut.event.synchronize()
        self._mark_again(cut)

    def _mark_again(self, cut: DeviceCut) -> None:
        bitmap = self._tables.bitmap
        assert bitmap is not None
        places, _ = cut.layout()
        for source, place in zip(cut.sources, places, strict=True):
            if place.row_ids.num_rows:
                ids = cut.staging.out[place.row_ids.offset : place.row_ids.end].view(torch.int64)
                source.table.dirty.mark(ids - source.table.row_offset)
        # They may lie before the cursor, where no running sweep comes by.
        bitmap.runtime.enqueue(bitmap.cursor.zero_)
        self._next_slot, self._restarts = 0, True
        self._changed_s = min(self._changed_s, cut.changed_s)

    def _fetch(self, cut: DeviceCut, flush: Flush) -> Flush:
        """Copy a cut's rows to the host, and return the flush with them."""
        bitmap, staging = self._tables.bitmap, cut.staging
        assert bitmap is not None
        size_bytes, num_left, next_slot = cut.header_host[:HEADER_WORDS].tolist()
        places, layout_bytes = cut.layout()
        assert layout_bytes == size_bytes, "the header does not fit its own counts"
        if size_bytes:
            bitmap.runtime.copy_aside(staging.out[:size_bytes], staging.host[:size_bytes]).synchronize()
        if self._rejects_non_finite:
            cut.check_finite(places)
        tables = [*flush.tables, *cut.tables(places)]
        marked = self._marks.judge(
            Cut(
                step=flush.step,
                time_us=flush.time_us,
                now_s=cut.now_s,
                changed_s=cut.changed_s,
                halves=(
                    cut.host,
                    Half(is_clean=not num_left, has_wrapped=not next_slot, began_at_start=not self._next_slot),
                ),
                restarts=cut.restarts,
            )
        )
        self._marks.accept(marked)
        self._num_left, self._next_slot = num_left, next_slot
        if marked.mark is not None and marked.mark.is_exact_cut:
            cut.exact_step = flush.step
        return dataclasses.replace(
            flush,
            tables=tables,
            mark=marked.mark,
            dirty_since_s=marked.dirty_since_s,
            num_rows=sum(table.bounds[-1] for table in tables),
            size_bytes=sum(table.bounds[-1] * table.row_bytes for table in tables),
            pending=None,
        )

    def _scalars(self, runtime: DeviceRuntime) -> tuple[list[Scalars], list[Tensor]]:
        """Return the tables' scalars, and those of their tensors that the device has to read, each once."""
        word_of: dict[tuple[int, torch.dtype], int] = {}
        late: list[Tensor] = []
        scalars: list[Scalars] = []
        for source in self.sources:
            of_table: Scalars = []
            for name, value in source.table.scalars().items():
                if not runtime.holds(value):
                    of_table.append((name, *scalar_bytes(value)))
                    continue
                # Table-batched tables share theirs.
                key = (value.data_ptr(), value.dtype)
                if key not in word_of:
                    word_of[key] = len(late)
                    late.append(value.detach())
                of_table.append((name, DTYPES[value.dtype], word_of[key]))
            scalars.append(of_table)
        return scalars, late

    def _allocate(self, runtime: DeviceRuntime, num_tables: int) -> None:
        """Make room for the tables' headers, and the first time for rows."""
        num_words = header_words(num_tables, self._num_shards) + num_tables  # no table has more than one scalar
        size_bytes = min(self._pool.buffer_bytes, MAX_PACKED_BYTES)

        def header() -> tuple[Tensor, Tensor]:
            on_device = torch.zeros(num_words, dtype=torch.int64, device=runtime.device)
            return on_device, runtime.pinned(8 * num_words).view(torch.int64)

        try:
            headers = [header() for _ in range(NUM_STAGING_BUFFERS)]
            if not self._spare and not self._staging_of:
                self._spare = [
                    DeviceStaging(
                        out=torch.empty(size_bytes, dtype=torch.uint8, device=runtime.device),
                        host=runtime.pinned(size_bytes),
                        header=on_device,
                        header_host=on_host,
                    )
                    for on_device, on_host in headers
                ]
                return
        except torch.OutOfMemoryError as exc:
            raise ConfigError(
                f"device_pipeline: {runtime.device} has no room for 2 × {size_bytes} bytes: lower staging_bytes"
            ) from exc
        # A cut that is on its way has the old ones.
        for staging, (on_device, on_host) in zip([*self._spare, *self._staging_of.values()], headers, strict=True):
            staging.header, staging.header_host = on_device, on_host
