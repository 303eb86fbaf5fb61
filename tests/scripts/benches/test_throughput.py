"""The sweep of throughput, small: that every contender is measured with the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.scripts.benches.peers import has_redis
from headrace.scripts.benches.throughput import ThroughputConfig, measure

MIB = 2**20


def test_the_same_bytes_of_every_width() -> None:
    """A run moves so many bytes, but no more batches than the most and no fewer than two."""
    config = ThroughputConfig(run_bytes=100 * MIB, max_batches=100)
    assert config.rows(16).num_batches == 100
    assert config.rows(512).num_batches == 100 * MIB // (4096 * (8 + 4 * 512 + 4))
    assert ThroughputConfig(run_bytes=1).rows(64).num_batches == 2


@pytest.mark.slow
def test_a_small_sweep(tmp_path: Path) -> None:
    """Every contender that is there has a rate at every width, Headrace at every number of shards."""
    config = ThroughputConfig(dims=(4,), shards=(1, 2), shard_dim=4, run_bytes=MIB // 4, num_rounds=1, folder=tmp_path)
    found = measure(config, lambda stage: None)
    names = {"acked", "applied", "fsync", "rocksdb", "thriftpy2", *(["redis"] if has_redis() else [])}
    assert names <= set(found["width"]["rows_per_s"])
    assert all(len(rates) == 1 and rates[0][0] > 0 for rates in found["width"]["rows_per_s"].values())
    assert [len(rates) for rates in found["shards"]["rows_per_s"]["applied"]] == [1, 1]
    assert found["row_bytes"] == [28]
    assert list(tmp_path.iterdir()) == []
