"""The applier: acked rows are read at once, get into the store once, and nothing waits for nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gated_store import GatedStore, gated_store, held, open_store, read
from row_batches import SPEC, Model, make_batch, make_delta

from headrace.paramserver.store.applier import Applier, ApplierConfig
from headrace.paramserver.store.pending import Batch
from headrace.schemas.tables import ColumnShard

PLAIN = replace(SPEC, has_identities=False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GatedStore]:
    with gated_store(tmp_path / "db") as store:
        yield store


async def wait_until(is_done: Callable[[], bool]) -> None:
    """Let the loop turn until something is so."""
    async with asyncio.timeout(60):
        while not is_done():  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(0.001)


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
        await asyncio.wait_for(waiting, 60)
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
        assert look_on.wait(60)
        return get(keys)

    async with Applier(store) as applier:
        applier.submit(make_batch(1, [1]))
        await applier.wait_applied(1)
        store.get = slow_get  # type: ignore[method-assign]
        reading = asyncio.create_task(read(applier, [1, 2]))
        assert await asyncio.to_thread(looking.wait, 60)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        applier.submit(make_batch(2, [2], release=lambda: released.append(2)))
        await applier.wait_applied(2)
        assert released == []
        assert applier.pending_bytes == 100
        look_on.set()
        await asyncio.wait_for(applier.wait_below(0), 60)
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


async def test_readers_never_miss_an_acked_row(store: GatedStore) -> None:
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
        await asyncio.wait_for(enough.wait(), 60)  # how many reads come amid the batches is a matter of timing
        done.set()
