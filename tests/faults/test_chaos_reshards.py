"""The chaos harness amid reshards, short; and moves that are broken, which it must not let pass."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from chaos_cycles import Chaos
from chaos_model import MODELS
from chaos_reshards import rows_of_others
from processes import ChaosError

pytestmark = [pytest.mark.timeout(600)]  # a dozen starts of processes, seconds each on a busy machine

SHORT = ("kill_source", "abort_reshard", "kill_destination")


def test_nothing_acked_is_lost_amid_reshards(tmp_path: Path) -> None:
    """Whoever dies, acked rows stay, stores and served copies are the trainer's, and each row is on its owner only."""
    with Chaos(tmp_path, seed=1, num_shards=3, has_reshards=True) as chaos:
        for fault in SHORT:
            chaos.run_cycle(fault)
        partition_map = chaos.finish()
    assert not chaos.found
    assert not chaos.outputs.found
    assert chaos.outputs.num_compared >= len(MODELS) * len(SHORT)
    assert chaos.reshards is not None
    assert chaos.reshards.counts["begun"] > 0
    assert chaos.reshards.phases.total() == len(SHORT)
    # `finish` has found no row elsewhere, and would have: to the next shard all rows of this one are those of others.
    (server,) = chaos.servers
    owner = int(partition_map.owners[0])
    assert rows_of_others(server.shard_path(owner) / "store", owner + 1, partition_map) != []


@pytest.mark.skipif("CI" in os.environ, reason="may take minutes: whether it does harm is a matter of timing")
def test_a_move_that_forgets_records_is_found(tmp_path: Path) -> None:
    """A destination that takes partitions over without the records before the seal does not pass."""
    chaos = Chaos(tmp_path, seed=2, breakage="forgets_tail", num_shards=3, has_reshards=True)
    with chaos, pytest.raises(ChaosError) as failure:
        for _ in range(12):
            chaos.run_cycle("second_reshard")
    # The trainer, or a served copy, may be the first to see it.
    sees = "differs from the trainer" in str(failure.value) or chaos.outputs.found
    assert sees or chaos.found.keys() & {"lost", "stale", "resurrected"}, str(failure.value)
