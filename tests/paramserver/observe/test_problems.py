"""Problems of a server."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from metric_samples import SAMPLE, TABLE, WRITER, state

from headrace.paramserver.observe.problems import Severity, find_problems
from headrace.paramserver.observe.sample import (
    ArchiveSample,
    ExpirySample,
    LogSample,
    ShardState,
    StandbySample,
    TableSample,
    WriterSample,
)
from headrace.schemas.table_lacks import INCOMPLETE
from headrace.schemas.tables import DType, TableSpec


def _log(*, standby: int = 9, failure: str | None = None, **changes: Any) -> LogSample:
    assert SAMPLE.log is not None
    standbys = (StandbySample(address="127.0.0.2:7602", applied_seq=standby, failure=failure),)
    return dataclasses.replace(SAMPLE.log, standbys=standbys, **changes)


def test_nothing_is_wrong() -> None:
    """A healthy server, busy or without writers, has no problems."""
    away = dataclasses.replace(WRITER, is_connected=False)
    assert find_problems([state(), state(shard=1, log_seq=900, applied_seq=1)]) == []
    assert find_problems([state(writers=(away,))]) == []
    assert find_problems([state(num_restarts=2, uptime_s=61.0)]) == []
    assert find_problems([state(log=_log(is_owner=False, leader=None))]) == []  # for the owner to tell
    assert find_problems([ShardState(shard=0, address="x", sample=dataclasses.replace(SAMPLE, detail=None))]) == []


@pytest.mark.parametrize(
    ("changes", "severity", "word"),
    [
        ({"detail": {"apply_lag_s": 15.1}}, Severity.WARNING, "15 s behind the log"),
        ({"detail": {"disk_free_bytes": 9}}, Severity.WARNING, "9 % of its disk is free"),
        ({"updates_refusal": "shard 0 takes no updates"}, Severity.CRITICAL, "takes no updates"),
        ({"detail": {"num_failed": 2}}, Severity.WARNING, "2 requests failed because of a bug"),
        ({"detail": {"num_holds_broken": 3}}, Severity.WARNING, "snapshots needed was removed 3 times"),
        ({"detail": {"refused": {"overloaded": 3, "malformed": 0}}}, Severity.NOTE, "start: 3 overloaded"),
        ({"expiry": ExpirySample(num_failed=1)}, Severity.WARNING, "1 expiry runs ended"),
        ({"archive": ArchiveSample(archived_seq=1, behind_s=61, error="away")}, Severity.WARNING, "61 s behind: away"),
        ({"archive": ArchiveSample(archived_seq=1, num_lost=7)}, Severity.WARNING, "7 records were removed before"),
        ({"log": _log(is_full=True)}, Severity.CRITICAL, "its stream is full"),
        ({"log": _log(leader=None, peers_away=None)}, Severity.CRITICAL, "no server leads its stream"),
        ({"log": _log(peers_away=1)}, Severity.WARNING, "1 of its stream's servers is away"),
        ({"log": _log(standby=9), "log_seq": 100_010}, Severity.WARNING, "is 100,001 records behind"),
        ({"log": _log(failure="refused")}, Severity.WARNING, "127.0.0.2:7602 does not answer: refused"),
        (
            {"tables": (dataclasses.replace(TABLE, owner="backfill-1", is_backfilled=True),)},
            Severity.WARNING,
            "a backfill of user.weight has not ended",
        ),
        ({"worst_loop_pause_s": 0.26}, Severity.WARNING, "paused for 0.26 s"),
        ({"num_restarts": 2, "uptime_s": 59.0}, Severity.WARNING, "restarted 59 s ago"),
    ],
)
def test_one_thing_is_wrong(changes: dict[str, Any], severity: Severity, word: str) -> None:
    """A problem has its figures and advice."""
    (problem,) = find_problems([state(**changes)])
    assert problem.severity is severity
    assert word in problem.text
    assert problem.advice
    assert problem.to_json()["severity"] == severity.name.lower()


def test_trainers() -> None:
    """A missing rank of the newest run is a problem while others are connected; one of an older run or an ended is not.

    So is a connected trainer that trains what it does not stream; one that is away says nothing any more.
    """
    ranks = [dataclasses.replace(WRITER, client=f"rank{i}", world_size=2, is_connected=i == 0) for i in range(2)]
    old = dataclasses.replace(WRITER, run="old", epoch=1, is_connected=False)
    (problem,) = find_problems([state(writers=(*ranks, old))])
    assert "run ctr: 1 of 2 trainers are away, among them rank1" in problem.text
    assert not find_problems([state(writers=(ranks[0], dataclasses.replace(ranks[1], has_ended=True)))])
    coming = dataclasses.replace(ranks[0], epoch=WRITER.epoch + 1, step=-1)
    (problem,) = find_problems([state(writers=(coming, *ranks))])  # of a start that has sent nothing yet
    assert "run ctr: 1 of 2 trainers are away: they have not come yet" in problem.text
    assert "keep the step of the start before" in problem.advice
    told = [dataclasses.replace(WRITER, run=run, num_unstreamed=2, is_connected=run == "ctr") for run in ("ctr", "old")]
    (problem,) = find_problems([state(writers=tuple(told))])
    assert problem.text == "run ctr: of its tables and modules, 2 are trained and not streamed"


def test_an_incomplete_table_of_a_backfill() -> None:
    """It is one problem, and the advice says what sends the rest: the same backfill while it can, or a trainer."""
    table = dataclasses.replace(TABLE, owner="backfill-1", is_backfilled=True, lacks=INCOMPLETE)
    (problem,) = find_problems([state(tables=(table,))])
    assert "Run the same `headrace backfill` again; or attach a trainer" in problem.advice
    (problem,) = find_problems([state(tables=(dataclasses.replace(table, has_owner_ended=True),))])
    assert "headrace backfill" not in problem.advice and "Attach a trainer" in problem.advice


def test_a_dense_part_that_nobody_sends() -> None:
    """Tensors without values are named while their run is away, and only if every shard has told what it has."""
    away, owned = dataclasses.replace(WRITER, is_connected=False), {"owner": WRITER.run, "owner_epoch": WRITER.epoch}
    tensors = [TableSpec.of_tensor(f"ctr:{name}", (3, 4), DType.FLOAT32) for name in ("bias", "top")]

    def shards(*writers: WriterSample) -> list[ShardState]:
        return [
            state(
                shard=shard,
                num_shards=2,
                tables=tuple(TableSample(spec, int(shard == 1 and spec is tensors[0]), **owned) for spec in tensors),
                writers=writers,
            )
            for shard in range(2)
        ]

    (problem,) = find_problems(shards(away))
    assert problem.text == "dense part of ctr: 1 of 2 tensors have no values: ctr:top"
    assert f"Start run {WRITER.run!r} again, with this model" in problem.advice
    assert find_problems(shards(WRITER)) == find_problems(shards(away)[:1]) == []


def test_the_most_urgent_is_first() -> None:
    """Critical problems come before warnings, and these before notes."""
    noted = state(detail={"refused": {"malformed": 1}}, worst_loop_pause_s=1.0)
    gone = ShardState(shard=1, address="x", error="no answer within 5 s")
    other = state(shard=2, version="2")
    found = find_problems([noted, gone, other])
    assert [problem.severity.name for problem in found] == ["CRITICAL", "WARNING", "WARNING", "NOTE"]
    assert "shard 1 does not answer: no answer within 5 s" in found[0].text
    assert any("different versions: 1, 2" in problem.text for problem in found)


def test_a_node_that_is_away_is_one_problem() -> None:
    """A node of which no shard answers is named once; one of which some do is not, nor one whose shard has stopped."""

    def lost(shard: int, node: str, **more: Any) -> ShardState:
        return ShardState(shard=shard, address="x", node=node, error="refused", **more)

    here = dataclasses.replace(state(), node="a")
    (problem,) = find_problems([here, lost(1, "b"), lost(2, "b")])
    assert problem.severity is Severity.CRITICAL
    assert problem.text == "node b does not answer, with shards 1, 2: refused"
    (problem,) = find_problems([here, lost(1, "a")])
    assert problem.text == "shard 1 does not answer: refused"
    (problem,) = find_problems([here, lost(1, "b", is_stopped=True)])
    assert problem.text == "shard 1: refused"


def test_a_damaged_store_is_no_refusal() -> None:
    """What a disk fails to answer is critical, from a client's sample too, and is told once."""
    for detail in (None, state(detail={"refused": {"storage": 2}}).sample.detail):
        sample = dataclasses.replace(SAMPLE, detail=detail, num_refused=2, num_disk_failures=2)
        (problem,) = find_problems([ShardState(shard=0, address="x", sample=sample)])
        assert problem.severity is Severity.CRITICAL and "2 requests failed" in problem.text


def test_refusals() -> None:
    """A client's sample is enough for a note; a refusal of an hour ago is not shown, another one with its age."""
    for detail in (None, dataclasses.replace(state(detail={"refused": {"malformed": 1200}}).sample.detail)):
        sample = dataclasses.replace(SAMPLE, detail=detail, num_refused=1200)
        for ago_s, end in ((3600.0, None), (12.0, ", the last 12 s ago"), (None, "1,200 requests or connections")):
            told = dataclasses.replace(sample, refused_ago_s=ago_s)
            problems = find_problems([ShardState(shard=0, address="x", sample=told)])
            assert len(problems) == (end is not None)
            if detail is None or ago_s is not None:
                assert all(problem.text.endswith(str(end)) for problem in problems)
