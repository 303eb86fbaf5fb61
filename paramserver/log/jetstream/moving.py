"""A shard's log moved from files into a stream, or back, while no server runs. Positions and marks stay.

    into a stream    files up to record N │ an empty stream that begins at N + 1
    into files       files up to record N │ mirror of the stream from N + 1 on, written anew as segments of its own

Into a stream nothing is copied: the segments stay where they are, and the log's mirror goes on behind them. Out of it,
the mirror gets what it lacks, and its segments become the log's own (`own_segments`). Neither changes what a directory
says of any record, so followers, archive and sessions go on.

Whoever calls this decides afterwards, by the directory's manifest, where the log is; and calls it again if it was
interrupted before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.interface import AppliedRecord, UpdateLogConfig
from headrace.paramserver.log.jetstream.appender import StreamTimes
from headrace.paramserver.log.jetstream.shard_streams import FoundStream, ShardStreams
from headrace.paramserver.log.jetstream.stream_log import JetStreamUpdateLog
from headrace.paramserver.log.jetstream.stream_reader import StreamReader
from headrace.paramserver.log.mirror import num_mirrored_bytes, own_segments
from headrace.paramserver.log.segment_reader import LogReader
from headrace.schemas.errors import ConfigError, CorruptionError, GoneError, UnavailableError

__all__ = ["LogMover"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_ASIDE = "log.own"  # beside `log`
_REACH_S = 30.0
_RETRY_S = 0.2
_SEAL_AGAIN = "headrace migrate-log --to file was interrupted: repeat it, it goes on and then removes the stream"


class LogMover:
    """Moves the logs of one server's shards. Each method may be repeated, and none decides anything.

    Thread: the event loop's.
    """

    def __init__(self, streams: ShardStreams, *, times: StreamTimes | None = None) -> None:
        """Use the streams of the server."""
        self._streams, self._times = streams, times or StreamTimes()

    def name(self, shard: int) -> str:
        """Return what a shard's stream is called."""
        return self._streams.name(shard)

    async def check_engine(self) -> None:
        """Raise `ConfigError` unless every server of the engine keeps what it acks."""
        await self._streams.check()

    async def begin_stream(self, shard: int, directory: Path) -> int:
        """Make a shard's stream, which begins behind its log in `directory`; return the log's last seq.

        REQUIRES: no server uses the directory.

        Raises:
            ConfigError: The stream has records already; or the engine refuses it.
            HeadraceError: The log cannot be opened, or the engine does not answer.
        """
        log = await asyncio.to_thread(FileUpdateLog.open, directory)  # after a crash it ends where recovery cuts it
        last_seq = log.last_seq
        await log.close()
        name, found = self.name(shard), await self._streams.find(shard)
        if found is not None and found.is_sealed:
            raise ConfigError(f"stream {name}: is sealed: {_SEAL_AGAIN}")
        if found is not None and found.num_messages:
            raise ConfigError(
                f"stream {name}: exists already, with records {found.first_seq} to {found.last_seq}, and the log of "
                f"shard {shard} is in files, up to record {last_seq}: another copy of this server uses the stream, or "
                f"did; if it is not needed, remove it: nats stream rm {name}"
            )
        if found is not None and found.last_seq != last_seq:  # of a call before the server has written more
            await self._streams.remove(shard)
        await self._streams.make(shard, first_seq=last_seq + 1)
        return last_seq

    async def check_silent(self, shard: int, directory: Path, *, applied: AppliedRecord) -> None:
        """Check that nobody writes to a shard's stream, for some seconds; one that is sealed is silent.

        REQUIRES: no server uses the directory. `applied` is the last record that its store has.

        Raises:
            ConfigError: An owner of the shard lives, or there is no stream.
            CorruptionError: The stream does not belong to the directory.
            UnavailableError: The engine does not answer.
        """
        found = await self._existing(shard)
        if not found.is_sealed:
            async with self._following(shard, directory, applied, found) as log:
                await self._refuse_owner(shard, log)

    async def end_stream(
        self, shard: int, directory: Path, *, applied: AppliedRecord, owner: str, above_term: int
    ) -> tuple[int, int]:
        """Seal a shard's stream, and bring all of it into the mirror in `directory`; return its last seq and term.

        `check_silent` comes first, and raises what this raises. `owner` names us to others; the term that ends the
        log is above `above_term`.
        """
        name, found = self.name(shard), await self._existing(shard)
        if not found.is_sealed:
            async with self._following(shard, directory, applied, found) as log:
                await self._take_over(shard, log, owner, above_term)
            await self._streams.seal(shard)
            if not (found := await self._existing(shard)).is_sealed:
                raise UnavailableError(f"stream {name}: is not sealed yet: try again")
        async with self._following(shard, directory, applied, found) as log:
            term, last_seq = log.term, log.last_seq
        mirror = await asyncio.to_thread(LogReader, directory)
        if mirror.last_seq != last_seq or not mirror.first_seq - 1 <= applied.seq <= last_seq:
            raise CorruptionError(
                f"{directory}: has records {mirror.first_seq} to {mirror.last_seq}, the stream {name} ends at "
                f"{last_seq}, and the store of shard {shard} has {applied.seq} applied: they do not belong together"
            )
        return last_seq, term

    def num_own_bytes(self, directory: Path) -> int:
        """Return how many bytes `own_log` writes. Thread: any; blocks."""
        return num_mirrored_bytes(directory)

    async def own_log(self, directory: Path, *, on_progress: Callable[[int], None]) -> None:
        """Make a whole mirror in `directory` a log in files; see `own_segments`."""
        aside = directory.with_name(_ASIDE)
        await asyncio.to_thread(own_segments, directory, aside, on_progress=on_progress)

    async def remove_sealed(self, shard: int, directory: Path) -> bool:
        """Remove a shard's stream if it is sealed, and the log in `directory`, which is in files, has all of it.

        A server may use the directory. Returns whether there was one.

        Raises:
            ConfigError: The log does not go on from the stream.
        """
        found = await self._found(shard)
        if found is None or not found.is_sealed:
            return False
        if found.num_messages:
            nonce = await self._nonce_of_last(shard, found)
            log = await asyncio.to_thread(LogReader, directory)
            own = set(log.nonces(found.last_seq, found.last_seq))
            if log.last_seq < found.last_seq or (own and nonce not in own):
                raise ConfigError(
                    f"stream {self.name(shard)}: is sealed, and {directory} does not go on from its last record, "
                    f"{found.last_seq}: it is the log of another copy of this server"
                )
        await self._streams.remove(shard)
        return True

    async def _existing(self, shard: int) -> FoundStream:
        if (found := await self._found(shard)) is None:
            name = self.name(shard)
            raise ConfigError(f"stream {name}: there is none on these servers: name those that the server had in --log")
        return found

    async def _found(self, shard: int) -> FoundStream | None:
        return await _in_time(_retried(lambda: self._streams.find(shard)), self.name(shard))

    async def _nonce_of_last(self, shard: int, found: FoundStream) -> int | None:
        async def read() -> int | None:
            connection = await self._streams.engine(shard).connect()
            try:
                reader = StreamReader(found.last_seq + 1)
                await reader.begin(connection)
                return reader.nonce
            finally:
                await connection.close()

        return await _in_time(_retried(read), self.name(shard))

    @contextlib.asynccontextmanager
    async def _following(
        self, shard: int, directory: Path, applied: AppliedRecord, found: FoundStream
    ) -> AsyncIterator[JetStreamUpdateLog]:
        """Open the log and read it up to the stream's end; on exit its mirror is durable."""
        name = self.name(shard)
        engine, config = self._streams.engine(shard), UpdateLogConfig(allocate_bytes=0)

        async def follow(begin_seq: int) -> JetStreamUpdateLog:
            opening = JetStreamUpdateLog.open(engine, directory, begin_seq=begin_seq, config=config, times=self._times)
            return await _in_time(opening, name)

        try:
            # From the record that the store has on, if it is there: its mark tells whether it is the same one.
            log = await follow(max(applied.seq, 1))
        except GoneError:
            try:
                log = await follow(applied.seq + 1)
            except GoneError as exc:
                raise CorruptionError(
                    f"{directory}: lacks records that the stream {name} has not either: {exc}"
                ) from exc
        try:
            await self._reach(log, found.last_seq, name)
            if applied.mark is not None and log.nonce_of(applied.seq) not in (None, applied.mark):
                raise CorruptionError(
                    f"the store of shard {shard} has applied another record {applied.seq} than stream {name} leads to: "
                    "it is the stream of another copy of this server, or was made anew"
                )
            yield log
            _check(log)
        finally:
            await log.close()

    async def _reach(self, log: JetStreamUpdateLog, last_seq: int, name: str) -> None:
        failed = asyncio.create_task(log.wait_failed())
        try:
            while (before := log.last_seq) < last_seq:
                beyond = asyncio.create_task(log.wait_beyond(before))
                await asyncio.wait((failed, beyond), timeout=_REACH_S, return_when=asyncio.FIRST_COMPLETED)
                beyond.cancel()
                _check(log)
                if log.last_seq == before:
                    raise UnavailableError(_away(name))
        finally:
            failed.cancel()

    async def _take_over(self, shard: int, log: JetStreamUpdateLog, owner: str, above_term: int) -> None:
        """Own the log: from here on nobody else acks anything, and whatever is still on its way is void."""
        name, taking = self.name(shard), log.take_over(log.last_seq, owner=owner, above_term=above_term)
        try:
            is_ours = await _in_time(taking, name)
        except UnavailableError as exc:
            if log.is_full:
                raise ConfigError(
                    f"stream {name}: is full, and its last records take a few KiB: first give it room, "
                    f"nats stream edit {name} --max-bytes=BYTES"
                ) from exc
            raise
        if not is_ours:
            raise ConfigError(_alive(shard, log.owner))

    async def _refuse_owner(self, shard: int, log: JetStreamUpdateLog) -> None:
        """Raise `ConfigError` if somebody writes to the log within some seconds."""
        last_seq = log.last_seq
        silent = asyncio.create_task(log.wait_silent())
        beyond = asyncio.create_task(log.wait_beyond(last_seq))
        try:
            done, _ = await asyncio.wait(
                (silent, beyond), timeout=self._times.silence_s + _REACH_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            silent.cancel()
            beyond.cancel()
        if beyond in done:
            raise ConfigError(_alive(shard, log.owner))
        if not done:
            raise UnavailableError(_away(self.name(shard)))


def _alive(shard: int, owner: str) -> str:
    where = f"the process at {owner}" if owner else "another process"
    return f"shard {shard}: {where} writes to its log: stop every server and standby of it first"


def _check(log: JetStreamUpdateLog) -> None:
    if (failed := log.failed) is not None:
        raise type(failed)(str(failed))


async def _retried(ask: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    while True:
        try:
            return await ask()
        except UnavailableError as exc:
            _log.debug("asking again: %s", exc)
        await asyncio.sleep(_RETRY_S)


async def _in_time(work: Coroutine[Any, Any, _T], name: str) -> _T:
    try:
        async with asyncio.timeout(_REACH_S):
            return await work
    except TimeoutError as exc:
        raise UnavailableError(_away(name)) from exc


def _away(name: str) -> str:
    return f"stream {name}: its servers do not answer within {_REACH_S:.0f} s, or it has no leader: try again"
