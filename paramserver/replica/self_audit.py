"""A replica's process that compares its rows with the server's time and again, and tells how that went."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Callable, Sequence

from headrace.paramserver.process.log_format import fact
from headrace.paramserver.replica.audit import ReplicaAuditReport
from headrace.paramserver.replica.embedding_replica import EmbeddingReplica
from headrace.schemas.errors import HeadraceError, RequestError
from headrace.schemas.near_names import first_of

__all__ = ["SelfAudit"]

_log = logging.getLogger(__name__)
# A large store takes longer than a short interval; one that does not answer is told by deadlines of its own.
_MIN_TIMEOUT_S = 3600.0
# A difference is looked at again before it is told: a replica of a server that was set back is about to begin anew. And
# soon after it was told: it may be gone.
_CONFIRM_PAUSE_S, _SOON_S = 5.0, 60.0


class SelfAudit:
    """Audits of one replica, one after the other.

    Thread: the event loop's; the figures are read by any.

    Attributes:
        interval_s: From the end of one audit to the next, seconds.
        num_equal: Audits that found no difference.
        num_different: Audits that found one.
        num_failed: Audits that did not come to an end, as while the server is away.
        report: Of the last one that did; None before.
        ended_s: When that was, or when this was begun, seconds since 1970.
        failure: Why the very last one did not come to an end; None when it did.
    """

    def __init__(
        self, replica: EmbeddingReplica, *, interval_s: float, random: Callable[[], float] = random.random
    ) -> None:
        """Prepare; `run` does it.

        Args:
            replica: Open for as long as `run` goes on.
            interval_s: Between audits, seconds.
            random: Source of numbers in [0, 1): replicas that were started together look at different times.
        """
        self.interval_s = interval_s
        self.num_equal = self.num_different = self.num_failed = 0
        self.report: ReplicaAuditReport | None = None
        self.ended_s = time.time()
        self.failure: str | None = None
        self._replica = replica
        self._random = random

    async def run(self) -> None:
        """Audit the replica for ever.

        Cancellation: an audit under way goes on in its thread until the replica is closed, and counts for nothing.
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
            if not isinstance(exc, HeadraceError):  # a bug of ours; look-ups go on, and so do audits
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
        """Return the report with what differed looked at once more; as it is where that could not be."""
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
