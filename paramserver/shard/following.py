"""A shard that follows another server's: the same records at the same positions, and the rows that they make.

    shard-0000/follow.json      that the directory is a follower's, and whether its copy is complete
    shard-0000/store, log       those of any shard; the marks of the log's segments are the source's

It begins from the newest snapshot of the source, with a lease on the log behind it, or with the first record where the
source still has that. Records are applied once this machine's disk has them, as in a shard that takes them itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import shutil
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self

from headrace.paramserver.config.data_dir import has_rows
from headrace.paramserver.config.follow_state import FollowState
from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.ingest.pipeline import Ingest
from headrace.paramserver.ingest.shard_state import Offer
from headrace.paramserver.log.claims import HeldClaims, claim_shard, highest_claim, hold_term, note_restored
from headrace.paramserver.log.interface import Append, LogRecord, NextLog, ReplicatedLog, note_header, note_of
from headrace.paramserver.log.opening import FileUpdateLog
from headrace.paramserver.reading.follower import ShardFollower, Update
from headrace.paramserver.reading.link import ShardLink, link_all, retry
from headrace.paramserver.rpc.address import format_address, parse_address, parse_addresses
from headrace.paramserver.rpc.shard_places import STANDBY, ShardPlace, ShardPlaces
from headrace.paramserver.shard.disk_room import DiskRoom
from headrace.paramserver.shard.hand_over import READS_S, peer_dial
from headrace.paramserver.shard.source_copy import LEASE_S, SourceCopy
from headrace.paramserver.snapshots.directory import mapped_errors
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.system.durable import fsync_path
from headrace.paramserver.system.event_loop import background_task, run_to_end
from headrace.paramserver.system.log_lines import fact
from headrace.paramserver.system.object_store import ObjectStore
from headrace.schemas.errors import (
    ConfigError,
    GoneError,
    HeadraceError,
    LogFencedError,
    OverloadedError,
    ProtocolError,
    RequestError,
    ReshardedError,
    SetBackError,
    UnavailableError,
)
from headrace.schemas.idl import idl

if TYPE_CHECKING:
    from headrace.paramserver.shard.sampler import ShardParts

__all__ = ["Following"]

_log = logging.getLogger(__name__)

# The source answers at least this often, so that the age of what a follower knows stays small.
_WAIT_S = 1.0
_FETCH_BYTES = 8 << 20
# What this disk may lack before the next record waits for it.
_MAX_PENDING_BYTES = 16 << 20
# A source that has not answered for longer is away.
_SILENCE_S = 5.0
# Between attempts to follow a source whose place another server has taken.
_AGAIN_S = 5.0
# Between attempts to find the source's shard.
_ELSEWHERE_S = 0.2
# A source that answers within this time is not gone.
_FORCE_S = 5.0


class _TakenOverError(HeadraceError):
    """The log in which the shard goes on has changed: the next start finds out how."""


class Following(SourceCopy):
    """A copy whose source is a shard of another server. Thread: the event loop's."""

    def __init__(self, config: ShardConfig, state: FollowState, term: int) -> None:
        """Use `of_shard`."""
        super().__init__(config, copy_id=state.copy_id, has_begun=state.has_begun)
        self._term, self._state = term, state
        self._refusal: str | None = None  # why it cannot take over
        self._next_log: NextLog | None = None
        self._dial = peer_dial(config)
        self._link: ShardLink | None = None
        self._follower: ShardFollower | None = None
        self._behind_since_s = math.inf
        # When the owner was told last that its offer is open; maybe by a start before this one.
        self._answered_s = time.monotonic()
        self._asked: str | None = None  # the offer that the owner has asked for
        self._opening: str | None = None
        self._forced = asyncio.Event()
        self._saved, self._saving = state, asyncio.Lock()
        self.stands.set()

    @classmethod
    async def of_shard(cls, config: ShardConfig) -> Self | None:
        """Return what makes a shard follow; None if the settings name no source.

        Raises:
            ConfigError: The directory is a follower's and the settings name no source, or the other way round.
            CorruptionError: A file in the directory is damaged.
            StorageError: The disk failed.
        """
        state = await asyncio.to_thread(FollowState.read, config.directory)
        if config.follow is None:
            if state is not None and not state.is_promoted:
                raise ConfigError(
                    f"{config.directory}: a copy of another server's shard, which takes no updates: serve it with "
                    "--follow HOST:PORT, or promote it: headrace promote"
                )
            if state is None:
                return None
        elif state is None:
            if await asyncio.to_thread(has_rows, config.directory):
                raise ConfigError(
                    f"{config.directory}: a shard with rows of its own, which cannot follow {config.follow}: name a "
                    "new directory with --data"
                )
            state = FollowState(copy_id=secrets.token_hex(8))
            await asyncio.to_thread(state.write, config.directory)
        held = await asyncio.to_thread(HeldClaims.read, config.directory, config.server_id, config.shard)
        return cls(config, state, held.highest_term)

    @property
    def is_promoted(self) -> bool:
        """Whether the shard takes updates itself."""
        return self._state.is_promoted

    @property
    def promotion(self) -> tuple[str | None, bool]:
        """The offer by which the shard has taken over, and whether it was forced to do so without one."""
        return self._state.accepted, self._state.was_forced

    @property
    def term(self) -> int:
        """Of the source's shard, as far as it is known; 0 for none."""
        return self._term

    @property
    def source(self) -> str:
        """Host and port of the shard that is followed, as far as it is known."""
        if self._link is None:
            return self._config.follow or ""
        return format_address(*self.source_places()[self._config.shard].address)

    @property
    def source_seq(self) -> int:
        """See `SourceCopy`."""
        return 0 if self._follower is None else self._follower.last_seq

    @property
    def lag_s(self) -> float:
        """See `SourceCopy`."""
        return max(time.monotonic() - self._behind_since_s, 0.0)

    @property
    def knowledge_age_s(self) -> float:
        """How long ago the writing shard was heard, over all followers between; inf before the first time."""
        follower = self._follower
        return math.inf if follower is None else time.monotonic() - follower.heard_s + follower.knowledge_age_s

    @property
    def places(self) -> list[ShardPlace]:
        """See `SourceCopy`. Those of a standby are the source's, but for its own."""
        config, places = self._config, self.places_of_file
        known = places if self._link is None else list(self.source_places())
        if config.is_standby:
            places = known
        else:
            # With a lower term than it is known to have, a shard of ours that has moved would not be looked for.
            places = [replace(place, term=source.term) for place, source in zip(places, known, strict=True)]
        places[config.shard] = replace(self.places_of_file[config.shard], term=self.term)
        return places

    def source_places(self) -> ShardPlaces:
        """Return where the source's shards are; `UnavailableError` before it was heard."""
        if self._link is None or self._link.resolver is None:
            raise UnavailableError(f"this server follows {self._config.follow}, which it has not reached yet")
        return self._link.resolver.places

    def lead(self, request: Any) -> ShardPlaces | None:
        """Send writers to the source; tables change there, too."""
        is_standby = self._config.is_standby
        if request.role == idl.Role.WRITER or is_standby:
            if request.epoch:
                raise UnavailableError(f"this is a copy of the shard at {self.source}, which takes the updates")
            is_content = request.role == idl.Role.READER and request.reads_copies
            return None if is_standby and is_content else self.source_places()
        if request.epoch or (request.shards is not None and self._config.node is None):
            raise RequestError(f"this server follows {self.source}: change tables there")
        return None

    def _hindrance(self) -> str | None:
        if self._follower is None:
            return self.failure or f"{self._config.follow} has not been reached yet"
        return self.failure or self._refusal or self._follower.silence(_SILENCE_S)

    async def _note_begun(self, has_begun: bool) -> None:
        await super()._note_begun(has_begun)
        await (
            self._save(has_begun=True) if has_begun else self._save(has_begun=False, accepted=None, was_forced=False)
        )

    async def look_for_decision(self, next_log: NextLog) -> None:
        """Be about to take over in another log; find out whether a start before this one has.

        It waits for the log's servers.
        """
        self._next_log = next_log
        if (accepted := self._state.accepted) is not None and await retry(next_log.offer) == accepted:
            await self.finish()

    async def follow(self, parts: ShardParts) -> tuple[int | None, ReplicatedLog | None]:
        """Append the source's records and apply them, until the shard takes over from the source."""
        log, ingest, next_log = parts.log, parts.ingest, self._next_log
        assert isinstance(log, FileUpdateLog)
        if next_log is None and await asyncio.to_thread(self._has_opened, log):
            await self._take_term()
            return log.last_seq - 1, None
        if next_log is not None and await self._has_claimed(ingest.offer):
            self._forced.set()  # the source can have ended for good because of that
        while True:
            async with contextlib.AsyncExitStack() as stack:
                work = self._copy(log, ingest, parts.applier, parts.room)
                copying = await stack.enter_async_context(background_task(work, name="headrace-follow-copy"))
                forced = await stack.enter_async_context(
                    background_task(self._forced.wait(), name="headrace-follow-forced")
                )
                if next_log is not None:
                    looking = self._keep_looking(next_log)
                    await stack.enter_async_context(background_task(looking, name="headrace-follow-next-log"))
                await asyncio.wait((copying, forced), return_when=asyncio.FIRST_COMPLETED)
            is_forced = copying.cancelled()
            offer = ingest.offer if is_forced else await copying
            if offer is None or not self._is_ours(offer):
                if not is_forced:
                    continue  # it was declined just now
                offer = None  # behind an offer to itself, it would lack nothing
            await ingest.wait_durable(last_seq := ingest.accepted_seq if offer is None else offer.seq)
            if not await self._accept(log, last_seq, offer, next_log):
                continue
            if next_log is not None:
                return last_seq, await self._open_next(next_log, log, last_seq)
            await self._open(log, ingest)
            await self._take_term()
            return last_seq, None

    async def finish(self) -> None:
        """Note, durably, that the shard takes updates itself. REQUIRES: `follow` has returned."""
        if not self._state.is_promoted:
            await self._save(is_promoted=True)
            fact(_log, logging.INFO, "shard was promoted", was_forced=self._state.was_forced)

    async def answer(self, offer: str, *, declines: bool, is_reading: bool) -> Any:
        """Return the `idl.OfferState` of an offer of the source's, which may ask to decline it.

        It may be of one that is about to be made: an offer counts here only once the source has asked about it. If the
        source `is_reading`, it answers with rows for `READS_S` after it is told that the offer is open.

        Raises:
            StorageError: It could not be declined for ever.

        Cancellation: harmless.
        """
        if self._state.accepted == offer or (self._opening == offer and not declines):
            return idl.OfferState.OPENING
        if declines or self._state.declined == offer:
            await self._save(declined=offer)
            return idl.OfferState.DECLINED
        self._asked = offer
        if is_reading:
            self._answered_s = time.monotonic()
        return idl.OfferState.OPEN

    async def force(self, offer: Offer | None) -> None:
        """Take over although the source is gone; returns before that is done. `offer` is the log's last, if it is open.

        Raises:
            RequestError: The source answers, or whom it has offered the shard to; or it follows another server itself.

        Cancellation: harmless.
        """
        if not self._state.is_direct:
            raise RequestError(
                f"{self.source}, which this server follows, takes no updates itself: promote a follower of the server "
                "that does"
            )
        others = [] if offer is None or self._is_to_us(offer) else [offer.to]
        source = parse_addresses(self.source)
        for host, port in (*source, *map(parse_address, others)):
            try:
                async with asyncio.timeout(_FORCE_S):
                    if (await self._dial.ask(host, port)).shard not in (self._config.shard, STANDBY):
                        continue
            except ReshardedError as exc:
                raise RequestError(f"{exc}: all updates are there now") from exc
            except (UnavailableError, TimeoutError):
                continue
            is_source = (host, port) in source
            what = "can hand the shard over: leave --force out" if is_source else "was offered the shard: promote that"
            raise RequestError(f"{format_address(host, port)} answers, and {what}, or stop it first")
        self._forced.set()

    def _has_opened(self, log: FileUpdateLog) -> bool:
        """Return whether the log ends with the record by which this shard takes over. Thread: any; it blocks."""
        if self._state.accepted is None or log.last_seq < log.first_seq:
            return False
        header = next(log.read(log.last_seq)).header
        return note_of(header) == "open" and header.get("id") == self._state.accepted

    async def _has_claimed(self, offer: Offer | None) -> bool:
        """Return whether a start before this one has claimed the term behind an offer. Waits for the object store."""
        config, url = self._config, self._config.object_store
        if url is None or offer is None or offer.nonce is None or offer.id != self._state.accepted:
            return False
        held = await asyncio.to_thread(HeldClaims.read, config.directory, config.server_id, config.shard)
        find = partial(asyncio.to_thread, highest_claim, ObjectStore.of_url(url, deadline_s=_FORCE_S), config.shard)
        claim = await retry(find)
        return claim is not None and claim.term > offer.term and (claim.term, claim.nonce) in held.known

    async def _accept(self, log: FileUpdateLog, last_seq: int, offer: Offer | None, next_log: NextLog | None) -> bool:
        """Note that the shard takes over behind `last_seq`, unless it may not; None takes over without an offer."""
        config = self._config
        self._opening = None if offer is None else offer.id  # from here on the owner is not told that it is open
        try:
            # The owner answers with its rows for so long after it was told that.
            await asyncio.sleep(max(self._answered_s + 1.2 * READS_S - time.monotonic(), 0.0))
            if next_log is not None and not await self._make(next_log, last_seq, offer):
                return False
            if config.object_store is not None:
                await asyncio.to_thread(self._adopt_claim, config.object_store, offer)
            if offer is not None and self._state.declined == offer.id:
                return False
            await self._save(accepted=secrets.token_hex(8) if offer is None else offer.id, was_forced=offer is None)
            if next_log is not None and config.object_store is not None and (offer is None or offer.nonce is not None):
                return await self._claim(config.object_store, log, last_seq)
            if next_log is None and offer is not None and offer.nonce is None and config.object_store is not None:
                await self._note_term(self.term + 1)  # the claim that it goes on from may be of an earlier term
            return True
        except (ConfigError, UnavailableError) as exc:  # of the object store
            self.failure = f"this server cannot take over: {exc}"
            fact(_log, logging.WARNING, "shard cannot take over", error=str(exc))
            self._forced.clear()
            return False
        finally:
            self._opening = None

    async def _make(self, next_log: NextLog, last_seq: int, offer: Offer | None) -> bool:
        """Make the log that begins behind `last_seq`; return False if that cannot be, and decline the offer for that.

        Raises:
            UnavailableError: Its servers are away.
        """
        accepted = self._state.accepted
        try:
            await next_log.make(last_seq)
        except ConfigError as exc:
            if accepted is not None and await next_log.offer() == accepted:
                raise _TakenOverError(f"shard {self._config.shard} has taken over before: it starts again") from exc
            self._refusal = str(exc)
            fact(_log, logging.WARNING, "shard cannot take over", error=str(exc))
            self._forced.clear()
            if offer is not None:
                await self._save(declined=offer.id, accepted=None)
            return False
        self._refusal = None
        return True

    async def _keep_looking(self, next_log: NextLog) -> NoReturn:
        """Forget why the shard could not take over once that has been mended."""
        while True:
            await asyncio.sleep(_AGAIN_S)
            if self._refusal is not None:
                with contextlib.suppress(ConfigError, UnavailableError):
                    await next_log.check()
                    self._refusal = None

    async def _claim(self, url: str, log: FileUpdateLog, last_seq: int) -> bool:
        """Claim the term behind the source's, which decides; return False if the source has claimed it."""
        config = self._config
        claim = partial(claim_shard, owner=config.address, seq=last_seq, mark=log.nonce_of(last_seq))

        def put() -> None:
            store = ObjectStore.of_url(url, deadline_s=_FORCE_S)
            claim(store, config.directory, server_id=config.server_id, shard=config.shard)

        try:
            await asyncio.to_thread(put)
        except LogFencedError as exc:
            self.failure = f"this server cannot take over: {exc}"
            self._forced.clear()
            await self._save(declined=self._state.accepted, accepted=None)
            return False
        return True

    async def _open_next(self, next_log: NextLog, log: FileUpdateLog, last_seq: int) -> ReplicatedLog:
        """Own the log that begins behind `last_seq`, however long its servers are away."""
        config = self._config
        self._refusal = f"this server takes over once the servers of {next_log.name} answer"
        held = await asyncio.to_thread(HeldClaims.read, config.directory, config.server_id, config.shard)
        stream = await next_log.begin(log)
        try:
            is_ours = await stream.take_over(
                last_seq, owner=config.address, above_term=max(self.term, held.highest_term), offer=self._state.accepted
            )
            if not is_ours:
                raise _TakenOverError(f"{next_log.name} has got records just now: shard {config.shard} starts again")
        except BaseException:
            await stream.close()
            raise
        self._refusal = None
        return stream

    async def _open(self, log: FileUpdateLog, ingest: Ingest) -> None:
        """Write the record by which the shard takes over into its log."""
        assert self._state.accepted is not None
        header = note_header("open", id=self._state.accepted, owner=self._config.address)
        append = log.append(epoch=1, header=header, body=[])
        ingest.take(LogRecord(append.seq, 1, header, memoryview(b"")), append)
        await asyncio.shield(append.durable)

    def _adopt_claim(self, url: str, offer: Offer | None) -> None:
        """Let this directory claim the term behind the source's, and serve in no other. Thread: any; it blocks.

        Raises:
            ConfigError: The object store is not the source's, or another copy has claimed the shard.
            UnavailableError: The object store is away.
        """
        config, store = self._config, ObjectStore.of_url(url, deadline_s=_FORCE_S)
        server_id, shard = config.server_id, config.shard
        held = HeldClaims.read(config.directory, server_id, shard)
        highest = highest_claim(store, shard)
        claim = None if highest is None else (highest.term, highest.nonce)
        if claim is not None and claim in held.known and (offer is not None or held.is_cut):
            return  # it was adopted before
        if offer is None:
            note_restored(store, config.directory, server_id=server_id, shard=shard, is_cut=True)
        elif offer.nonce is not None:
            if claim != (offer.term, offer.nonce):
                raise ConfigError(f"{url} does not have the source's claim of term {offer.term}, but {highest}")
            HeldClaims(server_id=server_id, shard=shard, known=(claim,)).write(config.directory)
        elif claim is not None:  # of a replicated log, whose owners claim their terms when they can
            if claim[0] > self.term:
                raise ConfigError(f"{url} has a claim that is not the source's, which has term {self.term}: {highest}")
            replace(held, known=(claim,)).write(config.directory)

    async def _take_term(self) -> None:
        """Hold the term behind the source's, unless the start has to claim it."""
        config = self._config
        held = await asyncio.to_thread(HeldClaims.read, config.directory, config.server_id, config.shard)
        if config.object_store is None or not held.known:
            await self._note_term(self.term + 1)

    async def _save(self, **changes: Any) -> None:
        """Change what the directory says: at once for all who look, and durably on return."""
        self._state = replace(self._state, **changes)
        await run_to_end(self._write())

    async def _write(self) -> None:
        async with self._saving:
            if (state := self._state) != self._saved:
                await asyncio.to_thread(state.write, self._config.directory)
                self._saved = state

    async def _copy(self, log: FileUpdateLog, ingest: Ingest, applier: Applier, room: DiskRoom) -> Offer:
        """Append the source's records and apply them; return the source's offer to this shard, once it is the last."""
        link = await self._linked()
        last_seq = ingest.accepted_seq
        follower = self._fetcher_from(link, last_seq + 1, log.nonce_of(last_seq))
        self._follower = follower
        append: Append | None = None
        # Half of the bound of the log, because records have headers, too.
        max_pending_bytes = min(_MAX_PENDING_BYTES, self._config.max_log_pending_bytes // 2)
        while True:
            await self._wait_room(room, follower)
            try:
                updates = await follower.fetch()
            except ReshardedError as exc:
                host = format_address(*exc.successor)
                self.failure = (
                    f"{exc}: this copy ends here; follow the new server with --follow {host} and a new --data"
                )
                await asyncio.sleep(_AGAIN_S)
                continue
            await self._note_term(follower.term)
            if (is_direct := link.hello.knowledge_age_ms is None) != self._state.is_direct:
                await self._save(is_direct=is_direct)
            for update in updates:
                if append is not None and log.pending_bytes + update.body.nbytes > max_pending_bytes:
                    await asyncio.shield(append.durable)
                append = _take(log, ingest, room, update, follower.mark)
            self.failure = None
            self._behind_since_s = min(self._behind_since_s, time.monotonic()) if follower.is_behind else math.inf
            if (offer := ingest.offer) is not None and self._is_ours(offer):
                await ingest.wait_durable(offer.seq)
                return offer
            await applier.wait_below(self._config.max_backlog_bytes)

    def _is_ours(self, offer: Offer) -> bool:
        """Return whether to accept an offer; why not is in `failure`."""
        config = self._config
        if not self._is_to_us(offer) or offer.id == self._state.declined:
            return False
        if offer.nonce is not None and config.object_store is None:
            self.failure = (
                "the source claims its terms in an object store, so this server can only take over with the same one: "
                "--object-store URL"
            )
            return False
        return True

    def _is_to_us(self, offer: Offer) -> bool:
        return offer.id in (self._asked, self._state.accepted)

    async def check_ahead(self, from_seq: int) -> None:
        """See `SourceCopy`."""
        why = f"this follower is behind {self.source}, and does not have seq {from_seq - 1} yet"
        request = idl.FetchUpdatesRequest(server_id=self._config.server_id, from_seq=from_seq, max_bytes=1, wait_ms=0)
        try:
            if self._link is not None:
                await self._link.fetch_updates(request)
        except SetBackError:
            raise
        except HeadraceError as exc:
            why = f"{why}: {exc}"
        raise UnavailableError(why)

    async def close(self) -> None:
        """See `SourceCopy`."""
        if self._link is not None:
            await self._link.close()

    async def _linked(self) -> ShardLink:
        """Return the link to the source's shard, waiting for the source as long as it takes."""
        if self._link is not None:
            return self._link
        config = self._config
        seeds = parse_addresses(config.follow or "")
        while True:
            links = await retry(lambda: link_all(self._dial, seeds))
            source = links[0].hello.server_id, len(links)
            if source == (config.server_id, config.num_shards):
                break
            what = (
                f"{config.directory.parent} is a copy of server {config.server_id} of {config.num_shards} shards, and "
                f"{config.follow} is server {source[0]} of {source[1]}"
            )
            if not config.is_standby:
                raise ConfigError(f"{what}: choose another --data")
            self.failure = what  # the other shards of its node go on
            await asyncio.sleep(_AGAIN_S)
        link, own = links[config.shard], config.addresses[config.shard]
        if own in seeds:
            raise ConfigError(f"--follow {config.follow}: this is the server itself")
        assert link.resolver is not None
        places = link.resolver.places
        # While the shards are handed over one after the other, those that have been take this one for the source's.
        places.shunned = own
        while places[config.shard].address == own:
            self.failure = f"nobody at {config.follow} knows where shard {config.shard} is, but for this server"
            await link.resolver.refresh()
            await asyncio.sleep(_ELSEWHERE_S)
        self._link = link
        self._bind_term()
        return link

    def _bind_term(self) -> None:
        """Take nothing from an earlier copy of the shard than the one that has told its term."""
        if self._link is not None and self._link.resolver is not None:
            places, shard = self._link.resolver.places, self._config.shard
            places.merge([(shard, ShardPlace(*places[shard].address, self.term))])

    def _fetcher_from(self, link: ShardLink, from_seq: int, mark: int | None) -> ShardFollower:
        follower = ShardFollower(
            link,
            from_seq=from_seq,
            mark=mark,
            name=self._name,
            copy_id=self._copy_id,
            lease_s=LEASE_S,
            max_bytes=_FETCH_BYTES,
            wait_s=_WAIT_S,
        )
        if (before := self._follower) is not None:  # it was heard all the same
            follower.heard_s, follower.knowledge_age_s = before.heard_s, before.knowledge_age_s
        return follower

    async def _fetch_copy(self) -> None:
        """Put a store, or nothing, where log records can continue, and remove what was there: this disk may be full."""
        link = await self._linked()
        await self._note_term((await retry(link.refresh)).term or 0)
        await asyncio.to_thread(self._clear)
        if await self._fetch_part(link) or await self._has_first_record(link):
            return
        await self._make_snapshot(link)
        if not await self._fetch_part(link):
            raise GoneError(f"{link.address} has removed the log behind the snapshot that was made just now")

    def _clear(self) -> None:
        """Remove store and log, but for the log's directory. Thread: any; it blocks."""
        directory = self._config.directory
        with mapped_errors(directory):
            self._clear_incoming()
            if (directory / "store").exists():
                shutil.rmtree(directory / "store")
            for path in (directory / "log").iterdir():
                path.unlink()
            fsync_path(directory / "log")
            fsync_path(directory)

    async def _has_first_record(self, link: ShardLink) -> bool:
        try:
            await self._follower_from(link, 1, None).register()
        except GoneError:
            return False
        return True

    async def _note_term(self, term: int) -> None:
        """Keep the source's term, first on the disk: nobody must be told a lower one after a restart."""
        if term > self.term:
            config = self._config
            await asyncio.to_thread(
                hold_term, config.directory, server_id=config.server_id, shard=config.shard, term=term
            )
            self._term = term
            self._bind_term()

    async def _wait_room(self, room: DiskRoom, follower: ShardFollower) -> None:
        """Wait until this disk has room for updates; the source keeps its log meanwhile."""
        while True:
            try:
                room.check()
                return
            except OverloadedError as exc:
                self.failure = str(exc)
                self._behind_since_s = min(self._behind_since_s, time.monotonic())
                await follower.register()
                await asyncio.sleep(exc.retry_after_s or _WAIT_S)


def _take(log: FileUpdateLog, ingest: Ingest, room: DiskRoom, update: Update, mark: int | None) -> Append:
    """Give a record of the source its place in the log, and apply it once it is durable."""
    if mark is None:
        raise ProtocolError(f"record {update.seq} has come without its mark")
    append = log.append(epoch=update.epoch, header=update.header, body=[update.body], source_mark=mark)
    if append.seq != update.seq:
        raise ProtocolError(f"record {update.seq} would get seq {append.seq} here")
    room.take(update.body.nbytes)
    ingest.take(LogRecord(update.seq, update.epoch, update.header, update.body), append)
    return append
