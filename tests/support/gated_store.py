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

from headrace.paramserver.store.applier import Applier, ApplierConfig
from headrace.paramserver.store.coalescing import SortedRun
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.row_reader import RowsRead
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import StorageError

SMALL = StoreConfig(block_cache_bytes=8 << 20, write_buffer_bytes=1 << 20)


class GatedStore(RowStore):
    """A store whose writes of windows and reads can be held up, and whose writes can fail."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gate = threading.Event()
        self.gate.set()
        self.is_held = threading.Event()
        self.failure: Exception | None = None
        self.windows: list[tuple[int, list[int]]] = []
        self.read_gate = threading.Event()
        self.read_gate.set()
        self.is_read_held = threading.Event()
        self.max_free_keys = self.num_free_reads = 0
        self.num_keys_read: list[int] = []

    def flushed_event(self) -> asyncio.Event:
        """Return an event that each flush sets from now on."""
        flushed, loop, flush = asyncio.Event(), asyncio.get_running_loop(), self.flush

        def notice() -> None:
            flush()
            loop.call_soon_threadsafe(flushed.set)

        self.flush = notice  # type: ignore[method-assign]
        return flushed

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        """Read, once the gate is open; `num_free_reads` reads, and of at most `max_free_keys` keys, need not wait."""
        self.num_free_reads -= 1
        if not self.read_gate.is_set() and len(keys) > self.max_free_keys and self.num_free_reads < 0:
            self.is_read_held.set()
            assert self.read_gate.wait(60)
        self.num_keys_read.append(len(keys))
        return super().get(keys)

    def write_runs(self, runs: Sequence[SortedRun], **kwargs: Any) -> None:
        if not self.gate.is_set():
            self.is_held.set()
            assert self.gate.wait(60)
        if self.failure is not None:
            raise self.failure
        self.windows.append((kwargs["applied_seq"], [run.row_ids.size for run in runs]))
        super().write_runs(runs, **kwargs)


def open_store(path: Path, config: StoreConfig = SMALL) -> GatedStore:
    store = GatedStore.open(path, config=config)
    assert isinstance(store, GatedStore)
    return store


@contextlib.contextmanager
def gated_store(path: Path, config: StoreConfig = SMALL) -> Iterator[GatedStore]:
    """Lend a store, and close it afterwards, whether or not it has failed."""
    store = open_store(path, config)
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


@contextlib.asynccontextmanager
async def held_reads(path: Path, num_read_threads: int) -> AsyncIterator[tuple[Applier, GatedStore]]:
    """Open an applier with row 3, whose store holds up reads."""
    with gated_store(path) as store:
        async with Applier(store, config=ApplierConfig(num_read_threads=num_read_threads)) as applier:
            applier.submit(make_batch(1, [3]))
            await applier.wait_applied(1)
            store.read_gate.clear()
            yield applier, store
