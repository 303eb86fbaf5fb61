"""The client of one shard: failed connections, cancellation, and replies to the right calls."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import struct
from typing import Any

import pytest
from fake_service import WAIT_S, batch, hello_request, read, serve
from held_ports import hold_ports
from scripted_server import MIB, next_seqid, reply_frame, scripted, stalled

from headrace.paramserver.rpc import client as client_module
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.errors import (
    HeadraceError,
    ProtocolError,
    ProtocolMismatchError,
    RequestError,
    UnavailableError,
)


async def test_the_frame_limit_of_the_hello() -> None:
    """A request over the server's limit is refused before any byte is sent."""
    async with serve() as served, await served.connect(says_hello=False) as client:
        await client.hello(hello_request())
        assert client.max_frame_bytes == served.service.limits.max_frame_bytes
        client.max_frame_bytes = MIB
        with pytest.raises(RequestError, match="a request of"):
            await client.set_embeddings(batch(1, size_bytes=MIB))
        await client.set_embeddings(batch(2))
        assert served.service.begun == [2]


def test_a_loop_that_is_not_asyncios_connects() -> None:
    """A user's own loop, such as uvloop's, does not know how asyncio tries the addresses of a name."""
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, pytest.raises(UnavailableError):
        runner.run(ParamServerClient.connect("localhost", hold_ports()))


_AT_TWO = "[Errno 111] Connect call failed ('::1', 9, 0, 0), [Errno 111] Connect call failed ('127.0.0.1', 9)"
_REFUSED = r"Connection refused; is the server running, and is this its port\?$"


@pytest.mark.parametrize(
    ("host", "failure", "said"),
    [
        ("127.0.0.1", None, _REFUSED),
        ("gate", socket.gaierror(socket.EAI_NONAME, "Name unknown"), r"Name unknown; is the host's name right\?$"),
        ("gate", OSError(f"Multiple exceptions: {_AT_TWO}"), _REFUSED),  # as asyncio says it
        *((host, None, "is no name of a host$") for host in ("a..b", "a" * 64, "a\0b")),
    ],
    ids=["nobody listens", "unknown", "nobody at any address", "an empty label", "a long label", "a zero byte"],
)
async def test_what_is_said_of_a_failed_connection(
    host: str, failure: OSError | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one error that names the address and one reason, with one traceback."""

    async def fail(*_: Any, **__: Any) -> Any:
        raise failure

    if failure is not None:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", fail)
    port = hold_ports()
    with pytest.raises(UnavailableError, match=rf"^no connection to {re.escape(host)}:{port}: .*{said}") as caught:
        await ParamServerClient.connect(host, port)
    assert caught.value.__suppress_context__ and caught.value.__cause__ is None


async def test_a_silent_address_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next address of a name is tried soon, not when the first has used up the time."""
    port, look_up = hold_ports(hosts=("127.0.0.2", "127.0.0.1")), socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> Any:
        if host != "gate.test":
            return look_up(host, *args, **kwargs)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{number}", port)) for number in (2, 1)]

    with (
        socket.create_server(("127.0.0.2", port), backlog=0),
        socket.create_connection(("127.0.0.2", port)),  # fills the queue, and the kernel drops whoever comes now
    ):
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        with socket.create_server(("127.0.0.1", port)):
            async with await ParamServerClient.connect("gate.test", port, timeout_s=30.0) as client:
                assert not client.is_closed
        with pytest.raises(UnavailableError, match=r"within 0\.5 s: .*, or the name is not looked up in time$"):
            await ParamServerClient.connect("gate.test", port, timeout_s=0.5)
        with pytest.raises(UnavailableError, match=r"within 0\.1 s: the host is down, or a firewall is in between$"):
            await ParamServerClient.connect("127.0.0.2", port, timeout_s=0.1)


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (None, UnavailableError, r"no answer within 0\.05 s: what listens there hangs, or is no Hea"),
        (b"", UnavailableError, "before any answer; it is stopping, speaks TLS, or is no Headrace"),
        (b"HTTP/1.1 400 Bad Request", ProtocolError, r"^127\.0\.0\.1:\d+: the peer speaks HTTP, not framed Thrift"),
        (b"\x15\x03\x03\0\2\2\x46", ProtocolError, r"^127\.0\.0\.1:\d+: the peer speaks TLS"),
    ],
    ids=["silent", "hangs up", "HTTP", "TLS"],
)
async def test_peers_that_are_no_servers(answer: bytes | None, error: type[HeadraceError], said: str) -> None:
    """The error guesses what a peer is that is silent, hangs up, or speaks HTTP or TLS."""

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(answer or b"")
        if answer != b"":
            await reader.read()

    async with scripted(other) as client:
        with pytest.raises(error, match=said):
            await client.hello(hello_request(), timeout_s=0.05 if answer is None else WAIT_S)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, r"within 0\.1 s: the host is down, a firewall is in between, or what listens there hangs$"),
        (b"", "it hung up on the TLS handshake; turn TLS on or off on both sides$"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it does not speak TLS; turn TLS on or off on both sides$"),
    ],
    ids=["hangs", "hangs up", "answers in the clear"],
)
async def test_a_peer_without_tls(answer: bytes | None, said: str) -> None:
    """The error says that TLS is on at one side only, not that the connection was reset; a process may also hang."""

    ended = asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        if answer is None:
            await reader.read()
        writer.write(answer or b"")
        writer.close()
        await writer.wait_closed()
        ended.set()

    timeout_s = 0.1 if answer is None else WAIT_S
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(UnavailableError, match=rf"^no connection to 127\.0\.0\.1:{port}.*{said}"):
            await ParamServerClient.connect(host, port, timeout_s=timeout_s, ssl_context=ssl.create_default_context())
        await asyncio.wait_for(ended.wait(), WAIT_S)


async def test_a_peer_that_ends_inside_a_frame() -> None:
    """A connection lost by the write that a call waits for is `UnavailableError`."""
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
    """Cancelling a call that waits for its reply affects no other."""
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


async def test_cancellation_in_mid_frame_closes_the_connection() -> None:
    """After a partly sent frame the connection is closed."""

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
    """A call cancelled while another's frame is being written is never sent."""
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


async def test_many_calls() -> None:
    """Each call gets the reply with its seqid; when the connection is lost all fail, and every later one."""

    async def backwards(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seqids = [await next_seqid(reader) for _ in range(5)]
        for seqid in reversed(seqids):
            writer.write(reply_frame(seqid, str(seqid).encode()))
        await reader.read()

    async with scripted(backwards) as client:
        answers = await asyncio.gather(*(client.get_embeddings(read("t")) for _ in range(5)))
        assert [bytes(answer.weights) for answer in answers] == [b"1", b"2", b"3", b"4", b"5"]

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


async def test_views_of_an_answer_stay_valid() -> None:
    """The next replies do not overwrite a reply's columns."""
    async with serve() as served, await served.connect() as client:
        for size in (100, 100_000):
            served.service.reply_bytes = size
            answers = [await client.get_embeddings(read("t", bytes([n]))) for n in range(20)]
            assert [bytes(a.weights) for a in answers] == [bytes([n]) * size for n in range(20)]
            assert all(a.weights.readonly for a in answers)


BROKEN = {
    "a stranger's seqid": reply_frame(99, b""),
    "another method": reply_frame(1, b"", name="hello"),
    "an empty result": struct.pack(">I", 26) + b"\x80\x01\x00\x02\x00\x00\x00\x0dgetEmbeddings\x00\x00\x00\x01\x00",
    "garbage": struct.pack(">I", 20) + b"\xff" * 20,
    "a length over the limit": b"\xff\xff\xff\xff",
    "a call": reply_frame(1, b"").replace(b"\x80\x01\x00\x02", b"\x80\x01\x00\x01", 1),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
async def test_a_server_that_breaks_the_protocol(data: bytes) -> None:
    """Bytes that are no reply to this call are a `ProtocolError`, and the connection is closed."""

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


async def test_close_is_idempotent_and_fails_calls_in_flight() -> None:
    """`close` fails calls in flight, and a second one is harmless."""
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
    """An unknown method means that the server is older."""
    async with serve() as served, await served.connect() as client:
        del served.server._context.dispatcher._methods["status"]
        with pytest.raises(ProtocolMismatchError, match="no method status"):
            await client.status()
        await client.get_embeddings(read("t"))


async def test_a_server_that_owes_too_many_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many outstanding replies to abandoned calls close the connection."""
    monkeypatch.setattr(client_module, "_MAX_ABANDONED", 3)

    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with scripted(silent) as client:
        for number in range(4):
            assert not client.is_closed, number
            call = asyncio.create_task(client.get_embeddings(read("t")))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
        with pytest.raises(UnavailableError, match="owes 3 answers"):
            await client.get_embeddings(read("t"))


async def test_seqids_wrap_and_are_not_reused_in_flight() -> None:
    """After 2³¹ - 1 comes 1, and a seqid in flight is not reused."""
    async with serve() as served, await served.connect() as client:
        client._last_seqid = 2**31 - 2
        slow, gate = await served.slow_read(client)
        await client.status()
        assert client._last_seqid == 1
        client._last_seqid = 2**31 - 2
        with pytest.raises(UnavailableError):
            await client.status()
        gate.set()
        assert bytes((await slow).weights) == b"1"
