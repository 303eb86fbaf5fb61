"""The end of a shard's log: its writers, as the shard knows them, and the histogram of delays."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
from scripted_logs import SPEC

from headrace.paramserver.log import sessions as sessions_module
from headrace.paramserver.log.interface import KIND_HELLO, note_header
from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.reading.follower import Update
from headrace.paramserver.replica.copy.shard_tail import DelayHistogram, ShardTail
from headrace.paramserver.store.catalog import Catalog, Owner, pack_spec
from headrace.paramserver.store.shared_state import pack_shared_state
from headrace.schemas.idl import idl
from headrace.schemas.move_records import SHARED_STATE, ImportRecord, Move, MoveRecord, MoveStep, Position


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


MOVE = Move(move_id="a", source=0, destination=1, partitions=(0,), versions=(1,))


def _move_record(seq: int, step: MoveStep, position: int | None = None) -> Update:
    at = None if position is None else Position(seq=position, mark=None)
    header = MoveRecord(step=step, move=MOVE, position=at).header()
    return Update(seq=seq, epoch=1, kind=idl.UpdateKind.MOVE, header=header, body=memoryview(b""))


def _import(
    seq: int, record: dict[str, Any], body: bytes = b"", *, epoch: int = 1, keeps_steps: bool = False
) -> Update:
    at = Position(seq=seq, mark=None)
    header = ImportRecord(move_id="a", source=0, position=at, record=record, keeps_steps=keeps_steps).header()
    return Update(seq=seq, epoch=epoch, kind=idl.UpdateKind.MOVE, header=header, body=memoryview(body))


def test_transitions_of_a_move_are_changes_without_rows() -> None:
    """Only an activation says more: which of the source's records come before those behind it."""
    tail = ShardTail(1, seq=0, catalog=Catalog({}), sessions=Sessions({}), has_joined=False)
    tail.take(_move_record(1, MoveStep.COPY, 7))
    assert not tail.has_joined
    tail.take(_move_record(2, MoveStep.ACTIVATE, 9))
    assert tail.has_joined
    assert [(change.deltas, change.after) for change in tail.pending] == [((), None), ((), (0, 9))]


@pytest.mark.parametrize("keeps_steps", [False, True])
def test_a_move_brings_tables_and_writers_with_it(keeps_steps: bool) -> None:
    """What is the whole shard's is taken as the shard has taken it, ended steps only where its record says so."""
    theirs, sessions = Catalog({}), Sessions({})
    theirs.add([SPEC])
    theirs.claim(["t"], Owner("run", 1))
    session = sessions.open("run", "rank0", 1, 0, 1)
    sessions.advance(session, client_seq=3, step=5, time_us=8, ends_step=True, is_exact_cut=True)
    tail = ShardTail(1, seq=0, catalog=Catalog({}), sessions=Sessions({}), has_joined=False)
    tail.take(_move_record(1, MoveStep.COPY, 7))
    tail.take(_import(2, SHARED_STATE, pack_shared_state(theirs, sessions), keeps_steps=keeps_steps))
    assert tail.catalog.find("t").spec == SPEC
    assert (tail.epoch, tail.watermark_of(1)) == (1, 5 if keeps_steps else -1)
    assert tail.cut == ((1, 5, 8) if keeps_steps else None)

    other = dataclasses.replace(SPEC, fqn="u")
    hello = {"kind": KIND_HELLO, "run": "run", "client": "rank0", "rank": 0, "world_size": 1}
    tail.take(_import(3, hello | {"tables": [pack_spec(other)], "dropped": ["t"]}, epoch=2))
    assert [table.spec for table in tail.catalog] == [other] and tail.epoch == 2
