"""Ingest: order, acks and recovery of batches; `shard/test_service.py` tests whole shards."""

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
from memory_update_log import MemoryUpdateLog
from set_embeddings import delta_of, request_of

from headrace.paramserver.ingest import pipeline as ingest_module
from headrace.paramserver.ingest.pipeline import META_MARK, Ingest
from headrace.paramserver.log import sessions
from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.interface import KIND_BATCH, KIND_HELLO, LogRecord, UpdateLogConfig
from headrace.paramserver.store.applier import Applier, ApplierConfig
from headrace.paramserver.store.catalog import Filling
from headrace.paramserver.store.deltas import Batch
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import (
    CorruptionError,
    FencedError,
    LogFencedError,
    OverloadedError,
    OwnedError,
    RequestError,
    SequenceGapError,
    SpecMismatchError,
    StorageError,
    UnavailableError,
    UnknownTableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, decode_header, decode_struct, encode_message
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="t", num_rows=0, dim=4, dtype=DType.FLOAT32)


def _batch(client_seq: int, *, run: str = "run", epoch: int = 1) -> Any:
    return request_of(run=run, epoch=epoch, client_seq=client_seq)


_Records = list[tuple[dict[str, Any], list[memoryview]]]


@contextlib.asynccontextmanager
async def _files(path: Path, records: _Records = [], ops: Any = None) -> AsyncIterator[tuple[RowStore, FileUpdateLog]]:  # noqa: B006
    """Open a store and a log, and append records to the log."""
    store = RowStore.open(path / "store", config=StoreConfig(block_cache_bytes=1 << 20))
    log = FileUpdateLog.open(path / "log", ops=ops)
    for header, body in records:
        await log.append(epoch=1, header=header, body=body).durable
    try:
        yield store, log
    finally:
        await log.close()
        store.close()


@contextlib.asynccontextmanager
async def _open(path: Path, ops: FaultyFileOps) -> AsyncIterator[tuple[Ingest, Applier]]:
    """Open an ingest of one client, which has said hello."""
    async with _files(path, ops=ops) as (store, log), Applier(store) as applier:
        ingest = Ingest(log, applier, {}, max_backlog_bytes=1 << 30)
        await ingest.open_session("run", "rank0", 1, 0, 1, [SPEC])
        yield ingest, applier
        await log.close()


@contextlib.asynccontextmanager
async def _reopen(path: Path) -> AsyncIterator[tuple[Ingest, RowStore]]:
    """Open an ingest on existing files."""
    async with _files(path) as (store, log), Applier(store) as applier:
        ingest = Ingest(log, applier, store.read_meta(), max_backlog_bytes=1 << 30)
        await ingest.recover()
        await applier.wait_applied(ingest.submitted_seq)
        yield ingest, store
        await log.close()


@contextlib.asynccontextmanager
async def _reopen_after(path: Path, records: _Records) -> AsyncIterator[tuple[Ingest, RowStore]]:
    """Append records to the log, and open an ingest on the files."""
    async with _files(path, records):
        pass
    async with _reopen(path) as opened:
        yield opened


async def _write(
    ingest: Ingest, batch: Any, release: Callable[[], object] = lambda: None, frame: bytes | memoryview = b"frame"
) -> tuple[int, bool]:
    """Write a batch, or the one with a number."""
    request = _batch(batch) if isinstance(batch, int) else batch
    return await ingest.write(request, memoryview(frame), lambda: release)  # type: ignore[arg-type,return-value]


class _Turnstile(threading.Event):
    """A gate that lets a given number of calls through."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        return self._turns.acquire(timeout=timeout)

    def let(self, num_calls: int) -> None:
        self._turns.release(num_calls)


async def test_a_hello_counts_only_what_is_durable(tmp_path: Path) -> None:
    """A hello reports no batch as durable that arrives, over an older connection, while it waits for the disk."""
    ops = FaultyFileOps()
    async with _open(tmp_path, ops) as (ingest, _):
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


@contextlib.asynccontextmanager
async def _in_memory(path: Path, config: UpdateLogConfig) -> AsyncIterator[tuple[Ingest, MemoryUpdateLog]]:
    """Open an ingest of one client on a log in memory."""
    log = MemoryUpdateLog(config=config)
    async with _files(path) as (store, _), Applier(store) as applier:
        ingest = Ingest(log, applier, {}, max_backlog_bytes=1 << 30)
        await ingest.open_session("run", "rank0", 1, 0, 1, [SPEC])
        yield ingest, log
        await log.close()


async def _write_row(ingest: Ingest, client_seq: int, row: int, spec: TableSpec, **fields: Any) -> None:
    """Write a batch of one row, as it comes from the wire."""
    request = request_of(delta_of(spec, [row], 1.0), client_seq=client_seq, step=client_seq, **fields)
    args = idl.ParameterServer.setEmbeddings_args(request=request)
    frame = memoryview(b"".join(map(bytes, encode_message("setEmbeddings", CALL, 0, args))))
    offset = decode_header(frame).body_offset
    await _write(ingest, decode_struct(type(args), frame, offset).request, frame=frame)


async def test_a_trainer_goes_on_beside_the_growth_of_its_table(tmp_path: Path) -> None:
    """An open session may repeat its hello and send rows as before the growth; a trainer that starts may not."""
    few, many = dataclasses.replace(SPEC, num_rows=50), dataclasses.replace(SPEC, num_rows=60)

    async with _files(tmp_path) as (store, log), Applier(store) as applier:
        ingest = Ingest(log, applier, {}, max_backlog_bytes=1 << 30)
        trainer = ("run", "rank0", 1, 0, 1)
        await ingest.open_session(*trainer, [few])
        await _write_row(ingest, 1, 49, few)
        await ingest.open_session("headrace", "grow", 2, 0, 0, [many])
        await ingest.open_session(*trainer, [few])
        await _write_row(ingest, 2, 48, few)
        await _write_row(ingest, 3, 59, many)
        for again in (("run", "rank1", 1, 1, 2), ("run", "rank0", 3, 0, 1)):
            with pytest.raises(SpecMismatchError, match="num_rows 60 ≠ 50"):
                await ingest.open_session(*again, [few])
        assert ingest.catalog.find("t").spec == many
        await ingest.open_session("fill", "log", 1, 0, 0, [few])
        await applier.wait_applied(ingest.submitted_seq)
    async with _reopen(tmp_path) as (again, _):
        table = again.catalog.find("t")
        assert (table.spec, table.earlier) == (many, {few.fingerprint})


async def test_a_hello_that_only_checks_says_what_a_shard_would_refuse_and_changes_nothing(tmp_path: Path) -> None:
    """It fences nobody, and one error has all tables that differ."""
    async with _files(tmp_path) as (store, log), Applier(store) as applier:
        ingest = Ingest(log, applier, {}, max_backlog_bytes=1 << 30)
        other = dataclasses.replace(SPEC, fqn="u")
        await ingest.open_session("run", "rank0", 1, 0, 1, [SPEC, other])

        def present() -> object:
            tables = [(table.spec, table.owner, table.filling) for table in ingest.catalog]
            return log.last_seq, tables, ingest.sessions.packed()

        before = present()
        new, start = dataclasses.replace(SPEC, fqn="new"), ("run", "rank0", 2, 0, 1)
        await ingest.open_session(*start, [SPEC, new], fills=["new"], checks_only=True)
        wider = [dataclasses.replace(spec, dim=9) for spec in (SPEC, other)]
        with pytest.raises(SpecMismatchError, match=r"2 tables .*'t' \(dim \d+ ≠ 9\), 'u' \(dim \d+ ≠ 9\)"):
            await ingest.open_session(*start, [*wider, new], checks_only=True)
        with pytest.raises(OwnedError):
            await ingest.open_session("thief", "rank0", 2, 0, 1, [SPEC], checks_only=True)
        assert present() == before
        await _write_row(ingest, 1, 4, SPEC)
        await applier.wait_applied(ingest.submitted_seq)


async def test_a_table_is_complete_once_all_ranks_have_passed_the_step(tmp_path: Path) -> None:
    """It is filled until each rank's watermark is beyond it, here and in what recovery makes of the log."""
    spec = dataclasses.replace(SPEC, fqn="u", dim=8)
    async with _files(tmp_path) as (store, log), Applier(store) as applier:
        ingest = Ingest(log, applier, {}, max_backlog_bytes=1 << 30)
        ranks = [("run", f"rank{rank}", 1, rank, 2) for rank in range(2)]
        for rank in ranks:
            await ingest.open_session(*rank, [spec], fills=["u", "another"], after_step=2)
        before = ingest.accepted_seq
        await ingest.open_session(*ranks[0], [spec], fills=["u"], after_step=2)
        assert ingest.accepted_seq == before, "a repeated hello is no record"
        seen = []
        for client, client_seq, ends_step in (("rank0", 1, 1), ("rank0", 2, 1), ("rank0", 3, 1), ("rank1", 1, 0)):
            await _write_row(ingest, client_seq, 1, spec, client=client, ends_step=bool(ends_step))
        for client_seq in (2, 3):
            seen.append(ingest.catalog.find("u").filling)
            await _write_row(ingest, client_seq, 1, spec, client="rank1", ends_step=True)
        assert seen == [Filling(1, 2)] * 2
        assert ingest.catalog.find("u").filling is None
        await ingest.open_session("run", "rank0", 2, 0, 1, [spec], fills=["u"])
        assert ingest.catalog.find("u").filling is None, "to fill it again hides it from nobody"
        await applier.wait_applied(ingest.submitted_seq)
    async with _reopen(tmp_path) as (again, _):
        assert again.catalog.find("u").filling is None
    shutil.rmtree(tmp_path / "store")
    async with _reopen(tmp_path) as (again, _):
        assert again.catalog.find("u").filling is None, "the log alone says so too"


async def test_a_stalled_log_refuses_one_batch_and_harms_none(tmp_path: Path) -> None:
    """While nothing becomes durable, acks wait; what has no room is refused without a seq, and its resend is next."""
    async with _in_memory(tmp_path, UpdateLogConfig(max_pending_bytes=1000)) as (ingest, log):
        log.hold()
        room: list[int] = []
        ingest.take_room = room.append
        first = asyncio.create_task(_write(ingest, 1, frame=bytes(800)))
        await asyncio.sleep(0)
        for _ in range(2):
            with pytest.raises(OverloadedError) as caught:
                await _write(ingest, 2, frame=bytes(800))
            assert caught.value.retriable
        assert not first.done() and ingest.accepted_seq == 2 and room == [800]
        log.release()
        assert await first == (2, False)
        assert await _write(ingest, 2, frame=bytes(800)) == (3, False)


async def test_a_fenced_log_ends_ingest_as_fenced(tmp_path: Path) -> None:
    """Clients of a shard whose log was taken over are sent elsewhere, and the shard knows why it ends."""
    async with _in_memory(tmp_path, UpdateLogConfig()) as (ingest, log):
        log.hold()
        waiting = asyncio.create_task(_write(ingest, 1))
        await asyncio.sleep(0)
        log.fail(LogFencedError("another process has the log"))
        for attempt in (waiting, _write(ingest, 1)):
            with pytest.raises(UnavailableError, match="another process has the log"):
                await attempt
        assert isinstance(await ingest.wait_failed(), LogFencedError)


async def test_nothing_is_acked_that_a_read_would_not_find(tmp_path: Path) -> None:
    """A durable batch that meets a failed applier is not acked, and ends ingest with the applier's error."""
    ops, released = FaultyFileOps(), []
    async with _open(tmp_path, ops) as (ingest, applier):
        ops.reached.clear()
        ops.gate.clear()
        writing = asyncio.create_task(_write(ingest, 1, lambda: released.append(1)))
        await asyncio.to_thread(ops.reached.wait, 60)
        applier._fail(StorageError("/var/lib: no space is left"))
        ops.gate.set()
        with pytest.raises(UnavailableError) as failed:
            await writing
        assert isinstance(failed.value.__cause__, StorageError) and "/var/lib" not in str(failed.value)
        with pytest.raises(UnavailableError):
            await _write(ingest, 1)  # nor is its resend
        assert isinstance(await ingest.wait_failed(), StorageError)
        assert released == [1]


async def test_a_failed_applier_frees_no_frame_that_the_log_still_reads(tmp_path: Path) -> None:
    """After the applier has failed, each batch keeps its frame until the disk has it: reuse would damage the log."""
    ops, released = FaultyFileOps(), []
    async with _open(tmp_path, ops) as (ingest, applier):
        ops.reached.clear()
        ops.gate = gate = _Turnstile()
        first = asyncio.create_task(_write(ingest, 1, lambda: released.append(1)))
        await asyncio.to_thread(ops.reached.wait, 60)
        second = asyncio.create_task(_write(ingest, 2, lambda: released.append(2)))
        await asyncio.sleep(0)  # it begins
        applier._fail(StorageError("/var/lib: no space is left"))
        ops.reached.clear()
        gate.let(1)
        with pytest.raises(UnavailableError):
            await first
        await asyncio.to_thread(ops.reached.wait, 60)
        assert released == [1]
        gate.let(9)
        with pytest.raises(UnavailableError):
            await second
        assert released == [1, 2]


def _logged(client_seq: int, **changes: Any) -> list[memoryview]:
    """Return the body of a batch's log record."""
    args = idl.ParameterServer.setEmbeddings_args(request=_batch(client_seq, **changes))
    return [memoryview(b"".join(encode_message("setEmbeddings", CALL, 1, args)))]


_HELLO = {"kind": KIND_HELLO, "run": "run", "client": "rank0", "rank": 0, "world_size": 1, "tables": []}
_BATCH: dict[str, Any] = {"kind": KIND_BATCH}
_TWO_BATCHES: _Records = [(_HELLO, []), (_BATCH, _logged(1)), (_BATCH, _logged(2))]


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([(_BATCH, _logged(1)), (_BATCH, _logged(1))], "log record 3 cannot be applied: .*twice"),
        ([(_BATCH, _logged(2))], "log record 2 cannot be applied: .*expected 1"),
        ([(_BATCH, [memoryview(b"no message")])], "log record 2 cannot be applied"),
        ([({"kind": KIND_HELLO}, [])], "log record 2 cannot be applied"),
        ([({"kind": 77}, [])], "log record 2 is of kind 77"),
    ],
    ids=["twice", "gap", "garbage", "no hello", "unknown kind"],
)
async def test_a_record_that_cannot_be_redone_stops_recovery(tmp_path: Path, records: _Records, reason: str) -> None:
    """A log whose records contradict each other is corrupt: no batch is guessed, none counts twice."""
    async with _files(tmp_path, [(_HELLO, []), *records]) as (store, log), Applier(store) as applier:
        ingest = Ingest(log, applier, {}, max_backlog_bytes=1 << 30)
        with pytest.raises(CorruptionError, match=reason):
            await ingest.recover()


async def test_a_log_that_skips_a_record_stops_recovery(tmp_path: Path) -> None:
    """A log that skips a record, of whatever implementation, is not recovered from."""

    class Gapped:
        last_seq = 3

        def read(self, from_seq: int, **_: Any) -> Iterator[LogRecord]:
            return (record for record in log.read(from_seq) if record.seq != 2)

        def nonce_of(self, seq: int) -> int | None:
            return log.nonce_of(seq)

    async with _files(tmp_path, _TWO_BATCHES) as (store, log), Applier(store) as applier:
        ingest = Ingest(Gapped(), applier, {}, max_backlog_bytes=1 << 30)  # type: ignore[arg-type]
        with pytest.raises(CorruptionError, match="continues at seq 3, seq 2 is missing"):
            await ingest.recover()


async def test_a_store_with_a_log_of_another_history_is_refused(tmp_path: Path) -> None:
    """A log with as many records or more, but another one at the store's position, is refused with the way on."""
    async with _reopen_after(tmp_path, _TWO_BATCHES) as (_, store):
        meta = store.read_meta()
    (tmp_path / "log").rename(tmp_path / "other")
    with pytest.raises(CorruptionError, match=r"another record 3 than the log holds.*A damaged store"):
        async with _reopen_after(tmp_path, [*_TWO_BATCHES, (_HELLO, [])]):
            pass
    async with _files(tmp_path) as (store, _):
        assert store.read_meta() == meta and store.applied_seq == 3


async def test_a_store_goes_on_with_its_log_after_every_start(tmp_path: Path) -> None:
    """The mark follows the applied record over starts, through recovery and through writes."""
    async with _reopen_after(tmp_path, [(_HELLO, [])]) as (ingest, store):
        await ingest.open_session("other", "rank0", 1, 0, 1, [SPEC])
    for _ in range(2):
        async with _files(tmp_path) as (store, log):
            assert store.read_meta()[META_MARK] == b"2 %d" % (log.nonce_of(2) or 0)
        async with _reopen(tmp_path) as (ingest, _):
            assert ingest.submitted_seq == 2


@pytest.mark.parametrize("mark", [b"", b"2 77"], ids=["none", "of an earlier record"])
async def test_a_store_without_the_mark_of_its_last_record_is_not_compared(tmp_path: Path, mark: bytes) -> None:
    """A store that was restored opens with any log that has its position."""
    async with _reopen_after(tmp_path, _TWO_BATCHES):
        pass
    async with _files(tmp_path) as (store, _):
        store.write([], [], meta={META_MARK: mark}, applied_seq=3)
    async with _reopen_after(tmp_path, [(_HELLO, [])]) as (ingest, store):
        assert (ingest.submitted_seq, store.read_meta()[META_MARK][:2]) == (4, b"4 ")


async def test_a_mark_that_is_no_mark_is_damage(tmp_path: Path) -> None:
    """An unreadable mark is damage."""
    async with _files(tmp_path, _TWO_BATCHES) as (store, log), Applier(store) as applier:
        with pytest.raises(CorruptionError, match="unreadable: b'x'"):
            Ingest(log, applier, {META_MARK: b"x"}, max_backlog_bytes=1 << 30)


async def test_recovery_reads_a_record_while_it_takes_up_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk does not wait for the store, nor the store for the disk."""
    is_read = [threading.Event() for _ in range(4)]

    class Watched:
        last_seq = 3

        def read(self, from_seq: int, *, past_cache: bool) -> Iterator[LogRecord]:
            assert past_cache, "records read once do not belong into the page cache"
            for record in log.read(from_seq):
                is_read[record.seq].set()
                yield record

        def nonce_of(self, seq: int) -> int | None:
            return log.nonce_of(seq)

    async def wait_for_the_next(_: int) -> None:
        if ingest.submitted_seq < 3:
            assert await asyncio.to_thread(is_read[ingest.submitted_seq + 1].wait, 60)

    async with _files(tmp_path, _TWO_BATCHES) as (store, log), Applier(store) as applier:
        ingest = Ingest(Watched(), applier, {}, max_backlog_bytes=1 << 30)  # type: ignore[arg-type]
        monkeypatch.setattr(applier, "wait_below", wait_for_the_next)
        assert await ingest.recover() == 3


async def test_recovery_takes_no_more_log_into_memory_than_acks_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a longer log, at most one record more than the largest backlog waits to be applied."""
    num_batches = 20
    records = [(_HELLO, []), *((_BATCH, _logged(client_seq)) for client_seq in range(1, num_batches + 1))]
    record_bytes = len(_logged(num_batches)[0])
    max_bytes, backlogs = 5 * record_bytes, [0]
    # This applier never hurries, so what recovery does not wait for stays in memory.
    config = ApplierConfig(hold_s=3600.0, quiet_s=3600.0)
    async with _files(tmp_path, records) as (store, log), Applier(store, config=config) as applier:
        submit = applier.submit

        def watch(batch: Batch) -> None:
            submit(batch)
            backlogs.append(applier.pending_bytes)

        monkeypatch.setattr(applier, "submit", watch)
        ingest = Ingest(log, applier, {}, max_backlog_bytes=max_bytes)
        assert await ingest.recover() == num_batches + 1
    assert max_bytes < max(backlogs) <= max_bytes + record_bytes


async def test_a_resend_is_not_acked_before_the_batch_and_the_ones_before_it(tmp_path: Path) -> None:
    """While the store is behind, a batch's ack waits, and so do resends of it and of the next one."""
    async with _open(tmp_path, FaultyFileOps()) as (ingest, applier):
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
        second.cancel()  # its client has disconnected, and resends over another connection
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
    """A shard and its store remember a bounded number of writers, also over a restart, and refuse resends of others."""
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    async with _reopen(tmp_path) as (ingest, _):
        for epoch in range(1, 9):
            await ingest.open_session(f"run{epoch}", "rank0", epoch, 0, 1, [])
            of = {"run": f"run{epoch}", "epoch": epoch}
            await _write(ingest, _batch(1, **of), frame=_logged(1, **of)[0])
        before = [dataclasses.replace(session) for session in ingest.sessions]
        assert [session.run for session in before] == ["run6", "run7", "run8"]
        assert not ingest._queues
    if store_is_lost:
        shutil.rmtree(tmp_path / "store")
    async with _reopen(tmp_path) as (ingest, store):
        assert list(ingest.sessions) == before
        with pytest.raises(FencedError, match="start it again"):
            await ingest.open_session("run5", "rank0", 5, 0, 1, [])
        with pytest.raises(RequestError, match="was forgotten since"):
            await _write(ingest, _batch(1, run="run5", epoch=5))
        assert (await ingest.open_session("run6", "rank0", 6, 0, 1, []))[1] == 1
        await ingest.open_session("run5", "rank0", ingest.sessions.highest_epoch + 1, 0, 1, [])
    async with _reopen(tmp_path) as (ingest, store):
        assert [session.run for session in ingest.sessions] == ["run7", "run8", "run5"]
        assert sum(key.startswith(b"session/") for key in store.read_meta()) == 3


async def test_a_writer_that_would_take_too_much_memory_is_refused(tmp_path: Path) -> None:
    """Names have a maximum length, and a run has at most as many ranks as are remembered."""
    good: dict[str, Any] = {"run": "r" * 256, "client": "ü" * 128, "epoch": 1, "rank": 0, "world_size": 16_384}
    async with _reopen(tmp_path) as (ingest, _):
        for wrong in ({"run": "r" * 257}, {"client": "ü" * 129}, {"world_size": 16_385}):
            with pytest.raises(RequestError, match=r"over 256 bytes|of 16385: not a writer"):
                await ingest.open_session(**{**good, **wrong}, specs=[])
        assert ingest.accepted_seq == 0
        await ingest.open_session(**good, specs=[])


def _deleting(client_seq: int, *row_ids: int) -> Any:
    batch = _batch(client_seq)
    batch.deltas = [delta_of(SPEC, [], 0.0, deleted_row_ids=np.array(row_ids, "<i8").tobytes())]
    return batch


class _Checks:
    """Replaces the check of rows: refuses large batches on the loop's thread, and delays them in any other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()
        self._loop_thread, self._check = threading.current_thread(), ingest_module.check_rows
        monkeypatch.setattr(ingest_module, "_MAX_ROWS_ON_LOOP", 2, raising=False)
        monkeypatch.setattr(ingest_module, "check_rows", self)

    def __call__(self, delta: Any) -> Any:
        is_large = delta.deleted_row_ids.size > 2
        assert is_large == (threading.current_thread() is not self._loop_thread)
        if is_large:
            self.begun.release()
            assert self.may_end.wait(60)
        return self._check(delta)


async def test_a_large_batch_holds_up_its_own_client_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a thread checks many rows, others write, and later batches of the same client keep their order."""
    checks = _Checks(monkeypatch)
    async with _open(tmp_path, FaultyFileOps()) as (ingest, _):
        await ingest.open_session("other", "rank0", 2, 0, 1, [])

        batches = [_deleting(1, 3, 2, 1), _deleting(2, 1), _deleting(3, 6, 5, 4), 4, 1]
        writing = [asyncio.create_task(_write(ingest, batch)) for batch in batches]
        await asyncio.to_thread(checks.begun.acquire, timeout=60)
        own_seq = ingest.accepted_seq
        assert await _write(ingest, _batch(1, run="other", epoch=2)) == (own_seq + 1, False)
        assert ingest.accepted_seq == own_seq + 1 and not any(task.done() for task in writing)
        late = asyncio.create_task(_write(ingest, 5))
        checks.may_end.set()
        answers = await asyncio.wait_for(asyncio.gather(*writing, late), 60)
        assert [seq for seq, is_duplicate in answers if not is_duplicate] == list(range(own_seq + 2, own_seq + 7))
        assert [is_duplicate for _, is_duplicate in answers] == [False] * 4 + [True, False]
        assert not ingest._queues


async def test_what_was_begun_before_a_drop_does_not_follow_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that a thread has checked, and a hello of an earlier epoch, are refused; the log stays readable."""
    checks = _Checks(monkeypatch)
    async with _open(tmp_path, FaultyFileOps()) as (ingest, applier):
        writing = asyncio.create_task(_write(ingest, _deleting(1, 3, 2, 1)))
        await asyncio.to_thread(checks.begun.acquire, timeout=60)
        await ingest.open_session("headrace-tables", "admin", 2, 0, 0, [], dropped=["t", "absent"])
        checks.may_end.set()
        with pytest.raises(UnknownTableError, match="'t' was dropped in epoch 2"):
            await writing
        with pytest.raises(UnknownTableError, match="was dropped"):
            await ingest.open_session("run", "rank0", 1, 0, 1, [SPEC])
        with pytest.raises(RequestError, match="names none to write"):
            await ingest.open_session("x", "x", 3, 0, 1, [SPEC], dropped=["t"])
        await ingest.open_session("run", "rank0", 3, 0, 1, [SPEC])
        with pytest.raises(RequestError, match="a trainer drops dense tensors alone, not t"):
            await ingest.open_session("run", "rank0", 3, 0, 1, [], dropped=["t"])
        await applier.wait_applied(ingest.submitted_seq)
    async with _reopen(tmp_path) as (ingest, _):
        assert ingest.catalog.dropped == [1, 2], "a table that has not come here is dropped all the same"
        assert ingest.catalog.find("t").table_id == 3


async def test_a_large_batch_that_is_wrong_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A duplicate row is found in the thread, a gap without one; the client continues at the same batch."""
    checks = _Checks(monkeypatch)
    checks.may_end.set()
    async with _open(tmp_path, FaultyFileOps()) as (ingest, _):
        place = ingest.accepted_seq
        for batch, error in ((_deleting(1, 2, 1, 2), RequestError), (_deleting(2, 3, 2, 1), SequenceGapError)):
            with pytest.raises(error):
                await _write(ingest, batch)
        assert (ingest.accepted_seq, checks.begun._value) == (place, 1)  # type: ignore[attr-defined]
        assert await _write(ingest, _deleting(1, 3, 2, 1)) == (place + 1, False)


async def test_a_frame_is_kept_while_a_thread_checks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled request leaves its buffer to the thread that reads it, and no record in the log."""
    checks = _Checks(monkeypatch)
    released = asyncio.Event()
    async with _open(tmp_path, FaultyFileOps()) as (ingest, _):
        place = ingest.accepted_seq
        writing = asyncio.create_task(_write(ingest, _deleting(1, 3, 2, 1), released.set))
        await asyncio.to_thread(checks.begun.acquire, timeout=60)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert not released.is_set()
        checks.may_end.set()
        await asyncio.wait_for(released.wait(), 60)
        assert ingest.accepted_seq == place
