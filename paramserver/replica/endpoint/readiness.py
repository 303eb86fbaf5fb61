"""Decides whether a replica may get lookups: it has begun, nothing is wrong, and its lag is within a limit.

The lag is measured on this process's own clock, from the moment at which it learned of an update. So an idle shard is
not stale, a shard that resumes after an hour is not an hour behind, and no trainer's clock counts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.replica.copy.shard_tail import Freshness
from headrace.paramserver.rpc.outages import OutageLog
from headrace.paramserver.system.text import format_seconds
from headrace.schemas.errors import UnavailableError

__all__ = ["KnownLag", "Readiness", "ReadyState"]

# Positions remembered per shard; beyond that, the last one stands for all that follow.
_MAX_TARGETS = 64


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
        self.replica: EmbeddingReplica | None = None  # None until it has begun
        self.starting = "starting"  # what happens while there is no replica, for people
        self._is_stopping = False
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
        except UnavailableError as exc:
            return ReadyState(is_ready=False, failure=str(exc), lag_s=0.0)
        now_s = self._clock()
        lag_s = max((self._lags.setdefault(s.shard, KnownLag()).look(s, now_s) for s in shards), default=0.0)
        is_late = 0 < self._max_lag_s < lag_s
        why = "stopping" if self._is_stopping else f"begins anew: {failure}" if begins_anew and failure else None
        if why is None and is_late:
            limit = format_seconds(self._max_lag_s)
            why = f"updates have been known for {lag_s:.1f} s that are not visible, the bound is {limit}"
            why += "" if failure is None else f"; {failure}"
        is_ready = why is None
        # A server that is away does not make the replica unready: there may be nothing new.
        why = str(failure) if why is None and failure is not None else why
        return ReadyState(is_ready=is_ready, failure=why, lag_s=lag_s, shards=shards, visible=visible)
