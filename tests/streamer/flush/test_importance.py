"""Rows that hardly changed wait: which do, for how long, and what step marks then promise."""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dense_model import dense_of, tensors_of
from device_flushes import DeviceSubmitted, DeviceTrained
from fake_device import FakeDevice
from scripted_flushes import ScriptedFlushes
from text_scripts import Script, scripts
from torch import nn
from trainer_tables import SMALL_BYTES, WIDE, Submitted, Trained, deleted_of, rows_of, taken

from headrace.schemas.tables import DType
from headrace.streamer.device.dirty_rows import DeviceDirtyRows
from headrace.streamer.flush.flusher import Flusher
from headrace.streamer.flush.importance import ImportanceFilter

SHARE = 0.2


class Filtered(Trained):
    """A table of which flushes send a share."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tapped.hold_back_all_but(SHARE)
        self._generator = torch.Generator().manual_seed(1)

    def change(self, rows: Iterable[int], size: float) -> None:
        """Add a vector of a length to each row, in any direction, and mark it."""
        rows = list(rows)
        ways = torch.nn.functional.normalize(
            torch.randn(len(rows), self.weights.shape[1], generator=self._generator), dim=1
        )
        with torch.no_grad():
            self.weights[rows] += size * ways
        self.mark(rows)


class Store:
    """A filtered table, its flusher with a clock, and what a store has of it.

    Attributes:
        now_s: The clock.
        rows: What the store has, by row.
        marks: Step of each mark, and whether it is exact.
    """

    def __init__(self, num_rows: int = 100, *, staging_bytes: int = 2**20, **settings: Any) -> None:
        self.now_s = 100.0
        self.table = Filtered(num_rows=num_rows, dim=WIDE)
        self.to = Submitted([self.table], staging_bytes=staging_bytes, clock=lambda: self.now_s, **settings)
        self.rows: dict[int, bytes] = {}
        self.marks: list[tuple[int, bool]] = []
        self._num_applied = 0

    @property
    def flusher(self) -> Flusher:
        return self.to.flusher

    def step(self, step: int) -> list[int]:
        """End a step, and return the rows that the store got."""
        before = len(self.to.flushes)
        self.flusher.on_step(step)
        self.apply()
        return [row for flush in self.to.flushes[before:] for row in taken(flush)]

    def apply(self) -> None:
        """Have the store take what was sent."""
        for flush in self.to.flushes[self._num_applied :]:
            self.rows |= {row: data for _, fqn, row, data in rows_of(flush, 1) if fqn == "t.weight"}
            for _, _, row in deleted_of(flush, 1):
                self.rows.pop(row, None)
            if flush.mark is not None:
                self.marks.append((flush.mark.step, flush.mark.is_exact_cut))
        self._num_applied = len(self.to.flushes)
        self.to.release()

    def publish(self) -> None:
        """Have the store take every row, at step 1."""
        self.table.mark(range(self.table.tapped.num_local_rows))
        self.flusher.flush_all(1, 5.0)
        self.apply()
        assert self.is_whole
        self.marks.clear()

    @property
    def is_whole(self) -> bool:
        live = self.table.weights.detach().numpy()
        return self.rows == {row: live[row].tobytes() for row in range(len(live))}


@pytest.fixture
def store() -> Store:
    published = Store(max_staleness_s=10)
    published.publish()
    return published


@scripts(__file__, "importance")
def test_scripts(script: Script) -> None:
    """Rows wait as the scripts say."""
    script.run(ScriptedFlushes())


def test_rows_that_are_stored_rounded_are_compared_as_they_are_stored() -> None:
    """Rows whose rounded values changed most go out; those that are not finite do, too."""
    table = Filtered(num_rows=100, dim=WIDE)
    table.tapped.store_as(DType.BFLOAT16, has_states=False)
    chosen, every = ImportanceFilter(table.tapped), torch.arange(100)
    chosen.note_sent(every)
    changed = set(range(0, 100, 5))
    table.change(changed, 3.0)
    table.change(set(range(100)) - changed, 0.1)
    assert set(chosen.important(every).nonzero().view(-1).tolist()) == changed
    with torch.no_grad():
        table.weights[7, 0] = torch.nan
    assert 7 in chosen.important(every).nonzero().view(-1).tolist()


def test_no_row_waits_longer_than_the_setting(store: Store) -> None:
    """On a clock of one step a second, everything is sent and complete 10 s after the first row began to wait."""
    begun_s: float | None = None
    waits_s = []
    for step in range(2, 60):
        store.table.change(range(50), 0.01)
        store.now_s += 1
        store.step(step)
        assert store.is_whole == (store.flusher.num_waiting_rows == 0)
        if store.flusher.num_waiting_rows:
            begun_s = store.now_s if begun_s is None else begun_s
        elif begun_s is not None:
            waits_s.append(store.now_s - begun_s)
            begun_s = None
            assert store.marks[-1] == (step, True)
    assert len(waits_s) >= 5
    assert max(waits_s) <= 10
    assert min(waits_s) >= 8


def test_freshness_stays_that_of_rows_that_go_out(store: Store) -> None:
    """Rows that wait do not make flushes more frequent, nor a backlog of them."""
    store = Store(max_staleness_s=60, freshness_s=1)
    store.publish()
    flushed = 0
    for step in range(2, 202):
        store.table.change(range(50), 0.01)
        store.now_s += 0.1
        before = len(store.to.flushes)
        store.step(step)
        flushed += len(store.to.flushes) - before
    assert 18 <= flushed <= 24


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("staging_bytes", [SMALL_BYTES, 2**20])
def test_marks_are_never_early(seed: int, staging_bytes: int) -> None:
    """At each mark the store has every row as it was after the marked step, or newer; at an exact one just so."""
    rng = random.Random(seed)
    num_rows = 2500
    store = Store(num_rows, staging_bytes=staging_bytes, max_staleness_s=6)
    changed_at = np.zeros(num_rows)  # the value of a row is the step of its last change
    history = [changed_at.copy()]
    for step in range(1, 60):
        rows = rng.sample(range(num_rows), rng.choice([3, 200, 1500]))
        store.table.update(rows, float(step))
        changed_at[rows] = step
        history.append(changed_at.copy())
        store.now_s += 1
        if rng.random() < 0.05:
            store.flusher.flush_all(step, 5.0) if staging_bytes > SMALL_BYTES else None
        if rng.random() < 0.1:
            store.flusher.mark_all(num_losses=step)
        num_marks = len(store.marks)
        store.step(step)
        for marked, is_exact in store.marks[num_marks:]:
            stored = np.array([np.frombuffer(store.rows[row], "<f4")[0] for row in np.flatnonzero(history[marked])])
            then = history[marked][history[marked] > 0]
            assert (stored >= then).all(), (step, marked)
            assert not is_exact or (stored == then).all(), (step, marked)
    assert len(store.marks) > 3


def test_rows_that_wait_leave_room_in_a_buffer() -> None:
    """A flush looks at more rows than it has room for, because most of them stay; the next step looks at the rest."""
    store = Store(4000, staging_bytes=SMALL_BYTES, freshness_s=60, max_staleness_s=600)
    submit, store.flusher._submit = store.flusher._submit, lambda flush: (submit(flush), store.apply())[0]  # type: ignore[method-assign]
    store.publish()
    store.table.change(range(4000), 0.01)
    assert not store.step(2)
    store.now_s += 60
    assert 400 < len(store.step(3)) < 900  # it has room for 900
    assert store.flusher.num_waiting_rows > 1600
    assert store.flusher.num_dirty_rows
    store.step(4)
    assert not store.flusher.num_dirty_rows


def test_it_takes_four_bytes_and_a_bit_a_row() -> None:
    """The filter's memory is the documented one."""
    table = Filtered(num_rows=100_000, dim=4)
    assert ImportanceFilter(table.tapped).size_bytes <= 100_000 * 4 + 100_000 / 8 + 1024


def test_a_table_on_a_device_is_gathered_by_the_host(caplog: pytest.LogCaptureFixture) -> None:
    """The device's kernels hold nothing back, so such a table stays on the host, and the log says why."""
    fake = FakeDevice()
    table, other = DeviceTrained(fake, "a.weight", 100), DeviceTrained(fake, "b.weight", 100)
    table.tapped.hold_back_all_but(SHARE)
    to = DeviceSubmitted(fake, [table, other])
    assert "gathered by the host, rows may wait (send_share): 'a.weight'" in caplog.text
    assert [isinstance(each.tapped.dirty, DeviceDirtyRows) for each in (table, other)] == [False, True]
    to.completes_at_once = True
    for step in range(1, 6):
        table.update(range(100), float(step))
        other.update(range(50), float(step))
        to.flusher.on_step(step)  # waits for the device, as the host does
        fake.run_all()
        to.release()
    assert to.flusher.num_waiting_rows
    marked = [flush.mark.step for flush in to.flushes if flush.mark is not None]
    to.flusher.flush_all(6, 5.0)
    assert to.flusher.num_waiting_rows == 0
    assert all(step < 4 for step in marked), marked


def test_ranks_release_at_common_steps() -> None:
    """Ranks whose rows began to wait at different times release them at the same steps."""
    released = []
    for begin in (5, 11):
        store = Store(max_staleness_s=20)
        store.flusher.pace._is_alone = False
        store.publish()
        steps = set()
        for step in range(2, 200):
            store.now_s += 1
            if step > begin:
                store.table.change(range(30), 0.01)
            store.step(step)
            steps |= {marked for marked, is_exact in store.marks if is_exact and marked > begin + 1}
        released.append(steps)
    assert released[0] == released[1]
    assert released[0] == set(range(32, 200, 16)) | ({16} & released[0])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_dense_parts_release(num_ranks: int) -> None:
    """Each dense step is an exact cut: all rows that wait go out with the dense tensors."""
    store = Store(max_staleness_s=40, dense_interval_s=10)
    store.publish()
    tensors = tensors_of(nn.Linear(3, 2))
    store.flusher.add_dense(tensors)
    store.flusher._schedule._world = SimpleNamespace(  # type: ignore[assignment]
        size=num_ranks, rank=0, exchange=lambda numbers: [numbers] * num_ranks
    )
    with_dense, exact = [], []
    for step in range(2, 100):
        store.table.change(range(50), 0.01)
        store.now_s += 1
        store.flusher.on_step(step)
        if dense_of(store.to.flushes[-1], tensors):
            with_dense.append(step)
        store.apply()
        if store.marks and store.marks[-1] == (step, True):
            exact.append(step)
            assert store.is_whole
            assert with_dense[-1] == step
    assert len(with_dense) >= 8
    assert exact == with_dense
