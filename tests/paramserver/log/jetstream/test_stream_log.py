"""The log in a stream: following, taking over, appending, and what it does when the engine fails; in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memory_mirror import MemoryMirror
from scripted_stream import ScriptedConnection, ScriptedEngine, ScriptedStream, Weather
from virtual_loop import run_virtual

from headrace.paramserver.log.interface import LogRecord, UpdateLogConfig, is_housekeeping
from headrace.paramserver.log.jetstream.appender import StreamTimes
from headrace.paramserver.log.jetstream.engine import StreamState
from headrace.paramserver.log.jetstream.stream_log import JetStreamUpdateLog
from headrace.paramserver.log.jetstream.terms import MAX_IN_FLIGHT
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    GoneError,
    LogFencedError,
    OverloadedError,
    RequestError,
    StorageError,
    UnavailableError,
)
from headrace.schemas.stream_records import StreamRecordKind, encode_stream_note, encode_stream_record

_WINDOW = MAX_IN_FLIGHT


async def _open(
    stream: ScriptedStream,
    *,
    begin_seq: int = 1,
    mirror: MemoryMirror | None = None,
    connection_type: type[ScriptedConnection] = ScriptedConnection,
    **settings: Any,
) -> JetStreamUpdateLog:
    async def open_mirror(seq: int, *, anew: bool) -> MemoryMirror:
        return MemoryMirror(seq) if anew or mirror is None else mirror

    engine = ScriptedEngine(stream)
    engine.connection_type = connection_type  # type: ignore[misc]
    return await JetStreamUpdateLog.open_on(engine, open_mirror, begin_seq=begin_seq, **settings)


async def _own(stream: ScriptedStream, name: str = "a", **settings: Any) -> JetStreamUpdateLog:
    """Return a log that has taken over at the stream's end."""
    log = await _open(stream, **settings)
    await log.wait_beyond(stream.last_seq - 1)
    assert await log.take_over(stream.last_seq, owner=name)
    return log


def _append(log: JetStreamUpdateLog, *bodies: bytes) -> list[asyncio.Future[None]]:
    return [log.append(epoch=1, header={"n": len(body)}, body=[body]).durable for body in bodies]


def _data(log: JetStreamUpdateLog, from_seq: int = 1) -> list[bytes]:
    return [bytes(each.body) for each in log.read(from_seq) if not is_housekeeping(each.header)]


def _whats(records: list[LogRecord]) -> list[str]:
    return [each.header.get("note", "data") for each in records]


def virtual(test: Any) -> Any:
    """Run an async test on a virtual loop of its own."""

    def run(**fixtures: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(3600):
                await test(**fixtures)

        main: Coroutine[Any, Any, None] = bounded()
        run_virtual(main)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    run.__signature__ = __import__("inspect").signature(test)  # type: ignore[attr-defined]
    return run


@virtual
async def test_owner_appends_what_followers_read() -> None:
    """What the owner appends is durable in order, and a follower reads it; records without data are hellos."""
    stream = ScriptedStream()
    follower, owner = await _open(stream), await _own(stream)
    assert (owner.term, owner.owner, owner.is_owner, owner.failed) == (1, "a", True, None)
    await asyncio.gather(*_append(owner, b"one", b"two"))
    await follower.wait_beyond(owner.last_seq - 1)
    assert _data(follower) == _data(owner) == [b"one", b"two"]
    assert (follower.term, follower.owner, follower.is_owner) == (1, "a", False)
    whats = _whats(list(follower.read(1)))
    assert whats == ["open"] + ["padding"] * (_WINDOW - 1) + ["data"] * 2
    assert {each.epoch for each in follower.read(1)} == {1}
    marks = {owner.nonce_of(seq) for seq in range(1, owner.last_seq + 1)}
    assert marks == {follower.nonce_of(seq) for seq in range(1, owner.last_seq + 1)} and len(marks) == 1
    assert (owner.pending_bytes, owner.metrics.num_records) == (0, 2)
    await owner.close()
    await follower.close()


@virtual
async def test_appends_are_refused_before_taking_over() -> None:
    """A follower appends nothing and owns nothing."""
    log = await _open(ScriptedStream())
    with pytest.raises(UnavailableError, match="does not own"):
        log.append(epoch=1, header={}, body=[])
    with pytest.raises(UnavailableError, match="does not own"):
        log.check_owned()
    await log.close()


@virtual
async def test_takeover_fences_the_owner_before() -> None:
    """A second owner's term is higher; the first one learns of it with its next heartbeat, and acks nothing more."""
    stream = ScriptedStream()
    first = await _own(stream)
    await asyncio.gather(*_append(first, b"one"))
    second = await _own(stream, "b")
    assert (second.term, second.owner) == (2, "b")
    late = _append(first, b"late")
    error = await first.wait_failed()
    assert isinstance(error, LogFencedError) and isinstance(late[0].exception(), LogFencedError)
    assert not first.is_owner and first.pending_bytes == 0
    with pytest.raises(UnavailableError):
        first.check_owned()
    with pytest.raises(LogFencedError):
        first.append(epoch=1, header={}, body=[])
    await asyncio.gather(*_append(second, b"two"))
    assert _data(second) == [b"one", b"two"] and _data(first) == [b"one"]
    await first.close()
    await second.close()


@virtual
async def test_takeover_behind_unread_records_is_refused() -> None:
    """Who has not applied the last record cannot open; above_term raises the term."""
    stream = ScriptedStream()
    owner, standby = await _own(stream), await _open(stream)
    await asyncio.gather(*_append(owner, b"one"))
    await standby.wait_beyond(_WINDOW)
    assert not await standby.take_over(_WINDOW, owner="b")
    assert await standby.take_over(_WINDOW + 1, owner="b", above_term=7)
    assert standby.term == 8
    await owner.close()
    await standby.close()


@virtual
async def test_idle_owner_keeps_its_lease_and_a_cut_one_loses_it() -> None:
    """Heartbeats keep the lease; three seconds after the last acked append was sent it is over."""
    stream = ScriptedStream()
    engine = ScriptedEngine(stream)

    async def open_mirror(seq: int, *, anew: bool) -> MemoryMirror:
        return MemoryMirror(seq)

    log = await JetStreamUpdateLog.open_on(engine, open_mirror, begin_seq=1)
    assert await log.take_over(0, owner="a")
    for _ in range(40):
        log.check_owned()
        await asyncio.sleep(0.5)
    assert 18 <= _whats(list(log.read(1))).count("heartbeat") <= 20
    engine.is_cut = True
    engine.lose()
    await asyncio.sleep(1.9)
    log.check_owned()
    await asyncio.sleep(1.11)
    with pytest.raises(UnavailableError):
        log.check_owned()
    assert log.is_owner and log.failed is None
    engine.is_cut = False
    await asyncio.sleep(2.2)
    log.check_owned()
    await log.close()


@virtual
async def test_standby_waits_for_silence_of_a_log_that_has_a_leader() -> None:
    """A standby hears heartbeats; without a leader, silence says nothing about the owner."""
    stream = ScriptedStream()
    owner, standby = await _own(stream), await _open(stream)
    silent = asyncio.ensure_future(standby.wait_silent())
    await asyncio.sleep(20)
    assert not silent.done()
    stream.kill_leader(down_s=60, election_s=20)
    await asyncio.sleep(19)
    assert not silent.done()
    await asyncio.sleep(10)
    assert not silent.done()  # the owner's heartbeats came back with the leader
    began_s = asyncio.get_running_loop().time()
    await owner.close()
    await silent
    assert 3 <= asyncio.get_running_loop().time() - began_s <= 6
    await standby.close()


@virtual
async def test_standby_hears_soon_of_a_new_leader() -> None:
    """Questions that come before it leads are never answered; the standby waits from the first one on that is."""

    class Mute(ScriptedConnection):
        async def state(self) -> StreamState:
            if self._stream.leader_of(self._number) is None:
                await asyncio.sleep(2)
                raise UnavailableError("no answer")
            return await super().state()

    loop = asyncio.get_running_loop()
    for election_s in (5.0, 5.5, 6.0, 6.5, 7.0):
        stream = ScriptedStream()
        owner, standby = await _own(stream), await _open(stream, connection_type=Mute)
        await standby.wait_beyond(stream.last_seq - 1)
        await owner.close()
        stream.kill_leader(down_s=60, election_s=election_s)
        began_s = loop.time()
        await standby.wait_silent()
        assert 4 <= loop.time() - began_s - election_s <= 4.8
        await standby.close()


@virtual
async def test_standby_takes_over_from_a_dead_owner_although_the_leader_is_slow() -> None:
    """A leader whose answers come after the standby's next questions, and several at a time, is one all the same."""

    loop, gate = asyncio.get_running_loop(), asyncio.Event()

    class Slow(ScriptedConnection):
        async def state(self) -> StreamState:
            nonlocal gate
            state = await super().state()
            if gate.is_set():
                gate = asyncio.Event()
            loop.call_later(1.5, gate.set)  # for all that came before
            await gate.wait()
            return state

    for _ in range(5):
        stream = ScriptedStream()
        owner, standby = await _own(stream), await _open(stream, connection_type=Slow)
        await standby.wait_beyond(stream.last_seq - 1)
        await owner.close()
        began_s = loop.time()
        await standby.wait_silent()
        assert loop.time() - began_s <= 4 + 2 * (0.5 + 1.5)
        await standby.close()


@virtual
async def test_a_full_stream_is_purged_although_its_owners_mirror_is_young() -> None:
    """Bounds are those of the mirror, which may hold little of a stream that is full: then what is older goes."""
    stream = ScriptedStream()
    first = await _own(stream)
    await asyncio.gather(*_append(first, *[b"row"] * 300))
    await first.close()
    log = await _open(stream, begin_seq=200)
    await log.wait_beyond(stream.last_seq - 1)
    assert await log.take_over(stream.last_seq, owner="b")
    assert log.trim(250, max_bytes=1 << 40) == 1
    stream.is_full = True
    waiting = _append(log, b"one")
    while not log.is_full:  # noqa: ASYNC110 (nothing tells of it)
        await asyncio.sleep(0.1)
    assert log.trim(250, max_bytes=1 << 40) == 200
    await asyncio.sleep(1)
    assert stream.first_seq == 200 - _WINDOW
    stream.is_full = False
    await asyncio.gather(*waiting)
    await log.close()


@virtual
async def test_taking_over_fails_if_the_mirror_has_just_failed() -> None:
    """Whoever takes over while the disk refuses owns nothing and is told so; it does not wait for its own records."""

    class FullMirror(MemoryMirror):
        def append(self, **record: Any) -> Any:
            raise StorageError("no space left on the disk")

    log = await _open(stream := ScriptedStream(), mirror=FullMirror(1))
    with pytest.raises(StorageError, match="no space left"):
        await log.take_over(0, owner="a")
    assert (log.is_owner, stream.last_seq) == (False, _WINDOW)
    await log.close()


@virtual
async def test_what_is_in_memory_is_not_read_from_the_mirror() -> None:
    """Who follows closely reads the records that the mirror's disk does not have yet, and no others."""

    class Unread(MemoryMirror):
        def read(self, from_seq: int, *, past_cache: bool = False) -> Any:
            raise AssertionError("the mirror was read")

        def append(self, **record: Any) -> Any:
            append = super().append(**record)
            return replace(append, durable=asyncio.get_running_loop().create_future())

    log = await _own(ScriptedStream(), mirror=Unread(1))
    await asyncio.gather(*_append(log, b"one", b"two"))
    assert [bytes(each.body) for each in log.read(_WINDOW + 1)] == [b"one", b"two"]
    assert [bytes(each.body) for each in log.read(_WINDOW + 2)] == [b"two"]
    assert list(log.read(_WINDOW + 3)) == []
    await log.close()


@virtual
async def test_waiting_for_silence_again_and_again_asks_the_leader_rarely() -> None:
    """A standby begins to wait anew behind each record; the stream's leader is not asked each time."""
    num_asked = 0

    class Counting(ScriptedConnection):
        async def state(self) -> StreamState:
            nonlocal num_asked
            num_asked += 1
            return await super().state()

    stream = ScriptedStream()
    owner, standby = await _own(stream), await _open(stream, connection_type=Counting)
    num_asked = 0
    for _ in range(200):
        silent = asyncio.ensure_future(standby.wait_silent())
        await asyncio.gather(*_append(owner, b"row"))
        await standby.wait_beyond(owner.last_seq - 1)
        assert not silent.done()
        silent.cancel()
    assert num_asked == 0
    await owner.close()
    await standby.wait_silent()
    await standby.close()


@virtual
async def test_a_busy_owner_keeps_its_lease_over_a_slow_link() -> None:
    """However much waits, no more is on its way than is acked while the lease lasts: reads go on."""

    class Slow(ScriptedConnection):
        def put_on_the_wire(self, payloads: Any, expected: Any, on_reply: Any) -> None:
            size_bytes = sum(map(len, payloads))
            self._arrival_s = max(self._arrival_s, self._stream.loop.time()) + size_bytes / 6e6
            super().put_on_the_wire(payloads, expected, on_reply)

    log = await _own(ScriptedStream(), connection_type=Slow)
    waiting: list[asyncio.Future[None]] = []
    for _ in range(150):
        with contextlib.suppress(OverloadedError):
            while True:
                waiting += _append(log, bytes(1_000_000))
        await asyncio.sleep(0.1)
        log.check_owned()
    assert sum(each.done() for each in waiting) > 70
    await log.close()
    await asyncio.gather(*waiting, return_exceptions=True)


@virtual
async def test_recovery_that_meets_the_unforeseen_ends_the_log() -> None:
    """An answer that is none ends the owner, which starts again; it does not wait for ever."""
    log = await _own(stream := ScriptedStream())

    async def connect() -> ScriptedConnection:
        raise KeyError("state")

    log._engine.connect = connect  # type: ignore[method-assign]
    waiting = _append(log, b"one")
    for server in stream.servers:
        for connection in list(server.connections):
            connection.lose("gone")
    assert isinstance(await log.wait_failed(), UnavailableError)
    assert isinstance((await asyncio.gather(*waiting, return_exceptions=True))[0], UnavailableError)
    with pytest.raises(UnavailableError, match="KeyError"):
        _append(log, b"two")
    await log.close()


@virtual
async def test_stalled_log_refuses_before_a_seq_is_given_and_goes_on() -> None:
    """While the engine is away, appends wait up to the bound; then they are refused, and no seq is lost."""
    stream = ScriptedStream()
    log = await _own(stream, config=UpdateLogConfig(max_pending_bytes=1000))
    await asyncio.gather(*_append(log, b"one"))
    stream.elect(election_s=10)
    waiting = _append(log, bytes(600))
    with pytest.raises(OverloadedError, match="1000"):
        _append(log, bytes(600))
    await asyncio.sleep(9)
    assert not waiting[0].done() and log.stalled_s > 6
    await waiting[0]
    await asyncio.gather(*_append(log, b"more"))
    assert _data(log) == [b"one", bytes(600), b"more"] and log.stalled_s == 0
    assert log.stream_metrics.stalled_s > 6 and log.stream_metrics.num_recoveries >= 1
    await log.close()


@virtual
async def test_credentials_that_are_refused_stall_a_log_that_runs() -> None:
    """A log that cannot be opened with its credentials says so; one that runs waits for other ones."""
    stream = ScriptedStream()
    engine = ScriptedEngine(stream)

    async def open_mirror(seq: int, *, anew: bool) -> MemoryMirror:
        return MemoryMirror(seq)

    engine.is_unwelcome = True
    with pytest.raises(ConfigError):
        await JetStreamUpdateLog.open_on(engine, open_mirror, begin_seq=1)
    engine.is_unwelcome = False
    log = await JetStreamUpdateLog.open_on(engine, open_mirror, begin_seq=1)
    await asyncio.sleep(1)
    for is_owner in (False, True):
        engine.is_unwelcome = True
        engine.lose()
        await asyncio.sleep(10)
        assert log.failed is None
        waiting = _append(log, b"one") if is_owner else []
        engine.is_unwelcome = False
        assert is_owner or await log.take_over(0, owner="a")
        await asyncio.gather(*waiting)
    assert _data(log) == [b"one"]
    await log.close()


@virtual
async def test_full_engine_stalls_the_log() -> None:
    """A full engine refuses; appends are refused before they have a seq, until there is room again."""
    stream = ScriptedStream()
    log = await _own(stream)
    stream.is_full = True
    waiting = _append(log, b"one")
    await asyncio.sleep(3)
    assert log.is_full and not waiting[0].done() and log.stream_metrics.num_refusals["full"] >= 1
    with pytest.raises(OverloadedError, match="no room"):
        _append(log, b"two")
    stream.is_full = False
    await waiting[0]
    await asyncio.gather(*_append(log, b"two"))
    assert _data(log) == [b"one", b"two"]
    await log.close()


@virtual
async def test_full_engine_can_be_emptied_by_who_takes_over() -> None:
    """A standby that a full stream refuses may trim it, and then takes over."""
    stream = ScriptedStream()
    owner = await _own(stream)
    await asyncio.gather(*_append(owner, *[b"x"] * 200))
    await owner.close()
    standby = await _open(stream)
    await standby.wait_beyond(stream.last_seq - 1)
    stream.is_full = True
    taking = asyncio.ensure_future(standby.take_over(stream.last_seq, owner="b"))
    await asyncio.sleep(5)
    assert standby.is_full and not taking.done()
    standby.trim(200)
    await asyncio.sleep(1)
    assert stream.first_seq == 200 - _WINDOW
    stream.is_full = False
    assert await taking
    await standby.close()


@virtual
async def test_engine_that_lost_data_is_found() -> None:
    """An engine that ends before what it acked is told from a slow one, in 30 s, and fails the log for good."""
    stream = ScriptedStream()
    log = await _own(stream)
    await asyncio.gather(*_append(log, b"one", b"two"))
    began_s = asyncio.get_running_loop().time()
    stream.lose_tail(2)
    waiting = _append(log, b"three")
    error = await log.wait_failed()
    assert isinstance(error, StorageError) and "lost data" in str(error)
    assert 30 <= asyncio.get_running_loop().time() - began_s < 45
    assert isinstance(waiting[0].exception(), StorageError)
    assert _data(log) == [b"one", b"two"]
    await log.close()


@virtual
async def test_a_takeover_in_the_place_of_acked_records_is_lost_data() -> None:
    """If a standby that had not read the lost records opens in their place, the owner before says so."""
    stream = ScriptedStream()
    log = await _own(stream)
    await asyncio.gather(*_append(log, b"one", b"two"))
    stream.lose_tail(1)
    second = await _own(stream, "b")
    error = await log.wait_failed()
    assert isinstance(error, StorageError) and "lost data" in str(error)
    assert second.is_owner and _data(second) == [b"one"]
    await log.close()
    await second.close()


@virtual
async def test_taking_over_an_engine_that_lost_data_fails() -> None:
    """Who has read more than the stream has does not open a term behind the loss."""
    stream = ScriptedStream()
    owner = await _own(stream)
    await asyncio.gather(*_append(owner, b"one", b"two"))
    standby = await _open(stream)
    await standby.wait_beyond(stream.last_seq - 1)
    applied_seq = stream.last_seq
    await owner.close()
    stream.lose_tail(1)
    with pytest.raises(StorageError, match="lost data"):
        await standby.take_over(applied_seq, owner="b")
    assert isinstance(standby.failed, StorageError)
    await standby.close()


@virtual
async def test_damaged_message_fails_the_reader() -> None:
    """A message that is damaged on every server is reported, and nothing behind it is read."""
    stream = ScriptedStream()
    owner = await _own(stream)
    await asyncio.gather(*_append(owner, b"one", b"two"))
    damaged = bytearray(stream.history[_WINDOW + 1])
    damaged[-1] ^= 1
    stream.history[_WINDOW + 1] = bytes(damaged)
    follower = await _open(stream)
    error = await follower.wait_failed()
    assert isinstance(error, CorruptionError) and str(_WINDOW + 1) in str(error)
    assert follower.last_seq == _WINDOW
    await owner.close()
    await follower.close()


@virtual
async def test_late_records_of_the_owner_before_are_void() -> None:
    """A record of an earlier term behind an open record is not data for anyone, and is counted."""
    stream = ScriptedStream()
    leader = stream.leader
    assert leader is not None

    def put(kind: StreamRecordKind, term: int, body: bytes = b"", **fields: Any) -> None:
        seq = leader.last_seq + 1
        if kind is StreamRecordKind.DATA:
            message = encode_stream_record(
                kind=kind, term=term, mark=term, seq=seq, epoch=1, header=b"\x80", body=[body]
            )
        else:
            message = encode_stream_note(kind, term=term, mark=term, seq=seq, owner=str(term), **fields)
        stream.propose(leader, [message], seq - 1, lambda reply: None)

    put(StreamRecordKind.OPEN, 1, previous=(0, 0))
    put(StreamRecordKind.DATA, 1, b"counts")
    put(StreamRecordKind.OPEN, 2, previous=(2, 1))
    put(StreamRecordKind.DATA, 1, b"late")
    put(StreamRecordKind.DATA, 2, b"counts too")
    follower = await _open(stream)
    await follower.wait_beyond(4)
    assert _whats(list(follower.read(1))) == ["open", "data", "open", "void", "data"]
    assert _data(follower) == [b"counts", b"counts too"]
    assert (follower.stream_metrics.num_voids, follower.term, follower.owner) == (1, 2, "2")
    middle = await _open(stream, begin_seq=5)
    await middle.wait_beyond(4)
    assert _data(middle, 5) == [b"counts too"]
    assert [middle.nonce_of(seq) for seq in (4, 5)] == [follower.nonce_of(seq) for seq in (4, 5)]
    await follower.close()
    await middle.close()


@virtual
async def test_open_record_behind_another_record_than_it_names_is_damage() -> None:
    """An owner that opened behind a record that the stream no longer has is found by every reader."""
    stream = ScriptedStream()
    owner = await _own(stream)
    await asyncio.gather(*_append(owner, b"one"))
    await owner.close()
    message = encode_stream_note(
        StreamRecordKind.OPEN, term=2, mark=5, seq=_WINDOW + 2, owner="b", previous=(_WINDOW + 1, 4)
    )
    assert stream.leader is not None
    stream.propose(stream.leader, [message], stream.last_seq, lambda reply: None)
    follower = await _open(stream)
    assert "another record" in str(await follower.wait_failed())
    await follower.close()


@virtual
async def test_mirror_goes_on_where_it_was() -> None:
    """A log that is opened again reads its mirror at once, and only what the mirror lacks from the stream."""
    stream = ScriptedStream()
    owner = await _own(stream)
    await asyncio.gather(*_append(owner, b"one"))
    mirror = MemoryMirror(1)
    follower = await _open(stream, mirror=mirror)
    await follower.wait_beyond(_WINDOW)
    await follower.close()
    await asyncio.gather(*_append(owner, b"two"))
    again = await _open(stream, mirror=mirror.survivor())
    assert again.last_seq == _WINDOW + 1 and _data(again) == [b"one"]
    await again.wait_beyond(_WINDOW + 1)
    assert _data(again) == [b"one", b"two"] and again.term == 1
    await owner.close()
    await again.close()


@virtual
async def test_mirror_of_another_history_is_begun_anew() -> None:
    """A mirror whose last record is not the stream's is removed."""
    before = ScriptedStream()
    owner = await _own(before)
    await asyncio.gather(*_append(owner, b"old"))
    mirror = MemoryMirror(1)
    follower = await _open(before, mirror=mirror)
    await follower.wait_beyond(_WINDOW)
    stream = ScriptedStream()
    rebuilt = await _own(stream)
    await asyncio.gather(*_append(rebuilt, b"new", b"newer"))
    again = await _open(stream, mirror=mirror.survivor())
    await again.wait_beyond(_WINDOW + 1)
    assert _data(again) == [b"new", b"newer"]
    for log in (owner, follower, rebuilt, again):
        await log.close()


@virtual
async def test_mirror_that_was_restored_behind_a_snapshot_goes_on() -> None:
    """A restored mirror begins directly behind what its store has applied: it is kept, and what it has is not read."""
    stream = ScriptedStream()
    owner = await _own(stream)
    await asyncio.gather(*_append(owner, *[b"%d" % number for number in range(20)]))
    applied_seq = _WINDOW + 5
    mirror = MemoryMirror(applied_seq + 1)
    before = await _open(stream, begin_seq=applied_seq + 1, mirror=mirror)
    await before.wait_beyond(_WINDOW + 19)
    await before.close()
    restored = mirror.survivor()
    follower = await _open(stream, begin_seq=applied_seq, needed_seq=applied_seq + 1, mirror=restored)
    assert restored.first_seq == applied_seq + 1 and follower._mirror is restored
    assert _data(follower, applied_seq + 1) == [b"%d" % number for number in range(5, 20)]
    await owner.close()
    await follower.close()


@virtual
async def test_mirror_that_is_merely_behind_goes_on() -> None:
    """A mirror that ends before `begin_seq` keeps what it has, as long as the stream has what is between."""
    stream = ScriptedStream()
    owner = await _own(stream)
    await asyncio.gather(*_append(owner, *[b"%d" % number for number in range(200)]))
    mirror = MemoryMirror(1)
    follower = await _open(stream, mirror=mirror)
    await follower.wait_beyond(_WINDOW + 100)
    await follower.close()
    await asyncio.gather(*_append(owner, *[b"%d" % number for number in range(200, 400)]))
    late = await _open(stream, begin_seq=_WINDOW + 300, mirror=mirror.survivor())
    await late.wait_beyond(owner.last_seq - 1)
    assert late.first_seq == 1 and _data(late) == [b"%d" % number for number in range(400)]
    await late.close()
    owner.trim(_WINDOW + 300)
    await asyncio.sleep(1)
    anew = await _open(stream, begin_seq=_WINDOW + 300, mirror=mirror.survivor())
    assert anew.first_seq == anew.last_seq + 1 == _WINDOW + 300
    await owner.close()
    await anew.close()


@virtual
async def test_mirror_that_the_stream_cannot_replace_stays() -> None:
    """A mirror of another history is not removed when the stream has no longer what would take its place."""
    before = ScriptedStream()
    owner = await _own(before)
    await asyncio.gather(*_append(owner, *[b"old"] * 200))
    mirror = MemoryMirror(1)
    follower = await _open(before, mirror=mirror)
    await follower.wait_beyond(owner.last_seq - 1)
    stream = ScriptedStream()
    rebuilt = await _own(stream)
    await asyncio.gather(*_append(rebuilt, *[b"new"] * 300))
    rebuilt.trim(200)
    await asyncio.sleep(1)
    kept = mirror.survivor()
    with pytest.raises(GoneError):
        await _open(stream, begin_seq=100, mirror=kept)
    assert kept.last_seq == _WINDOW + 200
    for log in (owner, follower, rebuilt):
        await log.close()


@virtual
async def test_stream_that_begins_behind_another_log() -> None:
    """A stream that was made to continue a log in files goes on behind it, and names its last record."""
    past = MemoryMirror(1)
    for seq in range(1, 11):
        past.append(seq=seq, mark=77, epoch=1, header={}, body=[b"%d" % seq])
    stream = ScriptedStream(begin_seq=11)
    log = await _open(stream, begin_seq=11, mirror=past)
    assert (log.last_seq, log.term, log.nonce_of(10)) == (10, 0, 77)
    assert await log.take_over(10, owner="a")
    await asyncio.gather(*_append(log, b"more"))
    assert _data(log) == [b"%d" % seq for seq in range(1, 11)] + [b"more"]
    follower = await _open(stream, begin_seq=11, mirror=past.survivor())
    assert follower.nonce_of(10) == 77
    other = MemoryMirror(1)
    for seq in range(1, 11):
        other.append(seq=seq, mark=78, epoch=1, header={}, body=[b"other"])
    anew = await _open(stream, begin_seq=11, mirror=other)
    assert anew.first_seq == 11  # its past is another log's
    for each in (log, follower, anew):
        await each.close()


@virtual
async def test_mirror_of_more_than_the_stream_has_is_lost_data() -> None:
    """A stream that ends before the mirror does has lost records: nothing is begun anew in silence."""
    stream = ScriptedStream()
    owner = await _own(stream)
    await asyncio.gather(*_append(owner, b"one", b"two"))
    mirror = MemoryMirror(1)
    follower = await _open(stream, mirror=mirror)
    await follower.wait_beyond(_WINDOW + 1)
    await owner.close()
    await follower.close()
    stream.lose_tail(1)
    with pytest.raises(StorageError, match="lost data"):
        await _open(stream, mirror=mirror.survivor())


@virtual
async def test_trim_purges_the_stream_and_late_readers_still_know_the_term() -> None:
    """The owner's trim purges, but for as many messages as tell the term to who begins at the floor."""
    stream = ScriptedStream()
    log = await _own(stream)
    await asyncio.gather(*_append(log, *[b"%d" % number for number in range(300)]))
    floor = _WINDOW + 101
    assert log.trim(floor) == floor == log.first_seq
    await asyncio.sleep(1)
    assert stream.first_seq == floor - _WINDOW
    with pytest.raises(GoneError, match=str(floor)):
        log.read(floor - 1)
    late = await _open(stream, begin_seq=floor)
    await late.wait_beyond(log.last_seq - 1)
    assert _data(late, floor) == [b"%d" % number for number in range(100, 300)]
    assert late.nonce_of(floor - 1) == log.nonce_of(floor)
    for begin_seq in (floor - 1, floor - _WINDOW, 1):
        with pytest.raises(GoneError):
            await _open(stream, begin_seq=begin_seq)
    log.trim(10**6)
    await asyncio.sleep(1)
    assert stream.num_moved == 0 and stream.first_seq <= log.last_seq
    await asyncio.gather(*_append(log, b"more"))
    await log.close()
    await late.close()


async def test_records_before_the_mirror_come_from_the_stream() -> None:
    """A read from before the mirror begins asks the stream, in a thread, and continues in the mirror."""
    stream = ScriptedStream()
    log = await _own(stream)
    await asyncio.gather(*_append(log, *[b"%d" % number for number in range(50)]))
    late = await _open(stream, begin_seq=_WINDOW + 30)
    await late.wait_beyond(log.last_seq - 1)
    assert late.first_seq == 1
    assert await asyncio.to_thread(_data, late, 1) == [b"%d" % number for number in range(50)]
    assert await asyncio.to_thread(_data, late, _WINDOW + 10) == [b"%d" % number for number in range(9, 50)]
    await log.close()
    await late.close()


@virtual
async def test_record_beyond_the_engines_bound_is_refused() -> None:
    """`max_payload_bytes` is what the engine takes; more is refused before it has a seq."""
    stream = ScriptedStream()
    log = await _own(stream)
    await asyncio.gather(*_append(log, bytes(log.max_payload_bytes - 10)))
    with pytest.raises(RequestError, match=str(log.max_payload_bytes)):
        log.append(epoch=1, header={}, body=[bytes(log.max_payload_bytes)])
    await log.close()


@virtual
async def test_buffers_may_change_once_the_ack_has_come() -> None:
    """The bytes are copied when they are sent: memory and mirror never see a caller's later changes."""
    stream = ScriptedStream()
    log = await _own(stream, mirror=MemoryMirror(1, disk_s=5))
    buffer = bytearray(b"before")
    await log.append(epoch=1, header={}, body=[memoryview(buffer)]).durable
    buffer[:] = b"after!"
    assert _data(log) == [b"before"]
    await asyncio.sleep(6)
    assert _data(log) == [b"before"] and log.outstanding_bytes < 4096  # heartbeats
    await log.close()


@virtual
async def test_acks_do_not_wait_for_the_mirror_but_memory_is_bounded() -> None:
    """A mirror whose disk hangs delays no ack; when too much waits for it, appends are refused."""
    stream = ScriptedStream()
    log = await _own(stream, mirror=MemoryMirror(1, disk_s=1000), config=UpdateLogConfig(max_pending_bytes=2 << 20))
    for _ in range(66):
        await asyncio.gather(*_append(log, bytes(1 << 19), bytes(1 << 19)))
    with pytest.raises(OverloadedError, match="mirror"):
        _append(log, b"more")
    await asyncio.sleep(1001)
    await asyncio.gather(*_append(log, b"more"))
    await log.close()


async def _put(stream: ScriptedStream, message: bytes) -> None:
    """Append a message as another process does, and let the log's connections be lost."""
    leader = stream.leader
    assert leader is not None
    stream.propose(leader, [message], leader.last_seq, lambda reply: None)
    await asyncio.sleep(0.1)
    stream.drop_connections()


@virtual
async def test_an_ack_at_another_place_stops_the_log() -> None:
    """An engine that puts a record at another seq than was asked for is not one to write to."""
    stream = ScriptedStream()
    log = await _own(stream)
    await asyncio.gather(*_append(log, b"one"))
    publish = ScriptedConnection.publish

    def unconditional(self: ScriptedConnection, message: Any, *, expected_last: int, on_reply: Any) -> None:
        publish(self, message, expected_last=None, on_reply=on_reply)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedConnection, "publish", unconditional)
        await _put(stream, b"a foreign message")
        waiting = _append(log, b"two")
        error = await log.wait_failed()
    assert isinstance(error, StorageError) and "does not honor expectations" in str(error)
    assert isinstance(waiting[0].exception(), StorageError)
    await log.close()


@virtual
async def test_own_record_with_other_contents_stops_the_log() -> None:
    """A record of our own term and place that we never wrote is no takeover: something is very wrong."""
    stream = ScriptedStream()
    log = await _own(stream)
    await asyncio.gather(*_append(log, b"one"))
    mark, seq = log.nonce_of(1), log.last_seq + 1
    assert mark is not None
    forged = encode_stream_note(StreamRecordKind.HEARTBEAT, term=1, mark=mark, seq=seq, owner="forged")
    await _put(stream, forged)
    _append(log, b"two")
    error = await log.wait_failed()
    assert isinstance(error, StorageError) and "other contents" in str(error)
    await log.close()


@virtual
async def test_a_late_record_at_the_place_of_ours_fences() -> None:
    """An owner whose place was taken by a late record of the one before gives up its term."""
    stream = ScriptedStream()
    log = await _own(stream)
    second = await _own(stream, "b")
    mark, seq = log.nonce_of(1), second.last_seq + 1
    assert mark is not None and second.term == 2
    late = encode_stream_note(StreamRecordKind.HEARTBEAT, term=1, mark=mark, seq=seq, owner="a")
    await _put(stream, late)
    waiting = _append(second, b"two")
    error = await second.wait_failed()
    assert isinstance(error, LogFencedError) and "late record of term 1" in str(error)
    assert isinstance(waiting[0].exception(), LogFencedError)
    await log.close()
    await second.close()


@virtual
async def test_a_record_that_was_removed_before_its_ack_fences() -> None:
    """If others have let go of our place in the stream, another owner has been there."""
    stream = ScriptedStream()
    log = await _own(stream)
    await asyncio.gather(*_append(log, b"one"))
    seq = log.last_seq + 1
    for _ in range(3):
        await _put(stream, b"a foreign message")
    stream.purge(seq + 2)
    _append(log, b"two")
    error = await log.wait_failed()
    assert isinstance(error, LogFencedError) and "removed before its ack" in str(error)
    await log.close()


@virtual
async def test_damage_at_the_place_of_an_unresolved_record_is_found() -> None:
    """A record that cannot be told apart from ours, because it is damaged, neither acks nor fences: it is damage."""
    stream = ScriptedStream()
    log = await _own(stream)
    await asyncio.gather(*_append(log, b"one"))
    await _put(stream, b"a foreign message")
    _append(log, b"two")
    error = await log.wait_failed()
    assert isinstance(error, CorruptionError)
    await log.close()


async def test_old_records_are_not_read_on_the_loop() -> None:
    """A read over the network on the loop itself would wait for ever, and is a bug."""
    stream = ScriptedStream()
    log = await _own(stream)
    late = await _open(stream, begin_seq=_WINDOW)
    with pytest.raises(AssertionError, match="in a thread"):
        late.read(1)
    await log.close()
    await late.close()


@virtual
async def test_closing_waits_for_acks_only_so_long() -> None:
    """With the engine away, closing gives pending records up after `close_s`; they may be in the log."""
    stream = ScriptedStream()
    log = await _own(stream)
    stream.elect(election_s=1000)
    waiting = _append(log, b"one")
    began_s = asyncio.get_running_loop().time()
    await log.close()
    assert 9 <= asyncio.get_running_loop().time() - began_s <= 15
    assert isinstance(waiting[0].exception(), UnavailableError)
    assert log.failed is None


@virtual
async def test_lost_replies_are_read_back() -> None:
    """Records whose acks were lost are found in the stream, and are there once."""
    stream = ScriptedStream(rng=random.Random(3))
    log = await _own(stream)
    stream.weather = Weather(lose_reply=0.3)
    bodies = [b"%d" % number for number in range(100)]
    await asyncio.gather(*_append(log, *bodies))
    stream.weather = Weather()
    assert _data(log) == bodies
    follower = await _open(stream)
    await follower.wait_beyond(log.last_seq - 1)
    assert _data(follower) == bodies
    await log.close()
    await follower.close()


async def test_mirror_in_files(tmp_path: Path) -> None:
    """`open` keeps its mirror in a directory, continues it, and begins one of another stream anew."""
    stream = ScriptedStream()
    owner = await JetStreamUpdateLog.open(ScriptedEngine(stream), tmp_path / "a", begin_seq=1)
    assert await owner.take_over(0, owner="a")
    await asyncio.gather(*_append(owner, b"one"))
    await owner.close()
    again = await JetStreamUpdateLog.open(ScriptedEngine(stream), tmp_path / "a", begin_seq=1)
    assert _data(again) == [b"one"]
    with pytest.raises(ConfigError, match="in use"):
        await JetStreamUpdateLog.open(ScriptedEngine(stream), tmp_path / "a", begin_seq=1)
    await again.close()
    other = ScriptedStream()
    rebuilt = await JetStreamUpdateLog.open(ScriptedEngine(other), tmp_path / "b", begin_seq=1)
    assert await rebuilt.take_over(0, owner="b")
    await asyncio.gather(*_append(rebuilt, b"two"))
    anew = await JetStreamUpdateLog.open(ScriptedEngine(other), tmp_path / "a", begin_seq=1)
    await anew.wait_beyond(_WINDOW)
    assert _data(anew) == [b"two"]
    await rebuilt.close()
    await anew.close()


def test_times_must_make_a_lease() -> None:
    """The lease ends before a standby opens, and heartbeats come within it."""
    with pytest.raises(ConfigError, match="lease_s"):
        StreamTimes(lease_s=5)
