"""The applier: acked rows are read at once, get into the store once, and nothing waits for nothing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_batches import SPEC, Model, copy_as_after_crash, make_batch, make_delta

from headrace.paramserver.applier import Applier, ApplierConfig
from headrace.paramserver.pending import Batch, Run
from headrace.paramserver.row_reader import RowsRead
from headrace.paramserver.store import RowStore
from headrace.paramserver.store_config import StoreConfig
from headrace.schemas.errors import ConfigError, HeadraceError, StorageError, UnavailableError
from headrace.schemas.tables import ColumnShard

PLAIN = replace(SPEC, has_identities=False)
SMALL = StoreConfig(block_cache_bytes=8 << 20, write_buffer_bytes=1 << 20)


class GatedStore(RowStore):
    """A store that can be held up, or fail, at each write of a window."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gate = threading.Event()
        self.gate.set()
        self.is_held = threading.Event()
        self.failure: Exception | None = None
        self.windows: list[tuple[int, list[int]]] = []

    def write_runs(self, runs: Sequence[Run], **kwargs: Any) -> None:
        if not self.gate.is_set():
            self.is_held.set()
            assert self.gate.wait(30)
        if self.failure is not None:
            raise self.failure
        self.windows.append((kwargs["applied_seq"], [run.row_ids.size for run in runs]))
        super().write_runs(runs, **kwargs)


def open_store(path: Path) -> GatedStore:
    store = GatedStore.open(path, config=SMALL)
    assert isinstance(store, GatedStore)
    return store


@pytest.fixture
def store(tmp_path: Path) -> Any:
    store = open_store(tmp_path / "db")
    yield store
    store.gate.set()
    with contextlib.suppress(StorageError):
        store.close()


@contextlib.asynccontextmanager
async def held(applier: Applier, store: GatedStore) -> AsyncIterator[None]:
    """Hold up the store at its next window, which one empty batch makes, until the block is left."""
    store.gate.clear()
    store.is_held.clear()
    applier.submit(make_batch(applier.submitted_seq + 1))
    assert await asyncio.to_thread(store.is_held.wait, 30)
    try:
        yield
    finally:
        store.gate.set()


async def wait_until(is_done: Callable[[], bool]) -> None:
    """Let the loop turn until something is so."""
    async with asyncio.timeout(30):
        while not is_done():  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(0.001)


async def read(applier: Applier, rows: Sequence[int]) -> RowsRead:
    return await applier.read(1, SPEC, np.array(rows, np.int64))


async def test_rows_are_read_before_and_after_they_are_applied(store: GatedStore) -> None:
    """A submitted row is read at once, and the same when RocksDB has it."""
    model, rows = Model(), list(range(12))
    async with Applier(store) as applier:
        async with held(applier, store):
            for batch in (make_batch(2, [1, 2, 3], deleted=[9]), make_batch(3, [2, 9], deleted=[1])):
                applier.submit(batch)
                model.apply(batch)
            assert (applier.applied_seq, applier.submitted_seq) == (0, 3)
            result = await read(applier, rows)
            assert result.seq == 3
            model.check(rows, result)
        await applier.wait_applied(3)
        assert applier.applied_seq == store.applied_seq == 3
        model.check(rows, await read(applier, rows))
        model.check([3, 3, 11, 2], await read(applier, [3, 3, 11, 2]))
        model.check([], await read(applier, []))


async def test_updates_that_wait_are_coalesced(store: GatedStore) -> None:
    """What gathers while a window is written goes out as one window, each row once."""
    async with Applier(store) as applier:
        async with held(applier, store):
            for seq in range(2, 12):
                applier.submit(make_batch(seq, [1, 2, 10 + seq]))
        await applier.wait_applied(11)
        assert store.windows == [(1, []), (11, [12])]
        assert (applier.num_rows_submitted, applier.num_rows_applied) == (30, 12)


async def test_windows_are_bounded(store: GatedStore) -> None:
    """A window takes no more bytes than its setting says, with what coalescing takes, but one batch at least."""
    async with Applier(store, config=ApplierConfig(window_bytes=450)) as applier:
        async with held(applier, store):
            # Each has a row more, whose index is 80 bytes: windows of two batches, one, one, and two.
            for seq, size in enumerate([100, 100, 100, 400, 100, 100], 2):
                applier.submit(make_batch(seq, deltas=(make_delta([seq], seq, spec=PLAIN),), size_bytes=size))
        await applier.wait_applied(7)
    assert [seq for seq, _ in store.windows] == [1, 3, 4, 5, 7]


async def test_batches_of_a_window_are_read_and_written_as_one(store: GatedStore) -> None:
    """What comes while a write goes on is written together after it, and reads are right all along."""
    model, rows = Model(), [1, 2, 3, 4, 9]
    batches = [
        make_batch(2, [1, 2]),
        make_batch(3, [3], deleted=[1], meta={b"a": b"old"}),
        make_batch(4, [1, 4], version=(1, 1), is_conditional=True),
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


async def test_rows_wait_for_others_to_be_written_with(store: GatedStore) -> None:
    """They can be read meanwhile, and are written when there is enough, when it is asked for, or at the close."""

    def batch_of(seq: int, *rows: int) -> Batch:
        ids = sorted(set(rows))  # 80 bytes of index each
        return make_batch(seq, deltas=(make_delta(ids, seq, spec=PLAIN),), size_bytes=180 - 80 * len(ids))

    config = ApplierConfig(window_bytes=540, hold_s=3600.0, quiet_s=3600.0)
    async with Applier(store, config=config) as applier:
        for seq in (1, 2):
            applier.submit(batch_of(seq, 1, seq))
        assert bytes((await applier.read(1, PLAIN, np.array([1]))).presence) == b"\1"
        assert applier.applied_seq == 0
        for seq in (3, 4, 5, 6):
            applier.submit(batch_of(seq, seq))
        # Two windows of three batches of 180 bytes each.
        await wait_until(lambda: applier.applied_seq == 6)
        applier.submit(batch_of(7, 1))
        applier.submit(batch_of(8, 2))
        await applier.wait_applied(7)
        assert [seq for seq, _ in store.windows] == [3, 6, 8]
        applier.submit(batch_of(9, 1))
        await applier.run_at(9, lambda: None)
        applier.submit(batch_of(10, 1))
    assert [seq for seq, _ in store.windows] == [3, 6, 8, 9, 10]


@pytest.mark.parametrize("settings", [{"hold_s": 0.05, "quiet_s": 1e6}, {"hold_s": 1e6, "quiet_s": 0.05}])
async def test_rows_do_not_wait_for_ever(store: GatedStore, settings: dict[str, float]) -> None:
    """They are written when they have waited long enough, or when nothing has come for a while."""
    async with Applier(store, config=ApplierConfig(**settings)) as applier:
        for seq in (1, 2):
            applier.submit(make_batch(seq, [seq]))
            await wait_until(lambda seq=seq: applier.applied_seq == seq)
    assert [seq for seq, _ in store.windows] == [1, 2]


async def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    """Closing drains: rows, metadata and column shards come back."""
    model = Model()
    store = open_store(tmp_path / "db")
    async with Applier(store) as applier:
        for seq in range(1, 20):
            batch = make_batch(seq, range(seq, seq + 5), deleted=[seq + 7], meta={b"m": b"%d" % seq})
            applier.submit(batch)
            model.apply(batch)
    assert store.durable_seq == 19
    store.close()
    store = open_store(tmp_path / "db")
    assert store.read_meta() == {b"m": b"19"}
    async with Applier(store) as applier:
        assert applier.applied_seq == applier.submitted_seq == 19
        model.check(range(30), await read(applier, range(30)))
    store.close()


async def test_buffers_are_released_once_and_bytes_counted(store: GatedStore) -> None:
    """Each batch's buffers are released once, in order, on the loop's thread, and the bytes go down with them."""
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
        await asyncio.wait_for(waiting, 30)
        await applier.wait_applied(6)
        assert released == [2, 3, 4, 5, 6]
        assert applier.pending_bytes == 0
        await applier.wait_below(0)


async def test_buffers_stay_while_a_reader_looks_at_them(store: GatedStore) -> None:
    """A frame is not released under a reader, even one whose caller has given up."""
    released: list[int] = []
    looking, look_on = threading.Event(), threading.Event()
    get = store.get

    def slow_get(keys: list[bytes]) -> list[bytes | None]:
        looking.set()
        assert look_on.wait(30)
        return get(keys)

    async with Applier(store) as applier:
        applier.submit(make_batch(1, [1]))
        await applier.wait_applied(1)
        store.get = slow_get  # type: ignore[method-assign]
        reading = asyncio.create_task(read(applier, [1, 2]))
        assert await asyncio.to_thread(looking.wait, 30)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        applier.submit(make_batch(2, [2], release=lambda: released.append(2)))
        await applier.wait_applied(2)
        assert released == []
        assert applier.pending_bytes == 100
        look_on.set()
        await asyncio.wait_for(applier.wait_below(0), 30)
        assert released == [2]


async def test_older_rows_never_replace_newer_ones_in_conditional_batches(store: GatedStore) -> None:
    """A backfill loses against newer versions, pending or stored, and wins against older ones."""
    model = Model()
    async with Applier(store) as applier:

        async def submit(batch: Batch) -> None:
            applier.submit(batch)
            model.apply(batch)
            model.check(range(8), await read(applier, range(8)))

        await submit(make_batch(1, [1, 2], version=(2, 5)))
        await applier.wait_applied(1)
        async with held(applier, store):
            await submit(make_batch(3, [2, 3], version=(2, 7)))
            await submit(make_batch(4, [1, 2, 3, 4], version=(2, 6), is_conditional=True))
            await submit(make_batch(5, [1], deleted=[2, 5], version=(1, 99), is_conditional=True))
            await submit(make_batch(6, [5], version=(1, 98), is_conditional=True))
            assert model.rows[1][0].seq == 4 and model.rows[2][0].seq == 3 and model.rows[5] == (model.rows[5][0], True)
        await applier.wait_applied(6)
        model.check(range(8), await read(applier, range(8)))


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


async def test_a_failed_write_stops_applying_but_not_reading(
    store: GatedStore, caplog: pytest.LogCaptureFixture
) -> None:
    """After a failure nothing is taken any more, waiters hear of it, and what was acked can still be read."""
    released: list[int] = []
    model, batch = Model(), make_batch(1, [1], release=lambda: released.append(1))
    async with Applier(store) as applier:
        store.failure = StorageError("disk on fire")
        applier.submit(batch)
        model.apply(batch)
        with pytest.raises(StorageError, match="on fire"):
            await asyncio.wait_for(applier.wait_applied(1), 30)
        assert isinstance(applier.failed, StorageError)
        with pytest.raises(StorageError, match="on fire"):
            applier.submit(make_batch(2, [2]))
        with pytest.raises(StorageError, match="on fire"):
            await applier.wait_below(0)
        model.check([1], await read(applier, [1]))
        assert (applier.applied_seq, applier.submitted_seq) == (0, 1)
    assert "nothing is applied any more: disk on fire" in caplog.text
    assert "Traceback" not in caplog.text
    assert released == [1]
    assert store.applied_seq == 0


async def test_an_unforeseen_error_is_not_swallowed(store: GatedStore, caplog: pytest.LogCaptureFixture) -> None:
    """A bug in the apply thread is logged with its traceback and ends in `failed`."""
    async with Applier(store) as applier:
        store.failure = ZeroDivisionError("bug")
        applier.submit(make_batch(1, [1]))
        with pytest.raises(HeadraceError, match="bug"):
            await asyncio.wait_for(applier.wait_applied(1), 30)
    assert "ZeroDivisionError" in caplog.text
    assert "Traceback" in caplog.text


async def test_a_failed_flush_stops_applying(store: GatedStore) -> None:
    """When what was applied cannot be made durable, the applier says so."""

    def flush() -> None:
        raise StorageError("no space")

    store.flush = flush  # type: ignore[method-assign]
    async with Applier(store, config=ApplierConfig(flush_bytes=1)) as applier:
        applier.submit(make_batch(1, [1]))
        with pytest.raises(StorageError, match="no space"):
            await asyncio.wait_for(applier.wait_applied(99), 30)
        with pytest.raises(StorageError, match="no space"):
            applier.submit(make_batch(2, [1]))


async def test_store_is_flushed_by_bytes_and_by_time(store: GatedStore) -> None:
    """`durable_seq` follows without anybody asking, so that the log can be trimmed."""
    flushed = asyncio.Event()
    loop, flush = asyncio.get_running_loop(), store.flush

    def noticed() -> None:
        flush()
        loop.call_soon_threadsafe(flushed.set)

    store.flush = noticed  # type: ignore[method-assign]
    now_s = 0.0
    async with Applier(store, config=ApplierConfig(flush_bytes=1 << 20), clock=lambda: now_s) as applier:
        applier.submit(make_batch(1, [1]))
        await applier.wait_applied(1)
        assert store.durable_seq == 0
        now_s = 31.0
        applier.submit(make_batch(2, [1]))
        await asyncio.wait_for(flushed.wait(), 30)
        assert store.durable_seq in (1, 2)  # before or after the window that woke it up
        flushed.clear()
        applier.submit(make_batch(3, range(20_000)))
        await asyncio.wait_for(flushed.wait(), 30)
        assert store.durable_seq == 3


async def test_idle_store_is_flushed_too(store: GatedStore) -> None:
    """A flush that is due comes without another batch."""
    flushed = asyncio.Event()
    loop, flush = asyncio.get_running_loop(), store.flush

    def noticed() -> None:
        flush()
        loop.call_soon_threadsafe(flushed.set)

    store.flush = noticed  # type: ignore[method-assign]
    async with Applier(store, config=ApplierConfig(flush_interval_s=0.01)) as applier:
        applier.submit(make_batch(1, [1]))
        await asyncio.wait_for(flushed.wait(), 30)
        assert store.durable_seq == 1


async def test_close_is_idempotent_and_final(store: GatedStore) -> None:
    """After close nothing is taken or read; a waiter for more hears of it."""
    async with Applier(store) as applier:
        waiting = asyncio.create_task(applier.wait_applied(5))
        applier.submit(make_batch(1, [1]))
        await asyncio.gather(applier.close(), applier.close())
        assert applier.applied_seq == 1
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(waiting, 30)
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


async def test_close_without_use(store: GatedStore) -> None:
    """An applier that was never entered, or never used, closes."""
    await Applier(store).close()
    async with Applier(store):
        pass


@pytest.mark.parametrize("name", ["window_bytes", "flush_bytes", "flush_interval_s", "num_read_threads"])
def test_bad_settings_are_refused(name: str) -> None:
    """A setting of zero is named."""
    with pytest.raises(ConfigError, match=name):
        ApplierConfig(**{name: 0})  # type: ignore[arg-type]


async def test_readers_never_miss_an_acked_row(store: GatedStore) -> None:
    """While windows are applied as fast as they come, no read is older than what was submitted before it."""
    rng = np.random.default_rng(20)
    newest = np.zeros(400, np.int64)
    done = asyncio.Event()
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

    config = ApplierConfig(window_bytes=4000, flush_bytes=1 << 16)
    async with Applier(store, config=config) as applier, asyncio.TaskGroup() as group:
        for seed in range(4):
            group.create_task(reader(seed))
        for seq in range(1, 400):
            rows = np.unique(rng.integers(0, 400, 20))
            applier.submit(make_batch(seq, rows.tolist()))
            newest[rows] = seq
            if seq % 10 == 0:
                await applier.wait_below(2000)
        await applier.wait_applied(399)
        done.set()
    assert num_reads > 20


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_crashes_at_any_moment_lose_nothing(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A store found after a crash, given the log from its position on, ends in the same rows as the log itself."""
    drawn = data.draw(
        st.lists(
            st.tuples(
                st.dictionaries(st.integers(0, 5), st.booleans()),
                st.booleans(),
                st.tuples(st.integers(1, 2), st.integers(0, 3)),
                st.sampled_from(["", "", "wait", "flush", "crash"]),
            ),
            max_size=12,
        )
    )
    log = [
        make_batch(
            seq,
            [row for row, is_deleted in rows.items() if not is_deleted],
            deleted=[row for row, is_deleted in rows.items() if is_deleted],
            is_conditional=is_conditional,
            version=version,
            meta={b"seq": b"%d" % seq},
        )
        for seq, (rows, is_conditional, version, _) in enumerate(drawn, 1)
    ]
    asyncio.run(_apply_with_crashes(tmp_path_factory.mktemp("crash"), log, [then for *_, then in drawn]))


async def _apply_with_crashes(folder: Path, log: list[Batch], then: list[str]) -> None:
    store, num_crashes, model = open_store(folder / "0"), 0, Model()
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
        store = open_store(folder / str(num_crashes))
    async with Applier(store) as applier:
        for batch in log[applier.applied_seq :]:
            applier.submit(batch)
        model.check(range(7), await read(applier, range(7)))
        await applier.wait_applied(len(log))
        model.check(range(7), await read(applier, range(7)))
        assert store.read_meta() == ({b"seq": b"%d" % len(log)} if log else {})
    store.close()
