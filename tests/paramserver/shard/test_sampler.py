"""Lag, syncs and samples of a shard."""

from __future__ import annotations

import json
from pathlib import Path

from shard_servers import serve_shards

from headrace.paramserver.log.interface import LogMetrics
from headrace.paramserver.observe.sample import ShardSample
from headrace.paramserver.shard.sampler import ApplyLag, DurationCounts, FsyncTimes, block_cache_of
from headrace.paramserver.shard.service import Shard
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore


def test_idle_shard_is_not_stale() -> None:
    """Without a record that the store lacks, there is no lag."""
    lag = ApplyLag()
    assert lag.look(7, 7, 100.0) == 0
    assert lag.look(7, 7, 10_000.0) == 0


def test_lag_is_the_age_of_the_oldest_record() -> None:
    """The lag counts from the first look that saw the oldest missing record."""
    lag = ApplyLag()
    assert lag.look(5, 3, 10.0) == 0
    assert lag.look(9, 3, 12.0) == 2.0
    assert lag.look(9, 5, 13.0) == 1.0
    assert lag.look(9, 9, 14.5) == 0
    delay = lag.delay.sample()
    assert sum(delay.counts) == 2
    assert delay.sum_s == 3.0 + 2.5


def test_lag_of_a_stalled_store_takes_bounded_memory() -> None:
    """The lag stays that of the oldest record, however many looks find more."""
    lag = ApplyLag()
    for i in range(5000):
        assert lag.look(i + 1, 0, float(i)) == i
    assert lag.look(5000, 256, 5000.0) == 5000.0 - 255
    assert lag.look(5000, 5000, 5001.0) == 0


def test_duration_equal_to_a_bound_is_within_it() -> None:
    """Buckets include their upper bound, like Prometheus'."""
    counts = DurationCounts((1.0, 2.0))
    for duration_s in (1.0, 1.5, 2.0, 2.1):
        counts.add(duration_s)
    assert counts.sample().counts == (1, 2, 1)


def test_fsyncs_are_counted_once() -> None:
    """Each look counts the syncs since the last one."""
    times, metrics = FsyncTimes(), LogMetrics()
    metrics.count_commit(0.001)
    times.look(metrics)
    metrics.count_commit(5.0)
    times.look(metrics)
    times.look(metrics)
    sample = times.sample()
    assert sum(sample.counts) == 2
    assert sample.sum_s == 5.001
    assert sample.counts[sample.bounds_s.index(6.5536)] == 1


def test_fsyncs_beyond_memory_are_spread() -> None:
    """Count and sum stay exact if the log remembers only some syncs."""
    times, metrics = FsyncTimes(), LogMetrics()
    for i in range(3000):
        metrics.count_commit(0.0001 if i % 2 else 0.01)
    times.look(metrics)
    sample = times.sample()
    assert sum(sample.counts) == 3000
    assert abs(sample.sum_s - metrics.commit_s) < 1e-9
    assert sample.counts[0] == 1500


async def test_sample(tmp_path: Path) -> None:
    """A sample survives JSON and agrees with the status reply."""
    shards: list[Shard] = []
    async with serve_shards(tmp_path, 1, opened=shards):
        (shard,) = shards
        sample = await shard.sampler.sample()
        status = await shard.status(None)  # type: ignore[arg-type]
    assert ShardSample.from_json(sample.to_json()) == sample
    of_reply = ShardSample.of_reply(status)
    assert (of_reply.server_id, of_reply.log_seq, of_reply.tables) == (sample.server_id, sample.log_seq, sample.tables)
    detail = sample.detail
    assert detail is not None
    assert detail.cache.capacity_bytes == 1 << 25
    assert 0 < detail.disk_free_bytes <= detail.disk_bytes
    assert detail.memory_bytes > 1 << 20


def test_cache_counts(tmp_path: Path) -> None:
    """Hits and misses of a store's block cache are counted."""
    store = RowStore.open(tmp_path / "db", config=StoreConfig(block_cache_bytes=1 << 22))
    store.write([b"\1" * 16], [b"value"])
    store.flush()
    before = block_cache_of(store)
    assert store.get([b"\1" * 16]) == store.get([b"\1" * 16]) == [b"value"]
    after = block_cache_of(store)
    assert after.hits > before.hits
    assert after.misses > before.misses
    store.close()


async def test_a_sample_has_only_the_last_of_the_past_writers(tmp_path: Path) -> None:
    """A sample has all connected writers, all of the newest epoch, and the last 256 others."""
    shards: list[Shard] = []
    async with serve_shards(tmp_path, 1, opened=shards):
        (shard,) = shards
        sessions = shard._ingest.sessions
        for epoch in range(1, 1001):
            sessions.open(f"run{epoch}", "rank0", epoch, 0, 1)
        sessions.open("run1000", "rank1", 1000, 1, 2)
        next(iter(sessions)).num_connections = 1
        sample = await shard.sampler.sample()
    names = [(writer.run, writer.client) for writer in sample.writers]
    past = [(f"run{epoch}", "rank0") for epoch in range(744, 1000)]
    assert names == [("run1", "rank0"), *past, ("run1000", "rank0"), ("run1000", "rank1")]
    assert ShardSample.from_json(json.loads(json.dumps(sample.to_json()))) == sample
