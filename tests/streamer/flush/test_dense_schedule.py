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


def test_one_rank_has_a_clock() -> None:
    """A run of one rank publishes at the first step after each interval, and at once when told."""

    def run(rank: ThreadRank) -> list[tuple[int, Turn]]:
        schedule = DenseSchedule(rank)
        return due_steps(schedule, range(1, 25), step_s=1.0)

    ((found,), num_exchanges) = on_ranks(1, run)
    assert found == [(1, Turn.DUE), (11, Turn.DUE), (21, Turn.DUE)]
    assert num_exchanges == 0


def test_ranks_publish_at_the_same_steps() -> None:
    """However their clocks differ, ranks publish at the same steps, an interval of the slowest's pace apart."""

    def run(rank: ThreadRank) -> list[tuple[int, Turn]]:
        return due_steps(DenseSchedule(rank), range(1, 41), step_s=(1.0, 0.5)[rank.rank])

    (first, second), num_exchanges = on_ranks(2, run)
    assert first == second
    assert [step for step, _ in first] == [1, 2, 22]  # the pace is known from the second on
    assert num_exchanges == 3


def test_step_numbers_may_have_gaps() -> None:
    """Steps that the user numbers by tens have intervals of the same time."""

    def run(rank: ThreadRank) -> list[tuple[int, Turn]]:
        return due_steps(DenseSchedule(rank), range(10, 300, 10), step_s=1.0)

    (first, second), _ = on_ranks(2, run)
    assert first == second
    assert [step for step, _ in first] == [10, 20, 120, 220]


def test_a_rank_without_a_buffer_is_waited_for() -> None:
    """While a rank has no staging buffer, all ask again at each step, and send nothing else meanwhile."""

    def run(rank: ThreadRank) -> list[tuple[int, Turn]]:
        lacks = lambda step: Readiness.LACKS_BUFFER if rank.rank and 3 <= step < 6 else Readiness.IS_READY  # noqa: E731
        return due_steps(DenseSchedule(rank), range(1, 9), step_s=1.0, interval_s=2.0, readiness=lacks)

    (first, second), _ = on_ranks(2, run)
    assert first == second
    waits = [(step, Turn.WAIT) for step in (4, 5)]
    assert first == [(1, Turn.DUE), (2, Turn.DUE), *waits, (6, Turn.DUE), (8, Turn.DUE)]


def test_a_rank_whose_last_copy_is_on_its_way_is_not_waited_for() -> None:
    """If a rank cannot publish, none does, until the next dense step; rows go on."""

    def run(rank: ThreadRank) -> list[tuple[int, Turn]]:
        absent = lambda step: Readiness.IS_ABSENT if not rank.rank and step < 4 else Readiness.IS_READY  # noqa: E731
        return due_steps(DenseSchedule(rank), range(1, 9), step_s=1.0, interval_s=2.0, readiness=absent)

    (first, second), _ = on_ranks(2, run)
    assert first == second == [(1, Turn.NOT_DUE), (2, Turn.NOT_DUE), (4, Turn.DUE), (6, Turn.DUE), (8, Turn.DUE)]


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
            timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
            for timer in timers:
                timer.join(60)
            return [list(values)] * 2

    monkeypatch.setattr(world, "_LATE_S", 0.01)
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
