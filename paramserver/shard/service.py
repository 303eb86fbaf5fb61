"""The Thrift methods of one shard, and how its parts are opened and closed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from headrace.paramserver.archive.archiver import Archiver
from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.expiry.expirer import Expirer
from headrace.paramserver.expiry.policy import ExpiryRules
from headrace.paramserver.expiry.table_pass import PassContext
from headrace.paramserver.ingest.feed import UpdateFeed
from headrace.paramserver.ingest.pipeline import Ingest, stored_mark
from headrace.paramserver.log.claims import HeldClaims
from headrace.paramserver.log.interface import ReplicatedLog, UpdateLog, UpdateLogConfig
from headrace.paramserver.log.leases import LogLease
from headrace.paramserver.log.opening import DEFAULT_MAX_BYTES, open_follower, open_log
from headrace.paramserver.log.sessions import Session
from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.rpc.outages import Backoff
from headrace.paramserver.rpc.server import Call, Peer
from headrace.paramserver.rpc.shard_places import STANDBY, ShardPlace, ShardPlaces
from headrace.paramserver.shard.disk_room import DiskRoom
from headrace.paramserver.shard.follower_service import FollowingShard
from headrace.paramserver.shard.following import Following
from headrace.paramserver.shard.hand_over import HandOver
from headrace.paramserver.shard.membership import Membership
from headrace.paramserver.shard.read_service import ReadService
from headrace.paramserver.shard.retention import LogRetention, trim_log
from headrace.paramserver.shard.sampler import ShardParts
from headrace.paramserver.shard.standby import Standby, copies_to_idl, restore_hint
from headrace.paramserver.snapshots.directory import SnapshotFiles
from headrace.paramserver.snapshots.uploader import SnapshotUploader
from headrace.paramserver.store.applier import Applier, ApplierConfig
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.system.event_loop import LoopProbe, background_task, lower_thread_priority
from headrace.paramserver.system.limits import files_for_store
from headrace.paramserver.system.log_lines import fact
from headrace.paramserver.system.tracing import span
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    GoneError,
    HeadraceError,
    LogFencedError,
    RequestError,
    ReshardedError,
    UnauthorizedError,
    UnavailableError,
)
from headrace.schemas.idl import PROTOCOL_VERSION, idl, spec_from_idl

__all__ = ["Shard", "open_shard"]

_log = logging.getLogger(__name__)

# How long the applier holds rows back to write more at once. Neither acks nor reads wait for it.
_HOLD_S = 2.0
# Part of the backlog in one window: while one is written, the next gathers, and there is room for more.
_WINDOW_PART = 3
_SNAPSHOT_CHUNK_BYTES = 8 << 20
_ROW_ID_BYTES = 8
# RocksDB fills one while it writes up to two others out.
_NUM_MEMTABLES = 3
_MIB = 1 << 20
_ANSWERED_ALWAYS = frozenset({"setEmbeddings", "status", "promoteShard"})
_OF_ITS_LOG = frozenset({"hello", "fetchUpdates", "fetchSnapshot"})
_MAX_HOLD_MS = 60_000
# Of a record in a replicated log, which has room for about a MiB: for the names of a batch's tables.
_NAMES_BYTES = 128 << 10
# How often the store notes records that the log has written for itself, about one a second.
_PASS_S = 1.0
_TRIM_S = 15.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 2.0
# Longer than an append proves that a replicated log is owned.
_LEASE_S = 4.0


class Shard(ReadService):
    """The service of a shard that takes updates, made by `open_shard`. Thread: the event loop's."""

    def __init__(
        self,
        parts: ShardParts,
        membership: Membership,
        expirer: Expirer,
        *,
        accepted: str | None = None,
        was_forced: bool = False,
    ) -> None:
        """Serve an open log and store.

        `accepted` is the offer by which this shard took over from the one that it followed; `was_forced` says that it
        did so without one.
        """
        super().__init__(parts, term=membership.term)
        self._accepted, self._was_forced = accepted, was_forced
        self._writers: set[Peer] = set()
        self._hand_over = HandOver(parts.config, parts.ingest, term=membership.term, on_left=self._leave)
        if parts.ingest.offer is not None and parts.stream is None:
            self._hand_over.resume(parts.ingest.offer)
        config = parts.config
        self.expirer = expirer
        self._membership, self._archiver = membership, parts.archiver
        # A batch is one record of the log, with its tables' names besides.
        if config.log is not None:
            longest = min(config.limits.max_frame_bytes, parts.log.max_payload_bytes - _NAMES_BYTES)
            self._limits = replace(config.limits, max_frame_bytes=longest)

    @property
    def term(self) -> int:
        """In which this process serves the shard; 0 for none."""
        return max(self._membership.term, self.log.term)

    def check_answer(self, method: str) -> None:
        """Check, once a reply is computed, that no other process may have acked something since.

        An ack says itself that this process owned the log. A status is for people, who want it then most.
        """
        if method in _ANSWERED_ALWAYS:
            return
        self._check_here()
        # Its log in files says the same, whoever takes updates now: followers need it up to its end.
        if not (self._config.log is None and (method in _OF_ITS_LOG or self._hand_over.may_read)):
            self._ingest.check_open()
        self.log.check_owned()

    def _check_here(self) -> None:
        """Raise `ReshardedError` if another server has taken the place of this one."""
        if (resharded := self._hand_over.resharded) is not None:
            raise ReshardedError(str(resharded), successor=resharded.successor)

    async def wait_failed(self) -> HeadraceError:
        """Wait for an error that stops this shard, and return it. Cancellation: harmless."""
        error = await self.first_failure(self._hand_over)
        if not isinstance(error, LogFencedError):
            return error
        if self._config.log is not None:
            return await self._word_of_log() or error
        if self._ingest.offer is not None:  # who took over has claimed the shard; this process tells where it is
            return await self.first_failure(self._hand_over, is_owner=False)
        return error

    async def _word_of_log(self) -> HeadraceError | None:
        """Return why the log has failed, None if this process owns it still: then another copy was made beside it.

        A process that takes the log over claims its term in the object store, where this one may see it first.
        """
        while self.log.failed is None:
            await asyncio.sleep(_LEASE_S)
            with contextlib.suppress(UnavailableError):
                self.log.check_owned()  # by an append that was sent after the claim was seen
                return None
        return self.log.failed

    @property
    def was_taken_over(self) -> bool:
        """Whether another process owns the log now, so that this one may follow it."""
        return self._config.log is not None and isinstance(self.log.failed, LogFencedError)

    async def hello(self, call: Call, request: Any) -> Any:
        """Register tables, open or resume a writer's session, and return what a client must know; safe to repeat."""
        self._check_protocol(request)
        if request.shards is not None:
            if request.role != idl.Role.ADMIN:
                raise UnauthorizedError("only a client with the role ADMIN may tell where shards are")
            self._membership.hear(request.shards)
        self._check_here()
        if (successor := self._hand_over.successor) is not None:
            if request.epoch:
                self._ingest.check_open()
            return self._leave_to(successor)
        last_client_seq = 0
        if request.role != idl.Role.READER and request.epoch:
            specs = [spec_from_idl(spec) for spec in request.tables]
            if request.dropped_tables and not request.world_size and request.role != idl.Role.ADMIN:
                raise UnauthorizedError("only a client with the role ADMIN may drop tables")
            session, last_client_seq = await self._ingest.open_session(
                request.run,
                request.client,
                request.epoch,
                request.rank,
                request.world_size,
                specs,
                claims_epoch=bool(request.claims_epoch),
                takes_over=bool(request.takes_over),
                fills=request.fills or (),
                after_step=-1 if request.after_step is None else request.after_step,
                complete=request.complete or (),
                updated_only=request.updated_only or (),
                dropped=request.dropped_tables or (),
                checks_only=bool(request.checks_only),
                claims_tables=bool(request.claims_tables),
                ends_run=bool(request.ends_run),
            )
            if not request.checks_only:
                self._bind(call.peer, session)
        return self._hello_reply(
            self._membership.places,
            last_client_seq=last_client_seq,
            may_be_set_back=True if self._was_forced or self._archiver is not None else None,
            standbys=copies_to_idl(self._config) or None,
        )

    def _leave(self) -> None:
        """Let followers and writers hear where the shard is by now, also writers that have nothing to send."""
        self.feed.stop()
        for peer in list(self._writers):
            peer.hang_up()

    def _leave_to(self, successor: ShardPlace) -> Any:
        """Return the hello of a shard that was taken over, whose places lead to where it is."""
        config = self._config
        known = self._membership.places
        places = [successor if shard == config.shard else known[shard] for shard in range(len(known))]
        return idl.HelloReply(
            protocol_version=PROTOCOL_VERSION,
            server_id=config.server_id,
            shard=STANDBY,
            shards=ShardPlaces(config.server_id, places).to_idl(),
            limits=self._limits.to_idl(),
            highest_epoch=0,
            last_client_seq=0,
            tables=[],
        )

    async def fetch_updates(self, call: Call, request: Any) -> Any:
        """Wait for durable records of the update log and return them; those of later terms are elsewhere."""
        self._check_here()
        if self._hand_over.successor is not None and request.from_seq > self.log.last_seq:
            self._ingest.check_open()
        reply = await super().fetch_updates(call, request)
        if age_s := self._hand_over.knowledge_age_s:
            reply.knowledge_age_ms = round(age_s * 1000)
        return reply

    async def set_embeddings(self, call: Call, request: Any) -> Any:
        """Write a batch; the reply means that it is durable. Cancelled, it takes effect whole or not at all."""
        if call.peer.session is None:
            raise UnauthorizedError("this connection has not said hello as a writer")
        self._check_here()
        with span("headrace.setEmbeddings", shard=self._config.shard, frame_bytes=call.frame.nbytes):
            seq, is_duplicate = await self._ingest.write(request, call.frame, call.hold)
        return idl.SetEmbeddingsReply(seq=seq, is_duplicate=is_duplicate)

    async def expire_rows(self, call: Call, request: Any) -> Any:
        """Start deleting rows by policy, or return the progress. Cancelled, the expiry run goes on."""
        return await self.expirer.expire_rows(request)

    def begin_drain(self) -> None:
        """End requests that wait for an event or would take long; idempotent."""
        super().begin_drain()
        self._hand_over.stop()

    async def promote_shard(self, call: Call, request: Any) -> Any:
        """Offer the shard to a follower or standby, or take that back; or say what became of another owner's offer.

        It returns once the offer is in the log. From then on nothing more takes a place in the log, and whoever takes
        over does so directly behind it, whatever becomes of any message.
        """
        config = self._config
        if request.offer is not None:  # of the owner before
            state = idl.OfferState.ACCEPTED if request.offer == self._accepted else idl.OfferState.DECLINED
            return idl.PromoteShardReply(state=state, term=self.term)
        if request.shard != config.shard:
            raise RequestError(f"this is shard {config.shard}, not {request.shard}")
        if request.aborts:
            await self._hand_over.abort(forces=bool(request.forces), by=request.to)
            return idl.PromoteShardReply(term=self.term)
        self._check_here()
        if request.to is None:
            raise RequestError(f"shard {config.shard} follows nobody: it takes updates")
        hold_ms = request.hold_ms or 0
        if not 0 < hold_ms <= _MAX_HOLD_MS:
            raise RequestError(f"a shard can wait for 1 to {_MAX_HOLD_MS} ms")
        if config.log is not None and request.shards is not None:
            raise RequestError("no server with another number of shards is built from one with a replicated log")
        if config.log is not None:
            standbys = {format_address(*place[1:3]) for place in config.other_copies if place[0] == config.shard}
            if request.to not in standbys:
                raise RequestError(f"shard {config.shard} has no standby at {request.to}")
        offer = await self._hand_over.offer(request.to, hold_ms / 1000, num_shards=request.shards)
        return idl.PromoteShardReply(seq=offer.seq, offer=offer.id, term=self.term)

    def disconnected(self, peer: Peer) -> None:
        """Detach the writer's session from a connection that has ended."""
        if isinstance(peer.session, Session):
            peer.session.num_connections -= 1
            peer.session = None
        self._writers.discard(peer)

    def _bind(self, peer: Peer, session: Session) -> None:
        self.disconnected(peer)
        if not peer.is_connected:
            return  # it went while its hello became durable, and `disconnected` will not be called again
        peer.session = session
        session.num_connections += 1
        self._writers.add(peer)


_StandBy = Callable[[Standby | FollowingShard], contextlib.AbstractAsyncContextManager[object]]


@dataclass(frozen=True, slots=True)
class _Opened:
    """A shard's log and store; `stream` is the log if it is a replicated one."""

    log: UpdateLog
    store: RowStore
    applier: Applier
    ingest: Ingest
    stream: ReplicatedLog | None = None


@contextlib.asynccontextmanager
async def open_shard(config: ShardConfig, *, stand_by: _StandBy = contextlib.nullcontext) -> AsyncIterator[Shard]:
    """Open a shard's log and store in an existing directory, replay the log, and serve; on exit drain and close both.

    With a replicated log it is first followed, until this process may own it; with `follow` another server's shard is.
    `stand_by` is what to do meanwhile.

    Cancellation: closes what was opened; nothing acked is lost.

    Raises:
        CorruptionError: The log or the store is damaged, or they do not belong together.
        LogFencedError: Another copy of the shard is the right one.
        StorageError: The disk failed.
        ConfigError: The directory is in use or unusable.
    """
    if config.log is not None:
        config = _within_stream(config)
    async with contextlib.AsyncExitStack() as stack:
        following = await Following.of_shard(config)
        if following is not None and not following.is_promoted:
            opened = await _follow_source(stack, config, following, stand_by)
        else:
            opened = await _open(stack, config)
            await _own(stack, config, opened, stand_by)
        log, follower = opened.log, opened.stream
        archiver = Archiver.of_shard(log, config)
        # The record by which it has taken over is its own.
        is_taking_over = following is not None and not following.is_promoted
        try:
            # A log that several machines hold is the right one whatever the archive has, and nobody waits for that.
            is_compared = archiver is None or follower is not None or await archiver.check()
            joining = Membership.join(config, log, begin_seq=log.last_seq - is_taking_over, may_claim=is_compared)
            membership = await stack.enter_async_context(await joining)
        except LogFencedError as exc:
            if following is not None and is_taking_over:
                await following.begin_anew(exc)  # the source has gone on: what this shard added is void
                raise UnavailableError(f"the shard begins anew: {exc}") from exc
            raise
        if following is not None:
            await following.finish()
        config = replace(config, term=membership.term)
        if archiver is not None:
            archiver.term = membership.term
            await stack.enter_async_context(archiver)
        uploader = None
        if config.object_store is not None:
            uploader = SnapshotUploader.open(
                config.object_store,
                SnapshotFiles(config.snapshots_path),
                bytes_per_s=config.object_store_rate,
                server_id=config.server_id,
                shard=config.shard,
                first_seq=log.first_seq if log.last_seq else None,
                check_claim=membership.check_claim,
                num_kept=1 if follower is None else 2,
            )
            await stack.enter_async_context(uploader)

        def needed_elsewhere() -> list[LogLease]:
            archived = [] if archiver is None else [archiver.lease()]
            return archived + membership.standby_leases(log.first_seq)

        parts = await _open_parts(stack, config, opened, uploader=uploader, archived=needed_elsewhere)
        ingest, room = opened.ingest, parts.room
        ingest.check_room, ingest.take_room = room.check, room.take
        context = PassContext(
            ingest=ingest,
            applier=opened.applier,
            store=opened.store,
            directory=config.directory / "expiry",
            num_shards=config.num_shards,
            rows_per_s=config.expiry_rows_per_s,
        )
        expirer = await stack.enter_async_context(Expirer(context, ExpiryRules.parse(config.expiry or "")))
        parts = replace(
            parts, expirer=expirer, membership=membership, uploader=uploader, archiver=archiver, stream=follower
        )
        accepted, was_forced = (None, False) if following is None else following.promotion
        yield Shard(parts, membership, expirer, accepted=accepted, was_forced=was_forced)


async def _open(stack: contextlib.AsyncExitStack, config: ShardConfig, *, begins_at_store: bool = False) -> _Opened:
    """Open log and store. With `begins_at_store` an empty log goes on where the store ends."""
    log_config = UpdateLogConfig(segment_bytes=config.log_segment_bytes, max_pending_bytes=config.max_log_pending_bytes)
    memtable_bytes, window_bytes = config.memtable_bytes // _NUM_MEMTABLES, config.max_backlog_bytes // _WINDOW_PART
    store_config = StoreConfig(
        block_cache_bytes=config.block_cache_bytes, write_buffer_bytes=memtable_bytes, max_open_files=files_for_store()
    )
    applier_config = ApplierConfig(
        window_bytes=max(window_bytes, 1), hold_s=_HOLD_S, flush_bytes=2 * config.memtable_bytes
    )
    log: UpdateLog
    stream = None
    directory = config.directory / "log"
    if config.log is None and not begins_at_store:
        # First: on a full disk, what it had reserved is room in which the store can open.
        log = await asyncio.to_thread(open_log, directory, config=log_config)
        stack.push_async_callback(log.close)
    store = await asyncio.to_thread(_open_store, config.directory / "store", store_config)
    stack.push_async_callback(asyncio.to_thread, store.close)
    meta = store.read_meta()
    if begins_at_store:
        seq = store.applied_seq
        mark = stored_mark(meta, seq)
        log = await asyncio.to_thread(open_log, directory, begin_seq=seq + 1, begin_mark=mark, config=log_config)
        stack.push_async_callback(log.close)
    elif config.log is not None:
        log = stream = await _follow(config, store.applied_seq, log_config)
    # The log closes before the applier, because it hands it the last durable batches.
    applier = await stack.enter_async_context(Applier(store, config=applier_config))
    stack.push_async_callback(log.close)
    ingest = Ingest(
        log,
        applier,
        meta,
        max_backlog_bytes=config.max_backlog_bytes,
        reject_non_finite=config.reject_non_finite,
        shard=config.shard,
        num_shards=config.num_shards,
    )
    await applier.run_at(applier.submitted_seq, partial(store.erase, ingest.catalog.dropped))  # a crash came before
    return _Opened(log, store, applier, ingest, stream)


async def _own(stack: contextlib.AsyncExitStack, config: ShardConfig, opened: _Opened, stand_by: _StandBy) -> None:
    """Apply the log's records that the store lacks; a replicated log is followed until this process owns it."""
    ingest = opened.ingest
    if opened.stream is None:
        await _recover(ingest)
        await ingest.look_for_offer()
        return
    held = await asyncio.to_thread(HeldClaims.read, config.directory, config.server_id, config.shard)
    standby = Standby(config, opened.stream, ingest, above_term=held.highest_term)
    async with (
        stand_by(standby),
        background_task(_keep_trimming(opened.stream, opened.store, config), name="headrace-standby-retention"),
    ):
        await standby.own()
    await stack.enter_async_context(background_task(_keep_passing(ingest), name="headrace-log-housekeeping"))


async def _recover(ingest: Ingest) -> None:
    started_s = time.monotonic()
    if num_records := await ingest.recover():
        fact(_log, logging.INFO, "recovered", records=num_records, seconds=round(time.monotonic() - started_s, 3))


async def _follow_source(
    stack: contextlib.AsyncExitStack, config: ShardConfig, following: Following, stand_by: _StandBy
) -> _Opened:
    """Follow another server's shard, and serve what it has; return log and store once they are this server's own."""
    stack.push_async_callback(following.close)
    while True:
        await following.begin()
        try:
            async with contextlib.AsyncExitStack() as attempt:
                opened = await _open(attempt, config, begins_at_store=True)
                await _recover(opened.ingest)
                await opened.ingest.look_for_offer()
                async with contextlib.AsyncExitStack() as reading:
                    parts = await _open_parts(reading, config, opened, following=following)
                    shard = FollowingShard(parts, following)
                    async with stand_by(shard):
                        await shard.follow()
                stack.push_async_exit(attempt.pop_all())
                return opened
        except GoneError as exc:
            why = exc
        await following.begin_anew(why)


async def _open_parts(
    stack: contextlib.AsyncExitStack,
    config: ShardConfig,
    opened: _Opened,
    *,
    uploader: SnapshotUploader | None = None,
    archived: Callable[[], list[LogLease]] = list,
    following: Following | None = None,
) -> ShardParts:
    """Begin to serve readers and followers from an open log and store, and to keep both within their bounds."""
    log, store = opened.log, opened.store
    feed = UpdateFeed(log, opened.ingest, server_id=config.server_id, max_frame_bytes=config.max_frame_bytes)
    retention = LogRetention(log, store, feed.followers, config, uploader=uploader, archived=archived)
    await stack.enter_async_context(retention)
    room = DiskRoom(config, log=log, applier=opened.applier, store=store, retention=retention)
    await stack.enter_async_context(room)
    probe = await stack.enter_async_context(LoopProbe())
    return ShardParts(
        config=config,
        log=log,
        store=store,
        applier=opened.applier,
        ingest=opened.ingest,
        feed=feed,
        retention=retention,
        snapshots=SnapshotFiles(config.snapshots_path),
        probe=probe,
        room=room,
        following=following,
    )


def _within_stream(config: ShardConfig) -> ShardConfig:
    """Return settings by which retention keeps the log within its stream's bound, at which updates would wait.

    Log that nobody needs must go long before, and log that somebody needs before; both in steps that are small.
    """
    max_bytes = config.log_max_bytes or DEFAULT_MAX_BYTES
    return replace(
        config,
        log_retention_bytes=max(min(config.log_retention_bytes, max_bytes // 2), _MIB),
        log_hold_bytes=max(min(config.log_hold_bytes, max_bytes * 3 // 4), _MIB),
        log_segment_bytes=max(min(config.log_segment_bytes, max_bytes // 16), _MIB),
    )


async def _follow(config: ShardConfig, applied_seq: int, log_config: UpdateLogConfig) -> ReplicatedLog:
    """Open a shard's replicated log, however long its servers are away.

    A standby also waits for a stream or a setting that is not as it must be: it must not stop the other shards here.
    """
    backoff = Backoff(min_s=_FIRST_PAUSE_S, max_s=_LONGEST_PAUSE_S, random=random.random)
    is_told = False
    while True:
        try:
            return await open_follower(
                config,
                config.directory / "log",
                server_id=config.server_id,
                shard=config.shard,
                applied_seq=applied_seq,
                config=log_config,
            )
        except GoneError as exc:
            raise CorruptionError(
                f"the store of shard {config.shard} has seq {applied_seq} applied, and its stream begins later: {exc}; "
                f"{restore_hint(config)}"
            ) from exc
        except (UnavailableError, ConfigError) as exc:
            is_wrong = isinstance(exc, ConfigError)
            if is_wrong and not (config.is_standby or config.waits):
                raise
            if not is_told:
                level = logging.ERROR if is_wrong else logging.WARNING
                fact(_log, level, "shard waits for the servers of its log", error=str(exc))
            is_told = True
        await asyncio.sleep(backoff.next_s())


async def _keep_trimming(log: ReplicatedLog, store: RowStore, config: ShardConfig) -> NoReturn:
    """Remove old records of a standby's mirror; what others need is in the stream, and its owner's to remove."""
    while True:
        try:
            await asyncio.to_thread(trim_log, log, store.durable_seq, None, config)
        except HeadraceError as exc:
            fact(_log, logging.WARNING, "old log cannot be removed; it is tried again", error=str(exc))
        await asyncio.sleep(_TRIM_S)


async def _keep_passing(ingest: Ingest) -> NoReturn:
    while True:
        await asyncio.sleep(_PASS_S)
        ingest.pass_housekeeping()


def _open_store(path: Path, config: StoreConfig) -> RowStore:
    """Open a store in a low-priority thread; RocksDB's compaction threads inherit the priority."""
    with ThreadPoolExecutor(1, "headrace-open", initializer=lower_thread_priority) as pool:
        return pool.submit(RowStore.open, path, config=config).result()
