"""How streaming ends: closed, left behind, forked, forgotten, or with its program."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
from fake_shard import WAIT_S, FakeStore
from streamed_training import FAST, Training, compare, sender_threads, streaming
from watched_server import wait_until

from headrace.schemas.errors import ConfigError, UnavailableError
from headrace.streamer import RawEmbeddingStreamer


def test_close_is_idempotent_and_removes_everything(store: FakeStore, training: Training) -> None:
    """`close` flushes, ends the thread and removes the hooks; again it does nothing, other calls say it is closed."""
    streamer = RawEmbeddingStreamer(store.address, run="test", **FAST)
    streamer.attach(training.model, training.optimizer)
    training.step()
    streamer.close()
    streamer.close()
    assert not sender_threads()
    assert compare(streamer, store).is_equal
    num_batches = len(store.received)
    training.step()
    assert len(store.received) == num_batches
    calls = (streamer.flush, streamer.step, streamer.pause, streamer.resume)
    for call in (*calls, lambda: streamer.attach(training.model, training.optimizer)):
        with pytest.raises(ConfigError, match="closed"):
            call()
    assert streamer.stats().acked_step == 1


def test_close_that_cannot_flush_still_closes(store: FakeStore, training: Training) -> None:
    """When the last flush times out, `close` says so, and hooks and thread are gone all the same."""
    streamer = RawEmbeddingStreamer(store.address, run="test", **FAST)
    streamer.attach(training.model, training.optimizer)
    store.do(store.shards[0].gate.clear)
    training.step()
    wait_until(lambda: store.shards[0].num_inflight == 1, "what the shard does not ack")
    with pytest.raises(UnavailableError, match="shard 0"):
        streamer.close(timeout_s=0.05)
    assert not sender_threads()
    training.step()


def test_context_manager_flushes(store: FakeStore, training: Training) -> None:
    """Leaving the `with` block in peace flushes and closes."""
    with RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        streamer.attach(training.model, training.optimizer)
        training.step()
    assert compare(streamer, store).is_equal
    assert not sender_threads()


def test_context_manager_does_not_hide_the_exception(store: FakeStore, training: Training) -> None:
    """An exception in the block comes out as it is, at once, and everything is closed."""
    with pytest.raises(ZeroDivisionError), RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        streamer.attach(training.model, training.optimizer)
        store.do(store.shards[0].gate.clear)
        training.step()
        raise ZeroDivisionError
    assert not sender_threads()


def test_rows_that_are_left_behind_are_told(
    store: FakeStore, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing without a flush says how many changed rows were not sent, once; after a flush there is nothing to say."""
    with RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        streamer.attach(training.model, training.optimizer)
        training.step()
    assert "were not sent" not in caplog.text
    with pytest.raises(KeyboardInterrupt), RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        streamer.attach(training.model, training.optimizer)
        streamer.pause()
        training.step(users=[1, 2, 3])
        num_rows = streamer.stats().num_dirty_rows
        raise KeyboardInterrupt
    streamer.close()
    assert num_rows > 3
    assert (
        caplog.text.count(f"the streamer of run 'test' was closed: {num_rows} rows that had changed were not sent") == 1
    )


def test_forked_child_has_no_streamer(store: FakeStore, training: Training) -> None:
    """In a forked child steps do nothing, methods raise, closing is quiet; the parent goes on."""
    with streaming(store, training) as streamer:
        training.step()
        streamer.flush()
        num_batches = len(store.received)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                streamer._on_step()
                try:
                    streamer.flush()
                except ConfigError as exc:
                    code = 0 if "forked child" in str(exc) else 2
                streamer.close()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert len(store.received) == num_batches
        training.step()
        streamer.flush()
        assert compare(streamer, store).is_equal


def test_no_pickle_is_made(store: FakeStore, training: Training) -> None:
    """A streamer that something takes to a spawned process is an error that says why, and streams on."""
    with streaming(store, training) as streamer:
        with pytest.raises(TypeError, match="a streamer belongs to the process that made it"):
            pickle.dumps({"callbacks": [streamer]})
        training.step()
        streamer.flush()
        assert compare(streamer, store).is_equal


def test_forgotten_streamer_ends_its_thread(store: FakeStore, training: Training) -> None:
    """A streamer that is dropped with its model, and was never closed, leaves no thread."""
    streamer: RawEmbeddingStreamer | None = RawEmbeddingStreamer(store.address, run="test", **FAST)
    assert streamer is not None
    streamer.attach(training.model, training.optimizer)
    training.step()
    gone = weakref.ref(streamer)
    del streamer
    gc.collect()
    assert gone() is not None  # the model's hooks stream on
    del training.model, training.optimizer
    deadline_s = time.monotonic() + WAIT_S
    while gone() is not None:
        gc.collect()  # does nothing while another thread is collecting
        assert time.monotonic() < deadline_s
    for thread in sender_threads():
        thread.join(deadline_s - time.monotonic())
    assert not sender_threads()


_PROGRAM = """
import sys, torch
from headrace.streamer import RawEmbeddingStreamer
model = torch.nn.Embedding(100, 4, sparse=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
streamer = RawEmbeddingStreamer(sys.argv[1], run="test", flush_percent=100)
streamer.attach(model, optimizer)
for _ in range(5):
    model(torch.arange(50)).sum().backward()
    optimizer.step()
streamer.pause()
optimizer.step()
print("done", flush=True)
"""


def test_exit_without_close_does_not_hang(store: FakeStore, tmp_path: Path) -> None:
    """A program that ends without `close`, with a server that does not answer, ends at once and says what is lost."""
    for shard in store.shards:
        store.do(shard.gate.clear)
    program = tmp_path / "train.py"
    program.write_text(_PROGRAM)
    done = subprocess.run([sys.executable, str(program), store.address], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "50 rows that had changed were not sent, 2 flushes" in done.stderr
    assert "may not have been delivered" in done.stderr
    assert "Traceback" not in done.stderr
