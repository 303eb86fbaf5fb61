"""An owner hands its shard over: it offers it in the log, and takes nothing more until that is decided.

    owner      offer(id, to) at seq q ── takes no updates ── asks `to` each 0.5 s ──▶ accepted: names it, for ever
    follower                └▶ has read q ── open at q + 1, in the next term           declined: withdrawal, goes on

Of a log in files the follower decides: by its record at q + 1, or by declining the offer on its disk. An owner that
has no answer stays closed, also over restarts: the follower may take updates already. With claims in an object store
it starts again after some seconds instead: its start claims the next term, or finds the follower's.

A replicated log decides by itself whether the withdrawal or the standby's record comes first.

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
from typing import Any

from headrace.paramserver.config.server_settings import ShardConfig, ShardSettings
from headrace.paramserver.ingest.pipeline import Ingest
from headrace.paramserver.ingest.shard_state import Offer
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
    """

    def __init__(self, config: ShardConfig, ingest: Ingest, *, term: int, on_left: Callable[[], None]) -> None:
        """Offer the shard that `ingest` serves in a term; `on_left` is called once an offer was accepted."""
        self.successor: ShardPlace | None = None
        self.resharded: ReshardedError | None = None
        self._config, self._ingest, self._term, self._on_left = config, ingest, term, on_left
        self._dial = peer_dial(config, role=idl.Role.ADMIN)
        self._closed_s = self._may_read_until_s = -math.inf
        self._task: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[HeadraceError] = asyncio.get_running_loop().create_future()

    async def wait_failed(self) -> HeadraceError:
        """Wait for the error after which the shard must start again, and return it. Cancellation: harmless."""
        return await asyncio.shield(self._failed)

    @property
    def may_read(self) -> bool:
        """Whether rows may be answered: no follower can have taken over by now."""
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
        self._close(offer.to, offer.num_shards)
        if offer.is_taken:
            return self._leave(offer)
        # The follower cannot claim a term any more that this start has claimed.
        is_decided = offer.claim is not None and self._term > offer.claim[0]
        if not is_decided:
            fact(_log, logging.WARNING, "shard was offered and takes no updates until it knows more", to=offer.to)
        work = self._go_on(offer) if is_decided else self._decide(offer, hold_s=0.0)
        self._task = asyncio.create_task(work, name="headrace-hand-over")

    async def offer(self, to: str, hold_s: float, *, num_shards: int | None = None) -> Offer:
        """Offer the shard to the follower or standby at an address; return the offer once it is durable.

        With `num_shards`, to a new server of so many shards.

        Raises:
            OverloadedError: It is offered already, or the log has no room; nothing has changed.
            RequestError: No follower of this shard is there, or a new server cannot have it because it is offered.
            UnavailableError: It was taken over, or the log has failed, or the follower is away, or the object store is,
                on which the offer depends.

        Cancellation: the offer goes on.
        """
        offer = self._ingest.offer
        if num_shards is not None and offer is not None:
            if (offer.to, offer.num_shards, offer.is_taken) == (to, num_shards, False):
                return offer  # a repeated request
            raise RequestError(f"shard {self._config.shard} is offered already: {self._ingest.closed}")
        self._check_free(hold_s)
        more = {"id": secrets.token_hex(8)}
        if num_shards is not None:
            more["shards"] = str(num_shards)
        elif self._config.log is None and await self._ask(to, more["id"], is_reading=False) != idl.OfferState.OPEN:
            raise RequestError(f"shard {self._config.shard} has no follower at {to}")
        if self._config.object_store is not None and self._config.log is None and num_shards is None:
            held = await asyncio.to_thread(
                HeldClaims.read, self._config.directory, self._config.server_id, self._config.shard
            )
            if len(held.known) != 1 or held.known[0][0] != self._term:
                raise UnavailableError(
                    f"shard {self._config.shard} could not claim its term in the object store yet: try again"
                )
            more |= {"term": str(self._term), "nonce": held.known[0][1]}
        self._check_free(hold_s)
        self._close(to, num_shards)
        fact(_log, logging.INFO, "shard is offered", to=to, hold_s=hold_s)
        offered: asyncio.Future[Offer] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._offer(to, hold_s, more, offered), name="headrace-hand-over")
        return await asyncio.shield(offered)

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
        is_given_up = offer.num_shards is not None and by == offer.to
        if self._config.log is None and not is_given_up:
            try:
                state = await self._ask_about(offer, declines=True)
            except HeadraceError as exc:
                if offer.claim is not None:
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
            if state == idl.OfferState.ACCEPTED:
                raise RequestError(f"shard {self._config.shard} has been taken over by {offer.to}")
        if self._ingest.offer is not offer:
            raise RequestError(f"that offer of shard {self._config.shard} was decided meanwhile")
        self.stop()
        await self._go_on(offer)

    def _check_free(self, hold_s: float) -> None:
        if self.successor is not None:
            self._ingest.check_open()
        if self._ingest.closed is not None:
            raise OverloadedError(f"{self._ingest.closed} already", retry_after_s=min(hold_s, _ASK_S))

    def _close(self, to: str, num_shards: int | None) -> None:
        shard = self._config.shard
        if num_shards is None:
            what, (host, port) = f"shard {shard} moves to {to}", parse_address(to)
        else:  # soon it says here where the new server's shards are
            what = f"a server with {num_shards} shards at {to} takes this one's place"
            host, port = self._config.addresses[shard]
        closed = UnavailableError(what, moves_to=idl.ShardAddress(shard=shard, host=host, port=port))
        self._ingest.closed, self._closed_s = closed, time.monotonic()

    async def _offer(self, to: str, hold_s: float, more: dict[str, str], offered: asyncio.Future[Offer]) -> None:
        try:
            seq = await self._ingest.note("offer", to=to, **more)
            offer = self._ingest.offer
            assert offer is not None and offer.seq == seq
            offered.set_result(offer)
            if self._config.log is None:
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
                state = await self._ask_about(offer, declines=asked_s - began_s >= hold_s, is_reading=is_reading)
                heard_s = time.monotonic()
            except HeadraceError as exc:
                state = None
                if not is_told:
                    fact(_log, logging.WARNING, "nobody answers about the offer", to=offer.to, error=str(exc))
                is_told = True
            if state == idl.OfferState.ACCEPTED:
                self._leave(offer)
                return await self._note_taken(offer)
            if state == idl.OfferState.DECLINED:
                return await self._go_on(offer)
            if state == idl.OfferState.OPEN and is_reading:
                self._may_read_until_s = asked_s + READS_S
            if offer.claim is not None and time.monotonic() - heard_s > _SILENT_S and not self._failed.done():
                self._failed.set_result(
                    LateClaimError(f"shard {self._config.shard} starts again to claim its term: {offer.to} is silent")
                )

    def _leave(self, offer: Offer) -> None:
        host, port = parse_address(offer.to)
        if offer.num_shards is None:
            self.successor = ShardPlace(host, port, self._term + 1)
        else:
            self.resharded = ReshardedError(
                f"the server with {offer.num_shards} shards at {offer.to} has taken the place of this one",
                successor=(host, port),
            )
        fact(_log, logging.INFO, "shard was taken over", by=offer.to)
        self._on_left()

    async def _note_taken(self, offer: Offer) -> None:
        """Note that a new server has this one's place: it holds though that one is away, or its directory is lost."""
        if offer.num_shards is not None:
            more = {"offer": str(offer.seq), "id": offer.id, "to": offer.to, "shards": str(offer.num_shards)}
            with contextlib.suppress(OverloadedError):  # then the next start asks again
                await self._ingest.note("taken", **more)

    async def _go_on(self, offer: Offer) -> None:
        """Withdraw an offer, and serve again. Until the withdrawal is in a replicated log, a standby may take over."""
        while self._ingest.offer is offer:
            try:
                await self._ingest.note("withdrawal")
            except OverloadedError as exc:
                await asyncio.sleep(exc.retry_after_s or _FIRST_PAUSE_S)
                continue
            self._ingest.closed = None
            fact(_log, logging.WARNING, "shard goes on: it was not taken over", offered_to=offer.to)

    async def _ask_about(self, offer: Offer, *, declines: bool = False, is_reading: bool = True) -> Any:
        """Return the `idl.OfferState` of an offer that is in the log, as whoever has been offered the shard says."""
        if offer.num_shards is None:
            return await self._ask(offer.to, offer.id, declines=declines, is_reading=is_reading)
        client, hello = await self._dial.connect(*parse_address(offer.to))
        await client.close()
        shard, server_id = self._config.shard, self._config.server_id
        taken = [each.seqs[shard] for each in hello.predecessors or () if each.server_id == server_id]
        if offer.seq in taken:
            return idl.OfferState.ACCEPTED
        raise UnavailableError(f"{offer.to} is shard {hello.shard} of server {hello.server_id}")

    async def _ask(self, to: str, offer: str, *, declines: bool = False, is_reading: bool = True) -> Any:
        """Return the `idl.OfferState` of an offer by its id, as the follower says.

        An owner that is not `is_reading` answers no rows because of it, and the follower need not wait for that.
        """
        request = idl.PromoteShardRequest(
            shard=self._config.shard, offer=offer, declines=declines or None, to=None if is_reading else to
        )
        client, hello = await self._dial.connect(*parse_address(to))
        async with client:
            is_it = hello.shard in (self._config.shard, STANDBY)  # one that has handed the shard on is a standby
            if hello.server_id != self._config.server_id or not is_it:
                raise UnavailableError(f"{to} is shard {hello.shard} of server {hello.server_id}")
            # Whatever is there knows of an owner in a later term: a directory that was made anew, too.
            if (hello.term or 0) > self._term:
                return idl.OfferState.ACCEPTED
            return (await client.promote_shard(request)).state
