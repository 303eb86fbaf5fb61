"""The demo's model, which learns, and its reader, whose served model ranks as the trainer does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.shard.launch import ServerProcess
from headrace.scripts.benches.harness import one_torch_thread
from headrace.scripts.ranking_demo.events import SAMPLE, TABLES, Replay, read_events
from headrace.streamer import RawEmbeddingStreamer

pytestmark = pytest.mark.torchrec
USER, ITEM = TABLES


@pytest.fixture(scope="module")
def replay() -> Replay:
    return Replay(log=read_events(SAMPLE, max_events=4000), batch_events=32, seed=0)


@pytest.fixture
def make_model(replay: Replay) -> Iterator[Callable[..., Any]]:
    """A function that makes models, with a process group around the test. Imported here: it needs torchrec."""
    from headrace.scripts.ranking_demo.training import DemoModel, process_group

    sizes = {"num_users": replay.log.user_ids.size, "num_items": replay.log.item_ids.size}
    with one_torch_thread(), process_group():
        yield lambda seed=0: DemoModel(**sizes, seed=seed)


def train(model: Any, replay: Replay, batch: int) -> float:
    events = replay.events_of(batch)
    log = replay.log
    return float(model.train(batch, log.users[events], log.items[events], replay.num_items_seen[events]))


def test_tables_are_live_and_named_as_in_the_state_dict(make_model: Callable[..., Any], replay: Replay) -> None:
    """The tables show every update without being asked for again, and only rows of the batch change."""
    model = make_model()
    assert set(model.dmp.state_dict()) == {*TABLES, "top.weight"}
    assert model.tables[USER].shape == (replay.log.user_ids.size, 32)
    before = {fqn: rows.copy() for fqn, rows in model.tables.items()}
    train(model, replay, 100)
    changed = {fqn: np.flatnonzero((rows != before[fqn]).any(axis=1)) for fqn, rows in model.tables.items()}
    events = replay.events_of(100)
    assert changed[USER].tolist() == np.unique(replay.log.users[events]).tolist()
    assert set(np.unique(replay.log.items[events])) <= set(changed[ITEM].tolist())
    assert changed[ITEM].max() < replay.num_items_seen[events.stop - 1]


def test_training_learns_to_rank(make_model: Callable[..., Any], replay: Replay) -> None:
    """The loss falls, and events are ranked far better than by chance, one in ten, before they are trained on."""
    from headrace.scripts.ranking_demo.training import rank

    model = make_model()
    losses, num_hits, num_events = [], 0, 0
    for batch in range(replay.num_batches):
        if batch >= replay.part_starts[1]:
            events = replay.events_of(batch)
            num_hits, num_events = num_hits + rank(model.dmp, replay, batch), num_events + events.stop - events.start
        losses.append(train(model, replay, batch))
    assert np.mean(losses[-20:]) < 0.7 * np.mean(losses[:5])
    assert num_hits / num_events > 0.35


def test_same_seed_trains_alike(make_model: Callable[..., Any], replay: Replay) -> None:
    """Two runs of one seed end with the same bits, two seeds with others."""
    ends = []
    for seed in (3, 3, 4):
        model = make_model(seed)
        for batch in range(5):
            train(model, replay, batch)
        ends.append({fqn: rows.tobytes() for fqn, rows in model.tables.items()})
    assert ends[0] == ends[1]
    assert ends[0][ITEM] != ends[2][ITEM]


def test_served_model_ranks_as_the_trainer_does_and_the_frozen_one_as_it_did(
    make_model: Callable[..., Any], replay: Replay, tmp_path: Path
) -> None:
    """After a flush the reader's served model has the trainer's hits, and its frozen one those of the part's start."""
    from headrace.scripts.ranking_demo.training import Reader, rank

    model, differs = make_model(), False
    with ServerProcess.start(tmp_path) as server, RawEmbeddingStreamer(server.address, run="demo") as streamer:
        streamer.attach(model.dmp, publish="all", dense=True)
        streamer.flush()
        with EmbeddingReplica(server.address) as replica:
            reader = Reader(replica, replay)
            frozen = {fqn: rows.copy() for fqn, rows in model.tables.items()}
            for batch in range(replay.part_starts[1]):
                hits = reader.rank(batch)
                assert (hits["streamed"], hits["missing"]) == (rank(model.dmp, replay, batch), 0)
                differs |= hits["streamed"] != hits["frozen"]
                train(model, replay, batch)
                streamer.flush()
                replica.wait_for(streamer.stats().step, 60, epoch=streamer.epoch)
            state = reader.state()
            assert set(state) == set(model.dmp.state_dict())
            assert all(state[fqn].numpy().tobytes() == rows.tobytes() for fqn, rows in model.tables.items())
            assert state["top.weight"].equal(model.dmp.state_dict()["top.weight"]) and state["top.weight"].std() > 0
            for fqn, rows in model.tables.items():
                rows[:] = frozen[fqn]
            model.dmp.module.top.weight.data.fill_(1.0)
            assert differs and reader.rank(1)["frozen"] == rank(model.dmp, replay, 1)


def test_missing_rows_are_counted(make_model: Callable[..., Any], replay: Replay, tmp_path: Path) -> None:
    """A row that was never sent counts as missing and makes no hit."""
    from headrace.scripts.ranking_demo.training import Reader

    with ServerProcess.start(tmp_path) as server, RawEmbeddingStreamer(server.address, run="demo") as streamer:
        streamer.attach(make_model().dmp, dense=True, publish="updated")
        streamer.flush()
        with EmbeddingReplica(server.address) as replica:
            hits = Reader(replica, replay).rank(0)
            assert hits["missing"] > 0 and hits["streamed"] == 0
