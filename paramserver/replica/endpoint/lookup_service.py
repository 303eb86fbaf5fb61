"""A replica's answers over the wire: the read methods of the parameter server's Thrift service.

To a client, a replica is a server with one shard, so everything that reads from a server also reads from a replica.
Tables are reported as the replica has them: without optimizer states, but with runtime meta, and without the identities
that `getEmbeddings` would return. Dense tensors are among them, as at the server; their rows have the version of the
part that they belong to.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable
from concurrent.futures import Executor
from importlib import metadata
from typing import Any

import numpy as np

from headrace.paramserver.reading.row_query import MAX_TABLES_READ
from headrace.paramserver.replica.copy.array_replica import ArrayReplica
from headrace.paramserver.replica.copy.audit import ReplicaAuditReport
from headrace.paramserver.replica.copy.shard_tail import Freshness
from headrace.paramserver.replica.endpoint.health import Readiness, SelfAudit
from headrace.paramserver.replica.tables.base import Found, Ids, ReplicaTable
from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.dispatch import define_all
from headrace.paramserver.rpc.security import role_name
from headrace.paramserver.rpc.server import Call, Peer, ThriftServer
from headrace.schemas.errors import (
    ProtocolMismatchError,
    RequestError,
    UnauthorizedError,
    UnavailableError,
)
from headrace.schemas.idl import PROTOCOL_VERSION, idl, spec_to_idl, wire_text
from headrace.schemas.row_records import MISSING, PRESENT
from headrace.schemas.table_names import model_of, path_of
from headrace.schemas.tables import TableSpec

__all__ = ["ReplicaService"]


# Upper limits of a reply without its columns, and of each table in it.
_VERSION = metadata.version("headrace")  # of what runs here, whatever is installed by now
_REPLY_OVERHEAD_BYTES, _TABLE_OVERHEAD_BYTES = 4096, 64
_VERSION_BYTES = 24  # epoch, step and time of a row


class ReplicaService:
    """The service of one replica, from before the replica has begun until after it is closed.

    Thread: the event loop's; lookups run in threads of the executor.
    """

    def __init__(
        self, readiness: Readiness, *, address: tuple[str, int], limits: ServerLimits, executor: Executor
    ) -> None:
        """Refuse reads as unavailable until `readiness` has a replica; clients connect to `address`."""
        self.server: ThriftServer | None = None  # calls this service; `status` reports its figures
        self.audit: SelfAudit | None = None  # the replica's audits, if any; `status` reports them
        self._readiness = readiness
        self._address = address
        self._limits = limits
        self._executor = executor
        self._started_s = time.monotonic()

    async def hello(self, call: Call, request: Any) -> Any:
        """Return the tables and limits to a reader. Cancellation: atomic; it does not wait."""
        if request.protocol_version != PROTOCOL_VERSION:
            raise ProtocolMismatchError(
                f"this replica speaks protocol version {PROTOCOL_VERSION}, the client {request.protocol_version}"
            )
        if request.role != idl.Role.READER:
            raise UnauthorizedError(
                f"{self._where} is a replica: it answers readers, and you say hello as {role_name(request.role)}; give "
                "trainers and administrators the address of the parameter server"
            )
        replica = self._replica
        host, port = self._address
        return idl.HelloReply(
            protocol_version=PROTOCOL_VERSION,
            server_id=replica.server_id,
            shard=0,
            shards=[idl.ShardAddress(shard=0, host=host, port=port)],
            limits=self._limits.to_idl(),
            highest_epoch=replica.epoch,
            last_client_seq=0,
            tables=[
                spec_to_idl(_served(spec)) for _, spec in sorted({**replica.tables, **replica.dense_tensors}.items())
            ],
        )

    async def get_embeddings(self, call: Call, request: Any) -> Any:
        """Return rows of one or several tables, or of dense tensors, all from one moment.

        Cancellation: safe; the lookup finishes.
        """
        replica = self._replica
        wanted = _wanted_of(request, replica, self._limits.max_frame_bytes, self._where)
        loop = asyncio.get_running_loop()
        how = request.with_states, request.with_versions
        found, seq = await loop.run_in_executor(self._executor, _look_up, replica, wanted, *how)
        first, *more = found
        reply = idl.GetEmbeddingsReply(**first, seq=seq)
        if request.more is not None:
            reply.more = [idl.RowsFound(**columns) for columns in more]
        return reply

    async def find_rows(self, call: Call, request: Any) -> Any:
        """Return the rows that raw ids are mapped to. Cancellation: safe; the search finishes."""
        replica = self._replica
        spec = replica.spec_of(request.fqn)
        if len(request.identities) % 8:
            raise RequestError(
                f"table {spec.fqn!r}: {len(request.identities)} bytes of identities are no multiple of 8"
            )
        identities = np.frombuffer(request.identities, "<i8").astype(np.int64)
        if identities.nbytes + _REPLY_OVERHEAD_BYTES > self._limits.max_frame_bytes:
            raise RequestError(f"table {spec.fqn!r}: {identities.size} identities are too many for one reply")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, _find_rows, replica, spec.fqn, identities)

    async def status(self, call: Call) -> Any:
        """Return what `headrace status` shows about this replica, also before it has begun."""
        replica, server, state = self._readiness.replica, self.server, self._readiness.look()
        tables = {} if replica is None else replica.tables
        dense = {} if replica is None else replica.dense_tensors
        return idl.StatusReply(
            server_id="" if replica is None else replica.server_id,
            shard=0,
            num_shards=1,
            version=_VERSION,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started_s,
            log_seq=min((shard.last_seq for shard in state.shards), default=0),
            applied_seq=min((shard.visible_seq for shard in state.shards), default=0),
            inflight_bytes=server.inflight_bytes if server else 0,
            num_connections=server.num_connections if server else 0,
            num_refused=server.num_refused if server else 0,
            num_disk_failures=server.stats.num_storage if server else 0,
            refused_ago_ms=server.refused_ago_ms if server else None,
            num_rows_written=0,
            tables=[
                idl.TableStatus(spec=spec_to_idl(_served(spec)), num_rows_estimate=replica.num_rows(fqn))
                for fqn, spec in sorted(tables.items())
                if replica is not None
            ]
            + [
                idl.TableStatus(spec=spec_to_idl(_served(spec)), num_rows_estimate=spec.num_rows)
                for _, spec in sorted(dense.items())
            ],
            clients=[],
            replica=idl.ReplicaStatus(
                is_ready=state.is_ready,
                lag_s=state.lag_s,
                lag_steps=state.lag_steps,
                visible_epoch=state.visible[0],
                visible_step=state.visible[1],
                shards=[_shard_to_idl(shard) for shard in state.shards],
                failure=None if state.failure is None else wire_text(state.failure),
                audit=None if self.audit is None else _audit_to_idl(self.audit),
            ),
        )

    def disconnected(self, peer: Peer) -> None:
        """Do nothing: a reader leaves nothing behind."""

    @property
    def _where(self) -> str:
        return format_address(*self._address)

    @property
    def _replica(self) -> ArrayReplica:
        replica = self._readiness.replica
        if replica is None:
            raise UnavailableError(f"this replica has not begun to serve: {self._readiness.why_not_begun}")
        return replica


async def _refuse(service: ReplicaService, call: Call, request: Any) -> Any:
    raise UnauthorizedError(
        f"{service._where} is a replica, and {call.method} is for the parameter server: give an EmbeddingReplica and "
        "commands the server's address; EmbeddingReader and BlockingReader read from a replica"
    )


define_all(ReplicaService, _refuse)


def _look_up(
    replica: ArrayReplica, wanted: list[tuple[TableSpec, Ids]], with_meta: bool, with_versions: bool
) -> tuple[list[dict[str, Any]], int]:
    """Return copies of each table's columns, and the seq up to which they have all batches. Thread: any."""
    columns: list[dict[str, Any]] = [{} for _ in wanted]

    def gather_of(part: int) -> Callable[[ReplicaTable, Ids], Found]:
        def gather(table: ReplicaTable, ids: Ids) -> Found:
            found = table.gather(ids)  # may run twice; the last result counts
            presence = np.where(found[1], MISSING, PRESENT).astype(np.uint8)
            columns[part] = {"presence": presence, "weights": found[0].view(np.uint8), "states": []}
            return found

        return gather

    def look() -> None:
        tables = [(part, spec, ids) for part, (spec, ids) in enumerate(wanted) if not spec.is_dense]
        replica.look([(spec.fqn, ids, gather_of(part)) for part, spec, ids in tables])
        for part, (spec, ids) in enumerate(wanted):
            if spec.is_dense:
                columns[part] = _dense_rows(replica, spec, ids, with_versions)
            elif with_meta:
                columns[part]["states"] = _meta_of(replica, spec, ids)

    seq = _visible_seq(replica)
    if with_meta or any(spec.is_dense for spec, _ in wanted):
        replica.at_one_moment(look)
    else:
        look()
    return columns, seq


def _dense_rows(replica: ArrayReplica, spec: TableSpec, ids: Ids, with_versions: bool) -> dict[str, Any]:
    part = replica.dense_part(model_of(spec.fqn))
    path = path_of(spec.fqn)
    if path not in part.specs:
        raise UnavailableError(f"dense tensor {spec.fqn!r} comes with the trainer's next dense step")
    presence = np.full(ids.size, PRESENT, np.uint8)
    columns = {"presence": presence, "weights": part.rows_of(path, ids).view(np.uint8), "states": []}
    if with_versions:
        columns |= {"epochs": np.full(ids.size, part.epoch, np.int64), "steps": np.full(ids.size, part.step, np.int64)}
        columns["times_us"] = np.zeros(ids.size, np.int64)
    return columns


def _meta_of(replica: ArrayReplica, spec: TableSpec, ids: Ids) -> list[Any]:
    state, meta = replica.look_up_meta(spec.fqn, ids)
    data = meta.view(np.uint8)
    return [idl.StateColumn(name=state.name, dtype=int(state.dtype), width=state.width, data=data)]


def _find_rows(replica: ArrayReplica, fqn: str, identities: Ids) -> Any:
    """Return the `FindRowsReply`. Thread: any."""
    seq = _visible_seq(replica)
    return idl.FindRowsReply(row_ids=replica.find_rows(fqn, identities), seq=seq)


def _visible_seq(replica: ArrayReplica) -> int:
    """Return the seq up to which the next lookup sees every batch; with several shards, the lowest of theirs.

    Call it before the lookup: what becomes visible in between is in the answer, but not in the promise.
    """
    return min((shard.visible_seq for shard in replica.freshness()), default=0)


def _wanted_of(request: Any, replica: ArrayReplica, max_reply_bytes: int, where: str) -> list[tuple[TableSpec, Ids]]:
    """Return a request's tables and the rows of each, checked against what the replica has and what a frame holds."""
    parts = [request, *(request.more or ())]
    if len(parts) > MAX_TABLES_READ:
        raise RequestError(f"rows of {len(parts)} tables with one request: ask for at most {MAX_TABLES_READ}")
    wanted, left = [], max_reply_bytes - _REPLY_OVERHEAD_BYTES
    for part in parts:
        dense = replica.dense_spec(part.fqn)
        spec = _served(replica.spec_of(part.fqn) if dense is None else dense)
        if request.with_versions and dense is None:
            raise RequestError(
                f"table {part.fqn!r}: {where} is a replica, which returns no versions of rows; give the reader the "
                "address of the parameter server"
            )
        if request.with_states and spec.runtime_meta is None:
            raise RequestError(
                f"table {part.fqn!r}: {where} is a replica, which keeps no optimizer states; give the reader the "
                "address of the parameter server, or read without with_states"
            )
        spec = spec if request.with_states else spec.of_weights
        row_bytes = _row_bytes(spec) + _VERSION_BYTES * request.with_versions
        row_ids = _row_ids_of(part.row_ids, spec, row_bytes, left)
        left -= row_ids.size * row_bytes + _TABLE_OVERHEAD_BYTES
        wanted.append((spec, row_ids))
    return wanted


def _row_ids_of(column: Any, spec: TableSpec, row_bytes: int, left: int) -> Ids:
    """Return row ids as int64[n], copied out of the request's buffer; `left` is what the reply has room for, bytes."""
    if len(column) % 8:
        raise RequestError(f"table {spec.fqn!r}: {len(column)} bytes of row ids are not a multiple of 8")
    row_ids = np.frombuffer(column, "<i8").astype(np.int64)
    most = max(left, 0) // row_bytes
    if row_ids.size > most:
        raise RequestError(
            f"table {spec.fqn!r}: {row_ids.size} rows of {row_bytes} bytes are too long for one reply; ask for "
            f"{most} at a time"
        )
    spec.check_row_ids(row_ids)
    return row_ids


def _row_bytes(spec: TableSpec) -> int:
    return spec.dim * spec.dtype.size_bytes + 1 + sum(state.width * state.dtype.size_bytes for state in spec.states)


def _served(spec: TableSpec) -> TableSpec:
    """Return a table as clients of a replica see it: of its states it keeps runtime meta alone."""
    state = spec.runtime_meta if spec.has_identities else None
    return dataclasses.replace(spec.of_weights, states=() if state is None else (state,))


def _shard_to_idl(shard: Freshness) -> Any:
    delay = shard.delay
    return idl.ReplicaShardStatus(
        shard=shard.shard,
        visible_seq=shard.visible_seq,
        last_seq=shard.last_seq,
        lag_steps=shard.lag_steps,
        delay_p50_s=delay.percentile(50) if delay.count else None,
        delay_p99_s=delay.percentile(99) if delay.count else None,
        age_s=shard.age_s,
    )


def _audit_to_idl(audit: SelfAudit) -> Any:
    report = audit.report or ReplicaAuditReport(tables=(), left_out={})
    return idl.ReplicaAudit(
        ended_us=0 if audit.report is None else int(audit.ended_s * 1e6),
        num_rows=report.num_rows,
        num_differing_buckets=report.num_differing_buckets,
        difference=wire_text(report.difference) or None,
        failure=None if audit.failure is None else wire_text(audit.failure),
        num_left_out=len(report.left_out),
    )
