"""Delivery: how ranks take a run over, and what outages, failures and a replaced store do to training."""

from __future__ import annotations

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from fake_shard import WAIT_S, FakeStore, Fault, Session, hosted
from spent_deadline import spent_deadline
from store_comparison import compare_with_store
from streamed_training import FAST, Training, compare, streaming
from thread_ranks import Ranks, ThreadRank
from watched_server import wait_until

from headrace.schemas.errors import ConfigError, FencedError, RowRangeError, StorageError, UnavailableError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.config import StreamerConfig
from headrace.streamer.delivery.pipeline import _Agreed, begin_run
from headrace.streamer.delivery.rendezvous import Store, Writer
from headrace.streamer.flush.flusher import Flusher


def test_each_start_takes_a_higher_epoch(store: FakeStore, training: Training) -> None:
    """A restarted trainer continues in the same store, in a new epoch, with batches from 1."""
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


def _start_ranks(address: str) -> list[RawEmbeddingStreamer | BaseException]:
    return Ranks(2).run(lambda world: RawEmbeddingStreamer(address, run="test", world=world, **FAST))


def test_ranks_share_an_epoch(store: FakeStore) -> None:
    """All ranks of a run stream in the epoch that rank 0 took, each as a client of its own."""
    store.do(lambda: store.shards[1].sessions.update({("other", "rank0"): Session(41)}))
    ranks = _start_ranks(store.address)
    trainings = [Training(seed=rank) for rank in range(2)]

    def attach(rank: int) -> None:
        ranks[rank].attach(trainings[rank].model, trainings[rank].optimizer, publish="updated")  # type: ignore[union-attr]

    with ThreadPoolExecutor(2) as pool:  # together, as all ranks do
        list(pool.map(attach, range(2)))
    for streamer, training in zip(ranks, trainings, strict=True):
        assert isinstance(streamer, RawEmbeddingStreamer), streamer
        assert streamer.epoch == 42
        training.step()
        streamer.close()
    assert {client for run, client in store.shards[0].sessions if run == "test"} == {"rank0", "rank1"}


def test_failure_of_rank_0_reaches_the_others() -> None:
    """When rank 0 finds no server, the other ranks fail too instead of waiting forever."""
    with hosted(FakeStore()) as store:
        address = store.address
    with spent_deadline():
        first, second = _start_ranks(address)
    assert isinstance(first, UnavailableError)
    assert isinstance(second, UnavailableError)
    assert "rank 0 could not begin to stream: no parameter server" in str(second)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UnavailableError("")])
def test_whatever_ends_rank_0_is_told_in_words(error: BaseException) -> None:
    """Other ranks learn of any end of rank 0, also of Ctrl-C and of an error without a message."""
    shared: list[Any] = []

    def fail(*_: Any) -> None:
        raise error

    sender: Any = SimpleNamespace(find_store=fail)
    world: Any = SimpleNamespace(rank=0, size=2, share=shared.append)
    with pytest.raises(type(error)):
        begin_run(sender, [("nowhere", 1)], run="test", world=world, config=StreamerConfig())
    assert [agreed.error for agreed in shared] == [type(error).__name__]


def test_each_rank_says_which_it_is() -> None:
    """Each rank tells its number and the world size, because a step is complete when all ranks have ended it."""
    sender: Any = SimpleNamespace(find_store=lambda *_: Store(shards=(), highest_epoch=0), open=lambda *_: None)
    world: Any = SimpleNamespace(rank=2, size=4, share=lambda _: _Agreed(7, (), "m"))
    _, writer = begin_run(sender, [("nowhere", 1)], run="test", world=world, config=StreamerConfig())
    assert writer == Writer(run="test", client="rank2", epoch=7, rank=2, world_size=4, model="m")


def test_a_rank_that_finds_another_store_does_not_begin(store: FakeStore) -> None:
    """A rank that finds another store than rank 0 writes nothing there."""
    with hosted(FakeStore(num_shards=3)) as elsewhere:
        elsewhere.server_id = "store-2"

        def start(world: ThreadRank) -> Any:
            if world.rank == 0:
                return world.share(_Agreed(epoch=1, server_ids=(store.server_id,) * 3))
            return RawEmbeddingStreamer(elsewhere.address, run="test", world=world, **FAST)

        _, error = Ranks(2).run(start)
        assert isinstance(error, StorageError)
        assert re.match(r"rank 1 finds another store at .* than rank 0", str(error))
        assert not any(shard.sessions for shard in elsewhere.shards)


def test_on_error_log_lets_training_go_on(
    store: FakeStore, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """With `on_error="log"` steps go on after a fatal error and log it once; `flush` raises it, `close` does not."""
    streamer = RawEmbeddingStreamer(store.address, run="test", on_error="log", **FAST)
    streamer.attach(training.model, training.optimizer, publish="updated")
    store.do(lambda: store.shards[0].faults.append(Fault(RowRangeError("row 9"))))
    training.step()
    with pytest.raises(RowRangeError):
        streamer._delivery.sender.wait_durable(WAIT_S)
    for _ in range(5):
        training.step()
    with pytest.raises(RowRangeError):
        streamer.flush()
    streamer.step()
    streamer.pause()
    streamer.resume()
    streamer.close()
    told = [r.getMessage() for r in caplog.records if "streaming has stopped" in r.getMessage()]
    assert told == ["streaming has stopped, training goes on: row 9"]


def test_flush_that_times_out_says_what_is_missing(store: FakeStore, training: Training) -> None:
    """`flush` raises at its deadline with the shard that is behind; a later one succeeds."""
    with streaming(store, training) as streamer:
        store.do(store.shards[2].gate.clear)
        training.step()
        wait_until(lambda: store.shards[2].num_inflight == 1, "what the shard does not ack")
        with pytest.raises(UnavailableError, match=r"flush within 0\.05 s: .* shard 2 \(127\.0\.0\.1:\d+\) has not"):
            streamer.flush(timeout_s=0.05)
        store.do(store.shards[2].gate.set)
        streamer.flush()
        assert compare(streamer, store).is_equal


def test_block_policy_names_the_shard(store: FakeStore, training: Training) -> None:
    """Under `block` a step that waits too long fails with the shard that is behind."""
    with streaming(store, training, policy="block", block_timeout_s=0.05) as streamer:
        store.do(store.shards[1].gate.clear)
        training.step()
        training.step()
        wait_until(lambda: store.shards[1].num_inflight == 2, "what the shard does not ack")
        with pytest.raises(UnavailableError, match=r"step 3 has waited .* shard 1 \("):
            training.step()
        store.do(store.shards[1].gate.set)
        streamer.flush()
        assert compare(streamer, store).is_equal


def test_a_state_amid_a_resync_is_not_drained(store: FakeStore, training: Training) -> None:
    """Between the new store's first ack and the next step, the state names that store and is not drained."""
    with streaming(store, training, on_new_store="resync") as streamer:
        training.step()
        streamer.flush()
        assert streamer.state_dict()["is_drained"]
        for shard in store.shards:
            store.do(shard.gate.clear)
        training.step()
        _replace(store)
        for shard in store.shards:
            store.do(shard.gate.set)
        streamer._delivery.sender.wait_durable(WAIT_S)
        state = streamer.state_dict()
        assert state["server_ids"] == ["store-2"] * 3
        assert not state["is_drained"]
        streamer.flush()
        assert streamer.state_dict()["is_drained"]
        result = compare_with_store(streamer.tables, store.address)
        assert result.is_equal and result.num_compared == 500, "every row of every table"


def _replace(store: FakeStore) -> None:
    def replace() -> None:
        store.server_id = "store-2"
        for shard in store.shards:
            shard.forget()
            shard.drop_connections()

    store.do(replace)


def test_interrupted_outage_is_logged_once(
    store: FakeStore, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """An outage is one warning per shard, not one per attempt."""

    def told() -> list[int]:
        """Return the level of what was said after each attempt."""
        return [r.levelno for r in [*caplog.records] if re.search(r"shard 0 .*trying again", r.getMessage())]

    with streaming(store, training) as streamer, caplog.at_level(logging.DEBUG, "headrace"):
        store.do(store.shards[0].stop)
        for _ in range(3):
            training.step()
        wait_until(lambda: len(told()) > 5, "the next attempt")
        assert 1 <= told().count(logging.WARNING) <= 2
        with pytest.raises(UnavailableError):
            streamer.flush(timeout_s=0.2)
        store.do(store.shards[0].start)
        streamer.flush()


def test_a_flush_amid_a_flush_is_refused(store: FakeStore, training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush in a signal handler during another flush is refused, as it would miss rows; the outer one continues."""
    with streaming(store, training) as streamer:
        cut = Flusher._make_flush
        told: list[str] = []

        def with_a_signal(*args: Any, **kwargs: Any) -> Any:
            for call in (streamer.flush, lambda: streamer.step(7)):
                with pytest.raises(ConfigError, match="came during it, as from a signal handler") as refused:
                    call()
                told.append(str(refused.value))
            found = cut(*args, **kwargs)
            assert not streamer.state_dict()["is_drained"]  # the rows are neither marked nor on their way
            return found

        with monkeypatch.context() as patched:
            patched.setattr(Flusher, "_make_flush", with_a_signal)
            training.step()
        assert len(told) == 2
        streamer.flush()
        assert compare(streamer, store).is_equal
