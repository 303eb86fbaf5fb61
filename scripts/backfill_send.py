"""Sends the rows of a backfill's tables to a running server, as batches that never overwrite anything newer.

It is a client like a replay: its run is named after what is sent, and it numbers its batches. The same source makes the
same batches, so a backfill that was killed goes on where the server's hello says; no state is kept here.
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

from headrace.paramserver.process.task_group import task_group
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.reading.replay import ReplayTarget, ShardWriter, pack_deltas, route_delta
from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.rpc.shard_map import shard_map
from headrace.paramserver.store.row_chunk import RowChunk
from headrace.schemas.errors import ConfigError
from headrace.schemas.idl import idl, spec_from_idl
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import StateKind, TableSpec
from headrace.scripts.table_sources.open_source import OpenSource
from headrace.scripts.table_sources.source_table import SourceTable

__all__ = ["BackfillCounts", "BackfillSender", "RowPace", "ServerFacts", "ask_server"]

_CLIENT, _EPOCH = "backfill", 1
# Short enough for a limit of rows a second to be even, long enough not to matter else.
_MAX_MESSAGE_BYTES = 1 << 20
_SPARE_BYTES = 16 * 1024  # what a message takes besides its rows, names and all
# Raise it when the same source is cut into other batches than before: then an old backfill is not gone on with.
_CUT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """What a backfill has to know of a server.

    Attributes:
        shards: (host, port) of each, by index.
        max_message_bytes: Of the columns of one message.
        tables: By fqn.
    """

    shards: list[tuple[str, int]]
    max_message_bytes: int
    tables: dict[str, TableSpec]


@dataclass(slots=True)
class BackfillCounts:
    """What has become of a table's rows.

    Attributes:
        num_written: Sent, or sent by an earlier run of the same backfill, and not known to be older than the server's.
        num_kept: The server had newer ones when they were about to be sent; they stay.
        num_refused: Left out, because of a NaN or an infinity.
        num_earlier: Of all of these, sent by an earlier run.
    """

    num_written: int = 0
    num_kept: int = 0
    num_refused: int = 0
    num_earlier: int = 0


@dataclass(slots=True)
class RowPace:
    """Holds rows back to so many a second, evenly.

    Attributes:
        rows_per_s: None for no limit.
        clock: Monotonic seconds.
        sleep: Waits for so many seconds.
    """

    rows_per_s: float | None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep
    _due_s: float | None = field(default=None, init=False)

    async def wait(self, num_rows: int) -> None:
        """Return when so many rows, which have just gone, have taken their time.

        Cancellation: atomic.
        """
        if self.rows_per_s is None:
            return
        now_s = self.clock()
        begin_s = now_s if self._due_s is None else self._due_s
        self._due_s = max(begin_s + num_rows / self.rows_per_s, now_s)
        if self._due_s > now_s:
            await self.sleep(self._due_s - now_s)


async def ask_server(target: ReplayTarget) -> ServerFacts:
    """Return what a server says of itself.

    Raises:
        UnavailableError: It is away.
        HeadraceError: It refuses.

    Cancellation: harmless.
    """
    reply = await target.ask()
    limits = reply.limits
    return ServerFacts(
        shards=shard_map(reply, target.host, target.port),
        max_message_bytes=min(limits.max_frame_bytes, limits.max_inflight_bytes, _MAX_MESSAGE_BYTES) - _SPARE_BYTES,
        tables={spec.fqn: spec for spec in map(spec_from_idl, reply.tables)},
    )


class BackfillSender:
    """Sends a source.

    Attributes:
        counts: By fqn; complete when `run` has returned.
    """

    def __init__(
        self,
        source: OpenSource,
        target: ReplayTarget,
        server: ServerFacts,
        *,
        settings: list[Any],
        skips_non_finite: bool,
        counts_kept: bool = True,
        pace: RowPace | None = None,
    ) -> None:
        """Prepare.

        Args:
            source: What to send; its tables fit the server's.
            target: How to reach the server.
            server: What it has said.
            settings: All that decides what rows the source gives, besides its files.
            skips_non_finite: Leave rows with a NaN or an infinity out.
            counts_kept: Ask the server, before rows are sent, which of them it has newer ones of.
            pace: How fast rows may go.
        """
        self.counts = {table.spec.fqn: BackfillCounts() for table in source.tables}
        self._source, self._target, self._server = source, target, server
        self._skips_non_finite, self._counts_kept = skips_non_finite, counts_kept
        self._pace = pace or RowPace(None)
        digest = hashlib.sha256(
            msgpack.packb(
                [
                    # With the whole path: checkpoints of one run have files of one name and length.
                    *(_CUT_VERSION, [str(file.resolve()) for file in source.files], source.stamp),
                    *(settings, skips_non_finite, len(server.shards)),
                    *(server.max_message_bytes, [table.spec.fingerprint for table in source.tables]),
                ]
            )
        )
        self._run = f"backfill-{digest.hexdigest()[:16]}"

    async def run(self, *, on_rows: Callable[[int], None] = lambda _: None) -> None:
        """Send everything; return when all of it is durable.

        Args:
            on_rows: Called with the number of rows that were sent since the last call.

        Cancellation: resumable, by another run.

        Raises:
            UnavailableError: A shard was away for too long.
            HeadraceError: The server refuses, or the source cannot be read.
        """
        specs = [table.spec for table in self._source.tables]
        writers = [
            ShardWriter(self._target, host, port, self._run, specs, client=_CLIENT)
            for host, port in self._server.shards
        ]
        async with task_group() as group:
            sending = [group.create_task(writer.run()) for writer in writers]
            for writer in writers:
                await writer.wait_open()
            async with await self._reader() as reader:
                for table in self._source.tables:
                    await self._send_table(table, writers, reader, on_rows)
            for writer in writers:
                await writer.wait_acked()
            for task in sending:
                task.cancel()

    async def _reader(self) -> EmbeddingReader:
        target = self._target
        return await EmbeddingReader.connect(
            format_address(target.host, target.port),
            timeout_s=target.timeout_s,
            ssl_context=target.ssl_context,
            token=target.token,
        )

    async def _send_table(
        self,
        table: SourceTable,
        writers: list[ShardWriter],
        reader: EmbeddingReader,
        on_rows: Callable[[int], None],
    ) -> None:
        counts, layout = self.counts[table.spec.fqn], RecordLayout(table.spec, table.spec.whole)
        chunks = _checked(table, self._server.max_message_bytes * len(writers))
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
            for shard, request, num_sent in await asyncio.to_thread(self._cut, table.spec, chunk):
                if await writers[shard].put(request):
                    await self._pace.wait(num_sent)
                else:
                    counts.num_earlier += num_sent
            on_rows(num_rows)

    async def _num_kept(self, reader: EmbeddingReader, spec: TableSpec, chunk: RowChunk) -> int:
        rows = await reader.get(spec.fqn, chunk.row_ids, with_versions=True)
        assert rows.epochs is not None
        assert rows.steps is not None
        is_newer = (rows.epochs > chunk.epochs) | ((rows.epochs == chunk.epochs) & (rows.steps > chunk.steps))
        return int(np.count_nonzero(is_newer))

    def _cut(self, spec: TableSpec, chunk: RowChunk) -> list[tuple[int, Any, int]]:
        """Return (shard, request without a number, rows) of each message of a chunk; always the same ones."""
        messages = []
        for (epoch, step, time_us), part in _by_version(chunk):
            for shard, delta in enumerate(route_delta(_delta_of(spec, part), spec, len(self._server.shards))):
                for deltas in pack_deltas([delta], self._server.max_message_bytes) if delta is not None else ():
                    request = idl.SetEmbeddingsRequest(
                        epoch=_EPOCH,
                        step=step,
                        time_us=time_us,
                        ends_step=False,
                        is_exact_cut=False,
                        deltas=deltas,
                        version_epoch=epoch,
                    )
                    num_rows = sum(len(d.row_ids) + len(d.deleted_row_ids or b"") for d in deltas) // 8
                    messages.append((shard, request, num_rows))
        return messages


def _checked(table: SourceTable, max_bytes: int) -> Iterator[RowChunk]:
    last = -1
    for chunk in table.chunks(max_bytes):
        chunk.check(table.spec, after_row=last)
        if chunk.row_ids.size:
            last = int(chunk.row_ids[-1])
            yield chunk


def _by_version(chunk: RowChunk) -> Iterator[tuple[tuple[int, int, int], RowChunk]]:
    """Yield the parts of a chunk that have one version and time: a batch has only one."""
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


def _delta_of(spec: TableSpec, chunk: RowChunk) -> Any:
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
    )
