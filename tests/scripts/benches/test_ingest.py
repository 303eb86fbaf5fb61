"""`headrace bench ingest` and `recovery`, small: that they measure, and that a shard keeps to its memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.scripts.benches.child import peak_memory_bytes
from headrace.scripts.benches.ingest import IngestConfig, measure_ingest, serve
from headrace.scripts.benches.peers import has_redis
from headrace.scripts.benches.workload import RowsConfig, WriterProcess

MIB = 2**20


def test_a_small_ingest_bench(tmp_path: Path) -> None:
    """All keys are there, all figures are positive, and no file is left."""
    config = IngestConfig(num_batches=4, num_acked_batches=2, num_redis_batches=1, num_rounds=1, folder=tmp_path)
    figures = measure_ingest(config, lambda stage: None)
    assert not list(tmp_path.iterdir())
    ratios = ["acked_vs_fsync", "uniform_vs_rocksdb", "zipf_vs_rocksdb", "with_snapshot"]
    for name in ("uniform_vs_redis", "zipf_vs_redis"):
        ratios += [name] if has_redis() else []
        assert has_redis() or figures[f"ratio_{name}"] is None
    for name in ratios:
        assert 0 < figures[f"ratio_{name}"] < math.inf
    assert figures["worst_loop_pause_ms"] > 0
    assert figures["peak_memory_bytes"] > 0
    json.dumps(figures)


def test_memory_is_bounded_by_the_settings(tmp_path: Path) -> None:
    """Under a writer that is faster than the store, a shard stays below the sum that its settings' docstring names."""
    settings = {
        "block_cache_bytes": 32 * MIB,
        "memtable_bytes": 24 * MIB,
        "max_frame_bytes": 4 * MIB,
        "max_client_bytes": 32 * MIB,
        "max_inflight_bytes": 32 * MIB,
        "max_log_pending_bytes": 32 * MIB,
        "max_backlog_bytes": 32 * MIB,
    }
    bound = 300 * MIB + 32 * MIB + 24 * MIB + 2 * 32 * MIB + 32 * MIB + 32 * MIB
    rows = RowsConfig(ids="uniform", num_batches=150)  # 300 MiB: more than all of it together, without the process
    with WriterProcess(rows) as writer, serve(tmp_path / "data", **settings) as server:
        writer.write(server.address, num_batches=rows.num_batches)
        peak = peak_memory_bytes(server.shard_pids[0])
        server.kill()
    assert 0 < peak < bound


def test_a_small_recovery_bench(bench: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    """A shard whose store is gone recovers all of its log, and the command prints the ratio."""
    figures, _ = bench("recovery", "--rounds=1", "--mebibytes=4")
    assert "ratio_recovery_vs_sustained" in capsys.readouterr().out
    assert 0 < figures["ratio_recovery_vs_sustained"] < math.inf
    assert figures["log_bytes"] >= 2 * MIB
