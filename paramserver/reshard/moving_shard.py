"""A shard as its moves see it: their records in its log, its log cut to them, and its rows."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from headrace.paramserver.ingest.partitions import ShardPartitions
from headrace.paramserver.ingest.pipeline import Ingest
from headrace.paramserver.log.interface import UpdateLog
from headrace.paramserver.log.leases import LogLeases
from headrace.paramserver.reshard.partition_contents import CopiedChunk, PartitionContents, PartitionCopy
from headrace.paramserver.reshard.record_cutter import CutRecord, RecordCutter, cut_tail
from headrace.paramserver.reshard.remote_source import RemoteCopy
from headrace.paramserver.reshard.source_moves import Copied, FollowedRecord, Tail
from headrace.paramserver.store.copy_chunks import CopyRun, decode_runs, encode_runs, grouped, renumbered
from headrace.paramserver.store.shared_state import catalog_of_shared_state, pack_shared_state
from headrace.paramserver.system.log_lines import fact
from headrace.schemas.errors import GoneError, OverloadedError, RequestError, UnavailableError
from headrace.schemas.move_records import SHARED_STATE, ImportRecord, LoadRecord, Move, MoveRecord, MoveStep, Position

__all__ = ["MovingShard", "OpenCopy"]

_log = logging.getLogger(__name__)

_TAIL_BYTES = 8 << 20
_TAIL_WAIT_S = 1.0
# A copy, or the log behind it, that nobody asks for so long is let go; the move then copies anew. Longer than a
# destination takes to scan its store, for a purge or a digest.
_IDLE_S = 3600.0
# Rows in one record. A replicated log takes records of half a MiB.
_LOAD_BYTES = 4 << 20
_ROOM_S = 0.5


@dataclass(slots=True)
class OpenCopy:
    """A copy that a destination reads.

    Attributes:
        position: c.
    """

    copy_id: int
    position: Position
    copy: PartitionCopy
    used_s: float


class MovingShard:
    """A `SourceShard` and a `DestinationShard`. Thread: the loop's.

    Cancellation: a record is in the log or is not; nothing else is left behind.
    """

    def __init__(
        self,
        ingest: Ingest,
        log: UpdateLog,
        contents: PartitionContents,
        *,
        leases: LogLeases,
        wait_archived: Callable[[int, int], Awaitable[None]],
        load_ahead_bytes: int,
        clock_s: Callable[[], float],
    ) -> None:
        """Serve the moves of a shard whose log is recovered.

        `leases` keep the log that destinations follow. `wait_archived` is as `Archiver.wait_archived`; loads get no
        further ahead of it than `load_ahead_bytes`.
        """
        self.aborts: set[str] = set()
        self._ingest, self._log, self._contents = ingest, log, contents
        self._leases, self._wait_archived, self._clock_s = leases, wait_archived, clock_s
        self._copies: dict[str, OpenCopy] = {}  # by move
        self._load_ahead_bytes = load_ahead_bytes
        # One move at a time: what is loaded together is in the order of its keys, and the source keeps each copy.
        self.copying = asyncio.Lock()

    @property
    def partitions(self) -> ShardPartitions:
        """As `SourceShard.partitions`."""
        return self._ingest.partitions

    async def append(self, record: MoveRecord) -> Position:
        """As `SourceShard.append`; returns from a purge once the rows are gone."""
        seq = await self._ingest.write_move(record)
        if record.step is MoveStep.PURGE:
            await self._contents.purge()
        return self._position(seq)

    async def durable(self, seq: int) -> Position:
        """As `SourceShard.durable`."""
        await self._ingest.wait_durable(seq)
        return self._position(seq)

    def _position(self, seq: int) -> Position:
        return Position(seq=seq, mark=self._log.nonce_of(seq))

    # As a source.

    async def copy(self, move: Move) -> Copied:
        """As `SourceShard.copy`; the contents are an `OpenCopy`."""
        copy = await self._contents.copy(move.partitions)
        try:
            position = await self.durable(copy.seq)
            await self._keep_log(move, position.seq)
        except BaseException:
            await copy.close()
            raise
        opened = OpenCopy(secrets.randbits(62) + 1, position, copy, self._clock_s())
        if (before := self._copies.pop(move.move_id, None)) is not None:
            await before.copy.close()
        self._copies[move.move_id] = opened
        return Copied(position=position, contents=opened)

    async def chunk(self, move: Move, copy_id: int, number: int) -> tuple[OpenCopy, CopiedChunk]:
        """Return a copy that goes on, and a chunk of it; the copy ends with its last chunk's successor.

        Raises:
            GoneError: There is no such copy any more.
        """
        opened = self._copies.get(move.move_id)
        if opened is None or opened.copy_id != copy_id:
            raise GoneError(f"move {move.move_id!r} has no copy {copy_id} here")
        opened.used_s = self._clock_s()
        await self._keep_log(move, opened.position.seq)
        return opened, await opened.copy.chunk(number)

    async def close_idle(self, *, idle_s: float = _IDLE_S) -> None:
        """End the copies that nobody has read for some time."""
        for move_id, opened in list(self._copies.items()):
            if self._clock_s() - opened.used_s >= idle_s:
                del self._copies[move_id]
                await opened.copy.close()

    async def follow(self, move: Move, after: Position, up_to_seq: int) -> Tail | None:
        """As `SourceShard.follow`."""
        if not self._has(after):
            return None
        await self._keep_log(move, after.seq)
        if up_to_seq > after.seq and self._log.last_seq <= after.seq:
            try:
                async with asyncio.timeout(_TAIL_WAIT_S):
                    await self._ingest.wait_durable(after.seq + 1)
            except TimeoutError:
                return Tail(records=(), position=after)
        if up_to_seq <= after.seq:
            return Tail(records=(), position=after)
        cutter = RecordCutter(move, self.partitions.known, self._ingest.catalog)
        try:
            found, seq = await asyncio.to_thread(cut_tail, self._log.read, cutter, after.seq, up_to_seq, _TAIL_BYTES)
        except GoneError:
            return None
        records = tuple([await self._followed(each) for each in found])
        return Tail(records=records, position=self._position(seq)) if self._has(after) else None

    async def _followed(self, cut: CutRecord) -> FollowedRecord:
        header, body = cut.header, cut.body
        if cut.is_activation:
            # What came with other partitions only rises, so what is here now is as good.
            header, body = SHARED_STATE, pack_shared_state(self._ingest.catalog, self._ingest.sessions)
            await self.durable(self._ingest.accepted_seq)
        return FollowedRecord(position=self._position(cut.seq), epoch=cut.epoch, header=header, body=body)

    def _has(self, position: Position) -> bool:
        """Return whether the log has this very record, and all behind it."""
        log, seq = self._log, position.seq
        return log.first_seq - 1 <= seq <= log.last_seq and log.nonce_of(seq) == position.mark

    async def _keep_log(self, move: Move, seq: int) -> None:
        if self._leases.renew(f"move {move.move_id}", max(seq, 1), _IDLE_S):
            async with self._leases.removing:  # a removal that runs now was decided without this lease
                pass

    def let_log_go(self, move: Move) -> None:
        """Keep no more log for a move that is over."""
        self._leases.renew(f"move {move.move_id}", 1, 0)

    async def digest(self, move: Move) -> tuple[Position, bytes]:
        """As `SourceShard.digest`."""
        seq, digest = await self._contents.digest(move.partitions)
        return await self.durable(seq), digest

    async def measure(self) -> tuple[float, float]:
        """As `PartitionContents.measure`."""
        return await self._contents.measure()

    async def purge_left(self) -> None:
        """Remove the rows that a purge before the last start has left."""
        await self._contents.purge()

    # As a destination.

    async def import_records(self, move: Move, records: Sequence[FollowedRecord]) -> None:
        """As `DestinationShard.import_records`; waits while the store is behind."""
        await self._ingest.write_imports(
            [
                (
                    ImportRecord(move_id=move.move_id, source=move.source, position=each.position, record=each.header),
                    each.epoch,
                    memoryview(each.body),
                )
                for each in records
            ]
        )

    async def load(self, move: Move, copied: Copied) -> None:
        """As `DestinationShard.load`, of what a `RemoteSource` copies."""
        remote = copied.contents
        if not isinstance(remote, RemoteCopy):
            raise RequestError(f"move {move.move_id!r}: nothing that can be loaded")
        state = FollowedRecord(position=copied.position, epoch=1, header=SHARED_STATE, body=remote.shared_state)
        await self.import_records(move, [state])
        await self._contents.purge()  # what an earlier copy has left
        # Once: a table that is dropped and made anew meanwhile is another one.
        theirs = catalog_of_shared_state(remote.shared_state)
        here = {table.table_id: self._ingest.catalog.table_here(table, theirs) for table in theirs}
        numbers = {number: None if table is None else table.table_id for number, table in here.items()}
        max_bytes, number, ahead_bytes = min(self._log.max_payload_bytes // 2, _LOAD_BYTES), 0, 0
        async for data in remote.chunks():
            for runs in grouped(renumbered(decode_runs(data), numbers), max_bytes):
                number += 1
                ahead_bytes += await self._append_load(move, number, runs)
                if ahead_bytes > self._load_ahead_bytes:
                    await self._wait_archive(move)
                    ahead_bytes = 0
        await self._append_load(move, number + 1, (), is_last=True)

    async def _append_load(self, move: Move, number: int, runs: Sequence[CopyRun], *, is_last: bool = False) -> int:
        """Append a piece of a copy, once the log has room; return its size in bytes."""
        body = memoryview(await asyncio.to_thread(encode_runs, runs))
        record = LoadRecord(move_id=move.move_id, number=number, is_last=is_last)
        while True:
            self._check_wanted(move)
            try:
                await self._ingest.write_imports([(record, 1, body)])
            except OverloadedError as exc:
                await asyncio.sleep(max(exc.retry_after_s, _ROOM_S))
            else:
                return len(body)

    async def _wait_archive(self, move: Move) -> None:
        while True:
            self._check_wanted(move)
            try:
                return await self.wait_safe(move)
            except UnavailableError as exc:
                fact(_log, logging.DEBUG, "a move waits for the archive", move=move.move_id, error=str(exc))

    def _check_wanted(self, move: Move) -> None:
        progress = self.partitions.moves.find_same(move)
        if self.is_aborted(move) and (progress is None or progress.step is MoveStep.COPY):
            raise UnavailableError(f"move {move.move_id!r} is to be given up")

    async def digest_incoming(self, move: Move, like: bytes) -> bytes:
        """As `DestinationShard.digest_incoming`."""
        return (await self._contents.digest(move.partitions, like=like))[1]

    async def wait_safe(self, move: Move) -> None:
        """As `DestinationShard.wait_safe`."""
        progress, seq = self.partitions.moves.find_same(move), self._ingest.accepted_seq
        await self._ingest.wait_durable(seq)
        # Behind the activation, the shard's own rows are what a gap in the archive loses.
        is_copy = progress is not None and progress.step is MoveStep.COPY
        await self._wait_archived(progress.seq if progress is not None and is_copy else seq, seq)

    def is_aborted(self, move: Move) -> bool:
        """As `DestinationShard.is_aborted`."""
        return move.move_id in self.aborts
