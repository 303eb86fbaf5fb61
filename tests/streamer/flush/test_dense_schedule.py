"""Ranks publish dense tensors at the same steps, which they agree on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from dense_model import dense_of, tensors_of
from thread_ranks import Ranks, ThreadRank
from torch import nn
from trainer_tables import Submitted, Trained

from headrace.streamer import world
from headrace.streamer.flush.dense_schedule import DenseSchedule, Readiness, Turn
from headrace.streamer.flush.flusher import Flusher


def on_ranks(size: int, work: Callable[[ThreadRank], Any]) -> tuple[list[Any], int]:
    """Return what work returns on each rank, and how often they have exchanged something."""
    ranks = Ranks(size)
    results = ranks.run(work)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
            raise result
    return results, ranks.num_exchanges


def due_steps(
    schedule: DenseSchedule,
    steps: range,
    *,
    step_s: float,
    interval_s: float = 10.0,
    readiness: Callable[[int], Readiness] = lambda step: Readiness.IS_READY,
) -> list[tuple[int, Turn]]:
    """Return the steps at which a rank was asked, and its turns."""
    found = []
    now_s = 100.0
    for step in steps:
        now_s += step_s
        if schedule.is_asked(step, now_s, interval_s):
            turn = schedule.turn(step, now_s, interval_s, readiness(step))
            if turn is Turn.DUE:
                schedule.note_sent(now_s)
            found.append((step, turn))
    return found


def _due(*steps: int) -> list[tuple[int, Turn]]:
    return [(step, Turn.DUE) for step in steps]


@pytest.mark.parametrize(
    ("steps", "step_s", "interval_s", "not_ready", "turns", "num_exchanges"),
    [
        pytest.param(range(1, 25), [1.0], 10, {}, _due(1, 11, 21), 0, id="one rank has a clock"),
        # The pace is known from the second dense step on: it is the slowest rank's.
        pytest.param(range(1, 41), [1.0, 0.5], 10, {}, _due(1, 2, 22), 3, id="clocks differ"),
        pytest.param(range(10, 300, 10), [1.0] * 2, 10, {}, _due(10, 20, 120, 220), 4, id="numbers with gaps"),
        pytest.param(
            range(1, 9),
            [1.0] * 2,
            2,
            {(1, step): Readiness.LACKS_BUFFER for step in (3, 4, 5)},
            [*_due(1, 2), (4, Turn.WAIT), (5, Turn.WAIT), *_due(6, 8)],
            6,
            id="a rank without a buffer is waited for",
        ),
        pytest.param(
            range(1, 9),
            [1.0] * 2,
            2,
            {(0, step): Readiness.IS_ABSENT for step in (1, 2, 3)},
            [(1, Turn.NOT_DUE), (2, Turn.NOT_DUE), *_due(4, 6, 8)],
            5,
            id="one whose last copy is on its way is not",
        ),
    ],
)
def test_ranks_publish_at_the_same_steps(
    steps: range,
    step_s: list[float],
    interval_s: float,
    not_ready: dict[tuple[int, int], Readiness],
    turns: list[tuple[int, Turn]],
    num_exchanges: int,
) -> None:
    """All ranks publish at the first step after each interval at which all can."""

    def run(rank: ThreadRank) -> list[tuple[int, Turn]]:
        readiness = lambda step: not_ready.get((rank.rank, step), Readiness.IS_READY)  # noqa: E731
        return due_steps(
            DenseSchedule(rank), steps, step_s=step_s[rank.rank], interval_s=interval_s, readiness=readiness
        )

    assert on_ranks(len(step_s), run) == ([turns] * len(step_s), num_exchanges)


def test_all_ranks_attach_anew_together() -> None:
    """After another model is attached, the next step is a dense step."""

    def run(rank: ThreadRank) -> list[tuple[int, Turn]]:
        schedule = DenseSchedule(rank)
        found = due_steps(schedule, range(1, 4), step_s=1.0)
        schedule.begin_anew()
        return found + due_steps(schedule, range(4, 6), step_s=1.0)

    (first, second), _ = on_ranks(2, run)
    assert first == second
    assert [step for step, _ in first][:3] == [1, 2, 4]


def test_a_rank_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A rank that waits for another one, which may have ended, says where."""

    class Late(ThreadRank):
        def exchange(self, values: Sequence[int]) -> list[list[int]]:
            for thread in set(threading.enumerate()) - others:
                thread.join()
            return [list(values)] * 2

    monkeypatch.setattr(world, "_LATE_S", 0.01)
    others = set(threading.enumerate())  # a timer of pytest's own among them
    schedule = DenseSchedule(Late(Ranks(2), 0))
    assert schedule.turn(7, 1.0, 1.0, Readiness.IS_READY) is Turn.DUE
    assert "rank 0 of 2 has waited in the end of step 7, where dense parameters are due" in caplog.text


@pytest.mark.parametrize("paused", [False, True])
def test_flushers_of_ranks_publish_each_tensor_once(paused: bool) -> None:
    """Each tensor is in the flush of one rank, at the same steps; while a rank is paused, none publishes."""

    def run(rank: ThreadRank) -> dict[int, set[str]]:
        table = Trained()
        to = Submitted([])
        to.flusher = Flusher(
            config=to.flusher._config,
            num_shards=1,
            pool=to.pool,
            submit=to._submit,
            describe_delay=lambda: "",
            monotonic_s=lambda: clock[0],
            world=rank,
        )
        clock = [100.0]
        to.flusher.add_tables([table.tapped])
        tensors = tensors_of(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 3)))
        to.flusher.add_dense(tensors)
        found = {}
        for step in range(1, 25):
            clock[0] += 1.0 + rank.rank
            table.mark([step])
            if paused and rank.rank and step < 10:
                to.flusher.pass_step(step)
                continue
            to.flusher.on_step(step)
            flush = to.flushes[-1]
            assert flush.step == step
            assert flush.mark is not None
            names = set(dense_of(flush, tensors))
            assert flush.mark.is_exact_cut == bool(names)
            if names:
                found[step] = names
            to.release()
        assert {each.path for each in tensors.all} == all_names
        return found

    all_names = {f"{at}.{name}" for at in (0, 2) for name in ("weight", "bias")}
    all_names |= {f"1.{name}" for name in nn.BatchNorm1d(2).state_dict()}
    (first, second), _ = on_ranks(2, run)
    assert first.keys() == second.keys()
    assert min(first) > 9 if paused else list(first) == [1, 2, 12, 22]
    for step in first:
        assert first[step] | second[step] == all_names
        assert not first[step] & second[step]
        assert second[step]
