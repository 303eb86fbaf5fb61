"""A shard's log that goes on in a stream: in files up to a record, and from the next one on in the stream.

The segments stay where they are. The log in files becomes the stream's mirror, so for all who read it nothing changes.
The first record of the stream names the offer by which the shard came here; it is what decides (`shard/following.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.interface import UpdateLog, UpdateLogConfig
from headrace.paramserver.log.jetstream.appender import StreamTimes
from headrace.paramserver.log.jetstream.engine import StreamEngine
from headrace.paramserver.log.jetstream.nats_address import NatsAccess
from headrace.paramserver.log.jetstream.nats_client import NatsClient
from headrace.paramserver.log.jetstream.nats_engine import NatsEngine
from headrace.paramserver.log.jetstream.nats_stream import connect_any, open_engine
from headrace.paramserver.log.jetstream.stream_log import GATHER_S, JetStreamUpdateLog
from headrace.schemas.errors import ConfigError, CorruptionError, UnavailableError
from headrace.schemas.stream_records import decode_stream_record

__all__ = ["FoundStream", "NatsShardStream", "ShardStream", "StreamBeginning"]

_NOT_FOUND = 10059
_CHANGE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class FoundStream:
    """A shard's stream as it is.

    Attributes:
        num_messages: Messages in it.
        first_seq: Of the oldest one; `last_seq + 1` if there is none.
        last_seq: Of the newest one; in a new stream the seq before its first.
        is_sealed: It takes no message any more, for ever.
    """

    num_messages: int
    first_seq: int
    last_seq: int
    is_sealed: bool


class ShardStream(Protocol):
    """The stream of one shard, which may not exist. Each coroutine raises `UnavailableError` if the engine is away.

    Each is safe to repeat. Cancellation: it may have been done.
    """

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def engine(self) -> StreamEngine:
        """The way to the stream, once it exists."""
        ...

    async def find(self) -> FoundStream | None:
        """Return what it is like; None if there is none."""
        ...

    async def make(self, *, first_seq: int) -> None:
        """Make it, or check the one that is there. `ConfigError` if it is not as a log needs it."""
        ...

    async def remove(self) -> None:
        """Remove it with all that is in it."""
        ...


class NatsShardStream:
    """That in NATS JetStream. Implements `ShardStream`."""

    def __init__(self, access: NatsAccess, *, server_id: str, shard: int, max_bytes: int) -> None:
        """Use the stream of a server's shard; `max_bytes` is its bound."""
        self._access, self._server_id, self._shard, self._max_bytes = access, server_id, shard, max_bytes

    @property
    def name(self) -> str:
        """See `ShardStream`."""
        return self._access.address.stream_name(self._server_id, self._shard)

    @property
    def engine(self) -> StreamEngine:
        """See `ShardStream`."""
        return NatsEngine(self._access, self.name)

    async def find(self) -> FoundStream | None:
        """See `ShardStream`."""
        answer = await self._ask("STREAM.INFO")
        if answer is None:
            return None
        state = answer["state"]
        num_messages, last_seq = int(state["messages"]), int(state["last_seq"])
        first_seq = int(state["first_seq"]) if num_messages else last_seq + 1
        return FoundStream(num_messages, first_seq, last_seq, bool(answer["config"].get("sealed")))

    async def make(self, *, first_seq: int) -> None:
        """See `ShardStream`."""
        await open_engine(
            self._access, server_id=self._server_id, shard=self._shard, max_bytes=self._max_bytes, first_seq=first_seq
        )

    async def remove(self) -> None:
        """See `ShardStream`."""
        await self._ask("STREAM.DELETE")

    async def _ask(self, what: str) -> Any:
        """Return the engine's answer about the stream; None if there is none."""
        client: NatsClient = await connect_any(self._access)
        try:
            answer = await client.ask(what, self.name, None, timeout_s=_CHANGE_TIMEOUT_S)
        finally:
            await client.close()
        if (error := answer.get("error")) is None:
            return answer
        if error.get("err_code") == _NOT_FOUND:
            return None
        text = f"{client.server}: {what} {self.name}: {error.get('description')}"
        raise UnavailableError(text) if error.get("code") == 503 else ConfigError(text)


class StreamBeginning:
    """The stream in which a shard's log in files goes on. Implements `NextLog`."""

    def __init__(
        self, stream: ShardStream, *, config: UpdateLogConfig | None = None, times: StreamTimes | None = None
    ) -> None:
        """Use a shard's stream; `config` is that of the log in it."""
        self._stream, self._config, self._times = stream, config, times

    @property
    def name(self) -> str:
        """See `NextLog`."""
        return self._stream.name

    async def check(self) -> FoundStream | None:
        """Return the stream if there is one; raises as `NextLog.check`."""
        found = await self._stream.find()
        if found is not None and found.is_sealed:
            raise ConfigError(
                f"stream {self.name} is sealed, so that it takes no record any more: remove it: nats stream rm "
                f"{self.name}"
            )
        if found is not None and found.num_messages:
            raise ConfigError(
                f"stream {self.name} exists already, with records {found.first_seq} to {found.last_seq}: another copy "
                f"of this server uses it, or did; if nobody needs it, remove it: nats stream rm {self.name}"
            )
        return found

    async def make(self, last_seq: int) -> None:
        """See `NextLog`."""
        found = await self.check()
        if found is not None and found.last_seq != last_seq:  # of an offer before this one, or of a start without log
            await self._stream.remove()
        await self._stream.make(first_seq=last_seq + 1)

    async def offer(self) -> str | None:
        """See `NextLog`."""
        found = await self._stream.find()
        if found is None or not found.num_messages:
            return None
        connection = await self._stream.engine.connect()
        try:
            messages = await connection.read(found.first_seq, max_bytes=1)
        finally:
            await connection.close()
        if not messages:
            raise UnavailableError(f"{connection.server} has no record {found.first_seq} of stream {self.name} yet")
        return decode_stream_record(messages[0].payload, seq=found.first_seq).offer or ""

    async def begin(self, log: UpdateLog) -> JetStreamUpdateLog:
        """See `NextLog`.

        Raises:
            HeadraceError: The stream does not begin behind the log, or cannot be read.
        """
        assert isinstance(log, FileUpdateLog)
        log.become_mirror(gather_s=GATHER_S)
        last_seq = log.last_seq

        async def mirror(_: int, *, anew: bool) -> FileUpdateLog:
            if anew:
                raise CorruptionError(f"stream {self.name} does not go on behind record {last_seq} of {log.path}")
            return log

        return await JetStreamUpdateLog.open_on(
            self._stream.engine, mirror, begin_seq=last_seq + 1, config=self._config, times=self._times
        )
