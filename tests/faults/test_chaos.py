"""The chaos harness, short: a few faults, and broken shards that it must not let pass."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import chaos
import chaos_cycles
import chaos_shard
import numpy as np
import pytest
import soak
import typer
from chaos import deck
from chaos_cycles import FAULTS, Chaos, ChaosError
from chaos_ledger import Ledger
from chaos_model import MODELS
from chaos_proxy import Trouble
from watched_server import wait_until

from headrace.paramserver.archive import archiver
from headrace.paramserver.shard import membership, retention, service
from headrace.paramserver.snapshots import bucket, uploader

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


def test_a_run_makes_each_fault_as_often(tmp_path: Path) -> None:
    """Every fault comes once in each round, in an order that follows from the seed."""
    dealt = deck(2 * len(FAULTS), 7)
    assert sorted(dealt) == sorted([*FAULTS, *FAULTS])
    assert dealt == deck(2 * len(FAULTS), 7) != deck(2 * len(FAULTS), 8)


@pytest.mark.parametrize("main", [chaos.main, soak.main])
@pytest.mark.parametrize("data", ["kept", "file", "file/below"])
def test_a_wrong_word_is_refused_at_once(tmp_path: Path, main: Any, data: str) -> None:
    """A breakage that there is not, and a directory that is no new one, start nothing and change nothing."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "photo.jpg").touch()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(typer.BadParameter, match="no breakage 'nosuch'; there is none, "):
        main(breakage="nosuch", data=tmp_path / "new")
    with pytest.raises(typer.BadParameter, match=f"--data .*{data}: .*; name a new directory"):
        main(data=tmp_path / data)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_table_that_is_not_listed_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acked rows of a table that a server does not have any more do not pass."""

    class _Reader:
        tables: ClassVar[dict[str, Any]] = {}

        async def __aenter__(self) -> _Reader:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def status(self) -> list[Any]:
            return []

    async def connect(*_: object, **__: object) -> _Reader:
        return _Reader()

    ledger = Ledger({"t": np.arange(3)}, {"t": 1})
    ledger._tables["t"].epochs[:2] = 1
    monkeypatch.setattr(chaos_cycles, "EmbeddingReader", SimpleNamespace(connect=connect))
    of = cast("Any", SimpleNamespace(address=""))
    findings = asyncio.run(Chaos._read_and_compare(of, ledger, is_final=False))
    assert findings.counts == {"lost": 2}


def test_a_cycle_sees_flushes_and_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shards of the harness flush their stores and remove old log within seconds, and also just after a start."""
    for module in (service, retention, membership, archiver, uploader, bucket):
        for name in [name for name in vars(module) if name.isupper() or name == "ApplierConfig"]:
            monkeypatch.setattr(module, name, getattr(module, name))  # puts them back
    chaos_shard.hurry()
    assert service.ApplierConfig().flush_interval_s == 2.0
    assert (retention._INTERVAL_S, retention._GRACE_S) == (1.0, 0.0)
