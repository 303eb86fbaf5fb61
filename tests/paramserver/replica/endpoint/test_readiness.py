"""When a replica may get lookups; replica and clock are fakes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.paramserver.replica.copy.shard_tail import DelayHistogram, Freshness
from headrace.paramserver.replica.endpoint.readiness import KnownLag, Readiness
from headrace.schemas.errors import GoneError, HeadraceError, UnavailableError


def shard(
    visible_seq: int, last_seq: int, *, number: int = 0, is_behind: bool | None = None, steps: int = 0
) -> Freshness:
    return Freshness(
        shard=number,
        visible_seq=visible_seq,
        last_seq=last_seq,
        is_behind=visible_seq < last_seq,
        lag_s=3600.0,
        lag_steps=steps,
        delay=DelayHistogram(),
    )


@dataclass
class FakeReplica:
    """The part of an `EmbeddingReplica` that `Readiness` reads."""

    shards: list[Freshness] = field(default_factory=lambda: [shard(5, 5)])
    failure: HeadraceError | None = None
    epoch: int = 3
    step: int = 40
    is_closed: bool = False
    is_server_away: bool = False

    @property
    def is_beginning_anew(self) -> bool:
        return self.failure is not None and not self.is_server_away

    def freshness(self) -> list[Freshness]:
        if self.is_closed:
            raise UnavailableError("the replica is closed")
        return self.shards


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def readiness(clock: Clock, replica: Any, max_lag_s: float = 5.0) -> Readiness:
    made = Readiness(max_lag_s=max_lag_s, clock=clock)
    made.replica = replica
    return made


def test_not_ready_before_it_has_begun(clock: Clock) -> None:
    """Without a replica it is not ready, and says what happens."""
    state = Readiness(max_lag_s=5.0, clock=clock)
    state.starting = "starting: it copies"
    assert (state.look().is_ready, state.look().failure) == (False, "starting: it copies")


def test_an_idle_shard_is_not_stale(clock: Clock) -> None:
    """A replica that lacks nothing known is ready, however long nothing has come."""
    state = readiness(clock, FakeReplica())
    for _ in range(3):
        clock.now_s += 1e6
        seen = state.look()
        assert (seen.is_ready, seen.lag_s, seen.failure, seen.visible) == (True, 0.0, None, (3, 40))


def test_known_and_not_visible_for_longer_than_the_bound(clock: Clock) -> None:
    """The lag counts from when an update was first seen, and ends when it is visible."""
    replica = FakeReplica([shard(5, 5, number=0), shard(5, 9, number=1, steps=2)])
    state = readiness(clock, replica)
    assert state.look().is_ready
    clock.now_s += 5.0
    assert state.look().is_ready
    clock.now_s += 0.5
    seen = state.look()
    assert (seen.is_ready, seen.lag_s, seen.lag_steps) == (False, 5.5, 2)
    assert seen.failure == "updates have been known for 5.5 s that are not visible, the bound is 5 s"
    replica.shards = [shard(5, 5, number=0), shard(9, 9, number=1)]
    assert state.look().is_ready


def test_a_replica_that_keeps_up_is_never_late(clock: Clock) -> None:
    """A replica that is always slightly behind is not late."""
    replica = FakeReplica()
    state = readiness(clock, replica)
    for second in range(100):
        replica.shards = [shard(4 * second, 4 * second + 8)]
        assert state.look().lag_s <= 1.0
        clock.now_s += 1.0
    assert state.look().is_ready


def test_any_lag_is_fine_without_a_bound(clock: Clock) -> None:
    """A limit of 0 allows any lag."""
    state = readiness(clock, FakeReplica([shard(1, 9)]), max_lag_s=0)
    state.look()
    clock.now_s += 1e6
    assert (state.look().is_ready, state.look().lag_s) == (True, 1e6)


def test_a_failed_rebuild_is_not_ready(clock: Clock) -> None:
    """A replica that lost its place is not ready, though lookups go on."""
    replica = FakeReplica(failure=GoneError("the log begins at seq 9"))
    state = readiness(clock, replica)
    assert (state.look().is_ready, state.look().failure) == (False, "begins anew: the log begins at seq 9")
    replica.failure = None
    assert state.look().is_ready


def test_a_server_that_is_away_takes_no_readiness_and_is_told(clock: Clock) -> None:
    """A replica whose server is away is ready and says what it may lack, also when it is late."""
    away = UnavailableError("h:1 has not been reached for 5 s")
    replica = FakeReplica(failure=away, is_server_away=True)
    state = readiness(clock, replica)
    assert (state.look().is_ready, state.look().failure) == (True, "h:1 has not been reached for 5 s")
    replica.shards = [shard(5, 6)]
    state.look()
    clock.now_s += 6.0
    seen = state.look()
    assert not seen.is_ready
    assert seen.failure == (
        "updates have been known for 6.0 s that are not visible, the bound is 5 s; h:1 has not been reached for 5 s"
    )


def test_what_keeps_it_from_beginning_is_told(clock: Clock) -> None:
    """Before there is a replica, the unreachable server is named, until the process stops."""
    state = Readiness(max_lag_s=5.0, clock=clock)
    state.starting = "starting: it copies"
    state.reach_log.failed("h:1", UnavailableError("refused"), began_s=clock.now_s)
    clock.now_s += 3.0
    assert state.look().failure == "starting: it copies; h:1 has not been reached for 3 s: refused"
    state.stop()
    assert state.look().failure == "stopping"


def test_a_closed_or_stopping_replica_is_not_ready(clock: Clock) -> None:
    """A stopping or closed replica is not ready."""
    replica = FakeReplica()
    state = readiness(clock, replica)
    state.stop()
    assert (state.look().is_ready, state.look().failure) == (False, "stopping")
    replica.is_closed = True
    assert (state.look().is_ready, state.look().failure) == (False, "the replica is closed")


def test_another_store_begins_the_count_anew() -> None:
    """Positions in another store's log are not compared with the old ones."""
    lag = KnownLag()
    assert lag.look(shard(900, 1000), 10.0) == 0.0
    assert lag.look(shard(900, 1000), 20.0) == 10.0
    assert lag.look(shard(3, 5), 30.0) == 0.0
    assert lag.look(shard(5, 5), 31.0) == 0.0


def test_memory_is_bounded_and_lag_is_never_too_short() -> None:
    """Few positions are remembered, and the reported lag is never too short."""
    lag = KnownLag()
    for now in range(1000):
        assert lag.look(shard(0, 1 + now), float(now)) == now
    assert len(lag._targets) == 64
    # Position 500 was seen at 499 s.
    assert lag.look(shard(500, 1001), 1000.0) >= 1000 - 500
