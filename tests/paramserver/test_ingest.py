"""The path of a batch into a shard, where its order matters; whole shards are in `test_shard.py`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_file_ops import FaultyFileOps

from headrace.paramserver.applier import Applier
from headrace.paramserver.file_update_log import FileUpdateLog
from headrace.paramserver.ingest import Ingest
from headrace.paramserver.store import RowStore
from headrace.paramserver.store_config import StoreConfig
from headrace.schemas.errors import StorageError, UnavailableError
from headrace.schemas.idl import idl


def _batch(client_seq: int) -> Any:
    return idl.SetEmbeddingsRequest(
        **{"run": "run", "client": "rank0", "epoch": 1, "client_seq": client_seq, "step": client_seq, "time_us": 0},
        **{"ends_step": True, "is_exact_cut": True, "deltas": []},
    )


@contextlib.asynccontextmanager
async def _open(path: Path, ops: FaultyFileOps) -> AsyncIterator[tuple[Ingest, Applier, FileUpdateLog]]:
    """Open an ingest of one client, which has said hello."""
    store = RowStore.open(path / "store", config=StoreConfig(block_cache_bytes=1 << 20))
    log = FileUpdateLog.open(path / "log", ops=ops)
    async with Applier(store) as applier:
        ingest = Ingest(log, applier, {}, max_backlog_bytes=1 << 30)
        await ingest.open_session("run", "rank0", 1, 0, 1, [])
        yield ingest, applier, log
        await log.close()
    store.close()


async def _write(ingest: Ingest, client_seq: int, release: Callable[[], None] = lambda: None) -> None:
    await ingest.write(_batch(client_seq), memoryview(b"frame"), lambda: release)


class _Turnstile(threading.Event):
    """A gate that lets as many calls through as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        return self._turns.acquire(timeout=timeout)

    def let(self, num_calls: int) -> None:
        self._turns.release(num_calls)


async def test_a_hello_counts_only_what_is_durable(tmp_path: Path) -> None:
    """A batch that comes, over an older connection, while a hello waits for the disk is not told as durable by it."""
    ops = FaultyFileOps()
    async with _open(tmp_path, ops) as (ingest, _, _):
        ops.reached.clear()
        ops.gate = gate = _Turnstile()
        first = asyncio.create_task(_write(ingest, 1))
        await asyncio.to_thread(ops.reached.wait, 60)
        hello = asyncio.create_task(ingest.open_session("run", "rank0", 1, 0, 1, []))
        late = asyncio.create_task(_write(ingest, 2))
        await asyncio.sleep(0)  # both begin, in this order
        assert ingest.accepted_seq == 3
        gate.let(1)
        await first
        _, last_client_seq = await hello
        assert last_client_seq == 1
        ops.fail("fdatasync", errno.EIO)
        gate.let(9)
        with pytest.raises(UnavailableError):
            await late


async def test_nothing_is_acked_that_a_read_would_not_find(tmp_path: Path) -> None:
    """A batch that is durable but comes to an applier that has failed is not acked, and ends ingest with its reason."""
    ops, released = FaultyFileOps(), []
    async with _open(tmp_path, ops) as (ingest, applier, _):
        ops.reached.clear()
        ops.gate.clear()
        writing = asyncio.create_task(_write(ingest, 1, lambda: released.append(1)))
        await asyncio.to_thread(ops.reached.wait, 60)
        applier._fail(StorageError("no space is left"))
        ops.gate.set()
        with pytest.raises(UnavailableError, match="no space is left"):
            await writing
        with pytest.raises(UnavailableError, match="no space is left"):
            await _write(ingest, 1)  # nor is its resend
        assert isinstance(await ingest.wait_failed(), StorageError)
        assert released == [1]
