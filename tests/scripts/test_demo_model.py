"""The demo's model: TorchRec tables that a fused optimizer updates, seen live, and that learn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headrace.scripts.demo_data import SAMPLE_PATH, read_events
from headrace.scripts.demo_ranking import Replay, is_hit

pytestmark = pytest.mark.torchrec


@pytest.fixture(scope="module")
def replay() -> Replay:
    return Replay(log=read_events(SAMPLE_PATH, max_events=4000), batch_events=32, seed=0)


@pytest.fixture
def demo_model() -> Iterator[Any]:
    """The module, with a process group around the test. Imported here: it needs torchrec."""
    import torch

    from headrace.scripts import demo_model

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several only wait for each other
    try:
        with demo_model.process_group():
            yield demo_model
    finally:
        torch.set_num_threads(num_threads)


def make_model(demo_model: Any, replay: Replay, **settings: Any) -> Any:
    sizes = {"num_users": replay.log.num_users, "num_items": replay.log.num_items, "seed": 0}
    return demo_model.DemoModel(demo_model.ModelConfig(**(sizes | settings)))


def train(model: Any, replay: Replay, batch: int) -> float:
    events = replay.events_of(batch)
    log = replay.log
    return float(model.train(batch, log.users[events], log.items[events], replay.num_items_seen[events]))


def test_tables_are_live_and_named_as_in_the_state_dict(demo_model: Any, replay: Replay) -> None:
    """The tables show every update without being asked for again, and only rows of the batch change."""
    model = make_model(demo_model, replay)
    assert set(model.tables) == set(model.dmp.state_dict()) == {demo_model.USER_FQN, demo_model.ITEM_FQN}
    assert model.tables[demo_model.USER_FQN].shape == (replay.log.num_users, 32)
    before = {fqn: rows.copy() for fqn, rows in model.tables.items()}
    train(model, replay, 100)
    changed = {fqn: np.flatnonzero((rows != before[fqn]).any(axis=1)) for fqn, rows in model.tables.items()}
    events = replay.events_of(100)
    assert changed[demo_model.USER_FQN].tolist() == np.unique(replay.log.users[events]).tolist()
    assert set(np.unique(replay.log.items[events])) <= set(changed[demo_model.ITEM_FQN].tolist())
    assert changed[demo_model.ITEM_FQN].max() < replay.num_items_seen[events.stop - 1]


def test_optimizer_is_fused_rowwise_adagrad(demo_model: Any, replay: Replay) -> None:
    """The tables have one optimizer state of one value a row, which the backward pass updates."""
    model = make_model(demo_model, replay)
    train(model, replay, 0)
    (lookup,) = model.dmp.module.ebc._lookups
    (kernel,) = lookup._emb_modules
    states = kernel._emb_module.split_optimizer_states()
    assert [[tuple(state.shape) for state in of_table] for of_table in states] == [
        [(replay.log.num_users,)],
        [(replay.log.num_items,)],
    ]
    assert sum(int((of_table[0] != 0).sum()) for of_table in states) > 2


def test_training_learns_to_rank(demo_model: Any, replay: Replay) -> None:
    """The loss falls, and events are ranked far better than by chance, one in ten, before they are trained on."""
    model = make_model(demo_model, replay)
    losses, num_hits, num_events = [], 0, 0
    for batch in range(replay.num_batches):
        events = replay.events_of(batch)
        users = model.tables[demo_model.USER_FQN][replay.log.users[events]]
        hits = is_hit(users, model.tables[demo_model.ITEM_FQN][replay.candidates(batch)])
        if batch >= replay.part_starts[1]:
            num_hits, num_events = num_hits + int(hits.sum()), num_events + hits.size
        losses.append(train(model, replay, batch))
    assert np.mean(losses[-20:]) < 0.7 * np.mean(losses[:5])
    assert num_hits / num_events > 0.35


def test_same_seed_trains_alike(demo_model: Any, replay: Replay) -> None:
    """Two runs of one seed end with the same bits, two seeds with others."""
    ends = []
    for seed in (3, 3, 4):
        model = make_model(demo_model, replay, seed=seed)
        for batch in range(5):
            train(model, replay, batch)
        ends.append({fqn: rows.tobytes() for fqn, rows in model.tables.items()})
    assert ends[0] == ends[1]
    assert ends[0][demo_model.ITEM_FQN] != ends[2][demo_model.ITEM_FQN]


def test_process_group_leaves_nothing_behind(demo_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the block there is no group, and the environment is as it was."""
    import torch.distributed as dist

    dist.destroy_process_group()  # the fixture's; it must bear that a test has ended it
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = dict(os.environ)
    with pytest.raises(KeyError), demo_model.process_group():
        assert dist.get_world_size() == 1
        raise KeyError
    assert not dist.is_initialized()
    assert dict(os.environ) == before
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
