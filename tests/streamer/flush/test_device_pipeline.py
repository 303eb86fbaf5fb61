"""Flushes with a device part: nothing waits, nothing is lost, and what a mark says is true."""

from __future__ import annotations

import threading
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from device_flushes import DeviceSubmitted, DeviceTrained, DeviceTraining, row_bytes
from fake_device import FakeDevice
from hypothesis import given, settings
from text_scripts import Script, scripts
from trainer_tables import POINTWISE, Submitted, Trained, rows_of

from headrace.kernels.dirty_sets import DirtyRows
from headrace.schemas.errors import ConfigError, HeadraceError, NonFiniteError, UnsupportedModelError
from headrace.streamer.device.runtime import cuda_runtime
from headrace.streamer.flush.layout import Flush
from headrace.streamer.live_rows import Evictor
from headrace.streamer.taps.tapped_table import zero_state


def sent(flush: Flush | None, num_shards: int = 1) -> dict[tuple[str, int], bytes]:
    assert flush is not None
    return {(fqn, row): data for _, fqn, row, data in rows_of(flush, num_shards)}


def one_table(num_rows: int = 50, **settings: Any) -> tuple[FakeDevice, DeviceTrained, DeviceSubmitted]:
    """Return a device, a table on it, and the flusher of that table."""
    fake = FakeDevice()
    table = DeviceTrained(fake, num_rows=num_rows)
    return fake, table, DeviceSubmitted(fake, [table], **settings)


STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1199), max_size=40),  # rows
        st.sampled_from(["", "", "a", "b", "c"]),  # a table of which all rows change
        st.integers(0, 2),  # flushes that the background thread completes
        st.booleans(),  # acks
        st.sampled_from(["", "", "", "", "submit fails", "nan", "leave"]),
    ),
    min_size=1,
    max_size=20,
)


class Training(DeviceTraining):
    """Tables a and b of a device, c perhaps of the host, with what may happen at a step."""

    def __init__(self, seed: int, num_shards: int, *, has_host_table: bool, num_host_rows: int = 300) -> None:
        super().__init__(seed, num_shards=num_shards, staging_bytes=64 * 2**10, non_finite="reject")
        self.table("a", 700, 24, state="rowwise")
        self.table("b", 430, 30, state="pointwise", offset=2**33)
        self.table("c", num_host_rows if has_host_table else 300, 40, place="host" if has_host_table else "device")

    def end_step(self, step: int, event: str) -> None:
        self._begin(step)
        if event == "submit fails" and self.to.pool.num_free and not self.to.has_returned:
            self.to.error = RuntimeError("no")
            with pytest.raises(RuntimeError, match="no"):
                self.to.flusher.on_step(step)
            self.to.error = None
            return
        try:
            if event == "leave":  # the table's rows have to be waited for
                self.leave("a")
            self.to.on_step(step)
        except NonFiniteError:
            self.repair(step)

    def drain(self, step: int) -> None:
        self._begin(step)
        try:
            self.to.flush_all(step)
        except NonFiniteError:
            self.repair(step)
            self.to.flush_all(step)

    def repair(self, step: int) -> None:
        self._last_step = step - 1  # the change belongs to it
        self.change("b", [7], float(step))
        self._begin(step)

    def check(self) -> None:
        assert self.store.rows == {key: data for key, (_, data) in self.now.items()}


@settings(max_examples=40)
@given(steps=STEPS, seed=st.integers(0, 2**32), num_shards=st.sampled_from([1, 3]), has_host_table=st.booleans())
def test_every_change_arrives_once_and_marks_are_true(
    steps: list[tuple[list[int], str, int, bool, str]], seed: int, num_shards: int, has_host_table: bool
) -> None:
    """Whatever runs when, rows go out as their step has left them, once a change, and each mark keeps its promise."""
    training = Training(seed, num_shards, has_host_table=has_host_table)
    for step, (rows, wide, num_completed, acks, event) in enumerate(steps, 1):
        for fqn, first, end in (("a", 0, 500), ("b", 500, 900), ("c", 900, 1200)):
            num_rows = training.tables[fqn].weights.shape[0]
            of_table = range(num_rows) if wide == fqn else {row - first for row in rows if first <= row < end}
            training.change(fqn, sorted(of_table), float(step))
        if event == "nan":
            training.change("b", [7], float("nan"))
        training.end_step(step, event)
        for _ in range(min(num_completed, len(training.to.incomplete))):
            training.to.complete()
        if acks:
            training.to.release()
    training.drain(len(steps) + 1)
    training.check()
    assert training.store.marks[-1].is_exact_cut
    assert training.store.marks[-1].step == len(steps) + 1
    training.to.release()
    assert training.to.pool.num_free == 2
    assert training.to.flusher.num_dirty_rows == 0


@scripts(__file__, "device_pipeline")
def test_scripts(script: Script) -> None:
    """Flushes of a device are as the scripts say."""
    script.run(DeviceTraining())


@pytest.mark.parametrize("has_host_table", [False, True])
@pytest.mark.parametrize("event", ["submit fails", "nan", "leave"])
def test_rows_that_are_taken_back_amid_a_pass_are_in_its_marks(event: str, has_host_table: bool) -> None:
    """A pass begins anew after a flush that is not sent, and has the rows that a table takes with it to the host."""
    training = Training(0, 1, has_host_table=has_host_table, num_host_rows=3000)
    for fqn, table in training.tables.items():
        training.change(fqn, list(range(table.weights.shape[0])), 1.0)
    for step in range(1, 16):
        training.change("a", [0, 1], float(step))
        if step == 1 and event == "nan":
            training.change("b", [7], float("nan"))  # in the second flush
        training.end_step(step, event if step == 2 else "")
        training.to.complete_all()
        training.to.release()
    assert len(training.store.marks) > 1
    training.drain(16)
    training.check()


def test_what_is_not_finite_is_named() -> None:
    """The step after a flush that was not sent names table and row."""
    _, table, to = one_table(non_finite="reject")
    table.update([7], float("nan"))
    to.on_step(1)
    with pytest.raises(NonFiniteError, match=r"'t.weight': weights of row 7 is NaN"):
        to.flush_all(2)


def test_the_device_fails() -> None:
    """What a kernel has stopped for is an error of the background thread, with the device's own words."""
    _, table, to = one_table()
    table.tapped.dirty.mark(torch.tensor([1000]))
    to.on_step(1)
    with pytest.raises(HeadraceError, match=r"the device has failed: .*1000"):
        to.complete()


def test_scalars_are_read_by_the_device() -> None:
    """A scalar in the device's memory travels as it was at the step, however late it is read."""
    fake = FakeDevice()
    table, count = DeviceTrained(fake), torch.zeros(1, dtype=torch.int64)
    table.tapped._scalars = lambda: {"iter": count}
    to = DeviceSubmitted(fake, [table])
    for step in (1, 2):
        fake.enqueue(lambda: count.add_(5))
        table.update([step], 1.0)
        to.on_step(step)
    for step in (1, 2):
        flush = to.complete()
        assert flush is not None
        ((name, _, data),) = flush.tables[0].scalars
        assert (name, np.frombuffer(data, "<i8").tolist()) == ("iter", [5 * step])


def test_columns_that_move_are_read_where_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """Weights that become another tensor are drained there; if they cannot be, the host gathers them from then on."""
    _, table, to = one_table()
    table.update([1], 1.0)
    to.on_step(1)
    table.weights = torch.full((50, 4), 2.0)
    table.tapped.dirty.mark(torch.tensor([2]))
    to.on_step(2)
    to.complete_all()
    assert [list(sent(flush).values()) for flush in to.flushes] == [[row_bytes(1.0, 0, 4)], [row_bytes(2.0, 0, 4)]]
    to.release()
    table.weights = torch.full((4, 50), 3.0).t()
    table.tapped.dirty.mark(torch.tensor([3]))
    to.flusher.on_step(3)
    assert isinstance(table.tapped.dirty, DirtyRows)
    assert "gathered by the host from now on: 't.weight'" in caplog.text
    assert sent(to.complete()) == {("t.weight", 3): row_bytes(3.0, 0, 4)}


def test_memory_that_is_exchanged_in_its_storage_is_read_where_it_is() -> None:
    """A table that was moved off the device and back has the same storage, with other memory: its plan is made anew."""
    fake = FakeDevice()
    table = DeviceTrained(fake, "t", 4096, 64)
    to = DeviceSubmitted(fake, [table])
    tables = to.pipeline._tables
    table.update([1], 1.0)
    to.on_step(1)
    plan = tables.plan()
    assert plan is tables.plan() is not None
    storage = table.weights.untyped_storage()
    storage.resize_(2 * storage.nbytes())  # as to zero and back, but never to the same place
    assert table.weights.data_ptr() != plan.addresses[0]
    now = tables.plan()
    assert now is not None and now.addresses == [table.weights.data_ptr()]


def test_states_that_are_not_made_yet_are_zeros() -> None:
    """Expanded zeros are packed like a state of memory of its own."""
    fake = FakeDevice()
    table = DeviceTrained(fake, states=[POINTWISE])
    table.states = {"exp_avg": zero_state(50, 4, torch.float32, fake.device)}
    to = DeviceSubmitted(fake, [table])
    table.tapped.dirty.mark(torch.tensor([9]))
    to.on_step(1)
    assert sent(to.complete())["t.weight", 9][16:] == bytes(16)


def test_tables_beside_a_device_are_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Tables on the CPU, or without rows here, are none that the device refuses, wherever they come in a model."""
    fake, _, to = one_table()
    others: list[Trained] = [DeviceTrained(fake, "empty", num_rows=0), DeviceTrained(fake, "wide", 30)]
    to.flusher.add_tables([other.tapped for other in others])
    assert [isinstance(other.tapped.dirty, DirtyRows) for other in others] == [True, False]
    to.pipeline._tables._runtime_of = lambda device: None
    to.flusher.add_tables([Trained("host").tapped])
    assert "gathered by the host" not in caplog.text


def test_a_device_without_kernels_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    """One line gives the reason for all tables: finding out may take as long as compiling a kernel."""
    to = DeviceSubmitted(FakeDevice(), [])
    asked: list[torch.device] = []

    def runtime_of(device: torch.device) -> str:
        asked.append(device)
        return "no kernels"

    to.pipeline._tables._runtime_of = runtime_of
    to.flusher.add_tables([Trained("a").tapped, Trained("b").tapped])
    assert len(asked) == 1
    (record,) = caplog.records
    assert record.getMessage() == "device_pipeline: gathered by the host, no kernels: 'a', 'b'"


def test_no_room_is_told_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short the settings to change are named, and the tables stay as they were."""
    fake = FakeDevice()

    def pinned(size_bytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fake, "pinned", pinned)
    to, table = DeviceSubmitted(fake, []), DeviceTrained(fake)
    with pytest.raises(ConfigError, match="lower staging_bytes, or set device_pipeline=False"):
        to.flusher.add_tables([table.tapped])
    assert isinstance(table.tapped.dirty, DirtyRows)
    assert not to.pipeline.is_active


def test_eviction_is_refused_before_anybody_is_told_of_it() -> None:
    """A table whose marking was captured stays on the device: no hook gives places away of rows that stay."""
    fake, table, to = one_table()
    fake.capturing = True
    table.tapped.dirty.mark(torch.tensor([3]))
    fake.capturing = False
    evictor, told = Evictor(), list[torch.Tensor]()
    evictor.register_hook(lambda fqn, rows: told.append(rows))
    with pytest.raises(UnsupportedModelError, match="captured in a CUDA graph"):
        evictor.evict([table.tapped], "t.weight", torch.tensor([3, 5]))
    assert not told and table.tapped.deleted.is_empty
    assert to.pipeline.is_active


def test_an_ended_sender_wakes_who_waits() -> None:
    """Who waits for the device is woken when streaming has ended, and the flush then tells why."""
    _, table, to = one_table()
    table.update([1], 1.0)
    to.on_step(1)
    pending = to.incomplete[0].pending
    assert pending is not None
    waker = threading.Thread(target=pending.abandon)
    waker.start()
    to.flusher.settle(60.0)
    waker.join()
    to.error = HeadraceError("streaming has ended")
    with pytest.raises(HeadraceError, match="streaming has ended"):
        to.flusher.flush_all(2, 1.0)


@pytest.mark.parametrize(("hip", "setting", "is_on"), [(None, None, True), ("6.2", None, False), ("6.2", True, True)])
def test_it_is_on_where_it_has_run(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, setting: bool | None, is_on: bool
) -> None:
    """By default tables on AMD's GPUs are gathered by the host."""
    monkeypatch.setattr(torch.version, "hip", hip)
    to = Submitted([Trained("a")], device_pipeline=setting)
    assert (to.flusher._device is not None) == is_on


def test_cuda_runtime_says_what_is_missing() -> None:
    """A device without kernels has no runtime, but a reason."""
    assert cuda_runtime(torch.device("meta")) == "there are no kernels for meta"
    assert cuda_runtime(torch.device("cpu")) is None
