"""A replica of made-up figures, for its metrics."""

from __future__ import annotations

from headrace.paramserver.replica.copy.shard_tail import DelayHistogram, Freshness
from headrace.paramserver.replica.tables.hot_rows import HotRowStats
from headrace.schemas.errors import HeadraceError


class FakeReplica:
    """What `ReplicaCollector` reads of an `EmbeddingReplica`."""

    def __init__(self) -> None:
        delay = DelayHistogram()
        delay.add(0.02, 3)
        self.failure: HeadraceError | None = None
        self.epoch, self.step = 4, 17
        self.tables = {"user.weight": None}
        self.num_missing = {"user.weight": 5}
        self.shards = [
            Freshness(
                shard=0, visible_seq=8, last_seq=9, is_behind=True, age_s=0.5, lag_s=0.5, lag_steps=2, delay=delay
            )
        ]

    def freshness(self) -> list[Freshness]:
        return self.shards

    def num_rows(self, fqn: str) -> int:
        return {"user.weight": 12}[fqn]

    def hot_rows(self) -> dict[str, HotRowStats]:
        return {"user.weight": HotRowStats(capacity=64, hits=7, misses=3, admitted=3, evicted=1, dropped=2)}
