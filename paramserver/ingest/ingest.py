"""The path of an update into a shard: its place, the update log, the ack, the store.

A batch is checked and given its place by `Sessions`, appended to the update log, acked once the log has it on disk,
and applied to RocksDB afterwards by the `Applier`. Tables, sessions and applied seq are a function of the log; the
store gets them together, after the rows of the same records. So to recover is to apply the records that the store's
position lacks, and applying one twice changes nothing.

The order of batches is fixed synchronously: between the check of a client seq and the append there is no await. The
rows of a very large batch are checked in a thread before; what its client sends meanwhile waits for its turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from headrace.paramserver.ingest.deltas import check_rows, decode_delta
from headrace.paramserver.ingest.sessions import MAX_NAME_BYTES, MAX_SESSIONS, Session, Sessions
from headrace.paramserver.log.update_log import Append, LogRecord, UpdateLog
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.catalog import Catalog, pack_spec, unpack_spec
from headrace.paramserver.store.pending import Batch, RowDelta
from headrace.schemas.errors import (
    CorruptionError,
    GoneError,
    HeadraceError,
    RequestError,
    StorageError,
    UnavailableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.messages import decode_header, decode_struct
from headrace.schemas.row_records import MAX_EPOCH
from headrace.schemas.tables import TableSpec

__all__ = ["KIND_BATCH", "KIND_HELLO", "Ingest"]

# ON DISK: never renumber. What a log record is: the field `kind` of its header.
KIND_BATCH = 1
KIND_HELLO = 2

# What a delta that waits to be applied takes beside its frame, in Python objects: of very small ones, most of it.
_DELTA_BYTES = 2048
# Rows, deleted ones too, of a batch that is checked on the loop: unsorted, they hold it up for some milliseconds.
_MAX_ROWS_ON_LOOP = 1 << 16


class Ingest:
    """Everything that changes a shard goes through here.

    Thread: the event loop's. Owns neither the log nor the applier.

    Attributes:
        catalog: The registered tables.
        sessions: The writers.
        num_rows_written: Rows accepted since this process began.
        on_accepted: Called right after a record has got its place, before the next one can get its own.
    """

    def __init__(
        self,
        log: UpdateLog,
        applier: Applier,
        meta: dict[bytes, bytes],
        *,
        max_backlog_bytes: int,
        reject_non_finite: bool = False,
        shard: int = 0,
        num_shards: int = 1,
    ) -> None:
        """Take up what the store knows.

        Args:
            log: The shard's log.
            applier: The shard's applier.
            meta: The store's metadata.
            max_backlog_bytes: Acks wait while more than this is durable and not yet applied.
            reject_non_finite: Refuse batches with NaN or Inf.
            shard: Index of this shard: rows of others are refused.
            num_shards: Of the server.

        Raises:
            CorruptionError: The metadata cannot be read.
        """
        self.catalog = Catalog(meta)
        self.sessions = Sessions(meta)
        self.num_rows_written = 0
        self.on_accepted: Callable[[], None] | None = None
        self._log = log
        self._applier = applier
        self._max_backlog_bytes = max_backlog_bytes
        self._reject_non_finite = reject_non_finite
        self._shard, self._num_shards = shard, num_shards
        self._undurable: deque[Batch] = deque()
        self._last_append: asyncio.Future[None] | None = None
        self._acking: dict[tuple[str, str], asyncio.Future[None]] = {}  # by client: done when all its acks are
        # By client, while a thread checks a batch of it, or others wait behind that one.
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._progress: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done by the next `_settle`
        self._failure: asyncio.Future[HeadraceError] = asyncio.get_running_loop().create_future()

    async def wait_failed(self) -> HeadraceError:
        """Return the error that ended ingest for good, once there is one.

        Cancellation: harmless.
        """
        return await asyncio.shield(self._failure)

    @property
    def submitted_seq(self) -> int:
        """Last record that is visible to reads, as all before it are."""
        return self._applier.submitted_seq

    @property
    def accepted_seq(self) -> int:
        """Last record that has got its place in the log, durable or not."""
        return self._undurable[-1].seq if self._undurable else self.submitted_seq

    async def wait_durable(self, seq: int) -> None:
        """Return when the log has a record durably and reads see it; never, once the log has failed.

        Cancellation: harmless.
        """
        while self.submitted_seq < seq:
            await asyncio.shield(self._progress)

    async def recover(self) -> int:
        """Apply the log's records that the store does not have; return how many there were.

        Cancellation: a prefix of them is applied; the next recovery goes on from there.

        Raises:
            CorruptionError: Log and store do not belong together, or a record cannot be read.
        """
        applied, last = self._applier.applied_seq, self._log.last_seq
        if applied > last:
            raise CorruptionError(f"the store has seq {applied} applied but the log ends at {last}: records are lost")
        try:
            records = self._log.read(applied + 1, past_cache=True)
        except GoneError as exc:
            raise CorruptionError(
                f"the store has seq {applied} applied but the log begins at seq {self._log.first_seq}: "
                f"records from seq {applied + 1} on are lost"
            ) from exc
        count = 0
        # One is read while the one before it is taken up.
        reading = asyncio.ensure_future(asyncio.to_thread(next, records, None))
        try:
            while (record := await reading) is not None:
                reading = asyncio.ensure_future(asyncio.to_thread(next, records, None))
                if record.seq != self.submitted_seq + 1:
                    raise CorruptionError(
                        f"the log goes on at seq {record.seq}, seq {self.submitted_seq + 1} is missing"
                    )
                self._applier.submit(self._batch_of_record(record))
                count += 1
                await self._applier.wait_below(self._max_backlog_bytes)
        finally:
            reading.cancel()
        return count

    async def open_session(
        self,
        run: str,
        client: str,
        epoch: int,
        rank: int,
        world_size: int,
        specs: list[TableSpec],
        *,
        claims_epoch: bool = False,
    ) -> tuple[Session, int]:
        """Register tables and open or resume a writer's session; return it and the last batch of it that is durable.

        The session itself may be ahead of that: another connection of the client may have brought more meanwhile.

        Cancellation: the registration is in the log or it is not; saying hello again is harmless.

        Raises:
            SpecMismatchError: A table is registered with another spec; nothing is changed.
            FencedError: A newer epoch holds the run; or with `claims_epoch`, this one is not above all others.
            RequestError: A field is out of range, or the epoch is too far above all others.
        """
        if max(len(run.encode()), len(client.encode())) > MAX_NAME_BYTES:
            raise RequestError(f"run {run[:40]!r}, client {client[:40]!r}: a name is over {MAX_NAME_BYTES} bytes")
        is_place = rank == world_size == 0 or 0 <= rank < world_size <= MAX_SESSIONS
        if not run or not client or epoch < 1 or not is_place:
            raise RequestError(
                f"run {run!r}, client {client!r}, epoch {epoch}, rank {rank} of {world_size}: not a writer"
            )
        self.sessions.fence(run, epoch)
        self.sessions.check_remembered(run, client, epoch, world_size)
        self.sessions.check_epoch(epoch)
        if claims_epoch:
            self.sessions.check_unclaimed(epoch)
        new_specs = self.catalog.check(specs)
        if new_specs or not self.sessions.is_open(run, client, epoch, rank, world_size):
            packed = [pack_spec(spec) for spec in new_specs]
            header = {
                "kind": KIND_HELLO,
                "run": run,
                "client": client,
                "rank": rank,
                "world_size": world_size,
                "tables": packed,
            }
            append = self._append(epoch, header, [])
            self._enqueue(self._hello_batch(append.seq, epoch, header), append.durable)
        session = self.sessions.find(run, client)
        assert session is not None
        last_client_seq = session.last_client_seq  # before the wait: a batch that comes during it may never be durable
        if self._last_append is not None:
            await self._durable(self._last_append)
        self.sessions.fence(run, epoch)  # a newer one may have come meanwhile
        return session, last_client_seq

    async def write(self, request: Any, frame: memoryview, hold: Callable[[], Callable[[], None]]) -> tuple[int, bool]:
        """Take a `SetEmbeddingsRequest`; return (seq, whether it is a duplicate) once it is durable.

        Args:
            request: The decoded request; its columns are views of `frame`.
            frame: The message as it came.
            hold: Keeps the frame's buffer until the function that it returns is called.

        Cancellation: the batch takes effect whole or not at all; a resend tells which.

        Raises:
            FencedError, SequenceGapError, OverloadedError: See there; nothing is changed.
            RequestError: Or one of its kinds: the batch is wrong and nothing is changed.
            UnavailableError: The log has failed.
        """
        is_conditional = request.version_epoch is not None
        version_epoch = request.version_epoch if is_conditional else request.epoch
        if not 1 <= request.epoch <= MAX_EPOCH or not 1 <= version_epoch <= MAX_EPOCH or request.step < 0:
            raise RequestError(f"epoch {request.epoch}, {version_epoch} or step {request.step} is out of range")
        client = request.run, request.client
        turn, is_large = self._turns.get(client), _num_rows(request) > _MAX_ROWS_ON_LOOP
        if turn is None and not is_large:
            append = self._place(request, frame, hold)
        else:
            if turn is None:
                turn = self._turns[client] = asyncio.Lock()
            async with turn:  # it is fair: first come, first served
                deltas = await self._check_aside(request, hold) if is_large else None
                append = self._place(request, frame, hold, deltas)
        acking = self._acking.get(client)
        if append is None:
            # Not before the first one's ack: a client that heard of the duplicate first would think of an impostor.
            if acking is not None:
                await asyncio.shield(acking)
            if self._last_append is not None:
                await self._durable(self._last_append)
            return self.submitted_seq, True
        acked = self._acking[client] = asyncio.get_running_loop().create_future()
        try:
            await self._durable(append.durable)
            # The ack waits while the store is behind: this is how a client learns to send less.
            await self._applier.wait_below(self._max_backlog_bytes)
        finally:
            if acking is None or acking.done():
                self._acked(client, acked)
            else:
                acking.add_done_callback(lambda _: self._acked(client, acked))
        return append.seq, False

    def _place(
        self,
        request: Any,
        frame: memoryview,
        hold: Callable[[], Callable[[], None]],
        deltas: tuple[RowDelta, ...] | None = None,
    ) -> Append | None:
        """Give a batch its place in the log; None for a duplicate. `deltas` are its rows, where they are checked."""
        session, is_new = self._accept(request)
        if not is_new:
            return None
        if deltas is None:
            deltas = self._check(request)
        append = self._append(request.epoch, _batch_header(request), [frame])
        self.num_rows_written += sum(delta.row_ids.size for delta in deltas)
        batch = self._write_batch(append.seq, request, session, deltas, len(frame), hold())
        self._enqueue(batch, append.durable)
        return append

    def _accept(self, request: Any) -> tuple[Session, bool]:
        """Return (session, whether the batch is new), if it is the client's next one, or one before."""
        session, is_new = self.sessions.accept(request.run, request.client, request.epoch, request.client_seq)
        if is_new:
            is_conditional = request.version_epoch is not None
            if is_conditional:
                self.sessions.check_epoch(request.version_epoch)
            if not (session.is_trainer or is_conditional):
                raise RequestError(
                    f"client {request.client!r} of {request.run!r} is no trainer: version_epoch is missing"
                )
            if request.step < session.step and not is_conditional:
                raise RequestError(f"step {request.step} after step {session.step}: a client's steps only rise")
        return session, is_new

    async def _check_aside(self, request: Any, hold: Callable[[], Callable[[], None]]) -> tuple[RowDelta, ...] | None:
        """Check rows in a thread; None for a duplicate. Cancellation: the frame is kept until the thread has ended."""
        if not self._accept(request)[1]:
            return None
        checking = asyncio.get_running_loop().run_in_executor(None, self._check, request)
        release = hold()
        checking.add_done_callback(lambda _: release())
        return await asyncio.shield(checking)

    def _check(self, request: Any) -> tuple[RowDelta, ...]:
        """Return the rows of a batch, checked. Thread: any; tables are only ever added."""
        deltas = self._decode(request, reject_non_finite=self._reject_non_finite)
        for delta in deltas:
            check_rows(delta, shard=self._shard, num_shards=self._num_shards)
        return deltas

    def _acked(self, client: tuple[str, str], acked: asyncio.Future[None]) -> None:
        acked.set_result(None)
        if self._acking.get(client) is acked:  # no later batch is on its way
            del self._acking[client]

    def _decode(self, request: Any, *, reject_non_finite: bool = False) -> tuple[RowDelta, ...]:
        return tuple(decode_delta(self.catalog, delta, reject_non_finite=reject_non_finite) for delta in request.deltas)

    def _write_batch(
        self,
        seq: int,
        request: Any,
        session: Session,
        deltas: tuple[RowDelta, ...],
        size_bytes: int,
        release: Callable[[], None],
    ) -> Batch:
        is_conditional = request.version_epoch is not None
        epoch = request.version_epoch if is_conditional else request.epoch
        meta = self.sessions.raise_version_epoch(epoch) if is_conditional else {}
        for delta in deltas:
            if delta.scalars:
                meta |= self.catalog.set_scalars(delta.spec.fqn, delta.scalars, epoch, request.step)
        self.sessions.advance(
            session,
            client_seq=request.client_seq,
            step=request.step,
            time_us=request.time_us,
            ends_step=request.ends_step and not is_conditional,
            is_exact_cut=request.is_exact_cut,
        )
        return Batch(
            seq=seq,
            epoch=epoch,
            step=request.step,
            time_us=request.time_us,
            deltas=deltas,
            meta=meta | self.sessions.settle(session, seq),
            is_conditional=is_conditional,
            size_bytes=size_bytes + _DELTA_BYTES * len(deltas),
            release=release,
        )

    def _hello_batch(self, seq: int, epoch: int, header: dict[str, Any]) -> Batch:
        meta = self.catalog.add(unpack_spec(packed) for packed in header["tables"])
        session = self.sessions.open(header["run"], header["client"], epoch, header["rank"], header["world_size"])
        return Batch(seq=seq, epoch=epoch, step=0, time_us=0, meta=meta | self.sessions.settle(session, seq))

    def _batch_of_record(self, record: LogRecord) -> Batch:
        """Redo what accepting this record did."""
        kind = record.header.get("kind")
        try:
            if kind == KIND_HELLO:
                return self._hello_batch(record.seq, record.epoch, record.header)
            if kind == KIND_BATCH:
                offset = decode_header(record.body).body_offset
                request = decode_struct(idl.ParameterServer.setEmbeddings_args, record.body, offset).request
                session, is_new = self.sessions.accept(request.run, request.client, request.epoch, request.client_seq)
                if not is_new:
                    raise RequestError(f"client seq {request.client_seq} is in the log twice")
                # By no setting: what was accepted stays so, also where a later start would refuse it.
                deltas = self._decode(request)
                return self._write_batch(record.seq, request, session, deltas, len(record.body), _nothing_to_release)
        except (HeadraceError, ValueError, TypeError, KeyError) as exc:
            raise CorruptionError(f"log record {record.seq} cannot be applied: {exc}") from exc
        raise CorruptionError(f"log record {record.seq} is of kind {kind!r}, which this version does not know")

    def _append(self, epoch: int, header: dict[str, Any], body: list[memoryview]) -> Append:
        try:
            return self._log.append(epoch=epoch, header=header, body=body)
        except StorageError as exc:
            # It may have failed while nothing was on its way: then no record's future has told of it.
            self._fail(exc)
            raise UnavailableError(f"the shard's update log has failed: {exc}") from exc

    def _fail(self, error: HeadraceError) -> None:
        if not self._failure.done():
            self._failure.set_result(error)

    def _enqueue(self, batch: Batch, durable: asyncio.Future[None]) -> None:
        self._undurable.append(batch)
        self._last_append = durable
        durable.add_done_callback(lambda future: self._settle(batch.seq, future))
        if self.on_accepted is not None:
            self.on_accepted()

    def _settle(self, seq: int, durable: asyncio.Future[None]) -> None:
        """Hand over what has become durable; not in the request's task, which may have been cancelled."""
        error = UnavailableError("the log was closed") if durable.cancelled() else durable.exception()
        if not (error is None or isinstance(error, HeadraceError)):
            raise error
        while self._undurable and self._undurable[0].seq <= seq:
            batch = self._undurable[0]
            try:
                if error is None:
                    self._applier.submit(batch)
            except HeadraceError as exc:
                error = exc  # durable, but nothing will show it to readers
            if error is not None:
                batch.release()  # and no later one's frame: the log may still be reading that
            self._undurable.popleft()
        if error is not None:
            self._fail(error)
            return
        progress, self._progress = self._progress, asyncio.get_running_loop().create_future()
        progress.set_result(None)

    async def _durable(self, durable: asyncio.Future[None]) -> None:
        # Shielded: the future is the log's, and other requests wait for it too.
        try:
            await asyncio.shield(durable)
        except HeadraceError as exc:
            raise UnavailableError(f"the shard's update log has failed: {exc}") from exc
        if self._failure.done():  # a read would not find what an ack promises that it does
            raise UnavailableError(f"the shard has failed: {self._failure.result()}")


def _batch_header(request: Any) -> dict[str, Any]:
    """What replay and inspection need of a record without decoding its body."""
    return {
        "kind": KIND_BATCH,
        "run": request.run,
        "client": request.client,
        "client_seq": request.client_seq,
        "step": request.step,
        "time_us": request.time_us,
        "ends_step": request.ends_step,
        "tables": [delta.fqn for delta in request.deltas],
    }


def _num_rows(request: Any) -> int:
    return sum(len(delta.row_ids) + len(delta.deleted_row_ids or b"") for delta in request.deltas) // 8


def _nothing_to_release() -> None:
    pass
