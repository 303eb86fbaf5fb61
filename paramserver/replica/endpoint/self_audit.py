"""Compare a replica's rows with its server's at regular intervals, and report the results."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Callable, Sequence

from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.replica.copy.audit import ReplicaAuditReport
from headrace.paramserver.system.log_lines import fact
from headrace.paramserver.system.text import first_of
from headrace.schemas.errors import HeadraceError, RequestError

__all__ = ["SelfAudit"]

_log = logging.getLogger(__name__)
# A large store takes longer than a short interval; deadlines of their own detect a server that does not answer.
_MIN_TIMEOUT_S = 3600.0
# A difference is confirmed before it is reported, because a replica of a server that was set back is about to start
# over. The next audit after a report comes soon, because the difference may be gone.
_CONFIRM_PAUSE_S, _SOON_S = 5.0, 60.0


class SelfAudit:
    """Runs audits of one replica, one after the other.

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
        self, replica: EmbeddingReplica, *, interval_s: float, random: Callable[[], float] = random.random
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
