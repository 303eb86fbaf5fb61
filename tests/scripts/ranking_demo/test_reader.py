"""The demo's reader, on tables in memory that stand for the replica, and as a process of its own."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from headrace.schemas.errors import HeadraceError
from headrace.scripts.benches.child import Child
from headrace.scripts.ranking_demo.events import SAMPLE, TABLES, Replay, is_hit, read_events
from headrace.scripts.ranking_demo.reader import Scorer

USER, ITEM = TABLES


@dataclass
class FakeReplica:
    """Two tables in memory, with what the reader uses of an `EmbeddingReplica`."""

    tables: dict[str, np.ndarray]
    missing: dict[str, set[int]] = field(default_factory=dict)
    num_missing: dict[str, int] = field(default_factory=dict)

    def lookup_many(self, ids_of: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        found = {}
        for fqn, ids in ids_of.items():
            is_there = np.array([int(i) not in self.missing.get(fqn, ()) for i in ids])
            self.num_missing[fqn] = self.num_missing.get(fqn, 0) + int((~is_there).sum())
            found[fqn] = torch.from_numpy(self.tables[fqn][ids] * is_there[:, None].astype(np.float32))
        return found


@pytest.fixture(scope="module")
def replay() -> Replay:
    return Replay(log=read_events(SAMPLE, max_events=3000), batch_events=32, seed=5)


@pytest.fixture
def replica(replay: Replay) -> FakeReplica:
    rng = np.random.default_rng(11)
    sizes = {USER: replay.log.user_ids.size, ITEM: replay.log.item_ids.size}
    return FakeReplica({fqn: rng.standard_normal((size, 4)).astype(np.float32) for fqn, size in sizes.items()})


def make_scorer(replica: FakeReplica, replay: Replay) -> Scorer:
    return Scorer(cast(Any, replica), replay)


def expected_hits(replay: Replay, tables: dict[str, np.ndarray], batch: int) -> int:
    users = replay.log.users[replay.events_of(batch)]
    return int(is_hit(tables[USER][users], tables[ITEM][replay.candidates(batch)]).sum())


def test_streamed_copy_is_what_the_replica_holds_and_frozen_copy_is_what_it_held(
    replay: Replay, replica: FakeReplica
) -> None:
    """Each batch is scored with present rows, and with those of the moment at which its part began."""
    scorer = make_scorer(replica, replay)
    rng = np.random.default_rng(1)
    frozen: dict[str, np.ndarray] = {}
    differs = False
    for batch in range(replay.num_batches):
        if batch in replay.part_starts:
            frozen = {fqn: rows.copy() for fqn, rows in replica.tables.items()}
        score = scorer.score(batch)
        assert score["streamed"] == expected_hits(replay, replica.tables, batch)
        assert score["frozen"] == expected_hits(replay, frozen, batch)
        assert score["missing"] == 0
        differs |= score["streamed"] != score["frozen"]
        for rows in replica.tables.values():
            rows += rng.standard_normal(rows.shape).astype(np.float32)
    assert differs


def test_missing_rows_are_counted_and_scored_as_zeros(replay: Replay, replica: FakeReplica) -> None:
    """A user that the replica does not have makes no hit, and counts once in each batch."""
    replica.missing[USER] = set(range(replay.log.user_ids.size))
    scorer = make_scorer(replica, replay)
    for batch in (0, 1):
        score = scorer.score(batch)
        assert score["missing"] == np.unique(replay.log.users[replay.events_of(batch)]).size
        assert score["streamed"] == 0


def test_served_rows_are_saved_to_the_bit(replay: Replay, replica: FakeReplica, tmp_path: Path) -> None:
    """The file has every row of both tables as a lookup gives it."""
    make_scorer(replica, replay).save(tmp_path / "served.npz")
    with np.load(tmp_path / "served.npz", allow_pickle=False) as served:
        assert set(served) == {USER, ITEM}
        assert all(served[fqn].tobytes() == rows.tobytes() for fqn, rows in replica.tables.items())


def test_process_reports_its_error_in_one_line(
    replay: Replay, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A reader that cannot work says why to the trainer, without a traceback."""
    np.savez(tmp_path / "log.npz", **asdict(replay.log))
    order: dict[str, Any] = {"log_path": str(tmp_path / "log.npz"), "batch_events": 32, "seed": 5}
    with pytest.raises(HeadraceError, match=r"the demo's reader: .*'no address' is not"):
        Child("headrace.scripts.ranking_demo.reader:read", "the demo's reader", address="no address", **order)
    assert capfd.readouterr().err == ""
