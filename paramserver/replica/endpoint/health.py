"""A replica's health: whether it may get lookups, and whether its rows are the server's.

It may get lookups when it has begun and has tables, nothing is wrong, and its lag is within a limit. The lag is
measured on this process's own clock, from the moment at which it learned of an update. So an idle shard is not stale, a
shard that resumes after an hour is not an hour behind, and no trainer's clock counts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from headrace.paramserver.replica.copy.array_replica import ArrayReplica
from headrace.paramserver.replica.copy.audit import ReplicaAuditReport
from headrace.paramserver.replica.copy.shard_tail import Freshness
from headrace.paramserver.rpc.outages import OutageLog
from headrace.paramserver.system.log_lines import fact
from headrace.paramserver.system.text import first_of, format_seconds
from headrace.schemas.errors import HeadraceError, RequestError, UnavailableError

__all__ = ["KnownLag", "Readiness", "ReadyState", "SelfAudit"]

_log = logging.getLogger(__name__)

# Positions remembered per shard; beyond that, the last one stands for all that follow.
_MAX_TARGETS = 64
# A large store takes longer than a short interval; deadlines of their own detect a server that does not answer.
_MIN_TIMEOUT_S = 3600.0
# A difference is confirmed before it is reported, because a replica of a server that was set back is about to start
# over. The next audit after a report comes soon, because the difference may be gone.
_CONFIRM_PAUSE_S, _SOON_S = 5.0, 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyState:
    """The state of a replica at one moment."""

    is_ready: bool  # it may get lookups
    failure: str | None  # why not, or what keeps it from being up to date; None if all is well
    lag_s: float  # for how long the oldest update that is not visible has been known; 0 without one
    shards: Sequence[Freshness] = ()  # empty before the replica has begun
    visible: tuple[int, int] = (0, -1)  # (epoch, step) up to which everything is visible

    @property
    def lag_steps(self) -> int:
        """Steps that arrived and are not visible, of the shard with the most."""
        return max((shard.lag_steps for shard in self.shards), default=0)


class KnownLag:
    """Measures for how long one shard's part has lacked updates that are known to exist."""

    def __init__(self) -> None:
        self._targets: deque[tuple[int, float]] = deque()  # (seq, when it became known)

    def look(self, shard: Freshness, now_s: float) -> float:
        """Return for how long the oldest update that is not visible has been known, seconds, given a monotonic time."""
        targets = self._targets
        if not shard.is_behind or (targets and shard.last_seq < targets[-1][0]):  # up to date, or another store
            targets.clear()
        while targets and targets[0][0] <= shard.visible_seq:
            targets.popleft()
        if shard.is_behind and (not targets or targets[-1][0] < shard.last_seq):
            # Without room, give the newest the age of the one before: the lag may read too high, never too low.
            since_s = targets.pop()[1] if len(targets) == _MAX_TARGETS else now_s
            targets.append((shard.last_seq, since_s))
        return now_s - targets[0][1] if targets else 0.0


class Readiness:
    """Tracks the state of one replica from before it has begun until it is closed.

    Call `look` regularly, even if nobody asks: an update counts as known from the first look after it.

    Thread: one at a time.
    """

    def __init__(self, *, max_lag_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.reach_log = OutageLog(clock_s=clock)  # gets every attempt to reach the server
        self.replica: ArrayReplica | None = None  # None until it has begun
        self.starting = "starting"  # what happens while there is no replica, for people
        self._is_stopping = False
        self._has_been_ready = False  # tables that begin later make it not unready
        self._max_lag_s = max_lag_s  # largest lag of a ready replica; 0 for any
        self._clock = clock
        self._lags: dict[int, KnownLag] = {}

    def stop(self) -> None:
        """Stop being ready: the process drains, and lookups must go elsewhere."""
        self.starting = "stopping"
        self._is_stopping = True

    @property
    def why_not_begun(self) -> str:
        """What happens while there is no replica, and what delays it."""
        trouble = None if self._is_stopping else self.reach_log.trouble()
        return self.starting if trouble is None else f"{self.starting}; {trouble}"

    def look(self) -> ReadyState:
        """Return the state now."""
        replica = self.replica
        if replica is None:
            return ReadyState(is_ready=False, failure=self.why_not_begun, lag_s=0.0)
        try:
            # Read the failure first: when it is None again, what is read next belongs to the new copy.
            begins_anew, failure = replica.is_beginning_anew, replica.failure
            visible, shards = (replica.epoch, replica.step), replica.freshness()
            tables, has_tables = replica.tables, bool(replica.tables or replica.dense_tensors)
            incomplete, hidden = replica.incomplete, replica.hidden
        except UnavailableError as exc:
            return ReadyState(is_ready=False, failure=str(exc), lag_s=0.0)
        now_s = self._clock()
        lag_s = max((self._lags.setdefault(s.shard, KnownLag()).look(s, now_s) for s in shards), default=0.0)
        is_late = 0 < self._max_lag_s < lag_s
        why = "stopping" if self._is_stopping else f"begins anew: {failure}" if begins_anew and failure else None
        if why is None and not has_tables:
            why = "it has no tables: the server has none of those it keeps; the first attach of a trainer makes some"
        if why is None and not self._has_been_ready and (awaited := _awaited(tables, incomplete, hidden)):
            why = f"incomplete: {first_of(awaited)}; by step a table is shown whole"
        if why is None and is_late:
            limit = format_seconds(self._max_lag_s)
            why = f"updates have been known for {lag_s:.1f} s that are not visible, the bound is {limit}"
            why += "" if failure is None else f"; {failure}"
        is_ready = why is None
        self._has_been_ready |= is_ready
        # A server that is away does not make the replica unready: there may be nothing new.
        why = str(failure) if why is None and failure is not None else why
        if why is None and incomplete:
            why = f"incomplete: {first_of(list(incomplete))}; its trainer or backfill has not sent all rows"
            why += f", and by step lookups do not see {first_of(list(hidden))}" if hidden else ""
        return ReadyState(is_ready=is_ready, failure=why, lag_s=lag_s, shards=shards, visible=visible)


def _awaited(tables: Iterable[str], incomplete: Collection[str], hidden: Collection[str]) -> list[str]:
    """Return for which hidden tables a replica by step waits before it is ready.

    The server has all rows of them. Others may stay incomplete for ever, if their trainer has died: they keep lookups
    from nothing else, but a replica that shows no table at all waits for them too.
    """
    shown = set(tables).difference(hidden)
    return [name for name in hidden if name not in incomplete or not shown]


class SelfAudit:
    """Compares one replica's rows with its server's at regular intervals.

    Thread: the event loop's; any thread may read the attributes.

    Attributes:
        interval_s: Time from the end of one audit to the next, seconds.
        num_equal: Audits that found no difference.
        num_different: Audits that found one.
        num_failed: Audits that did not finish, for example while the server is away.
        report: Report of the last audit that finished; None before the first.
        ended_s: When that was, or when this object was created, seconds since 1970.
        failure: Why the very last audit did not finish; None if it did.
    """

    def __init__(
        self, replica: ArrayReplica, *, interval_s: float, random: Callable[[], float] = random.random
    ) -> None:
        """Prepare; `run` audits.

        Args:
            replica: REQUIRES: open as long as `run` runs.
            interval_s: Time between audits, seconds.
            random: Returns numbers in [0, 1), so that replicas started together audit at different times.
        """
        self.interval_s = interval_s
        self.num_equal = self.num_different = self.num_failed = 0
        self.report: ReplicaAuditReport | None = None
        self.ended_s = time.time()
        self.failure: str | None = None
        self._replica = replica
        self._random = random

    async def run(self) -> None:
        """Audit the replica until cancelled.

        Cancellation: a running audit continues in its thread until the replica is closed; its result is dropped.
        """
        pause_s = self.interval_s * self._random()
        while True:
            await asyncio.sleep(pause_s)
            await self._audit()
            differs = self.report is not None and not self.report.is_equal
            pause_s = min(self.interval_s, _SOON_S) if differs else self.interval_s

    async def _audit(self) -> None:
        begin_s = time.monotonic()
        try:
            report = await self._compared(None)
            if not report.tables:
                raise RequestError(f"no table can be compared: {first_of([*map(': '.join, report.left_out.items())])}")
            if not report.is_equal:
                report = await self._confirmed(report)
        except Exception as exc:
            self.num_failed += 1
            self.failure = str(exc) or type(exc).__name__
            fact(_log, logging.WARNING, "replica could not be compared with its server", why=self.failure)
            if not isinstance(exc, HeadraceError):  # a bug of ours; lookups and audits continue
                _log.error("an audit has failed by a bug", exc_info=exc)
            return
        self.report, self.ended_s, self.failure = report, time.time(), None
        facts = {
            "rows": report.num_rows,
            "left_out": first_of(sorted(report.left_out)),
            "duration_s": round(time.monotonic() - begin_s, 3),
        }
        if report.is_equal:
            self.num_equal += 1
            fact(_log, logging.INFO, "replica is equal to its server", **facts)
        else:
            self.num_different += 1
            fact(_log, logging.ERROR, "replica differs from its server", difference=report.difference, **facts)

    async def _confirmed(self, report: ReplicaAuditReport) -> ReplicaAuditReport:
        """Return the report with differing tables audited again, or unchanged if that fails."""
        await asyncio.sleep(_CONFIRM_PAUSE_S)
        try:
            again = await self._compared([table.fqn for table in report.tables if table.differing_buckets])
        except HeadraceError as exc:
            fact(_log, logging.WARNING, "a difference could not be looked at again", why=str(exc))
            return report
        now = {table.fqn: table for table in again.tables}
        return dataclasses.replace(report, tables=tuple(now.get(table.fqn, table) for table in report.tables))

    async def _compared(self, tables: Sequence[str] | None) -> ReplicaAuditReport:
        timeout_s = max(self.interval_s, _MIN_TIMEOUT_S)
        return await asyncio.to_thread(self._replica.audit, tables=tables, timeout_s=timeout_s)
