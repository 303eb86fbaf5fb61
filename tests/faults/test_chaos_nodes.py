"""The chaos harness on several nodes, short: a lost disk, an old copy of it, a moved node, a follower that is away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chaos_model import MODELS
from chaos_nodes import NodesChaos
from processes import ChaosError
from waiting import wait_until

from headrace.paramserver.archive import recovery
from headrace.paramserver.snapshots.bucket import SnapshotStore

SHORT = ("store_resets_and_snapshot", "lost_disk_and_old_copy", "lost_disk_without_follower", "move_follower_and_node")


@pytest.mark.timeout(600)  # two dozen starts of processes, each of seconds on a busy machine
def test_rows_are_equal_after_the_flush_behind_a_lost_disk(tmp_path: Path) -> None:
    """Rows that went with a node's disk are the trainer's after its next flush, in store and replicas."""
    with NodesChaos(tmp_path, seed=1, num_nodes=3, num_shards=4, has_follower=True) as chaos:
        for fault in SHORT:
            chaos.run_cycle(fault)
    assert not chaos.found
    assert not chaos.outputs.found
    assert chaos.outputs.num_compared >= (len(MODELS) + 1) * len(SHORT)
    assert chaos.num_compared_rows > 1000
    assert chaos.ledger.num_lost > 0


@pytest.mark.timeout(600)
def test_a_restore_that_leaves_archived_records_out_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ledger forgives behind the end of the archive is not what a restore passes over before it."""
    chain_of = recovery.chain_of

    def shorter(pieces: Any, from_seq: int) -> Any:
        return chain_of(pieces, from_seq)[:-1]

    monkeypatch.setattr(recovery, "chain_of", shorter)
    with NodesChaos(tmp_path, seed=1, num_nodes=2, num_shards=2) as chaos:
        chaos.run_cycle("snapshot")
        (snapshot,) = SnapshotStore.of_url(chaos._objects.url).list()
        wait_until(
            lambda: all(chaos._archived_behind(part.shard, part.seq) for part in snapshot.parts), "log behind it"
        )
        with pytest.raises(ChaosError, match=r"was restored up to record \d+, and archive/.* is archived"):
            chaos.run_cycle("lost_disk")
