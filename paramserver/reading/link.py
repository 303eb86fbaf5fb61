"""A reader's connection to one shard: says hello, reconnects after a loss, and repeats what is safe to repeat."""

from __future__ import annotations

import asyncio
import math
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from headrace.paramserver.rpc.address import Address, format_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.outages import Backoff, OutageLog
from headrace.paramserver.rpc.resolver import Resolver
from headrace.paramserver.rpc.security import Token
from headrace.paramserver.rpc.shard_places import STANDBY, ShardPlaces, StaleTermError
from headrace.schemas.errors import ConfigError, HeadraceError, OverloadedError, UnauthorizedError, UnavailableError
from headrace.schemas.idl import PROTOCOL_VERSION, idl

__all__ = ["AnotherServerError", "Dial", "ShardLink", "link_all", "links_of", "retry"]

_NUM_IN_FLIGHT = 4
# The pause between attempts doubles each time; jitter takes up to half of it.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0

_T = TypeVar("_T")


class AnotherServerError(ConfigError):
    """The address now belongs to another shard, or to a shard of another store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dial:
    """How a reader connects and says hello to a shard.

    Attributes:
        ssl_context: For TLS; None connects without.
        server_hostname: Name in the shard's certificate; None for the shard's host.
        token: For a server that requires one.
        timeout_s: Deadline of one attempt at anything, seconds.
        role: The `idl.Role` to ask for.
        reads_copies: Whether a standby's copy of a shard will do, which may lack the last rows.
        reach_log: Receives the outcome of every attempt to connect.
    """

    ssl_context: ssl.SSLContext | None
    server_hostname: str | None
    token: Token | None
    timeout_s: float
    role: int = idl.Role.READER
    reads_copies: bool = False
    reach_log: OutageLog = field(default_factory=OutageLog)

    async def connect(
        self, host: str, port: int, *, places: ShardPlaces | None = None
    ) -> tuple[ParamServerClient, Any]:
        """Return a connection and the shard's `idl.HelloReply`; `places` guards it against old copies."""
        client = await ParamServerClient.connect(
            host,
            port,
            timeout_s=self.timeout_s,
            ssl_context=self.ssl_context,
            server_hostname=self.server_hostname,
            token=self.token,
        )
        client.places = places
        try:
            return client, await self.greet(client)
        except BaseException:
            await client.close()
            raise

    async def ask(self, host: str, port: int) -> Any:
        """Return the `idl.HelloReply` of the shard at an address, over a connection of its own."""
        client, reply = await self.connect(host, port)
        await client.close()
        return reply

    async def greet(self, client: ParamServerClient) -> Any:
        """Say hello without a writer's session and return the reply."""
        request = idl.HelloRequest(
            protocol_version=PROTOCOL_VERSION,
            role=self.role,
            run="",
            client="",
            epoch=0,
            rank=0,
            world_size=1,
            tables=[],
            asks_places=True,
            reads_copies=self.reads_copies or None,
        )
        return await client.hello(request, timeout_s=self.timeout_s)


def _attempt_of(method: Callable[..., Awaitable[Any]], *, with_timeout: bool = False) -> Callable[..., Awaitable[Any]]:
    """Return a method of `ShardLink` that calls a method of its client once, connecting if needed."""

    async def attempt(link: ShardLink, *request: Any) -> Any:
        client = await link._connected()
        options = {"timeout_s": link._dial.timeout_s} if with_timeout else {}
        return await link._attempt(client, method(client, *request, **options))

    return attempt


class ShardLink:
    """A connection to one shard that is replaced when it is lost. Each request is one attempt; see `retry`.

    Attributes:
        address: Host and port.
        hello: The shard's last `idl.HelloReply`, or the expected one before the first.
        failure: Error of the last attempt, for messages; None after a success.
        resolver: Finds the shard again when it is not where it was; None tries the same address for ever.
        in_flight: Bounds this reader's concurrent requests to the shard.
        least_seq: Rows as of an earlier record are refused: they come from a copy of the shard that is behind.
        newest_seq: Rows have come as of this record, or of earlier ones.
        pieces_moved_s: When bytes of a snapshot last moved, as seen at the end of a call; monotonic, -inf before.
    """

    def __init__(
        self, dial: Dial, host: str, port: int, expected: Any = None, *, others: Sequence[Address] = ()
    ) -> None:
        """Prepare a link; the first attempt connects.

        Args:
            dial: How to connect.
            host: Name or address.
            port: TCP port.
            expected: `idl.HelloReply` whose `server_id` and `shard` the shard must have; None accepts any.
            others: Addresses of other shards, one of which will do as well as long as none is `expected`.
        """
        self.resolver: Resolver | None = None
        self.host = host
        self.address = format_address(host, port)
        self.hello = expected
        self.failure: HeadraceError | None = None
        self.in_flight = asyncio.Semaphore(_NUM_IN_FLIGHT)
        self.least_seq = self.newest_seq = 0
        self.pieces_moved_s = -math.inf
        self._dial = dial
        self.port = port
        self._others = list(others)
        self._is_lost = False  # it was not found where it should be
        self._client: ParamServerClient | None = None
        self._is_closed = False
        self._lock = asyncio.Lock()

    @property
    def moved_s(self) -> float:
        """When bytes of a long message last moved on the present connection, monotonic; -inf before. Thread: any."""
        client = self._client
        return -math.inf if client is None else client.moved_s

    @property
    def max_reply_bytes(self) -> int:
        """Longest reply to ask for, so that all requests in flight fit the shard's limits."""
        limits = self.hello.limits
        return int(min(limits.max_frame_bytes, limits.max_inflight_bytes // _NUM_IN_FLIGHT))

    async def refresh(self) -> Any:
        """Say hello, connecting if needed, and return the reply."""
        async with self._lock:
            client = self._client
            if client is None or client.is_closed:
                await self._connect()
            else:
                self.hello = await self._attempt(client, self._dial.greet(client))
            return self.hello

    async def get(self, request: Any) -> Any:
        """Return rows, as of `least_seq` or later."""
        reply = await self._get(request)
        if reply.seq < self.least_seq:
            raise UnavailableError(f"{self.address} has rows of record {reply.seq}, and not of {self.least_seq} yet")
        self.newest_seq = max(self.newest_seq, reply.seq)
        return reply

    _get = _attempt_of(ParamServerClient.get_embeddings, with_timeout=True)
    find_rows = _attempt_of(ParamServerClient.find_rows, with_timeout=True)
    status = _attempt_of(ParamServerClient.status, with_timeout=True)
    # The request's `wait_ms` extends this deadline.
    fetch_updates = _attempt_of(ParamServerClient.fetch_updates, with_timeout=True)
    digest_rows = _attempt_of(ParamServerClient.digest_rows)
    create_snapshot = _attempt_of(ParamServerClient.create_snapshot)
    finish_snapshot = _attempt_of(ParamServerClient.finish_snapshot)
    expire_rows = _attempt_of(ParamServerClient.expire_rows)
    promote_shard = _attempt_of(ParamServerClient.promote_shard)

    async def fetch_snapshot(self, request: Any) -> Any:
        """Fetch a piece of a snapshot."""
        client = await self._connected()
        try:
            return await self._attempt(client, client.fetch_snapshot(request, timeout_s=self._dial.timeout_s))
        finally:
            self.pieces_moved_s = max(self.pieces_moved_s, client.moved_s)

    def join(self, resolver: Resolver) -> None:
        """Find the shard with a resolver from now on, and add to its places what the shard says."""
        self.resolver = resolver
        if self._client is not None:
            self._client.places = resolver.places

    async def close(self) -> None:
        """Close the connection for good; idempotent."""
        self._is_closed = True
        if self._client is not None:
            await self._client.close()

    async def _connected(self) -> ParamServerClient:
        async with self._lock:
            if self._client is None or self._client.is_closed:
                return await self._connect()
            return self._client

    async def _connect(self) -> ParamServerClient:
        self._check_open()
        if self.resolver is not None:
            return await self._connect_to_shard(self.resolver)
        num_tried = 0
        while True:
            try:
                return await self._connect_here()
            except UnavailableError:
                self._check_open()
                if self.hello is not None or num_tried == len(self._others):  # a standby adds some
                    raise
            num_tried += 1
            self._others.append((self.host, self.port))
            self._go_to(*self._others.pop(0))

    async def _connect_to_shard(self, resolver: Resolver) -> ParamServerClient:
        shard = self.hello.shard
        if self._is_lost:
            await resolver.refresh()
        self._go_to(*resolver.places[shard].address)
        try:
            client = await self._connect_here()
        except (UnavailableError, AnotherServerError) as exc:
            self._is_lost = True
            resolver.lost(shard, (self.host, self.port))
            if isinstance(exc, AnotherServerError) and await self._has_moved(resolver):
                raise UnavailableError(str(exc)) from exc
            raise
        self._is_lost = False
        return client

    async def _has_moved(self, resolver: Resolver) -> bool:
        """Return whether the shard has another place than this one, at which another server answers now."""
        await resolver.refresh()
        return resolver.places[self.hello.shard].address != (self.host, self.port)

    def _go_to(self, host: str, port: int) -> None:
        self.host, self.port, self.address = host, port, format_address(host, port)

    async def _connect_here(self) -> ParamServerClient:
        reach_log = self._dial.reach_log
        began_s = reach_log.trying(self.address)
        places = None if self.resolver is None else self.resolver.places
        try:
            client, hello = await self._attempt(None, self._dial.connect(self.host, self.port, places=places))
        except UnavailableError as exc:
            reach_log.failed(self.address, exc, began_s=began_s)
            raise
        except UnauthorizedError as exc:
            if self._client is None:
                raise
            # The shard accepted us before, so its certificate expired or its token changed. An operator fixes that at
            # the server; until then treat it as unavailable.
            reach_log.failed(self.address, exc, began_s=began_s)
            raise UnavailableError(str(exc)) from exc
        reach_log.reached(self.address)
        expected = self.hello
        try:
            self._check_open()
            if hello.shard == STANDBY and (expected is None or expected.server_id == hello.server_id):
                self._leave_standby(hello)
            if expected is not None and (hello.server_id, hello.shard) != (expected.server_id, expected.shard):
                raise AnotherServerError(
                    f"{self.address} is shard {hello.shard} of server {hello.server_id}, "
                    f"not shard {expected.shard} of {expected.server_id}"
                )
        except BaseException:
            await client.close()
            raise
        self._client, self.hello = client, hello
        return client

    def _leave_standby(self, hello: Any) -> NoReturn:
        """Take what a standby says of the shards' places, and raise an error that makes the next attempt go there."""
        if self.resolver is not None:
            self.resolver.places.learn(hello, self.host, self.port)
        else:
            told = ShardPlaces.of_hello(hello, self.host, self.port).addresses
            self._others[:0] = [address for address in told if address not in ((self.host, self.port), *self._others)]
        raise UnavailableError(f"{self.address} is a standby: the shard is elsewhere")

    def _check_open(self) -> None:
        if self._is_closed:
            raise _ClosedError("the reader is closed")

    async def _attempt(self, client: ParamServerClient | None, work: Awaitable[_T]) -> _T:
        try:
            result = await work
        except HeadraceError as exc:
            self.failure = exc
            self._is_lost |= isinstance(exc, StaleTermError)
            # A connection that gave no answer is not used again.
            if client is not None and isinstance(exc, UnavailableError):
                await client.close()
            raise
        self.failure = None
        return result


class _ClosedError(UnavailableError):
    retriable = False


async def link_all(dial: Dial, seeds: Sequence[Address]) -> list[ShardLink]:
    """Learn all shards of a server from the first of some that answers; return an unconnected link to each, by index.

    Raises:
        HeadraceError: The shard cannot be reached or refuses.

    Cancellation: harmless.
    """
    (host, port), *others = seeds
    first = ShardLink(dial, host, port, others=others)
    try:
        await first.refresh()
    finally:
        await first.close()
    return links_of(first, dial, seeds)


def links_of(first: ShardLink, dial: Dial, seeds: Sequence[Address]) -> list[ShardLink]:
    """Return a link to each shard that the hello of a connected link names; each must be that very shard.

    The links find shards again that have moved, together, from the places that they know and the `seeds`.

    Raises:
        ProtocolError: The hello does not name all shards.
    """
    hello = first.hello
    places = ShardPlaces.of_hello(hello, first.host, first.port)
    resolver, links = Resolver(places, seeds, dial.ask), []
    for shard, address in enumerate(places.addresses):
        link = ShardLink(dial, *address, idl.HelloReply(server_id=hello.server_id, shard=shard, limits=hello.limits))
        link.resolver = resolver
        links.append(link)
    return links


async def retry(
    attempt: Callable[[], Awaitable[_T]],
    *,
    patience_s: float = math.inf,
    moved_s: Callable[[], float] = lambda: -math.inf,
) -> _T:
    """Repeat an attempt until it succeeds, fails for good, or the caller's deadline cancels it.

    Args:
        attempt: The work.
        patience_s: Give up after this time without progress, seconds: since the first failure, or since `moved_s` if
            that is later. A slow attempt that makes progress is no failure.
        moved_s: Returns when an attempt last made progress, monotonic seconds.

    Raises:
        HeadraceError: It is not retriable, or patience ran out.
    """
    backoff = Backoff(min_s=_FIRST_PAUSE_S, max_s=_LONGEST_PAUSE_S, random=random.random)
    failing_since_s = math.inf
    while True:
        try:
            return await attempt()
        except HeadraceError as exc:
            failing_since_s = min(failing_since_s, time.monotonic())
            if not exc.retriable or time.monotonic() - max(failing_since_s, moved_s()) > patience_s:
                raise
            pause_s = backoff.next_s(at_least_s=exc.retry_after_s if isinstance(exc, OverloadedError) else 0.0)
        await asyncio.sleep(pause_s)
