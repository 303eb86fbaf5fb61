"""A reader's link to one shard: greets it, reconnects when the connection is lost, repeats what can be repeated."""

from __future__ import annotations

import asyncio
import math
import random
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.rpc.backoff import Backoff
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.reach_log import ReachLog
from headrace.paramserver.rpc.security import Token
from headrace.paramserver.rpc.shard_map import shard_map
from headrace.schemas.errors import ConfigError, HeadraceError, OverloadedError, UnauthorizedError, UnavailableError
from headrace.schemas.idl import PROTOCOL_VERSION, idl

__all__ = ["AnotherServerError", "Dial", "ShardLink", "link_all", "links_of", "retry"]

_NUM_IN_FLIGHT = 4
# Between two attempts: doubled each time, and somewhere between half of that and all of it.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0

_T = TypeVar("_T")


class AnotherServerError(ConfigError):
    """At the address is another shard, or the shard of another store, than before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dial:
    """How a reader reaches and greets a shard.

    Attributes:
        ssl_context: For TLS.
        server_hostname: Name that the shard's certificate has; the shard's host when None.
        token: For a server that asks for one.
        timeout_s: One attempt at anything, seconds.
        role: What the shard is asked to let this client do.
        reach_log: Told of every attempt to connect.
    """

    ssl_context: ssl.SSLContext | None
    server_hostname: str | None
    token: Token | None
    timeout_s: float
    role: int = idl.Role.READER
    reach_log: ReachLog = field(default_factory=ReachLog)

    async def connect(self, host: str, port: int) -> tuple[ParamServerClient, Any]:
        """Return a connection and the shard's hello."""
        client = await ParamServerClient.connect(
            host,
            port,
            timeout_s=self.timeout_s,
            ssl_context=self.ssl_context,
            server_hostname=self.server_hostname,
        )
        try:
            return client, await self.greet(client)
        except BaseException:
            await client.close()
            raise

    async def greet(self, client: ParamServerClient) -> Any:
        """Say hello, as nobody in particular, and return the answer."""
        request = idl.HelloRequest(
            protocol_version=PROTOCOL_VERSION,
            role=self.role,
            run="",
            client="",
            epoch=0,
            rank=0,
            world_size=1,
            tables=[],
            token=self.token.reveal() if self.token is not None else None,
        )
        return await client.hello(request, timeout_s=self.timeout_s)


class ShardLink:
    """One shard: its address, and a connection that is made anew when it is lost.

    Attributes:
        address: Host and port.
        hello: What the shard said last, or what it is expected to be.
        failure: Why the last attempt failed, for a message; None after one that went well.
        places: Bounds what this reader asks of the shard at once.
        pieces_moved_s: When pieces of a snapshot last moved on, as calls that ended saw it, monotonic; -inf before.
    """

    def __init__(self, dial: Dial, host: str, port: int, expected: Any = None) -> None:
        """Connect at the first attempt.

        Args:
            dial: How.
            host: Name or address.
            port: TCP port.
            expected: `idl.HelloReply` with the `server_id`, `shard` and `limits` that it must have; None for any.
        """
        self.host = host
        self.address = format_address(host, port)
        self.hello = expected
        self.failure: HeadraceError | None = None
        self.places = asyncio.Semaphore(_NUM_IN_FLIGHT)
        self.pieces_moved_s = -math.inf
        self._dial = dial
        self._port = port
        self._client: ParamServerClient | None = None
        self._is_closed = False
        self._lock = asyncio.Lock()

    @property
    def moved_s(self) -> float:
        """When a long message last moved on, on the connection there is, monotonic; -inf before. Thread: any."""
        client = self._client
        return -math.inf if client is None else client.moved_s

    @property
    def max_reply_bytes(self) -> int:
        """Longest reply to ask for, so that as many as may be in flight fit the shard's bounds."""
        limits = self.hello.limits
        return int(min(limits.max_frame_bytes, limits.max_inflight_bytes // _NUM_IN_FLIGHT))

    async def refresh(self) -> Any:
        """Say hello, on the connection there is or on a new one, and return the answer."""
        async with self._lock:
            client = self._client
            if client is None or client.is_closed:
                await self._connect()
            else:
                self.hello = await self._attempt(client, self._dial.greet(client))
            return self.hello

    async def get(self, request: Any) -> Any:
        """Ask for rows once."""
        client = await self._connected()
        return await self._attempt(client, client.get_embeddings(request, timeout_s=self._dial.timeout_s))

    async def find_rows(self, request: Any) -> Any:
        """Ask once for the rows of identities."""
        client = await self._connected()
        return await self._attempt(client, client.find_rows(request, timeout_s=self._dial.timeout_s))

    async def status(self) -> Any:
        """Ask for the status once."""
        client = await self._connected()
        return await self._attempt(client, client.status(timeout_s=self._dial.timeout_s))

    async def fetch_updates(self, request: Any) -> Any:
        """Ask for records of the update log once; the request's `wait_ms` comes on top of an attempt's time."""
        client = await self._connected()
        return await self._attempt(client, client.fetch_updates(request, timeout_s=self._dial.timeout_s))

    async def digest_rows(self, request: Any) -> Any:
        """Ask for digests of rows once."""
        client = await self._connected()
        return await self._attempt(client, client.digest_rows(request))

    async def create_snapshot(self, request: Any) -> Any:
        """Ask the shard once for its part of a snapshot."""
        client = await self._connected()
        return await self._attempt(client, client.create_snapshot(request))

    async def finish_snapshot(self, request: Any) -> Any:
        """Ask once to publish or to discard a snapshot."""
        client = await self._connected()
        return await self._attempt(client, client.finish_snapshot(request))

    async def fetch_snapshot(self, request: Any) -> Any:
        """Ask once for a piece of a snapshot."""
        client = await self._connected()
        try:
            return await self._attempt(client, client.fetch_snapshot(request, timeout_s=self._dial.timeout_s))
        finally:
            self.pieces_moved_s = max(self.pieces_moved_s, client.moved_s)

    async def expire_rows(self, request: Any) -> Any:
        """Ask once for expiry of rows, or after a run of it."""
        client = await self._connected()
        return await self._attempt(client, client.expire_rows(request))

    async def close(self) -> None:
        """Close the connection for good. Again is harmless."""
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
        reach_log = self._dial.reach_log
        began_s = reach_log.trying(self.address)
        try:
            client, hello = await self._attempt(None, self._dial.connect(self.host, self._port))
        except UnavailableError as exc:
            reach_log.failed(self.address, exc, began_s=began_s)
            raise
        except UnauthorizedError as exc:
            if self._client is None:
                raise
            # It has let us in before: its certificate has expired, or its token is another one. Both are mended there,
            # and until then it is away.
            reach_log.failed(self.address, exc, began_s=began_s)
            raise UnavailableError(str(exc)) from exc
        reach_log.reached(self.address)
        expected = self.hello
        try:
            self._check_open()
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

    def _check_open(self) -> None:
        if self._is_closed:
            raise _ClosedError("the reader is closed")

    async def _attempt(self, client: ParamServerClient | None, work: Awaitable[_T]) -> _T:
        """Await one attempt and note how it went; a connection that gave no answer is not used again."""
        try:
            result = await work
        except HeadraceError as exc:
            self.failure = exc
            if client is not None and isinstance(exc, UnavailableError):
                await client.close()
            raise
        self.failure = None
        return result


class _ClosedError(UnavailableError):
    """Nobody will come back."""

    retriable = False


async def link_all(dial: Dial, host: str, port: int) -> list[ShardLink]:
    """Learn the shards of a server from one of them, and return a link to each, in their order; none is connected.

    Args:
        dial: How.
        host: Of any shard.
        port: Of it.

    Raises:
        UnavailableError: It is not there.
        HeadraceError: It refuses.

    Cancellation: harmless.
    """
    first = ShardLink(dial, host, port)
    try:
        hello = await first.refresh()
    finally:
        await first.close()
    return links_of(hello, dial, host, port)


def links_of(hello: Any, dial: Dial, host: str, port: int) -> list[ShardLink]:
    """Return a link to each shard that one of them has told of, which has to be that very shard.

    Args:
        hello: Its `idl.HelloReply`.
        dial: How.
        host: By which it was reached.
        port: By which it was reached.

    Raises:
        ProtocolError: It does not tell of all.
    """
    return [
        ShardLink(dial, name, at, idl.HelloReply(server_id=hello.server_id, shard=shard, limits=hello.limits))
        for shard, (name, at) in enumerate(shard_map(hello, host, port))
    ]


async def retry(
    attempt: Callable[[], Awaitable[_T]],
    *,
    patience_s: float = math.inf,
    moved_s: Callable[[], float] = lambda: -math.inf,
) -> _T:
    """Repeat an attempt until it succeeds, fails for good, or the caller's deadline cancels it.

    Args:
        attempt: What to do.
        patience_s: For how long attempts may fail with nothing moving on, seconds: from the first that failed, or from
            `moved_s` if that is later. An attempt that goes on, however slowly, is no failure.
        moved_s: Says when an attempt has last been seen to move on, monotonic seconds.

    Raises:
        HeadraceError: One that is not retriable, or that of the last attempt.
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
