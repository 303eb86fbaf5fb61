"""A server's connection: malformed and slow peers, the bounds of a client, peers that are gone, and deadlines."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import struct
from typing import Any

import pytest
from fake_service import WAIT_S, batch, hello_request, read, serve
from loop_clock import Clock, ClockAhead
from raw_peer import LIMITS, MIB, call_frame, dial, frame_of, reframed

from headrace.paramserver.rpc import connection
from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.connection import Deadlines
from headrace.schemas.errors import OverloadedError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, encode_message

# Room for one batch of a megabyte at a time, and hardly any wait for it.
NARROW = dataclasses.replace(
    LIMITS, max_frame_bytes=2 * MIB, max_client_bytes=2 * MIB, max_inflight_bytes=2 * MIB, admission_timeout_s=0.05
)


MALFORMED = {
    "no length": struct.pack(">I", 0),
    "length over the limit": struct.pack(">I", 2**31 + 5),
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "garbage in a frame": struct.pack(">I", 20) + b"\xff" * 20,
    "a reply": call_frame("status", 1).replace(b"\x80\x01\x00\x01", b"\x80\x01\x00\x02"),
    "no request": frame_of(encode_message("hello", CALL, 1, idl.ParameterServer.hello_args())),
    "cut struct": reframed(call_frame("hello", 1, hello_request())[4:-10]),
    "bytes after the struct": reframed(call_frame("status", 1)[4:] + b"\0"),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
async def test_malformed_bytes_close_their_connection_and_no_other(data: bytes) -> None:
    """Malformed bytes end one connection, are counted, and disturb no other."""
    async with serve() as served, await served.connect() as client, dial(served) as raw:
        await raw.send(data)
        await raw.ended()
        await client.set_embeddings(batch(1))
        assert served.server.stats.num_malformed == 1


OTHER_PROTOCOLS = {
    "unframed Thrift": (call_frame("hello", 1, hello_request())[4:], "the peer speaks Thrift without frames"),
    "unframed Thrift, compact": (b"\x82\x21\x01\x05hello" + bytes(20), "the peer speaks Thrift without frames"),
    "HTTP": (b"OPTIONS / HTTP/1.1\r\n\r\n", "the peer speaks HTTP"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\n", "the peer speaks HTTP"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "the peer speaks TLS and this side does not"),
}


@pytest.mark.parametrize(("data", "name"), OTHER_PROTOCOLS.values(), ids=OTHER_PROTOCOLS.keys())
async def test_another_protocol_is_named_in_the_log(data: bytes, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes of another protocol close their connection, and one line says which it is and what to do."""
    async with serve() as served, dial(served) as raw:
        await raw.send(data)
        await raw.ended()
    (line,) = [message for message in caplog.messages if "malformed" in message]
    assert name in line and line.count(": ") >= 3


@pytest.mark.parametrize("name", ["garbage in a frame", "a reply", "no request", "cut struct"])
async def test_a_malformed_frame_keeps_no_room_of_its_client(name: str) -> None:
    """A malformed frame gives its room back; otherwise the client's share would shrink with each."""
    async with serve() as served, await served.connect(client="one") as client, dial(served, client="one") as raw:
        await raw.send(MALFORMED[name])
        await raw.ended()
        await client.status()
        assert (served.server.inflight_requests, served.server.inflight_bytes) == (0, 0)


async def test_past_its_bytes_a_client_is_not_read() -> None:
    """A client's bytes in flight stay within its bound; the rest waits in its own buffers, and all are served."""
    limits = dataclasses.replace(LIMITS, max_frame_bytes=2 * MIB, max_client_bytes=4 * MIB)
    async with serve(limits=limits) as served, await served.connect() as client:
        served.service.gate.clear()
        calls = [asyncio.create_task(client.set_embeddings(batch(seq, size_bytes=MIB))) for seq in range(12)]
        await served.service.wait_running(3)
        assert served.pool.lent_bytes <= limits.max_client_bytes
        served.service.gate.set()
        await asyncio.gather(*calls)
        assert served.service.begun == list(range(12))


async def test_past_its_requests_a_client_is_not_read() -> None:
    """A client's requests in flight stay within their bound."""
    limits = dataclasses.replace(LIMITS, max_client_requests=3)
    async with serve(limits=limits) as served, await served.connect() as client:
        served.service.gates["t"] = gate = asyncio.Event()
        calls = [asyncio.create_task(client.get_embeddings(read("t", bytes([n])))) for n in range(20)]
        await served.service.wait_running(3)
        assert served.server.inflight_requests == 3
        gate.set()
        assert [bytes((await c).weights) for c in calls] == [bytes([n]) for n in range(20)]


async def test_a_greedy_client_does_not_starve_another() -> None:
    """While one client has used up its share and keeps sending, another's batch is served."""
    limits = dataclasses.replace(LIMITS, max_frame_bytes=2 * MIB, max_client_bytes=4 * MIB, max_inflight_bytes=8 * MIB)
    async with serve(limits=limits) as served:
        served.service.gate.clear()
        greedy = [await served.connect(client="greedy") for _ in range(4)]
        pushes = [asyncio.create_task(c.set_embeddings(batch(n, size_bytes=MIB))) for n in range(5) for c in greedy]
        await served.service.wait_running(3)
        modest = await served.connect(client="modest")
        call = asyncio.create_task(modest.set_embeddings(batch(99, size_bytes=MIB)))
        await served.service.wait_running(4)
        assert served.service.begun[-1] == 99
        served.service.gate.set()
        await asyncio.gather(call, *pushes)
        for client in [*greedy, modest]:
            await client.close()


async def test_waiting_too_long_for_room() -> None:
    """A request without room in time gets an overloaded reply; its bytes are skipped, not kept."""
    limits = dataclasses.replace(NARROW, retry_after_s=0.25)
    async with serve(limits=limits) as served, await served.connect() as one, await served.connect() as two:
        served.service.gate.clear()
        first = asyncio.create_task(one.set_embeddings(batch(1, size_bytes=MIB)))
        await served.service.wait_running(1)
        with pytest.raises(OverloadedError) as error:
            await two.set_embeddings(batch(2, size_bytes=MIB))
        assert error.value.retry_after_s == 0.25
        assert served.server.stats.num_overloaded == 1
        served.service.gate.set()
        await first
        await two.set_embeddings(batch(3, size_bytes=MIB))
        assert served.service.begun == [1, 3]


async def test_long_frames_before_hello() -> None:
    """Before its hello a peer may only send frames as long as a hello."""
    limits = dataclasses.replace(LIMITS, max_hello_bytes=100_000)
    async with serve(limits=limits) as served:
        stranger = await served.connect(says_hello=False)
        await stranger.set_embeddings(batch(1, size_bytes=90_000))
        with pytest.raises(UnavailableError):
            await stranger.set_embeddings(batch(2, size_bytes=MIB))
        await stranger.close()
        assert served.server.stats.num_malformed == 1


async def test_unread_replies_are_bounded() -> None:
    """A client that does not read gets overloaded replies instead of long ones that pile up."""
    limits = dataclasses.replace(LIMITS, max_frame_bytes=8 * MIB, max_client_bytes=16 * MIB)
    async with serve(limits=limits) as served, dial(served, client="") as raw:
        served.service.reply_bytes = 7 * MIB
        await raw.send(b"".join(call_frame("getEmbeddings", n, read("t", b"x")) for n in range(1, 11)))
        answers = [await raw.frame() for _ in range(10)]
        assert sum(len(a) > MIB for a in answers) >= 2
        assert any(b"unread" in a for a in answers if len(a) < MIB)
        assert served.server.inflight_bytes == 0


SLOW = {
    "part of a length": b"\0\0",
    "part of a small frame": call_frame("status", 1)[:-1],
    "part of a long frame": struct.pack(">I", MIB) + b"x" * 100_000,
}


@pytest.mark.parametrize("data", SLOW.values(), ids=SLOW.keys())
async def test_a_frame_that_does_not_end(data: bytes) -> None:
    """A sender that drips loses its connection at the frame's deadline, and its buffer is free again."""
    limits = dataclasses.replace(LIMITS, frame_timeout_s=0.05)
    async with serve(limits=limits) as served, dial(served) as raw:
        await raw.send(data)
        await raw.ended()
        assert served.server.stats.num_timed_out == 1
        assert (served.server.inflight_bytes, served.server.inflight_requests, served.pool.lent_bytes) == (0, 0, 0)


@pytest.mark.parametrize("says_hello", [False, True])
async def test_idle_connections_are_closed(says_hello: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without requests ends at its deadline, before and after the hello."""
    clock = ClockAhead(monkeypatch)
    timeouts = {"hello_timeout_s": 100.0} if not says_hello else {"idle_timeout_s": 100.0}
    async with serve(limits=dataclasses.replace(LIMITS, **timeouts)) as served:
        client = await served.connect(says_hello=says_hello)
        await client.status()  # the server knows of the connection
        await clock.pass_by(101)
        await served.service.wait_gone(1)
        assert served.server.num_connections == 0
        with pytest.raises(UnavailableError):
            await client.status()
        await client.close()


async def test_a_connection_with_a_request_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The idle deadline does not run while a request is in flight."""
    clock = ClockAhead(monkeypatch)
    async with serve(limits=dataclasses.replace(LIMITS, idle_timeout_s=100.0)) as served:
        client = await served.connect()
        call, gate = await served.slow_read(client, timeout_s=1000.0)
        await clock.pass_by(240)
        gate.set()
        assert bytes((await call).weights) == b"1"
        await client.close()


async def test_a_peer_that_does_not_read() -> None:
    """A reply that is not read by its deadline ends the connection and frees its room."""
    limits = dataclasses.replace(LIMITS, write_timeout_s=0.05)
    async with serve(limits=limits) as served:
        served.service.reply_bytes = 32 * MIB
        sock = socket.create_connection((served.host, served.port))
        sock.sendall(call_frame("hello", 0, hello_request()) + call_frame("getEmbeddings", 1, read("t", b"x")))
        await served.service.wait_gone(1)
        sock.close()
        assert served.server.inflight_bytes == 0


async def test_half_closed_peer_is_gone() -> None:
    """A peer that half-closes is disconnected; its requests still run."""
    async with serve() as served, dial(served) as raw:
        served.service.gate.clear()
        await raw.send(call_frame("setEmbeddings", 1, batch(1)))
        raw.writer.write_eof()
        await raw.ended()
        await served.service.wait_running(1)
        assert len(served.service.gone) == 1


async def test_requests_go_on_when_their_peer_is_gone() -> None:
    """The service learns of a lost connection, and its running request goes on."""
    async with serve() as served:
        served.service.gate.clear()
        client = await served.connect()
        call = asyncio.create_task(client.set_embeddings(batch(1)))
        await served.service.wait_running(1)
        await client.close()
        with pytest.raises(UnavailableError):
            await call
        await served.service.wait_gone(1)
        (peer,) = served.service.gone
        assert not peer.is_connected
        served.service.gate.set()
        await served.service.wait_running(0)


async def test_a_second_hello_while_a_request_waits() -> None:
    """A request that gives up after a second hello leaves the line that it stood in."""
    async with (
        serve(limits=NARROW) as served,
        await served.connect(client="holder") as holder,
        dial(served, client="before") as raw,
    ):
        served.service.gate.clear()
        first = asyncio.create_task(holder.set_embeddings(batch(1, size_bytes=MIB)))
        await served.service.wait_running(1)
        hello, waits = hello_request(client="after"), batch(2, size_bytes=MIB)
        await raw.send(call_frame("hello", 2, hello) + call_frame("setEmbeddings", 3, waits))
        await raw.frame()
        assert b"no room" in await raw.frame()
        served.service.gate.set()
        await first
        await holder.set_embeddings(batch(3, size_bytes=MIB), timeout_s=WAIT_S)
        assert served.service.begun == [1, 3]
        assert served.server.inflight_requests == 0


async def test_malformed_bytes_behind_a_waiting_request() -> None:
    """Malformed bytes behind a request that waits for room end the connection in their turn."""
    async with (
        serve(limits=dataclasses.replace(LIMITS, max_client_requests=1)) as served,
        dial(served, client="") as raw,
    ):
        served.service.gates["t"] = gate = asyncio.Event()
        no_frame = struct.pack(">I", 2**31 + 5)
        await raw.send(call_frame("getEmbeddings", 2, read("t", b"1")) + call_frame("status", 3) + no_frame)
        await served.service.wait_running(1)
        assert served.server.stats.num_malformed == 0
        gate.set()
        await raw.ended()
        assert served.server.stats.num_malformed == 1


async def test_a_refused_frame_without_a_header() -> None:
    """A refused frame gets an error reply by its seqid; one without a header ends the connection."""
    limits = dataclasses.replace(LIMITS, max_client_requests=1, admission_timeout_s=0.05)
    async with serve(limits=limits) as served, dial(served, client="") as raw:
        served.service.gates["t"] = gate = asyncio.Event()
        await raw.send(call_frame("getEmbeddings", 2, read("t", b"1")) + MALFORMED["garbage in a frame"])
        await served.service.wait_running(1)
        await raw.ended()
        gate.set()
        assert served.server.stats.num_malformed == 1


async def test_a_refused_request_is_done_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection whose request was refused is idle again, and ends at its deadline."""
    clock = ClockAhead(monkeypatch)
    limits = dataclasses.replace(NARROW, idle_timeout_s=100.0)
    async with serve(limits=limits) as served, await served.connect() as one, await served.connect() as two:
        served.service.gate.clear()
        first = asyncio.create_task(one.set_embeddings(batch(1, size_bytes=MIB), timeout_s=1000.0))
        await served.service.wait_running(1)
        with pytest.raises(OverloadedError):
            await two.set_embeddings(batch(2, size_bytes=MIB))
        async with asyncio.timeout(WAIT_S):  # until the server has read past all of it
            while any(each._reader.is_mid_frame for each in served.server._context.connections):  # noqa: ASYNC110 (its)
                await asyncio.sleep(0)
        await clock.pass_by(101)
        await served.service.wait_gone(1)
        assert not first.done()
        served.service.gate.set()
        await first


class Watched:
    """Deadlines with the state that they ask for, and a manual clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
        self.clock = Clock()
        monkeypatch.setattr(connection.asyncio, "get_running_loop", lambda: self.clock)
        self.is_waiting = False
        self.is_stranger = False
        self.expired: list[tuple[float, bool]] = []
        self.deadlines = Deadlines(
            ServerLimits(**{"hello_timeout_s": 3.0, "frame_timeout_s": 5.0, "idle_timeout_s": 100.0} | limits),
            is_waiting=lambda: self.is_waiting,
            is_stranger=lambda: self.is_stranger,
            expire=lambda is_late: self.expired.append((self.clock.now_s - 1000.0, is_late)),
        )
        self.deadlines.watch()


def test_an_idle_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The idle time counts from the last activity."""
    watched = Watched(monkeypatch)
    watched.clock.advance(60)
    watched.deadlines.touch()
    watched.clock.advance(99)
    assert watched.expired == []
    watched.clock.advance(2)
    assert watched.expired == [(160.0, False)]


def test_a_stranger_has_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its hello a connection has only the time for that, even if clients may be idle forever."""
    watched = Watched(monkeypatch, idle_timeout_s=0.0)
    watched.is_stranger = True
    watched.deadlines.watch()
    watched.clock.advance(50)
    assert watched.expired == [(3.0, False)]


def test_idle_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an idle time of 0 a client's connection never ends, and no timer runs."""
    watched = Watched(monkeypatch, idle_timeout_s=0.0)
    watched.clock.advance(1e6)
    assert (watched.expired, watched.clock.timers) == ([], [])


@pytest.mark.parametrize("is_stranger", [False, True])
def test_a_long_frame_that_moves_on(monkeypatch: pytest.MonkeyPatch, is_stranger: bool) -> None:
    """After hello, each 64 KiB of a long frame restart its deadline; a drip does not."""
    watched = Watched(monkeypatch)
    watched.is_stranger = is_stranger
    for kib in range(0, 64 * 20, 16):
        watched.deadlines.touch()
        watched.deadlines.note_input(is_mid_frame=True, num_begun=1, num_moved=kib << 10)
        watched.clock.advance(1.2)
    assert watched.expired[:1] == ([(5.0, True)] if is_stranger else [])
    for moved in range(100):  # bytes, not KiB
        watched.deadlines.touch()
        watched.deadlines.note_input(is_mid_frame=True, num_begun=1, num_moved=(64 * 20 << 10) + moved)
        watched.clock.advance(0.1)
    assert watched.expired


def test_every_frame_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of frames, each begun as the last one ends, is not one slow frame."""
    watched = Watched(monkeypatch)
    for number in range(100):
        watched.deadlines.touch()
        watched.deadlines.note_input(is_mid_frame=True, num_begun=number, num_moved=0)
        watched.clock.advance(4)
    assert watched.expired == []


def test_pauses_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that waits for room has no deadline, and a new one when it goes on."""
    watched = Watched(monkeypatch)
    watched.deadlines.note_input(is_mid_frame=True, num_begun=1, num_moved=0)
    watched.is_waiting = True
    watched.deadlines.note_pause()
    watched.clock.advance(1000)
    assert watched.expired == []
    watched.is_waiting = False
    watched.deadlines.touch()
    watched.deadlines.note_input(is_mid_frame=True, num_begun=1, num_moved=0)
    watched.clock.advance(4.9)
    assert watched.expired == []
    watched.clock.advance(0.2)
    assert watched.expired == [(1005.0, True)]


def test_a_finished_connection_lingers_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that does not close is closed, and not counted as slow."""
    watched = Watched(monkeypatch)
    watched.deadlines.note_input(is_mid_frame=True, num_begun=1, num_moved=0)
    watched.deadlines.note_finish()
    watched.clock.advance(2)
    assert watched.expired == [(1.0, False)]


def test_after_the_end_nothing_fires(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is gone has no deadline."""
    watched = Watched(monkeypatch)
    watched.deadlines.cancel()
    watched.clock.advance(1e6)
    assert watched.expired == []
