"""The public class, with real models and optimizers, against a fake store over loopback."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_shard import WAIT_S, FakeStore, hosted
from spent_deadline import spent_deadline
from store_comparison import compare_with_store
from streamed_training import FAST, Training, attached, compare, sender_threads, streaming
from torch import nn
from watched_server import wait_until

from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import (
    ConfigError,
    SpecMismatchError,
    UnavailableError,
    UnsupportedModelError,
)
from headrace.schemas.tables import TableSpec
from headrace.streamer import RawEmbeddingStreamer, StreamerConfig
from headrace.streamer.delivery.first_rows import FirstRows
from headrace.streamer.delivery.sender import Sender


def test_store_equals_trainer_after_flush(store: FakeStore, training: Training) -> None:
    """After `flush` the store has every updated row, with the trainer's weights and state."""
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


def test_tables_that_the_server_does_not_know_are_sent_whole(server: ServerProcess, training: Training) -> None:
    """By default, the first run sends every row; the next one, what it changes."""
    with RawEmbeddingStreamer(server.address, run="unknown", model="unknown", **FAST) as streamer:
        streamer.attach(training.model, training.optimizer)
        streamer.flush()
        assert compare_with_store(streamer.tables, server.address).num_compared == 500
    with RawEmbeddingStreamer(server.address, run="unknown", model="unknown", **FAST) as streamer:
        streamer.attach(training.model, training.optimizer)
        streamer.flush()
        assert streamer.stats().num_rows_sent == 0


def test_a_second_try_to_attach_sends_whole_tables_too(
    store: FakeStore, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one may have registered tables on some shards, which then know them."""
    register = Sender.register

    def fail(self: Sender, specs: list[TableSpec], first_rows: FirstRows | None = None) -> None:
        register(self, specs, first_rows)
        raise UnavailableError("a shard is away")

    with RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        with monkeypatch.context() as patch, pytest.raises(UnavailableError, match="a shard is away"):
            patch.setattr(Sender, "register", fail)
            streamer.attach(training.model, training.optimizer)
        streamer.attach(training.model, training.optimizer)
        streamer.flush()
        assert compare_with_store(streamer.tables, store.address).num_compared == 500


def test_a_port_that_never_answers_is_told() -> None:
    """A server that does not answer is an error within the timeout, with possible causes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            UnavailableError, match=rf"no parameter server at {address} within 0\.1 s \(the server hangs"
        ):
            RawEmbeddingStreamer(address, run="test", connect_timeout_s=0.1)


def test_no_server_leaves_no_thread() -> None:
    """Without a server the constructor fails in time, says what to do in one line, and leaves no thread."""
    with hosted(FakeStore()) as store:
        address = store.address
    told = f"no parameter server at {address} within 30 s .*`headrace serve --data DIR --port {address.split(':')[1]}`"
    with spent_deadline(), pytest.raises(UnavailableError, match=told) as caught:
        RawEmbeddingStreamer(address, run="test", connect_timeout_s=30)
    assert "\n" not in str(caught.value)
    assert "direct cause" not in (shown := "".join(traceback.format_exception(caught.value))), shown
    assert "During handling" not in shown
    assert not sender_threads()


def test_explicit_steps_number_the_boundaries(store: FakeStore, training: Training) -> None:
    """`step(n)` numbers a step; later steps count on from there, and a wrong number changes nothing."""
    with streaming(store, training) as streamer:
        training.step()
        streamer.step(np.int64(1000))
        training.step()
        streamer.flush()
        assert streamer.stats().acked_step == 1001
        for wrong, message in ((7, "step 7 after step 1001"), (4.5, r"step 4\.5 is not a whole number")):
            with pytest.raises(ConfigError, match=message):
                streamer.step(wrong)  # type: ignore[arg-type]
        streamer.step()
        state = streamer.state_dict()
        assert (type(state["step"]), state["step"]) == (int, 1002)
        assert b"numpy" not in pickle.dumps(state)


def test_settings_come_one_way(store: FakeStore) -> None:
    """`config` and single settings together are refused."""
    with pytest.raises(ConfigError, match="not both: policy"):
        RawEmbeddingStreamer(store.address, run="test", config=StreamerConfig(), policy="block")


def test_mismatch_at_attach_leaves_nothing_attached(store: FakeStore, training: Training) -> None:
    """A table with another shape on the server fails `attach`, which leaves nothing attached."""
    with streaming(store, training) as first:
        first.flush()
    changed = Training()
    changed.model.user = nn.Embedding(300, 9, sparse=True)
    changed.optimizer = torch.optim.Adagrad(changed.model.parameters(), lr=0.1)
    streamer = RawEmbeddingStreamer(store.address, run="other", **FAST)
    with pytest.raises(SpecMismatchError, match=r"'user\.weight' \(dim 8 ≠ 9\); a table's shape is fixed"):
        streamer.attach(changed.model, changed.optimizer, publish="updated")
    assert streamer.tables == []
    changed.step()
    streamer.flush()
    assert not any(batch.rows for batch in store.received)
    streamer.attach(training.model, training.optimizer, publish="updated")
    streamer.close()


def test_what_is_no_model_and_no_optimizer_is_refused(store: FakeStore, training: Training) -> None:
    """Arguments in the wrong order or of a wrong type are one-line errors that say what to give."""
    model, optimizer = training.model, training.optimizer
    with RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        attach: Any = streamer.attach
        for arguments, message in [
            ((optimizer, model), "optimizer: a Model is not one; give the torch.optim.Optimizer"),
            ((optimizer,), "model is a Adagrad: give the nn.Module"),
            ((model.state_dict(), optimizer), "model is a OrderedDict"),
            ((model, model.parameters()), "optimizer: a Parameter is not one"),
            ((model, {"tables": optimizer}), "optimizer: a dict is not one"),
            ((model, 0.1), "optimizer: a float is not one"),
        ]:
            with pytest.raises(ConfigError, match=message) as caught:
                attach(*arguments)
            assert "\n" not in str(caught.value)
        with pytest.raises(ConfigError, match="publish"):
            attach(model, optimizer, publish="some")
        assert streamer.tables == []


@pytest.mark.parametrize(
    ("change", "now"),
    [
        (lambda model: model.to(torch.bfloat16), r"bfloat16\[300, 8\]"),
        (lambda model: setattr(model.user.weight, "data", torch.zeros(400, 8)), r"float32\[400, 8\]"),
    ],
)
def test_table_that_is_another_now_is_refused(
    store: FakeStore, training: Training, change: Callable[[nn.Module], object], now: str
) -> None:
    """A table whose type or shape has changed is an error that names both, and nothing is sent."""
    streamer = attached(store.address, training, run="test", **FAST)
    change(training.model)
    with pytest.raises(UnsupportedModelError, match=rf"'user\.weight' was float32\[300, 8\] .* {now} now"):
        streamer.flush()
    streamer.close(flush=False)
    assert not any(batch.rows for batch in store.received)


def test_second_table_of_a_name_is_refused(store: FakeStore, training: Training) -> None:
    """A second model with the same table names is refused: they would overwrite each other's rows."""
    with streaming(store, training) as streamer:
        other = Training(seed=1)
        with pytest.raises(UnsupportedModelError, match=r"'user\.weight' of another model is streamed already"):
            streamer.attach(other.model, other.optimizer, publish="updated")
        wrapped = nn.ModuleDict({"other": other.model})
        streamer.attach(wrapped, other.optimizer, publish="updated")
        training.step()
        other.step()
        streamer.flush()
        result = compare(streamer, store)
        assert result.is_equal
        assert len(result.tables) == 4


def test_attach_waits_for_a_shard_that_restarts(store: FakeStore, training: Training) -> None:
    """`attach` waits for a shard that restarts, and fails for one that stays away, with nothing attached."""
    hasty = RawEmbeddingStreamer(store.address, run="hasty", **{**FAST, "connect_timeout_s": 30.0})
    streamer = RawEmbeddingStreamer(store.address, run="test", **FAST)
    store.do(store.shards[2].stop)
    with (
        spent_deadline(),
        pytest.raises(UnavailableError, match=r"its shard 2 at .* does not: no connection .* \(tried for 30 s\)"),
    ):
        hasty.attach(training.model, training.optimizer, publish="updated")
    assert hasty.tables == []
    hasty.close(flush=False)
    starter = threading.Thread(target=lambda: store.do(store.shards[2].start))
    starter.start()
    streamer.attach(training.model, training.optimizer, publish="updated")
    starter.join()
    training.step()
    streamer.close()
    assert compare(streamer, store).is_equal


def test_close_is_idempotent_and_removes_everything(store: FakeStore, training: Training) -> None:
    """`close` flushes, ends the thread and removes the hooks; later calls of other methods raise."""
    streamer = attached(store.address, training, run="test", **FAST)
    training.step()
    streamer.close()
    streamer.close()
    assert not sender_threads()
    assert compare(streamer, store).is_equal
    num_batches = len(store.received)
    training.step()
    assert len(store.received) == num_batches
    calls = (streamer.flush, streamer.audit, streamer.step, streamer.pause, streamer.resume)
    for call in (*calls, lambda: streamer.attach(training.model, training.optimizer, publish="updated")):
        with pytest.raises(ConfigError, match="closed"):
            call()
    assert streamer.stats().acked_step == 1


def test_close_that_cannot_flush_still_closes(store: FakeStore, training: Training) -> None:
    """If the last flush times out, `close` raises, and removes hooks and thread all the same."""
    streamer = attached(store.address, training, run="test", **FAST)
    store.do(store.shards[0].gate.clear)
    training.step()
    wait_until(lambda: store.shards[0].num_inflight == 1, "what the shard does not ack")
    with pytest.raises(UnavailableError, match="shard 0"):
        streamer.close(timeout_s=0.05)
    assert not sender_threads()
    training.step()


def test_context_manager_does_not_hide_the_exception(store: FakeStore, training: Training) -> None:
    """An exception in the `with` block is raised at once, and everything is closed."""
    with pytest.raises(ZeroDivisionError), RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        streamer.attach(training.model, training.optimizer, publish="updated")
        store.do(store.shards[0].gate.clear)
        training.step()
        raise ZeroDivisionError
    assert not sender_threads()


def test_rows_that_are_left_behind_are_told(
    store: FakeStore, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing without a flush logs how many changed rows were not sent, once."""
    with attached(store.address, training, run="test", **FAST) as streamer:
        training.step()
    assert "were not sent" not in caplog.text
    with pytest.raises(KeyboardInterrupt), RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        streamer.attach(training.model, training.optimizer, publish="updated")
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
    """In a forked child steps do nothing, methods raise and `close` is silent; the parent goes on."""
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
    """Pickling a streamer is an error that says why; streaming goes on."""
    with streaming(store, training) as streamer:
        with pytest.raises(TypeError, match="a streamer belongs to the process that made it"):
            pickle.dumps({"callbacks": [streamer]})
        training.step()
        streamer.flush()
        assert compare(streamer, store).is_equal


def test_forgotten_streamer_ends_its_thread(store: FakeStore, training: Training) -> None:
    """A streamer dropped with its model, and never closed, leaves no thread."""
    streamer: RawEmbeddingStreamer | None = RawEmbeddingStreamer(store.address, run="test", **FAST)
    assert streamer is not None
    streamer.attach(training.model, training.optimizer, publish="updated")
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


def test_dropped_streamer_ends_its_thread_without_the_collector(store: FakeStore) -> None:
    """A streamer without a model, and never closed, ends with its last reference: nothing in it refers to itself."""
    gc.disable()
    try:
        streamer: RawEmbeddingStreamer | None = RawEmbeddingStreamer(store.address, run="test", **FAST)
        assert streamer is not None
        del streamer
        for thread in sender_threads():
            thread.join(WAIT_S)
        assert not sender_threads()
    finally:
        gc.enable()


_PROGRAM = """
import sys, torch
from headrace.streamer import RawEmbeddingStreamer
model = torch.nn.Embedding(100, 4, sparse=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
streamer = RawEmbeddingStreamer(sys.argv[1], run="test", freshness_s=0, max_cost_percent=100)
streamer.attach(model, optimizer, publish="updated")
for _ in range(5):
    model(torch.arange(50)).sum().backward()
    optimizer.step()
streamer.pause()
optimizer.step()
print("done", flush=True)
"""


def test_exit_without_close_does_not_hang(store: FakeStore, tmp_path: Path) -> None:
    """A program that ends without `close`, while the server does not answer, exits and logs what is lost."""
    for shard in store.shards:
        store.do(shard.gate.clear)
    program = tmp_path / "train.py"
    program.write_text(_PROGRAM)
    done = subprocess.run([sys.executable, str(program), store.address], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "50 rows that had changed were not sent, 2 flushes" in done.stderr
    assert "may not have been delivered" in done.stderr
    assert "Traceback" not in done.stderr
