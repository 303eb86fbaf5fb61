"""The public class, with real models and optimizers, against a fake store over loopback."""

from __future__ import annotations

import gc
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_shard import WAIT_S, FakeStore, Fault, Session, hosted
from torch import nn

from headrace.schemas.errors import (
    ConfigError,
    FencedError,
    NonFiniteError,
    RowRangeError,
    SpecMismatchError,
    StorageError,
    UnavailableError,
    UnsupportedModelError,
)
from headrace.streamer import RawEmbeddingStreamer, StreamerConfig
from headrace.streamer.compare import Comparison, compare_with_store

FAST: dict[str, Any] = {
    "flush_percent": 100,
    "retry_min_s": 0.001,
    "retry_max_s": 0.01,
    "connect_timeout_s": 5.0,
    "flush_timeout_s": WAIT_S,
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(300, 8, sparse=True)
        self.items = nn.EmbeddingBag(200, 6, sparse=True)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return self.user(users).pow(2).sum() + self.items(items).sum()


class Training:
    """A model that can be trained a step at a time."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        self.generator = torch.Generator().manual_seed(seed)

    def step(self, *, users: list[int] | None = None) -> None:
        ids = torch.randint(0, 300, (32,), generator=self.generator) if users is None else torch.tensor(users)
        items = torch.randint(0, 200, (16, 3), generator=self.generator)
        self.optimizer.zero_grad()
        self.model(ids, items).backward()
        self.optimizer.step()


@contextmanager
def streaming(store: FakeStore, training: Training, **settings: Any) -> Iterator[RawEmbeddingStreamer]:
    streamer = RawEmbeddingStreamer(store.address, run="test", **{**FAST, **settings})
    try:
        streamer.attach(training.model, training.optimizer)
        yield streamer
    finally:
        streamer.close(flush=False)


def compare(streamer: RawEmbeddingStreamer, store: FakeStore) -> Comparison:
    return compare_with_store(streamer.tables, store.address, only_present=True, timeout_s=WAIT_S)


@pytest.fixture
def store() -> Iterator[FakeStore]:
    with hosted(FakeStore(num_shards=3)) as store:
        yield store


@pytest.fixture
def training() -> Training:
    return Training()


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
        with pytest.raises(UnavailableError, match=r"flush within 0\.05 s: .* shard 2 \(127\.0\.0\.1:\d+\) has not"):
            streamer.flush(timeout_s=0.05)
        store.do(store.shards[2].gate.set)
        streamer.flush()
        assert compare(streamer, store).is_equal


@pytest.mark.parametrize("address", ["", "host:port", "127.0.0.1:0", "127.0.0.1:99999", "http://x:1", ":7601"])
def test_bad_address_is_refused(address: str) -> None:
    """What is no address is said at once."""
    with pytest.raises(ConfigError, match="is not an address"):
        RawEmbeddingStreamer(address, run="test")


@pytest.mark.parametrize("run", ["", "x" * 600, "a\nb"])
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
    with pytest.raises(UnavailableError, match=f"no parameter server at {address} within 0.1 s .*headrace serve"):
        RawEmbeddingStreamer(address, run="test", connect_timeout_s=0.1)
    assert not _sender_threads()


def test_mismatch_at_attach_leaves_nothing_attached(store: FakeStore, training: Training) -> None:
    """A table that the server has otherwise is told at `attach`; the model is as before and can be attached later."""
    with streaming(store, training) as first:
        first.flush()
    changed = Training()
    changed.model.user = nn.Embedding(300, 9, sparse=True)
    changed.optimizer = torch.optim.Adagrad(changed.model.parameters(), lr=0.1)
    streamer = RawEmbeddingStreamer(store.address, run="other", **FAST)
    with pytest.raises(SpecMismatchError, match=r"'user\.weight': dim 8 ≠ 9"):
        streamer.attach(changed.model, changed.optimizer)
    assert streamer.tables == []
    changed.step()
    streamer.flush()
    assert not any(batch.rows for batch in store.received)
    streamer.attach(training.model, training.optimizer)
    streamer.close()


def test_model_without_tables_is_refused(store: FakeStore) -> None:
    """A model that has nothing to stream is refused with the reason."""
    model = nn.Linear(2, 2)
    with RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        with pytest.raises(UnsupportedModelError):
            streamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ConfigError, match="publish"):
            streamer.attach(model, None, publish="some")  # type: ignore[arg-type]


def test_what_is_no_model_and_no_optimizer_is_refused(store: FakeStore, training: Training) -> None:
    """Arguments in the wrong order or of the wrong kind are told in one line, which says what to give."""
    model, optimizer = training.model, training.optimizer
    with RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        attach: Any = streamer.attach
        for arguments, message in [
            ((optimizer, model), "optimizer: a Model is none; give the torch.optim.Optimizer"),
            ((optimizer,), "model is a Adagrad: give the nn.Module"),
            ((model.state_dict(), optimizer), "model is a OrderedDict"),
            ((model, model.parameters()), "optimizer: a Parameter is none"),
            ((model, {"tables": optimizer}), "optimizer: a dict is none"),
            ((model, 0.1), "optimizer: a float is none"),
        ]:
            with pytest.raises(ConfigError, match=message) as caught:
                attach(*arguments)
            assert "\n" not in str(caught.value)
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
    """A table whose type or shape was changed under the streamer is an error that names both, and sends nothing."""
    streamer = RawEmbeddingStreamer(store.address, run="test", **FAST)
    streamer.attach(training.model, training.optimizer)
    change(training.model)
    with pytest.raises(UnsupportedModelError, match=rf"'user\.weight' was float32\[300, 8\] .* {now} now"):
        streamer.flush()
    streamer.close(flush=False)
    assert not any(batch.rows for batch in store.received)


def test_rows_of_a_former_run_are_told_once(
    store: FakeStore, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """A table that the store has from a former run may differ there: said at the first step, unless all is sent."""
    with streaming(store, training) as first:
        training.step()
        first.flush()
    assert "before this run" not in caplog.text
    again = Training(seed=1)
    with streaming(store, again):
        again.step()
        again.step()
    assert caplog.text.count("the store had items.weight, user.weight before this run") == 1
    caplog.clear()
    with RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        streamer.attach(training.model, training.optimizer, publish="all")
        training.step()
        state = streamer.state_dict()
    resumed = Training()
    with RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        streamer.attach(resumed.model, resumed.optimizer)
        streamer.load_state_dict({**state, "server_ids": ["another"]})  # sends every row
        resumed.step()
    assert "before this run" not in caplog.text


def test_second_table_of_a_name_is_refused(store: FakeStore, training: Training) -> None:
    """Two models whose tables have the same names would overwrite each other's rows: the second is refused."""
    with streaming(store, training) as streamer:
        other = Training(seed=1)
        with pytest.raises(UnsupportedModelError, match=r"'user\.weight' of another model is streamed already"):
            streamer.attach(other.model, other.optimizer)
        wrapped = nn.ModuleDict({"other": other.model})
        streamer.attach(wrapped, other.optimizer)
        training.step()
        other.step()
        streamer.flush()
        result = compare(streamer, store)
        assert result.is_equal
        assert len(result.tables) == 4


def test_attach_waits_for_a_shard_that_restarts(store: FakeStore, training: Training) -> None:
    """A shard that is away for a moment delays `attach`; one that stays away fails it, with nothing attached."""
    hasty = RawEmbeddingStreamer(store.address, run="hasty", **{**FAST, "connect_timeout_s": 2.0})
    streamer = RawEmbeddingStreamer(store.address, run="test", **FAST)
    store.do(store.shards[2].stop)
    with pytest.raises(UnavailableError, match=r"a shard does not answer within 2 s"):
        hasty.attach(training.model, training.optimizer)
    assert hasty.tables == []
    hasty.close(flush=False)
    starter = threading.Thread(target=lambda: store.do(store.shards[2].start))
    starter.start()
    streamer.attach(training.model, training.optimizer)
    starter.join()
    training.step()
    streamer.close()
    assert compare(streamer, store).is_equal


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


def test_block_policy_names_the_shard(store: FakeStore, training: Training) -> None:
    """Under `block` a step that waits too long fails with the shard that is behind."""
    with streaming(store, training, policy="block", block_timeout_s=0.05) as streamer:
        store.do(store.shards[1].gate.clear)
        training.step()
        training.step()
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


def _replace(store: FakeStore) -> None:
    def replace() -> None:
        store.server_id = "store-2"
        for shard in store.shards:
            shard.forget()
            shard.drop_connections()

    store.do(replace)


def test_close_is_idempotent_and_removes_everything(store: FakeStore, training: Training) -> None:
    """`close` flushes, ends the thread and removes the hooks; again it does nothing, other calls say it is closed."""
    streamer = RawEmbeddingStreamer(store.address, run="test", **FAST)
    streamer.attach(training.model, training.optimizer)
    training.step()
    streamer.close()
    streamer.close()
    assert not _sender_threads()
    assert compare(streamer, store).is_equal
    num_batches = len(store.received)
    training.step()
    assert len(store.received) == num_batches
    for call in (streamer.flush, streamer.step, lambda: streamer.attach(training.model, training.optimizer)):
        with pytest.raises(ConfigError, match="closed"):
            call()
    assert streamer.stats().acked_step == 1


def test_close_that_cannot_flush_still_closes(store: FakeStore, training: Training) -> None:
    """When the last flush times out, `close` says so, and hooks and thread are gone all the same."""
    streamer = RawEmbeddingStreamer(store.address, run="test", **FAST)
    streamer.attach(training.model, training.optimizer)
    store.do(store.shards[0].gate.clear)
    training.step()
    with pytest.raises(UnavailableError, match="shard 0"):
        streamer.close(timeout_s=0.05)
    assert not _sender_threads()
    training.step()


def test_context_manager_flushes(store: FakeStore, training: Training) -> None:
    """Leaving the `with` block in peace flushes and closes."""
    with RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        streamer.attach(training.model, training.optimizer)
        training.step()
    assert compare(streamer, store).is_equal
    assert not _sender_threads()


def test_context_manager_does_not_hide_the_exception(store: FakeStore, training: Training) -> None:
    """An exception in the block comes out as it is, at once, and everything is closed."""
    with pytest.raises(ZeroDivisionError), RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        streamer.attach(training.model, training.optimizer)
        store.do(store.shards[0].gate.clear)
        training.step()
        raise ZeroDivisionError
    assert not _sender_threads()


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
    for thread in _sender_threads():
        thread.join(deadline_s - time.monotonic())
    assert not _sender_threads()


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
    done = subprocess.run(
        [sys.executable, str(program), store.address], capture_output=True, text=True, timeout=WAIT_S * 2
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "50 rows that had changed were not sent, 2 flushes" in done.stderr
    assert "may not have been delivered" in done.stderr
    assert "Traceback" not in done.stderr


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
    first, second = _start_ranks(address, connect_timeout_s=0.1)
    assert isinstance(first, UnavailableError)
    assert isinstance(second, UnavailableError)
    assert "rank 0 could not begin to stream: no parameter server" in str(second)


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
    with streaming(store, training) as streamer, caplog.at_level(logging.WARNING, "headrace"):
        store.do(store.shards[0].stop)
        for _ in range(3):
            training.step()
        with pytest.raises(UnavailableError):
            streamer.flush(timeout_s=0.2)
        told = [r for r in caplog.records if "trying again" in r.getMessage() and "shard 0" in r.getMessage()]
        assert 1 <= len(told) <= 2
        store.do(store.shards[0].start)
        streamer.flush()


def _sender_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "headrace-sender"]


def test_settings_come_one_way(store: FakeStore) -> None:
    """A `config` and single settings together are refused."""
    with pytest.raises(ConfigError, match="not both: policy"):
        RawEmbeddingStreamer(store.address, run="test", config=StreamerConfig(), policy="block")
