from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from fake_service import WAIT_S, batch, hello_request, read, serve
from held_ports import hold_ports
from loop_clock import Clock

from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.errors import (
    HeadraceError,
    OverloadedError,
    ProtocolError,
    ProtocolMismatchError,
    RequestError,
    UnavailableError,
)
from headrace.schemas.idl import error_to_idl, idl
from headrace.schemas.messages import REPLY, decode_header, encode_message

MIB = 2**20
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[ParamServerClient]:
    """Run a server that follows a script, and connect to it."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def follow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has left
        except BaseException as exc:
            ended.set_exception(exc)
            raise
        finally:
            writer.transport.abort()
            if not ended.done():
                ended.set_result(None)

    server = await asyncio.start_server(follow, "127.0.0.1", 0)
    async with server:
        client = await ParamServerClient.connect(*server.sockets[0].getsockname())
        try:
            yield client
        finally:
            await client.close()
            async with asyncio.timeout(WAIT_S):
                await ended


async def next_seqid(reader: asyncio.StreamReader) -> int:
    """Read one frame and return its seqid."""
    (length,) = struct.unpack(">I", await reader.readexactly(4))
    return decode_header(memoryview(await reader.readexactly(length))).seqid


def reply_frame(seqid: int, weights: bytes, *, name: str = "getEmbeddings") -> bytes:
    """Return the frame of an answer to getEmbeddings."""
    success = idl.GetEmbeddingsReply(presence=b"", weights=weights, states=[], seq=0)
    result = idl.ParameterServer.getEmbeddings_result(success=success)
    message = b"".join(bytes(s) for s in encode_message(name, REPLY, seqid, result))
    return struct.pack(">I", len(message)) + message


async def test_hello_tells_the_frame_limit() -> None:
    """A request that the server would not read is refused before a byte of it is sent."""
    async with serve() as served, await served.connect(says_hello=False) as client:
        await client.hello(hello_request())
        assert client.max_frame_bytes == served.service.limits.max_frame_bytes
        client.max_frame_bytes = MIB
        with pytest.raises(RequestError, match="a request of"):
            await client.set_embeddings(batch(1, size_bytes=MIB))
        await client.set_embeddings(batch(2))
        assert served.service.begun == [2]


async def test_nobody_there_is_unavailable_with_host_and_port() -> None:
    """A refused connection is one error that names the address."""
    port = hold_ports()
    expected = rf"127\.0\.0\.1:{port}: Connection refused; is the server running, and is this its port\?"
    with pytest.raises(UnavailableError, match=expected):
        await ParamServerClient.connect("127.0.0.1", port)


async def test_unknown_host_is_unavailable() -> None:
    """A name that does not resolve is an error that names it."""
    with pytest.raises(UnavailableError, match=r"no-such-host\.invalid:1.*; is the host's name right\?"):
        await ParamServerClient.connect("no-such-host.invalid", 1)


async def test_all_addresses_of_a_name_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with two addresses, at neither of which anybody listens, is told as one refusal."""
    texts = "[Errno 111] Connect call failed ('::1', 9, 0, 0), [Errno 111] Connect call failed ('127.0.0.1', 9)"

    async def create_connection(*_: Any, **__: Any) -> Any:
        raise OSError(f"Multiple exceptions: {texts}")  # as asyncio does

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", create_connection)
    with pytest.raises(UnavailableError, match=r"^no connection to localhost:9: Connection refused; is the server"):
        await ParamServerClient.connect("localhost", 9)


async def test_peers_that_are_no_servers() -> None:
    """One that never answers, one that hangs up, and one that speaks HTTP or TLS: each is told as what it may be."""
    request = hello_request()

    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with scripted(silent) as client:
        with pytest.raises(UnavailableError, match=r"no answer within 0\.05 s: what listens there hangs, or is no Hea"):
            await client.hello(request, timeout_s=0.05)

    async def hang_up(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)

    async with scripted(hang_up) as client:
        with pytest.raises(UnavailableError, match="before any answer; it is stopping, speaks TLS, or is no Headrace"):
            await client.hello(request)

    for answer, spoken in (
        (b"HTTP/1.1 400 Bad Request", "HTTP, not framed Thrift"),
        (b"\x15\x03\x03\0\2\2\x46", "TLS"),
    ):

        async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytes = answer) -> None:
            writer.write(answer)
            await reader.read()

        async with scripted(other) as client:
            with pytest.raises(ProtocolError, match=rf"^127\.0\.0\.1:\d+: the peer speaks {spoken}"):
                await client.hello(request)


async def test_deadline_leaves_the_connection_usable() -> None:
    """A call without an answer in time fails alone, and its late answer is dropped."""
    async with serve() as served, await served.connect() as client:
        served.service.gates["slow"] = gate = asyncio.Event()
        with pytest.raises(UnavailableError, match=r"getEmbeddings to .*: no answer within 0\.05 s"):
            await client.get_embeddings(read("slow"), timeout_s=0.05)
        gate.set()
        assert bytes((await client.get_embeddings(read("t", b"later"))).weights) == b"later"
        assert not client.is_closed
        assert served.server.num_connections == 1


class Heard:
    """Tells what a client's connection receives and sends, on a clock that stands still."""

    def __init__(self, client: ParamServerClient) -> None:
        self.clock = Clock()
        self.num_bytes = 0
        self.changed = asyncio.Event()
        self._protocol = client._protocol
        self._take = self._protocol.buffer_updated
        self._protocol.buffer_updated = self._count  # type: ignore[method-assign]
        self._resume = self._protocol.resume_writing
        self._protocol.resume_writing = self._note_taken  # type: ignore[method-assign]
        self._protocol.loop = self._protocol._writer._loop = self.clock  # type: ignore[assignment]

    def _count(self, nbytes: int) -> None:
        self._take(nbytes)
        self.num_bytes += nbytes
        self.changed.set()

    def _note_taken(self) -> None:
        self._resume()
        asyncio.get_running_loop().call_soon(self.changed.set)  # behind the writer, which notes it

    async def wait(self, num_bytes: int) -> None:
        """Return when so many bytes have come."""
        async with asyncio.timeout(WAIT_S):
            while self.num_bytes < num_bytes:
                self.changed.clear()
                await self.changed.wait()


@pytest.mark.parametrize("piece_bytes", [128 * 2**10, 1])
async def test_a_long_answer_that_moves_on_has_all_the_time_it_takes(piece_bytes: int) -> None:
    """A slow link ends no call, nor the calls behind it; one byte at a time is no moving on."""
    go_on = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seqids = [await next_seqid(reader) for _ in range(2)]
        frame, at = reply_frame(seqids[0], b"x" * MIB), 64 * 2**10
        writer.write(frame[:at])
        while at < len(frame) and not client.is_closed:
            await go_on.wait()
            go_on.clear()
            writer.write(frame[at : at + piece_bytes])
            at += piece_bytes
        writer.write(reply_frame(seqids[1], b"behind"))
        await reader.read()

    async with scripted(slow) as client:
        heard = Heard(client)
        calls = [asyncio.create_task(client.get_embeddings(read("t"), timeout_s=10)) for _ in range(2)]
        for turn in range(8):
            await heard.wait(64 * 2**10 + turn * piece_bytes)
            heard.clock.advance(9)
            go_on.set()
        if piece_bytes > 1:
            assert [len((await call).weights) for call in calls] == [MIB, len("behind")]
        else:
            for call in calls:
                with pytest.raises(UnavailableError, match="no answer within 10 s"):
                    await call
            await client.close()
            go_on.set()


async def test_a_long_request_that_moves_on_has_all_the_time_it_takes() -> None:
    """What the peer takes, however slowly, is not begun anew; one that takes nothing for long is given up."""
    take = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await take.wait()
            take.clear()
            reader._transport.resume_reading()  # type: ignore[attr-defined]
            await reader.readexactly(8 * MIB)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await take.wait()

    async with scripted(slow) as client:
        heard = Heard(client)
        call = await stalled(client)
        for _ in range(3):
            heard.clock.advance(50)
            heard.changed.clear()
            take.set()
            async with asyncio.timeout(WAIT_S):
                await heard.changed.wait()
        assert not call.done()
        heard.clock.advance(70)
        with pytest.raises(UnavailableError, match="no answer within 60 s"):
            await call
        assert client.is_closed
        take.set()


async def test_an_early_answer_does_not_let_a_request_wait_for_ever() -> None:
    """A server that refuses a frame, and takes nothing more of it, is given up at the deadline."""
    done = asyncio.Event()

    async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readexactly(4096)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        refusal = idl.ParameterServer.setEmbeddings_result(error=error_to_idl(OverloadedError("full", retry_after_s=1)))
        message = encode_message("setEmbeddings", REPLY, decode_header(memoryview(head)[4:]).seqid, refusal)
        body = b"".join(map(bytes, message))
        writer.write(struct.pack(">I", len(body)) + body)
        await done.wait()

    async with scripted(refuses) as client:
        heard = Heard(client)
        call = await stalled(client)
        await heard.wait(40)
        assert not call.done()
        heard.clock.advance(70)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(UnavailableError, match="no answer within 60 s"):
                await call
        assert client.is_closed
        done.set()


async def test_a_peer_that_ends_while_it_takes_a_frame_is_unavailable() -> None:
    """The connection is lost by the very write that the call waits for: an outage like any other."""
    closed = asyncio.Event()

    async def ends_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await closed.wait()
        writer.write_eof()
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        await reader.read()

    async with scripted(ends_early) as client:
        call = await stalled(client)
        closed.set()
        with pytest.raises(UnavailableError):
            await call
        assert client.is_closed


async def test_cancelled_call_leaves_the_connection_usable() -> None:
    """A call that is cancelled while it waits for its answer takes nothing with it."""
    async with serve() as served, await served.connect() as client:
        served.service.gates["slow"] = gate = asyncio.Event()
        calls = [asyncio.create_task(client.get_embeddings(read("slow", bytes([n])))) for n in range(3)]
        await served.service.wait_running(3)
        calls[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[1]
        gate.set()
        assert [bytes((await calls[n]).weights) for n in (0, 2)] == [b"\0", b"\2"]
        await client.status()


async def stalled(client: ParamServerClient) -> asyncio.Task[Any]:
    """Return a call whose long frame the server does not read to its end."""
    protocol, is_stalled = client._protocol, asyncio.Event()
    pause = protocol.pause_writing

    def pause_and_tell() -> None:
        pause()
        is_stalled.set()

    protocol.pause_writing = pause_and_tell  # type: ignore[method-assign]
    call = asyncio.create_task(client.set_embeddings(batch(1, size_bytes=60 * MIB)))
    async with asyncio.timeout(WAIT_S):
        await is_stalled.wait()
    return call


async def test_cancellation_in_mid_frame_closes_the_connection() -> None:
    """A frame that was cut leaves no connection behind that could be taken for a good one."""

    async def never_reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await closed.wait()

    closed = asyncio.Event()
    async with scripted(never_reads) as client:
        call = await stalled(client)
        behind = asyncio.create_task(client.get_embeddings(read("t")))
        await asyncio.sleep(0)  # lets it get in line
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(UnavailableError):
            await behind
        assert client.is_closed
        with pytest.raises(UnavailableError):
            await client.status()
        closed.set()


async def test_cancellation_before_the_first_byte_touches_nobody() -> None:
    """A call that is cancelled while another one's frame is written is never sent."""
    resume = asyncio.Event()
    seqids: list[int] = []

    async def reads_later(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await resume.wait()
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(2):
            seqids.append(await next_seqid(reader))
        writer.write(reply_frame(seqids[-1], b"answer"))
        await reader.read()

    async with scripted(reads_later) as client:
        long = await stalled(client)
        cancelled = asyncio.create_task(client.status())
        await asyncio.sleep(0)  # lets it get in line
        cancelled.cancel()
        last = asyncio.create_task(client.get_embeddings(read("t")))
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        resume.set()
        assert bytes((await last).weights) == b"answer"
        assert seqids == [1, 3]
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long


async def test_answers_may_come_in_any_order() -> None:
    """Each call gets the answer with its seqid."""

    async def backwards(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seqids = [await next_seqid(reader) for _ in range(5)]
        for seqid in reversed(seqids):
            writer.write(reply_frame(seqid, str(seqid).encode()))
        await reader.read()

    async with scripted(backwards) as client:
        answers = await asyncio.gather(*(client.get_embeddings(read("t")) for _ in range(5)))
        assert [bytes(answer.weights) for answer in answers] == [b"1", b"2", b"3", b"4", b"5"]


async def test_views_of_an_answer_stay_valid() -> None:
    """A reply's columns are not overwritten by the next replies."""
    async with serve() as served, await served.connect() as client:
        for size in (100, 100_000):
            served.service.reply_bytes = size
            answers = [await client.get_embeddings(read("t", bytes([n]))) for n in range(20)]
            assert [bytes(a.weights) for a in answers] == [bytes([n]) * size for n in range(20)]
            assert all(a.weights.readonly for a in answers)


async def test_frames_of_concurrent_calls_do_not_mix() -> None:
    """Long and short frames of many calls arrive whole, in the order of the calls."""
    async with serve() as served, await served.connect() as client:
        sizes = [3 * MIB, 5, 40_000, 16_384, 2 * MIB, 1] * 3
        await asyncio.gather(*(client.set_embeddings(batch(n, size_bytes=size)) for n, size in enumerate(sizes)))
        assert served.service.begun == list(range(len(sizes)))
        assert served.service.num_bytes == sum(sizes)


async def test_columns_of_any_kind_are_sent() -> None:
    """A column may be bytes, a bytearray, a view or an array, empty or not."""
    async with serve() as served, await served.connect() as client:
        request = batch(1)
        matrix = np.ones((100, 100), np.float32)
        for weights in (b"", b"12", bytearray(5000), memoryview(matrix), matrix, matrix[:0]):
            request.deltas[0].weights = weights
            await client.set_embeddings(request)
        assert served.service.num_bytes == 2 + 5000 + 2 * 40_000


BROKEN = {
    "a stranger's seqid": reply_frame(99, b""),
    "another method": reply_frame(1, b"", name="hello"),
    "an empty result": struct.pack(">I", 26) + b"\x80\x01\x00\x02\x00\x00\x00\x0dgetEmbeddings\x00\x00\x00\x01\x00",
    "garbage": struct.pack(">I", 20) + b"\xff" * 20,
    "a length over the limit": b"\xff\xff\xff\xff",
    "a call": reply_frame(1, b"").replace(b"\x80\x01\x00\x02", b"\x80\x01\x00\x01", 1),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
async def test_a_server_that_breaks_the_protocol_is_left(data: bytes) -> None:
    """Bytes that are no answer to this call are a `ProtocolError`, and the connection is closed."""

    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_seqid(reader)
        writer.write(data)
        await reader.read()

    async with scripted(breaks) as client:
        with pytest.raises(ProtocolError):
            await client.get_embeddings(read("t"))
        assert client.is_closed
        with pytest.raises(HeadraceError):
            await client.status()


async def test_a_lost_connection_fails_all_calls() -> None:
    """Every call in flight, and every later one, raises `UnavailableError`."""

    async def leaves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            await next_seqid(reader)

    async with scripted(leaves) as client:
        calls = [client.get_embeddings(read("t")) for _ in range(3)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [UnavailableError] * 3
        assert len({id(result) for result in results}) == 3
        with pytest.raises(UnavailableError):
            await client.status()


async def test_close_is_idempotent_and_fails_calls_in_flight() -> None:
    """`close` ends what is in flight, and twice is as good as once."""
    async with serve() as served:
        client = await served.connect()
        served.service.gates["slow"] = asyncio.Event()
        call = asyncio.create_task(client.get_embeddings(read("slow")))
        await served.service.wait_running(1)
        await asyncio.gather(client.close(), client.close())
        await client.close()
        with pytest.raises(UnavailableError, match="closed"):
            await call
        with pytest.raises(UnavailableError, match="closed"):
            await client.status()


async def test_older_server_is_a_version_mismatch() -> None:
    """A method that the server does not have says that it is older."""
    async with serve() as served, await served.connect() as client:
        del served.server._context.dispatcher._methods["status"]
        with pytest.raises(ProtocolMismatchError, match="no method status"):
            await client.status()
        await client.get_embeddings(read("t"))


async def test_seqids_wrap_and_are_not_reused_in_flight() -> None:
    """After 2³¹ - 1 comes 1, and a number that still waits for its answer is not given out again."""
    async with serve() as served, await served.connect() as client:
        served.service.gates["slow"] = gate = asyncio.Event()
        client._last_seqid = 2**31 - 2
        slow = asyncio.create_task(client.get_embeddings(read("slow", b"1")))
        await served.service.wait_running(1)
        await client.status()
        assert client._last_seqid == 1
        client._last_seqid = 2**31 - 2
        with pytest.raises(UnavailableError):
            await client.status()
        gate.set()
        assert bytes((await slow).weights) == b"1"
