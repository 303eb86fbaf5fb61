"""The sender's thread: when a flush is durable, when its buffer is free, and where errors go."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_shard import WAIT_S, FakeStore, Fault, Session, hosted
from foreign_loops import foreign_loops
from loop_clock import ClockAhead
from sending import NUM_ROWS, Sending, sending_to
from trainer_tables import WRITER

from headrace.schemas.errors import (
    FencedError,
    HeadraceError,
    RowRangeError,
    SpecMismatchError,
    StorageError,
    UnavailableError,
)
from headrace.schemas.tables import DType, TableSpec
from headrace.streamer.delivery import sender
from headrace.streamer.delivery.sender import DroppedRows, Switch
from headrace.streamer.flush.layout import Flush


def test_durable_means_on_every_shard() -> None:
    """A flush is durable, and its buffer free, once the last shard has acked all of it."""
    with sending_to(3) as to:
        late = to.store.shards[1]
        to.store.do(late.gate.clear)
        to.send(1)
        # Once the late one has it, it was handed to all of them.
        to.until(lambda: late.num_inflight == 1 and [c.num_behind for c in to.sender._channels] == [0, 1, 0])
        with pytest.raises(UnavailableError, match=r"1 flushes \(.*\) are not durable .*: shard 1 \(127"):
            to.sender.wait_durable(0.01)
        assert to.pool.num_free == 1
        assert to.sender.stats().num_inflight_flushes == 1
        to.store.do(late.gate.set)
        to.sender.wait_durable(WAIT_S)
        to.until(lambda: to.pool.num_free == 2)
        done = to.sender.stats()
        assert (done.num_flushes, done.num_rows_sent, done.acked_step) == (1, 200, 1)
        assert (done.num_inflight_flushes, done.inflight_bytes, done.num_connected) == (0, 0, 3)
        assert done.lag_p50_s is not None
        assert done.lag_p50_s >= 0.01


def test_away_server_costs_two_buffers_and_then_coalesces() -> None:
    """While the server is away, two flushes wait and steps continue; then every row arrives with its newest value."""
    with sending_to(2) as to:
        to.send(1)
        to.sender.wait_durable(WAIT_S)
        to.until(lambda: to.pool.num_free == 2)
        for shard in to.store.shards:
            to.store.do(shard.stop)
        for step in range(2, 50):
            to.send(step)
        assert to.sender.stats().num_inflight_flushes == 2
        assert to.flusher.num_dirty_rows == 200
        for shard in to.store.shards:
            to.store.do(shard.start)
        to.sender.wait_durable(WAIT_S)
        to.flusher.flush_all(50, WAIT_S)
        to.sender.wait_durable(WAIT_S)
        steps = [batch.step for batch in to.store.shards[0].received if batch.ends_step]
        assert steps == [1, 2, 3, 50]
        assert to.sender.stats().num_reconnects >= 2


def test_fatal_error_wakes_and_is_kept() -> None:
    """A refused batch ends streaming: waiters and later submits get the error."""
    with sending_to(2) as to:
        refusal = RowRangeError("row 9 is not in 0..8")
        to.store.do(lambda: to.store.shards[1].faults.append(Fault(refusal)))
        to.send(1)
        with pytest.raises(RowRangeError, match="row 9"):
            to.sender.wait_durable(WAIT_S)
        assert isinstance(to.sender.error, RowRangeError)
        to.table.mark([3])
        with pytest.raises(RowRangeError):
            to.flusher.flush_all(2, 1.0)
        assert to.flusher.num_dirty_rows == 1


def test_bug_ends_streaming_with_its_name(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected exception in a channel ends streaming with its name."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("by a bug")

    with sending_to(1) as to:
        monkeypatch.setattr(to.sender._channels[0], "_on_durable", fail)
        to.send(1)
        with pytest.raises(HeadraceError, match="ZeroDivisionError: by a bug"):
            to.sender.wait_durable(WAIT_S)
    assert "streaming has failed by a bug" in caplog.text


def test_server_that_comes_up_in_time_is_found() -> None:
    """A trainer may be started a little before its server."""
    with hosted(FakeStore()) as store:
        store.do(store.shards[0].stop)
        starter = threading.Thread(target=lambda: store.do(store.shards[0].start))
        with Sending(store) as to:
            starter.start()
            to.open()
            starter.join()
            to.send(1)
            to.sender.wait_durable(WAIT_S)


def test_sender_runs_on_a_loop_of_its_own_kind() -> None:
    """A trainer may be in a process that prefers the loops of another library, which know less than asyncio's."""
    with hosted(FakeStore()) as store:
        with foreign_loops():
            to = Sending(store)
        with to:
            to.open()
            to.send(1)
            to.sender.wait_durable(WAIT_S)


def test_mismatched_table_is_refused_at_registration() -> None:
    """A table that a shard has with another shape is refused before anything is sent."""
    with sending_to(2) as to:
        spec = to.table.tapped.spec
        other = TableSpec(fqn=spec.fqn, num_rows=spec.num_rows, dim=spec.dim + 1, dtype=DType.FLOAT32)
        with pytest.raises(SpecMismatchError, match="dim 16 ≠ 17"):
            to.sender.register([other])
        assert to.sender.error is None


def test_older_epoch_is_fenced_at_registration() -> None:
    """A trainer whose epoch is below the run's present one cannot begin."""
    with sending_to(2) as to, Sending(to.store) as late:
        to.store.do(lambda: to.store.shards[1].sessions.update({(WRITER.run, "rank0"): Session(epoch=7)}))
        with pytest.raises(FencedError):
            late.open()


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        (
            lambda store: setattr(store, "server_id", "store-2"),
            StorageError,
            "is another store than before",
        ),
        (
            lambda store: store.shards[1].sessions.update({(WRITER.run, WRITER.client): Session(WRITER.epoch, 3)}),
            FencedError,
            "already has batch 3 .* another trainer writes under the same name",
        ),
    ],
    ids=["another store", "another trainer"],
)
def test_a_store_that_is_not_as_it_was_found_is_not_written_to(
    change: Callable[[FakeStore], None], error: type[HeadraceError], reason: str
) -> None:
    """A store that was replaced, or that another trainer wrote to, is noticed before a batch is sent."""
    with hosted(FakeStore(num_shards=2)) as store, Sending(store) as late:
        found = late.sender.find_store([("127.0.0.1", store.shards[0].port)], WRITER)
        late.sender.open(found, WRITER)
        store.do(lambda: change(store))
        with pytest.raises(error, match=reason):
            late.sender.register([late.table.tapped.spec])
            late.send(1)
            late.sender.wait_durable(WAIT_S)
        assert not store.received


def test_stop_ends_the_thread_whatever_is_outstanding() -> None:
    """Stopping does not wait for acks, is idempotent, and leaves no thread."""
    with sending_to(2) as to:
        for shard in to.store.shards:
            to.store.do(shard.gate.clear)
        to.send(1)
        to.sender.stop(WAIT_S)
        to.sender.stop(WAIT_S)
        assert not to.sender._thread.is_alive()


def test_interrupted_call_is_cancelled() -> None:
    """A call to the loop that times out is cancelled."""
    with sending_to(1) as to:
        cancelled = threading.Event()

        async def never() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        with pytest.raises(UnavailableError, match="has not answered within"):
            to.sender._call(never, timeout_s=0.05 - sender._LATE_S)
        assert cancelled.wait(WAIT_S)


def test_a_call_says_what_it_has_found_also_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds after the call's own deadline, when the process goes on, its error is the one that is raised."""
    with sending_to(1) as to:

        async def search() -> None:
            clock, loop = ClockAhead(monkeypatch), asyncio.get_running_loop()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    loop.call_soon(setattr, clock, "ahead_s", WAIT_S + 2)
                    await asyncio.Event().wait()
            raise UnavailableError("no shard was found")

        with pytest.raises(UnavailableError, match="no shard was found"):
            to.sender._call(search, timeout_s=WAIT_S)


class Late:
    """What a flush waits for; the flush is whole, or comes to nothing, when the test says.

    Attributes:
        gate: Set when it has come.
        comes: Whether it comes at all.
        is_abandoned: Nobody waits any more.
    """

    def __init__(self, *, comes: bool = True) -> None:
        self.gate = threading.Event()
        self.comes = comes
        self.error: Exception | None = None
        self.is_abandoned = threading.Event()

    def complete(self, flush: Flush) -> Flush | None:
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return dataclasses.replace(flush, pending=None) if self.comes else None

    def abandon(self) -> None:
        self.is_abandoned.set()


def late_flushes(to: Sending, *lates: Late | None) -> None:
    """Have the next flushes wait for something each."""
    waiting, submit = list(lates), to.sender.submit

    def submit_late(flush: Flush) -> None:
        flush.pending = waiting.pop(0)
        submit(flush)

    to.flusher._submit = submit_late


def test_flushes_that_are_not_whole_keep_their_order() -> None:
    """A flush waits for what is on its way from a device, and those after it wait for the flush."""
    with sending_to(2) as to:
        late = Late()
        late_flushes(to, late, None)
        to.send(1)
        to.send(2)
        to.until(lambda: to.sender.stats().num_inflight_flushes == 2)
        assert not to.store.shards[0].received
        late.gate.set()
        to.sender.wait_durable(WAIT_S)
        for shard in to.store.shards:
            assert [batch.step for batch in shard.received if batch.ends_step] == [1, 2]
        to.until(lambda: to.pool.num_free == 2)


def test_a_flush_that_comes_to_nothing_is_not_waited_for() -> None:
    """A flush that fails on its device is sent to no shard, and its buffer is left to its owner."""
    with sending_to(1) as to:
        late = Late(comes=False)
        late_flushes(to, late, None)
        late.gate.set()
        to.send(1)
        to.send(2)
        to.sender.wait_durable(WAIT_S)
        assert [batch.step for batch in to.store.shards[0].received] == [2]
        to.until(lambda: to.pool.num_free == 1)
        assert to.sender.stats().inflight_bytes == 0


def test_a_device_that_fails_ends_streaming() -> None:
    """Waiters get the error of a failed device, and no later flush is completed."""
    with sending_to(1) as to:
        first, second = Late(), Late()
        first.error = HeadraceError("the device has failed")
        late_flushes(to, first, second)
        to.send(1)
        to.send(2)
        first.gate.set()
        with pytest.raises(HeadraceError, match="the device has failed"):
            to.sender.wait_durable(WAIT_S)
        assert second.is_abandoned.wait(WAIT_S)


def test_a_flush_that_is_submitted_as_streaming_ends_is_abandoned() -> None:
    """A flush submitted at the moment when streaming ends does not wait for its device."""
    with sending_to(1) as to:
        late, accept = Late(), to.sender._accept

        def fail_first(entry: Any) -> None:
            to.sender._fail(HeadraceError("ended"))
            entry.flush.pending = late
            accept(entry)

        to.sender._accept = fail_first  # type: ignore[method-assign]
        late_flushes(to, None)
        to.send(1)
        assert late.is_abandoned.wait(WAIT_S)


def test_an_interrupt_after_the_hand_over_leaves_the_flush_to_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C when the loop has a flush, it is delivered before its buffer is filled again."""
    with sending_to(1) as to:
        shard = to.store.shards[0]
        to.store.do(shard.gate.clear)
        submit = to.sender.submit

        def interrupted(flush: Flush) -> None:
            submit(flush)
            to.until(lambda: flush.is_taken)
            raise KeyboardInterrupt

        monkeypatch.setattr(to.flusher, "_submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            to.send(1)
        assert to.pool.num_free == 1  # of two
        assert to.table.tapped.dirty.is_empty
        to.store.do(shard.gate.set)
        to.sender.wait_durable(WAIT_S)
        to.until(lambda: to.pool.num_free == 2)


def test_an_interrupt_before_the_hand_over_takes_the_flush_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C before the loop has a flush, it is never sent, and its rows go out with the next one."""
    with sending_to(1) as to:
        assert to.sender._loop is not None
        queued: list[Callable[[], object]] = []

        def interrupted(callback: Callable[..., object], *args: Any) -> None:
            queued.append(lambda: callback(*args))
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(to.sender._loop, "call_soon_threadsafe", interrupted)
            with pytest.raises(KeyboardInterrupt):
                to.send(1)
        to.store.do(lambda: None)
        to.sender._call(lambda: _called(queued[0]), timeout_s=WAIT_S)  # what was queued runs nevertheless
        assert to.pool.num_free == 2
        assert to.table.tapped.dirty.count == 200
        to.sender.wait_durable(0)
        to.flusher.flush_all(2, WAIT_S)
        to.sender.wait_durable(WAIT_S)
        assert to.sender.stats().num_flushes == 1


async def _called(work: Callable[[], object]) -> None:
    work()


def test_no_mark_is_sent_before_the_rows_of_dropped_flushes() -> None:
    """After a switch, a flush without the rows of one that is dropped only now ends no step; the next one does."""
    with sending_to(2) as to, hosted(to.store.rebuilt(3, "store-2")) as successor:
        to.store.do(to.store.shards[1].gate.clear)
        to.send(1)
        to.until(lambda: to.store.shards[1].num_inflight == 1)
        for shard in successor.shards:  # what it was built of
            shard.tables, shard.sessions = dict(to.store.shards[0].tables), {("run", "rank0"): Session(1)}
        to.store.do(lambda: setattr(to.store, "successor", successor))
        to.store.do(to.store.shards[1].drop_connections)
        to.until(lambda: len(to.sender.losses) == 2)
        to.send(2)  # for the server before
        to.until(lambda: len(to.sender.losses) == 3)
        switch, *dropped = to.sender.losses
        assert isinstance(switch, Switch)
        to.flusher.change_shards(len(switch.store.shards), num_losses=1)
        to.table.mark([5])
        to.flusher.on_step(3)
        to.sender.wait_durable(WAIT_S)
        assert [batch.ends_step for batch in successor.received] == [False]
        for each in dropped:
            assert isinstance(each, DroppedRows)
            to.flusher.mark_again(each.rows, num_losses=3)
        to.flusher.on_step(4)
        to.sender.wait_durable(WAIT_S)
        assert [shard.received[-1].ends_step for shard in successor.shards] == [True] * 3
        assert len(successor.weights(to.table.tapped.spec.fqn)) == NUM_ROWS
