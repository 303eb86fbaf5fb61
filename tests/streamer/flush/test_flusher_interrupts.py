"""Ctrl-C at any line of a flush or an eviction: no row, no deletion and no staging buffer is lost."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from dense_model import dense_of, tensors_of
from torch import nn
from trainer_tables import ROWWISE, Submitted, Trained, VirtualRows, deleted_of, rows_of

from headrace.kernels.dirty_sets import DirtyIds, DirtyRows
from headrace.streamer.flush.dense_copy import DenseCopy
from headrace.streamer.flush.flusher import Flusher, TakenRows
from headrace.streamer.flush.importance import ImportanceFilter
from headrace.streamer.flush.staging import StagingPool
from headrace.streamer.taps.tapped_table import DeletedRows

FILES = {inspect.getfile(cls) for cls in (DeletedRows, DenseCopy, DirtyIds, DirtyRows, Flusher, StagingPool, TakenRows)}
FILES |= {inspect.getfile(ImportanceFilter)}


def is_interrupted_at(place: int, call: Callable[[], object]) -> bool:
    """Run `call` with a Ctrl-C at the n-th line or return of the files above; return whether there was such a one."""
    num_places = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num_places
        # What is raised amid the closing of a generator goes nowhere.
        if frame.f_code.co_filename not in FILES or frame.f_code.co_flags & inspect.CO_GENERATOR:
            return None
        num_places += event in ("line", "return")
        if num_places == place:
            num_places += 1
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        torch.set_grad_enabled(True)  # what came amid the end of a `no_grad` has left it off
    return False


class Streamed:
    """A table and one with virtual ids, some rows of which were evicted, and what the store has of them."""

    def __init__(self, send_share: float = 1.0) -> None:
        self.table = Trained("t.weight", 9000, states=[ROWWISE])
        if send_share < 1:
            self.table.tapped.hold_back_all_but(send_share)
        self.virtual = VirtualRows()
        self.submitted = Submitted([self.table, self.virtual], num_shards=2)
        self.submitted.flusher._withdraw = lambda flush: flush not in self.submitted.flushes
        self.expected: dict[tuple[str, int], float] = {}
        self.stored: dict[tuple[str, int], float] = {}
        self.num_applied = 0
        for table, rows in ((self.table, range(0, 9000, 100)), (self.virtual, range(40))):
            self.update(table, list(rows), 1.0)
        self.flush(1)
        self.evict(self.table, [100, 200, 300])
        self.evict(self.virtual, [1, 2, 3])
        self.flush(2)

    def update(self, table: Trained | VirtualRows, rows: list[int], value: float) -> None:
        table.update(rows, value)
        self.expected |= {(table.tapped.spec.fqn, row): value for row in rows}

    def evict(self, table: Trained | VirtualRows, rows: list[int]) -> None:
        table.tapped.evict(torch.tensor(rows))
        if isinstance(table, VirtualRows):
            table.drop(set(rows))
        for row in rows:
            del self.expected[table.tapped.spec.fqn, row]

    def flush(self, step: int) -> None:
        """End a step, and have the store take what is sent."""
        self.submitted.flusher.on_step(step)
        self.apply()

    def apply(self) -> None:
        """Have the store take what was sent."""
        for flush in self.submitted.flushes[self.num_applied :]:
            for _, fqn, row, data in rows_of(flush, 2):
                self.stored[fqn, row] = float(np.frombuffer(data, "<f4")[0])
            for _, fqn, row in deleted_of(flush, 2):
                self.stored.pop((fqn, row), None)
        self.num_applied = len(self.submitted.flushes)
        self.submitted.release()


def test_a_flush_may_be_interrupted_anywhere() -> None:
    """After it, the next flush completes the store: updates, deletions, and evicted rows that are used again."""
    place, is_interrupted = 0, True
    while is_interrupted:
        place += 1
        streamed = Streamed()
        streamed.evict(streamed.table, [400, 500, 8900])
        streamed.evict(streamed.virtual, [10, 11])
        streamed.update(streamed.table, [100, 500, 601, 8999], 2.0)
        streamed.update(streamed.virtual, [2, 11, 12], 2.0)
        streamed.virtual.drop({13})  # with no eviction: marked, so it is seen that it is not held any more
        streamed.virtual.tapped.dirty.mark(torch.tensor([13]))
        del streamed.expected["v.weight", 13]
        is_interrupted = is_interrupted_at(place, lambda: streamed.submitted.flusher.on_step(3))  # noqa: B023
        streamed.apply()
        assert streamed.submitted.pool.num_free == 2, place
        streamed.flush(4)
        assert streamed.stored == streamed.expected, place
        assert streamed.submitted.flusher.num_dirty_rows == 0
        assert streamed.submitted.pool.num_free == 2
    assert place > 100


@pytest.mark.parametrize("is_release", [False, True])
def test_a_flush_that_holds_rows_back_may_be_interrupted_anywhere(is_release: bool) -> None:
    """After it, a flush of all completes the store, and so it does after a release that was interrupted."""
    place, is_interrupted = 0, True
    while is_interrupted:
        place += 1
        streamed = Streamed(send_share=0.25)
        flusher = streamed.submitted.flusher
        streamed.update(streamed.table, list(range(500, 9000, 100)), 2.0)
        if is_release:
            streamed.flush(3)
            assert flusher.num_waiting_rows
            flusher._release_until = flusher._next_mark
        streamed.evict(streamed.table, [600, 700])
        streamed.update(streamed.table, [700, 8000], 3.0)
        is_interrupted = is_interrupted_at(place, lambda: flusher.on_step(4))  # noqa: B023
        streamed.apply()
        assert streamed.submitted.pool.num_free == 2, place
        flusher.flush_all(5, 5.0)
        streamed.apply()
        assert streamed.stored == streamed.expected, place
        assert not flusher.num_waiting_rows
    assert place > 100


@pytest.mark.timeout(300)  # a flush for each of some thousand places
def test_a_flush_with_dense_tensors_may_be_interrupted_anywhere() -> None:
    """After it, the next flush completes the store and is an exact cut, and the copy of the tensors is free again."""
    place, is_interrupted = 0, True
    while is_interrupted:
        place += 1
        streamed = Streamed()
        layer = nn.Linear(30, 70)
        tensors = tensors_of(layer)
        flusher = streamed.submitted.flusher
        flusher.add_dense(tensors)
        streamed.update(streamed.table, [100, 601], 2.0)
        is_interrupted = is_interrupted_at(place, lambda: flusher.on_step(3))  # noqa: B023
        streamed.apply()
        assert flusher.dense.is_free, place
        with torch.no_grad():
            layer.weight.fill_(place)
        flusher.mark_all()
        flusher.on_step(4)
        last = streamed.submitted.flushes[-1]
        assert last.mark is not None and last.mark.is_exact_cut, place
        found = dense_of(last, tensors, 2)
        assert torch.equal(found["weight"], layer.weight) and torch.equal(found["bias"], layer.bias), place
        streamed.apply()
        assert streamed.submitted.pool.num_free == 2
        assert flusher.dense.is_free
    assert place > 100


@pytest.mark.parametrize("is_virtual", [True, False])
def test_an_eviction_may_be_interrupted_anywhere(is_virtual: bool) -> None:
    """After it, a row is deleted, or what it had to send is sent still."""
    place, is_interrupted = 0, True
    while is_interrupted:
        place += 1
        streamed = Streamed()
        table = streamed.virtual if is_virtual else streamed.table
        rows = [20, 21] if is_virtual else [700, 800]
        streamed.update(table, rows[:1], 3.0)
        is_interrupted = is_interrupted_at(place, lambda: table.tapped.evict(torch.tensor(rows)))  # noqa: B023
        streamed.flush(3)
        for row in rows:
            key = (table.tapped.spec.fqn, row)
            assert streamed.stored.get(key, streamed.expected[key]) == streamed.expected[key], place
        assert streamed.submitted.flusher.num_dirty_rows == 0
    assert place > 5


def test_rows_are_noted_before_they_go() -> None:
    """Whoever takes rows knows of them while they are dirty still."""
    table = Trained(num_rows=50)
    noted: list[int] = []
    table.mark([1, 7, 30])

    def note(row_ids: torch.Tensor) -> None:
        assert table.tapped.dirty.contains(row_ids).all()
        noted.extend(row_ids.tolist())

    assert table.tapped.dirty.take(2, first_row=5, note=note).tolist() == noted == [7, 30]
    assert table.tapped.dirty.take().tolist() == [1]
