"""Optimizer states in a table of their own: their rows go out with a flush of all, and none is forgotten."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from interrupts import is_interrupted_at
from trainer_tables import POINTWISE, ROWWISE, Submitted, Trained, deleted_of, rows_of

from headrace.schemas.errors import UnavailableError
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.tables import ColumnShard, StateKind, StateSpec

NUM_ROWS, DIM = 400, 16


class Streamed:
    """A table with its states table, and what the store has of both: by table and row, the first value."""

    def __init__(self, *, send_share: float = 1.0, **settings: Any) -> None:
        self.table = Trained("t", NUM_ROWS, DIM, states=[ROWWISE, POINTWISE])
        if send_share < 1:
            self.table.tapped.hold_back_all_but(send_share)
        self.states_table = self.table.tapped.split_states()
        self.submitted = Submitted(
            [self.table, SimpleNamespace(tapped=self.states_table)],  # type: ignore[list-item]
            num_shards=2,
            **settings,
        )
        self.flusher = self.submitted.flusher
        self.flusher._withdraw = lambda flush: flush not in self.submitted.flushes
        self.stored: dict[tuple[str, int], float] = {}
        self.expected: set[int] = set()
        self.evicted: set[int] = set()
        self._num_applied = 0
        self.step = 0

    def update(self, rows: Sequence[int], value: float) -> None:
        """Set weights to a value and states to its opposite."""
        self.table.update(rows, value)
        for state in self.table.states.values():
            state[list(rows)] = -value
        self.expected.update(rows)
        self.evicted.difference_update(rows)

    def evict(self, rows: Sequence[int]) -> None:
        self.table.tapped.evict(torch.tensor(rows))
        self.expected.difference_update(rows)
        self.evicted.update(rows)

    def on_step(self) -> None:
        self.step += 1
        self.flusher.on_step(self.step)
        self.apply()

    def flush_all(self, timeout_s: float = 5.0) -> None:
        self.flusher.flush_all(self.step, timeout_s)
        self.apply()

    def lose(self, number: int) -> None:
        """Have the store lose the rows of a third of the partitions; the flusher hears of it."""
        partition_map = PartitionMap.first(2)
        is_lost = np.arange(partition_map.num_partitions) % 3 == 0
        for table in (self.table.tapped, self.states_table):
            home = partition_map.partitions_of_rows(table.spec.seed, np.arange(NUM_ROWS))
            for row in np.flatnonzero(is_lost[home]).tolist():
                self.stored.pop((table.spec.fqn, row), None)
        self.flusher.mark_partitions(is_lost, num_losses=number)

    def fail(self) -> None:
        """Flush in vain, while all buffers are on their way."""
        buffers = []
        while (buffer := self.submitted.pool.reserve()) is not None:
            self.submitted.pool.remove(buffer)
            buffers.append(buffer)
        with contextlib.suppress(UnavailableError):  # nothing may be left to send
            self.flush_all(timeout_s=0.0)
        for buffer in buffers:
            self.submitted.pool.release(buffer)

    def apply(self) -> None:
        """Have the store take what was sent."""
        for flush in self.submitted.flushes[self._num_applied :]:
            for _, fqn, row, data in rows_of(flush, 2):
                self.stored[fqn, row] = float(np.frombuffer(data, "<f4")[0])
            for _, fqn, row in deleted_of(flush, 2):
                self.stored.pop((fqn, row), None)
        self._num_applied = len(self.submitted.flushes)
        self.submitted.release()

    def check(self) -> None:
        """Check that the store has weights and states of all rows updated and not evicted, and present values only."""
        for fqn, live in (("t", self.table.weights.detach()), ("t@states.exp_avg", self.table.states[POINTWISE.name])):
            stored = {row: value for (name, row), value in self.stored.items() if name == fqn}
            assert self.expected <= stored.keys()
            assert stored == {row: float(live[row, 0]) for row in stored}
            assert not self.evicted & stored.keys()
        assert self.flusher.num_owed_rows == self.flusher.num_dirty_rows == self.flusher.num_waiting_rows == 0

    @property
    def last_states(self) -> list[int]:
        """Rows of states in the last flush."""
        return sorted(row for _, fqn, row, _ in rows_of(self.submitted.flushes[-1], 2) if fqn == "t@states.exp_avg")


def test_states_wait_for_a_flush_of_all() -> None:
    """Steps send weights and are exact cuts; the flush sends the states of all rows that went out since, once."""
    streamed = Streamed()
    for number in range(3):
        streamed.update([number, 10], float(number + 1))
        streamed.on_step()
        assert streamed.last_states == []
        assert (mark := streamed.submitted.flushes[-1].mark) is not None and mark.is_exact_cut
    assert streamed.flusher.num_owed_rows == 4
    streamed.update([20], 9.0)
    streamed.step += 1
    streamed.flush_all()
    assert streamed.last_states == [0, 1, 2, 10, 20]
    streamed.check()
    streamed.step += 1
    streamed.flush_all()
    assert streamed.last_states == []


def test_states_that_are_to_go_out_are_not_owed() -> None:
    """Of a table that is sent whole, they go out with the weights, once."""
    streamed = Streamed()
    streamed.flusher.mark_all()
    streamed.on_step()
    assert len(streamed.last_states) == NUM_ROWS
    assert streamed.flusher.num_owed_rows == 0


def test_the_states_table() -> None:
    """Its weights are the first pointwise state; rowwise ones and the scalars are kept beside it."""
    table = Trained("m:t", 9, 4, states=[ROWWISE, POINTWISE], shard=ColumnShard(offset=2, width=2)).tapped
    states = table.split_states()
    assert (states.spec.fqn, states.spec.dim, states.shard) == ("m:t@states.exp_avg", 4, table.shard)
    assert states.spec.states == (ROWWISE,)
    assert table.spec.states == ()
    rowwise = Trained("t", 9, 4, states=[ROWWISE]).tapped.split_states()
    assert (rowwise.spec.dim, rowwise.spec.states) == (1, ())


def test_tables_whose_states_cannot_wait() -> None:
    """Those with virtual ids or identities, without states, or with one value a row and split by columns."""
    pairs = StateSpec(name="pair", kind=StateKind.ROWWISE, dtype=ROWWISE.dtype, width=2)
    assert Trained(states=[pairs]).tapped.can_split_states
    assert Trained(states=[POINTWISE], shard=ColumnShard(offset=0, width=2)).tapped.can_split_states
    assert not Trained(states=[pairs], shard=ColumnShard(offset=0, width=2)).tapped.can_split_states
    assert not Trained().tapped.can_split_states


@pytest.mark.parametrize("send_share", [1.0, 0.25])
@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events(seed: int, send_share: float) -> None:
    """Updates, evictions, full buffers, lost partitions, failed flushes: a flush that succeeds makes all equal."""
    rng = random.Random(seed)
    # Two buffers that hold a third of the rows each.
    streamed = Streamed(send_share=send_share, staging_bytes=2 * NUM_ROWS // 3 * (2 * DIM * 4 + 12))
    for number in range(60):
        event = rng.choice(["update", "update", "update", "step", "step", "evict", "flush", "lose", "fail", "all"])
        if event == "update":
            streamed.update(rng.sample(range(NUM_ROWS), rng.randrange(1, NUM_ROWS // 2)), float(number + 1))
        elif event == "step":
            streamed.on_step()
        elif event == "evict":
            streamed.evict(rng.sample(range(NUM_ROWS), 5))
        elif event == "lose":
            streamed.lose(number)
        elif event == "fail":
            streamed.fail()
        elif event == "all":
            streamed.flusher.mark_all()
        else:
            streamed.step += 1
            flush_all(streamed)
    streamed.step += 1
    flush_all(streamed)


def flush_all(streamed: Streamed) -> None:
    """Flush through two small buffers, which the store frees as they come."""
    submit = streamed.submitted.flusher._submit

    def submit_and_apply(flush: Any) -> None:
        submit(flush)
        streamed.apply()

    streamed.flusher._submit = submit_and_apply
    streamed.flush_all()
    streamed.flusher._submit = submit
    streamed.check()


@pytest.mark.parametrize("is_of_all", [True, False])
def test_a_flush_may_be_interrupted_anywhere(is_of_all: bool) -> None:
    """After it, and after an update of a row that it had sent, a flush of all completes weights and states."""
    place, is_interrupted = 0, True
    while is_interrupted:
        place += 1
        streamed = Streamed()
        streamed.update(range(0, NUM_ROWS, 9), 1.0)
        streamed.on_step()
        streamed.update([3, 9, 18], 2.0)
        flusher = streamed.flusher
        flush = lambda: flusher.flush_all(1, 5.0) if is_of_all else flusher.on_step(2)  # noqa: B023, E731
        is_interrupted = is_interrupted_at(place, flush)
        streamed.apply()
        streamed.step = 2
        streamed.update([18, 20], 3.0)
        streamed.on_step()
        streamed.flush_all()
        streamed.check()
    assert place > 100
