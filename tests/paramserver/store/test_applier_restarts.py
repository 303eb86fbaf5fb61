"""What is durable and when, and that restarts and crashes lose nothing of what the log has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from gated_store import GatedStore, gated_store, open_store, read
from hypothesis import given, settings
from hypothesis import strategies as st
from row_batches import Model, copy_as_after_crash, make_batch

from headrace.paramserver.store.applier import Applier, ApplierConfig
from headrace.paramserver.store.pending import Batch


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GatedStore]:
    with gated_store(tmp_path / "db") as store:
        yield store


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
        await asyncio.wait_for(flushed.wait(), 60)
        assert store.durable_seq in (1, 2)  # before or after the window that woke it up
        flushed.clear()
        applier.submit(make_batch(3, range(20_000)))
        await asyncio.wait_for(flushed.wait(), 60)
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
        await asyncio.wait_for(flushed.wait(), 60)
        assert store.durable_seq == 1


@settings(max_examples=25)
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
