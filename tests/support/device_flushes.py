"""Flushes of tables on a fake device, and the background thread's half of them, done when the test says."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from fake_device import FakeDevice
from trainer_tables import Submitted, Trained, rows_of

from headrace.streamer.device.dirty_rows import DeviceDirtyRows
from headrace.streamer.flush.device_pipeline import DevicePipeline
from headrace.streamer.flush.flusher import Flusher
from headrace.streamer.flush.layout import Flush, StepMark


class DeviceTrained(Trained):
    """A table on a fake device: its updates are work on the training stream."""

    def __init__(self, fake: FakeDevice, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fake = fake

    def update(self, rows: Iterable[int], value: float) -> None:
        rows = list(rows)
        weights, states, ids = self.weights.detach(), self.states, torch.tensor(rows, dtype=torch.int64)

        def run() -> None:
            weights[ids] = value
            for state in states.values():
                state[ids] = -value

        self._fake.enqueue(run)
        if not isinstance(self.tapped.dirty, DeviceDirtyRows):
            self._fake.run_all()  # the host's gather waits for the stream
        self.tapped.dirty.mark(ids)


class DeviceSubmitted(Submitted):
    """A flusher with a pipeline, and what it has submitted.

    Attributes:
        incomplete: Flushes that the background thread has not completed.
        completes_at_once: It does so as soon as they are submitted.
        has_returned: A flush came to nothing, and nobody was told.
        on_whole: Called with each whole flush.
    """

    def __init__(self, fake: FakeDevice, tables: Sequence[Trained], **settings: Any) -> None:
        self.incomplete: deque[Flush] = deque()
        self.completes_at_once = False
        self.has_returned = False
        self.on_whole: Callable[[Flush], None] = lambda flush: None
        self.fake = fake
        super().__init__([], device_pipeline=True, flush_timeout_s=5, **settings)
        self.flusher = Flusher(
            config=self.flusher._config,
            num_shards=self.flusher._num_shards,
            pool=self.pool,
            submit=self._submit,
            describe_delay=lambda: "shard 0 is behind",
            monotonic_s=self.flusher._monotonic_s,
            partition_map=self.flusher._partition_map,
            runtime_of=lambda device: fake,
        )
        self.flusher.add_tables([table.tapped for table in tables])

    @property
    def pipeline(self) -> DevicePipeline:
        assert self.flusher._device is not None
        return self.flusher._device

    def on_step(self, step: int) -> None:
        """End a step; to wait is an error, but to tell of one."""
        if self.has_returned:
            self.complete_all()
            self.has_returned = False
            self.flusher.on_step(step)
            raise AssertionError("the step has not told what has failed")
        with self.fake.training():
            self.flusher.on_step(step)

    def flush_all(self, step: int) -> None:
        """Hand everything over, with a background thread that is as fast as can be."""
        self.complete_all()
        self.release()
        self.completes_at_once = True
        try:
            self.flusher.flush_all(step, 5.0)
        finally:
            self.completes_at_once = self.has_returned = False

    def complete_all(self) -> None:
        """Complete all that was submitted."""
        while self.incomplete:
            self.complete()

    def complete(self) -> Flush | None:
        """Do the background thread's work on the oldest flush, and return it whole; None if it came to nothing."""
        flush = self.incomplete.popleft()
        whole = flush if flush.pending is None else flush.pending.complete(flush)
        if whole is None:
            self.has_returned = True
        else:
            self.on_whole(whole)
            self.flushes.append(whole)
        return whole

    def _submit(self, flush: Flush) -> None:
        if self.error is not None:
            raise self.error
        self.incomplete.append(flush)
        if self.completes_at_once:
            self.complete()
            self.release()


class Store:
    """What a server would hold, and whether each mark it was given is true.

    Attributes:
        rows: (fqn, row) to the bytes of its columns.
        marks: In order.
    """

    def __init__(self, num_shards: int) -> None:
        self.rows: dict[tuple[str, int], bytes] = {}
        self.marks: list[StepMark] = []
        self._num_shards = num_shards
        self._step_of: dict[tuple[str, int], int] = {}

    def take(self, flush: Flush, history: dict[int, dict[tuple[str, int], tuple[int, bytes]]]) -> None:
        """Take a flush in, and check it.

        Args:
            flush: A whole one.
            history: For each step, of each row the step that last changed it, and its bytes then.
        """
        then = history[flush.step]
        for _, fqn, row, data in rows_of(flush, self._num_shards):
            changed_at, expected = then[fqn, row]
            assert data == expected, f"{fqn} row {row} is not as step {flush.step} has left it"
            assert self._step_of.get((fqn, row), -1) < changed_at, f"{fqn} row {row} is sent again unchanged"
            self.rows[fqn, row], self._step_of[fqn, row] = data, flush.step
        if flush.mark is None:
            return
        self.marks.append(flush.mark)
        for key, (changed_at, data) in history[flush.mark.step].items():
            assert self._step_of.get(key, 0) >= changed_at, f"{key} of step {changed_at} is missing at {flush.mark}"
            assert not flush.mark.is_exact_cut or not changed_at or self.rows[key] == data


@functools.lru_cache
def row_bytes(value: float, num_states: int, width: int) -> bytes:
    """Return the bytes of a row that `DeviceTrained.update` has set."""
    return torch.tensor([value] * width + [-value] * num_states).numpy().tobytes()
