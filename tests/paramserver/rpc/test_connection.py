"""A server's connection: malformed and slow peers, the bounds of a client, peers that are gone, and deadlines."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import struct

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
    """Malformed bytes end one connection, are counted, keep no room of their client, and disturb no other."""
    async with serve() as served, await served.connect(client="one") as client, dial(served, client="one") as raw:
        await raw.send(data)
        await raw.ended()
        await client.set_embeddings(batch(1))
        assert served.server.stats.num_malformed == 1
        assert (served.server.inflight_requests, served.server.inflight_bytes) == (0, 0)


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


async def test_bounds_of_a_peer() -> None:
    """A client's requests in flight have a bound; before its hello a peer may only send frames as long as one."""
    limits = dataclasses.replace(LIMITS, max_client_requests=3)
    async with serve(limits=limits) as served, await served.connect() as client:
        served.service.gates["t"] = gate = asyncio.Event()
        calls = [asyncio.create_task(client.get_embeddings(read("t", bytes([n])))) for n in range(20)]
        await served.service.wait_running(3)
        assert served.server.inflight_requests == 3
        gate.set()
        assert [bytes((await c).weights) for c in calls] == [bytes([n]) for n in range(20)]
    limits = dataclasses.replace(LIMITS, max_hello_bytes=100_000)
    async with serve(limits=limits) as served:
        stranger = await served.connect(says_hello=False)
        await stranger.set_embeddings(batch(1, size_bytes=90_000))
        with pytest.raises(UnavailableError):
            await stranger.set_embeddings(batch(2, size_bytes=MIB))
        await stranger.close()
        assert served.server.stats.num_malformed == 1


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
    "part of a stranger's long frame": struct.pack(">I", MIB) + b"x" * 10_000,
    "part of a long frame": call_frame("setEmbeddings", 1, batch(1, size_bytes=900_000))[:100_000],
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
    """A connection without requests ends at its deadline, before and after the hello; not while one is in flight."""
    clock = ClockAhead(monkeypatch)
    timeouts = {"hello_timeout_s": 100.0} if not says_hello else {"idle_timeout_s": 100.0}
    async with serve(limits=dataclasses.replace(LIMITS, **timeouts)) as served:
        client = await served.connect(says_hello=says_hello)
        call, gate = await served.slow_read(client, timeout_s=1000.0)
        await clock.pass_by(240)
        gate.set()
        assert bytes((await call).weights) == b"1"
        await clock.pass_by(101)
        await served.service.wait_gone(1)
        assert served.server.num_connections == 0
        with pytest.raises(UnavailableError):
            await client.status()
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


@pytest.mark.parametrize("is_half", [False, True])
async def test_requests_go_on_when_their_peer_is_gone(is_half: bool) -> None:
    """The service learns of a lost connection, also of one closed by half; its running request goes on."""
    async with serve() as served, dial(served) as raw:
        served.service.gate.clear()
        await raw.send(call_frame("setEmbeddings", 1, batch(1)))
        await served.service.wait_running(1)
        raw.writer.write_eof() if is_half else raw.writer.transport.abort()
        await served.service.wait_gone(1)
        (peer,) = served.service.gone
        assert not peer.is_connected and served.service.num_running == 1
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


@pytest.mark.parametrize(
    ("behind", "timeout_s"),
    [(call_frame("status", 3) + struct.pack(">I", 2**31 + 5), WAIT_S), (MALFORMED["garbage in a frame"], 0.05)],
    ids=["malformed, behind one that waits", "refused, and without a header"],
)
async def test_malformed_bytes_behind_a_request(behind: bytes, timeout_s: float) -> None:
    """Malformed bytes behind a request that waits for room end the connection in their turn.

    A refused frame gets an error reply by its seqid; one without a header ends the connection too.
    """
    limits = dataclasses.replace(LIMITS, max_client_requests=1, admission_timeout_s=timeout_s)
    async with serve(limits=limits) as served, dial(served, client="") as raw:
        served.service.gates["t"] = gate = asyncio.Event()
        await raw.send(call_frame("getEmbeddings", 2, read("t", b"1")) + behind)
        await served.service.wait_running(1)
        if timeout_s == WAIT_S:
            assert served.server.stats.num_malformed == 0
            gate.set()
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


# Seconds pass in between. `f1+64` is input of the first frame, of which 64 KiB have moved; `wait` is for room.
_DEADLINES = {
    "the idle time counts from the last activity": ("60 touch 99 2", "160 idle"),
    "before its hello a connection has only the time for that": ("stranger 50", "3 idle"),
    "which its calls renew": ("stranger 2 touch 4", "5 idle"),
    "even if clients may be idle for ever": ("idle0 stranger 50", "3 idle"),
    "an idle time of 0 is for ever": ("idle0 1000000", ""),
    "every frame has its own time": ("f1 4 f2 4 f3 4 f4 4", ""),
    "a long frame may take long while it moves on": ("f1 4 f1+64 4 f1+128 4 f1+192 4", ""),
    "but not before hello": ("stranger f1 4 f1+64 4", "5 late"),
    "nor when it stops": ("f1 4 f1+64 4 f1+65 4", "9 late"),
    "a drip is no progress": ("f1 2 f1+1 2 f1+2 2", "5 late"),
    "a frame that waits for room has no deadline": ("f1 wait 1000", ""),
    "and a new one when it goes on": ("f1 wait 1000 go f1 4", ""),
    "which counts again": ("f1 wait 1000 go f1 4 2", "1005 late"),
    "a peer that does not close when all is sent is closed, and is not slow": ("f1 finish 2", "1 idle"),
    "a connection that is gone has no deadline": ("cancel 1000000", ""),
}


@pytest.mark.parametrize(("script", "expected"), _DEADLINES.values(), ids=_DEADLINES.keys())
def test_deadlines(script: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection ends at its deadline for the hello, for the next part of a frame or for idleness."""
    clock, states, expired = Clock(), dict.fromkeys(("stranger", "wait"), False), list[str]()
    monkeypatch.setattr(connection.asyncio, "get_running_loop", lambda: clock)
    idle_timeout_s = 0.0 if script.startswith("idle0") else 100.0
    deadlines = Deadlines(
        ServerLimits(hello_timeout_s=3.0, frame_timeout_s=5.0, idle_timeout_s=idle_timeout_s),
        is_waiting=lambda: states["wait"],
        is_stranger=lambda: states["stranger"],
        expire=lambda is_late: expired.append(f"{clock.now_s - 1000.0:g} {'late' if is_late else 'idle'}"),
    )
    deadlines.watch()
    for word in script.removeprefix("idle0 ").split():
        if word.isdigit():
            clock.advance(int(word))
        elif word in states:
            states[word] = True
            deadlines.note_pause() if word == "wait" else deadlines.watch()
        elif word == "go":
            states["wait"] = False
        elif word in ("finish", "cancel"):
            deadlines.note_finish() if word == "finish" else deadlines.cancel()
        else:
            deadlines.touch()
            if word != "touch":
                number, _, kib = word[1:].partition("+")
                deadlines.note_input(is_mid_frame=True, num_begun=int(number), num_moved=int(kib or 0) << 10)
    assert expired == [expected] * bool(expected)
