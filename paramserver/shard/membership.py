"""A shard's place in its server: the term in which it runs, and what it knows of the other shards' places.

On one machine without an object store this is the map from the configuration, and nothing happens.

A replicated log gives each owner its term, and the claim in the object store follows it: it is put when the store can
be reached, and nothing waits for it.

With an object store each start claims the next term (`log/claims.py`). The claim is looked at every few seconds, and a
shard whose claim is not the highest any more stops. One that was started while the store was away starts again.

In a cluster the shards tell each other where they are: each says hello to all others at its start, and to a random one
every few seconds, and both keep the statements with the highest terms. So a client that reaches any shard learns the
new place of one that has moved. A shard that hears of itself in a higher term asks there; if a newer copy answers, it
stops.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NoReturn, Self

from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.log.claims import HeldClaims, LateClaimError, ShardClaim, claim_shard, note_term
from headrace.paramserver.log.interface import UpdateLog
from headrace.paramserver.log.leases import LogLease
from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.outages import Backoff, OutageLog
from headrace.paramserver.rpc.security import Token, node_credentials
from headrace.paramserver.rpc.shard_places import HEARSAY, OWN_WORD, ShardPlace, ShardPlaces
from headrace.paramserver.system.log_lines import fact
from headrace.paramserver.system.object_store import ObjectStore
from headrace.schemas.errors import HeadraceError, LogFencedError, UnavailableError
from headrace.schemas.idl import PROTOCOL_VERSION, idl

__all__ = ["Membership", "StandbyView"]

_log = logging.getLogger(__name__)

_LOOK_S = 10.0
# A store that is too slow at each start must not end the shard again and again.
_LATE_CLAIM_S = 60.0
_TELL_S = 5.0
_TIMEOUT_S = 5.0
_TELLS_AT_ONCE = 8
# Shorter than an upload may wait: a start goes on in its old term when the store is away.
_STORE_DEADLINE_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0


@dataclass(slots=True)
class StandbyView:
    """A standby as its owner sees it: `applied_seq` is -1 before it has told, `failure` says why it does not answer."""

    host: str
    port: int
    applied_seq: int = -1
    failure: str | None = None

    @property
    def address(self) -> str:
        """Host and port."""
        return format_address(self.host, self.port)


class Membership:
    """Use it with `async with`; `wait_failed` says when the shard must stop.

    Thread: the event loop's.

    Attributes:
        term: In which the shard runs; 0 for none.
        places: Where the server's shards are.
        standbys: What is known of this shard's standbys, if its log is a replicated one.
    """

    def __init__(
        self,
        config: ShardConfig,
        term: int,
        claim: ShardClaim | None = None,
        *,
        note: Callable[[], None] | None = None,
    ) -> None:
        """Use `join`. `note` puts the claim of a term that the log has given."""
        self.term, self.claim, self._note = term, claim, note
        self._config = config
        nodes = config.nodes or (None,) * config.num_shards
        self.places = ShardPlaces(
            config.server_id,
            (
                ShardPlace(host, port, term, OWN_WORD, node)
                if shard == config.shard
                # Its term is for it to tell: it may run by an older file.
                else ShardPlace(host, port, 0, HEARSAY, node)
                for shard, ((host, port), node) in enumerate(zip(config.addresses, nodes, strict=True))
            ),
            own=config.shard,
            standbys=(place[:3] for place in config.other_copies),
        )
        # Those of a log in files follow this shard, and hold leases like all followers.
        copies = () if config.log is None else config.other_copies
        self.standbys = [StandbyView(host, port) for shard, host, port, _ in copies if shard == config.shard]
        self._reach_log = OutageLog()
        self._tasks: list[asyncio.Task[NoReturn]] = []
        self._failed: asyncio.Future[HeadraceError] = asyncio.get_running_loop().create_future()

    @classmethod
    async def join(
        cls,
        config: ShardConfig,
        log: UpdateLog,
        *,
        begin_seq: int | None = None,
        may_claim: bool = True,
        offered_term: int | None = None,
    ) -> Self:
        """Take the next term for a shard whose log is open; a new shard waits for the object store as long as it takes.

        `begin_seq` is the last record that it begins with, the log's last by default; `may_claim` is that of
        `claim_shard`. The owner of a replicated log that does not know yet whether an offer of the shard was accepted
        elsewhere passes for one of the term `offered_term` in which that was made, and claims nothing.

        Raises:
            LogFencedError: Another copy of the shard is the right one.
            ConfigError: The object store refuses us, or is another server's; or the directory is another shard's.
            StorageError: The shard's directory cannot be written.

        Cancellation: a term may be lost.
        """
        if offered_term is not None:
            return cls(config, offered_term)
        if config.object_store is None and config.log is not None:
            return cls(config, log.term)
        if config.object_store is None:
            held = await asyncio.to_thread(HeldClaims.read, config.directory, config.server_id, config.shard)
            return cls(config, held.term)
        store = await asyncio.to_thread(ObjectStore.of_url, config.object_store, deadline_s=_STORE_DEADLINE_S)
        owner = config.address if config.node is None else f"node {config.node} ({config.address})"
        seq = log.last_seq if begin_seq is None else begin_seq
        mark = log.nonce_of(seq)
        if config.log is not None:
            claim = ShardClaim(store=store, shard=config.shard, term=log.term)
            note = partial(note_term, store, config.directory, server_id=config.server_id, shard=config.shard)
            return cls(config, log.term, claim, note=partial(note, term=log.term, owner=owner, seq=seq, mark=mark))
        backoff = Backoff(min_s=_FIRST_PAUSE_S, max_s=_LONGEST_PAUSE_S, random=random.random)
        while True:
            try:
                claim = await asyncio.to_thread(
                    claim_shard,
                    store,
                    config.directory,
                    server_id=config.server_id,
                    shard=config.shard,
                    owner=owner,
                    seq=seq,
                    mark=mark,
                    may_claim=may_claim,
                    on_away=_tell_away,
                )
                return cls(config, claim.term, claim)
            except UnavailableError as exc:
                fact(_log, logging.WARNING, "shard waits for the object store to claim its first term", error=str(exc))
            await asyncio.sleep(backoff.next_s())

    async def __aenter__(self) -> Self:
        if self.claim is not None:
            self._keep(self._keep_looking(self.claim), "headrace-claim")
        if self._config.node is not None:
            self._keep(self._keep_telling(), "headrace-cluster")
        if self.standbys:
            self._keep(self._keep_watching(), "headrace-standbys")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def wait_failed(self) -> HeadraceError:
        """Wait for an error after which the shard must stop, and return it. Cancellation: harmless."""
        return await asyncio.shield(self._failed)

    def check_claim(self) -> None:
        """Check that this is the newest copy of the shard, as `ShardClaim.check`. Thread: any; it blocks."""
        if self.claim is not None:
            self.claim.check()

    def standby_leases(self, first_seq: int) -> list[LogLease]:
        """Return leases on what this shard's standbys have not applied: all from `first_seq` on before they tell."""
        return [
            LogLease(f"standby {each.address}", first_seq if each.applied_seq < 0 else each.applied_seq + 1, inf)
            for each in self.standbys
        ]

    def hear(self, shards: Sequence[Any]) -> None:
        """Take what another node says in its hello, `idl.ShardAddress` each."""
        if self.places.hear(shards):
            self._note_places()

    def _keep(self, work: Coroutine[Any, Any, NoReturn], name: str) -> None:
        self._tasks.append(asyncio.create_task(self._guarded(work), name=name))

    async def _guarded(self, work: Coroutine[Any, Any, NoReturn]) -> NoReturn:
        try:
            await work
        except HeadraceError as exc:
            if not self._failed.done():
                self._failed.set_result(exc)
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")

    async def _keep_looking(self, claim: ShardClaim) -> NoReturn:
        started_s = time.monotonic()
        while True:
            began_s = self._reach_log.trying(claim.store.where)
            try:
                await asyncio.to_thread(claim.check)
                if self._note is not None:
                    await asyncio.to_thread(self._note)
                    self._note = None
                self._reach_log.reached(claim.store.where)
            except LateClaimError:
                if time.monotonic() - started_s >= _LATE_CLAIM_S:
                    raise
            except LogFencedError:
                raise
            except HeadraceError as exc:  # also credentials that have expired: acks do not need the store
                self._reach_log.failed(claim.store.where, exc, began_s=began_s)
            await asyncio.sleep(_LOOK_S)

    async def _keep_telling(self) -> NoReturn:
        context, token = await self._credentials()
        others = [shard for shard in range(len(self.places)) if shard != self._config.shard]
        at_once = asyncio.Semaphore(_TELLS_AT_ONCE)

        async def tell_first(shard: int) -> None:
            async with at_once:
                await self._tell(self.places[shard].address, token, context)

        await asyncio.gather(*map(tell_first, others))
        while True:
            # A replicated log itself tells its owner that another one has taken over.
            if self.places.rival is not None and self._config.log is None:
                await self._ask_rival(self.places.rival, token, context)
            await asyncio.sleep(_TELL_S * (0.5 + random.random()))
            if others:
                await self._tell(self.places[random.choice(others)].address, token, context)

    async def _keep_watching(self) -> NoReturn:
        """Ask each standby of this shard how far it is."""
        context, token = await self._credentials()
        while True:
            await asyncio.gather(*(self._watch(standby, token, context) for standby in self.standbys))
            await asyncio.sleep(_TELL_S)

    async def _watch(self, standby: StandbyView, token: Token | None, context: ssl.SSLContext | None) -> None:
        try:
            async with await ParamServerClient.connect(
                standby.host, standby.port, timeout_s=_TIMEOUT_S, ssl_context=context, token=token
            ) as client:
                await client.hello(_hello(), timeout_s=_TIMEOUT_S)
                standby.applied_seq = (await client.status(timeout_s=_TIMEOUT_S)).accepted_seq
        except HeadraceError as exc:
            standby.failure = str(exc)
        else:
            standby.failure = None

    async def _tell(self, address: tuple[str, int], token: Token | None, context: ssl.SSLContext | None) -> None:
        """Exchange places with the shard at an address; failures are logged."""
        where = format_address(*address)
        began_s = self._reach_log.trying(where)
        try:
            reply = await self._exchange(address, token, context)
        except HeadraceError as exc:
            self._reach_log.failed(where, exc, began_s=began_s)
            return
        self._reach_log.reached(where)
        if self.places.learn(reply, *address):
            self._note_places()

    async def _exchange(self, address: tuple[str, int], token: Token | None, context: ssl.SSLContext | None) -> Any:
        """Say hello, and tell our places if the shard there is of this server; return its last reply."""
        async with await ParamServerClient.connect(
            *address, timeout_s=_TIMEOUT_S, ssl_context=context, token=token
        ) as client:
            reply = await client.hello(_hello(), timeout_s=_TIMEOUT_S)
            if reply.server_id != self.places.server_id or len(reply.shards) != len(self.places):
                raise UnavailableError(
                    f"{client.address} is of server {reply.server_id} of {len(reply.shards)} shards, not of this one"
                )
            return await client.hello(_hello(self.places.to_idl()), timeout_s=_TIMEOUT_S)

    async def _credentials(self) -> tuple[ssl.SSLContext | None, Token | None]:
        authority = self._config.tls_peer_authority
        return await asyncio.to_thread(node_credentials, self._config, os.environ, authority=authority)

    async def _ask_rival(self, rival: ShardPlace, token: Token | None, context: ssl.SSLContext | None) -> None:
        """Stop if a newer copy of this shard is where somebody says; what nobody confirms is forgotten."""
        self.places.rival = None
        if rival.address == self.places[self._config.shard].address:
            return
        try:
            reply = await self._exchange(rival.address, token, context)
        except HeadraceError as exc:
            fact(_log, logging.WARNING, "a newer copy of this shard is said to exist", error=str(exc), term=rival.term)
            return
        if reply.shard == self._config.shard and (reply.term or 0) > self.term:
            raise LogFencedError(
                f"another copy of shard {reply.shard} has taken over, at {format_address(*rival.address)} in term "
                f"{reply.term}; this one has term {self.term} and stops: what it has acked since is not in that copy"
            )

    def _note_places(self) -> None:
        places = [format_address(*address) for address in self.places.addresses]
        fact(_log, logging.INFO, "shards have other places than before", places=", ".join(places))


def _tell_away(exc: HeadraceError) -> None:
    fact(_log, logging.WARNING, "shard goes on in its term: the object store is away", error=str(exc))


def _hello(shards: list[Any] | None = None) -> Any:
    return idl.HelloRequest(
        protocol_version=PROTOCOL_VERSION,
        role=idl.Role.ADMIN,
        run="",
        client="",
        epoch=0,
        rank=0,
        world_size=0,
        tables=[],
        shards=shards,
    )
