"""The chaos harness on a replicated log, short; a node that is gone for good; and a zombie that it must find."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_model import MODELS
from chaos_replicated import ReplicatedChaos
from nats_cluster import needs_nats_server
from processes import ChaosError

pytestmark = [pytest.mark.timeout(600), needs_nats_server]

SHORT = ("cut_minority", "pause_past_lease")


def test_nothing_acked_is_lost(tmp_path: Path) -> None:
    """Over an engine that is cut in two, and an owner that wakes when it is none any more, acked rows stay."""
    with ReplicatedChaos(tmp_path, seed=1) as chaos:
        for fault in SHORT:
            chaos.run_cycle(fault)
    assert not chaos.found
    assert not chaos.outputs.found
    assert chaos.outputs.num_compared >= len(MODELS) * len(SHORT)
    assert chaos.asked["refused"] > 0  # by zombies


def test_a_node_disappears_amid_training(tmp_path: Path) -> None:
    """Once a node is gone with its directory, no step and no lookup fails, and all rows are equal bit for bit."""
    with ReplicatedChaos(tmp_path, seed=2, num_nodes=3, num_shards=4) as chaos:
        chaos.run_cycle("lose_node_for_good")
        gone = [server for server in chaos.servers if not server.data.exists()]
    assert len(gone) == 1
    assert chaos.ledger.num_rows > 1000
    assert chaos.num_compared_rows > 1000
    assert not chaos.found
    assert not chaos.outputs.found


def test_an_owner_that_answers_when_it_is_none_any_more_is_found(tmp_path: Path) -> None:
    """A shard that answers from a log that another process owns does not pass.

    All other rules of the log are broken with the scripted engine (`test_stream_schedules.py`): there a seed repeats.
    """
    with ReplicatedChaos(tmp_path, seed=3, breakage="answers_unowned") as chaos, pytest.raises(ChaosError):
        for _ in range(8):  # whether the new owner has acked a row that the question is about is a matter of timing
            chaos.run_cycle("cut_engine")
    assert chaos.found["stale"] > 0
