"""The last half hour of a server in figures, of a fixed size: what the status page draws."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from headrace.paramserver.metrics.metrics_families import ShardState

__all__ = ["History"]

# Of each shard at a point, in this order; a shard without an answer has none.
_COLUMNS = (
    "shard",
    "log_seq",
    "applied_seq",
    "num_rows_written",
    "num_refused",
    "inflight_bytes",
    "num_connections",
    "apply_lag_s",
    "num_requests",
    "log_written_bytes",
    "backlog_bytes",
    "memory_bytes",
    "cpu_s",
)


class History:
    """Points in time, the oldest of which is dropped for the newest. Not thread-safe."""

    def __init__(self, num_points: int = 360) -> None:
        """Keep so many points; each costs about 100 bytes a shard."""
        self._points: deque[dict[str, Any]] = deque(maxlen=num_points)

    def add(self, states: Sequence[ShardState], time_s: float) -> None:
        """Take a point.

        Args:
            states: Of all shards.
            time_s: Wall clock, seconds since 1970.
        """
        rows, delays = [], []
        for state in states:
            if state.sample is not None:
                sources = (state.sample, state.sample.detail)
                rows.append([next((getattr(s, name) for s in sources if hasattr(s, name)), None) for name in _COLUMNS])
                if state.sample.detail is not None:
                    delays.append(state.sample.detail.apply_delay)
        counts = [sum(parts) for parts in zip(*(delay.counts for delay in delays), strict=True)]
        self._points.append({"time_s": round(time_s, 3), "shards": rows, "delay_counts": counts})

    def to_json(self, *, newest_only: bool = False) -> dict[str, Any]:
        """Return a form that `json` can write; with the newest point alone for who has the others."""
        points = list(self._points)
        return {"columns": _COLUMNS, "points": points[-1:] if newest_only else points}
