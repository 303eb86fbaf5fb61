"""A shard's log moved from files into a stream and back, on the scripted engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from log_files import SMALL, body_of, fill, make_log, opened_log, segments_of
from scripted_shard_streams import ScriptedShardStreams

from headrace.paramserver.log import mirror
from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.interface import AppliedRecord
from headrace.paramserver.log.jetstream import moving as module
from headrace.paramserver.log.jetstream.appender import StreamTimes
from headrace.paramserver.log.jetstream.moving import LogMover
from headrace.paramserver.log.jetstream.stream_log import JetStreamUpdateLog
from headrace.paramserver.log.segment_reader import LogReader
from headrace.schemas.errors import ConfigError, CorruptionError, LogFencedError, UnavailableError

TIMES = StreamTimes(
    heartbeat_s=0.05, lease_s=0.1, silence_s=0.3, ack_s=0.2, retry_s=0.01, lost_data_s=0.3, idle_poll_s=0.01
)
QUIET = StreamTimes(heartbeat_s=30, lease_s=40, silence_s=50, ack_s=0.2, retry_s=0.01, idle_poll_s=0.01)


class Moving:
    """A shard's log in a directory, and what moves it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "log"
        self.streams = ScriptedShardStreams()
        self.mover = LogMover(self.streams, times=TIMES)

    async def begin(self) -> int:
        return await self.mover.begin_stream(0, self.path)

    async def end(self, applied_seq: int = 0, mark: int | None = None) -> tuple[int, int]:
        applied = AppliedRecord(applied_seq, mark)
        await self.mover.check_silent(0, self.path, applied=applied)
        return await self.mover.end_stream(0, self.path, applied=applied, owner="mover", above_term=0)

    async def own(self) -> list[int]:
        progress: list[int] = []
        await self.mover.own_log(self.path, on_progress=progress.append)
        return progress

    @contextlib.asynccontextmanager
    async def owned(self, begin_seq: int = 1, times: StreamTimes = QUIET) -> AsyncIterator[JetStreamUpdateLog]:
        """Own the log in the stream, as a server does."""
        engine = self.streams.engine(0)
        log = await JetStreamUpdateLog.open(engine, self.path, begin_seq=begin_seq, config=SMALL, times=times)
        try:
            await log.wait_beyond(self.streams.streams[0].last_seq - 1)
            assert await log.take_over(log.last_seq, owner="here:1")
            yield log
        finally:
            await log.close()


@pytest.fixture
def moving(tmp_path: Path) -> Moving:
    return Moving(tmp_path)


def facts_of(log: Any, from_seq: int = 1) -> list[tuple[int, int, int | None, dict[str, Any], bytes]]:
    """Return all that followers see of a log's records."""
    return [
        (each.seq, each.epoch, log.nonce_of(each.seq), each.header, bytes(each.body)) for each in log.read(from_seq)
    ]


async def test_a_log_goes_into_a_stream_and_back_with_all_positions_and_marks(moving: Moving) -> None:
    """Followers find every record at its place with its nonce: in files, in the stream, and in files again."""
    seen: list[Any] = []
    for num_records in (40, 30):
        async with opened_log(moving.path, SMALL) as files:
            await fill(files, num_records)
            assert facts_of(files)[: len(seen)] == seen
            seen = facts_of(files)
        assert await moving.begin() == len(seen)
        assert moving.streams.streams[0].first_seq == len(seen) + 1
        for _ in range(2):  # over a restart
            async with moving.owned() as log:
                assert facts_of(log)[: len(seen)] == seen
                await fill(log, 20)
                seen = facts_of(log)
        last_seq, term = await moving.end()
        assert term == 3 and last_seq > len(seen)
        assert sum(await moving.own()) > 0
        async with opened_log(moving.path, SMALL) as files:
            assert files.last_seq == last_seq
            assert facts_of(files)[: len(seen)] == seen
            seen = facts_of(files)
        assert await moving.mover.remove_sealed(0, moving.path)
        assert not moving.streams.streams
    assert len({nonce for _, _, nonce, _, _ in seen}) >= 8


async def test_the_stream_names_the_record_that_it_begins_behind(moving: Moving) -> None:
    """The first open record has the mark of the file log's last record, so another log's directory is found out."""
    await make_log(moving.path, 10)
    await moving.begin()
    async with moving.owned() as log:
        expected = log.nonce_of(10)
    assert expected == FileUpdateLog.open(moving.path).nonce_of(10)
    other = Moving(moving.path.parent / "other")
    await make_log(other.path, 10)
    other.streams.streams = moving.streams.streams
    for applied_seq in (0, 7, 10):
        with pytest.raises(CorruptionError, match=r"up to record 10, from its time in files|lacks records"):
            await other.end(applied_seq)
    # What the other directory has was not removed: the stream could not replace it.
    assert [each.seq for each in LogReader(other.path).read(1)] == list(range(1, 11))


async def test_a_store_of_another_history_is_found_out(moving: Moving) -> None:
    """Positions alone prove nothing: the mark of the store's last record must be that of the log."""
    await make_log(moving.path, 10)
    await moving.begin()
    async with moving.owned() as log:
        await fill(log, 1)
        seq, mark = log.last_seq, log.nonce_of(log.last_seq)
    assert mark is not None
    with pytest.raises(CorruptionError, match=r"store of shard 0 has applied another record \d+ than stream stream-0"):
        await moving.end(seq, mark + 1)
    assert not (found := await moving.streams.find(0)) or not found.is_sealed
    await moving.end(seq, mark)


async def test_records_before_the_stream_that_no_store_has_are_kept(moving: Moving) -> None:
    """A start whose store has applied less than the file log reads the rest from the old segments."""
    await make_log(moving.path, 30, config=SMALL)
    await moving.begin()
    for begin_seq in (1, 12, 31):
        async with moving.owned(begin_seq) as log:
            assert [each.seq for each in log.read(1)][:30] == list(range(1, 31))
            assert bytes(next(log.read(12)).body) == body_of(12)


async def test_a_stream_is_made_anew_when_the_log_has_grown_meanwhile(moving: Moving) -> None:
    """An interrupted migration leaves an empty stream; the next one begins behind what was written meanwhile."""
    await make_log(moving.path, 10)
    assert await moving.begin() == 10
    assert await moving.begin() == 10
    await make_log(moving.path, 5)
    assert await moving.begin() == 15
    assert moving.streams.streams[0].first_seq == 16


async def test_a_crashed_servers_log_is_cut_first(moving: Moving) -> None:
    """The stream begins behind the last whole record, as the next start of the server would."""
    await make_log(moving.path, 10)
    segment = segments_of(moving.path)[-1]
    segment.write_bytes(segment.read_bytes()[:-100])  # the seal, and a part of record 10
    assert await moving.begin() == 9


async def test_a_stream_with_records_is_refused(moving: Moving) -> None:
    """It is another copy's, or that of an earlier migration, and the message says how to go on."""
    await make_log(moving.path, 3)
    await moving.begin()
    async with moving.owned():
        pass
    with pytest.raises(
        ConfigError, match=r"stream-0: exists already, with records 4 to \d+, .* nats stream rm stream-0"
    ):
        await moving.begin()
    await moving.streams.seal(0)
    with pytest.raises(ConfigError, match=r"stream-0: is sealed: headrace migrate-log --to file was interrupted"):
        await moving.begin()


async def test_a_living_owner_is_not_robbed(moving: Moving) -> None:
    """While its heartbeats come, moving back is refused, and the owner goes on."""
    await make_log(moving.path, 3)
    await moving.begin()
    other = Moving(moving.path.parent / "b")
    other.streams = moving.streams
    async with moving.owned(times=TIMES) as log:
        with pytest.raises(ConfigError, match=r"shard 0: the process at here:1 writes to its log: stop every server"):
            await LogMover(moving.streams, times=TIMES).check_silent(0, other.path, applied=AppliedRecord(3))
        await fill(log, 1)
        assert log.is_owner


async def test_a_full_stream_needs_a_little_room(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be ended, and the message says how to go on."""
    await make_log(moving.path, 3)
    await moving.begin()
    moving.streams.streams[0].is_full = True
    take_over = LogMover._take_over
    with monkeypatch.context() as patch:

        async def take_over_soon(*args: Any) -> None:
            patch.setattr(module, "_REACH_S", 0.5)  # no earlier: the disk may be slow to open the mirror
            await take_over(*args)

        patch.setattr(LogMover, "_take_over", take_over_soon)
        with pytest.raises(ConfigError, match=r"stream-0: is full, .* nats stream edit stream-0 --max-bytes=BYTES"):
            await moving.end()
    moving.streams.streams[0].is_full = False
    await moving.end()


async def test_an_engine_that_is_away_is_named(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has happened then, and the command can be repeated."""
    await make_log(moving.path, 3)
    await moving.begin()
    for number in range(3):
        moving.streams.streams[0].kill_server(number, down_s=60)
    with monkeypatch.context() as patch, pytest.raises(UnavailableError, match=r"stream-0: its servers do not answer"):
        patch.setattr(module, "_REACH_S", 0.5)
        await moving.end()
    moving.streams.streams[0].heal()
    await moving.end()


async def test_who_is_paused_meanwhile_is_fenced(moving: Moving) -> None:
    """An owner that wakes after the log was moved back acks nothing, and no standby goes on in the stream."""
    await make_log(moving.path, 3)
    await moving.begin()
    aside = Moving(moving.path.parent / "b")
    engine = moving.streams.engine(0)
    paused = await JetStreamUpdateLog.open(engine, aside.path, begin_seq=4, config=SMALL, times=QUIET)
    assert await paused.take_over(3, owner="there:1")
    await fill(paused, 2)
    last_seq, _ = await moving.end(applied_seq=3)
    assert last_seq > paused.last_seq
    late = paused.append(epoch=1, header={"step": 0}, body=[b"late"])
    with pytest.raises(LogFencedError):
        await late.durable
    await paused.close()
    assert moving.streams.streams[0].last_seq == last_seq
    await moving.own()
    assert LogReader(moving.path).last_seq == last_seq


class _Killed(BaseException):
    """The process is killed here."""


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_kill_while_segments_are_written_anew_changes_no_answer(
    moving: Moving, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """At any moment the directory is the same log to the stream's readers, and a repeated call goes on."""
    await make_log(moving.path, 20, config=SMALL)
    await moving.begin()
    for _ in range(2):
        async with moving.owned() as log:
            await fill(log, 80)
    await moving.end(applied_seq=1)
    seen = await _mirrored(moving)

    copy, num_left = mirror._copy_own, 0

    def killed(*args: Any) -> Path:
        nonlocal num_left
        num_left -= 1
        if when == "before" and num_left < 0:
            raise _Killed
        done = copy(*args)
        if num_left < 0:
            raise _Killed
        return done

    monkeypatch.setattr(mirror, "_copy_own", killed)
    num_kills, is_done = 0, False
    while not is_done:
        num_left = num_kills % 3
        try:
            await moving.own()
            is_done = True
        except _Killed:
            num_kills += 1
            assert await _mirrored(moving) == seen
    assert num_kills > 3
    async with opened_log(moving.path, SMALL) as files:
        assert facts_of(files) == seen
    assert not (moving.path.parent / "log.own").exists()
    assert {each.header.source_mark for each in LogReader(moving.path).segments} == {0}


async def _mirrored(moving: Moving) -> list[Any]:
    """Return what the directory says as the mirror of the stream."""
    async with opened_log(moving.path) as opened:
        return facts_of(opened)
