"""Flushes of tables on a fake device, and the background thread's half of them, done when the test says."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from fake_device import FakeDevice
from text_scripts import runs
from trainer_tables import POINTWISE, ROWWISE, Submitted, Trained, VirtualRows, deleted_of, rows_of

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


class DeviceTraining:
    """Commands of scripts, and of a property test: tables of a device and of the host, trained step by step.

    What arrives is checked: each row as its step has left it, once a change, with marks that are true.

    Attributes:
        tables: By name.
        now: Of each row the step that last changed it, and its bytes.
    """

    def __init__(self, seed: int = 0, **settings: Any) -> None:
        self.fake = FakeDevice(seed)
        self.tables: dict[str, Trained | VirtualRows] = {}
        self.now: dict[tuple[str, int], tuple[int, bytes]] = {}
        self._settings = settings
        self._made: DeviceSubmitted | None = None
        self._last_step = 0

    def settings(self, **settings: Any) -> None:
        self._settings = settings

    @property
    def to(self) -> DeviceSubmitted:
        if self._made is None:
            num_shards = self._settings.get("num_shards", 1)
            tables: Any = [*self.tables.values()]
            self._made = DeviceSubmitted(self.fake, tables, **self._settings)
            self.store = Store(num_shards)
            self.history = {0: dict(self.now)}
            self._made.on_whole = lambda flush: self.store.take(flush, self.history)
        return self._made

    def table(
        self,
        name: str,
        rows: int = 50,
        dim: int = 4,
        *,
        state: str = "",
        offset: int = 0,
        total: int | None = None,
        place: str = "device",
        evicted: list[int] | None = None,
    ) -> None:
        """Add a table of the device, or of the `host`, perhaps with rows that were evicted before."""
        states = {"": (), "rowwise": (ROWWISE,), "pointwise": (POINTWISE,)}[state]
        made: Trained = DeviceTrained(self.fake, name, rows, dim, states=states, row_offset=offset, total_rows=total)
        if place == "host":
            made = Trained(name, rows, dim)
            self.fake.on_host.add(made.weights.data_ptr())
        if evicted:
            made.tapped.evict(torch.tensor(evicted))
        self._add(name, made)

    def virtual(self, name: str) -> None:
        """Add a table with virtual ids, which the host gathers."""
        self._add(name, VirtualRows(name))

    def _add(self, name: str, table: Trained | VirtualRows) -> None:
        self.tables[name] = table
        if self._made is not None:
            self._made.flusher.add_tables([table.tapped])

    def change(self, name: str, rows: int | list[int], value: float | str) -> None:
        """Set rows to a value in the next step."""
        rows, value = [rows] if isinstance(rows, int) else list(rows), float(value)
        table, offset = self.tables[name], self.tables[name].tapped.row_offset
        table.update(rows, value)
        num_states = sum(state.shape[1] for state in table.states.values())
        data = row_bytes(value, num_states, table.weights.shape[1])
        self.now.update({(name, row + offset): (self._last_step + 1, data) for row in rows})

    def evict(self, name: str, rows: int | list[int]) -> None:
        rows = [rows] if isinstance(rows, int) else rows
        self.to.flusher.settle(5.0)
        self.tables[name].tapped.evict(torch.tensor(rows))
        for row in rows:
            self.now.pop((name, row), None)

    def leave(self, name: str) -> None:
        """Have the host gather a table from now on."""
        self.tables[name].tapped.leave_device()
        self.fake.on_host.add(self.tables[name].weights.data_ptr())

    def capture(self, begins: bool) -> None:
        """Begin to capture a graph, or end."""
        self.fake.capturing = begins

    def lose(self) -> None:
        """Have all rows wanted again."""
        for name, table in self.tables.items():
            columns = [table.weights.detach(), *table.states.values()]
            for row in range(table.tapped.num_local_rows):
                data = b"".join(column[row].view(torch.uint8).numpy().tobytes() for column in columns)
                self.now.setdefault((name, row), (self._last_step + 1, data))
        self.to.flusher.mark_all(num_losses=1)

    def step(self, *steps: int) -> None:
        """End steps; to wait for the device is an error."""
        for step in steps:
            self._begin(step)
            self.to.on_step(step)

    def host_step(self, step: int) -> None:
        """End a step that may wait for the device."""
        self._begin(step)
        self.to.flusher.on_step(step)

    def _begin(self, step: int) -> None:
        _ = self.to
        self.history[step], self._last_step = dict(self.now), step

    def complete(self) -> str:
        """Do the background thread's work on all flushes, and tell of them."""
        lines = []
        while self.to.incomplete:
            flush = self.to.complete()
            lines.append("nothing" if flush is None else self._line(flush))
        return "\n".join(lines)

    def flush_all(self, step: int) -> str:
        """Hand everything over, and tell of it."""
        self._begin(step)
        before, lines = self.to.on_whole, list[str]()
        self.to.complete_all()
        self.to.on_whole = lambda flush: (before(flush), lines.append(self._line(flush)))[0]
        try:
            self.to.flush_all(step)
        finally:
            self.to.on_whole = before
        return "\n".join(lines)

    def release(self) -> None:
        self.to.release()

    def buffers(self) -> str:
        return str(self.to.pool.num_free)

    def rows(self) -> str:
        """Tell how many rows are dirty: as is known without asking the device, and really."""
        return f"{self.to.flusher.num_dirty_rows} {self.to.flusher.count_dirty_rows()}"

    def kinds(self) -> str:
        """Tell which tables' dirty rows are on the device."""
        return " ".join(name for name, table in self.tables.items() if isinstance(table.tapped.dirty, DeviceDirtyRows))

    def _line(self, flush: Flush) -> str:
        num_shards = self._settings.get("num_shards", 1)
        parts = []
        for name in self.tables:
            sent = sorted(row for _, fqn, row, _ in rows_of(flush, num_shards) if fqn == name)
            gone = sorted(row for _, fqn, row in deleted_of(flush, num_shards) if fqn == name)
            parts += [f"{name} {runs(sent)}"] if sent else []
            parts += [f"{name} deletes {runs(gone)}"] if gone else []
        if flush.mark is not None:
            parts.append(f"mark {flush.mark.step}{' exact' * flush.mark.is_exact_cut}")
        return " | ".join(parts or ["no row, no mark"])
