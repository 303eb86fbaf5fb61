"""Send the rows of a backfill's tables to a running server.

A backfill owns its tables while it writes, as a trainer does, in an epoch above all known ones. Its run is named after
what it sends, and its batches are numbered. The same source makes the same batches, so a killed backfill continues, in
its epoch and where the server's hello says, without state of its own; unless another run has had a table since.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack

from headrace.paramserver.ingest.ownership import NOT_FOR_BACKFILLS
from headrace.paramserver.reading.link import retry
from headrace.paramserver.rpc.resolver import Resolver
from headrace.paramserver.rpc.shard_places import ShardPlaces
from headrace.paramserver.store.row_chunk import RowChunk
from headrace.schemas.errors import ConfigError, FencedError, OwnedError
from headrace.schemas.idl import idl, spec_from_idl
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import StateKind, TableSpec
from headrace.scripts.table_io.server_writer import ServerWriter, TargetServer
from headrace.scripts.table_io.source import OpenSource, SourceTable

__all__ = ["BackfillCounts", "BackfillSender", "RowPace", "ServerFacts", "ask_server"]

# Short enough for an even rate under a limit of rows per second, long enough to cost little otherwise.
_MAX_MESSAGE_BYTES = 1 << 20
_SPARE_BYTES = 16 * 1024  # the rest of a message besides its rows
# Raise it when the same source makes other batches than before, so that no old backfill is continued.
_BATCHES_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """A server's shards, its limit for one message's columns, its tables by fqn, and who trains which of them."""

    places: ShardPlaces
    max_message_bytes: int
    tables: dict[str, TableSpec]
    trained_by: Mapping[str, str]

    def check_owners(self, names: Iterable[str]) -> None:
        """Raise `OwnedError` early for a table that the server will refuse because a trainer owns it."""
        for name in names:
            if run := self.trained_by.get(name):
                raise OwnedError(f"table {name!r} belongs to run {run!r}; {NOT_FOR_BACKFILLS}")


@dataclass(slots=True)
class BackfillCounts:
    """The number of a table's rows by outcome."""

    num_written: int = 0  # sent now
    num_refused: int = 0  # skipped, because of a NaN or an infinity
    num_earlier: int = 0  # besides, sent by an earlier attempt of the same backfill


@dataclass(slots=True)
class RowPace:
    """Limits the rate of rows, evenly."""

    rows_per_s: float | None  # None for no limit
    clock: Callable[[], float] = time.monotonic  # returns monotonic seconds
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep  # sleeps for some seconds
    _due_s: float | None = field(default=None, init=False)

    async def wait(self, num_rows: int) -> None:
        """Wait as long as `num_rows` that were just sent should take. Cancellation: atomic."""
        if self.rows_per_s is None:
            return
        now_s = self.clock()
        begin_s = now_s if self._due_s is None else self._due_s
        self._due_s = max(begin_s + num_rows / self.rows_per_s, now_s)
        if self._due_s > now_s:
            await self.sleep(self._due_s - now_s)


async def ask_server(target: TargetServer) -> ServerFacts:
    """Return a server's shards, limit and tables.

    Raises:
        UnavailableError: It does not answer.
        HeadraceError: It refuses.

    Cancellation: harmless.
    """
    reply, places = await target.ask()
    limits = reply.limits
    return ServerFacts(
        places=places,
        max_message_bytes=min(limits.max_frame_bytes, limits.max_inflight_bytes, _MAX_MESSAGE_BYTES) - _SPARE_BYTES,
        tables={spec.fqn: spec for spec in map(spec_from_idl, reply.tables)},
        trained_by={owner.fqn: owner.run for owner in reply.owners or () if not (owner.is_backfill or owner.has_ended)},
    )


class BackfillSender:
    """Sends a source to a server.

    Attributes:
        counts: Counts by fqn; complete once `run` has returned.
    """

    def __init__(
        self,
        source: OpenSource,
        target: TargetServer,
        server: ServerFacts,
        *,
        again: bool,
        pace: RowPace,
    ) -> None:
        """Prepare.

        Args:
            source: What to send. REQUIRES: its tables fit the server's.
            target: How to reach the server.
            server: Facts of the server.
            again: Send also what an earlier attempt has delivered.
            pace: Limit of the rate.
        """
        config = source.config
        self.counts = {table.spec.fqn: BackfillCounts() for table in source.tables}
        # A table that it makes lacks rows, for everybody, until it has ended.
        self._target = replace(target, fills=frozenset(self.counts))
        self._source, self._server = source, server
        self._skips_non_finite, self._pace = config.non_finite == "skip", pace
        self._specs = [table.spec for table in source.tables]
        # What decides which rows the source gives, in this order and form: a digest of it names the run.
        settings = [
            list(config.maps),
            list(config.tables or ()),
            int(config.zero_states),
            time.time_ns() if again else 0,
        ]
        identity = [
            _BATCHES_VERSION,
            # Whole paths, because checkpoints of one run have files with the same names and sizes.
            [str(file.resolve()) for file in source.files],
            source.stamp,
            settings,
            self._skips_non_finite,
            len(server.places),
            server.max_message_bytes,
            [table.spec.fingerprint for table in source.tables],
        ]
        digest = hashlib.sha256(msgpack.packb(identity))
        self._run = f"backfill-{digest.hexdigest()[:16]}"

    async def run(self, *, on_rows: Callable[[int], None] = lambda _: None) -> None:
        """Send all rows, and return once they are durable; call `on_rows` with the number of rows just sent.

        Cancellation: another sender of the same source continues.

        Raises:
            OwnedError: A table is a trainer's or another backfill's, or has been since this backfill began.
            UnavailableError: A shard was unreachable for too long.
            HeadraceError: The server refuses, or the source cannot be read.
        """
        resolver, places = self._target.resolver(self._server.places), self._server.places
        epoch = await self._claim(resolver)
        writing = ServerWriter(
            self._target,
            resolver,
            self._run,
            self._specs,
            max_bytes=self._server.max_message_bytes,
            epoch=epoch,
        )
        chunk_bytes = self._server.max_message_bytes * len(places)
        async with writing.sending() as writer:
            for table in self._source.tables:
                await self._send_table(table, chunk_bytes, writer, on_rows)
        end = self._target.hello(self._run, epoch, self._specs, complete=self.counts, ends_run=True)
        for shard in reversed(range(len(resolver.places))):  # shard 0 decides who may have a table next
            await self._hello(resolver, shard, end)

    async def _claim(self, resolver: Resolver) -> int:
        """Claim the tables at shard 0; return the epoch: of an attempt that still owns some, or above all others."""
        target, run = self._target, self._run
        ask = target.hello(run, 0, [])
        replies = [await self._hello(resolver, shard, ask) for shard in range(len(resolver.places))]
        own = [owner.epoch for owner in replies[0].owners if owner.run == run]
        epoch: int = max(own, default=1 + max(reply.highest_epoch for reply in replies))
        while True:
            claim = target.hello(run, epoch, self._specs, claims_tables=True, claims_epoch=not own)
            try:
                await self._hello(resolver, 0, claim)
            except FencedError as exc:
                own, epoch = [], exc.epoch + 1
            else:
                return epoch

    async def _hello(self, resolver: Resolver, shard: int, request: Any) -> Any:
        """Say hello to a shard over a connection of its own; return the reply."""
        target = self._target

        async def attempt() -> Any:
            async with await target.connect(resolver, shard) as client:
                return await client.hello(request, timeout_s=target.connect_timeout_s)

        return await retry(attempt, patience_s=target.timeout_s)

    async def _send_table(
        self, table: SourceTable, chunk_bytes: int, writer: ServerWriter, on_rows: Callable[[int], None]
    ) -> None:
        counts, layout = self.counts[table.spec.fqn], RecordLayout(table.spec, table.spec.whole)
        chunks = _checked(table, chunk_bytes)
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            num_rows = chunk.row_ids.size
            if self._skips_non_finite:
                finite = await asyncio.to_thread(chunk.is_finite, layout)
                if not finite.all():
                    chunk = chunk.take(finite)
                    counts.num_refused += num_rows - chunk.row_ids.size
            delta = await asyncio.to_thread(_delta_of, table, chunk)
            # Rows that are written now, whenever they were trained: they expire as such, and followers tell their age.
            num_sent, num_earlier = await writer.put([delta], step=0, time_us=time.time_ns() // 1000)
            counts.num_written += chunk.row_ids.size - num_earlier
            counts.num_earlier += num_earlier
            await self._pace.wait(num_sent)
            on_rows(num_rows)


def _checked(table: SourceTable, max_bytes: int) -> Iterator[RowChunk]:
    last = -1
    for chunk in table.chunks(max_bytes):
        chunk.check(table.spec, after_row=last)
        if chunk.row_ids.size:
            last = int(chunk.row_ids[-1])
            yield chunk


def _delta_of(table: SourceTable, chunk: RowChunk) -> Any:
    spec = table.spec
    scalars = [idl.TableScalar(name=name, dtype=int(dtype), data=data) for name, dtype, data in table.scalars]
    if spec.num_rows == 0 and chunk.identities is None and spec.has_identities:
        raise ConfigError(f"table {spec.fqn!r}: its rows have no identities")
    return idl.TableDelta(
        fqn=spec.fqn,
        fingerprint=spec.fingerprint,
        column_offset=0,
        width=spec.dim,
        row_ids=chunk.row_ids.tobytes(),
        weights=chunk.columns["weights"].tobytes(),
        states=[
            idl.StateColumn(
                name=state.name,
                dtype=int(state.dtype),
                width=spec.dim if state.kind is StateKind.POINTWISE else state.width,
                data=chunk.columns[f"state:{state.name}"].tobytes(),
            )
            for state in spec.states
        ],
        identities=None if chunk.identities is None else chunk.identities.tobytes(),
        scalars=scalars or None,
    )
