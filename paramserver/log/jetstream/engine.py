"""What the replicated log needs of its engine: one stream of messages with conditional appends.

`nats_engine.py` has it from NATS JetStream; tests have a scripted engine that delays, repeats, reorders and lies where
the real one may. A connection is to one server of the engine and never reconnects, because a client that reconnects
sends what it had buffered before. Only a match is proof: what a refusal, a missing message or a state says may be old.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.schemas.messages import Segment

__all__ = [
    "PeerState",
    "PublishOutcome",
    "PublishReply",
    "StoredMessage",
    "StreamConnection",
    "StreamEngine",
    "StreamState",
]


class PublishOutcome(enum.Enum):
    """What the engine said of a message.

    Attributes:
        ACKED: A majority has it on disk, at `PublishReply.seq`.
        WRONG_LAST: Refused, because the last seq is not the expected one; `seq` is what the server takes it for.
        FULL: Refused, because the stream has no room. Nothing behind the message got in either.
        TOO_LARGE: Refused, because the message is larger than the engine takes.
        AWAY: No leader, or another error that says nothing about the message.
    """

    ACKED = "acked"
    WRONG_LAST = "wrong last seq"
    FULL = "full"
    TOO_LARGE = "too large"
    AWAY = "away"


@dataclass(frozen=True, slots=True)
class PublishReply:
    """The engine's answer to a publish. `seq`: see `PublishOutcome`; else 0. `reason`: the engine's words."""

    outcome: PublishOutcome
    seq: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A committed message of the stream."""

    seq: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class PeerState:
    """A replica of the stream, as the leader sees it."""

    name: str
    is_current: bool
    is_offline: bool
    lag: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamState:
    """What one server says of the stream; it may be old.

    Attributes:
        first_seq: Oldest message; `last_seq + 1` if there is none.
        last_seq: Newest message. It survives purges.
        size_bytes: Bytes of all messages.
        max_bytes: The stream's bound.
        leader: Name of the leading server; None while there is none.
        peers: The other replicas.
    """

    first_seq: int
    last_seq: int
    size_bytes: int
    max_bytes: int
    leader: str | None
    peers: tuple[PeerState, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether there is a leader and all replicas are current."""
        return self.leader is not None and all(peer.is_current and not peer.is_offline for peer in self.peers)


class StreamConnection(Protocol):
    """A connection to one server of the engine. Thread: the event loop's.

    Every coroutine raises `UnavailableError` when there is no answer in time, when there is no leader, and once the
    connection is lost; none retries.

    Attributes:
        server: Name of the server, for messages.
        max_message_bytes: The most that a message may have; what the engine adds to it is off already.
        lost: Done with the reason once the connection is lost, or closed.
    """

    @property
    def server(self) -> str: ...  # noqa: D102 - documented above
    @property
    def max_message_bytes(self) -> int: ...  # noqa: D102
    @property
    def lost(self) -> asyncio.Future[str]: ...  # noqa: D102

    def publish(
        self, message: Sequence[Segment], *, expected_last: int, on_reply: Callable[[PublishReply], None]
    ) -> None:
        """Send a message that is accepted only behind `expected_last`; never blocks.

        `on_reply` is called from the loop, at most once, and never after the connection was lost. The buffers stay
        unchanged until then, or until `lost` is done.

        Raises:
            UnavailableError: The connection is lost; nothing was sent.
        """
        ...

    async def publish_batch(self, messages: Sequence[bytes], *, expected_last: int) -> PublishReply:
        """Append messages in one atomic batch: all of them directly behind `expected_last`, or none.

        With `ACKED`, `seq` is that of the last one.
        """
        ...

    async def get(self, seq: int) -> StoredMessage | None:
        """Ask the leader for one message; None if it has none at that seq, which proves nothing."""
        ...

    async def read(self, from_seq: int, *, max_bytes: int) -> list[StoredMessage]:
        """Return committed messages from `from_seq` on, without a gap, of about `max_bytes`; any server answers.

        Empty if the server has none there yet, which proves nothing.

        Raises:
            GoneError: The messages at `from_seq` were purged.
            UnavailableError: As all do; or it has none there and knows no leader: it may be cut off. Ask another.
        """
        ...

    async def state(self) -> StreamState:
        """Return what the leader says of the stream."""
        ...

    async def purge(self, before_seq: int) -> None:
        """Remove all messages before `before_seq`, which must not be beyond the last seq + 1."""
        ...

    async def close(self) -> None:
        """Close the connection; `lost` is done then. Idempotent."""
        ...


class StreamEngine(Protocol):
    """The servers that hold one shard's stream."""

    async def connect(self) -> StreamConnection:
        """Connect to the next server in turn, within about a second.

        Raises:
            UnavailableError: It does not answer. Whether it has the stream is not asked: that takes a leader.
            ConfigError: It refuses our credentials.
        """
        ...
