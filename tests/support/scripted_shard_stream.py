"""The streams of a server's shards on the scripted engine, and shards whose replicated logs are in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripted_stream import ScriptedEngine, ScriptedStream

from headrace.paramserver.log.interface import NextLog, ReplicatedLog
from headrace.paramserver.log.jetstream.appender import StreamTimes
from headrace.paramserver.log.jetstream.beginning import FoundStream, StreamBeginning
from headrace.paramserver.log.jetstream.engine import StreamEngine
from headrace.paramserver.log.jetstream.stream_log import JetStreamUpdateLog
from headrace.paramserver.shard import service
from headrace.schemas.errors import GoneError, UnavailableError

__all__ = ["TIMES", "ScriptedShardStream", "use_scripted_streams"]

TIMES = StreamTimes(
    heartbeat_s=0.1, lease_s=0.5, silence_s=1.0, ack_s=0.2, retry_s=0.01, lost_data_s=5, idle_poll_s=0.01
)


class ScriptedShardStream:
    """Implements `ShardStream`.

    Attributes:
        name: What it is called.
        stream: None while there is none.
        is_sealed: Whether it takes nothing.
        is_away: Whether its servers do not answer.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.stream: ScriptedStream | None = None
        self.is_sealed = self.is_away = False

    @property
    def engine(self) -> StreamEngine:
        assert self.stream is not None
        return ScriptedEngine(self.stream)

    async def find(self) -> FoundStream | None:
        self._check()
        if (stream := self.stream) is None:
            return None
        num_messages = stream.last_seq - stream.first_seq + 1
        return FoundStream(num_messages, stream.first_seq, stream.last_seq, self.is_sealed)

    async def make(self, *, first_seq: int) -> None:
        self._check()
        self.stream = self.stream or ScriptedStream(begin_seq=first_seq)

    async def remove(self) -> None:
        self._check()
        self.stream, self.is_sealed = None, False

    def _check(self) -> None:
        if self.is_away:
            raise UnavailableError(f"no server of {self.name} answers")


def use_scripted_streams(monkeypatch: pytest.MonkeyPatch) -> dict[str, ScriptedShardStream]:
    """Let shards have their replicated logs on scripted engines; return the stream of each URL."""
    streams: dict[str, ScriptedShardStream] = {}

    def stream_of(settings: Any) -> ScriptedShardStream:
        return streams.setdefault(settings.log, ScriptedShardStream(settings.log))

    async def follow(settings: Any, directory: Path, *, applied_seq: int, config: Any, **_: Any) -> ReplicatedLog:
        stream = stream_of(settings)
        await stream.make(first_seq=1)
        for begin_seq in (max(applied_seq, 1), applied_seq + 1):
            try:
                return await JetStreamUpdateLog.open(
                    stream.engine,
                    directory,
                    begin_seq=begin_seq,
                    needed_seq=applied_seq + 1,
                    config=config,
                    times=TIMES,
                )
            except GoneError:
                if begin_seq > applied_seq:
                    raise
        raise AssertionError("the second one returns or raises")

    def begin(settings: Any, *, config: Any = None, **_: Any) -> NextLog:
        return StreamBeginning(stream_of(settings), config=config, times=TIMES)

    monkeypatch.setattr(service, "open_follower", follow)
    monkeypatch.setattr(service, "next_log", begin)
    return streams
