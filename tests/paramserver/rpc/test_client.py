"""The client of one shard: failed connections, cancellation, and replies to the right calls."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from typing import Any

import numpy as np
import pytest
from fake_service import batch, hello_request, read, serve
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


async def test_connection_refused() -> None:
    """A refused connection is one error that names the address, with one traceback."""
    port = hold_ports()
    expected = rf"127\.0\.0\.1:{port}: Connection refused; is the server running, and is this its port\?"
    with pytest.raises(UnavailableError, match=expected) as caught:
        await ParamServerClient.connect("127.0.0.1", port)
    assert caught.value.__suppress_context__ and caught.value.__cause__ is None


async def test_unknown_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names a host that does not resolve."""

    def getaddrinfo(*_: Any, **__: Any) -> Any:  # a real resolver may take longer than the call
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(UnavailableError, match=r"no-such-host\.invalid:1.*; is the host's name right\?"):
        await ParamServerClient.connect("no-such-host.invalid", 1)


def _resolve_to(monkeypatch: pytest.MonkeyPatch, addresses: dict[str, list[str]]) -> None:
    """Resolve some names to IPv4 addresses, and all others as usual."""
    look_up = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        if host not in addresses:
            return look_up(host, port, *args, **kwargs)
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (at, port)) for at in addresses[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


async def test_a_silent_address_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next address of a name is tried soon, not when the first has used up the time."""
    port = hold_ports(hosts=("127.0.0.2", "127.0.0.1"))
    with (
        socket.create_server(("127.0.0.2", port), backlog=0),
        socket.create_connection(("127.0.0.2", port)),  # fills the queue, and the kernel drops whoever comes now
    ):
        _resolve_to(monkeypatch, {"gate.test": ["127.0.0.2", "127.0.0.1"]})
        with socket.create_server(("127.0.0.1", port)):
            async with await ParamServerClient.connect("gate.test", port, timeout_s=30.0) as client:
                assert not client.is_closed
        with pytest.raises(UnavailableError, match=r"within 0\.5 s: .*, or the name is not looked up in time$"):
            await ParamServerClient.connect("gate.test", port, timeout_s=0.5)
        with pytest.raises(UnavailableError, match=r"within 0\.1 s: the host is down, or a firewall is in between$"):
            await ParamServerClient.connect("127.0.0.2", port, timeout_s=0.1)


async def test_a_server_that_hangs() -> None:
    """A hanging process is one possible reason with TLS; without TLS the kernel connects for it."""
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        await (await ParamServerClient.connect(*hanging.getsockname(), timeout_s=30.0)).close()
        expected = r"within 0\.1 s: the host is down, a firewall is in between, or what listens there hangs$"
        with pytest.raises(UnavailableError, match=expected):
            await ParamServerClient.connect(
                *hanging.getsockname(), timeout_s=0.1, ssl_context=ssl.create_default_context()
            )


async def test_a_name_is_looked_up_for_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that returns under its name at another address is found there."""
    addresses = {"gate.test": ["127.0.0.1"]}
    _resolve_to(monkeypatch, addresses)
    port = hold_ports(hosts=("127.0.0.1", "127.0.0.2"))
    with socket.create_server(("127.0.0.1", port)):
        await (await ParamServerClient.connect("gate.test", port)).close()
        with socket.create_server(("127.0.0.2", port)) as after:
            addresses["gate.test"] = ["127.0.0.2"]
            async with await ParamServerClient.connect("gate.test", port):
                after.settimeout(10.0)
                after.accept()[0].close()


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "a\0b"])
async def test_an_impossible_host_name(host: str) -> None:
    """A host from a server's shard map that is no name is our error, not Python's."""
    with pytest.raises(UnavailableError, match=r"is no name of a host$"):
        await ParamServerClient.connect(host, 1)


async def test_all_addresses_of_a_name_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nobody listens at any address of a name, the error is one refusal."""
    texts = "[Errno 111] Connect call failed ('::1', 9, 0, 0), [Errno 111] Connect call failed ('127.0.0.1', 9)"

    async def create_connection(*_: Any, **__: Any) -> Any:
        raise OSError(f"Multiple exceptions: {texts}")  # as asyncio does

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", create_connection)
    with pytest.raises(UnavailableError, match=r"^no connection to localhost:9: Connection refused; is the server"):
        await ParamServerClient.connect("localhost", 9)


async def test_peers_that_are_no_servers() -> None:
    """The error guesses what a peer is that is silent, hangs up, or speaks HTTP or TLS."""
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


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", "it hung up on the TLS handshake; turn TLS on or off on both sides"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it does not speak TLS; turn TLS on or off on both sides"),
    ],
    ids=["hangs up", "answers in the clear"],
)
async def test_a_peer_without_tls(answer: bytes, expected: str) -> None:
    """The error says that TLS is on at one side only, not that the connection was reset."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(UnavailableError, match=rf"^no connection to 127\.0\.0\.1:{port}: {expected}$"):
            await ParamServerClient.connect(host, port, ssl_context=ssl.create_default_context())


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


async def test_answers_may_come_in_any_order() -> None:
    """Each call gets the reply with its seqid."""

    async def backwards(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seqids = [await next_seqid(reader) for _ in range(5)]
        for seqid in reversed(seqids):
            writer.write(reply_frame(seqid, str(seqid).encode()))
        await reader.read()

    async with scripted(backwards) as client:
        answers = await asyncio.gather(*(client.get_embeddings(read("t")) for _ in range(5)))
        assert [bytes(answer.weights) for answer in answers] == [b"1", b"2", b"3", b"4", b"5"]


async def test_views_of_an_answer_stay_valid() -> None:
    """The next replies do not overwrite a reply's columns."""
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
