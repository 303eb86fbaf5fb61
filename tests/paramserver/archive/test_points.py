"""Points of a log to which it can be cut."""

from __future__ import annotations

from typing import Any

import pytest
from set_embeddings import request_of

from headrace.paramserver.archive.points import PointFinder, RestorePoint, StepPoint, choose_point
from headrace.paramserver.log.interface import KIND_BATCH, KIND_HELLO, LogRecord, note_header
from headrace.paramserver.log.sessions import Sessions
from headrace.schemas.errors import ConfigError
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, encode_message


def hello(seq: int, *, epoch: int = 2, rank: int = 0, world_size: int = 1) -> LogRecord:
    header = {"kind": KIND_HELLO, "run": "run", "client": f"rank{rank}", "rank": rank, "world_size": world_size}
    return LogRecord(seq, epoch, {**header, "tables": [], "owned": []}, memoryview(b""))


def batch(
    seq: int, client_seq: int, step: int, *, epoch: int = 2, rank: int = 0, ends: bool = True, exact: bool = True
) -> LogRecord:
    names: dict[str, Any] = {"run": "run", "client": f"rank{rank}", "client_seq": client_seq, "step": step}
    names |= {"time_us": 1000 * step, "ends_step": ends}
    request = request_of(**names, epoch=epoch, is_exact_cut=exact)
    args = idl.ParameterServer.setEmbeddings_args(request=request)
    body = b"".join(map(bytes, encode_message("setEmbeddings", CALL, 1, args)))
    return LogRecord(seq, epoch, {"kind": KIND_BATCH, "tables": [], **names}, memoryview(body))


def points_of(*records: LogRecord) -> dict[tuple[int, int], StepPoint]:
    finder = PointFinder({}, seq=0)
    for record in records:
        finder.take(record)
    return finder.points


def test_a_step_of_one_rank_ends_with_its_last_batch() -> None:
    """A point is the record that ends a step; one that is no exact cut is told apart."""
    points = points_of(hello(1), batch(2, 1, 5, ends=False), batch(3, 2, 5), batch(4, 3, 6, exact=False))
    assert points == {
        (2, 5): StepPoint(epoch=2, step=5, seq=3, time_us=5000, is_exact=True),
        (2, 6): StepPoint(epoch=2, step=6, seq=4, time_us=6000, is_exact=False),
    }


def test_records_that_are_no_writers_make_no_points() -> None:
    """A log's own records are no points."""
    notes = [LogRecord(seq, 1, note_header("void"), memoryview(b"")) for seq in (1, 4, 6)]
    points = points_of(notes[0], hello(2), batch(3, 1, 5), notes[1], batch(5, 2, 6), notes[2])
    assert {key: point.seq for key, point in points.items()} == {(2, 5): 3, (2, 6): 5}


def test_a_step_of_two_ranks_ends_with_the_slower_one() -> None:
    """Before all ranks have ended a step there is no point; where one is ahead, the point is not exact."""
    points = points_of(
        hello(1, world_size=2),
        batch(2, 1, 5),
        hello(3, rank=1, world_size=2),
        batch(4, 1, 5, rank=1),
        batch(5, 2, 6),
        batch(6, 3, 7),
        batch(7, 2, 6, rank=1),
    )
    assert {key: (point.seq, point.is_exact) for key, point in points.items()} == {
        (2, 5): (4, True),
        (2, 6): (7, False),
    }


def test_a_snapshot_is_a_point() -> None:
    """The state that the records follow counts too."""
    sessions = Sessions({})
    session = sessions.open("run", "rank0", 2, 0, 1)
    sessions.advance(session, client_seq=3, step=9, time_us=9000, ends_step=True, is_exact_cut=True)
    finder = PointFinder(sessions.settle(session, 44), seq=44)
    assert finder.points[2, 9].seq == 44


def test_all_shards_are_cut_at_one_step() -> None:
    """The last step at or before the wanted one, or the time, that every shard has; a later epoch wins."""
    one = points_of(hello(1), batch(2, 1, 5), batch(3, 2, 6), hello(4, epoch=3), batch(5, 1, 5, epoch=3))
    two = points_of(hello(1), batch(2, 1, 5), hello(3, epoch=3), batch(4, 1, 5, epoch=3), batch(5, 2, 6, epoch=3))
    cases = [(RestorePoint(step=100), [one, two], (3, 5), [5, 4]), (RestorePoint(step=100), [two], (3, 6), [5])]
    cases += [(RestorePoint(time_us=5500), [one, two], (3, 5), [5, 4])]
    for wanted, shards, version, seqs in cases:
        found = choose_point(wanted, shards, "the log")
        assert [(point.epoch, point.step) for point in found] == [version] * len(shards)
        assert [point.seq for point in found] == seqs
    for wanted in (RestorePoint(step=4), RestorePoint(time_us=4999)):
        with pytest.raises(ConfigError, match="the log has no step by then that all shards have; the oldest is step 5"):
            choose_point(wanted, [one, two], "the log")


def test_points_are_read_as_they_are_shown() -> None:
    """What a message shows can be given to `--at`."""
    for text in ("seq=5", "step=0", "time=2026-01-31T12:00:00+00:00"):
        assert str(RestorePoint.parse(text)) == text
    assert RestorePoint.parse("time=2026-01-31T13:00:00+01:00") == RestorePoint.parse("time=2026-01-31T12:00:00")
