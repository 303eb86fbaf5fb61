"""Each thing that is wrong is found, the most urgent first, and nothing is when all is well."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from metric_samples import SAMPLE, WRITER, state

from headrace.paramserver.metrics.metrics_families import ShardState
from headrace.paramserver.metrics.metrics_problems import Severity, find_problems
from headrace.paramserver.metrics.metrics_sample import ExpirySample


def test_nothing_is_wrong() -> None:
    """A server that is well, idle or busy, has no problems; nor has one that nobody writes to any more."""
    away = dataclasses.replace(WRITER, is_connected=False)
    assert find_problems([state(), state(shard=1, log_seq=900, applied_seq=1)]) == []
    assert find_problems([state(writers=(away,))]) == []
    assert find_problems([ShardState(shard=0, address="x", sample=dataclasses.replace(SAMPLE, detail=None))]) == []


@pytest.mark.parametrize(
    ("changes", "severity", "word"),
    [
        ({"detail": {"apply_lag_s": 15.1}}, Severity.WARNING, "15 s behind the log"),
        ({"detail": {"disk_free_bytes": 9}}, Severity.WARNING, "9 % of its disk is free"),
        ({"detail": {"num_failed": 2}}, Severity.WARNING, "2 requests were ended by a bug"),
        (
            {"detail": {"num_holds_broken": 3}},
            Severity.WARNING,
            "log that replicas or snapshots needed was removed 3 times",
        ),
        ({"detail": {"refused": {"overloaded": 3, "malformed": 0}}}, Severity.NOTE, "start: 3 overloaded"),
        ({"expiry": ExpirySample(num_failed=1)}, Severity.WARNING, "1 runs of expiry"),
        ({"worst_loop_pause_s": 0.26}, Severity.WARNING, "paused for 0.26 s"),
        ({"num_restarts": 2, "uptime_s": 59.0}, Severity.WARNING, "started again 59 s ago"),
    ],
)
def test_one_thing_is_wrong(changes: dict[str, Any], severity: Severity, word: str) -> None:
    """What is wrong is said with its number and what to do."""
    (problem,) = find_problems([state(**changes)])
    assert problem.severity is severity
    assert word in problem.text
    assert problem.advice
    assert problem.to_json()["severity"] == severity.name.lower()


def test_old_restart_is_no_problem() -> None:
    """A shard that was restarted long ago is well."""
    assert find_problems([state(num_restarts=2, uptime_s=61.0)]) == []


def test_trainer_that_is_away() -> None:
    """A rank of the newest run that is away while others are there is told; one of an older run is not."""
    ranks = [dataclasses.replace(WRITER, client=f"rank{i}", world_size=2, is_connected=i == 0) for i in range(2)]
    old = dataclasses.replace(WRITER, run="old", epoch=1, is_connected=False)
    (problem,) = find_problems([state(writers=(*ranks, old))])
    assert "run ctr: 1 of 2 trainers are away, rank1 among them" in problem.text


def test_the_most_urgent_is_first() -> None:
    """A shard that does not answer stands above warnings, and these above notes."""
    noted = state(detail={"refused": {"malformed": 1}}, worst_loop_pause_s=1.0)
    gone = ShardState(shard=1, address="x", error="no answer within 5 s")
    other = state(shard=2, version="2")
    found = find_problems([noted, gone, other])
    assert [problem.severity.name for problem in found] == ["CRITICAL", "WARNING", "WARNING", "NOTE"]
    assert "shard 1 does not answer: no answer within 5 s" in found[0].text
    assert any("different versions: 1, 2" in problem.text for problem in found)


def test_refusals_without_detail() -> None:
    """What a plain status says of refusals is enough for a note."""
    sample = dataclasses.replace(SAMPLE, detail=None, num_refused=1200)
    (problem,) = find_problems([ShardState(shard=0, address="x", sample=sample)])
    assert "1,200" in problem.text
