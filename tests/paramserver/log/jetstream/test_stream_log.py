"""The log in a stream: following, taking over, appending, and what it does when the engine fails; in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memory_mirror import MemoryMirror
from scripted_stream import ScriptedConnection, ScriptedEngine, ScriptedStream, Weather
from text_scripts import Script, runs, scripts
from virtual_loop import virtual

from headrace.paramserver.log.interface import UpdateLogConfig, is_housekeeping
from headrace.paramserver.log.jetstream.appender import StreamTimes
from headrace.paramserver.log.jetstream.engine import StreamState
from headrace.paramserver.log.jetstream.stream_log import JetStreamUpdateLog
from headrace.paramserver.log.jetstream.terms import MAX_IN_FLIGHT
from headrace.schemas.errors import ConfigError, OverloadedError, StorageError, UnavailableError
from headrace.schemas.stream_records import StreamRecordKind, encode_stream_note, encode_stream_record

_WINDOW = MAX_IN_FLIGHT


class FullMirror(MemoryMirror):
    """On a disk that takes nothing."""

    def append(self, **record: Any) -> Any:
        raise StorageError("no space left on the disk")


class UnreadMirror(MemoryMirror):
    """On a disk that never syncs, and must not be read."""

    def read(self, from_seq: int, *, past_cache: bool = False) -> Any:
        raise AssertionError("the mirror was read")

    def append(self, **record: Any) -> Any:
        return replace(super().append(**record), durable=asyncio.get_running_loop().create_future())


_MIRRORS = {"full": FullMirror, "unread": UnreadMirror, "": MemoryMirror}


class Processes:
    """Processes of a shard, each with a log, on one stream. A number as a body is a size, of several each is a body."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.logs: dict[str, JetStreamUpdateLog] = {}
        self.engines: dict[str, ScriptedEngine] = {}
        self.mirrors: dict[str, MemoryMirror] = {}
        self._sent: dict[str, list[asyncio.Future[None]]] = {}
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._marks = itertools.count(101)
        self.stream()

    # What befalls the stream.

    def stream(self, *, begin: int = 1, lose_reply: float = 0.0) -> None:
        """Go on with a new stream, without its processes."""
        self.servers = ScriptedStream(begin_seq=begin, weather=Weather(lose_reply=lose_reply))
        self.engines.clear()

    def calm(self) -> None:
        self.servers.weather = Weather()

    def full(self) -> None:
        self.servers.is_full = True

    def room(self) -> None:
        self.servers.is_full = False

    def elect(self, election_s: float) -> None:
        self.servers.elect(election_s=election_s)

    def kill_leader(self, *, down: float, election: float) -> None:
        self.servers.kill_leader(down_s=down, election_s=election)

    def lose_tail(self, count: int) -> None:
        self.servers.lose_tail(count)

    def purge(self, before_seq: int) -> None:
        self.servers.purge(before_seq)

    async def drop(self) -> None:
        """Lose all connections, once what was put is committed."""
        await asyncio.sleep(0.1)
        self.servers.drop_connections()

    def damage(self, seq: int) -> None:
        message = self.servers.history[seq]
        self.servers.history[seq] = message[:-1] + bytes([message[-1] ^ 1])

    def put(self, kind: str, term: int = 0, body: str = "", *, previous: Any = None, **more: str) -> None:
        """Append a message as a process that is not here; `as` a process has its mark."""
        leader = self.servers.leader
        assert leader is not None
        seq, message = leader.last_seq + 1, b"a foreign message"
        mark = self.logs[more["as"]].nonce_of(1) if more else term
        names: Any = {"term": term, "mark": mark, "seq": seq}
        if kind == "data":
            names |= {"epoch": 1, "header": b"\x80", "body": [body.encode()]}
            message = encode_stream_record(kind=StreamRecordKind.DATA, **names)
        elif kind != "foreign":
            previous = None if previous is None else tuple(previous)
            message = encode_stream_note(StreamRecordKind[kind.upper()], owner=str(term), previous=previous, **names)
        self.servers.propose(leader, [message], seq - 1, lambda reply: None)

    def first(self) -> str:
        return f"the stream begins at {self.servers.first_seq}"

    def last(self) -> str:
        return f"the stream ends at {self.servers.last_seq}"

    def moved(self) -> str:
        """Return how many purges went beyond the last message."""
        return f"{self.servers.num_moved} moved its end"

    # What befalls the way to it.

    def engine(self, name: str) -> ScriptedEngine:
        return self.engines.setdefault(name, ScriptedEngine(self.servers))

    def cut(self, name: str) -> None:
        self.engine(name).is_cut = True
        self.lose(name)

    def uncut(self, name: str) -> None:
        self.engine(name).is_cut = False

    def refuse(self, name: str) -> None:
        """Refuse a process' credentials."""
        self.engine(name).is_unwelcome = True

    def admit(self, name: str) -> None:
        self.engine(name).is_unwelcome = False

    def lose(self, name: str) -> None:
        self.engine(name).lose()

    def baffle(self, name: str) -> None:
        """Let a process' next connection fail in a way that nobody has foreseen."""

        async def connect() -> ScriptedConnection:
            raise KeyError("state")

        self.engine(name).connect = connect  # type: ignore[method-assign]

    def forget_expectations(self) -> None:
        """Let the engine take messages wherever they come."""
        propose = self.servers.propose
        self.servers.propose = lambda leader, payloads, _, reply: propose(leader, payloads, None, reply)  # type: ignore[method-assign]

    # What processes do.

    def past(self, name: str, seqs: list[int], *, mark: int) -> None:
        """Give a process that is no more a mirror of a log in files."""
        mirror = self.mirrors[name] = MemoryMirror(seqs[0])
        for seq in seqs:
            mirror.append(epoch=1, header={}, body=[b"%d" % seq], source_mark=mark)

    async def open(
        self,
        name: str,
        *,
        begin: int = 1,
        needed: int | None = None,
        mirror: str = "",
        disk: str = "",
        disk_s: float = 0.0,
        pending: int | None = None,
        connection: type[ScriptedConnection] = ScriptedConnection,
    ) -> None:
        """Open a process' log, on what another process left of its mirror, or on an empty one."""
        self.engine(name).connection_type = connection  # type: ignore[misc]
        self.mirrors[name] = self.mirrors[mirror].survivor() if mirror else _MIRRORS[disk](begin, disk_s=disk_s)

        async def open_mirror(seq: int, *, anew: bool) -> MemoryMirror:
            if anew or not mirror:
                self.mirrors[name] = _MIRRORS[disk](seq, disk_s=disk_s)
            return self.mirrors[name]

        settings: Any = {"draw_mark": self._marks.__next__}
        settings |= {} if pending is None else {"config": UpdateLogConfig(max_pending_bytes=pending)}
        settings |= {} if needed is None else {"needed_seq": needed}
        self.logs[name] = await JetStreamUpdateLog.open_on(self.engine(name), open_mirror, begin_seq=begin, **settings)

    async def read_on(self, name: str) -> None:
        """Read to the stream's end."""
        await self.logs[name].wait_beyond(self.servers.last_seq - 1)

    async def take(self, name: str, at: int | None = None, *, above: int = 0) -> str:
        log, seq = self.logs[name], self.servers.last_seq if at is None else at
        return f"term {log.term}" if await log.take_over(seq, owner=name, above_term=above) else "refused"

    async def own(self, name: str, **settings: Any) -> None:
        """Open a log, read to the end and take over."""
        await self.open(name, **settings)
        await self.read_on(name)
        await self.take(name)

    def begin_take(self, name: str) -> None:
        self._waiting[name] = asyncio.ensure_future(self.take(name))

    def taken(self, name: str) -> str:
        return self._waiting[name].result() if self._waiting[name].done() else "not yet"

    def send(self, name: str, *bodies: Any) -> None:
        """Append records and do not wait for them."""
        self.sending(name, *bodies)

    def sending(self, name: str, *bodies: Any, by: int = 0) -> list[asyncio.Future[None]]:
        """Append records and return their futures; with `by`, so many bytes in records of that size."""
        data = [each for body in bodies for each in (body if isinstance(body, list) else [body])]
        if by:
            data = [by] * (data[0] // by)
        elif isinstance(bodies[0], list):
            data = [b"%d" % number for number in data]
        made = []
        for each in data:
            body = each.encode() if isinstance(each, str) else bytes(each)
            made.append(self.logs[name].append(epoch=1, header={"n": len(body)}, body=[body]).durable)
            self._sent.setdefault(name, []).append(made[-1])
        return made

    async def append(self, name: str, *bodies: Any, by: int = 0) -> None:
        """Append records and wait for their acks."""
        await asyncio.gather(*self.sending(name, *bodies, by=by))
        self._sent[name].clear()

    async def append_changing(self, name: str, before: str, after: str) -> None:
        """Append a record whose buffer changes once the ack has come."""
        buffer = bytearray(before.encode())
        await self.logs[name].append(epoch=1, header={}, body=[memoryview(buffer)]).durable
        buffer[:] = after.encode()

    def sent(self, name: str) -> str:
        """Return what became of records that were sent, and forget those that waited for nothing more."""
        sent = self._sent.pop(name, [])
        self._sent[name] = [each for each in sent if not each.done()]
        what = ["waits" if not each.done() else each.exception() for each in sent]
        counts = Counter(each if isinstance(each, str) else _class(each) if each else "acked" for each in what)
        return ", ".join(f"{count} {each}" for each, count in counts.items())

    def trim(self, name: str, before_seq: int, *, max_bytes: int | None = None) -> str:
        return f"begins at {self.logs[name].trim(before_seq, max_bytes=max_bytes)}"

    def listen(self, name: str) -> None:
        """Wait for the owner's silence."""
        began_s = self.loop.time()
        heard = self._waiting[name] = asyncio.ensure_future(self.logs[name].wait_silent())
        heard.add_done_callback(lambda _: setattr(heard, "took_s", self.loop.time() - began_s))

    def heard(self, name: str) -> str:
        heard = self._waiting[name]
        return f"silent after {heard.took_s:.1f} s" if heard.done() else "not silent"  # type: ignore[attr-defined]

    async def fail(self, name: str) -> str:
        """Return what has ended a log, and how long that took."""
        began_s = self.loop.time()
        error = await self.logs[name].wait_failed()
        return f"{_class(error)} after {self.loop.time() - began_s:.0f} s: {error}"

    async def close(self, name: str) -> str | None:
        began_s = self.loop.time()
        await self.logs[name].close()
        took_s = self.loop.time() - began_s
        return f"took {took_s:.0f} s" if took_s > 1 else None

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    # What processes say.

    def owned(self, name: str) -> None:
        self.logs[name].check_owned()

    def show(self, name: str) -> str:
        log = self.logs[name]
        failed = "" if log.failed is None else f", {_class(log.failed)}"
        owner = "the owner" if log.is_owner else f"owner {log.owner or 'unknown'}"
        return f"{log.first_seq}..{log.last_seq}, term {log.term}, {owner}{', full' * log.is_full}{failed}"

    def data(self, name: str, *, from_seq: int = 1) -> str:
        """Return the bodies of data records, numbers as ranges, long ones as their size."""
        records = self.logs[name].read(from_seq)
        bodies = [bytes(each.body) for each in records if not is_housekeeping(each.header)]
        if bodies and all(body.isdigit() for body in bodies):
            return runs(map(int, bodies))
        return " ".join(body.decode() if len(body) < 20 else f"<{len(body)}>" for body in bodies) or "nothing"

    def kinds(self, name: str) -> str:
        kinds = [each.header.get("note", "data") for each in self.logs[name].read(1)]
        return ", ".join(f"{len([*of])} {kind}" for kind, of in itertools.groupby(kinds))

    def marks(self, name: str, seqs: int | list[int]) -> str:
        found = [self.logs[name].nonce_of(seq) for seq in ([seqs] if isinstance(seqs, int) else seqs)]
        return " ".join(map(str, dict.fromkeys(found)))

    def mirror(self, name: str) -> str:
        mirror = self.mirrors[name]
        return f"the mirror has {mirror.first_seq}..{mirror.last_seq}"

    def metrics(self, name: str) -> str:
        log = self.logs[name]
        return f"{log.metrics.num_records} records, {log.stream_metrics.num_voids} void, {log.pending_bytes} bytes wait"

    def stalled(self, name: str) -> str:
        log = self.logs[name]
        return f"now {log.stalled_s:.1f} s, in all {log.stream_metrics.stalled_s:.1f} s"


def _class(error: BaseException | None) -> str:
    return type(error).__name__


@scripts(__file__, "stream_log")
@virtual
async def test_stream_log(script: Script) -> None:
    """Processes take over from each other, append and read, while servers, links and disks fail."""
    processes = Processes()
    await script.run_async(processes)
    processes.servers.heal()
    for log in processes.logs.values():
        await log.close()


class Mute(ScriptedConnection):
    """Questions that come while nobody leads are never answered."""

    async def state(self) -> StreamState:
        if self._stream.leader_of(self._number) is None:
            await asyncio.sleep(2)
            raise UnavailableError("no answer")
        return await super().state()


class Slow(ScriptedConnection):
    """Answers come after the standby's next questions, and several at a time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gate = asyncio.Event()

    async def state(self) -> StreamState:
        state = await super().state()
        if self.gate.is_set():
            self.gate = asyncio.Event()
        self._stream.loop.call_later(1.5, self.gate.set)  # for all that came before
        await self.gate.wait()
        return state


@pytest.mark.parametrize(("connection", "least_s", "most_s"), [(Mute, 4.0, 4.8), (Slow, 0.0, 8.0)])
@virtual
async def test_standby_hears_soon_that_its_owner_is_dead(connection: Any, least_s: float, most_s: float) -> None:
    """It waits from the first question on that a new leader answers; a slow leader is one all the same."""
    for election_s in (5.0, 5.5, 6.0, 6.5, 7.0):
        processes = Processes()
        await processes.own("a")
        await processes.open("b", connection=connection)
        await processes.read_on("b")
        await processes.close("a")
        began_s = processes.loop.time()
        if connection is Mute:
            processes.kill_leader(down=60, election=election_s)
            began_s += election_s
        await processes.logs["b"].wait_silent()
        assert least_s <= processes.loop.time() - began_s <= most_s
        await processes.close("b")


@virtual
async def test_waiting_for_silence_again_and_again_asks_the_leader_rarely() -> None:
    """A standby begins to wait anew behind each record; the stream's leader is not asked each time."""
    num_asked = 0

    class Counting(ScriptedConnection):
        async def state(self) -> StreamState:
            nonlocal num_asked
            num_asked += 1
            return await super().state()

    processes = Processes()
    await processes.own("a")
    await processes.open("b", connection=Counting)
    num_asked = 0
    for _ in range(200):
        processes.listen("b")
        await processes.append("a", "row")
        await processes.read_on("b")
        assert processes.heard("b") == "not silent"
        processes._waiting["b"].cancel()
    assert num_asked == 0
    await processes.close("a")
    await processes.logs["b"].wait_silent()
    await processes.close("b")


@virtual
async def test_a_busy_owner_keeps_its_lease_over_a_slow_link() -> None:
    """However much waits, no more is on its way than is acked while the lease lasts: reads go on."""

    class Narrow(ScriptedConnection):
        def put_on_the_wire(self, payloads: Any, expected: Any, on_reply: Any) -> None:
            size_bytes = sum(map(len, payloads))
            self._arrival_s = max(self._arrival_s, self._stream.loop.time()) + size_bytes / 6e6
            super().put_on_the_wire(payloads, expected, on_reply)

    processes, waiting = Processes(), list[asyncio.Future[None]]()
    await processes.own("a", connection=Narrow)
    for _ in range(150):
        with contextlib.suppress(OverloadedError):
            while True:
                waiting += processes.sending("a", 1_000_000)
        await asyncio.sleep(0.1)
        processes.owned("a")
    assert sum(each.done() for each in waiting) > 70
    await processes.close("a")
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_records_before_the_mirror_come_from_the_stream() -> None:
    """A read from before the mirror begins asks the stream, in a thread: on the loop it would wait for ever."""
    processes = Processes()
    await processes.own("a")
    await processes.append("a", [*range(50)])
    await processes.open("b", begin=_WINDOW + 30)
    await processes.read_on("b")
    assert processes.show("b").startswith("1..")
    for from_seq, expected in ((1, "0..49"), (_WINDOW + 10, "9..49")):
        assert await asyncio.to_thread(processes.data, "b", from_seq=from_seq) == expected
    with pytest.raises(AssertionError, match="in a thread"):
        processes.data("b")
    for name in "ab":
        await processes.close(name)


async def test_mirror_in_files(tmp_path: Path) -> None:
    """`open` keeps its mirror in a directory, continues it, and begins one of another stream anew."""
    processes = Processes()

    async def open_in(folder: str, name: str) -> None:
        log = await JetStreamUpdateLog.open(ScriptedEngine(processes.servers), tmp_path / folder, begin_seq=1)
        processes.logs[name] = log

    await open_in("a", "a")
    await processes.take("a", 0)
    await processes.append("a", "one")
    await processes.close("a")
    await open_in("a", "again")
    assert processes.data("again") == "one"
    with pytest.raises(ConfigError, match="in use"):
        await open_in("a", "another")
    await processes.close("again")
    processes.stream()
    await open_in("b", "rebuilt")
    await processes.take("rebuilt", 0)
    await processes.append("rebuilt", "two")
    await open_in("a", "anew")
    await processes.logs["anew"].wait_beyond(_WINDOW)
    assert processes.data("anew") == "two"
    for name in ("rebuilt", "anew"):
        await processes.close(name)


def test_times_must_make_a_lease() -> None:
    """The lease ends before a standby opens, and heartbeats come within it."""
    with pytest.raises(ConfigError, match="lease_s"):
        StreamTimes(lease_s=5)
