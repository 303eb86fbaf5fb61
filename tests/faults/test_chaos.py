"""The chaos harness, short: a few faults, and broken shards that it must not let pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chaos
import pytest
import typer
from chaos import deck
from chaos_cycles import FAULTS, Chaos
from chaos_model import MODELS
from chaos_proxy import Trouble
from processes import ChaosError
from waiting import wait_until

# One of each sort: the network, a process on either side, a disk that loses what it may. The long run has all.
SHORT = ("bad_network", "kill_shard", "kill_trainer_and_served", "disk_error", "lost_unsynced")


@pytest.mark.timeout(600)  # a dozen starts of processes, each of seconds on a busy machine
def test_nothing_acked_is_lost(tmp_path: Path) -> None:
    """Over kills, a bad network and lost writes acked rows stay, and store and served copies are the trainer's."""
    with Chaos(tmp_path, seed=1) as chaos:
        for fault in SHORT:
            chaos.run_cycle(fault)
    assert not chaos.found
    assert not chaos.outputs.found
    assert chaos.outputs.num_compared >= len(MODELS) * len(SHORT)
    assert chaos.ledger.num_rows > 1000
    assert chaos.proxy.counts.total() > 0


def _swap(chaos: Chaos) -> None:
    """Let so many batches come after the next one that a row of one of them is not soon written again."""
    enough = chaos.proxy.counts["swapped"] + 30
    chaos.proxy.make(Trouble(reorder=0.5))

    def are_enough() -> bool:
        chaos.running_trainer().check()
        return chaos.proxy.counts["swapped"] >= enough

    wait_until(are_enough, "that many swaps")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("breakage", "fault", "finds"),
    [
        ("acks_early", "lost_unsynced", {"lost", "stale", "resurrected"}),
        ("forgets_sequence", "swaps", {"stale", "resurrected"}),
        ("forgets_deletes", "kill_shard", {"resurrected"}),
        ("releases_early", "kill_shard", {"lost", "wrong"}),  # ids are overwritten, or values
    ],
)
def test_a_broken_shard_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breakage: str, fault: str, finds: set[str]
) -> None:
    """A shard that acks early, takes batches in any order, drops deletes, or reads frames given back does not pass."""
    monkeypatch.setitem(FAULTS, "swaps", _swap)
    with Chaos(tmp_path, seed=2, breakage=breakage) as chaos, pytest.raises(ChaosError) as failure:
        for _ in range(12):  # whether a broken shard does harm in a cycle is a matter of timing
            chaos.run_cycle(fault)
    # The trainer may be the first to see that batches are missing, and the shard that a frame holds other rows.
    sees = breakage in ("acks_early", "forgets_sequence") and "has lost acked data" in str(failure.value)
    sees |= breakage == "releases_early" and "were handed over, and" in str(failure.value)
    assert sees or chaos.found.keys() & finds, str(failure.value)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("breakage", ["mixes_steps", "rounds_otherwise"])
def test_a_broken_served_copy_is_found(tmp_path: Path, breakage: str) -> None:
    """A copy with rows of one step and the dense part of another, or with rows rounded again, does not pass."""
    with Chaos(tmp_path, seed=2, breakage=breakage) as chaos, pytest.raises(ChaosError, match="wrong outputs of"):
        for _ in range(3):  # the first part of all has none before it
            chaos.run_cycle("kill_shard")
    assert chaos.outputs.found.keys() == {"wrong"}


def test_a_run_makes_each_fault_as_often() -> None:
    """Every fault comes once in each round, in an order that follows from the seed."""
    dealt = deck(2 * len(FAULTS), 7, list(FAULTS))
    assert sorted(dealt) == sorted([*FAULTS, *FAULTS])
    assert dealt == deck(2 * len(FAULTS), 7, list(FAULTS)) != deck(2 * len(FAULTS), 8, list(FAULTS))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"breakage": "nosuch"}, "no breakage 'nosuch'; there is none, "),
        ({"breakage": "acks_early", "soak": True}, "no breakage 'acks_early'; there is none, "),
        ({"fault": ["nosuch"]}, "no fault 'nosuch'; there is kill_shard, "),
        ({"nodes": 3, "shards": 2}, "--nodes 3: more than --shards 2"),
        ({"log": "nats"}, "--log nats goes with --nodes of 2 or more"),
        ({"soak": True, "nodes": 3}, "--soak goes with no other kind of server"),
        ({"data": "kept"}, "kept: holds 'photo.jpg'; name a new directory"),
        ({"data": "file"}, "file: File exists; name a new directory"),
        ({"data": "file/below"}, "below: Not a directory; name a new directory"),
    ],
)
def test_a_wrong_word_is_refused_at_once(tmp_path: Path, wrong: dict[str, Any], says: str) -> None:
    """What goes with nothing, and a directory that is no new one, start nothing and change nothing."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "photo.jpg").touch()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(typer.BadParameter, match=says):
        chaos.main(**wrong | {"data": tmp_path / wrong.get("data", "new")})
    assert sorted(tmp_path.rglob("*")) == before
