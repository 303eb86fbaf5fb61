"""One shard: what its Thrift methods do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from headrace.paramserver.config.shard_config import ShardConfig
from headrace.paramserver.expiry.expiry import Expirer
from headrace.paramserver.expiry.expiry_policy import ExpiryRules
from headrace.paramserver.expiry.expiry_run import RunContext
from headrace.paramserver.expiry.expiry_writer import TombstoneWriter
from headrace.paramserver.ingest.deltas import decode_identities, decode_row_ids
from headrace.paramserver.ingest.digester import Digester
from headrace.paramserver.ingest.ingest import Ingest
from headrace.paramserver.ingest.sessions import Session
from headrace.paramserver.ingest.update_feed import UpdateFeed
from headrace.paramserver.log.file_update_log import FileUpdateLog
from headrace.paramserver.log.update_log import UpdateLog, UpdateLogConfig
from headrace.paramserver.process.log_format import fact
from headrace.paramserver.process.loop_probe import LoopProbe
from headrace.paramserver.process.open_files import files_for_store
from headrace.paramserver.process.short_pauses import step_back
from headrace.paramserver.process.tracing import span
from headrace.paramserver.reading.row_query import MAX_ROWS_READ, MAX_TABLES_READ, RowQuery
from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.rpc_server import Call, Peer, ThriftServer
from headrace.paramserver.shard.log_retention import LogRetention
from headrace.paramserver.shard.metrics_watch import ShardWatch, Watched, count_rows
from headrace.paramserver.snapshots.snapshot_files import SnapshotFiles
from headrace.paramserver.snapshots.snapshot_maker import SnapshotMaker
from headrace.paramserver.store.applier import Applier, ApplierConfig
from headrace.paramserver.store.catalog import Table
from headrace.paramserver.store.identity_index import index_in_thread
from headrace.paramserver.store.row_reader import RowsRead
from headrace.paramserver.store.row_store import RowStore
from headrace.paramserver.store.store_config import StoreConfig
from headrace.schemas.errors import (
    CorruptionError,
    GoneError,
    HeadraceError,
    ProtocolMismatchError,
    RequestError,
    UnauthorizedError,
)
from headrace.schemas.idl import PROTOCOL_VERSION, idl, spec_from_idl, spec_to_idl
from headrace.schemas.snapshot_manifest import SnapshotManifest
from headrace.schemas.tables import TableSpec

__all__ = ["Shard", "limits_of", "open_shard"]

_log = logging.getLogger(__name__)

# Acks and reads do not wait for it.
_HOLD_S = 2.0
# Of the backlog: while so much of it is being written, as much gathers to be written next, and there is room for more.
_WINDOW_PART = 3
_SNAPSHOT_CHUNK_BYTES = 8 << 20
# A row of a reply: epoch, step and time; and row id, epoch and step of an identity.
_FOUND_BYTES = 3 * 8
_ROW_ID_BYTES = 8
# RocksDB fills one while it writes up to two others out.
_NUM_MEMTABLES = 3


class Shard:
    """The service of one shard, made by `open_shard`.

    Thread: the event loop's.

    Attributes:
        expirer: What deletes rows by policy.
        feed: The update log as followers see it.
        log: The update log.
        server: Who calls this service, once somebody does: `status` tells its figures.
    """

    def __init__(
        self,
        config: ShardConfig,
        log: UpdateLog,
        store: RowStore,
        applier: Applier,
        ingest: Ingest,
        feed: UpdateFeed,
        retention: LogRetention,
        probe: LoopProbe,
        expirer: Expirer,
    ) -> None:
        """Serve an opened log and store."""
        self._config = config
        self.log = log
        self._store = store
        self._applier = applier
        self._ingest = ingest
        self.feed = feed
        self._snapshots = SnapshotFiles(config.snapshots_path)
        self._snapshot_maker = SnapshotMaker(
            log, ingest, applier, store, self._snapshots, retention.cuts, server_id=config.server_id, shard=config.shard
        )
        self._digester = Digester(ingest, applier, store)
        self.expirer = expirer
        self._retention = retention
        self._probe = probe
        self.server: ThriftServer | None = None
        self._started_s = time.monotonic()

    async def wait_failed(self) -> HeadraceError:
        """Return the error that has stopped this shard, once there is one.

        Cancellation: harmless.
        """
        waiting = [
            asyncio.create_task(self._ingest.wait_failed(), name="headrace-ingest-failed"),
            asyncio.create_task(self.log.wait_failed(), name="headrace-log-failed"),
            asyncio.create_task(self._applier.wait_failed(), name="headrace-apply-failed"),
            asyncio.create_task(self._retention.wait_failed(), name="headrace-retention-failed"),
        ]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in waiting:
                task.cancel()

    async def applied(self) -> None:
        """Return when all that can be read is in RocksDB.

        Raises:
            HeadraceError: Applying has failed.

        Cancellation: harmless.
        """
        await self._applier.wait_applied(self._ingest.submitted_seq)

    async def hello(self, call: Call, request: Any) -> Any:
        """Register tables, open or resume a writer's session, and tell what a client must know.

        Cancellation: atomic; saying hello again is harmless.
        """
        if request.protocol_version != PROTOCOL_VERSION:
            raise ProtocolMismatchError(
                f"this server speaks protocol version {PROTOCOL_VERSION}, the client {request.protocol_version}"
            )
        last_client_seq = 0
        if request.role != idl.Role.READER and request.epoch:
            specs = [spec_from_idl(spec) for spec in request.tables]
            session, last_client_seq = await self._ingest.open_session(
                request.run,
                request.client,
                request.epoch,
                request.rank,
                request.world_size,
                specs,
                claims_epoch=bool(request.claims_epoch),
            )
            self._bind(call.peer, session)
        config = self._config
        return idl.HelloReply(
            protocol_version=PROTOCOL_VERSION,
            server_id=config.server_id,
            shard=config.shard,
            shards=[
                idl.ShardAddress(shard=shard, host=host, port=port)
                for shard, (host, port) in enumerate(config.addresses)
            ],
            limits=limits_of(config).to_idl(),
            highest_epoch=self._ingest.sessions.highest_epoch,
            last_client_seq=last_client_seq,
            tables=[spec_to_idl(table.spec) for table in self._ingest.catalog],
        )

    async def set_embeddings(self, call: Call, request: Any) -> Any:
        """Take a batch; answered when it is durable.

        Cancellation: the batch takes effect whole or not at all; a resend tells which.
        """
        if call.peer.session is None:
            raise UnauthorizedError("this connection has not said hello as a writer")
        with span("headrace.setEmbeddings", shard=self._config.shard, frame_bytes=call.frame.nbytes):
            seq, is_duplicate = await self._ingest.write(request, call.frame, call.hold)
        return idl.SetEmbeddingsReply(seq=seq, is_duplicate=is_duplicate)

    async def get_embeddings(self, call: Call, request: Any) -> Any:
        """Return rows as the acked batches have left them, applied or not."""
        with_states, with_versions = request.with_states, request.with_versions
        parts = [request, *(request.more or ())]
        if len(parts) > MAX_TABLES_READ:
            raise RequestError(f"rows of {len(parts)} tables with one request: ask for at most {MAX_TABLES_READ}")
        _check_number(sum(len(part.row_ids) for part in parts) // _ROW_ID_BYTES)
        wanted, reply_bytes = [], 0
        for part in parts:
            table = self._ingest.catalog.find(part.fqn)
            row_ids = decode_row_ids(table, part.row_ids)
            row_bytes = RowQuery(spec=table.spec, with_states=with_states, with_versions=with_versions).row_bytes
            self._check_reply(table, row_ids.size, row_bytes, others_bytes=reply_bytes)
            reply_bytes += row_ids.size * row_bytes
            wanted.append((table.table_id, table.spec, row_ids))
        found = await self._applier.read_many(wanted, asker=call.peer)
        first, *more = [
            _row_columns(spec, rows, with_states, with_versions)
            for (_, spec, _), rows in zip(wanted, found, strict=True)
        ]
        reply = idl.GetEmbeddingsReply(**first, seq=found[0].seq)
        if request.more is not None:
            reply.more = [idl.RowsFound(**columns) for columns in more]
        return reply

    async def find_rows(self, call: Call, request: Any) -> Any:
        """Return the rows that have identities, as the acked batches have left them, applied or not."""
        table = self._ingest.catalog.find(request.fqn)
        identities = decode_identities(table, request.identities)
        _check_number(identities.size)
        self._check_reply(table, identities.size, _FOUND_BYTES)
        found = await self._applier.find(table.table_id, table.spec, identities, asker=call.peer)
        return idl.FindRowsReply(row_ids=found.row_ids, seq=found.seq, epochs=found.epochs, steps=found.steps)

    async def fetch_updates(self, call: Call, request: Any) -> Any:
        """Wait for and return durable records of the update log.

        Cancellation: harmless.
        """
        with span("headrace.fetchUpdates", shard=self._config.shard, from_seq=request.from_seq):
            return await self.feed.fetch(request)

    async def digest_rows(self, call: Call, request: Any) -> Any:
        """Add up digests of rows as the acked batches have left them.

        Cancellation: harmless; the scan ends by itself.
        """
        return await self._digester.digest(request)

    async def expire_rows(self, call: Call, request: Any) -> Any:
        """Delete rows by policy, or tell how far that has come.

        Cancellation: harmless; the run goes on.
        """
        return await self.expirer.expire_rows(request)

    async def create_snapshot(self, call: Call, request: Any) -> Any:
        """Make this shard's part of a snapshot.

        Cancellation: the part stays until it is discarded; the shard goes on.
        """
        part = await self._snapshot_maker.create(request, is_wanted=lambda: call.peer.is_connected)
        return idl.CreateSnapshotReply(part=part.encode())

    async def finish_snapshot(self, call: Call, request: Any) -> Any:
        """Publish a snapshot of all shards, discard it, or remove a published one.

        Cancellation: it is published or not; asking again is harmless.
        """
        if request.removes:
            await asyncio.to_thread(self._snapshots.remove, request.name)
        elif request.manifest is None:
            await asyncio.to_thread(self._snapshots.discard, request.name)
            self._snapshot_maker.let_go(request.name)
        else:
            try:
                manifest = SnapshotManifest.decode(request.manifest.encode())
            except CorruptionError as exc:  # on its way, not on a disk of ours
                raise RequestError(str(exc)) from exc
            if (manifest.name, manifest.server_id) != (request.name, self._config.server_id):
                raise RequestError(f"a manifest of {manifest.name!r} of {manifest.server_id} for {request.name!r} here")
            await asyncio.to_thread(self._snapshots.publish, manifest)
            fact(_log, logging.INFO, "snapshot", name=manifest.name, step=manifest.step, bytes=manifest.size_bytes)
        return idl.FinishSnapshotReply(name=request.name)

    async def fetch_snapshot(self, call: Call, request: Any) -> Any:
        """Read a piece of a published snapshot.

        Cancellation: harmless.
        """
        if request.offset < 0 or request.max_bytes < 1:
            raise RequestError(f"{request.max_bytes} bytes from {request.offset} on: out of range")
        return await asyncio.to_thread(self._read_snapshot, request)

    def _read_snapshot(self, request: Any) -> Any:
        name = request.name
        if not name:
            newest = self._snapshots.newest(self._config.server_id)
            if newest is None:
                raise GoneError("this server has no snapshot yet")
            name = newest.name
        max_bytes = min(request.max_bytes, self._config.max_frame_bytes // 2, _SNAPSHOT_CHUNK_BYTES)
        data, size_bytes = self._snapshots.read(name, request.path, request.offset, max_bytes)
        return idl.FetchSnapshotReply(name=name, data=data, size_bytes=size_bytes)

    def watch(self, server: ThriftServer) -> ShardWatch:
        """Return what makes samples of this shard for metrics; enter it."""
        watched = Watched(
            config=self._config,
            log=self.log,
            store=self._store,
            applier=self._applier,
            ingest=self._ingest,
            feed=self.feed,
            retention=self._retention,
            snapshots=self._snapshots,
            expirer=self.expirer,
            probe=self._probe,
        )
        return ShardWatch(watched, server)

    def begin_drain(self) -> None:
        """Answer the requests that only wait for something to happen, or would take long. Idempotent."""
        self.feed.stop()
        self._snapshot_maker.stop()

    async def status(self, call: Call) -> Any:
        """Return what `headrace status` shows of this shard."""
        sessions, tables, server = self._ingest.sessions, list(self._ingest.catalog), self.server
        # In a thread: it goes through all files of RocksDB's.
        num_rows = await asyncio.to_thread(count_rows, self._store, tables)
        return idl.StatusReply(
            server_id=self._config.server_id,
            shard=self._config.shard,
            num_shards=len(self._config.addresses),
            version=metadata.version("headrace"),
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started_s,
            log_seq=self.log.last_seq,
            applied_seq=self._applier.applied_seq,
            inflight_bytes=server.inflight_bytes if server else 0,
            num_connections=server.num_connections if server else 0,
            num_refused=server.num_refused if server else 0,
            num_rows_written=self._ingest.num_rows_written,
            tables=[
                idl.TableStatus(
                    spec=spec_to_idl(table.spec),
                    num_rows_estimate=estimate,
                    scalars=[
                        idl.StoredScalar(
                            scalar=idl.TableScalar(name=scalar.name, dtype=int(scalar.dtype), data=scalar.data),
                            epoch=scalar.epoch,
                            step=scalar.step,
                        )
                        for scalar in table.scalars.values()
                    ],
                )
                for table, estimate in zip(tables, num_rows, strict=True)
            ],
            clients=[
                idl.ClientStatus(
                    run=session.run,
                    client=session.client,
                    epoch=session.epoch,
                    last_client_seq=session.last_client_seq,
                    step=session.step,
                    is_connected=session.num_connections > 0,
                    rank=session.rank,
                    world_size=session.world_size,
                    exact_step=session.exact_step,
                    ended_client_seq=session.ended_client_seq,
                    time_us=session.time_us,
                )
                for session in sessions
            ],
            accepted_seq=self._ingest.accepted_seq,
            worst_loop_pause_ms=self._probe.worst_pause_s * 1000,
            expiry=self.expirer.status(),
        )

    def disconnected(self, peer: Peer) -> None:
        """Note that a connection has ended."""
        if isinstance(peer.session, Session):
            peer.session.num_connections -= 1
            peer.session = None

    def _check_reply(self, table: Table, num_rows: int, row_bytes: int, *, others_bytes: int = 0) -> None:
        """Refuse what no frame could answer before it takes the memory of an answer, which may be any length."""
        limit = self._config.max_frame_bytes
        if others_bytes + num_rows * row_bytes > limit:
            raise RequestError(
                f"table {table.spec.fqn!r}: {num_rows} rows of {row_bytes} bytes, the longest frame {limit}: ask for "
                "less at once"
            )

    def _bind(self, peer: Peer, session: Session) -> None:
        self.disconnected(peer)
        if not peer.is_connected:
            return  # it has gone while its hello became durable, and takes no leave any more
        peer.session = session
        session.num_connections += 1


def _check_number(num_rows: int) -> None:
    if num_rows > MAX_ROWS_READ:
        raise RequestError(f"{num_rows} rows with one request: ask for at most {MAX_ROWS_READ} at once")


def _row_columns(spec: TableSpec, rows: RowsRead, with_states: bool, with_versions: bool) -> dict[str, Any]:
    """Return what a `GetEmbeddingsReply` and a `RowsFound` have in common."""
    states = [
        idl.StateColumn(
            name=state.name, dtype=int(state.dtype), width=state.width_in(spec.whole), data=rows.states[state.name]
        )
        for state in (spec.states if with_states else ())
    ]
    columns: dict[str, Any] = {"presence": rows.presence, "weights": rows.weights, "states": states}
    if with_versions:
        columns |= {"epochs": rows.epochs, "steps": rows.steps, "times_us": rows.times_us}
    if spec.has_identities:
        columns["identities"] = rows.identities
    return columns


def limits_of(config: ShardConfig) -> ServerLimits:
    """Return what a shard's server takes at most."""
    return ServerLimits(
        max_frame_bytes=config.max_frame_bytes,
        max_client_bytes=config.max_client_bytes,
        max_client_requests=config.max_client_requests,
        max_inflight_bytes=config.max_inflight_bytes,
        max_connections=config.max_connections,
        idle_timeout_s=config.idle_timeout_s,
    )


@contextlib.asynccontextmanager
async def open_shard(config: ShardConfig) -> AsyncIterator[Shard]:
    """Open a shard's log and store, bring the store up to the log, and serve; on exit drain and close both.

    Args:
        config: The shard's settings; its directory exists.

    Cancellation: closes what was opened; nothing acked is lost.

    Raises:
        CorruptionError: The log or the store is damaged, or they do not belong together.
        StorageError: The disk failed.
        ConfigError: The directory is in use or cannot be used.
    """
    log_config = UpdateLogConfig(segment_bytes=config.log_segment_bytes, max_pending_bytes=config.max_log_pending_bytes)
    store_config = StoreConfig(
        block_cache_bytes=config.block_cache_bytes,
        write_buffer_bytes=config.memtable_bytes // _NUM_MEMTABLES,
        max_open_files=files_for_store(),
    )
    applier_config = ApplierConfig(
        window_bytes=max(config.max_backlog_bytes // _WINDOW_PART, 1),
        hold_s=_HOLD_S,
        flush_bytes=2 * config.memtable_bytes,
    )
    async with contextlib.AsyncExitStack() as stack:
        store = await asyncio.to_thread(_open_store, config.directory / "store", store_config)
        stack.push_async_callback(asyncio.to_thread, store.close)
        if num_tables := await index_in_thread(store):
            fact(_log, logging.INFO, "indexed the identities of rows stored before", tables=num_tables)
        log = await asyncio.to_thread(FileUpdateLog.open, config.directory / "log", config=log_config)
        # The applier is closed after the log, which hands it the last durable batches.
        applier = await stack.enter_async_context(Applier(store, config=applier_config))
        stack.push_async_callback(log.close)
        ingest = Ingest(
            log,
            applier,
            store.read_meta(),
            max_backlog_bytes=config.max_backlog_bytes,
            reject_non_finite=config.reject_non_finite,
            shard=config.shard,
            num_shards=config.num_shards,
        )
        started_s = time.monotonic()
        if num_records := await ingest.recover():
            fact(_log, logging.INFO, "recovered", records=num_records, seconds=round(time.monotonic() - started_s, 3))
        feed = UpdateFeed(log, ingest, server_id=config.server_id, max_frame_bytes=config.max_frame_bytes)
        retention = await stack.enter_async_context(LogRetention(log, store, feed.followers, config))
        probe = await stack.enter_async_context(LoopProbe())
        context = RunContext(
            ingest=ingest,
            applier=applier,
            store=store,
            writer=TombstoneWriter(ingest),
            directory=config.directory / "expiry",
            num_shards=config.num_shards,
            rows_per_s=config.expiry_rows_per_s,
        )
        expirer = await stack.enter_async_context(Expirer(context, ExpiryRules.parse(config.expiry or "")))
        yield Shard(config, log, store, applier, ingest, feed, retention, probe, expirer)


def _open_store(path: Path, config: StoreConfig) -> RowStore:
    """Open a store, in a thread that has stepped back: those that RocksDB starts for compactions are as nice as it."""
    with ThreadPoolExecutor(1, "headrace-open", initializer=step_back) as pool:
        return pool.submit(RowStore.open, path, config=config).result()
