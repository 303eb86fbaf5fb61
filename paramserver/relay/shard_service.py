"""A relay's answers: those of a shard to its followers. It refuses writes and reads of rows, and names the server."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NoReturn

from headrace.paramserver.relay.kept_snapshots import KeptSnapshots
from headrace.paramserver.relay.mirrored_log import MirroredLog
from headrace.paramserver.relay.options import RelayConfig
from headrace.paramserver.relay.shard_mirror import ShardMirror
from headrace.paramserver.rpc.dispatch import define_all
from headrace.paramserver.rpc.security import role_name
from headrace.paramserver.rpc.server import Call, Peer, ThriftServer
from headrace.schemas.errors import (
    GoneError,
    ProtocolMismatchError,
    UnauthorizedError,
    UnavailableError,
)
from headrace.schemas.idl import PROTOCOL_VERSION, idl

__all__ = ["RelayedShard", "to_ms"]

_VERSION = metadata.version("headrace")  # of what runs here, whatever is installed by now
_MAX_MS = 2**62


class RelayedShard:
    """The service of one shard of a relay. Thread: the event loop's. Cancelled calls leave nothing behind."""

    def __init__(
        self,
        shard: int,
        mirrors: Sequence[ShardMirror],
        snapshots: KeptSnapshots,
        config: RelayConfig,
        addresses: Sequence[tuple[str, int]],
    ) -> None:
        """Serve one of the mirrors; followers find all shards at `addresses`, which are the relay's own."""
        self.server: ThriftServer | None = None  # calls this service; `status` reports its figures
        self._shard, self._mirrors, self._mirror = shard, mirrors, mirrors[shard]
        self._snapshots, self._config, self._addresses = snapshots, config, addresses
        self._started_s = time.monotonic()
        self._is_draining = False

    @property
    def term(self) -> int:
        """The shard's term, which every reply has; 0 where there is none."""
        return self._mirror.hello.term or 0

    def begin_drain(self) -> None:
        """Answer long polls at once; idempotent."""
        self._is_draining = True
        if self._mirror.log is not None:
            self._mirror.log.feed.stop()

    async def hello(self, call: Call, request: Any) -> Any:
        """Return to a reader what the shard's hello says, with the relay's own addresses."""
        if request.protocol_version != PROTOCOL_VERSION:
            theirs = request.protocol_version
            raise ProtocolMismatchError(f"this relay speaks protocol version {PROTOCOL_VERSION}, the client {theirs}")
        if request.role != idl.Role.READER:
            raise UnauthorizedError(
                f"this is a relay of {self._config.server}: it answers followers, and you say hello as "
                f"{role_name(request.role)}; trainers and administrators talk to the server"
            )
        source = self._mirror.hello
        reply = idl.HelloReply(
            protocol_version=PROTOCOL_VERSION,
            server_id=source.server_id,
            shard=self._shard,
            shards=[
                idl.ShardAddress(shard=n, host=host, port=port, term=mirror.hello.term)
                for n, (mirror, (host, port)) in enumerate(zip(self._mirrors, self._addresses, strict=True))
            ],
            limits=self._config.limits.to_idl(),
            highest_epoch=source.highest_epoch,
            last_client_seq=0,
            tables=source.tables,
            owners=source.owners,
            filling=source.filling,
            filling_from_rows=source.filling_from_rows,
            updated_only=source.updated_only,
            knowledge_age_ms=to_ms(self._mirror.knowledge_age_s),
        )
        return reply

    async def fetch_updates(self, call: Call, request: Any) -> Any:
        """Wait for records of the mirror and return them."""
        log = self._log
        if request.server_id == self._mirror.hello.server_id and request.from_seq > log.last_seq + 1:
            await self._mirror.check_ahead(request.from_seq)
        reply = await log.feed.fetch(request, call.peer)
        if log is not self._mirror.log:  # it was replaced while this call waited
            raise UnavailableError("this relay has opened its log anew: ask again")
        reply.knowledge_age_ms = to_ms(self._mirror.knowledge_age_s)
        return reply

    async def fetch_snapshot(self, call: Call, request: Any) -> Any:
        """Read a piece of a snapshot that the relay keeps."""
        name = request.name
        if not name:
            offered = self._snapshots.offered(self._mirrors)
            if offered is None:
                raise GoneError(self._snapshots.why_none(self._mirrors))
            name = offered.name
        reply = await asyncio.to_thread(self._snapshots.read, request, name, self._config.max_frame_bytes // 2)
        return reply

    async def status(self, call: Call) -> Any:
        """Return what `headrace status` shows about this shard of the relay."""
        mirror, log, server = self._mirror, self._mirror.log, self.server
        source = mirror.hello
        offered = self._snapshots.offered(self._mirrors)
        last_seq = 0 if log is None else log.last_seq
        failure = mirror.failure or (self._snapshots.failure if offered else self._snapshots.why_none(self._mirrors))
        reply = idl.StatusReply(
            server_id=source.server_id,
            shard=self._shard,
            num_shards=len(self._mirrors),
            version=_VERSION,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started_s,
            log_seq=last_seq,
            applied_seq=last_seq,
            accepted_seq=last_seq,
            inflight_bytes=0 if server is None else server.inflight_bytes,
            num_connections=0 if server is None else server.num_connections,
            num_refused=0 if server is None else server.num_refused,
            refused_ago_ms=None if server is None else server.refused_ago_ms,
            num_rows_written=0,
            tables=[_table_status(source, spec) for spec in source.tables],
            clients=[],
            relay=idl.RelayStatus(
                source=mirror.source,
                source_seq=mirror.source_seq,
                lag_ms=to_ms(mirror.lag_s),
                knowledge_age_ms=to_ms(mirror.knowledge_age_s),
                first_seq=1 if log is None else log.first_seq,
                log_bytes=0 if log is None else log.size_bytes,
                snapshot=None if offered is None else offered.name,
                failure=failure,
                num_restarts=mirror.num_restarts,
                num_followers=0 if log is None else len(log.feed.followers),
            ),
            followers=[] if log is None else await log.feed.followers_status(),
        )
        return reply

    def disconnected(self, peer: Peer) -> None:
        """Do nothing: readers have no session."""

    @property
    def _log(self) -> MirroredLog:
        log = self._mirror.log
        if log is None or self._is_draining:
            raise UnavailableError(self._mirror.failure or "this relay has not begun yet, or is stopping: ask again")
        return log


async def _refuse(service: RelayedShard, call: Call, request: Any) -> NoReturn:
    # Also digests: passing a thousand audits on would load the shards.
    raise UnauthorizedError(
        f"this is a relay without rows: {call.method} goes to the server at {service._config.server}"
    )


define_all(RelayedShard, _refuse)


def to_ms(seconds: float) -> int:
    """Return whole milliseconds; a very long time for one that has not begun."""
    return round(seconds * 1000) if math.isfinite(seconds) else _MAX_MS


def _table_status(hello: Any, spec: Any) -> Any:
    owner = next((owner for owner in hello.owners or () if owner.fqn == spec.fqn), None)
    return idl.TableStatus(spec=spec, num_rows_estimate=0, owner=owner)
