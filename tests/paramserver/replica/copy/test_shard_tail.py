"""The end of a shard's log: its writers, as the shard knows them, and the histogram of delays."""

from __future__ import annotations

import math
import random

import pytest

from headrace.paramserver.log import sessions as sessions_module
from headrace.paramserver.log.interface import note_header
from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.reading.follower import Update
from headrace.paramserver.replica.copy.shard_tail import DelayHistogram, ShardTail
from headrace.paramserver.store.catalog import Catalog
from headrace.schemas.idl import idl


def test_writers_without_end_take_no_memory_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many runs come and go, a replica remembers as many writers as the shard."""
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 5)
    sessions = Sessions({})
    tail = ShardTail(0, seq=0, catalog=Catalog({}), sessions=sessions)
    for seq in range(1, 101):
        header = {"run": f"run{seq}", "client": "rank0", "rank": 0, "world_size": 1, "tables": []}
        tail.take(Update(seq=seq, epoch=seq, kind=idl.UpdateKind.HELLO, header=header, body=memoryview(b"")))
        assert (tail.epoch, len(list(sessions))) == (seq, min(seq, 5))


@pytest.mark.parametrize("seed", range(5))
def test_cumulative_counts_are_those_of_the_durations(seed: int) -> None:
    """Each bound counts the durations up to it, and the last bound all of them."""
    generator = random.Random(seed)
    durations = [10 ** generator.uniform(-5, 7) for _ in range(500)] + [0.0, -1.0, 1e9]
    histogram = DelayHistogram()
    for duration_s in durations:
        histogram.add(duration_s)
    told = histogram.cumulative()
    assert told == [(bound_s, sum(duration_s <= bound_s for duration_s in durations)) for bound_s, _ in told]
    assert told[-1] == (math.inf, histogram.count)


def test_bounds_are_always_the_same() -> None:
    """Bounds double from 0.8 ms to 210 s in any case, so that replicas' histograms add up."""
    bounds = [bound_s for bound_s, count in DelayHistogram().cumulative() if count == 0]
    assert bounds[:-1] == pytest.approx([0.0008 * 2**i for i in range(19)])
    assert (bounds[-2], bounds[-1]) == (pytest.approx(209.7, rel=1e-3), math.inf)


def test_percentiles() -> None:
    """A percentile is never below the truth and at most a fifth above it."""
    histogram = DelayHistogram()
    for number in range(1, 1001):
        histogram.add(number / 1000)
    for percent in (1, 50, 90, 99, 100):
        truth = percent / 100
        assert truth <= histogram.percentile(percent) <= truth * 1.2
    assert (histogram.count, histogram.max_s) == (1000, 1.0)
    assert DelayHistogram().percentile(99) == 0.0
    assert repr(histogram).startswith("<DelayHistogram of 1,000: p50 0.5")


def test_what_a_log_writes_for_itself_opens_no_session() -> None:
    """Open, padding and void records advance the position, and leave writers, tables and the cut as they were."""
    sessions = Sessions({})
    tail = ShardTail(0, seq=0, catalog=Catalog({}), sessions=sessions)
    for seq, what in enumerate(("open", "padding", "heartbeat", "void"), 1):
        update = Update(seq=seq, epoch=1, kind=idl.UpdateKind.HELLO, header=note_header(what), body=memoryview(b""))
        assert tail.take(update) == ()
    assert (tail.seq, list(sessions), tail.epoch) == (4, [], 0)
