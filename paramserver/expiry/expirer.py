"""Run expiry passes on a shard, started by triggers or by hand, one at a time.

`policy.py` decides, `scan.py` reads, `table_pass.py` handles a table and writes the deletions; the expirer starts
passes and reports on them. Rows of several layouts of columns are settled after a pass, and now and then without one
(`sweep.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

from headrace.paramserver.expiry.policy import ExpiryPolicy, ExpiryRules
from headrace.paramserver.expiry.sweep import needs_sweep, sweep
from headrace.paramserver.expiry.table_pass import PassContext, TablePass, TableReport, check_policy
from headrace.paramserver.store.catalog import Table
from headrace.paramserver.system.log_lines import fact
from headrace.schemas.errors import ConfigError, GoneError, HeadraceError, OverloadedError, RequestError
from headrace.schemas.idl import idl, wire_text
from headrace.schemas.table_names import matches

__all__ = ["Expirer"]

_log = logging.getLogger(__name__)

# Interval between checks of triggers, and the shortest time between passes over a table.
_TICK_S = 5.0
_REST_S = 60.0
_MAX_WAIT_S = 60.0
# A sweep reads all rows of a table.
_SWEEP_EVERY_S = 43_200.0
# Passes whose report can still be asked for.
_NUM_KEPT_PASSES = 8


@dataclass(frozen=True, slots=True)
class _Job:
    """A table, and the policy by which its rows expire."""

    table: Table
    policy: ExpiryPolicy


@dataclass(slots=True)
class _Pass:
    """A pass over some tables."""

    number: int
    jobs: list[_Job]
    is_dry_run: bool
    reports: list[TableReport] = field(default_factory=list)
    current: TablePass | None = None
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
    """The state of a table that triggers need."""

    pass_s: float  # when its last pass began, or this process did, monotonic
    swept_s: float  # the same of its last sweep
    live: int | None = None  # rows left by the last pass
    estimate: int = 0  # the store's, after that pass


class Expirer:
    """Runs expiry on one shard. Use it with `async with`, which cuts off a pass that is running at its end.

    Triggers use `clock_s`, monotonic seconds. Counters start with the process and skip dry passes; `last_run_us` is
    when the last pass ended, microseconds since 1970, 0 before the first.

    Thread: the event loop's.
    """

    def __init__(
        self,
        context: PassContext,
        rules: ExpiryRules,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Prepare; `sleep` takes the seconds between two looks at the triggers."""
        self.num_runs = self.num_rows_scanned = self.num_rows_expired = self.num_failed = 0
        self.last_run_us = 0
        self._context, self._rules, self._clock_s, self._sleep = context, rules, clock_s, sleep
        self._seen: dict[int, _Seen] = {}
        self._began_s = clock_s()
        self._passes: dict[int, _Pass] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._spawn(self._watch(), "headrace-expiry-triggers")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def is_running(self) -> bool:
        """Whether a pass is running."""
        return any(not pass_.done.is_set() for pass_ in self._passes.values())

    async def expire_rows(self, request: Any) -> Any:
        """Answer an `ExpireRowsRequest`: begin a pass or ask after one, and wait for its end for a while.

        Raises:
            RequestError: No such table, or nothing to do with it, or a wrong policy.
            OverloadedError: Another pass is running.
            GoneError: The pass asked after is unknown: the shard has restarted.

        Cancellation: the pass goes on.
        """
        if request.wait_ms < 0:
            raise RequestError(f"a wait of {request.wait_ms} ms is out of range")
        if request.run_number:
            pass_ = self._passes.get(request.run_number)
            if pass_ is None:
                raise GoneError(f"expiry pass {request.run_number} is unknown; the shard has restarted: expire again")
        else:
            pass_ = self._begin(self._choose(request.fqn, request.policy or ""), is_dry_run=bool(request.is_dry_run))
        try:
            async with asyncio.timeout(min(request.wait_ms / 1000, _MAX_WAIT_S)):
                await pass_.done.wait()
        except TimeoutError:
            pass  # the reply then tells the progress so far
        return idl.ExpireRowsReply(
            run_number=pass_.number,
            is_done=pass_.done.is_set(),
            scanned=pass_.scanned,
            expired=pass_.expired,
            tables=[_report_to_idl(report) for report in pass_.reports],
            error=None if pass_.error is None else wire_text(pass_.error),
        )

    def status(self) -> Any:
        """Return the IDL's `ExpiryStatus`."""
        running = next((each for each in self._passes.values() if not each.done.is_set()), None)
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
        """Run a pass over every table that is due, and wait for its end; sweep tables. Cancellation cuts it off."""
        jobs = self._choose("", "", is_lenient=True)
        due = [job for job in jobs if await self._is_due(job.table, job.policy)]
        if due and not self.is_running:
            await self._begin(due, is_dry_run=False).done.wait()
        for table in self._context.ingest.catalog:
            if self._clock_s() - self._seen_of(table).swept_s >= _SWEEP_EVERY_S and not self.is_running:
                await self._sweep(table)

    def _choose(self, pattern: str, policy: str, *, is_lenient: bool = False) -> list[_Job]:
        """Return what there is to do with the tables that match a pattern; rows of dense tensors never expire."""
        try:
            given = ExpiryPolicy.parse(policy) if policy else None
        except ConfigError as exc:
            raise RequestError(f"policy {policy!r}: {exc}") from exc
        catalog = list(self._context.ingest.catalog)
        tables = [table for table in catalog if not pattern or matches(table.spec.fqn, pattern)]
        if not tables and pattern:
            raise RequestError(f"no table {pattern!r} here")
        if pattern and all(table.spec.is_dense for table in tables):
            raise RequestError(f"{pattern!r} is a dense tensor, whose rows never expire; name an embedding table")
        tables = [table for table in tables if not table.spec.is_dense]
        policies = [(table, given or self._rules.policy_of(table.spec.fqn)) for table in tables]
        jobs = [_Job(table, policy) for table, policy in policies if policy is not None]
        if not jobs and not is_lenient:
            raise RequestError("no matching table has an expiry policy; give one to the server (--expiry) or this call")
        for job in jobs:
            try:
                check_policy(job.table, job.policy)
            except ConfigError as exc:
                if not is_lenient:
                    raise RequestError(str(exc)) from exc
        return jobs

    def _begin(self, jobs: list[_Job], *, is_dry_run: bool) -> _Pass:
        if self.is_running:
            raise OverloadedError("an expiry pass is running on this shard", retry_after_s=1.0)
        # Not 1, 2, 3 …: a restarted shard must not reuse the numbers of earlier passes.
        number = max([time.time_ns() // 1000, *(number + 1 for number in self._passes)])
        pass_ = self._passes[number] = _Pass(number, jobs, is_dry_run)
        while len(self._passes) > _NUM_KEPT_PASSES:
            del self._passes[next(iter(self._passes))]
        self._spawn(self._do(pass_), "headrace-expiry")
        return pass_

    async def _do(self, pass_: _Pass) -> None:
        try:
            for job in pass_.jobs:
                await self._do_table(pass_, job)
        except asyncio.CancelledError:
            pass_.error = "cut off: the shard is closing"
            raise
        except Exception as exc:  # any kind: the shard goes on, and the pass reports the error
            pass_.error = str(exc) if isinstance(exc, HeadraceError) else f"a bug: {exc!r}"
            self.num_failed += 1
            _log.error("expiry failed: %s", pass_.error, exc_info=None if isinstance(exc, HeadraceError) else exc)
        finally:
            pass_.current = None
            if not pass_.is_dry_run:
                self.num_runs += 1
                self.last_run_us = self._context.clock_us()
            pass_.done.set()

    async def _do_table(self, pass_: _Pass, job: _Job) -> None:
        table = job.table
        seen = self._seen_of(table)
        begun_s = time.monotonic()
        report = await self._expire(pass_, table, job.policy, seen)
        if pass_.is_dry_run:
            return
        await self._sweep(table)
        seen.live = report.live - report.expired
        # Include the removals in the estimate, or they would later look like new rows.
        await self._context.applier.wait_applied(self._context.ingest.submitted_seq)
        seen.estimate = await self._estimate(table)
        fact(
            _log,
            logging.INFO,
            "expired",
            table=report.fqn,
            scanned=report.scanned,
            expired=report.expired,
            seconds=round(time.monotonic() - begun_s, 3),
            **({"note": report.note} if report.note else {}),
        )

    async def _expire(self, pass_: _Pass, table: Table, policy: ExpiryPolicy, seen: _Seen) -> TableReport:
        if not pass_.is_dry_run:
            seen.pass_s = self._clock_s()
        pass_.current = TablePass(self._context, table, policy, is_dry_run=pass_.is_dry_run)
        try:
            report = await pass_.current.run()
        finally:
            if not pass_.is_dry_run:
                self.num_rows_scanned += pass_.current.num_looked_at
                self.num_rows_expired += pass_.current.report.expired
        pass_.reports.append(report)
        pass_.current = None
        return report

    async def _sweep(self, table: Table) -> None:
        seen = self._seen_of(table)
        seen.swept_s = self._clock_s()
        if needs_sweep(self._context, table) and (num_records := await sweep(self._context, table)):
            seen.estimate += num_records  # removals count there until RocksDB compacts
            fact(_log, logging.INFO, "swept", table=table.spec.fqn, records=num_records)

    async def _watch(self) -> None:
        while True:
            await self._sleep(_TICK_S)
            try:
                await self.check_triggers()
            except HeadraceError as exc:  # from the store; the applier meets it too
                fact(_log, logging.ERROR, "expiry cannot look at its triggers", error=str(exc))

    def _seen_of(self, table: Table) -> _Seen:
        return self._seen.setdefault(table.table_id, _Seen(self._began_s, self._began_s))

    async def _is_due(self, table: Table, policy: ExpiryPolicy) -> bool:
        seen = self._seen_of(table)
        rest_s = self._clock_s() - seen.pass_s
        if policy.interval_s is not None and rest_s >= policy.interval_s:
            return True
        if rest_s < _REST_S or (policy.trigger_rows is None and policy.trigger_bytes is None):
            return False
        num_rows = await self._estimate(table)
        if seen.live is not None:
            # The estimate's surplus, mostly removals, was there at the last pass too.
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


def _report_to_idl(report: TableReport) -> Any:
    return idl.TableExpiry(
        fqn=report.fqn,
        scanned=report.scanned,
        live=report.live,
        expired=report.expired,
        by_policy=[idl.PolicyCount(policy=name, num_rows=count) for name, count in sorted(report.by_policy.items())],
        note=report.note or None,
    )
