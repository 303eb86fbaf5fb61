"""An owner hands its shard over: it offers it in the log, and takes nothing more until that is decided.

    owner      offer(id, to) at seq q ── takes no updates ── asks `to` each 0.5 s ──▶ accepted: names it, for ever
    follower                └▶ has read q ── open at q + 1, in the next term           declined: withdrawal, goes on

A follower decides by its record at q + 1 of its own log, or by declining the offer on its disk. An owner that has no
answer stays closed, also over restarts: the follower may take updates already. With claims in an object store, an owner
whose log is in files starts again after some seconds instead: its start claims the next term, or finds the follower's.
Of a replicated log, whoever takes it over has the offer, too, and asks the follower before it takes anything.

To a standby of its own log an owner offers the shard without a question: the log says whether the withdrawal or the
standby's record comes first.

A new server with another number of shards takes the place of all shards together (`reshard/`). It has accepted an offer
if it names this server and the offer's place in the log among its predecessors. No other answer counts: whoever builds
it says itself that it has given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.paramserver.config.server_settings import ShardConfig, ShardSettings
from headrace.paramserver.ingest.pipeline import Ingest
from headrace.paramserver.ingest.shard_state import Offer, Taker
from headrace.paramserver.log.claims import HeldClaims, LateClaimError
from headrace.paramserver.reading.link import Dial
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.security import node_credentials
from headrace.paramserver.rpc.shard_places import STANDBY, ShardPlace
from headrace.paramserver.system.log_lines import fact
from headrace.schemas.errors import (
    HeadraceError,
    OverloadedError,
    RequestError,
    ReshardedError,
    UnavailableError,
)
from headrace.schemas.idl import idl

__all__ = ["READS_S", "HandOver", "peer_dial"]

_log = logging.getLogger(__name__)

READS_S = 1.0
"""For how long after a follower has said that it has not taken over the owner still answers with its rows, seconds."""
# Often enough that rows are answered all the time.
_ASK_S = 0.5
# At first, since to take over takes some ten milliseconds; these answers are good for no rows.
_ASK_SOON_S, _SOON_S = 0.05, 0.5
_ATTEMPT_S = 15.0
_SILENT_S = 5.0
_FIRST_PAUSE_S = 0.2


def peer_dial(config: ShardSettings, *, role: int = idl.Role.READER) -> Dial:
    """Return how a follower connects to its source, and that to the follower: as nodes of a cluster do.

    Raises:
        ConfigError: A file of ours is missing or unfit.
    """
    context, token = node_credentials(config, os.environ, authority=config.tls_peer_authority)
    return Dial(ssl_context=context, server_hostname=None, token=token, timeout_s=_ATTEMPT_S, role=role)


class HandOver:
    """The offers of one shard's owner. Thread: the event loop's.

    Attributes:
        successor: Where the shard is once an offer was accepted; None before.
        resharded: Once another server has taken the place of this one, the error that says where it is; None before.
        starts_again: If the owner goes on with a shard that it has offered, it does so by another start.
    """

    def __init__(self, config: ShardConfig, ingest: Ingest, *, term: int, on_left: Callable[[], None]) -> None:
        """Offer the shard that `ingest` serves in a term; `on_left` is called once an offer was accepted."""
        self.successor: ShardPlace | None = None
        self.resharded: ReshardedError | None = None
        self._config, self._ingest, self._term, self._on_left = config, ingest, term, on_left
        self._dial = peer_dial(config, role=idl.Role.ADMIN)
        self.starts_again = False
        self._closed_s = self._may_read_until_s = -math.inf
        self._task: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[HeadraceError] = asyncio.get_running_loop().create_future()

    async def wait_failed(self) -> HeadraceError:
        """Wait for the error after which the shard must start again, and return it. Cancellation: harmless."""
        return await asyncio.shield(self._failed)

    @property
    def may_tell(self) -> bool:
        """Whether the log up to the offer may be told: nobody else adds to this one."""
        offer = self._ingest.offer
        return self._ingest.closed is None or (offer is not None and offer.is_elsewhere)

    @property
    def may_read(self) -> bool:
        """Whether rows may be answered: nobody can have taken over by now."""
        return self._ingest.closed is None or time.monotonic() < self._may_read_until_s

    @property
    def knowledge_age_s(self) -> float:
        """For how long a follower may have taken over, seconds; 0 while none can have."""
        if self._ingest.closed is None:
            return 0.0
        return time.monotonic() - max(self._closed_s, self._may_read_until_s - READS_S)

    def stop(self) -> None:
        """Ask no more; idempotent."""
        if self._task is not None:
            self._task.cancel()

    def resume(self, offer: Offer) -> None:
        """Go on with an offer that a start has found at the end of its log, before the shard serves."""
        self._close(offer)
        # This start tells the term of the offer. If it goes on, it needs one that clients take for a later one.
        self.starts_again = self._config.log is not None
        if offer.is_taken:
            return self._leave(offer)
        # The follower cannot claim a term any more that this start has claimed.
        is_decided = offer.nonce is not None and self._term > offer.term
        if not is_decided:
            fact(_log, logging.WARNING, "shard was offered and takes no updates until it knows more", to=offer.to)
        work = self._go_on(offer) if is_decided else self._decide(offer, hold_s=0.0)
        self._task = asyncio.create_task(work, name="headrace-hand-over")

    async def offer(self, to: str, hold_s: float, *, taker: Taker, num_shards: int | None = None) -> Offer:
        """Offer the shard to whoever is at an address; return the offer once it is durable.

        `num_shards` is that of a new server.

        Raises:
            OverloadedError: It is offered already, or the log has no room; nothing has changed.
            RequestError: No follower of this shard is there, or a new server cannot have it because it is offered.
            UnavailableError: It was taken over, or the log has failed, or the follower is away, or the object store is,
                on which the offer depends.

        Cancellation: the offer goes on.
        """
        known = self._ingest.offer
        if taker == "server" and known is not None:
            if (known.to, known.num_shards, known.is_taken) == (to, num_shards, False):
                return known  # a repeated request
            raise RequestError(f"shard {self._config.shard} is offered already: {self._ingest.closed}")
        self._check_free(hold_s)
        offer = Offer(
            seq=0, to=to, id=secrets.token_hex(8), taker=taker, term=self._term, num_shards=num_shards
        )  # its seq comes with its record
        if taker == "follower":
            if (await self._ask(offer, is_reading=False))[0] != idl.OfferState.OPEN:
                raise RequestError(f"shard {self._config.shard} has no follower at {to}")
            # The terms of a replicated log are its own, and a claim only repeats them.
            if self._config.object_store is not None and self._config.log is None:
                offer = replace(offer, nonce=await self._nonce())
        self._check_free(hold_s)
        self._close(offer)
        fact(_log, logging.INFO, "shard is offered", to=to, hold_s=hold_s)
        offered: asyncio.Future[Offer] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._offer(offer, hold_s, offered), name="headrace-hand-over")
        return await asyncio.shield(offered)

    async def _nonce(self) -> str:
        """Return that of this owner's claim."""
        config = self._config
        held = await asyncio.to_thread(HeldClaims.read, config.directory, config.server_id, config.shard)
        if len(held.known) != 1 or held.known[0][0] != self._term:
            raise UnavailableError(f"shard {config.shard} could not claim its term in the object store yet: try again")
        return held.known[0][1]

    async def abort(self, *, forces: bool, by: str | None = None) -> None:
        """Go on with the shard, unless its offer was accepted.

        Args:
            forces: Go on although the follower does not answer: somebody knows that it never took over.
            by: The address of a new server that has been offered the shard, if it says itself that it has given up.

        Raises:
            RequestError: The shard is not offered, or to another address than `by`; or the offer was accepted.
            UnavailableError: The follower does not answer; or the object store decides, and has not yet.

        Cancellation: harmless.
        """
        offer = self._ingest.offer
        if offer is None:
            if by is not None:
                return
            raise RequestError(f"shard {self._config.shard} is not offered to anybody: it takes updates")
        if offer.is_taken:
            raise RequestError(f"shard {self._config.shard} has been taken over by {offer.to}")
        if by not in (None, offer.to):
            raise RequestError(f"shard {self._config.shard} is offered to {offer.to}, not to {by}")
        is_given_up = offer.taker == "server" and by == offer.to
        if offer.is_elsewhere and not is_given_up:
            try:
                state, _ = await self._ask_about(offer, declines=True)
            except HeadraceError as exc:
                if offer.nonce is not None:
                    raise UnavailableError(
                        f"the follower at {offer.to} does not answer: {exc}; the claims in the object store decide "
                        "within seconds"
                    ) from exc
                if not forces:
                    raise UnavailableError(
                        f"{offer.to} does not say what became of the offer: {exc}; if it is lost and has never taken "
                        "over, add --force"
                    ) from exc
                state = idl.OfferState.DECLINED
            if state == idl.OfferState.OPENING:
                raise UnavailableError(f"{offer.to} is taking shard {self._config.shard} over just now: ask again")
            if state == idl.OfferState.ACCEPTED:
                raise RequestError(f"shard {self._config.shard} has been taken over by {offer.to}")
        if self._ingest.offer is not offer:
            raise RequestError(f"that offer of shard {self._config.shard} was decided meanwhile")
        self.stop()
        await self._go_on(offer)

    def _fail(self, error: HeadraceError) -> None:
        if not self._failed.done():
            self._failed.set_result(error)

    def _check_free(self, hold_s: float) -> None:
        if self.successor is not None:
            self._ingest.check_open()
        if self._ingest.closed is not None:
            raise OverloadedError(f"{self._ingest.closed} already", retry_after_s=min(hold_s, _ASK_S))

    def _close(self, offer: Offer) -> None:
        shard = self._config.shard
        if offer.num_shards is None:
            what, (host, port) = f"shard {shard} moves to {offer.to}", parse_address(offer.to)
        else:  # soon it says here where the new server's shards are
            what = f"a server with {offer.num_shards} shards at {offer.to} takes this one's place"
            host, port = self._config.addresses[shard]
        closed = UnavailableError(what, moves_to=idl.ShardAddress(shard=shard, host=host, port=port))
        self._ingest.closed, self._closed_s = closed, time.monotonic()

    async def _offer(self, new: Offer, hold_s: float, offered: asyncio.Future[Offer]) -> None:
        try:
            seq = await self._ingest.note("offer", **new.to_note())
            offer = self._ingest.offer
            assert offer is not None and offer.seq == seq
            offered.set_result(offer)
            if offer.is_elsewhere:
                await self._decide(offer, hold_s=hold_s)
            else:
                await asyncio.sleep(hold_s)
                await self._go_on(offer)
        except OverloadedError as exc:  # the log had no room, so there is no offer
            self._ingest.closed = None
            offered.set_exception(exc)
        except HeadraceError as exc:  # taken over, or the log has failed: its own `wait_failed` tells
            if not offered.done():
                offered.set_exception(exc)
        finally:
            if not offered.done():
                offered.set_exception(UnavailableError("the offer was taken back"))

    async def _decide(self, offer: Offer, *, hold_s: float) -> None:
        """Find out what the follower has done, for as long as it takes."""
        began_s = heard_s = time.monotonic()
        is_told = False
        while True:
            is_reading = time.monotonic() - began_s >= _SOON_S
            await asyncio.sleep(_ASK_S if is_reading else _ASK_SOON_S)
            asked_s = time.monotonic()
            try:
                state, term = await self._ask_about(offer, declines=asked_s - began_s >= hold_s, is_reading=is_reading)
                heard_s = time.monotonic()
            except HeadraceError as exc:
                state, term = None, 0
                if not is_told:
                    fact(_log, logging.WARNING, "nobody answers about the offer", to=offer.to, error=str(exc))
                is_told = True
            if state == idl.OfferState.ACCEPTED:
                taken = replace(offer, taken_term=term)
                self._leave(taken)
                return await self._note_taken(taken)
            if state == idl.OfferState.DECLINED:
                return await self._go_on(offer)
            if state == idl.OfferState.OPEN and is_reading:
                self._may_read_until_s = asked_s + READS_S
            if offer.nonce is not None and time.monotonic() - heard_s > _SILENT_S:
                self._fail(
                    LateClaimError(f"shard {self._config.shard} starts again to claim its term: {offer.to} is silent")
                )

    def _leave(self, offer: Offer) -> None:
        host, port = parse_address(offer.to)
        if offer.num_shards is None:
            node = self._config.node_at(self._config.shard, host, port)
            self.successor = ShardPlace(host, port, offer.taken_term or offer.term + 1, node=node)
        else:
            self.resharded = ReshardedError(
                f"the server with {offer.num_shards} shards at {offer.to} has taken the place of this one",
                successor=(host, port),
            )
        fact(_log, logging.INFO, "shard was taken over", by=offer.to)
        self._on_left()

    async def _note_taken(self, offer: Offer) -> None:
        """Note that the shard was taken over: it holds though who has it is away, or its directory is lost.

        Where claims decide, a start finds that of the follower.
        """
        if offer.nonce is None:
            with contextlib.suppress(HeadraceError):  # then the next start asks again
                await self._ingest.note("taken", **offer.to_note())

    async def _go_on(self, offer: Offer) -> None:
        """Withdraw an offer, and serve again. Until the withdrawal is in a replicated log, a standby may take over."""
        while self._ingest.offer is offer:
            try:
                await self._ingest.note("withdrawal")
            except OverloadedError as exc:
                await asyncio.sleep(exc.retry_after_s or _FIRST_PAUSE_S)
                continue
            fact(_log, logging.WARNING, "shard goes on: it was not taken over", offered_to=offer.to)
            if self.starts_again:
                self._fail(
                    UnavailableError(f"shard {self._config.shard} was not taken over by {offer.to}: it starts again")
                )
            else:
                self._ingest.closed = None

    async def _ask_about(self, offer: Offer, *, declines: bool = False, is_reading: bool = True) -> tuple[Any, int]:
        """Return the `idl.OfferState` of an offer that is in the log, as whoever has been offered the shard says.

        With it comes the term in which it was accepted; 0 for a new server.
        """
        if offer.taker == "follower":
            return await self._ask(offer, declines=declines, is_reading=is_reading)
        client, hello = await self._dial.connect(*parse_address(offer.to))
        await client.close()
        shard, server_id = self._config.shard, self._config.server_id
        taken = [each.seqs[shard] for each in hello.predecessors or () if each.server_id == server_id]
        if offer.seq in taken:
            return idl.OfferState.ACCEPTED, 0
        raise UnavailableError(f"{offer.to} is shard {hello.shard} of server {hello.server_id}")

    async def _ask(self, offer: Offer, *, declines: bool = False, is_reading: bool = True) -> tuple[Any, int]:
        """Return the `idl.OfferState` of an offer by its id, as the follower says, and its term.

        An owner that is not `is_reading` answers no rows because of it, and the follower need not wait for that.
        """
        request = idl.PromoteShardRequest(
            shard=self._config.shard,
            offer=offer.id,
            declines=declines or None,
            to=None if is_reading else offer.to,
        )
        client, hello = await self._dial.connect(*parse_address(offer.to))
        async with client:
            is_it = hello.shard in (self._config.shard, STANDBY)  # one that has handed the shard on is a standby
            if hello.server_id != self._config.server_id or not is_it:
                raise UnavailableError(f"{offer.to} is shard {hello.shard} of server {hello.server_id}")
            # Whatever is there knows of an owner in a later term: a directory that was made anew, too. But a follower
            # may have heard of later terms of this very log.
            if hello.knowledge_age_ms is None and (hello.term or 0) > offer.term:
                return idl.OfferState.ACCEPTED, hello.term
            reply = await client.promote_shard(request)
            return reply.state, reply.term or 0
