"""The small HTTP server: its replies, refusals and bounds."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.paramserver.system.http_server import HttpServer, Reply, Request


async def _hello(request: Request) -> Reply:
    return Reply(body=b"hello\n")


async def _broken(request: Request) -> Reply:
    raise ValueError("a bug")


async def _slow(request: Request) -> Reply:
    await asyncio.Event().wait()
    raise AssertionError


@contextlib.asynccontextmanager
async def _serving(**settings: Any) -> AsyncIterator[tuple[str, int]]:
    sock = socket.create_server(("127.0.0.1", 0))
    address = sock.getsockname()
    async with HttpServer(sock, {"/": _hello, "/broken": _broken, "/slow": _slow}, **settings):
        yield address


async def _ask(address: tuple[str, int], text: bytes) -> bytes:
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(text)
        try:
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost:9\r\n\r\n", 200),
        (b"GET /?x=/y HTTP/1.0\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost: [::1]:9\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 200),
        (b"GET /x HTTP/1.1\r\n\r\n", 404),
        (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"POST / HTTP/1.1\r\n\r\n", 405),
        (b"GET /broken HTTP/1.1\r\n\r\n", 500),
        (b"GET / HTTP/2\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"\0\0\0\x2a\x80\1\0\1", 400),  # a Thrift client, which waits for an answer
        (b"\x16\x03\1\2\0", 400),  # and one of TLS
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 10_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n", 403),
    ],
)
async def test_statuses(text: bytes, status: int) -> None:
    """Only fixed paths exist, and on loopback only requests for a loopback host are answered."""
    async with _serving() as address:
        answer = await _ask(address, text)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    if status == 500:
        assert b"bug" not in answer


async def test_ends_of_pages() -> None:
    """HEAD gets the same head as GET; incomplete requests and slow pages end at the deadline or the exit."""
    async with _serving() as address:
        with_body, without = [await _ask(address, b"%s / HTTP/1.1\r\n\r\n" % method) for method in (b"GET", b"HEAD")]
    assert with_body == without + b"hello\n"
    assert b"Content-Security-Policy: default-src 'none'" in without
    async with _serving(head_timeout_s=0.05) as address:
        assert await _ask(address, b"GET / HT") == b""
    async with _serving(timeout_s=0.05) as address:
        assert await _ask(address, b"GET /slow HTTP/1.1\r\n\r\n") == b""
    async with _serving() as address:
        asking = asyncio.create_task(_ask(address, b"GET /slow HTTP/1.1\r\n\r\n"))
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.read()
        writer.close()
    assert await asking == b""


async def test_a_head_has_its_time_from_the_connection_on() -> None:
    """A byte now and then does not keep a connection open."""
    async with _serving(head_timeout_s=0.3, timeout_s=600) as address:
        reader, writer = await asyncio.open_connection(*address)
        ended = asyncio.create_task(reader.read())
        async with asyncio.timeout(60):
            while not ended.done():
                with contextlib.suppress(ConnectionError):
                    writer.write(b"G")
                    await writer.drain()
                await asyncio.wait([ended], timeout=0.05)
        with contextlib.suppress(ConnectionError):
            assert await ended == b""
        writer.close()


async def test_the_oldest_without_a_head_makes_room() -> None:
    """When all places are taken, a new connection takes that of the oldest; one that is being answered is spared."""
    began = asyncio.Semaphore(0)

    async def slow_page(request: Request) -> Reply:
        began.release()
        return await _slow(request)

    sock = socket.create_server(("127.0.0.1", 0))
    address = sock.getsockname()
    async with HttpServer(sock, {"/": _hello, "/slow": slow_page}, max_connections=3), asyncio.TaskGroup() as group:
        answered = group.create_task(_ask(address, b"GET /slow HTTP/1.1\r\n\r\n"))
        await began.acquire()
        async with contextlib.AsyncExitStack() as stack:
            slow = [await stack.enter_async_context(_open(address)) for _ in range(10)]
            async with asyncio.timeout(60):
                assert (await _ask(address, b"GET / HTTP/1.1\r\n\r\n")).endswith(b"hello\n")
                for reader, _ in slow[:8]:
                    with contextlib.suppress(ConnectionError):
                        assert await reader.read() == b""
            # The last one is there still, and may go on.
            reader, writer = slow[-1]
            writer.write(b"TP/1.1\r\n\r\n")
            async with asyncio.timeout(60):
                assert (await reader.read()).endswith(b"hello\n")
        assert not answered.done()
        later = []
        for _ in range(3):
            later.append(group.create_task(_ask(address, b"GET /slow HTTP/1.1\r\n\r\n")))
            await began.acquire()
        assert await answered == b""  # the oldest has gone, as none waited for a head
        for task in later:
            task.cancel()


@contextlib.asynccontextmanager
async def _open(address: tuple[str, int]) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a connection on which half a head was sent."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET / HT")
    await writer.drain()
    yield reader, writer
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
