"""Evicted rows are deleted in a real server's store, also after failures; rows with virtual ids come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evicting_training import VirtualTap, evict_on_rank
from fake_shard import FakeStore, hosted
from held_ports import hold_ports
from ranks import run_ranks
from scripted_training import run_on
from set_back_training import Trainer
from store_comparison import compare_with_store
from stored_rows import read_rows
from streamed_training import attached
from text_scripts import Script, scripts
from trainer_tables import POINTWISE, ROWWISE, VirtualRows

from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import RowRangeError, UnknownTableError
from headrace.schemas.idl import idl
from headrace.streamer import RawEmbeddingStreamer

MISSING, PRESENT = int(idl.RowPresence.MISSING), int(idl.RowPresence.PRESENT)


def presence(address: str, fqn: str, rows: list[int]) -> list[int]:
    found: list[int] = read_rows(address, fqn, rows).presence.tolist()
    return found


def check_present(address: str, trainer: Trainer, rows: list[int]) -> None:
    """Check that the store has these rows with the trainer's values."""
    stored = read_rows(address, trainer.fqn, rows)
    assert stored.presence.tolist() == [PRESENT] * len(rows)
    assert np.array_equal(stored.weights, trainer.table.weight.detach()[rows].numpy())


@scripts(__file__, "eviction")
def test_scripts(server: ServerProcess, script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Evicted rows are deleted as the scripts say."""
    run_on(server.address, script, tmp_path, caplog)


def test_hooks_run_before_and_may_stop_it(server: ServerProcess) -> None:
    """Hooks see the rows' last values; an error in one, or a wrong row or table, evicts nothing."""
    trainer = Trainer("hooks", 100)
    with attached(server.address, trainer, run="hooks") as streamer:
        trainer.train([7])
        seen: list[Any] = []

        def hook(fqn: str, ids: torch.Tensor) -> None:
            seen.append((fqn, ids.tolist(), torch.equal(streamer.fetch(fqn, ids).weights, trainer.table.weight[ids])))
            if 8 in ids.tolist():
                raise ValueError("not this one")

        handle = streamer.register_pre_eviction_hook(hook)
        streamer.notify_eviction(trainer.fqn, torch.tensor([7, 7]))
        with pytest.raises(ValueError, match="not this one"):
            streamer.evict(trainer.fqn, torch.tensor([9, 8]))
        assert seen == [(trainer.fqn, [7], True), (trainer.fqn, [8, 9], True)]
        with pytest.raises(RowRangeError, match="row id 100"):
            streamer.evict(trainer.fqn, torch.tensor([1, 100]))
        with pytest.raises(UnknownTableError, match=r"the nearest is 'hooks\.weight'"):
            streamer.evict("hook.weight", torch.tensor([1]))
        assert streamer.evict(trainer.fqn, torch.tensor([], dtype=torch.int64)) == 0
        assert len(seen) == 2
        handle.remove()
        streamer.evict(trainer.fqn, [10])
        assert len(seen) == 2
        streamer.flush()
        assert presence(server.address, trainer.fqn, [7, 8, 9, 1]) == [MISSING, MISSING, MISSING, MISSING]


@pytest.mark.parametrize("policy", ["coalesce", "block"])
def test_no_deletion_is_lost_in_an_outage(tmp_path: Path, policy: str) -> None:
    """A server that was killed and restarted gets all evictions, in order with the updates."""
    settings: dict[str, Any] = {
        "policy": policy,
        "retry_min_s": 0.01,
        "retry_max_s": 0.05,
        "freshness_s": 0,
        "max_cost_percent": 100,
    }
    trainer = Trainer("outage", 100)
    port = hold_ports()
    server = ServerProcess.start(tmp_path / "data", port=port)
    streamer = RawEmbeddingStreamer(server.address, run="outage", **settings)
    try:
        streamer.attach(trainer.model, trainer.optimizer, publish="updated")
        trainer.train(range(40))
        streamer.flush()
        server.kill()
        # Under `block` a third flush would wait for the server: two are handed over, the rest is marked.
        for turn in range(2 if policy == "block" else 8):
            streamer.evict(trainer.fqn, torch.tensor([turn, 10 + turn, 20 + turn]))
            trainer.train([10 + turn, 30 + turn])
        num_turns = 2 if policy == "block" else 8
        streamer.evict(trainer.fqn, torch.tensor([30, 20]))
        server.close()
        server = ServerProcess.start(tmp_path / "data", port=port)
        streamer.flush(60)
        turns = range(num_turns)
        gone = [*turns, *(20 + turn for turn in turns), 30]
        assert presence(server.address, trainer.fqn, gone) == [MISSING] * len(gone)
        check_present(server.address, trainer, sorted({*range(40)} - set(gone)))
        server.kill()
        server.close()
        server = ServerProcess.start(tmp_path / "data", port=port)
        assert presence(server.address, trainer.fqn, gone) == [MISSING] * len(gone)
    finally:
        streamer.close(flush=False)
        server.close()


def test_deletions_on_their_way_are_in_the_checkpoint() -> None:
    """An unacked deletion of a virtual id is in the state until it is acked or the row is used again."""
    table = VirtualRows("virtual")
    with (
        hosted(FakeStore()) as store,
        RawEmbeddingStreamer(store.address, run="run", freshness_s=0, max_cost_percent=100) as streamer,
    ):
        streamer.attach_tap(lambda on_step: VirtualTap([table.tapped], on_step))
        table.update([2**50, 2**51], 1.0)
        streamer.flush()
        store.do(store.shards[0].gate.clear)
        streamer.evict("virtual", torch.tensor([2**50, 2**51]))
        table.drop([2**50, 2**51])
        streamer.step()
        assert not streamer.stats().num_dirty_rows
        assert streamer.state_dict()["evicted"] == {"virtual": [2**50, 2**51]}
        table.update([2**51], 2.0)
        assert streamer.state_dict()["evicted"] == {"virtual": [2**50]}
        store.do(store.shards[0].gate.set)
        streamer.flush()
        assert streamer.state_dict()["evicted"] == {}


def test_each_rank_deletes_its_own_rows(server: ServerProcess) -> None:
    """If all ranks evict the same rows of a replicated table, only each row's owner deletes it."""
    results = run_ranks(evict_on_rank, 2, server.address, "ranks")
    evicted = [5, 10, 33, 60, 95]
    for result in results:
        ((first, end),) = result["parts"]
        own = [row for row in evicted if first <= row < end]
        assert (result["num_evicted"], result["seen"]) == (len(own), [own])
    assert sum(result["num_evicted"] for result in results) == 5
    assert presence(server.address, "ranks.weight", [5, 10, 33, 95]) == [MISSING] * 4
    live = [0, 15, 60, 61, 90]
    stored = read_rows(server.address, "ranks.weight", live)
    assert stored.presence.tolist() == [PRESENT] * 5
    assert np.array_equal(stored.weights, results[0]["weights"][live])


def test_virtual_ids_equal_the_store(server: ServerProcess) -> None:
    """With virtual ids up to 2^62, rows come, change, go and come back, and the store has the present ones."""
    table = VirtualRows("virtual", num_places=300, dim=6, states=[ROWWISE, POINTWISE])
    generator = np.random.default_rng(0)
    ids = np.unique(np.concatenate([generator.integers(2**40, 2**62, 400), np.arange(2**40, 2**40 + 50)])).tolist()
    ever: set[int] = set()
    with RawEmbeddingStreamer(server.address, run="virtual", freshness_s=0, max_cost_percent=100) as streamer:
        streamer.attach_tap(lambda on_step: VirtualTap([table.tapped], on_step))
        for turn in range(30):
            held = list(table.place_of)
            if len(held) > 200:
                gone = generator.choice(held, 60, replace=False).tolist()
                if turn % 2:  # said, or found out
                    assert streamer.evict("virtual", torch.tensor(gone)) == 60
                else:
                    table.tapped.dirty.mark(torch.tensor(gone))
                table.drop(gone)
            some = generator.choice(ids, 40, replace=False).tolist()
            table.update(some, float(turn))
            ever |= {*some}
            streamer.step()
        streamer.flush()
        held = sorted(table.place_of)
        comparison = compare_with_store(streamer.tables, server.address)
        assert comparison.is_equal, str(comparison)
        assert comparison.num_compared == len(held) > 100
        gone = sorted(ever - {*held})
        assert len(gone) > 100
        assert presence(server.address, "virtual", gone) == [MISSING] * len(gone)
        assert torch.equal(
            streamer.fetch("virtual", torch.tensor(held[:3])).weights, table.weights[table.find(torch.tensor(held[:3]))]
        )
        assert table.tapped.dirty.size_bytes < 2**20


def test_virtual_ids_in_checkpoints(server: ServerProcess) -> None:
    """A resumed run with virtual ids sends all present rows, and deletes rows not deleted before."""
    table = VirtualRows("virtual2")
    with RawEmbeddingStreamer(server.address, run="virtual2") as streamer:
        streamer.attach_tap(lambda on_step: VirtualTap([table.tapped], on_step))
        table.update([2**50, 2**51, 2**52], 1.0)
        streamer.flush()
        streamer.pause()
        streamer.evict("virtual2", torch.tensor([2**51]))
        table.drop([2**51])
        state = streamer.state_dict()
        assert state["evicted"] == {"virtual2": [2**51]}
        streamer.close(flush=False)
    table = VirtualRows("virtual2")
    table.update([2**50, 2**52], 3.0)
    table.tapped.dirty.clear()
    with RawEmbeddingStreamer(server.address, run="virtual2") as streamer:
        streamer.attach_tap(lambda on_step: VirtualTap([table.tapped], on_step))
        assert streamer.load_state_dict(state) == 3
        streamer.flush()
        assert compare_with_store(streamer.tables, server.address).is_equal
        assert presence(server.address, "virtual2", [2**51]) == [MISSING]
