"""The chaos harness on several nodes, short: a lost disk and an old copy of it, a moved node, a relay that is away."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_model import MODELS
from chaos_nodes import NodesChaos

SHORT = ("store_resets_and_snapshot", "lost_disk_and_old_copy", "lost_disk_without_relay", "move_relay_and_node")


@pytest.mark.slow
@pytest.mark.timeout(600)  # two dozen starts of processes, each of seconds on a busy machine
def test_rows_are_equal_after_the_flush_behind_a_lost_disk(tmp_path: Path) -> None:
    """Rows that went with a node's disk are the trainer's after its next flush, in store and replicas."""
    with NodesChaos(tmp_path, seed=1, num_nodes=3, num_shards=4, has_relay=True) as chaos:
        for fault in SHORT:
            chaos.run_cycle(fault)
    assert not chaos.found
    assert not chaos.outputs.found
    assert chaos.outputs.num_compared >= (len(MODELS) + 1) * len(SHORT)
    assert chaos.num_compared_rows > 1000
    assert chaos.ledger.num_lost > 0
