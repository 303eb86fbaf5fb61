"""The streams of a server's shards, for a log that moves into them or out of them: found, made, sealed and removed.

A sealed stream takes no record any more, from whomever. That cannot be undone, so it marks the end of a log in NATS: no
standby that has not heard of the move goes on in the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.paramserver.log.jetstream.engine import StreamEngine
from headrace.paramserver.log.jetstream.engine_checks import check_engine, fit_streams
from headrace.paramserver.log.jetstream.nats_address import NatsAccess
from headrace.paramserver.log.jetstream.nats_client import NatsClient
from headrace.paramserver.log.jetstream.nats_engine import NatsEngine
from headrace.paramserver.log.jetstream.nats_stream import connect_any, open_engine
from headrace.schemas.errors import ConfigError, UnavailableError

__all__ = ["FoundStream", "NatsShardStreams", "ShardStreams"]

_NOT_FOUND = 10059
_CHANGE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class FoundStream:
    """A shard's stream as it is.

    Attributes:
        num_messages: Messages in it.
        first_seq: Of the oldest one; `last_seq + 1` if there is none.
        last_seq: Of the newest one; it survives purges.
        is_sealed: Whether it is at its end.
    """

    num_messages: int
    first_seq: int
    last_seq: int
    is_sealed: bool


class ShardStreams(Protocol):
    """The streams of one server, by shard. Each coroutine raises `UnavailableError` when the engine does not answer.

    Each is safe to repeat. Cancellation: it may have been done.
    """

    def name(self, shard: int) -> str:
        """Return what a shard's stream is called."""
        ...

    def engine(self, shard: int) -> StreamEngine:
        """Return the way to a shard's stream, which exists."""
        ...

    async def check(self) -> None:
        """Raise `ConfigError` unless every server of the engine keeps what it acks, and has room for the streams."""
        ...

    async def find(self, shard: int) -> FoundStream | None:
        """Return a shard's stream; None if there is none."""
        ...

    async def make(self, shard: int, *, first_seq: int) -> None:
        """Make a shard's stream; or check the one that is there. `ConfigError` if it is not as a log needs it."""
        ...

    async def seal(self, shard: int) -> None:
        """Let a shard's stream take no record any more."""
        ...

    async def remove(self, shard: int) -> None:
        """Remove a shard's stream with all that is in it."""
        ...


class NatsShardStreams:
    """Those in NATS JetStream. Implements `ShardStreams`."""

    def __init__(
        self, access: NatsAccess, *, server_id: str, num_shards: int, max_bytes: int, monitors: Sequence[str] = ()
    ) -> None:
        """Use the streams of a server; `max_bytes` is the bound of each, or 0 for what fits, as `check` finds."""
        self._access, self._server_id, self._max_bytes, self._monitors = access, server_id, max_bytes, monitors
        self._num_shards = num_shards

    def name(self, shard: int) -> str:
        """See `ShardStreams`."""
        return self._access.address.stream_name(self._server_id, shard)

    def engine(self, shard: int) -> StreamEngine:
        """See `ShardStreams`."""
        return NatsEngine(self._access, self.name(shard))

    async def check(self) -> None:
        """See `ShardStreams`."""
        await check_engine(self._access, monitors=self._monitors)
        self._max_bytes = await fit_streams(
            self._access,
            server_id=self._server_id,
            num_shards=self._num_shards,
            max_bytes=self._max_bytes,
            monitors=self._monitors,
        )

    async def find(self, shard: int) -> FoundStream | None:
        """See `ShardStreams`."""
        answer = await self._ask("STREAM.INFO", shard)
        if answer is None:
            return None
        state = answer["state"]
        num_messages, last_seq = int(state["messages"]), int(state["last_seq"])
        first_seq = int(state["first_seq"]) if num_messages else last_seq + 1
        return FoundStream(num_messages, first_seq, last_seq, bool(answer["config"].get("sealed")))

    async def make(self, shard: int, *, first_seq: int) -> None:
        """See `ShardStreams`."""
        await open_engine(
            self._access, server_id=self._server_id, shard=shard, max_bytes=self._max_bytes, first_seq=first_seq
        )

    async def seal(self, shard: int) -> None:
        """See `ShardStreams`."""
        if (answer := await self._ask("STREAM.INFO", shard)) is not None:
            await self._ask("STREAM.UPDATE", shard, answer["config"] | {"sealed": True})

    async def remove(self, shard: int) -> None:
        """See `ShardStreams`."""
        await self._ask("STREAM.DELETE", shard)

    async def _ask(self, what: str, shard: int, order: Any = None) -> Any:
        """Return the engine's answer about a stream; None if there is none."""
        client: NatsClient = await connect_any(self._access)
        try:
            answer = await client.ask(what, self.name(shard), order, timeout_s=_CHANGE_TIMEOUT_S)
        finally:
            await client.close()
        if (error := answer.get("error")) is None:
            return answer
        if error.get("err_code") == _NOT_FOUND:
            return None
        text = f"{client.server}: {what} {self.name(shard)}: {error.get('description')}"
        raise UnavailableError(text) if error.get("code") == 503 else ConfigError(text)
