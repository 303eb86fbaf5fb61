"""A replica's health: when it may get lookups, and what its audits count, remember and say."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_clock import Clock
from replica_answers import IDS, told, write
from replica_endpoint import replica_endpoint
from rich.console import Console
from watched_server import scrape, wait_until

from headrace.cli import main
from headrace.paramserver.replica.copy.audit import ReplicaAuditReport, ReplicaTableAudit
from headrace.paramserver.replica.copy.shard_tail import DelayHistogram, Freshness
from headrace.paramserver.replica.endpoint import health
from headrace.paramserver.replica.endpoint.health import KnownLag, Readiness, SelfAudit
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import GoneError, HeadraceError, UnavailableError
from headrace.schemas.idl import idl
from headrace.scripts.commands.status import _describe_audit


def shard(visible_seq: int, last_seq: int, *, number: int = 0, steps: int = 0) -> Freshness:
    return Freshness(
        shard=number,
        visible_seq=visible_seq,
        last_seq=last_seq,
        is_behind=visible_seq < last_seq,
        age_s=3600.0,
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
    tables: dict[str, Any] = field(default_factory=lambda: {"t": None})
    dense_tensors: dict[str, Any] = field(default_factory=dict)
    incomplete: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

    @property
    def is_beginning_anew(self) -> bool:
        return self.failure is not None and not self.is_server_away

    def freshness(self) -> list[Freshness]:
        if self.is_closed:
            raise UnavailableError("the replica is closed")
        return self.shards


@pytest.fixture
def clock() -> Clock:
    return Clock()


def readiness(clock: Clock, replica: Any, max_lag_s: float = 5.0) -> Readiness:
    made = Readiness(max_lag_s=max_lag_s, clock=clock.time)
    made.replica = replica
    return made


def test_not_ready_before_it_has_begun(clock: Clock) -> None:
    """Without a replica it is not ready, and says what happens."""
    state = Readiness(max_lag_s=5.0, clock=clock.time)
    state.starting = "starting: it copies"
    assert (state.look().is_ready, state.look().failure) == (False, "starting: it copies")


def test_not_ready_without_tables(clock: Clock) -> None:
    """A replica of a server without tables would find no row: it is ready once it has one, or a dense tensor."""
    replica = FakeReplica(tables={})
    state = readiness(clock, replica)
    assert not state.look().is_ready and "it has no tables" in str(state.look().failure)
    replica.dense_tensors = {"m:bias": None}
    assert (state.look().is_ready, state.look().failure) == (True, None)
    replica.tables, replica.dense_tensors = {"t": None}, {}
    assert (state.look().is_ready, state.look().failure) == (True, None)


def test_not_ready_before_a_table_is_shown(clock: Clock) -> None:
    """A table that its trainer makes later takes no readiness; it is told as long as it is incomplete."""
    replica = FakeReplica(tables={"a": None, "b": None}, incomplete=("a", "b"), hidden=("a", "b"))
    state = readiness(clock, replica)
    assert not state.look().is_ready and "incomplete: a, b; by step" in str(state.look().failure)
    replica.hidden = ()
    assert state.look().is_ready and "incomplete: a, b" in str(state.look().failure)
    replica.incomplete = replica.hidden = ("c",)
    assert state.look().is_ready
    replica.incomplete = replica.hidden = ()
    assert (state.look().is_ready, state.look().failure) == (True, None)


def test_a_table_that_stays_incomplete_keeps_no_other_from_being_read(clock: Clock) -> None:
    """It is told; but a table of which the server has all rows is waited for, until it is shown."""
    replica = FakeReplica(tables={"t": None, "a": None, "b#2": None}, incomplete=("a",), hidden=("a", "b"))
    state = readiness(clock, replica)
    assert (state.look().is_ready, state.look().failure) == (False, "incomplete: b; by step a table is shown whole")
    replica.hidden = ("a",)
    assert state.look().is_ready
    told = "incomplete: a; the trainer has not sent all rows, and by step lookups do not see a"
    assert state.look().failure == told


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
    state = Readiness(max_lag_s=5.0, clock=clock.time)
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


EQUAL = ReplicaAuditReport(tables=(ReplicaTableAudit(fqn="a", num_rows=70),), left_out={})
DIFFERENT = ReplicaAuditReport(
    tables=tuple(
        ReplicaTableAudit(fqn=f"t{number}", num_rows=9, differing_buckets=[2], differing_row_ids=[131_073])
        for number in range(6)
    ),
    left_out={},
)


class AuditedReplica:
    """Each audit gives the next of what was put there; the last one lasts until it is let go."""

    def __init__(self, *outcomes: ReplicaAuditReport | Exception) -> None:
        self.outcomes = list(outcomes)
        self.timeouts: list[float] = []
        self.asked: list[list[str] | None] = []
        self.is_at_last = asyncio.Event()
        self.let_go = threading.Event()
        self._loop = asyncio.get_running_loop()

    def audit(self, *, tables: list[str] | None, timeout_s: float) -> ReplicaAuditReport:
        self.timeouts.append(timeout_s)
        self.asked.append(tables)
        if not self.outcomes:
            self._loop.call_soon_threadsafe(self.is_at_last.set)
            self.let_go.wait()
            raise UnavailableError("the replica is closed")
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_CONFIRM_PAUSE_S", 0.0)


async def after(*outcomes: ReplicaAuditReport | Exception) -> tuple[SelfAudit, AuditedReplica]:
    """Return an audit that has had some outcomes, and is cancelled amid the next."""
    replica = AuditedReplica(*outcomes)
    audit = SelfAudit(replica, interval_s=1e-9)  # type: ignore[arg-type]
    running = asyncio.create_task(audit.run())
    await replica.is_at_last.wait()
    running.cancel()
    replica.let_go.set()
    await asyncio.wait([running])
    return audit, replica


async def test_outcomes_are_counted_and_the_last_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """Equal, different and failed ones; what differed stays known while the server is away, and why it is not asked."""
    caplog.set_level(logging.INFO, logger=health.__name__)
    audit, replica = await after(EQUAL, EQUAL, DIFFERENT, DIFFERENT, UnavailableError("a shard is away"))
    assert (audit.num_equal, audit.num_different, audit.num_failed) == (2, 1, 1)
    assert (audit.report, audit.failure) == (DIFFERENT, "a shard is away")
    assert set(replica.timeouts) == {3600.0}
    levels = [record.levelno for record in caplog.records if record.name == health.__name__]
    assert levels == [logging.INFO, logging.INFO, logging.ERROR, logging.WARNING]
    audit, _ = await after(UnavailableError("a shard is away"), EQUAL)
    assert (audit.report, audit.failure, audit.num_failed) == (EQUAL, None, 1)


async def test_a_difference_is_named_in_brief() -> None:
    """Four tables with bucket and row, and how many more: a line of a log, and a text on the wire, have an end."""
    audit, _ = await after(DIFFERENT, DIFFERENT)
    assert audit.report is not None
    text = audit.report.difference
    assert text.startswith("t0: 9 rows, digest 0000000000000000; DIFFERENT in buckets 2: rows 131073; t1: ")
    assert text.endswith("; and 2 more tables") and "t4" not in text
    assert (audit.report.num_differing_buckets, EQUAL.difference) == (6, "")


async def test_a_difference_is_looked_at_again_before_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """One that passes is none; those that stay are told, also where the server is away by then."""
    now = dataclasses.replace(EQUAL, tables=(*(dataclasses.replace(EQUAL.tables[0], fqn=f"t{n}") for n in range(6)),))
    audit, replica = await after(DIFFERENT, now)
    assert (audit.num_equal, audit.num_different, replica.asked[:2]) == (1, 0, [None, [f"t{n}#1" for n in range(6)]])
    partly = dataclasses.replace(now, tables=(*now.tables[:5], DIFFERENT.tables[5]))
    audit, _ = await after(DIFFERENT, partly)
    assert audit.report is not None and audit.report.difference == str(DIFFERENT.tables[5])
    audit, _ = await after(DIFFERENT, UnavailableError("away by now"))
    assert (audit.report, audit.num_different) == (DIFFERENT, 1)
    assert "a difference could not be looked at again" in caplog.text


async def test_an_audit_of_nothing_is_no_equality() -> None:
    """Where every table is left out it has failed, and says why; where some are, they are counted."""
    nothing = ReplicaAuditReport(tables=(), left_out={"a": "it is kept in int8", "b": "it has virtual ids"})
    audit, _ = await after(nothing)
    assert (audit.num_equal, audit.num_failed) == (0, 1)
    assert audit.failure == "no table can be compared: a: it is kept in int8, b: it has virtual ids"


async def test_a_bug_ends_one_audit_alone(caplog: pytest.LogCaptureFixture) -> None:
    """It is counted and logged with its traceback, and the next audit comes all the same."""
    audit, _ = await after(ZeroDivisionError("in a digest"), EQUAL)
    assert (audit.num_failed, audit.num_equal) == (1, 1)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError


async def test_replicas_look_at_different_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look is at a random moment of the interval, those after it an interval after the one before.

    After a difference the next one comes soon: it may be gone, and the alert with it.
    """
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 5:
            raise asyncio.CancelledError

    replica = AuditedReplica(EQUAL, DIFFERENT, DIFFERENT, EQUAL)
    monkeypatch.setattr(health.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await SelfAudit(replica, interval_s=7200.0, random=lambda: 0.25).run()  # type: ignore[arg-type]
    assert pauses == [1800.0, 7200.0, 0.0, 60.0, 7200.0]
    assert set(replica.timeouts) == {7200.0}


def test_a_process_tells_its_audits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Metrics, the wire and `headrace status` report a process's audits."""
    with ServerProcess.start(tmp_path / "data", shards=1) as server:
        write(server, 1, deleted=np.array([1, 3]))
        with replica_endpoint(tmp_path, server.address, "--audit-interval-s=1") as endpoint:

            def equal() -> float:
                return scrape(endpoint.health)["headrace_replica_audits_total"][(("outcome", "equal"),)]

            wait_until(lambda: equal() >= 1)
            values = scrape(endpoint.health)
            assert values["headrace_replica_audit_differing_buckets"][()] == 0
            assert values["headrace_replica_audit_rows"][()] == IDS.size + 4
            assert values["headrace_replica_audit_interval_seconds"][()] == 1
            audit = told(endpoint.address).replica.audit
            assert (audit.num_differing_buckets, audit.difference, audit.failure) == (0, None, None)
            assert main(["status", "--server", endpoint.address]) == 0
            assert f"{audit.num_rows:,} rows, equal." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("audit", "words"),
    [
        ({"ended_us": 0, "difference": None, "failure": None}, "Not compared with the server yet."),
        ({"ended_us": 0, "difference": None, "failure": "away"}, "server yet. The last audit failed: away"),
        ({"difference": "t[0]: rows 3", "failure": None}, "01:02:03 UTC: 70 rows, DIFFERENT: t[0]: rows 3."),
        ({"difference": None, "failure": None, "num_left_out": 2}, "70 rows, equal. 2 tables skipped."),
    ],
    ids=["not yet", "never", "different", "in part"],
)
def test_status_says_how_the_last_audit_went(
    audit: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A difference is named as it is, brackets too."""
    us = 1_700_010_123_000_000
    told = idl.ReplicaAudit(**{"ended_us": us, "num_rows": 70, "num_differing_buckets": 1, "num_left_out": 0, **audit})
    Console(width=200).print(_describe_audit(told))
    assert words in capsys.readouterr().out
