"""The sweeps, small: that they measure every point, and their arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.scripts.benches.peers import has_redis
from headrace.scripts.benches.sweeps import (
    CostConfig,
    LagConfig,
    SweepConfig,
    ThroughputConfig,
    find_knee,
    fit_line,
    measure_cost,
    measure_lag,
    measure_sizes,
    measure_throughput,
    measure_trainer,
)
from headrace.scripts.benches.workload import RowsConfig

MIB = 2**20


def test_the_same_bytes_of_every_width() -> None:
    """A run moves so many bytes, but no more batches than the most and no fewer than two."""
    config = ThroughputConfig(run_bytes=100 * MIB, max_batches=100)
    assert config.rows(16).num_batches == 100
    assert config.rows(512).num_batches == 100 * MIB // (4096 * (8 + 4 * 512 + 4))
    assert ThroughputConfig(run_bytes=1).rows(64).num_batches == 2


def test_a_small_sweep_of_throughput(tmp_path: Path) -> None:
    """Every contender that is there has a rate at every width, Headrace at every number of shards."""
    config = ThroughputConfig(dims=(4,), shards=(1, 2), shard_dim=4, run_bytes=MIB // 4, num_rounds=1, folder=tmp_path)
    found = measure_throughput(config, lambda stage: None)
    names = {"acked", "applied", "fsync", "rocksdb", "thriftpy2", *(["redis"] if has_redis() else [])}
    assert names <= set(found["width"]["rows_per_s"])
    assert all(len(rates) == 1 and rates[0][0] > 0 for rates in found["width"]["rows_per_s"].values())
    assert [len(rates) for rates in found["shards"]["rows_per_s"]["applied"]] == [1, 1]
    assert found["row_bytes"] == [28]
    assert list(tmp_path.iterdir()) == []


def test_the_knee_is_the_last_load_before_the_lag_rises() -> None:
    """Counted from the least lag; a high lag at a low load is not a knee."""
    loads = [0.1, 0.5, 0.9, 1.1]
    assert find_knee(loads, [2.0, 2.0, 6.0, 50.0]) == 0.9
    assert find_knee(loads, [2.0, 2.0, 6.1, 50.0]) == 0.5
    assert find_knee(loads, [9.0, 2.0, 3.0, 50.0]) == 0.9
    assert find_knee(loads, [2.0, 2.0, 3.0, 4.0]) is None


def test_a_small_sweep_of_lag(tmp_path: Path) -> None:
    """Each load has its percentiles, of what is seen and of what is acked, and capacity is what was shown."""
    config = LagConfig(
        loads=(0.2, 0.5),
        block_s=0.1,
        min_batches=8,
        capacity_batches=16,
        num_rows=5000,
        dim=4,
        num_lookups=100,
        num_rounds=1,
        folder=tmp_path,
    )
    found = measure_lag(config, lambda stage: None)
    (capacity,) = found["capacity_rows_per_s"]
    assert [of_load[0] for of_load in found["offered_rows_per_s"]] == [0.2 * capacity, 0.5 * capacity]
    for p50, p99, acked in zip(found["p50_ms"], found["p99_ms"], found["acked_p50_ms"], strict=True):
        # A batch is acked first; but the ack is seen by another process, which may have been held up.
        assert 0 < p50[0] <= p99[0] and acked[0] > 0
    assert 0 < found["floor_p50_ms"] <= found["floor_p99_ms"]
    assert list(tmp_path.iterdir()) == []


def test_a_line_through_points() -> None:
    """Least squares; one size alone gives a line from the origin."""
    slope, intercept = fit_line([1, 2, 3], [3.0, 5.0, 7.0])
    assert (slope, intercept) == (pytest.approx(2.0), pytest.approx(1.0))
    assert fit_line([4, 4], [1.0, 3.0]) == (0.5, 0.0)


def test_a_small_sweep_of_recovery(tmp_path: Path) -> None:
    """Each size has times of all rounds."""
    found = measure_sizes(SweepConfig(mebibytes=(3, 5), num_rounds=1, folder=tmp_path), lambda stage: None)
    assert found["x"][0] < found["x"][1] <= 5 * MIB
    for name in ("recovery_s", "sustained_s", "rocksdb_s"):
        assert all(of_size[0] > 0 for of_size in found[name])
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_of_tables_without_memory() -> None:
    """Marking and flushing are timed; a bitmap is a bit a row and a byte a block, whatever the table would take."""
    rows = RowsConfig(ids="uniform", num_batches=1, dim=64, num_rows=10**8, num_lookups=1000, num_tables=2)
    found = measure_trainer(rows, num_steps=2)
    assert 0 < found["mark_us"] < 1000
    assert 0 < found["flush_us"] < 1000
    assert found["bitmap_bytes"] == pytest.approx(2 * (10**8 / 8 + 10**8 / 4096), rel=1e-3)


def test_a_small_sweep_of_cost(tmp_path: Path) -> None:
    """Tables and rows have the trainer's and the shard's processor time, connections the shard's and the sender's."""
    sizes = {"tables": (3,), "rows": (10**4,), "connections": (2,), "table_rows": 10**4, "dim": 4}
    config = CostConfig(**sizes, num_batches=4, num_rounds=1, folder=tmp_path)  # type: ignore[arg-type]
    found = measure_cost(config, lambda stage: None)
    assert set(found["connections"]["series"]) == {"send_us", "shard_us", "rows_per_s"}
    for name in ("tables", "rows"):
        assert {"mark_us", "flush_us", "send_us", "shard_us", "bitmap_bytes"} <= set(found[name]["series"])
        assert all(values[0][0] > 0 for values in found[name]["series"].values())
    assert list(tmp_path.iterdir()) == []
