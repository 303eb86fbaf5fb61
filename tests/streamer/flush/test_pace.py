"""When flushes are due: by how fresh rows are to be, and by what flushes may cost. On clocks that tests move."""

from __future__ import annotations

import itertools
import random
from statistics import mean

import pytest

from headrace.streamer.flush.pace import MAX_DEBT_S, FlushPace


class _Trainer:
    """Steps of a trainer on clocks that it moves itself.

    Attributes:
        now_s: Time; the training thread's processor time is the same.
        lags_s: Of each flush, the time from its oldest change until it is durable.
        flushed_s: When each flush began.
        flushed_at: At which step.
    """

    def __init__(
        self,
        freshness_s: float,
        max_cost_percent: float,
        *,
        num_busy: int = 1,
        delivery_s: float = 0.0,
        is_alone: bool = True,
        stride: int = 1,
    ) -> None:
        self.now_s, self.background_s, self.delivery_s = 1000.0, 0.0, delivery_s
        self.pace = FlushPace(
            freshness_s,
            max_cost_percent,
            is_alone=is_alone,
            delivery_s=lambda: self.delivery_s,
            background_s=lambda: self.background_s,
            thread_s=lambda: self.now_s,
            process_s=lambda: self.now_s * num_busy,
        )
        self.lags_s: list[float] = []
        self.flushed_s: list[float] = []
        self.flushed_at: list[int] = []
        self._step, self._stride = 1, stride  # steps are numbered 1 + stride, 1 + 2 * stride, …
        self._changed_s: float | None = None

    def train(
        self,
        seconds: float,
        *,
        step_s: float = 0.01,
        cost_s: float = 0.0,
        background_s: float = 0.0,
        is_urgent: bool = False,
    ) -> None:
        """Make steps of `step_s` for some time, in which each flush costs as much, here and in the background."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += step_s
            changed_s = self._changed_s = self.now_s if self._changed_s is None else self._changed_s
            self._step += self._stride
            if not self.pace.is_due(self._step, self.now_s, changed_s, is_urgent=is_urgent):
                continue
            began_s = self.now_s
            with self.pace.counting(is_urgent=is_urgent):
                self.now_s += cost_s
            self.background_s += background_s
            self.pace.note_sent(began_s)
            self.flushed_s.append(began_s)
            self.flushed_at.append(self._step)
            self.lags_s.append(self.now_s + self.delivery_s - changed_s)
            self._changed_s = None

    def share(self) -> float:
        """Return the steps' time from flush to flush, in seconds, on average."""
        return mean(later - earlier for earlier, later in itertools.pairwise(self.flushed_s[5:]))


@pytest.mark.parametrize("delivery_s", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("step_s", [0.001, 0.05, 0.3])
def test_updates_are_as_fresh_as_wanted_and_no_fresher_than_a_step(step_s: float, delivery_s: float) -> None:
    """With time to spare, each flush is durable within `freshness_s`, if a step and the delivery are that short."""
    trainer = _Trainer(1.0, 3, delivery_s=delivery_s)
    trainer.train(60, step_s=step_s, cost_s=0.0001)
    assert max(trainer.lags_s) <= max(1.0, delivery_s + step_s) + 0.001
    assert min(trainer.lags_s[1:]) > 1.0 - 2 * step_s
    assert not trainer.pace.is_cost_bound


def test_steps_longer_than_wanted_are_flushed_each() -> None:
    """Where steps take longer than `freshness_s`, each is flushed, also if other threads had work since the last."""
    trainer = _Trainer(1.0, 3)
    trainer.train(30, step_s=2.0, cost_s=0.001, background_s=0.01)
    assert trainer.flushed_at[1:] == list(range(trainer.flushed_at[1], trainer.flushed_at[-1] + 1))


def test_costly_flushes_keep_to_their_share() -> None:
    """Flushes of 10 ms go out three times a second at three percent, also where rows are to be fresher than that."""
    trainer = _Trainer(0.0, 3)
    trainer.train(60, cost_s=0.01)
    assert trainer.share() == pytest.approx(0.01 / 0.03, rel=0.1)
    assert trainer.pace.cost_percent == pytest.approx(3, rel=0.1)
    assert trainer.pace.is_cost_bound


@pytest.mark.parametrize("num_busy", [1, 4])
def test_other_threads_cost_the_steps_a_processor_s_part(num_busy: int) -> None:
    """What the sender takes counts once on one processor, and a quarter where four are busy."""
    trainer = _Trainer(0.0, 5, num_busy=num_busy)
    trainer.train(60, cost_s=0.005, background_s=0.02)
    assert trainer.share() == pytest.approx((0.005 + 0.02 / num_busy) / 0.05, rel=0.15)


def test_a_burst_is_paid_for_and_forgotten() -> None:
    """Dear flushes are rare while they are dear; soon after, rows are as fresh as wanted again."""
    trainer = _Trainer(0.5, 3)
    trainer.train(20, cost_s=0.001)
    trainer.train(20, cost_s=0.06)
    assert trainer.pace.is_cost_bound
    assert max(trainer.lags_s) == pytest.approx(2.0, rel=0.1)
    trainer.train(5, cost_s=0.001)
    assert not trainer.pace.is_cost_bound and trainer.lags_s[-1] < 0.51


def test_one_very_slow_flush_delays_the_next_by_a_bounded_time() -> None:
    """The first one may load libraries."""
    trainer = _Trainer(0.0, 1)
    trainer.train(0.01, cost_s=30)
    trainer.train(60, cost_s=0.0001)
    assert trainer.flushed_s[1] - (trainer.flushed_s[0] + 30) == pytest.approx(MAX_DEBT_S, abs=0.1)


def test_urgent_flushes_delay_no_other() -> None:
    """Whatever they cost, here and in the threads that still send when the last one has begun."""
    trainer = _Trainer(1.0, 3)
    trainer.train(1, cost_s=0.1, background_s=0.3, is_urgent=True)
    assert len(trainer.flushed_s) == 10
    trainer.train(2.5, cost_s=0.0001)
    assert trainer.lags_s[-2:] == pytest.approx([1.0, 1.0], abs=0.02)


def test_idle_time_is_not_saved_up() -> None:
    """After a pause, as for an evaluation, flushes cost no more than their share of the time that follows."""
    trainer = _Trainer(0.0, 3)
    trainer.train(1, cost_s=0.01)
    trainer.now_s += 1000
    before = len(trainer.flushed_s)
    trainer.train(10, cost_s=0.01)
    assert len(trainer.flushed_s) - before <= 10 * 0.03 / 0.01 + 1


def test_a_slow_server_makes_flushes_earlier() -> None:
    """The time that flushes take to become durable is part of how old rows are."""
    trainer = _Trainer(1.0, 50)
    trainer.train(10, cost_s=0.0001)
    trainer.delivery_s = 0.7
    trainer.train(10, cost_s=0.0001)
    assert trainer.lags_s[-1] < 1.001
    assert trainer.flushed_s[-1] - trainer.flushed_s[-2] == pytest.approx(0.3, abs=0.02)


def test_without_a_limit_every_step_is_flushed() -> None:
    """At 100 percent, with 0 seconds, whatever it costs."""
    trainer = _Trainer(0.0, 100)
    trainer.train(1, cost_s=0.05)
    assert len(trainer.flushed_s) == pytest.approx(1 / 0.06, abs=1)
    assert not trainer.pace.is_cost_bound


@pytest.mark.parametrize("cost_s", [0.0001, 0.06])
def test_ranks_flush_at_the_same_steps(cost_s: float) -> None:
    """Though their clocks, deliveries and costs differ, they have steps in common, and rows stay fresh."""
    rng = random.Random(0)
    ranks = [_Trainer(1.0, 3, delivery_s=delivery_s, is_alone=False) for delivery_s in (0.0, 0.02)]
    for _ in range(6000):
        step_s = rng.uniform(0.008, 0.012)
        for rank in ranks:
            rank.train(step_s, step_s=step_s, cost_s=cost_s * rng.uniform(0.8, 1.2))
    common = set(ranks[0].flushed_at) & set(ranks[1].flushed_at)
    assert len(common) > len(ranks[0].flushed_at) / 4
    for rank in ranks:
        assert max(rank.lags_s) < (1.1 if cost_s < 0.01 else 5.0)


def test_ranks_whose_steps_have_odd_numbers_flush_too() -> None:
    """No multiple of a power of two comes: rows go out when they are old."""
    trainer = _Trainer(1.0, 3, is_alone=False, stride=2)
    trainer.train(10, cost_s=0.0001)
    assert max(trainer.lags_s) <= 1.01 and len(trainer.flushed_s) == 10
    trainer.train(100, cost_s=0.06)
    assert max(trainer.lags_s) < 2 * 1.0 + MAX_DEBT_S + 0.1
