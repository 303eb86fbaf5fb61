"""What a shard answers from its log and its rows, whoever writes them: its owner, or the shard that it follows."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from headrace.paramserver.ingest.digests import Digester
from headrace.paramserver.reading.row_query import MAX_ROWS_READ, MAX_TABLES_READ, RowQuery
from headrace.paramserver.rpc.server import Call, Peer
from headrace.paramserver.rpc.shard_places import ShardPlaces
from headrace.paramserver.shard.hand_over import HandOver
from headrace.paramserver.shard.sampler import ShardParts, ShardSampler, owner_to_idl
from headrace.paramserver.snapshots.maker import SnapshotMaker
from headrace.paramserver.snapshots.uploader import SnapshotUploader
from headrace.paramserver.store.catalog import Table
from headrace.paramserver.store.deltas import decode_row_ids
from headrace.paramserver.store.row_reader import RowsRead
from headrace.paramserver.system.log_lines import fact
from headrace.paramserver.system.tracing import span
from headrace.schemas.errors import (
    CorruptionError,
    GoneError,
    HeadraceError,
    ProtocolMismatchError,
    RequestError,
    UnauthorizedError,
)
from headrace.schemas.idl import PROTOCOL_VERSION, idl, spec_to_idl
from headrace.schemas.snapshot_manifest import SnapshotManifest
from headrace.schemas.tables import TableSpec

__all__ = ["ReadService"]

_log = logging.getLogger(__name__)

_SNAPSHOT_CHUNK_BYTES = 8 << 20
_ROW_ID_BYTES = 8


class ReadService:
    """The methods that read. Cancelled reads, scans and long polls leave nothing behind. Thread: the event loop's."""

    def __init__(self, parts: ShardParts, *, term: int) -> None:
        """Serve an open log and store in a term, 0 for none."""
        config = parts.config
        self.feed, self.log, self.store = parts.feed, parts.log, parts.store
        self.sampler = ShardSampler(parts)
        self._config, self._parts = config, parts
        self._applier, self._ingest, self._retention = parts.applier, parts.ingest, parts.retention
        self._snapshots, self._uploader = parts.snapshots, parts.uploader
        self._limits = config.limits
        leases = parts.retention.snapshot_leases
        self._snapshot_maker = SnapshotMaker(
            parts.log,
            parts.ingest,
            parts.applier,
            parts.store,
            parts.snapshots,
            leases,
            config.server_id,
            config.shard,
            term=term,
        )
        self._digester = Digester(parts.ingest, parts.applier, parts.store)

    async def applied(self) -> None:
        """Wait until every row that can be read is in RocksDB; raises the error if applying fails."""
        await self._applier.wait_applied(self._ingest.submitted_seq)

    async def first_failure(self, *others: HandOver, is_owner: bool = True) -> HeadraceError:
        """Wait for an error that stops this shard, and return it. Cancellation: harmless.

        A shard that is no owner any more goes on when another one claims it.
        """
        parts = self._parts
        all_parts = (
            *(parts.ingest, parts.log, parts.applier, parts.retention, parts.room, *others),
            *((parts.membership, parts.archiver) if is_owner else ()),
        )
        waiting: list[asyncio.Task[HeadraceError]] = [
            asyncio.create_task(part.wait_failed(), name="headrace-shard-failed")
            for part in all_parts
            if part is not None
        ]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in waiting:
                task.cancel()

    def _check_protocol(self, request: Any) -> None:
        if request.protocol_version != PROTOCOL_VERSION:
            theirs = request.protocol_version
            raise ProtocolMismatchError(f"this server speaks protocol version {PROTOCOL_VERSION}, the client {theirs}")

    def _hello_reply(self, places: ShardPlaces, *, last_client_seq: int = 0, **more: Any) -> Any:
        """Return the `idl.HelloReply` with the tables as of now."""
        config = self._config
        lacking = {table.spec.fqn: table.filling for table in self._ingest.catalog if table.filling is not None}
        filling = {name: filling.from_row for name, filling in lacking.items() if not filling.updated_only}
        before = [idl.Predecessor(server_id=each.server_id, seqs=list(each.seqs)) for each in config.predecessors]
        return idl.HelloReply(
            protocol_version=PROTOCOL_VERSION,
            server_id=config.server_id,
            shard=config.shard,
            shards=places.to_idl(),
            limits=self._limits.to_idl(),
            highest_epoch=self._ingest.sessions.highest_epoch,
            last_client_seq=last_client_seq,
            tables=[spec_to_idl(table.spec) for table in self._ingest.catalog],
            owners=[owner for table in self._ingest.catalog if (owner := owner_to_idl(table)) is not None],
            filling=list(filling),
            filling_from_rows=list(filling.values()) if any(filling.values()) else None,
            updated_only=[name for name, filling in lacking.items() if filling.updated_only] or None,
            time_us=time.time_ns() // 1000,
            predecessors=before or None,
            **more,
        )

    async def get_embeddings(self, call: Call, request: Any) -> Any:
        """Return rows as of all acked batches, applied or not."""
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
            self._ingest.check_home(table.spec, row_ids)
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
        """Refuse: replicas have an index of identities."""
        raise UnauthorizedError("only replicas find rows by identity: give the address of a `headrace replica`")

    async def fetch_updates(self, call: Call, request: Any) -> Any:
        """Wait for durable records of the update log and return them."""
        with span("headrace.fetchUpdates", shard=self._config.shard, from_seq=request.from_seq):
            return await self.feed.fetch(request, call.peer)

    async def digest_rows(self, call: Call, request: Any) -> Any:
        """Add up digests of rows as of all acked batches. Cancelled, the scan ends on its own."""
        return await self._digester.digest(request)

    async def create_snapshot(self, call: Call, request: Any) -> Any:
        """Make this shard's part of a snapshot, or upload it. Cancelled, the part stays until it is discarded."""
        if request.uploads:
            part = self._snapshot_maker.made(request.name)
            objects = await self._stored.upload(request.name, part, is_wanted=lambda: call.peer.is_connected)
            files = [idl.StoredFile(path=path, object_path=key) for path, key in objects.items()]
            return idl.CreateSnapshotReply(part=part.encode(), files=files)
        if self._uploader is None:
            self._check_whole_here()
        part = await self._snapshot_maker.create(request, is_wanted=lambda: call.peer.is_connected)
        return idl.CreateSnapshotReply(part=part.encode())

    async def finish_snapshot(self, call: Call, request: Any) -> Any:
        """Publish a snapshot of all shards, discard it, or remove a published one; atomic, and safe to repeat."""
        if request.removes:
            await asyncio.to_thread(self._snapshots.remove, request.name)
        elif request.manifest is None:
            if self._uploader is not None:
                self._uploader.settle(request.name)
            await asyncio.to_thread(self._snapshots.discard, request.name)
            self._snapshot_maker.release_log(request.name)
        else:
            try:
                manifest = SnapshotManifest.decode(request.manifest.encode())
            except CorruptionError as exc:  # damaged on its way here, not on our disk
                raise RequestError(str(exc)) from exc
            if (manifest.name, manifest.server_id) != (request.name, self._config.server_id):
                raise RequestError(f"a manifest of {manifest.name!r} of {manifest.server_id} for {request.name!r} here")
            if request.files is None:
                self._check_whole_here()
                await asyncio.to_thread(self._snapshots.publish, manifest)
            else:
                await self._stored.publish(manifest, {file.path: file.object_path for file in request.files})
            fact(_log, logging.INFO, "snapshot", name=manifest.name, step=manifest.step, bytes=manifest.size_bytes)
        return idl.FinishSnapshotReply(name=request.name)

    def _check_whole_here(self) -> None:
        """Refuse a snapshot that stays on disk where no disk has the parts of all shards."""
        if not self._config.is_whole_here:
            raise RequestError(
                "the server's shards are on several nodes, so its snapshots go to an object store: give the cluster "
                "file one (object_store: s3://bucket/prefix), make a snapshot there, and name its URL, not a server"
            )

    @property
    def _stored(self) -> SnapshotUploader:
        if self._uploader is None:
            raise RequestError("this server has no object store: headrace serve --object-store URL")
        return self._uploader

    async def fetch_snapshot(self, call: Call, request: Any) -> Any:
        """Read a piece of a published snapshot."""
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

    def begin_drain(self) -> None:
        """End requests that wait for an event or would take long; idempotent."""
        self.feed.stop()
        self._snapshot_maker.stop()
        if self._uploader is not None:
            self._uploader.stop()

    async def status(self, call: Call) -> Any:
        """Return the shard's `idl.StatusReply`."""
        return await self.sampler.status()

    def _check_reply(self, table: Table, num_rows: int, row_bytes: int, *, others_bytes: int = 0) -> None:
        # Before the reply takes memory.
        limit = self._config.max_frame_bytes
        if others_bytes + num_rows * row_bytes > limit:
            what = f"table {table.spec.fqn!r}: {num_rows} rows of {row_bytes} bytes"
            raise RequestError(f"{what} do not fit the longest frame, {limit} bytes: ask for less at once")

    def disconnected(self, peer: Peer) -> None:
        """Do nothing: readers have no session."""


def _check_number(num_rows: int) -> None:
    if num_rows > MAX_ROWS_READ:
        raise RequestError(f"{num_rows} rows with one request: ask for at most {MAX_ROWS_READ} at once")


def _row_columns(spec: TableSpec, rows: RowsRead, with_states: bool, with_versions: bool) -> dict[str, Any]:
    """Return the columns that a `GetEmbeddingsReply` and a `RowsFound` share."""
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
