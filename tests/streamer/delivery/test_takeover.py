"""How a trainer, or its ranks together, take a run over."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fake_shard import WAIT_S, FakeStore, Session, hosted
from spent_deadline import spent_deadline
from streamed_training import FAST, Training, compare, streaming

from headrace.schemas.errors import FencedError, StorageError, UnavailableError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.config import StreamerConfig
from headrace.streamer.delivery.rendezvous import Store, Writer
from headrace.streamer.delivery.takeover import _Agreed, take_over


def test_each_start_takes_a_higher_epoch(store: FakeStore, training: Training) -> None:
    """A restarted trainer goes on in the same store, in a new epoch, with batches from 1."""
    with streaming(store, training) as first:
        training.step()
        first.flush()
    with streaming(store, training) as second:
        training.step()
        second.flush()
        assert (first.epoch, second.epoch) == (1, 2)
        assert [(b.epoch, b.client_seq) for b in store.shards[0].received] == [(1, 1), (2, 1)]
        assert compare(second, store).is_equal


def test_older_trainer_is_fenced_off(store: FakeStore, training: Training) -> None:
    """When a newer trainer takes the run over, the older one's training fails with the reason, and changes nothing."""
    with streaming(store, training) as old:
        training.step()
        old.flush()
        other = Training(seed=1)
        with streaming(store, other):
            training.step()
            with pytest.raises(FencedError, match="has taken over"):
                old.flush()
            with pytest.raises(FencedError):
                training.step()
            assert all(batch.epoch == 1 and batch.step == 1 for batch in store.received)
        assert old.stats().last_error is not None


class ThreadWorld:
    """Ranks that are threads."""

    def __init__(self, rank: int, size: int, box: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._box, self._barrier = rank, size, box, barrier

    def share(self, value: Any) -> Any:
        if self.rank == 0:
            self._box.append(value)
        self._barrier.wait(WAIT_S)
        return self._box[-1]


def _start_ranks(address: str, **settings: Any) -> list[RawEmbeddingStreamer | BaseException]:
    box: list[Any] = []
    barrier = threading.Barrier(2)
    results: list[RawEmbeddingStreamer | BaseException] = [RuntimeError("did not end")] * 2

    def start(rank: int) -> None:
        try:
            results[rank] = RawEmbeddingStreamer(
                address, run="test", world=ThreadWorld(rank, 2, box, barrier), **{**FAST, **settings}
            )
        except BaseException as exc:
            results[rank] = exc

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return results


def test_ranks_share_an_epoch(store: FakeStore) -> None:
    """All ranks of a run stream in the epoch that rank 0 took, each as a client of its own."""
    store.do(lambda: store.shards[1].sessions.update({("other", "rank0"): Session(41)}))
    ranks = _start_ranks(store.address)
    for rank, streamer in enumerate(ranks):
        assert isinstance(streamer, RawEmbeddingStreamer), streamer
        assert streamer.epoch == 42
        training = Training(seed=rank)
        streamer.attach(training.model, training.optimizer)
        training.step()
        streamer.close()
    assert {client for run, client in store.shards[0].sessions if run == "test"} == {"rank0", "rank1"}


def test_failure_of_rank_0_reaches_the_others() -> None:
    """When rank 0 finds no server the others fail too, and do not wait for ever."""
    with hosted(FakeStore()) as store:
        address = store.address
    with spent_deadline():
        first, second = _start_ranks(address)
    assert isinstance(first, UnavailableError)
    assert isinstance(second, UnavailableError)
    assert "rank 0 could not begin to stream: no parameter server" in str(second)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UnavailableError("")])
def test_whatever_ends_rank_0_is_told_in_words(error: BaseException) -> None:
    """Also somebody's Ctrl-C, and an error without words: the other ranks would wait for ever, or not know why."""
    shared: list[Any] = []

    def fail(*_: Any) -> None:
        raise error

    sender: Any = SimpleNamespace(find_store=fail)
    world: Any = SimpleNamespace(rank=0, size=2, share=shared.append)
    with pytest.raises(type(error)):
        take_over(sender, "nowhere", 1, run="test", world=world, config=StreamerConfig())
    assert [agreed.error for agreed in shared] == [type(error).__name__]


def test_each_rank_says_which_it_is() -> None:
    """A step is whole when all ranks have ended it, so the shards have to know how many there are, and who is who."""
    sender: Any = SimpleNamespace(find_store=lambda *_: Store(shards=(), highest_epoch=0), open=lambda *_: None)
    world: Any = SimpleNamespace(rank=2, size=4, share=lambda _: _Agreed(7, ()))
    _, writer = take_over(sender, "nowhere", 1, run="test", world=world, config=StreamerConfig())
    assert writer == Writer(run="test", client="rank2", epoch=7, rank=2, world_size=4)


def test_a_rank_that_finds_another_store_does_not_begin(store: FakeStore) -> None:
    """A rank whose address leads elsewhere than rank 0's writes nothing there: its rows would be missing in the run."""
    box: list[Any] = []
    barrier = threading.Barrier(2)
    with hosted(FakeStore(num_shards=3)) as elsewhere:
        elsewhere.server_id = "store-2"
        leading = threading.Thread(target=lambda: ThreadWorld(0, 2, box, barrier).share(_agreed_on(store)))
        leading.start()
        with pytest.raises(StorageError, match=r"rank 1 finds another store at .* than rank 0"):
            RawEmbeddingStreamer(elsewhere.address, run="test", world=ThreadWorld(1, 2, box, barrier), **FAST)
        leading.join(WAIT_S)
        assert not any(shard.sessions for shard in elsewhere.shards)


def _agreed_on(store: FakeStore) -> Any:
    return _Agreed(epoch=1, server_ids=(store.server_id,) * 3)
