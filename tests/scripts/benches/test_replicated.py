"""`headrace bench replicated`, with few messages: that it measures, not what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from nats_cluster import needs_nats_server


@pytest.mark.timeout(400)
@needs_nats_server
def test_a_small_run(bench: Callable[..., Any]) -> None:
    """Every target has a figure; no lookup fails while shards fail over."""
    figures, exit_code = bench("replicated", "--batches=8", "--lone=4", "--rounds=1", "--failovers=1")
    assert exit_code in (0, 1)
    for name in ("acked_vs_publish", "ack_p50_ms", "publish_p50_ms", "recovery_vs_direct_get"):
        assert figures[name] > 0, name
    assert figures["ack_p50_bound_ms"] == pytest.approx(1.3 * figures["publish_p50_ms"] + 2)
    assert figures["bytes_per_s"].keys() == {"publish", "acked", "applied", "direct_get", "recovery"}
    assert all(len(values) == 1 for values in figures["rounds"].values())
    for name in ("planned", "node", "leader"):
        (took_s,) = figures["failovers_s"][name]
        assert figures[f"failover_{name}_p99_s"] == pytest.approx(took_s)
        assert took_s > 0
    assert figures["step_during_failover_ratio"] > 0
    assert figures["num_lookups"] > 100
    assert figures["failed_lookups"] == 0
