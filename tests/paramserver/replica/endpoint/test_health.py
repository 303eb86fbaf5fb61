"""A replica's health: when it may get lookups, and what its audits count, remember and say."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from replica_answers import IDS, told, write
from replica_endpoint import replica_endpoint
from rich.console import Console
from text_scripts import Script, scripts
from virtual_loop import run_virtual
from watched_server import scrape, wait_until

from headrace.cli import main
from headrace.paramserver.replica.copy.audit import ReplicaAuditReport, ReplicaTableAudit
from headrace.paramserver.replica.copy.shard_tail import DelayHistogram, Freshness
from headrace.paramserver.replica.endpoint import health
from headrace.paramserver.replica.endpoint.health import KnownLag, Readiness, SelfAudit
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import UnavailableError
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


class Watched:
    """A replica as `Readiness` sees it, whose state the script sets, on a clock that stands still."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._made = Readiness(max_lag_s=5.0, clock=lambda: self._now_s)
        self._shards = {0: shard(5, 5)}
        state = {"tables": {"t": None}, "dense_tensors": {}, "incomplete": (), "hidden": (), "failure": None}
        state |= {"epoch": 3, "step": 40, "is_beginning_anew": False, "freshness": lambda: [*self._shards.values()]}
        self._replica = SimpleNamespace(**state)

    def bound(self, max_lag_s: float) -> None:
        self._made = Readiness(max_lag_s=max_lag_s, clock=lambda: self._now_s)

    def start(self, why: str) -> None:
        """Be without a replica yet."""
        self._made.starting = why

    def unreachable(self, address: str, why: str) -> None:
        self._made.reach_log.failed(address, UnavailableError(why), began_s=self._now_s)

    def begin(self) -> str:
        """Have a replica."""
        self._made.replica = cast("Any", self._replica)
        return self.look()

    def tables(self, *names: str) -> str:
        self._replica.tables = dict.fromkeys(names)
        return self.look()

    def dense(self, *names: str) -> str:
        self._replica.dense_tensors = dict.fromkeys(names)
        return self.look()

    def incomplete(self, *names: str) -> None:
        self._replica.incomplete = names

    def hidden(self, *names: str) -> str:
        self._replica.hidden = names
        return self.look()

    def shard(self, number: int, visible_seq: int, last_seq: int, *, steps: int = 0) -> str:
        self._shards[number] = shard(visible_seq, last_seq, number=number, steps=steps)
        return self.look()

    def fail(self, why: str = "", *, is_away: bool = False) -> str:
        """Have a failure, which is that the server is away, or the loss of the copy; none without a reason."""
        self._replica.failure = UnavailableError(why) if why else None
        self._replica.is_beginning_anew = bool(why) and not is_away
        return self.look()

    def stop(self) -> str:
        self._made.stop()
        return self.look()

    def close(self) -> str:
        def closed() -> list[Freshness]:
            raise UnavailableError("the replica is closed")

        self._replica.freshness = closed
        return self.look()

    def wait(self, duration_s: float) -> str:
        self._now_s += duration_s
        return self.look()

    def look(self) -> str:
        state = self._made.look()
        lag = f", lag {state.lag_s:g} s and {state.lag_steps} steps" if state.lag_s else ""
        why = "" if state.failure is None else f": {state.failure}"
        return f"{'ready' if state.is_ready else 'not ready'}{lag}{why}"


@scripts(__file__, "readiness")
def test_readiness(script: Script) -> None:
    """A replica may get lookups when it has something to find, and lacks nothing that it has known of for long."""
    script.run(Watched())


def test_a_replica_that_keeps_up_is_never_late() -> None:
    """A replica that is always slightly behind is not late."""
    watched = Watched()
    watched.begin()
    for second in range(100):
        assert watched.shard(0, 4 * second, 4 * second + 8) in ("ready", "ready, lag 1 s and 0 steps")
        watched.wait(1)


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


NOW_EQUAL = dataclasses.replace(
    EQUAL, tables=tuple(ReplicaTableAudit(fqn=f"t{number}", num_rows=9) for number in range(6))
)
OUTCOMES = {
    "equal": EQUAL,
    "different": DIFFERENT,
    "equal-now": NOW_EQUAL,
    "different-in-part": dataclasses.replace(NOW_EQUAL, tables=(*NOW_EQUAL.tables[:5], DIFFERENT.tables[5])),
    "nothing": ReplicaAuditReport(tables=(), left_out={"a": "it is kept in int8", "b": "it has virtual ids"}),
    "away": UnavailableError("a shard is away"),
    "bug": ZeroDivisionError("in a digest"),
}


class Audited:
    """A replica that is audited in virtual time; the first pause is a quarter of the interval."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, logger=health.__name__)
        self._caplog = caplog

    async def audit(self, *outcomes: str, interval_s: int = 7200) -> list[str]:
        """Say what was compared when, what was logged, and what is known in the end."""
        loop, left, lines = asyncio.get_running_loop(), list(outcomes), list[str]()
        begin_s, is_over = loop.time(), asyncio.Event()

        def answer(*, tables: list[str] | None, timeout_s: float) -> ReplicaAuditReport:
            name = left.pop(0)
            if not left:
                is_over.set()
            lines.append(f"at {loop.time() - begin_s:g} s, within {timeout_s:g} s: {tables or 'all tables'} {name}")
            if isinstance(outcome := OUTCOMES[name], Exception):
                raise outcome
            return outcome

        self._caplog.clear()
        audit = SelfAudit(cast("Any", SimpleNamespace(audit=answer)), interval_s=interval_s, random=lambda: 0.25)
        running = asyncio.create_task(audit.run())
        await is_over.wait()
        await asyncio.sleep(1)
        running.cancel()
        for record in self._caplog.records:
            trace = "" if record.exc_info is None else f" with the traceback of {record.exc_info[0].__name__}"  # type: ignore[union-attr]
            lines.append(f"{record.levelname} {record.getMessage()}{trace}")
        lines.append(f"{audit.num_equal} equal, {audit.num_different} different, {audit.num_failed} failed")
        difference = "" if audit.report is None else audit.report.difference
        return [*lines, f"difference: {difference or 'none'}, failure: {audit.failure}"]


@scripts(__file__, "audits")
def test_audits_of_itself(script: Script, caplog: pytest.LogCaptureFixture) -> None:
    """Outcomes are counted and told; a difference is looked at again before, and keeps nobody waiting for the next."""

    async def run() -> None:
        await script.run_async(Audited(caplog))

    run_virtual(run())


def test_a_difference_is_named_in_brief() -> None:
    """Four tables with bucket and row, and how many more: a line of a log, and a text on the wire, have an end."""
    text = DIFFERENT.difference
    assert text.startswith("t0: 9 rows, digest 0000000000000000; DIFFERENT in buckets 2: rows 131073; t1: ")
    assert text.endswith("; and 2 more tables") and "t4" not in text
    assert (DIFFERENT.num_differing_buckets, EQUAL.difference) == (6, "")


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
