"""The streams of a server's shards on the scripted engine, for logs that are moved into them and out of them."""

from __future__ import annotations

from scripted_stream import ScriptedEngine, ScriptedStream

from headrace.paramserver.log.jetstream.engine import StreamEngine
from headrace.paramserver.log.jetstream.shard_streams import FoundStream
from headrace.schemas.errors import ConfigError

__all__ = ["ScriptedShardStreams"]


class ScriptedShardStreams:
    """Implements `ShardStreams`.

    Attributes:
        streams: By shard.
        fault: What `check` finds wrong with the engine; None for nothing.
    """

    def __init__(self) -> None:
        self.streams: dict[int, ScriptedStream] = {}
        self.fault: str | None = None
        self._sealed: set[int] = set()

    def name(self, shard: int) -> str:
        return f"stream-{shard}"

    def engine(self, shard: int) -> StreamEngine:
        return ScriptedEngine(self.streams[shard])

    async def check(self) -> None:
        if self.fault is not None:
            raise ConfigError(self.fault)

    async def find(self, shard: int) -> FoundStream | None:
        if (stream := self.streams.get(shard)) is None:
            return None
        num_messages = stream.last_seq - stream.first_seq + 1
        return FoundStream(num_messages, stream.first_seq, stream.last_seq, shard in self._sealed)

    async def make(self, shard: int, *, first_seq: int) -> None:
        self.streams.setdefault(shard, ScriptedStream(begin_seq=first_seq))

    async def seal(self, shard: int) -> None:
        self._sealed.add(shard)
        self.streams[shard].is_full = True  # it refuses every publish

    async def remove(self, shard: int) -> None:
        self.streams.pop(shard, None)
        self._sealed.discard(shard)
