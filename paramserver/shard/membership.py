"""A shard's place in its server: the term in which it runs, and what it knows of the other shards' places.

On one machine without an object store this is the map from the configuration, and nothing happens.

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
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn, Self

from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.log.claims import LateClaimError, ShardClaim, claim_shard, hold_term
from headrace.paramserver.log.interface import UpdateLog
from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.outages import Backoff, OutageLog
from headrace.paramserver.rpc.security import Token, node_credentials
from headrace.paramserver.rpc.shard_places import HEARSAY, OWN_WORD, ShardPlace, ShardPlaces
from headrace.paramserver.system.log_lines import fact
from headrace.paramserver.system.object_store import ObjectStore
from headrace.schemas.errors import HeadraceError, LogFencedError, UnavailableError
from headrace.schemas.idl import PROTOCOL_VERSION, idl

__all__ = ["Membership"]

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


class Membership:
    """Use it with `async with`; `wait_failed` says when the shard must stop.

    Thread: the event loop's.

    Attributes:
        term: In which the shard runs; 0 for none.
        places: Where the server's shards are.
    """

    def __init__(self, config: ShardConfig, term: int, claim: ShardClaim | None = None) -> None:
        """Use `join`."""
        self.term, self.claim = term, claim
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
        )
        self._reach_log = OutageLog()
        self._tasks: list[asyncio.Task[NoReturn]] = []
        self._failed: asyncio.Future[HeadraceError] = asyncio.get_running_loop().create_future()

    @classmethod
    async def join(cls, config: ShardConfig, log: UpdateLog, *, may_claim: bool = True) -> Self:
        """Take the next term for a shard whose log is open; a new shard waits for the object store as long as it takes.

        `may_claim` is that of `claim_shard`.

        Raises:
            LogFencedError: Another copy of the shard is the right one.
            ConfigError: The object store refuses us, is another server's, or the term is too low.
            StorageError: The shard's directory cannot be written.

        Cancellation: a term may be lost.
        """
        if config.object_store is None:
            term = await asyncio.to_thread(
                hold_term, config.directory, server_id=config.server_id, shard=config.shard, term=config.term
            )
            return cls(config, term)
        store = await asyncio.to_thread(ObjectStore.of_url, config.object_store, deadline_s=_STORE_DEADLINE_S)
        place = format_address(*config.addresses[config.shard])
        owner = place if config.node is None else f"node {config.node} ({place})"
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
                    seq=log.last_seq,
                    mark=log.nonce_of(log.last_seq),
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
        authority = self._config.tls_peer_authority
        context, token = await asyncio.to_thread(node_credentials, self._config, os.environ, authority=authority)
        others = [shard for shard in range(len(self.places)) if shard != self._config.shard]
        at_once = asyncio.Semaphore(_TELLS_AT_ONCE)

        async def tell_first(shard: int) -> None:
            async with at_once:
                await self._tell(self.places[shard].address, token, context)

        await asyncio.gather(*map(tell_first, others))
        while True:
            if self.places.rival is not None:
                await self._ask_rival(self.places.rival, token, context)
            await asyncio.sleep(_TELL_S * (0.5 + random.random()))
            if others:
                await self._tell(self.places[random.choice(others)].address, token, context)

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
        async with await ParamServerClient.connect(*address, timeout_s=_TIMEOUT_S, ssl_context=context) as client:
            reply = await client.hello(_hello(token), timeout_s=_TIMEOUT_S)
            if reply.server_id != self.places.server_id or len(reply.shards) != len(self.places):
                raise UnavailableError(
                    f"{client.address} is of server {reply.server_id} of {len(reply.shards)} shards, not of this one"
                )
            return await client.hello(_hello(token, self.places.to_idl()), timeout_s=_TIMEOUT_S)

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


def _hello(token: Token | None, shards: list[Any] | None = None) -> Any:
    return idl.HelloRequest(
        protocol_version=PROTOCOL_VERSION,
        role=idl.Role.ADMIN,
        run="",
        client="",
        epoch=0,
        rank=0,
        world_size=0,
        tables=[],
        token=None if token is None else token.reveal(),
        shards=shards,
    )
