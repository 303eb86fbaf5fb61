"""How applying ends: by a failure, which readers survive, or by a close, which drains."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from gated_store import GatedStore, gated_store, held, read
from row_batches import Model, make_batch

from headrace.paramserver.store.applier import Applier, ApplierConfig
from headrace.schemas.errors import ConfigError, HeadraceError, StorageError, UnavailableError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GatedStore]:
    with gated_store(tmp_path / "db") as store:
        yield store


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
            await asyncio.wait_for(applier.wait_applied(1), 60)
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
            await asyncio.wait_for(applier.wait_applied(1), 60)
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
            await asyncio.wait_for(applier.wait_applied(99), 60)
        with pytest.raises(StorageError, match="no space"):
            applier.submit(make_batch(2, [1]))


async def test_close_is_idempotent_and_final(store: GatedStore) -> None:
    """After close nothing is taken or read; a waiter for more hears of it."""
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
