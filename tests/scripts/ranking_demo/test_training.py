"""The demo's model, which learns, and its reader, whose served model ranks as the trainer does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.shard.launch import ServerProcess
from headrace.scripts.benches.harness import one_torch_thread
from headrace.scripts.ranking_demo.events import TABLES, Replay
from headrace.streamer import RawEmbeddingStreamer

pytestmark = pytest.mark.torchrec
USER, ITEM = TABLES


@pytest.fixture(scope="module")
def replay() -> Replay:
    return Replay(4000)


@pytest.fixture
def make_model(replay: Replay) -> Iterator[Callable[[], Any]]:
    """A function that makes models, with a process group around the test. Imported here: it needs torchrec."""
    from headrace.scripts.ranking_demo.training import DemoModel, join_process_group

    with one_torch_thread():
        join_process_group()
        yield lambda: DemoModel(replay)
        dist.destroy_process_group()


def test_tables_are_live_and_named_as_in_the_state_dict(make_model: Callable[[], Any], replay: Replay) -> None:
    """The tables show every update without being asked for again, and only rows of the batch change."""
    model = make_model()
    assert set(model.dmp.state_dict()) == {*TABLES, "top.weight"}
    assert model.tables[USER].shape == (replay.num_users, 32)
    before = {fqn: rows.clone() for fqn, rows in model.tables.items()}
    model.train(100)
    changed = {fqn: np.flatnonzero((rows != before[fqn]).any(dim=1)) for fqn, rows in model.tables.items()}
    events = replay.events_of(100)
    assert changed[USER].tolist() == np.unique(replay.users[events]).tolist()
    assert set(np.unique(replay.items[events])) <= set(changed[ITEM].tolist())
    assert changed[ITEM].max() < replay.num_items_seen[events.stop - 1]


def test_training_learns_to_rank_and_is_repeatable(make_model: Callable[[], Any], replay: Replay) -> None:
    """Events are ranked far better than by chance, one in ten, before they are trained on; two runs end alike."""
    from headrace.scripts.ranking_demo.training import rank

    model, other, num_hits, first = make_model(), make_model(), 0, replay.part_starts[1]
    for batch in range(replay.num_batches):
        num_hits += rank(model.dmp, replay, batch) if batch >= first else 0
        model.train(batch)
        if batch < 5:
            other.train(batch)
            assert all(rows.equal(other.tables[fqn]) for fqn, rows in model.tables.items())
    assert num_hits / (replay.users.size - replay.events_of(first).start) > 0.35


def test_served_model_ranks_as_the_trainer_does_and_the_frozen_one_as_it_did(
    make_model: Callable[[], Any], replay: Replay, tmp_path: Path
) -> None:
    """After a flush the reader's served model has the trainer's hits, and its frozen one those of the part's start."""
    from headrace.scripts.ranking_demo.training import Reader, rank

    model, differs = make_model(), False
    with ServerProcess.start(tmp_path) as server, RawEmbeddingStreamer(server.address, run="demo") as streamer:
        streamer.attach(model.dmp, publish="all", dense=True)
        streamer.flush()
        with EmbeddingReplica(server.address) as replica:
            reader = Reader(replica, replay)
            frozen = {fqn: rows.clone() for fqn, rows in model.tables.items()}
            for batch in range(replay.part_starts[1]):
                hits = reader.rank(batch)
                assert hits["streamed"] == rank(model.dmp, replay, batch)
                differs |= hits["streamed"] != hits["frozen"]
                model.train(batch)
                streamer.flush()
                replica.wait_for(streamer.stats().step, 60, epoch=streamer.epoch)
            state = reader.state()
            assert set(state) == set(model.dmp.state_dict())
            assert all(state[fqn].equal(rows) for fqn, rows in model.tables.items())
            assert state["top.weight"].equal(model.dmp.state_dict()["top.weight"]) and state["top.weight"].std() > 0
            for fqn, rows in model.tables.items():
                rows[:] = frozen[fqn]
            model.dmp.module.top.weight.data.fill_(1.0)
            assert differs and reader.rank(1)["frozen"] == rank(model.dmp, replay, 1)
