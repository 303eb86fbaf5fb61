"""What outages, failures and a store that was replaced do to training, and to what is delivered."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import pytest
from fake_shard import WAIT_S, FakeStore, Fault
from streamed_training import FAST, Training, compare, streaming
from watched_server import wait_until

from headrace.kernels.dirty_rows import DirtyRows
from headrace.schemas.errors import ConfigError, RowRangeError, StorageError, UnavailableError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.compare import compare_with_store
from headrace.streamer.flush.flush import Flush
from headrace.streamer.flush.flusher import Flusher
from headrace.streamer.flush.taken_rows import TakenRows


def test_on_error_log_lets_training_go_on(store: FakeStore, training: Training) -> None:
    """With `on_error="log"` steps go on after a fatal error; `flush` raises it, `close` does not."""
    streamer = RawEmbeddingStreamer(store.address, run="test", on_error="log", **FAST)
    streamer.attach(training.model, training.optimizer)
    store.do(lambda: store.shards[0].faults.append(Fault(RowRangeError("row 9"))))
    training.step()
    with pytest.raises(RowRangeError):
        streamer.flush()
    for _ in range(5):
        training.step()
    streamer.step()
    streamer.pause()
    streamer.resume()
    streamer.close()


def test_log_says_it_once(store: FakeStore, training: Training, caplog: pytest.LogCaptureFixture) -> None:
    """A failure that a step finds is logged once, however many steps follow."""
    with streaming(store, training, on_error="log") as streamer:
        store.do(lambda: store.shards[0].faults.append(Fault(RowRangeError("row 9"))))
        training.step()
        with pytest.raises(RowRangeError):
            streamer._delivery.sender.wait_durable(WAIT_S)
        for _ in range(5):
            training.step()
        told = [r.getMessage() for r in caplog.records if "streaming has stopped" in r.getMessage()]
        assert told == ["streaming has stopped, training goes on: row 9"]


def test_outage_degrades_freshness_only(store: FakeStore, training: Training) -> None:
    """Training goes on while the server is away, and everything is there after its return."""
    with streaming(store, training) as streamer:
        training.step()
        for shard in store.shards:
            store.do(shard.stop)
        for _ in range(40):
            training.step()
        stats = streamer.stats()
        assert stats.num_inflight_flushes == 2
        assert stats.num_dirty_rows > 0
        for shard in store.shards:
            store.do(shard.start)
        streamer.flush()
        assert compare(streamer, store).is_equal
        assert streamer.stats().num_reconnects > 0


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


def test_another_store_ends_streaming(store: FakeStore, training: Training) -> None:
    """A store that was replaced is told, not filled with half of the rows."""
    with streaming(store, training) as streamer:
        training.step()
        streamer.flush()
        _replace(store)
        training.step()
        with pytest.raises(StorageError, match="another store"):
            streamer.flush()


def test_resync_fills_another_store(store: FakeStore, training: Training) -> None:
    """Under `resync` a store that was replaced has every row of every table after the next flush."""
    with streaming(store, training, on_new_store="resync") as streamer:
        training.step()
        streamer.flush()
        _replace(store)
        training.step()
        streamer.flush()
        result = compare_with_store(streamer.tables, store.address)
        assert result.is_equal
        assert result.num_compared == 500


def test_a_state_amid_a_resync_is_not_drained(store: FakeStore, training: Training) -> None:
    """Between the new store's first ack and the next step the state names that store, and does not say it has all."""
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


def _replace(store: FakeStore) -> None:
    def replace() -> None:
        store.server_id = "store-2"
        for shard in store.shards:
            shard.forget()
            shard.drop_connections()

    store.do(replace)


def test_training_thread_never_waits_for_the_network(store: FakeStore, training: Training) -> None:
    """With every shard stalled, steps cost no more than marking and gathering."""
    with streaming(store, training) as streamer:
        for shard in store.shards:
            store.do(shard.gate.clear)
        began_s = time.monotonic()
        for _ in range(50):
            training.step()
        # Far below any deadline of the network's, and above what 50 steps take on the slowest machine.
        assert time.monotonic() - began_s < 40.0
        assert streamer.stats().num_inflight_flushes == 2


def test_interrupted_outage_is_logged_once(
    store: FakeStore, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """An outage is one warning a shard, not one an attempt."""

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


def test_an_interrupt_after_the_hand_over_costs_nothing(
    store: FakeStore, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C when the sender has a flush already: its buffer is not filled again before every shard has the rows."""
    with streaming(store, training) as streamer:
        flusher, sender = streamer._delivery.flusher, streamer._delivery.sender
        submit = flusher._submit
        for shard in store.shards:
            store.do(shard.gate.clear)

        def interrupted(flush: Flush) -> None:
            submit(flush)
            sender._call(_nothing, timeout_s=WAIT_S)  # behind the flush
            assert flush.is_taken
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(flusher, "_submit", interrupted)
            training.step()
        assert flusher._pool.num_free == 1  # of two
        for shard in store.shards:
            store.do(shard.gate.set)
        training.step()
        streamer.flush()
        wait_until(lambda: flusher._pool.num_free == 2, "a buffer that the sender gives back behind its news")
        assert compare(streamer, store).is_equal


@pytest.mark.parametrize("place", ["_take_from", "add"])
def test_an_interrupt_amid_a_take_loses_no_row(
    store: FakeStore, training: Training, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Ctrl-C between taking rows and noting them sends every row with the next flush."""
    owner: Any = DirtyRows if place == "_take_from" else TakenRows
    with streaming(store, training) as streamer:
        for table in streamer.tables:
            table.mark_all()
        streamer.flush()
        original = getattr(owner, place)

        def interrupted(*args: Any) -> None:
            if place == "_take_from":
                original(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(owner, place, interrupted)
            training.step()
        streamer.flush()
        assert streamer.stats().num_dirty_rows == 0
        assert compare(streamer, store).is_equal
        assert compare(streamer, store).num_compared == 500


def test_a_flush_amid_a_flush_is_refused(store: FakeStore, training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that flushes while rows are taken would miss them, so it is told; the outer flush goes on."""
    with streaming(store, training) as streamer:
        cut = Flusher._cut
        told: list[str] = []

        def with_a_signal(*args: Any) -> Any:
            for call in (streamer.flush, lambda: streamer.step(7)):
                with pytest.raises(ConfigError, match="came amid it, as from a signal handler") as refused:
                    call()
                told.append(str(refused.value))
            found = cut(*args)
            assert not streamer.state_dict()["is_drained"]  # the rows are neither marked nor on their way
            return found

        with monkeypatch.context() as patched:
            patched.setattr(Flusher, "_cut", with_a_signal)
            training.step()
        assert len(told) == 2
        streamer.flush()
        assert compare(streamer, store).is_equal


async def _nothing() -> None:
    pass
