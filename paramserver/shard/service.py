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
from headrace.paramserver.ingest.shard_state import Taker
from headrace.paramserver.log.interface import ReplicatedLog, UpdateLog, UpdateLogConfig
from headrace.paramserver.log.leases import LogLease
from headrace.paramserver.log.opening import DEFAULT_MAX_BYTES, next_log, open_follower, open_log
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
from headrace.paramserver.shard.retention import LogRetention
from headrace.paramserver.shard.sampler import ShardParts, copies_to_idl
from headrace.paramserver.shard.source_copy import SourceCopy
from headrace.paramserver.shard.standby import Standby
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
        if parts.ingest.offer is not None:
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
        return self._membership.term

    def check_answer(self, method: str) -> None:
        """Check, once a reply is computed, that no other process may have acked something since.

        An ack says itself that this process owned the log. A status is for people, who want it then most.
        """
        if method in _ANSWERED_ALWAYS:
            return
        self._check_here()
        # Up to an offer the log says the same, whoever takes updates now: followers need it up to there.
        if not (self._hand_over.may_read or (method in _OF_ITS_LOG and self._hand_over.may_tell)):
            self._ingest.check_open()
        if self._hand_over.successor is None:
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
        if (offer := self._ingest.offer) is not None and offer.is_elsewhere:
            # Who took over has claimed the shard; this process tells where it is. But if the offer is declined, it is
            # somebody else who has, and the next start says who.
            self._hand_over.starts_again = True
            return await self.first_failure(self._hand_over, is_owner=False)
        return error if self._config.log is None else await self._word_of_log() or error

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
            standbys=copies_to_idl(self._config.other_copies) or None,
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
        if self._hand_over.successor is not None and request.from_seq > self._ingest.end_seq:
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
        copies = () if config.log is None else config.other_copies
        standbys = {format_address(*place[1:3]) for place in copies if place[0] == config.shard}
        taker: Taker = "follower" if request.shards is None else "server"
        offer = await self._hand_over.offer(
            request.to,
            hold_ms / 1000,
            taker="standby" if request.to in standbys else taker,
            num_shards=request.shards,
        )
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


_StandBy = Callable[[FollowingShard], contextlib.AbstractAsyncContextManager[object]]


@dataclass(frozen=True, slots=True)
class _Opened:
    """A shard's log and store.

    Attributes:
        log: The log.
        store: The store.
        applier: Of the store.
        ingest: Of both.
        stream: The log, if it is a replicated one.
        begin_seq: The last record before those of its own, if it has taken over from another server just now.
    """

    log: UpdateLog
    store: RowStore
    applier: Applier
    ingest: Ingest
    stream: ReplicatedLog | None = None
    begin_seq: int | None = None


@contextlib.asynccontextmanager
async def open_shard(config: ShardConfig, *, stand_by: _StandBy = contextlib.nullcontext) -> AsyncIterator[Shard]:
    """Open a shard's log and store in an existing directory, replay the log, and serve; on exit drain and close both.

    A replicated log is first followed, until this process may own it; with `follow` another server's shard is.
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
        if following is not None and not following.is_promoted and config.log is not None:
            await following.look_for_decision(
                next_log(config, server_id=config.server_id, shard=config.shard, config=_log_config(config))
            )
        is_taking_over = following is not None and not following.is_promoted
        if is_taking_over or config.log is not None:
            copy = following if following is not None and is_taking_over else await Standby.of_shard(config)
            opened = await _follow_source(stack, config, copy, stand_by)
        else:
            opened = await _open(stack, config)
            await _recover(opened.ingest)
            if config.is_standby and (taken := opened.ingest.offer) is not None and taken.is_taken:
                raise _former(config, f"shard {config.shard} was taken over by {taken.to}")
        log, follower, offer = opened.log, opened.stream, opened.ingest.offer
        if follower is not None:
            await stack.enter_async_context(
                background_task(_keep_passing(opened.ingest), name="headrace-log-housekeeping")
            )
        # Until it is known what became of an offer to another log, this copy of a replicated one leaves no trace: the
        # term that it has opened may be higher than that of the right copy.
        is_suspended = follower is not None and offer is not None and offer.is_elsewhere
        url = None if is_suspended else config.object_store
        archiver = None if is_suspended else Archiver.of_shard(log, config)
        try:
            # A log that several machines hold is the right one whatever the archive has, and nobody waits for that.
            is_compared = archiver is None or follower is not None or await archiver.check()
            joining = Membership.join(
                config,
                log,
                begin_seq=opened.begin_seq,
                may_claim=is_compared,
                offered_term=offer.term if is_suspended and offer is not None else None,
            )
            membership = await stack.enter_async_context(await joining)
        except LogFencedError as exc:
            if following is not None and is_taking_over:
                await following.begin_anew(exc)  # the source has gone on: what this shard added is void
                raise UnavailableError(f"the shard begins anew: {exc}") from exc
            if config.is_standby and config.log is None:
                raise _former(config, str(exc)) from exc
            raise
        if following is not None:
            await following.finish()
        if archiver is not None:
            archiver.term = membership.term
            await stack.enter_async_context(archiver)
        uploader = None
        if url is not None:
            uploader = SnapshotUploader.open(
                url,
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
        parts = replace(parts, expirer=expirer, membership=membership, uploader=uploader, archiver=archiver)
        accepted, was_forced = (None, False) if following is None else following.promotion
        yield Shard(parts, membership, expirer, accepted=accepted, was_forced=was_forced)


def _former(config: ShardConfig, why: str) -> LogFencedError:
    """Return the error of a directory that has had the shard, and that the cluster file makes a standby."""
    return LogFencedError(f"{why}; this node is a standby of it: remove {config.directory}, and it follows")


async def _open(stack: contextlib.AsyncExitStack, config: ShardConfig, following: SourceCopy | None = None) -> _Opened:
    """Open log and store. An empty log of a follower of another server goes on where the store ends."""
    begins_at_store = isinstance(following, Following)
    log_config = _log_config(config)
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
    if following is not None:
        following.applied_seq = store.applied_seq
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


def _log_config(config: ShardConfig) -> UpdateLogConfig:
    return UpdateLogConfig(segment_bytes=config.log_segment_bytes, max_pending_bytes=config.max_log_pending_bytes)


async def _recover(ingest: Ingest) -> None:
    started_s = time.monotonic()
    if num_records := await ingest.recover():
        fact(_log, logging.INFO, "recovered", records=num_records, seconds=round(time.monotonic() - started_s, 3))


async def _follow_source(
    stack: contextlib.AsyncExitStack, config: ShardConfig, following: SourceCopy, stand_by: _StandBy
) -> _Opened:
    """Follow a source, and serve what this copy has; return log and store once the shard has taken over.

    The log is then that in which it followed, or the one in which that goes on from there.
    """
    stack.push_async_callback(following.close)
    while True:
        await following.begin()
        try:
            async with contextlib.AsyncExitStack() as attempt:
                opened = await _open(attempt, config, following)
                if opened.stream is None:
                    await _recover(opened.ingest)
                async with contextlib.AsyncExitStack() as reading:
                    parts = await _open_parts(reading, config, opened, following=following)
                    shard = FollowingShard(parts, following)
                    async with stand_by(shard):
                        begin_seq, stream = await shard.follow()
                if stream is not None:
                    attempt.push_async_callback(stream.close)
                    opened.ingest.go_on_in(stream)
                    await _recover(opened.ingest)
                    opened = replace(opened, log=stream, stream=stream)
                stack.push_async_exit(attempt.pop_all())
                return replace(opened, begin_seq=begin_seq)
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
    following: SourceCopy | None = None,
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
        stream=opened.stream,
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
    """Open a shard's replicated log, however long its servers are away; `GoneError` if it begins behind `applied_seq`.

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
        except (UnavailableError, ConfigError) as exc:
            is_wrong = isinstance(exc, ConfigError)
            if is_wrong and not (config.is_standby or config.waits):
                raise
            if not is_told:
                level = logging.ERROR if is_wrong else logging.WARNING
                fact(_log, level, "shard waits for the servers of its log", error=str(exc))
            is_told = True
        await asyncio.sleep(backoff.next_s())


async def _keep_passing(ingest: Ingest) -> NoReturn:
    while True:
        await asyncio.sleep(_PASS_S)
        ingest.pass_housekeeping()


def _open_store(path: Path, config: StoreConfig) -> RowStore:
    """Open a store in a low-priority thread; RocksDB's compaction threads inherit the priority."""
    with ThreadPoolExecutor(1, "headrace-open", initializer=lower_thread_priority) as pool:
        return pool.submit(RowStore.open, path, config=config).result()
