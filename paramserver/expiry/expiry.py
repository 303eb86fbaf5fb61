"""Expiry of rows, run by a shard: by its own triggers and by hand, one run at a time.

`expiry_policy` decides, `expiry_scan` looks, `expiry_run` does a table, `expiry_writer` writes tombstones into the log;
this begins runs and tells of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Self

from headrace.paramserver.expiry.expiry_policy import ExpiryPolicy, ExpiryRules
from headrace.paramserver.expiry.expiry_run import RunContext, TableReport, TableRun, check_policy
from headrace.paramserver.process.log_format import fact
from headrace.paramserver.store.catalog import Table
from headrace.schemas.errors import ConfigError, GoneError, HeadraceError, OverloadedError, RequestError
from headrace.schemas.idl import idl, wire_text

__all__ = ["Expirer"]

_log = logging.getLogger(__name__)

# How often triggers are looked at, and how long a table is left alone after a run, whatever its size.
_TICK_S = 5.0
_REST_S = 60.0
_MAX_WAIT_S = 60.0
# Runs by hand whose report can still be asked for.
_NUM_KEPT_RUNS = 8


@dataclass(slots=True)
class _Run:
    """A run over some tables, by hand or by trigger."""

    number: int
    tables: list[tuple[Table, ExpiryPolicy]]
    is_dry_run: bool
    reports: list[TableReport] = field(default_factory=list)
    current: TableRun | None = None
    error: str | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def scanned(self) -> int:
        return sum(report.scanned for report in self._all())

    @property
    def expired(self) -> int:
        return sum(report.expired for report in self._all())

    def _all(self) -> list[TableReport]:
        return [*self.reports, *([self.current.report] if self.current is not None else [])]


@dataclass(slots=True)
class _Seen:
    """What triggers need to know of a table.

    Attributes:
        run_s: When its last run began, or this process did; monotonic.
        live: Rows that the last run has left; None before the first.
        estimate: What the store estimated then.
    """

    run_s: float
    live: int | None = None
    estimate: int = 0


class Expirer:
    """Runs expiry on one shard. Use it with `async with`; a run that is on its way when it ends is cut off.

    Thread: the event loop's.

    Attributes:
        num_runs: Runs that have ended since the process began, dry ones left out.
        num_rows_scanned: Rows that they have looked at.
        num_rows_expired: Rows that they have deleted.
        num_failed: Runs that ended in an error.
        last_run_us: When the last run ended, microseconds since 1970; 0 before the first.
    """

    def __init__(
        self, context: RunContext, rules: ExpiryRules, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Expire the rows of a shard.

        Args:
            context: Of the shard.
            rules: Policies by table.
            clock_s: Monotonic seconds, for triggers.
        """
        self.num_runs = self.num_rows_scanned = self.num_rows_expired = self.num_failed = 0
        self.last_run_us = 0
        self._context, self._rules, self._clock_s = context, rules, clock_s
        self._seen: dict[int, _Seen] = {}
        self._began_s = clock_s()
        self._runs: dict[int, _Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        if any(_has_trigger(policy) for _, policy in self._rules.rules):
            self._spawn(self._watch(), "headrace-expiry-triggers")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def is_running(self) -> bool:
        """Whether a run is on its way."""
        return any(not run.done.is_set() for run in self._runs.values())

    async def expire_rows(self, request: Any) -> Any:
        """Answer an `ExpireRowsRequest`: begin a run, or ask after one, and wait a while for its end.

        Raises:
            RequestError: No such table, or none that has a policy, or a wrong policy.
            OverloadedError: Another run is on its way.
            GoneError: The run asked after is not known: the shard has restarted.

        Cancellation: the run goes on.
        """
        if request.wait_ms < 0:
            raise RequestError(f"a wait of {request.wait_ms} ms is out of range")
        if request.run_number:
            run = self._runs.get(request.run_number)
            if run is None:
                raise GoneError(f"run {request.run_number} is not known here; the shard has restarted: expire again")
        else:
            run = self._begin(self._choose(request.fqn, request.policy or ""), is_dry_run=bool(request.is_dry_run))
        try:
            async with asyncio.timeout(min(request.wait_ms / 1000, _MAX_WAIT_S)):
                await run.done.wait()
        except TimeoutError:
            pass  # then this is how far it has come
        return idl.ExpireRowsReply(
            run_number=run.number,
            is_done=run.done.is_set(),
            scanned=run.scanned,
            expired=run.expired,
            tables=[_report_to_idl(report) for report in run.reports],
            error=None if run.error is None else wire_text(run.error),
        )

    def status(self) -> Any:
        """Return the IDL's `ExpiryStatus`."""
        running = next((run for run in self._runs.values() if not run.done.is_set()), None)
        return idl.ExpiryStatus(
            is_running=running is not None,
            scanned=running.scanned if running is not None else 0,
            num_runs=self.num_runs,
            num_rows_scanned=self.num_rows_scanned,
            num_rows_expired=self.num_rows_expired,
            num_failed=self.num_failed,
            last_run_us=self.last_run_us,
        )

    async def check_triggers(self) -> None:
        """Run expiry on every table that is due, and return when that is done.

        Cancellation: the run is cut off.
        """
        due = [chosen for chosen in self._choose("", "", is_lenient=True) if await self._is_due(*chosen)]
        if due and not self.is_running:
            await self._begin(due, is_dry_run=False).done.wait()

    def _choose(self, pattern: str, policy: str, *, is_lenient: bool = False) -> list[tuple[Table, ExpiryPolicy]]:
        """Return the tables that a pattern means, with their policies."""
        given = _parse_policy(policy) if policy else None
        catalog = list(self._context.ingest.catalog)
        tables = [table for table in catalog if not pattern or fnmatchcase(table.spec.fqn, pattern)]
        if not tables and pattern:
            raise RequestError(f"no table {pattern!r} here")
        chosen = [(table, given or self._rules.policy_of(table.spec.fqn)) for table in tables]
        found = [(table, policy) for table, policy in chosen if policy is not None]
        if not found and not is_lenient:
            raise RequestError("no such table has an expiry policy; give the server one (--expiry) or this call")
        for table, of_table in found:
            try:
                check_policy(table, of_table)
            except ConfigError as exc:
                if not is_lenient:
                    raise RequestError(str(exc)) from exc
        return found

    def _begin(self, tables: list[tuple[Table, ExpiryPolicy]], *, is_dry_run: bool) -> _Run:
        if self.is_running:
            raise OverloadedError("an expiry run is on its way on this shard", retry_after_s=1.0)
        # Not 1, 2, 3 …: the runs of a shard that has restarted are none of those before.
        number = max([time.time_ns() // 1000, *(number + 1 for number in self._runs)])
        run = self._runs[number] = _Run(number, tables, is_dry_run)
        while len(self._runs) > _NUM_KEPT_RUNS:
            del self._runs[next(iter(self._runs))]
        self._spawn(self._do(run), "headrace-expiry")
        return run

    async def _do(self, run: _Run) -> None:
        try:
            for table, policy in run.tables:
                await self._do_table(run, table, policy)
        except asyncio.CancelledError:
            run.error = "cut off: the shard is closing"
            raise
        except Exception as exc:  # of whatever kind: the shard goes on, and whoever asks after the run is told
            run.error = str(exc) if isinstance(exc, HeadraceError) else f"a bug: {exc!r}"
            self.num_failed += 1
            _log.error("expiry failed: %s", run.error, exc_info=None if isinstance(exc, HeadraceError) else exc)
        finally:
            run.current = None
            if not run.is_dry_run:
                self.num_runs += 1
                self.last_run_us = self._context.clock_us()
            run.done.set()

    async def _do_table(self, run: _Run, table: Table, policy: ExpiryPolicy) -> None:
        seen = self._seen.setdefault(table.table_id, _Seen(self._began_s))
        if not run.is_dry_run:
            seen.run_s = self._clock_s()
        run.current = TableRun(self._context, table, policy, is_dry_run=run.is_dry_run)
        begun_s = time.monotonic()
        try:
            report = await run.current.run()
        finally:
            if not run.is_dry_run:
                self.num_rows_scanned += run.current.num_looked_at
                self.num_rows_expired += run.current.report.expired
        run.reports.append(report)
        run.current = None
        if not run.is_dry_run:
            seen.live = report.live - report.expired
            # With the tombstones in it: as many more will not be taken for as many new rows.
            await self._context.applier.wait_applied(self._context.ingest.submitted_seq)
            seen.estimate = await self._estimate(table)
            fact(
                _log,
                logging.INFO,
                "expired",
                table=report.fqn,
                scanned=report.scanned,
                expired=report.expired,
                spared=report.spared,
                seconds=round(time.monotonic() - begun_s, 3),
                **({"note": report.note} if report.note else {}),
            )

    async def _watch(self) -> None:
        while True:
            await self._context.sleep(_TICK_S)
            try:
                await self.check_triggers()
            except HeadraceError as exc:  # of the store, which the applier meets too
                fact(_log, logging.ERROR, "expiry cannot look at its triggers", error=str(exc))

    async def _is_due(self, table: Table, policy: ExpiryPolicy) -> bool:
        seen = self._seen.setdefault(table.table_id, _Seen(self._began_s))
        rest_s = self._clock_s() - seen.run_s
        if policy.interval_s is not None and rest_s >= policy.interval_s:
            return True
        if rest_s < _REST_S or (policy.trigger_rows is None and policy.trigger_bytes is None):
            return False
        num_rows = await self._estimate(table)
        if seen.live is not None:
            # What the estimate counts besides rows that are there, tombstones above all, it counted then as well.
            num_rows = seen.live + max(num_rows - seen.estimate, 0)
        num_rows *= self._context.num_shards
        size_bytes = num_rows * table.layout_of(table.spec.whole).size_bytes
        return (policy.trigger_rows is not None and num_rows > policy.trigger_rows) or (
            policy.trigger_bytes is not None and size_bytes > policy.trigger_bytes
        )

    async def _estimate(self, table: Table) -> int:
        return await asyncio.to_thread(self._context.store.num_rows_estimate, table.table_id)

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _has_trigger(policy: ExpiryPolicy) -> bool:
    return any(value is not None for value in (policy.interval_s, policy.trigger_rows, policy.trigger_bytes))


def _parse_policy(text: str) -> ExpiryPolicy:
    try:
        return ExpiryPolicy.parse(text)
    except ConfigError as exc:
        raise RequestError(f"policy {text!r}: {exc}") from exc


def _report_to_idl(report: TableReport) -> Any:
    return idl.TableExpiry(
        fqn=report.fqn,
        scanned=report.scanned,
        live=report.live,
        expired=report.expired,
        spared=report.spared,
        by_policy=[idl.PolicyCount(policy=name, num_rows=count) for name, count in sorted(report.by_policy.items())],
        note=report.note or None,
    )
