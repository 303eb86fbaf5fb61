"""The sweep of cost: processor times of trainer and shard, and that a small one measures every point."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from headrace.scripts.benches.cost import CostConfig, measure, measure_trainer, process_cpu_s
from headrace.scripts.benches.workload import RowsConfig


def test_processor_time_is_that_of_the_process() -> None:
    """It rises by what a busy loop takes."""
    before_s, begin_s = process_cpu_s(os.getpid()), time.process_time()
    while time.process_time() - begin_s < 0.2:
        pass
    assert process_cpu_s(os.getpid()) - before_s == pytest.approx(0.2, abs=0.1)


def test_a_trainer_of_tables_without_memory() -> None:
    """Marking and flushing are timed; a bitmap is a bit a row and a byte a block, whatever the table would take."""
    rows = RowsConfig(ids="uniform", num_batches=1, dim=64, num_rows=10**8, num_lookups=1000, num_tables=2)
    found = measure_trainer(rows, num_steps=2)
    assert 0 < found["mark_us"] < 1000
    assert 0 < found["flush_us"] < 1000
    assert found["bitmap_bytes"] == pytest.approx(2 * (10**8 / 8 + 10**8 / 4096), rel=1e-3)


@pytest.mark.slow
def test_a_small_sweep(tmp_path: Path) -> None:
    """Tables and rows have the trainer's and the shard's processor time, connections the shard's and the sender's."""
    sizes = {"tables": (3,), "rows": (10**4,), "connections": (2,), "table_rows": 10**4, "dim": 4}
    config = CostConfig(**sizes, num_batches=4, num_rounds=1, folder=tmp_path)  # type: ignore[arg-type]
    found = measure(config, lambda stage: None)
    assert set(found["connections"]["series"]) == {"send_us", "shard_us", "rows_per_s"}
    for name in ("tables", "rows"):
        assert {"mark_us", "flush_us", "send_us", "shard_us", "bitmap_bytes"} <= set(found[name]["series"])
        assert all(values[0][0] > 0 for values in found[name]["series"].values())
    assert list(tmp_path.iterdir()) == []
