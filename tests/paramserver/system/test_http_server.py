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
    async with _serving(timeout_s=0.05) as address:
        assert await _ask(address, b"GET / HT") == b""
        assert await _ask(address, b"GET /slow HTTP/1.1\r\n\r\n") == b""
    async with _serving() as address:
        asking = asyncio.create_task(_ask(address, b"GET /slow HTTP/1.1\r\n\r\n"))
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.read()
        writer.close()
    assert await asking == b""


async def test_connections_are_bounded() -> None:
    """One connection too many is closed at once; there is room again when one has ended."""
    async with _serving(max_connections=1) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HT")
        await writer.drain()
        async with asyncio.timeout(60):
            while await _ask(address, b"GET / HTTP/1.1\r\n\r\n"):
                pass  # until the first one is counted
        writer.write(b"TP/1.1\r\n\r\n")
        async with asyncio.timeout(60):
            assert (await reader.read()).endswith(b"hello\n")
        writer.close()
        await writer.wait_closed()
        async with asyncio.timeout(60):
            while not await _ask(address, b"GET / HTTP/1.1\r\n\r\n"):
                pass
