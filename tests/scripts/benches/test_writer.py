"""The bench's writers: fixed schedules, and many clients and shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.scripts.benches.ingest import serve
from headrace.scripts.benches.workload import RowsConfig
from headrace.scripts.benches.writer import WriterProcess, due_times_ns


def test_a_schedule_is_even_and_begins_at_once() -> None:
    """Batches are due at the rate's interval; rounding does not accumulate."""
    assert due_times_ns(5, 4, 100.0, 1e11) == [5, 6, 7, 8]
    due_ns = due_times_ns(0, 3001, 1000.0, 3e6)
    assert due_ns[3000] == 1_000_000_000


@pytest.mark.slow
def test_many_clients_to_many_shards_on_a_schedule(tmp_path: Path) -> None:
    """All batches arrive at the rate that was asked for; a second write continues behind the first."""
    rows = RowsConfig(ids="uniform", num_batches=3, dim=4, num_rows=10_000, num_lookups=100)
    with WriterProcess(rows, num_clients=3) as writer, serve(tmp_path / "data", shards=2) as server:
        first = writer.write(server.address, num_batches=12, rows_per_s=12_000.0)
        second = writer.write(server.address, num_batches=6)
        server.kill()
    assert (first.first_step, second.first_step) == (1, 5)
    assert len(first.due_ns) == len(first.ack_delays_ms) == 12
    gaps_ns = np.diff(first.due_ns)
    assert (gaps_ns.max() - gaps_ns.min()) <= 1
    assert first.num_rows / 12_000 * 11 / 12 == pytest.approx((first.due_ns[-1] - first.due_ns[0]) / 1e9)
    assert first.acked_s >= (first.due_ns[-1] - first.due_ns[0]) / 1e9
    assert min(first.ack_delays_ms) > 0
    assert (second.due_ns, second.ack_delays_ms, second.late_ms) == ([], [], 0.0)
    assert second.cpu_s > 0
