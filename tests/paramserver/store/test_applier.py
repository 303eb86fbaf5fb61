"""The applier: reads, windows, tasks at a position, failures, and restarts after crashes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gated_store import SMALL, GatedStore, gated_store, held, open_store, read
from hypothesis import given, settings
from hypothesis import strategies as st
from row_batches import SPEC, VERSIONS, Model, copy_as_after_crash, make_batch, make_delta, make_update
from waiting import until

from headrace.paramserver.store.applier import Applier, ApplierConfig
from headrace.paramserver.store.deltas import Batch
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.row_reader import RowsRead
from headrace.schemas.errors import ConfigError, HeadraceError, InvariantError, StorageError, UnavailableError
from headrace.schemas.row_records import key_prefix
from headrace.schemas.row_tally import RowTally
from headrace.schemas.tables import ColumnShard

PLAIN = replace(SPEC, has_identities=False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GatedStore]:
    with gated_store(tmp_path / "db") as store:
        yield store


async def test_batches_of_a_window_are_read_and_written_as_one(store: GatedStore) -> None:
    """Batches that come during a write are written together after it, and reads are right all along."""
    model, rows = Model(), [1, 2, 3, 4, 9]
    batches = [
        make_batch(2, [1, 2]),
        make_batch(3, [3], deleted=[1], meta={b"a": b"old"}),
        make_batch(4, [1, 4], version=(1, 1)),
        make_batch(5, [2, 3], deleted=[4], meta={b"a": b"new", b"b": b"5"}),
    ]
    async with Applier(store) as applier:
        async with held(applier, store):
            for batch in batches:
                applier.submit(batch)
                model.apply(batch)
            model.check(rows, await read(applier, rows))
        await applier.wait_applied(5)
        model.check(rows, await read(applier, rows))
        assert store.windows == [(1, []), (5, [4])]
        assert applier.pending_bytes == 0
        assert store.read_meta() == {b"a": b"new", b"b": b"5"}


@pytest.mark.parametrize("settings", [{"hold_s": 0.05, "quiet_s": 1e6}, {"hold_s": 1e6, "quiet_s": 0.05}])
async def test_rows_do_not_wait_for_ever(store: GatedStore, settings: dict[str, float]) -> None:
    """Held rows are written when they have waited long enough, or when nothing has come for a while."""
    async with Applier(store, config=ApplierConfig(**settings)) as applier:
        for seq in (1, 2):
            applier.submit(make_batch(seq, [seq]))
            await until(lambda seq=seq: applier.applied_seq == seq)
    assert [seq for seq, _ in store.windows] == [1, 2]


async def test_buffers_are_released_once_and_bytes_counted(store: GatedStore) -> None:
    """Each batch's buffers are released once, in order, on the loop's thread, and `pending_bytes` falls with them."""
    released: list[int] = []
    loop_thread = threading.get_ident()

    def release(seq: int) -> Callable[[], None]:
        def call() -> None:
            assert threading.get_ident() == loop_thread
            released.append(seq)

        return call

    async with Applier(store) as applier:
        async with held(applier, store):
            for seq in range(2, 7):
                applier.submit(make_batch(seq, [seq], size_bytes=1000, release=release(seq)))
            assert applier.pending_bytes >= 5000
            waiting = asyncio.create_task(applier.wait_below(4999))
            await asyncio.sleep(0)
            assert not waiting.done()
        await asyncio.wait_for(waiting, 60)
        await applier.wait_applied(6)
        assert released == [2, 3, 4, 5, 6]
        assert applier.pending_bytes == 0
        await applier.wait_below(0)


async def test_buffers_stay_while_a_reader_looks_at_them(store: GatedStore) -> None:
    """A frame is not released under a reader, even one whose caller has given up."""
    released: list[int] = []
    async with Applier(store) as applier:
        applier.submit(make_batch(1, [1]))
        await applier.wait_applied(1)
        store.read_gate.clear()
        reading = asyncio.create_task(read(applier, [1, 2]))
        assert await asyncio.to_thread(store.is_read_held.wait, 60)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        applier.submit(make_batch(2, [2], release=lambda: released.append(2)))
        await applier.wait_applied(2)
        assert released == []
        assert applier.pending_bytes == 100
        store.read_gate.set()
        await asyncio.wait_for(applier.wait_below(0), 60)
        assert released == [2]


async def test_rows_split_by_columns_are_put_together(tmp_path: Path) -> None:
    """A row written in two column shards is read whole, before and after it is applied, and after a restart."""
    left, right = ColumnShard(offset=0, width=1), ColumnShard(offset=1, width=3)
    deltas = [make_delta([5], 7, shard=shard) for shard in (left, right)]
    expected = np.concatenate([np.frombuffer(delta.columns["weights"], "<f4") for delta in deltas])
    store = open_store(tmp_path / "db")
    async with Applier(store) as applier:
        async with held(applier, store):
            applier.submit(make_batch(2, deltas=(deltas[0],), version=(1, 1)))
            half = await read(applier, [5])
            assert half.weights.tolist() == [[expected[0], 0, 0, 0]]
            applier.submit(make_batch(3, deltas=(deltas[1],), version=(1, 1)))
            assert (await read(applier, [5])).weights.tolist() == [expected.tolist()]
        await applier.wait_applied(3)
        assert (await read(applier, [5])).weights.tolist() == [expected.tolist()]
    store.close()
    store = open_store(tmp_path / "db")
    async with Applier(store) as applier:
        result = await read(applier, [5, 6])
        assert result.weights.tolist() == [expected.tolist(), [0, 0, 0, 0]]
        assert result.presence.tolist() == [1, 0]
    store.close()


@pytest.mark.parametrize(("is_resharded", "num_read"), [(False, 1), (True, 1), (True, 2)])
async def test_a_row_that_is_deleted_amid_its_read_is_not_torn(
    store: GatedStore, is_resharded: bool, num_read: int
) -> None:
    """A read finds a row of several layouts of columns whole or not at all, and never a record that counts no more."""
    left, right = ColumnShard(offset=0, width=1), ColumnShard(offset=1, width=3)
    async with Applier(store) as applier:
        if is_resharded:
            applier.submit(make_batch(1, [5], version=(2, 5)))
        for seq, shard in ((2, left), (3, right)):
            applier.submit(make_batch(seq, deltas=(make_delta([5], 7, shard=shard),), version=(3, 9)))
        await applier.wait_applied(3)
        before = (await read(applier, [5, 6])).weights.tolist()
        store.num_free_reads = num_read
        store.read_gate.clear()
        reading = asyncio.create_task(read(applier, [5, 6]))
        assert await asyncio.to_thread(store.is_read_held.wait, 60)
        applier.submit(make_batch(4, deleted=[5], version=(1, 20)))
        await applier.wait_applied(4)
        store.read_gate.set()
        rows = await asyncio.wait_for(reading, 60)
        assert (rows.presence.tolist(), rows.weights.tolist()) in [([1, 0], before), ([0, 0], [[0.0] * 4] * 2)]


@pytest.mark.parametrize(("file_bytes", "window_bytes"), [(0, 40_000), (SMALL.file_bytes, 4000)])
async def test_readers_never_miss_an_acked_row(tmp_path: Path, file_bytes: int, window_bytes: int) -> None:
    """While windows are applied as fast as they come, no read is older than what was submitted before it."""
    rng = np.random.default_rng(20)
    newest = np.zeros(400, np.int64)
    done, enough = asyncio.Event(), asyncio.Event()
    num_reads = 0

    async def reader(seed: int) -> None:
        nonlocal num_reads
        pick = np.random.default_rng(seed)
        while not done.is_set():
            rows = pick.integers(0, 400, 64)
            before = newest[rows].copy()
            result = await read(applier, rows.tolist())
            assert (result.steps >= before).all()
            assert (result.steps <= newest[rows]).all()
            assert ((result.presence == 1) == (result.steps > 0)).all()
            # A row is of one batch, all of it.
            expected = np.where(result.presence == 1, rows % 1009 * 1000 + result.steps, 0)
            assert result.identities is not None and (result.identities == expected).all()
            num_reads += 1
            if num_reads > 20:
                enough.set()

    config = ApplierConfig(window_bytes=window_bytes, flush_bytes=1 << 16)
    with gated_store(tmp_path / "db", replace(SMALL, file_bytes=file_bytes)) as store:
        async with Applier(store, config=config) as applier, asyncio.TaskGroup() as group:
            for seed in range(4):
                group.create_task(reader(seed))
            for seq in range(1, 200):
                rows = np.unique(rng.integers(0, 400, 20))
                applier.submit(make_batch(seq, rows.tolist()))
                newest[rows] = seq
                if seq % 10 == 0:
                    await applier.wait_below(2000)
            await applier.wait_applied(199)
            await asyncio.wait_for(enough.wait(), 60)  # how many reads come amid the batches is a matter of timing
            done.set()


async def test_work_sees_exactly_the_batches_up_to_its_seq(store: GatedStore) -> None:
    """Batches with a higher seq that were submitted before the work ran are applied only after it."""
    seen = []
    async with Applier(store) as applier:
        for seq in range(1, 31):
            if seq % 10 == 1:
                # One batch is submitted later than the order to stop at it.
                done = applier.run_at(seq, lambda: seen.append(store.applied_seq))
                del done
            applier.submit(make_batch(seq, [seq, 1000]))
        await applier.run_at(30, lambda: seen.append(store.applied_seq))
        await applier.run_at(30, lambda: seen.append(store.applied_seq))
        rows: RowsRead = await applier.read(1, SPEC, np.array([1000], np.int64))
        assert rows.steps.tolist() == [30]
    assert seen == [1, 11, 21, 30, 30]


async def test_a_dropped_table_is_erased_before_later_work(store: GatedStore) -> None:
    """Work that waits for a later batch does not keep an earlier one from dropping a table."""
    seen = list[int]()
    async with Applier(store) as applier:
        applier.submit(make_batch(1, [1]))
        done = applier.run_at(3, lambda: seen.append(len(list(store.scan(key_prefix(1))))))
        applier.submit(make_batch(2, dropped=(1,)))
        applier.submit(make_batch(3))
        await asyncio.wait_for(done, 60)
    assert seen == [0]


async def test_work_that_fails_or_is_never_reached(store: GatedStore) -> None:
    """The error of the work comes out of its future, and applying goes on; work at a batch that never comes fails."""
    async with Applier(store) as applier:
        applier.submit(make_batch(1, [1]))
        with pytest.raises(ZeroDivisionError):
            await applier.run_at(1, lambda: 1 // 0)  # type: ignore[arg-type, return-value]
        applier.submit(make_batch(2, [1]))
        await applier.wait_applied(2)
        never = applier.run_at(5, lambda: None)
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(never, 60)


async def test_a_failed_write_stops_applying_but_not_reading(
    store: GatedStore, caplog: pytest.LogCaptureFixture
) -> None:
    """After a failure nothing is accepted, waiters get the error, and acked rows can still be read."""
    released: list[int] = []
    model, batch = Model(), make_batch(1, [1], release=lambda: released.append(1))
    async with Applier(store) as applier:
        store.failure = StorageError("disk on fire")
        applier.submit(batch)
        model.apply(batch)
        with pytest.raises(StorageError, match="on fire"):
            await asyncio.wait_for(applier.wait_applied(1), 60)
        assert isinstance(applier.failed, StorageError)
        with pytest.raises(StorageError, match="on fire"):
            applier.submit(make_batch(2, [2]))
        with pytest.raises(StorageError, match="on fire"):
            await applier.wait_below(0)
        model.check([1], await read(applier, [1]))
        assert (applier.applied_seq, applier.submitted_seq) == (0, 1)
    assert "the applier has stopped: disk on fire" in caplog.text
    assert "Traceback" not in caplog.text
    assert released == [1]
    assert store.applied_seq == 0


async def test_an_unforeseen_error_is_not_swallowed(store: GatedStore, caplog: pytest.LogCaptureFixture) -> None:
    """A bug in the apply thread is logged with its traceback and ends in `failed`."""
    async with Applier(store) as applier:
        store.failure = ZeroDivisionError("bug")
        applier.submit(make_batch(1, [1]))
        with pytest.raises(HeadraceError, match="bug"):
            await asyncio.wait_for(applier.wait_applied(1), 60)
    assert "ZeroDivisionError" in caplog.text
    assert "Traceback" in caplog.text


async def test_a_failed_flush_stops_applying(store: GatedStore) -> None:
    """The applier fails when applied rows cannot be made durable."""

    def flush() -> None:
        raise StorageError("no space")

    store.flush = flush  # type: ignore[method-assign]
    async with Applier(store, config=ApplierConfig(flush_bytes=1)) as applier:
        applier.submit(make_batch(1, [1]))
        with pytest.raises(StorageError, match="no space"):
            await asyncio.wait_for(applier.wait_applied(99), 60)
        with pytest.raises(StorageError, match="no space"):
            applier.submit(make_batch(2, [1]))


async def test_close_is_idempotent_and_final(store: GatedStore) -> None:
    """After close nothing is taken or read, and waiters are told; an applier that was never entered closes too."""
    await Applier(store).close()
    async with Applier(store) as applier:
        waiting = asyncio.create_task(applier.wait_applied(5))
        applier.submit(make_batch(1, [1]))
        await asyncio.gather(applier.close(), applier.close())
        assert applier.applied_seq == 1
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(waiting, 60)
        with pytest.raises(UnavailableError):
            applier.submit(make_batch(2, [1]))
        with pytest.raises(UnavailableError):
            await read(applier, [1])


async def test_cancelled_close_goes_on(store: GatedStore) -> None:
    """A caller that stops waiting for close does not stop it."""
    async with Applier(store) as applier:
        async with held(applier, store):
            applier.submit(make_batch(2, [1]))
            closing = asyncio.create_task(applier.close())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
        await applier.close()
        assert store.durable_seq == 2


@pytest.mark.parametrize("name", ["window_bytes", "flush_bytes", "flush_interval_s", "num_read_threads"])
def test_bad_settings_are_refused(name: str) -> None:
    """A setting of zero is named."""
    with pytest.raises(ConfigError, match=name):
        ApplierConfig(**{name: 0})  # type: ignore[arg-type]


async def test_store_is_flushed_by_bytes_and_by_time(store: GatedStore) -> None:
    """`durable_seq` follows without anybody asking, so that the log can be trimmed."""
    flushed = store.flushed_event()
    now_s = 0.0
    async with Applier(store, config=ApplierConfig(flush_bytes=1 << 20), clock=lambda: now_s) as applier:
        applier.submit(make_batch(1, [1]))
        await applier.wait_applied(1)
        assert store.durable_seq == 0
        now_s = 31.0
        applier.submit(make_batch(2, [1]))
        await asyncio.wait_for(flushed.wait(), 60)
        assert store.durable_seq in (1, 2)  # before or after the window that woke it up
        flushed.clear()
        applier.submit(make_batch(3, range(20_000)))
        await asyncio.wait_for(flushed.wait(), 60)
        assert store.durable_seq == 3


async def test_idle_store_is_flushed_too(store: GatedStore) -> None:
    """A flush that is due comes without another batch."""
    flushed = store.flushed_event()
    async with Applier(store, config=ApplierConfig(flush_interval_s=0.01)) as applier:
        applier.submit(make_batch(1, [1]))
        await asyncio.wait_for(flushed.wait(), 60)
        assert store.durable_seq == 1


@settings(max_examples=25)
@given(st.data())
def test_crashes_at_any_moment_lose_nothing(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A store found after a crash, given the log from its position on, ends in the same rows as the log itself."""
    update = st.tuples(st.dictionaries(st.integers(0, 5), st.booleans()), VERSIONS)
    then = st.sampled_from(["", "", "wait", "flush", "crash"])
    drawn = data.draw(st.lists(st.tuples(update, then), max_size=12))
    log = [make_update(seq, update, meta={b"seq": b"%d" % seq}) for seq, (update, _) in enumerate(drawn, 1)]
    config = replace(SMALL, file_bytes=data.draw(st.sampled_from([0, SMALL.file_bytes])))
    asyncio.run(_apply_with_crashes(tmp_path_factory.mktemp("crash"), config, log, [then for _, then in drawn]))


async def _apply_with_crashes(folder: Path, config: StoreConfig, log: list[Batch], then: list[str]) -> None:
    store, num_crashes, model = open_store(folder / "0", config), 0, Model()
    at = 0
    while at < len(log) or num_crashes == 0:
        async with Applier(store, config=ApplierConfig(window_bytes=200)) as applier:
            # After a crash the log is replayed from where the store is.
            for batch in log[applier.applied_seq : at]:
                applier.submit(batch)
            model.check(range(7), await read(applier, range(7)))
            crashed = False
            while at < len(log) and not crashed:
                applier.submit(log[at])
                model.apply(log[at])
                what, at = then[at], at + 1
                if what in ("wait", "flush"):
                    await applier.wait_applied(at)
                if what == "flush":
                    store.flush()
                crashed = what == "crash"
                model.check(range(7), await read(applier, range(7)))
            crashed = crashed or at == len(log)
            num_crashes += 1
            await asyncio.to_thread(copy_as_after_crash, store.path, folder / str(num_crashes))
        store.close()
        store = open_store(folder / str(num_crashes), config)
    async with Applier(store) as applier:
        for batch in log[applier.applied_seq :]:
            applier.submit(batch)
        model.check(range(7), await read(applier, range(7)))
        await applier.wait_applied(len(log))
        model.check(range(7), await read(applier, range(7)))
        assert store.read_meta() == ({b"seq": b"%d" % len(log)} if log else {})
    store.close()


@pytest.mark.parametrize("fault", ["lost", "doubled", "another", "again"])
async def test_what_is_not_the_record_is_not_applied(store: GatedStore, fault: str) -> None:
    """Rows that are lost, doubled or others, and a record that comes again, stop the applier with their place."""
    rows = {"lost": [2, 3], "doubled": [2, 3, 4, 4], "another": [2, 3, 5]}.get(fault, [2, 3, 4])
    seq = 1 if fault == "again" else 2
    async with Applier(store) as applier:
        applier.submit(make_batch(1, [1, 2]))
        await applier.wait_applied(1)
        record = RowTally.of([np.array([2, 3, 4])])
        crossing = (
            "log → memtable: record 1 has come after 1" if fault == "again" else "log record 2 → memtable: 3 rows"
        )
        with pytest.raises(InvariantError, match=f"^{crossing}"):
            applier.submit(replace(make_batch(seq, rows), tally=record))
        assert isinstance(applier.failed, InvariantError)
        assert applier.submitted_seq == 1
    assert store.applied_seq == 1
