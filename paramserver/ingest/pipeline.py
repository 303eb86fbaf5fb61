"""Ingest: the path of an update into a shard, from its place in the update log to the ack and the store.

`Sessions` decides whether a batch is next. The batch is appended to the update log, acked once the log has it on disk,
and then applied to RocksDB by the `Applier`. Tables, sessions and applied seq are a function of the log; the store
saves them together, after the rows of the same records. So recovery applies the records that the store lacks, and
applying one twice changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from headrace.paramserver.ingest.ownership import check_owners, claimable
from headrace.paramserver.ingest.shard_state import CLAIM, Offer, ShardState, empty_batch
from headrace.paramserver.log.interface import (
    KIND_BATCH,
    KIND_HELLO,
    Append,
    LogRecord,
    UpdateLog,
    note_header,
)
from headrace.paramserver.log.sessions import MAX_SESSIONS, Session
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.catalog import pack_spec
from headrace.paramserver.store.deltas import Batch, RowDelta, check_rows
from headrace.paramserver.system.text import first_of
from headrace.schemas.errors import (
    CorruptionError,
    GoneError,
    HeadraceError,
    LogFencedError,
    RequestError,
    StorageError,
    UnavailableError,
)
from headrace.schemas.idl import MAX_NAME_BYTES
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.tables import TableSpec
from headrace.schemas.version import MAX_EPOCH, MAX_STEP

__all__ = ["META_MARK", "Ingest", "stored_mark"]

# ON DISK: never rename. In the store's metadata: seq and mark of the record that was applied last, in decimal ASCII.
META_MARK = b"log/mark"

# Batches of more rows, deleted ones included, are checked in a thread: this many unsorted rows block the loop for some
# milliseconds.
_MAX_ROWS_ON_LOOP = 1 << 16


def _find_room() -> None:
    pass


def _take_nothing(size_bytes: int) -> None:
    pass


_Deltas = tuple[RowDelta, ...]
_Release = Callable[[], None]
_Hold = Callable[[], _Release]


class _ClientQueue:
    """The batches of one client between arrival and ack.

    Invariants:
        Places in the log follow arrival: a batch is checked and appended while it holds `turn`, first come, first
        served. There is no await in between, unless a thread checks the rows of a large batch.
        Acks follow places. A batch that fails, or whose request is cancelled, counts as acked once all before it are.
        A resend is acked last: ack the original first, or the client concludes that another writer exists.

    Requests in flight keep the queue alive; the oldest unacked batch always has one. An idle client has no queue.
    """

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self._last_ack: asyncio.Future[None] | None = None  # done once every batch that has a place is acked

    @contextmanager
    def ack_in_order(self) -> Iterator[None]:
        """Count a batch as acked once the block has ended and all batches before it are acked.

        REQUIRES: nothing was awaited since the batch took its place.
        """
        previous = self._last_ack
        ack = self._last_ack = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            if previous is None or previous.done():
                ack.set_result(None)
            else:
                previous.add_done_callback(lambda _: ack.set_result(None))

    async def wait_acked(self) -> None:
        if self._last_ack is not None:
            await asyncio.shield(self._last_ack)


class Ingest:
    """Takes every change of a shard. Owns neither the log nor the applier. Thread: the event loop's.

    Attributes:
        catalog: The registered tables.
        sessions: The writers.
        num_rows_written: Rows accepted since this process began.
        on_accepted: Called right after a record takes its place, before the next one can.
        closed: Why no record takes a place, and nobody is answered, for a while; None while all is well.
        check_room: Called before a record with rows takes a place; raises `OverloadedError` if the disk has no room.
        take_room: Called with the size of a record with rows once it has its place.
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
        """Restore catalog and sessions from `meta`, the store's metadata.

        Acks wait while more than `max_backlog_bytes` are durable and not yet applied. Batches with rows of other shards
        are refused, and with `reject_non_finite` those with NaN or Inf.
        """
        self._state = ShardState(meta)
        self.catalog, self.sessions = self._state.catalog, self._state.sessions
        self._stored_seq = applier.submitted_seq
        self._stored_mark = stored_mark(meta, self._stored_seq)
        self.num_rows_written = 0
        self.on_accepted: Callable[[], None] | None = None
        self.closed: UnavailableError | None = None
        self.check_room: Callable[[], None] = _find_room
        self.take_room: Callable[[int], None] = _take_nothing
        self._log, self._applier = log, applier
        self._max_backlog_bytes, self._reject_non_finite = max_backlog_bytes, reject_non_finite
        self._shard, self._num_shards = shard, num_shards
        self._undurable: deque[Batch] = deque()
        self._watches: list[tuple[int, list[npt.NDArray[np.int64]]]] = []  # of `watch`, by table number
        self._last_append: asyncio.Future[None] | None = None
        self._queues: WeakValueDictionary[tuple[str, str], _ClientQueue] = WeakValueDictionary()  # by (run, client)
        self._progress: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done by the next `_settle`
        self._failure: asyncio.Future[HeadraceError] = asyncio.get_running_loop().create_future()

    async def wait_failed(self) -> HeadraceError:
        """Wait for the error that ends ingest for good, and return it. Cancellation: harmless."""
        return await asyncio.shield(self._failure)

    def check_open(self) -> None:
        """Raise `UnavailableError` if the shard is closed for a while."""
        if self.closed is not None:
            raise UnavailableError(str(self.closed), moves_to=self.closed.moves_to)

    @property
    def offer(self) -> Offer | None:
        """By which the log's owner offers the shard, at the end of what is applied; None without one."""
        return self._state.offer

    @property
    def submitted_seq(self) -> int:
        """Last record that reads see; they see all before it too."""
        return self._applier.submitted_seq

    @property
    def end_seq(self) -> int:
        """Last durable record that followers may have; behind an offer to one of them, its own come."""
        offer, last_seq = self.offer, self._log.last_seq
        return last_seq if offer is None or not offer.is_elsewhere else min(last_seq, offer.seq)

    @property
    def accepted_seq(self) -> int:
        """Last record that has a place in the log, durable or not."""
        return self._undurable[-1].seq if self._undurable else self.submitted_seq

    async def wait_durable(self, seq: int) -> None:
        """Wait until a record is durable, and both reads and followers may see it; forever, once the log has failed.

        Cancellation: harmless.
        """
        while min(self.submitted_seq, self.end_seq) < seq:
            await asyncio.shield(self._progress)

    def go_on_in(self, log: UpdateLog) -> None:
        """Take another log, which goes on behind this one. REQUIRES: all that was accepted is durable."""
        assert not self._undurable
        self._log = log

    async def recover(self) -> int:
        """Apply the log's records that the store lacks; return how many. Cancellation: the next recovery continues.

        Who follows a log that another process writes calls it again and again.

        Raises:
            CorruptionError: Log and store do not belong together, or a record cannot be read.
        """
        applied, last = self.submitted_seq, self._log.last_seq
        if applied > last:
            raise CorruptionError(f"the store has seq {applied} applied but the log ends at {last}: records are lost")
        self._check_history(applied)
        try:
            records = self._log.read(applied + 1, past_cache=True)
        except GoneError as exc:
            raise CorruptionError(
                f"the store has seq {applied} applied but the log begins at seq {self._log.first_seq}: "
                f"records from seq {applied + 1} on are lost"
            ) from exc
        count = 0
        # Read each record while the previous one is applied.
        reading = asyncio.ensure_future(asyncio.to_thread(next, records, None))
        try:
            while (record := await reading) is not None:
                reading = asyncio.ensure_future(asyncio.to_thread(next, records, None))
                if record.seq != self.submitted_seq + 1:
                    raise CorruptionError(
                        f"the log continues at seq {record.seq}, seq {self.submitted_seq + 1} is missing"
                    )
                self._submit_marked(self._state.batch_of_record(record))
                self._tell_progress()
                count += 1
                await self._applier.wait_below(self._max_backlog_bytes)
        finally:
            reading.cancel()
        return count

    def _check_history(self, applied_seq: int) -> None:
        """Raise `CorruptionError` if the store has applied another record than the log holds at that seq.

        Equal seqs alone prove nothing: a log that was made anew, or put back and written to since, has them as well.
        Nothing is compared where the store has no mark of that record, as one that was restored, or the log has removed
        the record.
        """
        stored, present = self._stored_mark, self._log.nonce_of(applied_seq)
        if applied_seq == self._stored_seq and stored is not None and present not in (None, stored):
            raise CorruptionError(
                f"the store has applied another record {applied_seq} than the log holds: they are of different "
                "histories; put back log and store of one moment, or see 'A damaged store' in docs/operations.md"
            )

    def take(self, record: LogRecord, append: Append) -> None:
        """Apply a record of another process's log, which `append` has put into this one, once it is durable.

        Raises:
            CorruptionError: It cannot be applied.
        """
        self._enqueue(self._state.batch_of_record(record), append.durable)

    def pass_housekeeping(self) -> None:
        """Let the store advance over records that the log has written for itself behind the last batch."""
        # What is ours is in `_undurable` until it is submitted.
        if not self._undurable and not self._failure.done() and (last_seq := self.end_seq) > self.submitted_seq:
            self._submit_marked(empty_batch(last_seq))

    def _submit_marked(self, batch: Batch) -> None:
        """Submit a durable batch; the store keeps its record's mark with the rows."""
        # Without a mark, the store's is of an earlier record, and is not compared.
        if (mark := self._log.nonce_of(batch.seq)) is not None:
            batch.meta[META_MARK] = b"%d %d" % (batch.seq, mark)
        self._applier.submit(batch)

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
        takes_over: bool = False,
        fills: Iterable[str] = (),
        after_step: int = -1,
        complete: Iterable[str] = (),
        updated_only: Iterable[str] = (),
        dropped: Sequence[str] = (),
        checks_only: bool = False,
        claims_tables: bool = False,
        ends_run: bool = False,
    ) -> tuple[Session, int]:
        """Register or change tables and open or resume a writer's session; return it with the last durable batch.

        With `checks_only`, change nothing, and raise what the hello would raise; the session is none of the shard's.
        Nor is it for a trainer that only takes an epoch, with `claims_epoch` and no tables: nobody else gets that one,
        and nobody is fenced.

        A trainer sends all rows of the tables `fills` that are new, grow or lack rows: it has once all its ranks have
        ended a step after `after_step`. Of such tables it does not send all rows if they are `updated_only`.
        Another client that makes tables of `fills` says in a later hello that they are `complete`. What a trainer has
        `dropped` are dense tensors that it is about to make anew. A trainer claims its tables; another client does if
        it `claims_tables`. With `ends_run` the client writes no more.

        The session may be ahead of that batch, because another connection of the client may have sent more meanwhile.
        Cancellation: the registration is in the log or it is not; repeating the hello is harmless.

        Raises:
            UnknownTableError: A table was dropped in a later epoch.
            SpecMismatchError: A table is registered with another spec, and does not merely get more rows; nothing is
                changed. A spec that the table had before it grew is accepted, except from a trainer that starts.
            OwnedError: A client claims a table that another run keeps.
            FencedError: A newer epoch holds the run or a table; or with `claims_epoch`, this one is not above all
                others.
            RequestError: A field is out of range, or the epoch is too far above all others.
            UnavailableError: The shard is `closed`.
        """
        self.check_open()
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
            self.sessions.check_free(epoch)
            if world_size and not specs:
                await self._take_epoch(epoch)
                return Session(run, client, epoch, rank, world_size), 0
        if not world_size:  # only a trainer knows how its model uses a table
            specs = self.catalog.with_known_uses(specs)
        is_open, owned = self.sessions.is_open(run, client, epoch, rank, world_size), []
        outgrown = not world_size or (is_open and self.catalog.are_owned(specs, run, epoch))
        new_specs = self.catalog.check(specs, epoch=epoch, knows_outgrown=outgrown)
        named, filling, ended, lacking = {spec.fqn for spec in specs}, {}, [], []
        changed = self.catalog.with_new_rows(new_specs)
        # Also of a table that has not come here: who registers it in an older epoch is late.
        drops = [name for name in dict.fromkeys(dropped) if self.catalog.drops(name, epoch)]
        if dropped and specs:
            raise RequestError(f"client {client!r} of {run!r}: who drops tables names none to write")
        own = partial(
            claimable,
            self.catalog,
            self.sessions,
            is_backfill=not world_size,
            takes_over=takes_over,
            now_us=time.time_ns() // 1000,
        )
        if world_size:
            own(self._check_replaced(drops), run, epoch)
            owned = own(specs, run, epoch)
            filling = self.catalog.fills_of((name for name in fills if name in named), epoch, after_step, changed)
            lacking = self.catalog.left_out_of((name for name in updated_only if name in named), epoch, changed)
        else:  # whoever brings in rows says itself when they are all there
            owned = own(specs, run, epoch) if claims_tables else []
            new = {spec.fqn for spec in new_specs} - {table.spec.fqn for table in self.catalog}
            filling = self.catalog.fills_of((name for name in fills if name in new), epoch, MAX_STEP)
            ended = self.catalog.begun_by((name for name in complete if name in named), epoch)
        if checks_only:
            return Session(run, client, epoch, rank, world_size), 0
        known = self.sessions.find(run, client)
        ends_now = ends_run and not (is_open and known is not None and known.has_ended)
        if new_specs or owned or filling or lacking or ended or drops or ends_now or not is_open:
            header = {"kind": KIND_HELLO, "run": run, "client": client, "rank": rank, "world_size": world_size}
            header |= {"tables": [pack_spec(spec) for spec in new_specs], "owned": owned}
            header |= {"fills": filling} if filling else {}
            header |= {"updated_only": lacking} if lacking else {}
            header |= {"complete": ended} if ended else {}
            header |= {"dropped": drops} if drops else {}
            header |= {"ends_run": True} if ends_now else {}
            append = self._append(epoch, header, [])
            self._enqueue(self._state.batch_of_hello(append.seq, epoch, header), append.durable)
        session = self.sessions.find(run, client)
        assert session is not None
        last_client_seq = session.last_client_seq  # before the wait: a batch that arrives in it may never be durable
        if self._last_append is not None:
            await self._durable(self._last_append, self.accepted_seq)
        self.sessions.fence(run, epoch)  # a newer epoch may have taken over meanwhile
        return session, last_client_seq

    async def _take_epoch(self, epoch: int) -> None:
        append = self._append(epoch, note_header(CLAIM), [])
        self._enqueue(self._state.batch_of_claim(append.seq, epoch), append.durable)
        await self._durable(append.durable, append.seq)

    def _check_replaced(self, dropped: Iterable[str]) -> list[TableSpec]:
        """Return the specs of what a trainer drops; raise RequestError for a table, of which rows would be lost."""
        specs = [table.spec for name in dropped if (table := self.catalog.get(name)) is not None]
        if tables := [spec.fqn for spec in specs if not spec.is_dense]:
            raise RequestError(f"a trainer drops dense tensors alone, not {first_of(tables)}: use headrace table drop")
        return specs

    async def write(self, request: Any, frame: memoryview, hold: _Hold) -> tuple[int, bool]:
        """Take a `SetEmbeddingsRequest`; return (seq, whether it is a duplicate) once it is durable.

        The request's columns are views of `frame`, the message as received. `hold` keeps the frame's buffer until the
        function that it returns is called. Cancellation: the batch takes effect whole or not at all; a resend finds out
        which.

        Raises:
            FencedError, SequenceGapError, OverloadedError: As their names say; nothing is changed.
            RequestError: Or a subclass: the batch is wrong and nothing is changed.
            UnavailableError: The log has failed.
        """
        if not 1 <= request.epoch <= MAX_EPOCH or request.step < 0:
            raise RequestError(f"epoch {request.epoch} or step {request.step} is out of range")
        client = request.run, request.client
        queue = self._queues.get(client)
        if queue is None:
            queue = self._queues[client] = _ClientQueue()
        async with queue.turn:
            is_large = _num_rows(request) > _MAX_ROWS_ON_LOOP
            deltas = await self._check_in_thread(request, hold) if is_large else None
            append = self._place(request, frame, hold, deltas)
        if append is None:
            await queue.wait_acked()
            if self._last_append is not None:
                await self._durable(self._last_append, self.accepted_seq)
            return self.submitted_seq, True
        with queue.ack_in_order():
            await self.wait_acked(append)
        return append.seq, False

    async def wait_acked(self, append: Append) -> None:
        """Wait until a batch is durable and reads see it, and while the store is behind. Cancellation: harmless."""
        await self._durable(append.durable, append.seq)
        # Hold the ack back while the store is behind: this slows the client down.
        await self._applier.wait_below(self._max_backlog_bytes)

    @contextmanager
    def watch(self, table_id: int) -> Iterator[list[npt.NDArray[np.int64]]]:
        """Collect the rows of a table that batches write or delete from now on, in the order of the log."""
        watch = table_id, list[npt.NDArray[np.int64]]()
        self._watches.append(watch)
        try:
            yield watch[1]
        finally:
            self._watches = [other for other in self._watches if other is not watch]

    def place_own(self, request: Any, frame: memoryview) -> Append:
        """Give the next batch of the shard's own client, which has said hello, its place in the log.

        Raises:
            OverloadedError, UnavailableError: As `write`.
        """
        session = self.sessions.find(request.run, request.client)
        assert session is not None
        return self._place_checked(request, frame, lambda: lambda: None, session, self._state.decode(request))

    def _place(self, request: Any, frame: memoryview, hold: _Hold, deltas: _Deltas | None) -> Append | None:
        """Give a batch its place in the log; return None for a duplicate. `deltas`: its rows if already checked."""
        session, is_new = self._accept(request)
        if not is_new:
            return None
        check_owners(self.catalog, (delta.fqn for delta in request.deltas), session)
        if deltas is None:
            deltas = self._check(request)
        elif any(self.catalog.find(delta.spec.fqn).table_id != delta.table_id for delta in deltas):
            raise RequestError("a table of the batch was dropped and made anew while the batch was checked")
        return self._place_checked(request, frame, hold, session, deltas)

    def _place_checked(self, request: Any, frame: memoryview, hold: _Hold, session: Session, deltas: _Deltas) -> Append:
        append = self._append(request.epoch, _batch_header(request), [frame])
        self.num_rows_written += sum(delta.row_ids.size for delta in deltas)
        for table_id, rows in self._watches:
            of_table = [delta for delta in deltas if delta.table_id == table_id]
            # Copies: a frame's buffer may be used again.
            rows += [
                ids.copy() for delta in of_table for ids in (delta.row_ids, delta.deleted_row_ids) if ids is not None
            ]
        batch = self._state.batch_of_request(append.seq, request, session, deltas, len(frame), hold())
        self._enqueue(batch, append.durable)
        return append

    def _accept(self, request: Any) -> tuple[Session, bool]:
        """Return (session, whether the batch is new). Raise if it is neither the client's next nor an earlier one."""
        session, is_new = self.sessions.accept(request.run, request.client, request.epoch, request.client_seq)
        if is_new and request.step < session.step:
            raise RequestError(f"step {request.step} after step {session.step}: a client's steps only rise")
        return session, is_new

    async def _check_in_thread(self, request: Any, hold: _Hold) -> _Deltas | None:
        """Check rows in a thread; None for a duplicate. Cancellation: the thread keeps the frame until it ends."""
        if not self._accept(request)[1]:
            return None
        checking = asyncio.get_running_loop().run_in_executor(None, self._check, request)
        release = hold()
        checking.add_done_callback(lambda _: release())
        return await asyncio.shield(checking)

    def _check(self, request: Any) -> _Deltas:
        """Return the rows of a batch, checked. Thread: any; tables are added and grow meanwhile."""
        deltas = self._state.decode(request, reject_non_finite=self._reject_non_finite)
        for delta in deltas:
            self.check_home(delta.spec, check_rows(delta))
        return deltas

    def check_home(self, spec: TableSpec, row_ids: npt.NDArray[np.int64]) -> None:
        """Raise `RequestError` if a row, int64[n], belongs to another shard. Thread: any."""
        shards = shards_of_rows(spec.seed, row_ids, self._num_shards)
        if (away := np.flatnonzero(shards != self._shard)).size:
            row_id, home = row_ids[away[0]], shards[away[0]]
            raise RequestError(
                f"table {spec.fqn!r}: row {row_id} belongs to shard {home} of {self._num_shards}, this is shard "
                f"{self._shard}"
            )

    async def note(self, what: str, **more: str) -> int:
        """Write a record of `note_header`, also while `closed`; return its seq once it is durable.

        Cancellation: the record is in the log or it is not.

        Raises:
            OverloadedError: The log has no room; nothing was written.
            UnavailableError: The log has failed.
        """
        header = note_header(what, **more)
        append = self._append(1, header, [], is_note=True)
        self._enqueue(self._state.batch_of_note(append.seq, header), append.durable)
        await self._durable(append.durable, append.seq)
        return append.seq

    def _append(self, epoch: int, header: dict[str, Any], body: list[memoryview], *, is_note: bool = False) -> Append:
        if not is_note:
            self.check_open()
        if body:  # what has no rows is short, and may drop tables
            self.check_room()
        try:
            append = self._log.append(epoch=epoch, header=header, body=body)
        except (StorageError, LogFencedError) as exc:
            # The log may have failed while idle; then no record's future has reported it.
            self._fail(exc)
            raise UnavailableError(f"the shard's update log has failed: {_told(exc)}") from exc
        if body:  # a record that the log refuses takes none
            self.take_room(sum(part.nbytes for part in body))
        return append

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
        """Submit what has become durable. Not done in the request's task, which may have been cancelled."""
        error = UnavailableError("the log was closed") if durable.cancelled() else durable.exception()
        if not (error is None or isinstance(error, HeadraceError)):
            raise error
        if error is not None:
            self._fail(error)
        # Not later ones: the log may still be reading their frames.
        while self._undurable and self._undurable[0].seq <= seq:
            self._submit(self._undurable.popleft())
        if not self._failure.done():
            self._tell_progress()

    def _tell_progress(self) -> None:
        progress, self._progress = self._progress, asyncio.get_running_loop().create_future()
        progress.set_result(None)

    def _submit(self, batch: Batch) -> None:
        """Submit a batch, or drop it after an error."""
        if not self._failure.done():
            try:
                self._submit_marked(batch)
                return
            except HeadraceError as exc:  # durable, but no reader will see it
                self._fail(exc)
        batch.release()

    async def _durable(self, durable: asyncio.Future[None], seq: int) -> None:
        """Wait until record `seq`, whose future is `durable`, is on disk and reads see it."""
        # Shielded: the future is the log's, and other requests wait for it too.
        try:
            await asyncio.shield(durable)
        except HeadraceError as exc:
            raise UnavailableError(f"the shard's update log has failed: {_told(exc)}") from exc
        while self.submitted_seq < seq and not self._failure.done():
            await asyncio.wait((self._progress, self._failure), return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():  # an ack promises that reads see the batch
            error = self._failure.result()
            raise UnavailableError(f"the shard has failed: {_told(error)}") from error


def stored_mark(meta: Mapping[bytes, bytes], applied_seq: int) -> int | None:
    """Return the mark of the record that a store has applied last, from its metadata; None if it has none of that one.

    Raises:
        CorruptionError: It is unreadable.
    """
    if (content := meta.get(META_MARK)) is None:
        return None
    try:
        seq, mark = map(int, content.split())
    except ValueError as exc:
        raise CorruptionError(f"the store's mark of its last record is unreadable: {content!r}") from exc
    return mark if seq == applied_seq else None


def _told(error: HeadraceError) -> str:
    """Return what clients are told of a failure, which never names the server's files."""
    return str(error) if isinstance(error, LogFencedError | UnavailableError) else "the server's log says why"


def _batch_header(request: Any) -> dict[str, Any]:
    """Return what restores and inspection need of a record without decoding its body. ON DISK: never rename."""
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
