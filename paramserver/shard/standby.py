"""A copy of a shard whose source is the stream of its replicated log, until this process owns that.

A start never takes a shard from an owner that lives. It opens at once if the last owner was at its own address, which
no other process has; otherwise when the log has been silent for some seconds, though owners write each second. Whoever
wants a shard elsewhere sooner moves it (`headrace promote`): its owner offers it in the log, and answers nobody from
then on; the standby opens when it has read that.

Where the stream has removed the record that comes next, the copy begins with the newest snapshot of the shard's owner,
or of the object store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.ingest.pipeline import Ingest
from headrace.paramserver.ingest.shard_state import Offer
from headrace.paramserver.log.claims import HeldClaims
from headrace.paramserver.log.interface import ReplicatedLog
from headrace.paramserver.reading.link import ShardLink, link_all, retry
from headrace.paramserver.rpc.address import format_address, parse_address, parse_addresses
from headrace.paramserver.rpc.shard_places import ShardPlace, ShardPlaces
from headrace.paramserver.shard.hand_over import peer_dial
from headrace.paramserver.shard.source_copy import SourceCopy, check_above
from headrace.paramserver.snapshots.remote import fetch_stored_part
from headrace.paramserver.system.event_loop import background_task
from headrace.paramserver.system.log_lines import fact
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    GoneError,
    HeadraceError,
    SetBackError,
    UnavailableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.snapshot_manifest import ShardPart

if TYPE_CHECKING:
    from headrace.paramserver.log.jetstream.engine import StreamState
    from headrace.paramserver.shard.sampler import ShardParts

__all__ = ["Standby"]

_log = logging.getLogger(__name__)

# As long as a log takes refusals for old knowledge.
_REACH_S = 30.0
_RETRY_S = 0.2
# How often it asks the servers of the log how far that is, and how long they may take.
_ASK_S, _ANSWER_S = 1.0, 5.0
# Servers that have not said how far the log is for longer are away.
_SILENCE_S = 10.0
# An owner writes each second. A leader that has nothing new for longer may be cut off from the others.
_BEAT_S = 3.0
# An owner that does not answer for so long is gone; the object store has its snapshots.
_OWNER_S = 20.0
_PAUSE_S = 5.0


class Standby(SourceCopy):
    """A copy that follows the stream of its shard's log, and takes that over when it may.

    Thread: the event loop's.
    """

    def __init__(self, config: ShardConfig, *, above_term: int) -> None:
        """Use `of_shard`. The term that it takes is above `above_term`."""
        super().__init__(config, copy_id=config.address, has_begun=True)
        self._above_term = above_term
        self._source_seq = 0
        self._lacks: tuple[int, float] | None = None  # seq that the servers have told and this copy lacks, and when
        self._heard_s = -math.inf  # when it had all that the servers had
        self._answered_s = time.monotonic()

    @classmethod
    async def of_shard(cls, config: ShardConfig) -> Standby:
        """Return what follows the log of a shard; raises as `HeldClaims.read`."""
        held = await asyncio.to_thread(HeldClaims.read, config.directory, config.server_id, config.shard)
        return cls(config, above_term=held.highest_term)

    @property
    def _log(self) -> ReplicatedLog | None:
        return None if self.parts is None else self.parts.stream

    @property
    def _ingest(self) -> Ingest | None:
        return None if self.parts is None else self.parts.ingest

    @property
    def _offer_elsewhere(self) -> Offer | None:
        """By which the shard may be in another log by now, of which this copy hears nothing."""
        offer = None if self._ingest is None else self._ingest.offer
        return offer if offer is not None and offer.is_elsewhere else None

    @property
    def _successor(self) -> ShardPlace | None:
        """Where the shard is once it was taken over in another log."""
        if (offer := self._offer_elsewhere) is None or not offer.is_taken:
            return None
        return ShardPlace(*parse_address(offer.to), offer.taken_term or offer.term + 1)

    @property
    def term(self) -> int:
        """Of the log's last owner, as far as it was read; with an offer to another log, that in which it was made."""
        if (offer := self._offer_elsewhere) is not None:
            return offer.term  # who has taken it over may have a lower one than a later owner of this log
        return 0 if self._log is None else self._log.term

    @property
    def source(self) -> str:
        """Host and port of the log's owner, as it has told them; empty before it was read."""
        return "" if self._log is None else self._log.owner

    @property
    def source_seq(self) -> int:
        """See `SourceCopy`."""
        return self._source_seq if self._log is None else max(self._source_seq, self._log.last_seq)

    @property
    def lag_s(self) -> float:
        """See `SourceCopy`."""
        self._look()
        return 0.0 if self._lacks is None else time.monotonic() - self._lacks[1]

    @property
    def knowledge_age_s(self) -> float:
        """See `SourceCopy`."""
        self._look()
        return time.monotonic() - self._heard_s

    @property
    def places(self) -> list[ShardPlace]:
        """See `SourceCopy`: with the term of this shard alone."""
        places, shard = self.places_of_file, self._config.shard
        places[shard] = replace(places[shard], term=self.term)
        return places

    @property
    def num_behind(self) -> int:
        """Records that are committed, and known here, and not applied."""
        return 0 if self._ingest is None else max(0, self.source_seq - self._ingest.submitted_seq)

    def _look(self) -> None:
        """Note whether it has by now what it lacked."""
        if self._lacks is not None and self._ingest is not None and self._ingest.submitted_seq >= self._lacks[0]:
            self._note_heard(self._lacks[1])
            self._lacks = None

    def _note_heard(self, heard_s: float) -> None:
        """Note when it had all that the servers had, unless there may be more in another log."""
        if self._offer_elsewhere is None:
            self._heard_s = max(self._heard_s, heard_s)

    def check_here(self) -> None:
        """See `SourceCopy`."""
        if (to := self._successor) is not None:
            raise UnavailableError(f"shard {self._config.shard} was taken over by {format_address(*to.address)}")

    def _hindrance(self) -> str | None:
        if (to := self._successor) is not None:
            return f"the shard was taken over by {format_address(*to.address)}, in another log: this copy ends here"
        silent_s = time.monotonic() - self._answered_s
        silence = f"no server has led its log for {silent_s:.0f} s" if silent_s > _SILENCE_S else None
        return self.failure or silence

    def lead(self, request: Any) -> ShardPlaces | None:
        """Send everybody to the owner but readers that are content with a copy; tell where it is who reads that."""
        is_copy = request.role == idl.Role.READER and request.reads_copies and not request.epoch
        if is_copy and self._successor is None:
            return None
        if request.epoch or not (request.asks_places or request.role == idl.Role.ADMIN):
            where = f"its owner is at {self.source}" if self.source else "it has had no owner yet"
            raise UnavailableError(
                f"this is a standby of shard {self._config.shard}, {self.num_behind} records behind: {where}"
            )
        return self._places()

    def _places(self) -> ShardPlaces:
        """Return the places of the settings, and that of the owner, or of its successor, of which the log tells."""
        config = self._config
        places = ShardPlaces(config.server_id, self.places_of_file)
        if (to := self._successor) is not None:
            places.merge([(config.shard, to)])
        elif self.source:
            try:
                ((host, port),) = parse_addresses(self.source)
            except (HeadraceError, ValueError):  # written by somebody else
                return places
            places.merge([(config.shard, ShardPlace(host, port, self.term))])
        return places

    async def check_ahead(self, from_seq: int) -> None:
        """See `SourceCopy`."""
        assert self._log is not None
        state = await self._ask(self._log)
        if state is not None and state.is_healthy and state.last_seq < from_seq - 1:
            raise SetBackError(f"the log of shard {self._config.shard} ends at seq {state.last_seq}: start over")
        raise UnavailableError(f"this standby is behind its log, and does not have seq {from_seq - 1} yet")

    async def close(self) -> None:
        """See `SourceCopy`: it has no connection of its own."""

    # Beginning.

    async def begin(self) -> None:
        """See `SourceCopy`. A shard that nobody else can have does not wait for a snapshot.

        Raises:
            CorruptionError: There is none. The message says what to do.
        """
        await asyncio.to_thread(self._clear_incoming)
        if self.num_restarts > 2:
            if not self._may_wait:
                raise CorruptionError(self._hopeless("the newest snapshot does not lead to it"))
            await asyncio.sleep(_PAUSE_S)
        await super().begin()

    @property
    def _may_wait(self) -> bool:
        """Whether another copy may have the shard meanwhile."""
        return self._config.is_standby or self._config.waits

    async def _fetch_copy(self) -> None:
        """Put a snapshot of the shard's owner, or of the object store, in the place of store and mirror."""
        config = self._config
        try:
            if await self._fetch_from_owner():
                return
            why = "nobody who owns the shard answers"
        except (GoneError, UnavailableError) as exc:
            why = str(exc)
        if config.object_store is not None:
            try:
                if await self._move_in(self._fetch_stored):
                    return
                why = f"{config.object_store} has no snapshot of it"
            except (ConfigError, GoneError) as exc:
                why = str(exc)
        raise UnavailableError(self._hopeless(why)) if self._may_wait else CorruptionError(self._hopeless(why))

    def _hopeless(self, why: str) -> str:
        lacking = f"this copy of shard {self._config.shard} lacks records that its stream has removed"
        return f"{lacking}, and cannot begin anew: {why}; {self._restore_hint()}"

    async def _fetch_stored(self, incoming: Path) -> ShardPart | None:
        url, config = self._config.object_store, self._config
        assert url is not None

        async def check(part: ShardPart) -> None:
            check_above(part, self.applied_seq)

        return await fetch_stored_part(url, incoming, server_id=config.server_id, shard=config.shard, keep_log=check)

    async def _fetch_from_owner(self) -> bool:
        """Begin with the newest snapshot of the shard's owner, or one that it makes; return False if none answers."""
        config, own = self._config, self._config.addresses[self._config.shard]
        copies = [(host, port) for shard, host, port, _ in config.other_copies if shard == config.shard]
        seeds = [address for address in dict.fromkeys((*copies, *config.addresses)) if address != own]
        if not seeds:
            return False
        links: list[ShardLink] = []
        try:
            async with asyncio.timeout(_OWNER_S):
                links = await link_all(peer_dial(config), seeds)
                link = links[config.shard]
                assert link.resolver is not None
                link.resolver.places.shunned = own
                await retry(link.refresh)
            # The owner's copy of the log may lead on from older snapshots than the stream does.
            if await self._fetch_part(link, above_seq=self.applied_seq):
                return True
            await self._make_snapshot(link)
            return await self._fetch_part(link)
        except TimeoutError:
            return False
        finally:
            await asyncio.gather(*(link.close() for link in links))

    def _restore_hint(self) -> str:
        """Return the command that makes the shard's directory anew."""
        store = self._config.object_store or "URL"
        return f"move {self._config.directory} away, and headrace restore {store} --shard {self._config.shard} --data …"

    # Following, and taking over.

    async def follow(self, parts: ShardParts) -> tuple[int | None, ReplicatedLog | None]:
        """Follow the log until this process owns it and has applied all of it.

        Raises:
            GoneError: The stream has removed the record that comes next.
            CorruptionError: The store does not belong to the log.

        Cancellation: it may own the log all the same; the next start finds out.
        """
        assert parts.stream is not None
        async with background_task(self._keep_asking(parts.stream), name="headrace-log-position"):
            await self._own(parts.stream, parts.ingest)
        return None, None

    async def _keep_asking(self, log: ReplicatedLog) -> NoReturn:
        """Learn each second how far the log is."""
        seen_seq, seen_s = log.last_seq, -math.inf
        while True:
            if log.last_seq != seen_seq:
                seen_seq, seen_s = log.last_seq, time.monotonic()
            asked_s, state = time.monotonic(), await self._ask(log)
            if state is not None and state.leader is not None and self._ingest is not None:
                self._answered_s, self._source_seq = time.monotonic(), max(self._source_seq, state.last_seq)
                self._look()
                if self._ingest.submitted_seq >= state.last_seq:
                    if asked_s - seen_s <= _BEAT_S:
                        self._note_heard(asked_s)
                elif self._lacks is None:
                    self._lacks = state.last_seq, asked_s
            await asyncio.sleep(_ASK_S)

    async def _ask(self, log: ReplicatedLog) -> StreamState | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                return await log.engine_state()
        return None

    async def _own(self, log: ReplicatedLog, ingest: Ingest) -> None:
        await self._wait_reached(log, ingest)
        while True:
            is_silent = False
            await self._apply(log, ingest)
            while not self._may_open(log, ingest, is_silent=is_silent):
                self.stands.set()
                seen_seq = log.last_seq
                is_silent = await self._wait(log, ingest)
                await self._apply(log, ingest)
                is_silent = is_silent and log.last_seq == seen_seq  # its owner may have come back just now
            if await self._take_over(log, ingest):
                break
        await log.wait_beyond(ingest.submitted_seq)
        await self._apply(log, ingest)  # the record that says so, before anything is served
        fact(_log, logging.INFO, "shard owns its log", term=log.term, seq=ingest.submitted_seq)

    async def _wait_reached(self, log: ReplicatedLog, ingest: Ingest) -> None:
        """Wait until the log is known as far as the store has applied it: what a server says may be old."""
        applied_seq = ingest.submitted_seq
        while log.last_seq < applied_seq:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REACH_S):
                    await self._first_of(log, _beyond(log, applied_seq - 1))
                    return
            state = await log.engine_state()
            if state is not None and state.is_healthy and state.last_seq < applied_seq:
                raise CorruptionError(
                    f"the store of shard {self._config.shard} has seq {applied_seq} applied, and its stream ends at "
                    f"seq {state.last_seq}, with all servers well: it is another stream, or has lost records; see "
                    "docs/replicated-log.md"
                )

    async def _take_over(self, log: ReplicatedLog, ingest: Ingest) -> bool:
        """Return whether this process owns the log now; if not, apply what has come, and look again."""
        applied_seq = ingest.submitted_seq
        state = await log.engine_state()
        try:
            # To try it interrupts reading.
            if (state is None or state.last_seq <= applied_seq) and await log.take_over(
                applied_seq, owner=self._config.address, above_term=self._above_term
            ):
                return True
        except UnavailableError as exc:  # whether it worked shows when the log is read
            fact(_log, logging.WARNING, "shard cannot take its log over yet", error=str(exc))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    await log.wait_beyond(applied_seq)
            return False
        # There is another record. Over a slow link, or behind much else, it takes long to come.
        await self._first_of(log, _beyond(log, applied_seq))
        return False

    def _may_open(self, log: ReplicatedLog, ingest: Ingest, *, is_silent: bool) -> bool:
        """Return whether to take over behind what is applied: then this is the last word about the owner."""
        if ingest.submitted_seq < log.last_seq:
            return False
        if ingest.offer is not None:
            return is_silent or ingest.offer.to == self._config.address
        if not log.term:
            return not (self._config.is_standby or self._config.waits)
        return is_silent or (log.owner == self._config.address and not self._config.waits)

    async def _wait(self, log: ReplicatedLog, ingest: Ingest) -> bool:
        """Wait for records or for silence; return whether it was silence."""
        silent = asyncio.create_task(log.wait_silent(), name="headrace-log-silence")
        await self._first_of(log, silent, _beyond(log, ingest.submitted_seq))
        return silent.done() and not silent.cancelled()

    async def _first_of(self, log: ReplicatedLog, *waiting: asyncio.Task[None]) -> None:
        """Wait for one of some tasks, and cancel the others; raise what ends the log, if that comes first."""
        failing = asyncio.create_task(log.wait_failed(), name="headrace-log-failed")
        tasks: list[asyncio.Task[Any]] = [*waiting, failing]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                raise self._named(failing.result())
            for task in waiting:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _apply(self, log: ReplicatedLog, ingest: Ingest) -> None:
        if log.first_seq > ingest.submitted_seq + 1:
            raise GoneError(f"the log begins at seq {log.first_seq}, seq {ingest.submitted_seq + 1} has been removed")
        try:
            await ingest.recover()
        except CorruptionError as exc:
            raise self._named(exc) from exc

    def _named(self, error: HeadraceError) -> HeadraceError:
        """Return an error of log or store with what to do about it."""
        if isinstance(error, CorruptionError):
            return CorruptionError(f"{error}; to make this copy of the shard anew: {self._restore_hint()}")
        return error


def _beyond(log: ReplicatedLog, seq: int) -> asyncio.Task[None]:
    return asyncio.create_task(log.wait_beyond(seq), name="headrace-log-follow")
