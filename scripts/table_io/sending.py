"""Send the rows of a backfill's tables to a running server, in batches that never overwrite newer rows.

Like a replay, a backfill is a client whose run is named after what it sends, and which numbers its batches. The same
source makes the same batches, so a killed backfill continues where the server's hello says, without state of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.replay.target import ReplayTarget, ServerWriter
from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.rpc.shard_places import ShardPlaces
from headrace.paramserver.store.row_chunk import RowChunk
from headrace.schemas.errors import ConfigError
from headrace.schemas.idl import idl, spec_from_idl
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import StateKind, TableSpec
from headrace.schemas.version import is_newer
from headrace.scripts.table_io.source import OpenSource, SourceTable

__all__ = ["BackfillCounts", "BackfillSender", "RowPace", "ServerFacts", "ask_server"]

_CLIENT = "backfill"
# Short enough for an even rate under a limit of rows per second, long enough to cost little otherwise.
_MAX_MESSAGE_BYTES = 1 << 20
_SPARE_BYTES = 16 * 1024  # the rest of a message besides its rows
# Raise it when the same source makes other batches than before, so that no old backfill is continued.
_BATCHES_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """A server's shards, its limit for one message's columns, and its tables by fqn."""

    places: ShardPlaces
    max_message_bytes: int
    tables: dict[str, TableSpec]


@dataclass(slots=True)
class BackfillCounts:
    """The number of a table's rows by outcome."""

    num_written: int = 0  # sent now or by an earlier attempt, and not known to be older than the server's
    num_kept: int = 0  # the server had newer ones just before they were sent, and keeps those
    num_refused: int = 0  # skipped, because of a NaN or an infinity
    num_earlier: int = 0  # of all these, sent by an earlier attempt of the same backfill


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


async def ask_server(target: ReplayTarget) -> ServerFacts:
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
    )


class BackfillSender:
    """Sends a source to a server.

    Attributes:
        counts: Counts by fqn; complete once `run` has returned.
    """

    def __init__(
        self,
        source: OpenSource,
        target: ReplayTarget,
        server: ServerFacts,
        *,
        again: bool,
        counts_kept: bool,
        pace: RowPace,
    ) -> None:
        """Prepare.

        Args:
            source: What to send. REQUIRES: its tables fit the server's.
            target: How to reach the server.
            server: Facts of the server.
            again: Send also what an earlier attempt has delivered.
            counts_kept: Ask the server before sending which of the rows it has in a newer version.
            pace: Limit of the rate.
        """
        config = source.config
        self.counts = {table.spec.fqn: BackfillCounts() for table in source.tables}
        self._source, self._target, self._server = source, target, server
        self._skips_non_finite, self._counts_kept = config.non_finite == "skip", counts_kept
        self._pace = pace
        # What decides which rows the source gives, in this order and form: a digest of it names the run.
        settings = [
            list(config.maps),
            list(config.tables or ()),
            config.epoch or 0,
            config.step,
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
            UnavailableError: A shard was unreachable for too long.
            HeadraceError: The server refuses, or the source cannot be read.
        """
        target, places = self._target, self._server.places
        writing = ServerWriter(
            target,
            target.resolver(places),
            self._run,
            [table.spec for table in self._source.tables],
            max_bytes=self._server.max_message_bytes,
            client=_CLIENT,
        )
        chunk_bytes = self._server.max_message_bytes * len(places)
        async with (
            writing.sending() as writer,
            await EmbeddingReader.connect(
                ",".join(format_address(*at) for at in ((target.host, target.port), *target.others)),
                timeout_s=target.timeout_s,
                ssl_context=target.ssl_context,
                token=target.token,
            ) as reader,
        ):
            for table in self._source.tables:
                await self._send_table(table, chunk_bytes, writer, reader, on_rows)

    async def _send_table(
        self,
        table: SourceTable,
        chunk_bytes: int,
        writer: ServerWriter,
        reader: EmbeddingReader,
        on_rows: Callable[[int], None],
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
            num_kept = await self._num_kept(reader, table.spec, chunk) if self._counts_kept else 0
            counts.num_kept += num_kept
            counts.num_written += chunk.row_ids.size - num_kept
            for (epoch, step, time_us), delta in await asyncio.to_thread(_deltas_of, table, chunk):
                num_sent, num_earlier = await writer.put([delta], step=step, time_us=time_us, version_epoch=epoch)
                counts.num_earlier += num_earlier
                await self._pace.wait(num_sent)
            on_rows(num_rows)

    async def _num_kept(self, reader: EmbeddingReader, spec: TableSpec, chunk: RowChunk) -> int:
        rows = await reader.get(spec.fqn, chunk.row_ids, with_versions=True)
        assert rows.epochs is not None
        assert rows.steps is not None
        return int(np.count_nonzero(is_newer(rows.epochs, rows.steps, chunk.epochs, chunk.steps)))


def _checked(table: SourceTable, max_bytes: int) -> Iterator[RowChunk]:
    last = -1
    for chunk in table.chunks(max_bytes):
        chunk.check(table.spec, after_row=last)
        if chunk.row_ids.size:
            last = int(chunk.row_ids[-1])
            yield chunk


def _by_version(chunk: RowChunk) -> Iterator[tuple[tuple[int, int, int], RowChunk]]:
    """Yield parts of a chunk with one version and time each, because a batch has only one."""
    versions = (chunk.epochs, chunk.steps, chunk.times_us)
    if not any(isinstance(version, np.ndarray) for version in versions):
        yield (int(chunk.epochs), int(chunk.steps), int(chunk.times_us)), chunk
        return
    size = chunk.row_ids.size
    epochs, steps, times_us = (np.broadcast_to(np.asarray(version, np.int64), size) for version in versions)
    order = np.lexsort((times_us, steps, epochs))
    sorted_: list[npt.NDArray[np.int64]] = [column[order] for column in (epochs, steps, times_us)]
    is_first = np.ones(size, bool)
    is_first[1:] = np.any([column[1:] != column[:-1] for column in sorted_], axis=0)
    for rows in np.split(order, np.flatnonzero(is_first)[1:]):
        at = rows[0]
        yield (int(epochs[at]), int(steps[at]), int(times_us[at])), chunk.take(np.sort(rows))


def _deltas_of(table: SourceTable, chunk: RowChunk) -> list[tuple[tuple[int, int, int], Any]]:
    """Return (epoch, step, time) and `idl.TableDelta` of each version in a chunk, the same in each attempt."""
    return [(version, _delta_of(table, part)) for version, part in _by_version(chunk)]


def _delta_of(table: SourceTable, chunk: RowChunk) -> Any:
    spec = table.spec
    scalars = [idl.TableScalar(name=name, dtype=int(dtype), data=data) for name, dtype, data in table.scalars]
    deleted = np.empty(0, np.int64)
    if chunk.is_deleted is not None and chunk.is_deleted.any():
        deleted, chunk = chunk.row_ids[chunk.is_deleted], chunk.take(~chunk.is_deleted)
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
        deleted_row_ids=deleted.tobytes() if deleted.size else None,
        scalars=scalars or None,
    )
