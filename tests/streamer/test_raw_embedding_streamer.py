"""The public class, with real models and optimizers, against a fake store over loopback."""

from __future__ import annotations

import socket

import pytest
import torch
from fake_shard import FakeStore, hosted
from spent_deadline import spent_deadline
from streamed_training import FAST, Training, compare, sender_threads, streaming

from headrace.schemas.errors import ConfigError, NonFiniteError, UnavailableError
from headrace.streamer import RawEmbeddingStreamer, StreamerConfig
from headrace.streamer.compare import compare_with_store


def test_store_equals_trainer_after_flush(store: FakeStore, training: Training) -> None:
    """After `flush` every row in the store equals the trainer's, weights and state, and every updated row is there."""
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    with streaming(store, training) as streamer:
        for _ in range(30):
            training.step()
        streamer.flush()
        result = compare(streamer, store)
        changed = sum(
            int((value != before[name]).any(dim=1).sum()) for name, value in training.model.state_dict().items()
        )
        assert result.is_equal
        assert result.num_compared == changed > 300
        stats = streamer.stats()
        assert (stats.step, stats.acked_step, stats.num_dirty_rows, stats.num_connected) == (30, 30, 0, 3)
        assert stats.last_error is None
        for shard in store.shards:
            assert shard.received[-1].is_exact_cut
            assert shard.received[-1].step == 30


def test_publish_all_sends_every_row(store: FakeStore, training: Training) -> None:
    """With `publish="all"` the store has whole tables after the first flush, before any training."""
    streamer = RawEmbeddingStreamer(store.address, run="test", **FAST)
    streamer.attach(training.model, training.optimizer, publish="all")
    streamer.flush()
    result = compare_with_store(streamer.tables, store.address)
    assert result.is_equal
    assert result.num_compared == 500
    streamer.close()


@pytest.mark.parametrize("address", ["", "host:port", "127.0.0.1:0", "127.0.0.1:99999", "http://x:1", ":7601"])
def test_bad_address_is_refused(address: str) -> None:
    """What is no address is said at once."""
    with pytest.raises(ConfigError, match="is not an address"):
        RawEmbeddingStreamer(address, run="test")


@pytest.mark.parametrize("run", ["", "x" * 257, "ä" * 129, "a\nb"])
def test_bad_run_is_refused(run: str) -> None:
    """A run's name is a short, printable line."""
    with pytest.raises(ConfigError, match="run "):
        RawEmbeddingStreamer("127.0.0.1:1", run=run)


def test_a_port_that_never_answers_is_told() -> None:
    """What listens and says nothing is named with what it may be, in time."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=rf"no parameter server at {address} within 0\.1 s \(what is there"):
            RawEmbeddingStreamer(address, run="test", connect_timeout_s=0.1)


def test_no_server_leaves_no_thread() -> None:
    """Where nothing listens the constructor fails in time, with what to do, and leaves no thread."""
    with hosted(FakeStore()) as store:
        address = store.address
    told = f"no parameter server at {address} within 30 s .*headrace serve"
    with spent_deadline(), pytest.raises(UnavailableError, match=told):
        RawEmbeddingStreamer(address, run="test", connect_timeout_s=30)
    assert not sender_threads()


def test_explicit_steps_number_the_boundaries(store: FakeStore, training: Training) -> None:
    """`step(n)` gives a boundary a number of one's own, numbers count on from there, and never fall."""
    with streaming(store, training) as streamer:
        training.step()
        streamer.step(1000)
        training.step()
        streamer.flush()
        assert streamer.stats().acked_step == 1001
        with pytest.raises(ConfigError, match="step 7 after step 1001"):
            streamer.step(7)
        streamer.step()
        assert streamer.stats().step == 1002


def test_non_finite_is_refused_before_it_is_sent(store: FakeStore, training: Training) -> None:
    """Under `reject` a NaN fails the step, naming table and row; once it is mended, streaming goes on."""
    with streaming(store, training, non_finite="reject") as streamer:
        with torch.no_grad():
            training.model.user.weight[7, 2] = float("nan")
        with pytest.raises(NonFiniteError, match=r"'user\.weight': weights of row 7 "):
            training.step(users=[7])
        with torch.no_grad():
            training.model.user.weight[7] = 0
            training.optimizer.state[training.model.user.weight]["sum"][7] = 0
        training.step(users=[8])
        streamer.flush()
        assert compare(streamer, store).is_equal


def test_settings_come_one_way(store: FakeStore) -> None:
    """A `config` and single settings together are refused."""
    with pytest.raises(ConfigError, match="not both: policy"):
        RawEmbeddingStreamer(store.address, run="test", config=StreamerConfig(), policy="block")
