"""Whether a replica may be sent lookups: it has begun, nothing is wrong, and it is behind by no more than a bound.

How far it is behind is measured by this process's own clock, from the moment at which it learnt that there is more. So
an idle shard is not stale, one that begins again after an hour is not an hour behind, and no clock of a trainer counts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.paramserver.replica.embedding_replica import EmbeddingReplica
from headrace.paramserver.replica.freshness import Freshness
from headrace.paramserver.rpc.reach_log import ReachLog
from headrace.schemas.durations import format_seconds
from headrace.schemas.errors import UnavailableError

__all__ = ["KnownLag", "Readiness", "ReadyState"]

# Positions remembered for a shard; when there are more, the last one stands for those that follow.
_MAX_TARGETS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyState:
    """What a look at a replica has found.

    Attributes:
        is_ready: It may be sent lookups.
        failure: Why not, or what keeps it from being up to date; None when all is well.
        lag_s: How long the oldest update has been known that is not visible, seconds; 0 when there is none.
        shards: How far behind each shard's part is; empty before the replica has begun.
        visible: (epoch, step) up to which everything is visible; (0, -1) before the first.
    """

    is_ready: bool
    failure: str | None
    lag_s: float
    shards: Sequence[Freshness] = ()
    visible: tuple[int, int] = (0, -1)

    @property
    def lag_steps(self) -> int:
        """Steps that have come and are not visible, of the shard that has most."""
        return max((shard.lag_steps for shard in self.shards), default=0)


class KnownLag:
    """Since when one shard's part has lacked updates that are known to be there."""

    def __init__(self) -> None:
        """Know of none."""
        self._targets: deque[tuple[int, float]] = deque()

    def look(self, shard: Freshness, now_s: float) -> float:
        """Return for how long the oldest update that is not visible has been known, seconds.

        Args:
            shard: What is visible and what is known.
            now_s: Monotonic, seconds.
        """
        targets = self._targets
        if not shard.is_behind or (targets and shard.last_seq < targets[-1][0]):  # up to date; or another store
            targets.clear()
        while targets and targets[0][0] <= shard.visible_seq:
            targets.popleft()
        if shard.is_behind and (not targets or targets[-1][0] < shard.last_seq):
            # Where there is no room, the newest is taken to be as old as the one before: too late, never too early.
            since_s = targets.pop()[1] if len(targets) == _MAX_TARGETS else now_s
            targets.append((shard.last_seq, since_s))
        return now_s - targets[0][1] if targets else 0.0


class Readiness:
    """The state of one replica, from before it has begun until it is closed.

    `look` has to be called every now and then, also when nobody asks: what is known is known from the first look on.

    Thread: one at a time.

    Attributes:
        replica: None until it has begun.
        starting: What is being done while there is none, for people.
        reach_log: Told of every attempt to reach the server.
    """

    def __init__(self, *, max_lag_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without a replica.

        Args:
            max_lag_s: How far behind a replica may be and be ready, seconds; 0 for any.
            clock: Monotonic, seconds.
        """
        self.reach_log = ReachLog(clock_s=clock)
        self.replica: EmbeddingReplica | None = None
        self.starting = "starting"
        self._is_stopping = False
        self._max_lag_s = max_lag_s
        self._clock = clock
        self._lags: dict[int, KnownLag] = {}

    def stop(self) -> None:
        """Be ready no more: the process drains, and look-ups shall go elsewhere."""
        self.starting = "stopping"
        self._is_stopping = True

    @property
    def why_not_begun(self) -> str:
        """What is being done while there is no replica, and what keeps it up."""
        trouble = None if self._is_stopping else self.reach_log.trouble()
        return self.starting if trouble is None else f"{self.starting}; {trouble}"

    def look(self) -> ReadyState:
        """Return how it stands now."""
        replica = self.replica
        if replica is None:
            return ReadyState(is_ready=False, failure=self.why_not_begun, lag_s=0.0)
        try:
            # The failure first: it is taken back only when what comes next is of the new copy.
            begins_anew, failure = replica.is_beginning_anew, replica.failure
            visible, shards = (replica.epoch, replica.step), replica.freshness()
        except UnavailableError as exc:
            return ReadyState(is_ready=False, failure=str(exc), lag_s=0.0)
        now_s = self._clock()
        lag_s = max((self._lags.setdefault(s.shard, KnownLag()).look(s, now_s) for s in shards), default=0.0)
        is_late = 0 < self._max_lag_s < lag_s
        why = "stopping" if self._is_stopping else f"begins anew: {failure}" if begins_anew and failure else None
        if why is None and is_late:
            bound = format_seconds(self._max_lag_s)
            why = f"updates have been known for {lag_s:.1f} s that are not visible, the bound is {bound}"
            why += "" if failure is None else f"; {failure}"
        is_ready = why is None
        # A server that is away takes no readiness: perhaps there is nothing new.
        why = str(failure) if why is None and failure is not None else why
        return ReadyState(is_ready=is_ready, failure=why, lag_s=lag_s, shards=shards, visible=visible)
