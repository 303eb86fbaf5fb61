"""A shard keeps to its memory under the writer of `headrace bench ingest`."""

from __future__ import annotations

from pathlib import Path

from headrace.scripts.benches.child import peak_memory_bytes
from headrace.scripts.benches.ingest import serve
from headrace.scripts.benches.workload import RowsConfig, WriterProcess

MIB = 2**20


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
