"""Work at one position of the log: exactly the batches up to there are in RocksDB while it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from row_batches import SPEC, make_batch

from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.row_reader import RowsRead
from headrace.paramserver.store.row_store import RowStore
from headrace.paramserver.store.store_config import StoreConfig
from headrace.schemas.errors import UnavailableError
from headrace.schemas.row_keys import key_prefix


def _store(path: Path) -> RowStore:
    return RowStore.open(path, config=StoreConfig(block_cache_bytes=1 << 20))


async def test_work_sees_exactly_the_batches_up_to_its_seq(tmp_path: Path) -> None:
    """Batches that were submitted before it ran, but belong behind it, are applied only afterwards."""
    store = _store(tmp_path / "store")
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
    store.close()
    assert seen == [1, 11, 21, 30, 30]


async def test_failing_work_is_its_callers_affair(tmp_path: Path) -> None:
    """Its error comes out of the future, and applying goes on."""
    store = _store(tmp_path / "store")
    async with Applier(store) as applier:
        applier.submit(make_batch(1, [1]))
        with pytest.raises(ZeroDivisionError):
            await applier.run_at(1, lambda: 1 // 0)  # type: ignore[arg-type, return-value]
        applier.submit(make_batch(2, [1]))
        await applier.wait_applied(2)
    store.close()


async def test_work_that_is_never_reached_fails_at_the_end(tmp_path: Path) -> None:
    """Closing before the batch has come tells who waits."""
    store = _store(tmp_path / "store")
    async with Applier(store) as applier:
        done = applier.run_at(5, lambda: None)
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(done, 60)
    store.close()


async def test_a_checkpoint_is_a_store(tmp_path: Path) -> None:
    """It opens, has the position and rows of its moment, and later writes do not reach it."""
    store = _store(tmp_path / "store")
    async with Applier(store) as applier:
        applier.submit(make_batch(1, [1, 2]))
        await applier.run_at(1, lambda: store.checkpoint(tmp_path / "copy"))
        applier.submit(make_batch(2, [3]))
        await applier.wait_applied(2)
    store.close()
    copy = RowStore.open_read_only(tmp_path / "copy", config=StoreConfig(block_cache_bytes=1 << 20))
    assert copy.applied_seq == 1
    assert len(list(copy.scan(key_prefix(1, SPEC.whole)))) == 2
    copy.close()
