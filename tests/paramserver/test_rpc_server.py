from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import socket
import struct
from typing import Any

import pytest
from fake_service import POISON, WAIT_S, FakeService, Served, batch, hello_request, read, serve

from headrace.paramserver.admission import ServerLimits
from headrace.paramserver.client import ParamServerClient
from headrace.paramserver.rpc_server import ThriftServer
from headrace.schemas.errors import (
    HeadraceError,
    OverloadedError,
    RequestError,
    SequenceGapError,
    UnavailableError,
    UnknownTableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, Segment, encode_message

MIB = 2**20
LIMITS = ServerLimits()


class Raw:
    """A peer that sends whatever bytes it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def frame(self) -> bytes:
        """Return the next frame's message."""
        async with asyncio.timeout(WAIT_S):
            (length,) = struct.unpack(">I", await self.reader.readexactly(4))
            return await self.reader.readexactly(length)

    async def ended(self) -> None:
        """Return when the server has closed this connection."""
        async with asyncio.timeout(WAIT_S):
            try:
                while await self.reader.read(MIB):
                    pass
            except ConnectionResetError:
                pass

    async def close(self) -> None:
        """Close."""
        self.writer.close()
        with contextlib.suppress(ConnectionResetError):
            await self.writer.wait_closed()


async def dial(served: Served) -> Raw:
    """Return a raw connection."""
    return Raw(*await asyncio.open_connection(served.host, served.port))


def reframed(message: bytes) -> bytes:
    """Return a frame of any bytes."""
    return struct.pack(">I", len(message)) + message


def frame_of(segments: list[Segment]) -> bytes:
    """Return a frame's bytes."""
    return reframed(b"".join(bytes(segment) for segment in segments))


def call_frame(name: str, seqid: int, request: Any = None) -> bytes:
    """Return a call's frame."""
    args = getattr(idl.ParameterServer, f"{name}_args")
    return frame_of(encode_message(name, CALL, seqid, args(request=request) if request is not None else args()))


async def test_calls_are_answered_in_any_order() -> None:
    """A read that waits does not hold up the ones behind it on its connection."""
    async with serve() as served, await served.connect() as client:
        served.service.gates["slow"] = gate = asyncio.Event()
        slow = asyncio.create_task(client.get_embeddings(read("slow", b"1")))
        await served.service.wait_running(1)
        assert bytes((await client.get_embeddings(read("fast", b"2"))).weights) == b"2"
        gate.set()
        assert bytes((await slow).weights) == b"1"


async def test_requests_of_a_connection_begin_in_their_order() -> None:
    """What a method does before it waits happens in the order in which the requests were sent."""
    async with serve() as served, await served.connect() as client:
        sizes = [10, MIB, 10, 20_000, 100_000, 10] * 4
        await asyncio.gather(*(client.set_embeddings(batch(seq, size_bytes=n)) for seq, n in enumerate(sizes)))
        assert served.service.begun == list(range(len(sizes)))


async def test_declared_errors_arrive_with_what_they_carry() -> None:
    """An error of the service is raised at the client as its class, with its fields."""
    async with serve() as served, await served.connect() as client:
        served.service.errors.update(
            gap=SequenceGapError("gap", expected_seq=7),
            full=OverloadedError("full", retry_after_s=1.5),
            table=UnknownTableError("no table"),
        )
        with pytest.raises(SequenceGapError) as gap:
            await client.get_embeddings(read("gap"))
        assert gap.value.expected_seq == 7
        with pytest.raises(OverloadedError) as full:
            await client.get_embeddings(read("full"))
        assert full.value.retry_after_s == 1.5
        with pytest.raises(UnknownTableError, match=r"^no table$"):
            await client.get_embeddings(read("table"))


async def test_a_bug_is_one_failed_call(caplog: pytest.LogCaptureFixture) -> None:
    """Any other exception is an INTERNAL answer and a traceback in the log; the connection goes on."""
    async with serve() as served, await served.connect() as client:
        served.service.errors["bug"] = ZeroDivisionError("secret detail")
        with pytest.raises(HeadraceError, match="ZeroDivisionError") as error:
            await client.get_embeddings(read("bug"))
        assert type(error.value) is HeadraceError
        assert "secret detail" not in str(error.value)
        await client.status()
        assert served.server.stats.num_failed == 1
    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert record.exc_info is not None


async def test_a_reply_that_cannot_be_encoded_is_a_failed_call() -> None:
    """A service that returns the wrong thing costs one INTERNAL answer."""

    class Wrong(FakeService):
        async def status(self, call: Any) -> Any:
            return idl.StatusReply(server_id="only")

    async with serve(Wrong()) as served, await served.connect() as client:
        with pytest.raises(HeadraceError, match="failed inside the server"):
            await client.status()
        await client.get_embeddings(read("t"))


async def test_unknown_method_is_answered_as_thrift_does() -> None:
    """A method that the IDL lacks gets a TApplicationException and the connection goes on."""
    async with serve() as served:
        raw = await dial(served)
        await raw.send(frame_of(encode_message("noSuch", CALL, 5, idl.ParameterServer.status_args())))
        answer = await raw.frame()
        assert answer[:4] == b"\x80\x01\x00\x03"
        assert b"noSuch" in answer
        await raw.send(call_frame("status", 6))
        assert (await raw.frame())[:4] == b"\x80\x01\x00\x02"
        await raw.close()


async def test_frames_may_arrive_byte_by_byte() -> None:
    """The cuts between segments mean nothing."""
    async with serve() as served:
        raw = await dial(served)
        for byte in call_frame("status", 1):
            await raw.send(bytes([byte]))
        assert b"fake" in await raw.frame()
        await raw.close()


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
    """Bytes that are no message end one connection, are counted, and disturb nobody."""
    async with serve() as served, await served.connect() as client:
        raw = await dial(served)
        await raw.send(data)
        await raw.ended()
        await raw.close()
        await client.set_embeddings(batch(1))
        assert served.server.stats.num_malformed == 1


async def test_held_frames_stay_and_count_as_in_flight() -> None:
    """A buffer that the service holds is not reused, and its bytes are counted until it is released."""
    async with serve() as served, await served.connect() as client:
        served.service.holds = True
        for seq in (1, 2):
            await client.set_embeddings(batch(seq, size_bytes=MIB))
        assert served.server.inflight_requests == 0
        assert served.server.inflight_bytes == served.pool.lent_bytes > 2 * MIB
        (first, release), (second, _) = served.service.held
        assert (bytes(first).count(1), bytes(second).count(2)) > (MIB, MIB)
        release()
        release()
        assert bytes(first[-100:]) == bytes([POISON]) * 100
        assert bytes(second).count(2) > MIB
        served.service.release_all()
        assert served.server.inflight_bytes == served.pool.lent_bytes == 0


async def test_frame_is_gone_when_the_method_has_returned() -> None:
    """Without `hold` the buffer is given back when the method returns."""
    async with serve() as served, await served.connect() as client:
        await client.set_embeddings(batch(1, size_bytes=MIB))
        assert (served.server.inflight_bytes, served.pool.lent_bytes) == (0, 0)


async def test_past_its_bytes_a_client_is_not_read() -> None:
    """A client's bytes in flight never pass its bound; the rest waits in its own buffers, and all are served."""
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
    """A client's requests in flight never pass their bound."""
    limits = dataclasses.replace(LIMITS, max_client_requests=3)
    async with serve(limits=limits) as served, await served.connect() as client:
        served.service.gates["t"] = gate = asyncio.Event()
        calls = [asyncio.create_task(client.get_embeddings(read("t", bytes([n])))) for n in range(20)]
        await served.service.wait_running(3)
        assert served.server.inflight_requests == 3
        gate.set()
        assert [bytes((await c).weights) for c in calls] == [bytes([n]) for n in range(20)]


async def test_a_greedy_client_does_not_starve_another() -> None:
    """While one client has used up its share and keeps pushing, another's batch is served."""
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


async def test_who_waits_too_long_for_room_is_told_when_to_retry() -> None:
    """A request that finds no room in time is answered as overloaded; its bytes are read past, never kept."""
    limits = dataclasses.replace(
        LIMITS,
        max_frame_bytes=2 * MIB,
        max_client_bytes=2 * MIB,
        max_inflight_bytes=2 * MIB,
        admission_timeout_s=0.05,
        retry_after_s=0.25,
    )
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


async def test_connections_are_bounded() -> None:
    """One connection too many is told so and closed, and the next one after a close is welcome."""
    async with serve(limits=dataclasses.replace(LIMITS, max_connections=2)) as served:
        one, two = await served.connect(), await served.connect()
        three = await served.connect(says_hello=False)
        with pytest.raises(OverloadedError, match="2 connections"):
            await three.hello(hello_request())
        await three.close()
        await two.close()
        await served.service.wait_gone(2)
        four = await served.connect()
        await one.close()
        await four.close()
        assert served.server.stats.num_connections_refused == 1


async def test_without_descriptors_the_server_tries_again(caplog: pytest.LogCaptureFixture) -> None:
    """When the system has nothing for another connection, those who come wait and are taken later."""

    class Listener(socket.socket):
        num_failures = 2

        def accept(self) -> Any:
            if self.num_failures:
                self.num_failures -= 1
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    listener = Listener()
    listener.bind(("127.0.0.1", 0))
    server = ThriftServer(FakeService(), limits=LIMITS)
    await server.start(listener)
    async with await ParamServerClient.connect(*listener.getsockname()) as client:
        await client.hello(hello_request())
    assert listener.num_failures == 0
    assert "too many open files" in caplog.text
    await server.close(drain_s=WAIT_S)


async def test_before_hello_long_frames_are_not_taken() -> None:
    """Who has not said hello may send only what a hello needs."""
    limits = dataclasses.replace(LIMITS, max_hello_bytes=100_000)
    async with serve(limits=limits) as served:
        stranger = await served.connect(says_hello=False)
        await stranger.set_embeddings(batch(1, size_bytes=90_000))
        with pytest.raises(UnavailableError):
            await stranger.set_embeddings(batch(2, size_bytes=MIB))
        await stranger.close()
        assert served.server.stats.num_malformed == 1


async def test_a_reply_over_the_frame_limit_is_an_error() -> None:
    """The service may return more than a frame holds: the client is told to ask for less."""
    limits = dataclasses.replace(LIMITS, max_frame_bytes=MIB)
    async with serve(limits=limits) as served, await served.connect() as client:
        served.service.reply_bytes = 2 * MIB
        with pytest.raises(RequestError, match="ask for less"):
            await client.get_embeddings(read("t", b"x"))
        served.service.reply_bytes = MIB // 2
        assert len((await client.get_embeddings(read("t", b"x"))).weights) == MIB // 2


async def test_unread_replies_are_bounded() -> None:
    """A client that asks and does not read gets overloaded answers in place of what would pile up."""
    limits = dataclasses.replace(LIMITS, max_frame_bytes=8 * MIB, max_client_bytes=16 * MIB)
    async with serve(limits=limits) as served:
        served.service.reply_bytes = 7 * MIB
        raw = await dial(served)
        await raw.send(call_frame("hello", 0, hello_request()))
        await raw.frame()
        await raw.send(b"".join(call_frame("getEmbeddings", n, read("t", b"x")) for n in range(1, 11)))
        answers = [await raw.frame() for _ in range(10)]
        assert sum(len(a) > MIB for a in answers) >= 2
        assert any(b"unread" in a for a in answers if len(a) < MIB)
        assert served.server.inflight_bytes == 0
        await raw.close()


SLOW = {
    "part of a length": b"\0\0",
    "part of a small frame": call_frame("status", 1)[:-1],
    "part of a long frame": struct.pack(">I", MIB) + b"x" * 100_000,
}


@pytest.mark.parametrize("data", SLOW.values(), ids=SLOW.keys())
async def test_a_frame_that_does_not_end_is_cut_off(data: bytes) -> None:
    """A slow-drip sender loses its connection at the frame's deadline, and its buffer is free again."""
    limits = dataclasses.replace(LIMITS, frame_timeout_s=0.05)
    async with serve(limits=limits) as served:
        raw = await dial(served)
        await raw.send(data)
        await raw.ended()
        await raw.close()
        assert served.server.stats.num_timed_out == 1
        assert (served.server.inflight_bytes, served.server.inflight_requests, served.pool.lent_bytes) == (0, 0, 0)


@pytest.mark.parametrize("says_hello", [False, True])
async def test_idle_connections_are_closed(says_hello: bool) -> None:
    """A connection without requests ends at its deadline, before and after the hello."""
    timeouts = {"hello_timeout_s": 0.05} if not says_hello else {"idle_timeout_s": 0.05}
    async with serve(limits=dataclasses.replace(LIMITS, **timeouts)) as served:
        client = await served.connect(says_hello=says_hello)
        await served.service.wait_gone(1)
        assert served.server.num_connections == 0
        with pytest.raises(UnavailableError):
            await client.status()
        await client.close()


async def test_a_connection_that_waits_for_its_answer_is_not_idle() -> None:
    """The idle deadline does not run while a request is in flight."""
    async with serve(limits=dataclasses.replace(LIMITS, idle_timeout_s=0.5)) as served:
        served.service.gates["slow"] = gate = asyncio.Event()
        client = await served.connect()
        call = asyncio.create_task(client.get_embeddings(read("slow", b"1")))
        await served.service.wait_running(1)
        asyncio.get_running_loop().call_later(1.2, gate.set)
        assert bytes((await call).weights) == b"1"
        await client.close()


async def test_a_peer_that_does_not_read_is_cut_off() -> None:
    """A reply that is not taken by its deadline ends the connection and frees what it held."""
    limits = dataclasses.replace(LIMITS, write_timeout_s=0.05)
    async with serve(limits=limits) as served:
        served.service.reply_bytes = 32 * MIB
        sock = socket.create_connection((served.host, served.port))
        sock.sendall(call_frame("hello", 0, hello_request()) + call_frame("getEmbeddings", 1, read("t", b"x")))
        await served.service.wait_gone(1)
        sock.close()
        assert served.server.inflight_bytes == 0


async def test_half_closed_peer_is_gone() -> None:
    """A peer that says that it sends no more is disconnected; what it asked for is done all the same."""
    async with serve() as served:
        served.service.gate.clear()
        raw = await dial(served)
        await raw.send(call_frame("setEmbeddings", 1, batch(1)))
        raw.writer.write_eof()
        await raw.ended()
        await served.service.wait_running(1)
        assert len(served.service.gone) == 1
        await raw.close()


async def test_requests_go_on_when_their_peer_is_gone() -> None:
    """A lost connection tells the service, and does not cut the request that it had begun."""
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


async def test_close_answers_what_is_in_flight() -> None:
    """A drain waits for begun requests, refuses new ones as unavailable, and lets nobody in."""
    async with serve() as served:
        served.service.gates["slow"] = gate = asyncio.Event()
        client = await served.connect()
        slow = asyncio.create_task(client.get_embeddings(read("slow", b"1")))
        await served.service.wait_running(1)
        closing = asyncio.create_task(served.server.close(drain_s=WAIT_S))
        await asyncio.sleep(0)  # lets it begin
        with pytest.raises(UnavailableError, match="stopping"):
            await client.set_embeddings(batch(1, size_bytes=MIB))
        with pytest.raises(UnavailableError, match=r"[Rr]efused"):
            await ParamServerClient.connect(served.host, served.port)
        assert not closing.done()
        gate.set()
        assert bytes((await slow).weights) == b"1"
        await closing
        await served.server.close(drain_s=0)
        assert served.server.num_connections == 0
        assert served.service.begun == []
        await client.close()


async def test_close_refuses_those_who_wait_for_room() -> None:
    """A request that was not admitted when the drain began is answered, not forgotten."""
    limits = dataclasses.replace(LIMITS, max_client_requests=1)
    async with serve(limits=limits) as served:
        served.service.gates["slow"] = gate = asyncio.Event()
        client = await served.connect()
        slow = asyncio.create_task(client.get_embeddings(read("slow", b"1")))
        await served.service.wait_running(1)
        waiting = asyncio.create_task(client.set_embeddings(batch(1)))
        other = await served.connect()  # its hello is answered after the other bytes have been read
        closing = asyncio.create_task(served.server.close(drain_s=WAIT_S))
        with pytest.raises(UnavailableError, match="stopping"):
            await waiting
        gate.set()
        await slow
        await closing
        await client.close()
        await other.close()


async def test_close_cancels_what_does_not_end(caplog: pytest.LogCaptureFixture) -> None:
    """Past the deadline of a drain the rest is cancelled and every connection closed."""
    async with serve() as served:
        served.service.gates["slow"] = asyncio.Event()
        client = await served.connect()
        slow = asyncio.create_task(client.get_embeddings(read("slow", b"1")))
        await served.service.wait_running(1)
        await asyncio.gather(*(served.server.close(drain_s=0.05) for _ in range(3)))
        with pytest.raises(UnavailableError):
            await slow
        assert served.service.num_running == 0
        assert served.server.num_connections == 0
        assert served.server.inflight_requests == 0
        await client.close()
    assert "1 requests unanswered" in caplog.text


async def test_close_before_start_and_cancelled_close() -> None:
    """A server that never started closes, and a cancelled `close` goes on by itself."""
    async with serve() as served:
        served.service.gates["slow"] = gate = asyncio.Event()
        client = await served.connect()
        slow = asyncio.create_task(client.get_embeddings(read("slow", b"1")))
        await served.service.wait_running(1)
        closing = asyncio.create_task(served.server.close(drain_s=WAIT_S))
        await asyncio.sleep(0)  # lets it begin
        with pytest.raises(UnavailableError, match="stopping"):
            await client.status()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        gate.set()
        await slow
        await served.server.close(drain_s=WAIT_S)
        await client.close()
    await type(served.server)(FakeService(), limits=LIMITS).close(drain_s=1)


async def test_a_client_that_changes_its_name_while_it_waits_leaves_the_line() -> None:
    """A request waits for room, a second hello makes its connection another client's, it gives up: all others go on."""
    limits = dataclasses.replace(
        LIMITS, max_frame_bytes=2 * MIB, max_client_bytes=2 * MIB, max_inflight_bytes=2 * MIB, admission_timeout_s=0.05
    )
    async with serve(limits=limits) as served, await served.connect(client="holder") as holder:
        served.service.gate.clear()
        first = asyncio.create_task(holder.set_embeddings(batch(1, size_bytes=MIB)))
        await served.service.wait_running(1)
        raw = await dial(served)
        await raw.send(call_frame("hello", 1, hello_request(client="before")))
        await raw.frame()
        hello, waits = hello_request(client="after"), batch(2, size_bytes=MIB)
        await raw.send(call_frame("hello", 2, hello) + call_frame("setEmbeddings", 3, waits))
        await raw.frame()
        assert b"no room" in await raw.frame()
        served.service.gate.set()
        await first
        await holder.set_embeddings(batch(3, size_bytes=MIB), timeout_s=WAIT_S)
        assert served.service.begun == [1, 3]
        assert served.server.inflight_requests == 0
        await raw.close()
