"""One shard: what its Thrift methods do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable
from importlib import metadata
from typing import Any, NoReturn

from headrace.paramserver.applier import Applier, ApplierConfig
from headrace.paramserver.deltas import decode_row_ids
from headrace.paramserver.file_update_log import FileUpdateLog
from headrace.paramserver.ingest import Ingest
from headrace.paramserver.log_format import fact
from headrace.paramserver.rpc_server import Call, Peer, ThriftServer
from headrace.paramserver.sessions import Session
from headrace.paramserver.shard_config import ShardConfig
from headrace.paramserver.store import RowStore, StoreConfig
from headrace.paramserver.update_log import UpdateLog, UpdateLogConfig
from headrace.schemas.errors import HeadraceError, ProtocolMismatchError, UnauthorizedError
from headrace.schemas.idl import PROTOCOL_VERSION, idl, spec_from_idl, spec_to_idl

__all__ = ["Shard", "open_shard"]

_log = logging.getLogger(__name__)

_NEVER_REACHED = 2**63
_RETENTION_INTERVAL_S = 15.0
# RocksDB fills one while it writes up to two others out.
_NUM_MEMTABLES = 3


class Shard:
    """The service of one shard, made by `open_shard`.

    Thread: the event loop's.

    Attributes:
        server: Who calls this service, once somebody does: `status` tells its figures.
    """

    def __init__(
        self,
        config: ShardConfig,
        log: UpdateLog,
        store: RowStore,
        applier: Applier,
        ingest: Ingest,
        retaining: asyncio.Task[NoReturn],
    ) -> None:
        """Serve an opened log and store; `retaining` is the task that trims the log."""
        self._config = config
        self._log = log
        self._store = store
        self._applier = applier
        self._ingest = ingest
        self._retaining = retaining
        self.server: ThriftServer | None = None
        self._started_s = time.monotonic()

    async def wait_failed(self) -> HeadraceError:
        """Return the error that has stopped this shard, once there is one.

        Cancellation: harmless.
        """
        waiting = [
            asyncio.create_task(self._ingest.wait_failed(), name="headrace-log-failed"),
            asyncio.create_task(_error_of(self._applier.wait_applied(_NEVER_REACHED)), name="headrace-apply-failed"),
            asyncio.create_task(_error_of(asyncio.shield(self._retaining)), name="headrace-retention-failed"),
        ]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in waiting:
                task.cancel()

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
            session = await self._ingest.open_session(
                request.run, request.client, request.epoch, request.rank, request.world_size, specs
            )
            last_client_seq = session.last_client_seq
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
            limits=idl.Limits(
                max_frame_bytes=config.max_frame_bytes,
                max_inflight_bytes=config.max_client_bytes,
                max_inflight_requests=config.max_client_requests,
            ),
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
        seq, is_duplicate = await self._ingest.write(request, call.frame, call.hold)
        return idl.SetEmbeddingsReply(seq=seq, is_duplicate=is_duplicate)

    async def get_embeddings(self, call: Call, request: Any) -> Any:
        """Return rows as the acked batches have left them, applied or not."""
        table = self._ingest.catalog.find(request.fqn)
        row_ids = decode_row_ids(table, request.row_ids)
        spec, seq = table.spec, self._ingest.submitted_seq
        rows = await self._applier.read(table.table_id, spec, row_ids)
        reply = idl.GetEmbeddingsReply(presence=rows.presence, weights=rows.weights, states=[], seq=seq)
        if request.with_states:
            reply.states = [
                idl.StateColumn(
                    name=state.name,
                    dtype=int(state.dtype),
                    width=state.width_in(spec.whole),
                    data=rows.states[state.name],
                )
                for state in spec.states
            ]
        if request.with_versions:
            reply.epochs, reply.steps, reply.times_us = rows.epochs, rows.steps, rows.times_us
        if spec.has_identities:
            reply.identities = rows.identities
        return reply

    async def status(self, call: Call) -> Any:
        """Return what `headrace status` shows of this shard."""
        sessions, catalog, server = self._ingest.sessions, self._ingest.catalog, self.server
        return idl.StatusReply(
            server_id=self._config.server_id,
            shard=self._config.shard,
            num_shards=len(self._config.addresses),
            version=metadata.version("headrace"),
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started_s,
            log_seq=self._log.last_seq,
            applied_seq=self._applier.applied_seq,
            inflight_bytes=server.inflight_bytes if server else 0,
            num_connections=server.num_connections if server else 0,
            num_refused=server.num_refused if server else 0,
            num_rows_written=self._ingest.num_rows_written,
            tables=[
                idl.TableStatus(
                    spec=spec_to_idl(table.spec),
                    num_rows_estimate=self._store.num_rows_estimate(table.table_id),
                )
                for table in catalog
            ],
            clients=[
                idl.ClientStatus(
                    run=session.run,
                    client=session.client,
                    epoch=session.epoch,
                    last_client_seq=session.last_client_seq,
                    step=session.step,
                    is_connected=session.num_connections > 0,
                )
                for session in sessions
            ],
        )

    def disconnected(self, peer: Peer) -> None:
        """Note that a connection has ended."""
        if isinstance(peer.session, Session):
            peer.session.num_connections -= 1
            peer.session = None

    def _bind(self, peer: Peer, session: Session) -> None:
        self.disconnected(peer)
        peer.session = session
        session.num_connections += 1


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
        block_cache_bytes=config.block_cache_bytes, write_buffer_bytes=config.memtable_bytes // _NUM_MEMTABLES
    )
    applier_config = ApplierConfig(flush_bytes=2 * config.memtable_bytes)
    async with contextlib.AsyncExitStack() as stack:
        store = await asyncio.to_thread(RowStore.open, config.directory / "store", config=store_config)
        stack.push_async_callback(asyncio.to_thread, store.close)
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
        )
        started_s = time.monotonic()
        if num_records := await ingest.recover():
            fact(_log, logging.INFO, "recovered", records=num_records, seconds=round(time.monotonic() - started_s, 3))
        retaining = asyncio.create_task(_retain(log, store, config), name="headrace-retention")
        stack.push_async_callback(_cancel, retaining)
        yield Shard(config, log, store, applier, ingest, retaining)


async def _retain(log: FileUpdateLog, store: RowStore, config: ShardConfig) -> NoReturn:
    """Remove log that has outlived its settings, and never what the store would need to recover."""
    while True:
        await asyncio.sleep(_RETENTION_INTERVAL_S)
        await asyncio.to_thread(
            log.trim,
            store.durable_seq + 1,
            max_bytes=config.log_retention_bytes,
            max_age_s=config.log_retention_s,
        )


async def _cancel(task: asyncio.Task[NoReturn]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def _error_of(never_done: Awaitable[object]) -> HeadraceError:
    try:
        await never_done
    except HeadraceError as exc:
        return exc
    raise AssertionError("what never ends has ended")
