"""A store that an applier writes to, which can be held up, or fail, at each window."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from row_batches import SPEC, make_batch

from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.pending import Run
from headrace.paramserver.store.row_reader import RowsRead
from headrace.paramserver.store.row_store import RowStore
from headrace.paramserver.store.store_config import StoreConfig
from headrace.schemas.errors import StorageError

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
            assert self.gate.wait(60)
        if self.failure is not None:
            raise self.failure
        self.windows.append((kwargs["applied_seq"], [run.row_ids.size for run in runs]))
        super().write_runs(runs, **kwargs)


def open_store(path: Path) -> GatedStore:
    store = GatedStore.open(path, config=SMALL)
    assert isinstance(store, GatedStore)
    return store


@contextlib.contextmanager
def gated_store(path: Path) -> Iterator[GatedStore]:
    """Lend a store, and close it afterwards, whether or not it has failed."""
    store = open_store(path)
    try:
        yield store
    finally:
        store.gate.set()
        with contextlib.suppress(StorageError):
            store.close()


@contextlib.asynccontextmanager
async def held(applier: Applier, store: GatedStore) -> AsyncIterator[None]:
    """Hold up the store at its next window, which one empty batch makes, until the block is left."""
    store.gate.clear()
    store.is_held.clear()
    applier.submit(make_batch(applier.submitted_seq + 1))
    assert await asyncio.to_thread(store.is_held.wait, 60)
    try:
        yield
    finally:
        store.gate.set()


async def read(applier: Applier, rows: Sequence[int]) -> RowsRead:
    return await applier.read(1, SPEC, np.array(rows, np.int64))
