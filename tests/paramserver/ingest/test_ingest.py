"""The path of a batch into a shard, where its order matters; whole shards are in `test_shard.py`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_file_ops import FaultyFileOps

from headrace.paramserver.ingest import ingest as ingest_module
from headrace.paramserver.ingest import sessions
from headrace.paramserver.ingest.ingest import KIND_BATCH, KIND_HELLO, Ingest
from headrace.paramserver.log.file_update_log import FileUpdateLog
from headrace.paramserver.log.update_log import LogRecord
from headrace.paramserver.store.applier import Applier, ApplierConfig
from headrace.paramserver.store.pending import Batch
from headrace.paramserver.store.row_store import RowStore
from headrace.paramserver.store.store_config import StoreConfig
from headrace.schemas.errors import (
    CorruptionError,
    FencedError,
    RequestError,
    SequenceGapError,
    StorageError,
    UnavailableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, encode_message
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="t", num_rows=0, dim=4, dtype=DType.FLOAT32)


def _batch(client_seq: int, *, run: str = "run", epoch: int = 1) -> Any:
    return idl.SetEmbeddingsRequest(
        **{"run": run, "client": "rank0", "epoch": epoch, "client_seq": client_seq, "step": client_seq, "time_us": 0},
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


@contextlib.asynccontextmanager
async def _reopen(path: Path) -> AsyncIterator[tuple[Ingest, RowStore]]:
    """Open an ingest on what is there."""
    store = RowStore.open(path / "store", config=StoreConfig(block_cache_bytes=1 << 20))
    log = FileUpdateLog.open(path / "log")
    async with Applier(store) as applier:
        ingest = Ingest(log, applier, store.read_meta(), max_backlog_bytes=1 << 30)
        await ingest.recover()
        await applier.wait_applied(ingest.submitted_seq)
        yield ingest, store
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


async def test_a_failed_applier_frees_no_frame_that_the_log_still_reads(tmp_path: Path) -> None:
    """When an applier has failed, each batch keeps its frame until the disk has it: reused, it would damage the log."""
    ops, released = FaultyFileOps(), []
    async with _open(tmp_path, ops) as (ingest, applier, _):
        ops.reached.clear()
        ops.gate = gate = _Turnstile()
        first = asyncio.create_task(_write(ingest, 1, lambda: released.append(1)))
        await asyncio.to_thread(ops.reached.wait, 60)
        second = asyncio.create_task(_write(ingest, 2, lambda: released.append(2)))
        await asyncio.sleep(0)  # it begins
        applier._fail(StorageError("no space is left"))
        ops.reached.clear()
        gate.let(1)
        with pytest.raises(UnavailableError, match="no space is left"):
            await first
        await asyncio.to_thread(ops.reached.wait, 60)
        assert released == [1]
        gate.let(9)
        with pytest.raises(UnavailableError, match="no space is left"):
            await second
        assert released == [1, 2]


def _logged(client_seq: int, **changes: Any) -> list[memoryview]:
    """Return the frame that the log keeps of a batch."""
    args = idl.ParameterServer.setEmbeddings_args(request=_batch(client_seq, **changes))
    return [memoryview(b"".join(encode_message("setEmbeddings", CALL, 1, args)))]


_HELLO = {"kind": KIND_HELLO, "run": "run", "client": "rank0", "rank": 0, "world_size": 1, "tables": []}
_CLAIM: dict[str, Any] = {"kind": KIND_BATCH}


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([(_CLAIM, _logged(1)), (_CLAIM, _logged(1))], "log record 3 cannot be applied: .*twice"),
        ([(_CLAIM, _logged(2))], "log record 2 cannot be applied: .*expected 1"),
        ([(_CLAIM, [memoryview(b"no message")])], "log record 2 cannot be applied"),
        ([({"kind": KIND_HELLO}, [])], "log record 2 cannot be applied"),
        ([({"kind": 77}, [])], "log record 2 is of kind 77"),
    ],
    ids=["twice", "gap", "garbage", "no hello", "unknown kind"],
)
async def test_a_record_that_cannot_be_redone_stops_recovery(
    tmp_path: Path, records: list[tuple[dict[str, Any], list[memoryview]]], reason: str
) -> None:
    """A log whose records contradict each other is corrupt, and told: no batch is guessed, none counts twice."""
    store = RowStore.open(tmp_path / "store", config=StoreConfig(block_cache_bytes=1 << 20))
    log = FileUpdateLog.open(tmp_path / "log")
    for header, body in [(_HELLO, []), *records]:
        await log.append(epoch=1, header=header, body=body).durable
    async with Applier(store) as applier:
        ingest = Ingest(log, applier, {}, max_backlog_bytes=1 << 30)
        with pytest.raises(CorruptionError, match=reason):
            await ingest.recover()
    await log.close()
    store.close()


async def test_a_log_that_skips_a_record_stops_recovery(tmp_path: Path) -> None:
    """A log that leaves a record out, of whatever implementation, is not taken for whole."""
    store = RowStore.open(tmp_path / "store", config=StoreConfig(block_cache_bytes=1 << 20))
    log = FileUpdateLog.open(tmp_path / "log")
    for header, body in [(_HELLO, []), (_CLAIM, _logged(1)), (_CLAIM, _logged(2))]:
        await log.append(epoch=1, header=header, body=body).durable

    class Gapped:
        last_seq = 3

        def read(self, from_seq: int, **_: Any) -> Iterator[LogRecord]:
            return (record for record in log.read(from_seq) if record.seq != 2)

    async with Applier(store) as applier:
        ingest = Ingest(Gapped(), applier, {}, max_backlog_bytes=1 << 30)  # type: ignore[arg-type]
        with pytest.raises(CorruptionError, match="goes on at seq 3, seq 2 is missing"):
            await ingest.recover()
    await log.close()
    store.close()


async def test_recovery_reads_a_record_while_it_takes_up_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk does not wait for the store, nor the store for the disk."""
    store = RowStore.open(tmp_path / "store", config=StoreConfig(block_cache_bytes=1 << 20))
    log, is_read = FileUpdateLog.open(tmp_path / "log"), [threading.Event() for _ in range(4)]
    for header, body in [(_HELLO, []), (_CLAIM, _logged(1)), (_CLAIM, _logged(2))]:
        await log.append(epoch=1, header=header, body=body).durable

    class Watched:
        last_seq = 3

        def read(self, from_seq: int, *, past_cache: bool) -> Iterator[LogRecord]:
            assert past_cache, "what is read once takes nobody's place"
            for record in log.read(from_seq):
                is_read[record.seq].set()
                yield record

    async def wait_for_the_next(_: int) -> None:
        if ingest.submitted_seq < 3:
            assert await asyncio.to_thread(is_read[ingest.submitted_seq + 1].wait, 60)

    async with Applier(store) as applier:
        ingest = Ingest(Watched(), applier, {}, max_backlog_bytes=1 << 30)  # type: ignore[arg-type]
        monkeypatch.setattr(applier, "wait_below", wait_for_the_next)
        assert await ingest.recover() == 3
    await log.close()
    store.close()


async def test_recovery_takes_no_more_log_into_memory_than_acks_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a log that is longer than the largest backlog, one record more than that waits to be applied at the most."""
    store = RowStore.open(tmp_path / "store", config=StoreConfig(block_cache_bytes=1 << 20))
    log, num_batches = FileUpdateLog.open(tmp_path / "log"), 60
    records = [(_HELLO, []), *((_CLAIM, _logged(client_seq)) for client_seq in range(1, num_batches + 1))]
    for header, body in records:
        await log.append(epoch=1, header=header, body=body).durable
    record_bytes = len(_logged(num_batches)[0])
    max_bytes, backlogs = 5 * record_bytes, [0]
    # An applier that nothing hurries: what is not waited for stays in memory.
    async with Applier(store, config=ApplierConfig(hold_s=3600.0, quiet_s=3600.0)) as applier:
        submit = applier.submit

        def watch(batch: Batch) -> None:
            submit(batch)
            backlogs.append(applier.pending_bytes)

        monkeypatch.setattr(applier, "submit", watch)
        ingest = Ingest(log, applier, {}, max_backlog_bytes=max_bytes)
        assert await ingest.recover() == num_batches + 1
    assert max_bytes < max(backlogs) <= max_bytes + record_bytes
    await log.close()
    store.close()


async def test_a_resend_is_not_acked_before_the_batch_and_the_ones_before_it(tmp_path: Path) -> None:
    """While the store is behind, a batch's ack waits; a resend of it, or of the one after it, waits for the same."""
    async with _open(tmp_path, FaultyFileOps()) as (ingest, applier, _):
        behind = asyncio.Event()

        async def wait_below(max_bytes: int) -> None:
            await behind.wait()

        applier.wait_below = wait_below  # type: ignore[method-assign]
        first = asyncio.create_task(_write(ingest, 1))
        await asyncio.sleep(0)  # it begins
        await ingest.wait_durable(2)
        second = asyncio.create_task(_write(ingest, 2))
        await ingest.wait_durable(3)
        resends = [asyncio.create_task(_write(ingest, client_seq)) for client_seq in (1, 2)]
        second.cancel()  # its client has gone, and asks over another connection
        with contextlib.suppress(asyncio.CancelledError):
            await second
        for _ in range(5):
            await asyncio.sleep(0)
        assert not any(task.done() for task in (first, *resends))
        behind.set()
        await asyncio.gather(first, *resends)


@pytest.mark.parametrize("store_is_lost", [False, True], ids=["clean stop", "store lost"])
async def test_writers_without_end_are_no_memory_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store_is_lost: bool
) -> None:
    """A shard and its store remember so many writers, the same after a restart, and take nothing of others again."""
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    async with _reopen(tmp_path) as (ingest, _):
        for epoch in range(1, 9):
            await ingest.open_session(f"run{epoch}", "rank0", epoch, 0, 1, [])
            of = {"run": f"run{epoch}", "epoch": epoch}
            await ingest.write(_batch(1, **of), *_logged(1, **of), lambda: lambda: None)
        before = [dataclasses.replace(session) for session in ingest.sessions]
        assert [session.run for session in before] == ["run6", "run7", "run8"]
        assert not ingest._acking
    if store_is_lost:
        shutil.rmtree(tmp_path / "store")
    async with _reopen(tmp_path) as (ingest, store):
        assert list(ingest.sessions) == before
        with pytest.raises(FencedError, match="start it again"):
            await ingest.open_session("run5", "rank0", 5, 0, 1, [])
        with pytest.raises(RequestError, match="was forgotten since"):
            await ingest.write(_batch(1, run="run5", epoch=5), memoryview(b"frame"), lambda: lambda: None)
        assert (await ingest.open_session("run6", "rank0", 6, 0, 1, []))[1] == 1
        await ingest.open_session("run5", "rank0", ingest.sessions.highest_epoch + 1, 0, 1, [], claims_epoch=True)
    async with _reopen(tmp_path) as (ingest, store):
        assert [session.run for session in ingest.sessions] == ["run7", "run8", "run5"]
        assert sum(key.startswith(b"session/") for key in store.read_meta()) == 3


@pytest.mark.parametrize(
    "wrong", [{"run": "r" * 257}, {"client": "ü" * 129}, {"world_size": 16_385}], ids=["run", "client", "ranks"]
)
async def test_a_writer_that_would_take_too_much_memory_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Names have a longest length, and a run has no more ranks than are remembered; what is at the bound is taken."""
    good: dict[str, Any] = {"run": "r" * 256, "client": "ü" * 128, "epoch": 1, "rank": 0, "world_size": 16_384}
    async with _reopen(tmp_path) as (ingest, _):
        with pytest.raises(RequestError, match=r"over 256 bytes|of 16385: not a writer"):
            await ingest.open_session(**{**good, **wrong}, specs=[])
        assert ingest.accepted_seq == 0
        await ingest.open_session(**good, specs=[])


def _deleting(client_seq: int, *row_ids: int) -> Any:
    batch = _batch(client_seq)
    columns = {"row_ids": b"", "weights": b"", "states": [], "deleted_row_ids": np.array(row_ids, "<i8").tobytes()}
    columns |= {"fingerprint": SPEC.fingerprint, "column_offset": 0, "width": SPEC.dim}
    batch.deltas = [idl.TableDelta(fqn=SPEC.fqn, **columns)]
    return batch


class _Checks:
    """Stands before the check of each batch's rows: refuses it on the loop's thread, and holds it up in any other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()
        self._loop_thread, self._check = threading.current_thread(), ingest_module.check_rows
        monkeypatch.setattr(ingest_module, "_MAX_ROWS_ON_LOOP", 2, raising=False)
        monkeypatch.setattr(ingest_module, "check_rows", self)

    def __call__(self, delta: Any, **place: int) -> None:
        is_large = delta.deleted_row_ids.size > 2
        assert is_large == (threading.current_thread() is not self._loop_thread)
        if is_large:
            self.begun.release()
            assert self.may_end.wait(60)
        self._check(delta, **place)


async def test_a_large_batch_holds_up_its_own_client_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows are checked in a thread: others write meanwhile, and what the client sends behind keeps its order."""
    checks, released = _Checks(monkeypatch), []
    async with _open(tmp_path, FaultyFileOps()) as (ingest, _, _):
        await ingest.open_session("run", "rank0", 1, 0, 1, [SPEC])
        await ingest.open_session("other", "rank0", 2, 0, 1, [])

        def write(batch: Any) -> asyncio.Task[tuple[int, bool]]:
            release = lambda: released.append(batch.client_seq)  # noqa: E731
            return asyncio.create_task(ingest.write(batch, memoryview(b"frame"), lambda: release))

        batches = [_deleting(1, 3, 2, 1), _deleting(2, 1), _deleting(3, 6, 5, 4), _batch(4), _batch(1)]
        writing = [write(batch) for batch in batches]
        await asyncio.to_thread(checks.begun.acquire, timeout=60)
        own_seq = ingest.accepted_seq
        assert await write(_batch(1, run="other", epoch=2)) == (own_seq + 1, False)
        assert ingest.accepted_seq == own_seq + 1 and not any(task.done() for task in writing)
        late = write(_batch(5))
        checks.may_end.set()
        answers = await asyncio.wait_for(asyncio.gather(*writing, late), 60)
        assert [seq for seq, is_duplicate in answers if not is_duplicate] == list(range(own_seq + 2, own_seq + 7))
        assert [is_duplicate for _, is_duplicate in answers] == [False] * 4 + [True, False]
        assert not ingest._turns


async def test_a_large_batch_that_is_wrong_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row given twice is found in the thread, a gap without one; the client goes on at the same place."""
    checks = _Checks(monkeypatch)
    checks.may_end.set()
    async with _open(tmp_path, FaultyFileOps()) as (ingest, _, _):
        await ingest.open_session("run", "rank0", 1, 0, 1, [SPEC])
        place = ingest.accepted_seq
        for batch, error in ((_deleting(1, 2, 1, 2), RequestError), (_deleting(2, 3, 2, 1), SequenceGapError)):
            with pytest.raises(error):
                await ingest.write(batch, memoryview(b"frame"), lambda: lambda: None)
        assert (ingest.accepted_seq, checks.begun._value) == (place, 1)  # type: ignore[attr-defined]
        assert await ingest.write(_deleting(1, 3, 2, 1), memoryview(b"frame"), lambda: lambda: None) == (
            place + 1,
            False,
        )


async def test_a_frame_is_kept_while_a_thread_checks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is given up leaves its buffer to the thread that reads it, and no place in the log."""
    checks = _Checks(monkeypatch)
    released = asyncio.Event()
    async with _open(tmp_path, FaultyFileOps()) as (ingest, _, _):
        await ingest.open_session("run", "rank0", 1, 0, 1, [SPEC])
        place = ingest.accepted_seq
        writing = asyncio.create_task(ingest.write(_deleting(1, 3, 2, 1), memoryview(b"frame"), lambda: released.set))
        await asyncio.to_thread(checks.begun.acquire, timeout=60)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert not released.is_set()
        checks.may_end.set()
        await asyncio.wait_for(released.wait(), 60)
        assert ingest.accepted_seq == place
