"""A server with another number of shards takes the place of the one that a trainer streams to."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from fake_shard import WAIT_S, FakeStore, hosted
from streamed_training import FAST, sender_threads
from thread_ranks import Ranks, ThreadRank
from torch import nn
from waiting import wait_until

from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import StorageError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.delivery import pipeline as delivery
from headrace.streamer.flush.flusher import Flusher

NUM_ROWS = 300


class Trainer:
    """A model with a table and a dense part, and what a server should have of it.

    Attributes:
        in_use: The rows that were not evicted, or trained since.
        at_step: By step, the rows that are in use, and their weights.
    """

    def __init__(self, seed: int = 0, *, name: str = "user") -> None:
        torch.manual_seed(seed)
        self.table = nn.Embedding(NUM_ROWS, 8, sparse=True)
        self.top = nn.Linear(8, 120)
        self.model = nn.ModuleDict({name: self.table, "top": self.top})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.fqn = f"{name}.weight"
        self._generator = torch.Generator().manual_seed(seed)
        self.in_use = set(range(NUM_ROWS))
        self.num_steps = 0
        self.at_step: dict[int, dict[int, bytes]] = {}

    def step(self, rows: list[int] | None = None) -> None:
        ids = torch.randint(0, NUM_ROWS, (24,), generator=self._generator) if rows is None else torch.tensor(rows)
        self.in_use |= {*ids.tolist()}
        self.num_steps += 1
        self.optimizer.zero_grad()
        self.top(self.table(ids)).pow(2).mean().backward()
        self.optimizer.step()
        self.at_step[self.num_steps] = self.now()

    def evict(self, streamer: RawEmbeddingStreamer, rows: list[int]) -> None:
        streamer.evict(self.fqn, rows)
        self.in_use -= {*rows}
        self.at_step[self.num_steps] = self.now()

    def now(self) -> dict[int, bytes]:
        weights = self.table.weight.detach()
        return {row: weights[row].numpy().tobytes() for row in self.in_use}


@contextlib.contextmanager
def stores(num_shards: int) -> Iterator[tuple[FakeStore, Any]]:
    """Yield a store, and a function that puts another one, with so many shards, in the place of one."""
    with contextlib.ExitStack() as stack:

        def succeed(store: FakeStore, num_shards: int) -> FakeStore:
            new = stack.enter_context(hosted(store.rebuilt(num_shards, f"{store.server_id} of {num_shards}")))
            store.do(lambda: setattr(store, "successor", new))
            return new

        yield stack.enter_context(hosted(FakeStore(num_shards))), succeed


def close(store: FakeStore) -> None:
    """Have a store take nothing more, and give no acks."""
    store.do(lambda: setattr(store, "is_closed", True))
    for shard in store.shards:
        store.do(shard.drop_connections)
        store.do(shard.gate.set)


def check_cuts(store: FakeStore, trainer: Trainer) -> int:
    """Check that each step that all shards have ended was there, row for row; return how many were."""
    steps = set.intersection(*({*shard.cuts} for shard in store.shards))
    for step in steps:
        assert store.weights(trainer.fqn, at_cut=step) == trainer.at_step[step], f"step {step}"
    return len(steps)


@pytest.mark.parametrize("place", ["host", "device"])
def test_rows_are_equal_bit_for_bit_after_each_switch(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2 shards to 5 and back, with flushes, evictions and dense tensors on their way; each mark is true."""
    fake = FakeDevice(3, trains_at_once=True)
    if place == "device":
        monkeypatch.setattr(delivery, "Flusher", functools.partial(Flusher, runtime_of=lambda device: fake))
    trainer = Trainer()
    with stores(2) as (first, succeed):
        streamer = RawEmbeddingStreamer(first.address, run="test", dense_interval_s=0.001, **FAST)
        with streamer:
            streamer.attach(trainer.model, trainer.optimizer, dense=True, publish="all")
            trainer.step()
            streamer.flush()
            store = first
            for number, num_shards in enumerate((5, 2)):
                kept = 40 * number
                before = store
                before.do(before.shards[1].gate.clear)  # no flush is durable from here on
                trainer.step(list(range(kept, kept + 10)))
                wait_until(lambda to=before.shards[1]: to.num_inflight == 1, "a flush on its way")
                if place == "host":  # some go, some come back, and some come back and go
                    trainer.evict(streamer, list(range(kept, kept + 6)))
                    trainer.step([kept, kept + 1, kept + 20])
                    trainer.evict(streamer, [kept + 1])
                    close(before)
                    trainer.step()
                    flushed = threading.Thread(target=streamer.flush)
                    flushed.start()
                    store = succeed(before, num_shards)
                    flushed.join(WAIT_S)
                else:
                    fake.gate.clear()
                    trainer.step(list(range(kept + 5, kept + 15)))  # on their way from the device until after it
                    close(before)
                    store = succeed(before, num_shards)
                    wait_until(lambda n=num_shards: streamer.stats().num_connected == n, "the new server")
                    fake.gate.set()
                    trainer.step()
                    streamer.flush()
                assert store.weights(trainer.fqn) == trainer.now()
                top = b"".join(data for _, data in sorted(store.weights("top.weight").items()))
                assert top[: 120 * 8 * 4] == trainer.top.weight.detach().numpy().tobytes()
                assert streamer.num_shards == num_shards
                assert {*streamer.state_dict()["server_ids"]} == {store.server_id}
                for _ in range(4):
                    trainer.step()
                streamer.flush()
                assert store.weights(trainer.fqn) == trainer.now()
                assert check_cuts(store, trainer) >= 2
                assert min(batch.client_seq for batch in store.received) == 1
            stats = streamer.stats()
            assert (stats.num_inflight_flushes, stats.num_dirty_rows, stats.num_connected) == (0, 0, 2)
            assert store.address.rpartition(":")[2] in repr(streamer)


def test_ranks_switch_by_themselves_and_later_calls_find_the_server() -> None:
    """A rank that is paused goes on at the new server; an attach of another model goes there at once."""
    is_flushed = threading.Event()
    trainers = [(Trainer(rank, name=f"t{rank}"), Trainer(9, name=f"later{rank}")) for rank in range(2)]
    with stores(2) as (store, succeed):
        found: list[FakeStore] = []

        def train(world: ThreadRank) -> dict[str, dict[int, bytes]]:
            trainer, later = trainers[world.rank]
            with RawEmbeddingStreamer(store.address, run="test", world=world, **FAST) as streamer:
                streamer.attach(trainer.model, trainer.optimizer, tables=[trainer.fqn], publish="all")
                trainer.step()
                streamer.flush()
                world.gather(None)
                if world.rank:
                    streamer.pause()
                    trainer.step()
                    assert is_flushed.wait(WAIT_S)
                    trainer.step()
                    streamer.resume()
                else:
                    close(store)
                    found.append(succeed(store, 3))
                    trainer.step()
                    streamer.flush()
                    is_flushed.set()
                streamer.attach(later.model, later.optimizer, tables=[later.fqn], publish="all")
                trainer.step()
                streamer.flush()
                return {trainer.fqn: trainer.now(), later.fqn: later.now()}

        results = Ranks(2).run(train)
        for result in results:
            assert isinstance(result, dict), result
            for fqn, rows in result.items():
                assert found[0].weights(fqn) == rows
    assert not sender_threads()


def test_a_successor_that_is_no_copy_ends_streaming() -> None:
    """A server without the tables is none to go on at: its rows would be missing without a word."""
    trainer = Trainer()
    with (
        stores(2) as (store, _),
        hosted(FakeStore(3, "empty")) as empty,
        RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer,
    ):
        streamer.attach(trainer.model, trainer.optimizer, tables=[trainer.fqn], publish="all")
        streamer.flush()
        store.do(lambda: setattr(store, "successor", empty))
        trainer.step()
        with pytest.raises(StorageError):
            streamer.flush()
        streamer.close(flush=False)


def test_a_trainer_with_nothing_to_send_goes_on_at_the_new_server() -> None:
    """It hears of the switch when its connections end, so the old server may be stopped soon."""
    trainer = Trainer()
    with stores(2) as (store, succeed), RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        streamer.attach(trainer.model, trainer.optimizer, tables=[trainer.fqn], publish="all")
        streamer.flush()
        new = succeed(store, 3)
        close(store)
        wait_until(lambda: streamer.stats().num_connected == 3, "the new server")
        trainer.step()
        streamer.flush()
        assert new.weights(trainer.fqn) == trainer.now()


def test_audits_and_checkpoints_go_on_at_the_new_server(server: ServerProcess) -> None:
    """A trainer that reads hears of the switch, too, and says in a checkpoint where its rows are."""
    trainer = Trainer(name="audited")
    with RawEmbeddingStreamer(server.address, run="audited", **FAST) as streamer:
        streamer.attach(trainer.model, trainer.optimizer, tables=[trainer.fqn], publish="all")
        streamer.flush()
    with stores(3) as (store, _):
        store.shards[0].claimed_epoch = streamer.epoch
        streamer = RawEmbeddingStreamer(store.address, run="audited", **FAST)
        with streamer:
            streamer.attach(trainer.model, trainer.optimizer, tables=[trainer.fqn], publish="all")
            streamer.flush()
            store.do(lambda: setattr(store, "successor", copy.copy(store)))
            host, _, port = server.address.rpartition(":")
            store.successor.host, store.successor.shards = host, [_At(int(port))]  # type: ignore[union-attr,list-item]
            assert streamer.audit().is_equal
            trainer.step()
            assert streamer.audit().is_equal
            assert streamer.num_shards == 2


class _At:
    """A shard that is elsewhere."""

    def __init__(self, port: int) -> None:
        self.port = port
