"""A replica's process that compares its rows with the server's time and again, and tells how that went."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from headrace.paramserver.process.log_format import fact
from headrace.paramserver.replica.audit import ReplicaAuditReport
from headrace.paramserver.replica.embedding_replica import EmbeddingReplica
from headrace.schemas.errors import HeadraceError

__all__ = ["SelfAudit"]

_log = logging.getLogger(__name__)
# A large store takes longer than a short interval; one that does not answer is told by deadlines of its own.
_MIN_TIMEOUT_S = 3600.0


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
            pause_s = self.interval_s

    async def _audit(self) -> None:
        begin_s, timeout_s = time.monotonic(), max(self.interval_s, _MIN_TIMEOUT_S)
        try:
            report = await asyncio.to_thread(self._replica.audit, timeout_s=timeout_s)
        except Exception as exc:
            self.num_failed += 1
            self.failure = str(exc) or type(exc).__name__
            fact(_log, logging.WARNING, "replica could not be compared with its server", why=self.failure)
            if not isinstance(exc, HeadraceError):  # a bug of ours; look-ups go on, and so do audits
                _log.error("an audit has failed by a bug", exc_info=exc)
            return
        self.report, self.ended_s, self.failure = report, time.time(), None
        facts = {"rows": report.num_rows, "duration_s": round(time.monotonic() - begin_s, 3)}
        if report.is_equal:
            self.num_equal += 1
            fact(_log, logging.INFO, "replica is equal to its server", **facts)
        else:
            self.num_different += 1
            fact(_log, logging.ERROR, "replica differs from its server", difference=report.difference, **facts)
