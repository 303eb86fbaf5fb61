"""The soak, short: one of each deed, and broken replicas that it must not let pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import ChaosError
from soak import Soak

# Each sort of restart and of swap, and a run of expiry; the long run has all, with pauses, round after round.
SHORT = ("kill_shard", "swap_step", "expire", "stop_server", "swap_disk", "swap_amid_kill")


@pytest.mark.timeout(600)  # a dozen starts of processes, each of seconds on a busy machine
def test_replica_store_and_trainer_are_equal(tmp_path: Path) -> None:
    """Through restarts, swaps and expiry no lookup fails, and replica = store = trainer at the end."""
    with Soak(tmp_path, seed=1) as soak:
        for deed in SHORT:
            soak.run_cycle(deed)
        soak.finish()
    served = soak.served
    assert soak.settled is not None and soak.settled.is_equal, soak.settled
    assert {one.name for one in served} == {"latest", "step", "disk"}
    assert all(one.num_lookups > 500 and not one.num_failed and not one.problems for one in served)
    assert all(one.digest.startswith("EQUAL") and one.num_gone for one in served)
    assert all(one.num_audits for one in served)
    assert soak.num_expired
    assert "latest: 0 of" in soak.summary()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("breakage", "says"),
    [
        ("skips_updates", "half a step|older than seen before|other bytes than the store's"),
        ("tears_steps", "half a step"),
        ("keeps_expired", r"aging\.weight: other bytes than the store's"),
    ],
)
def test_a_broken_replica_is_found(tmp_path: Path, breakage: str, says: str) -> None:
    """A replica that leaves updates out, shows half of a step, or keeps rows that have expired does not pass."""
    with Soak(tmp_path, seed=2, breakage=breakage) as soak, pytest.raises(ChaosError, match=says):
        for deed in ("expire", "swap_step", "expire", "kill_shard", "expire"):
            soak.run_cycle(deed)
        soak.finish()
