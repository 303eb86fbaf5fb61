"""A server accepts connections up to its limit, and drains on close."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import socket
from typing import Any

import pytest
from fake_service import WAIT_S, FakeService, batch, hello_request, serve
from raw_peer import LIMITS, MIB, call_frame, dial

from headrace.paramserver.rpc import connection
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.server import ThriftServer
from headrace.schemas.errors import OverloadedError, UnavailableError


async def test_connections_are_bounded() -> None:
    """One connection too many gets an error reply; there is room again after a close."""
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


@pytest.mark.parametrize("protocol", [0, socket.IPPROTO_TCP], ids=["any protocol", "TCP"])
async def test_replies_do_not_wait_for_the_ack_of_earlier_bytes(protocol: int) -> None:
    """Every accepted connection sends at once, however its listener was made."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        server, port = ThriftServer(FakeService(), limits=LIMITS), listener.getsockname()[1]
        await server.start(listener)
        async with await ParamServerClient.connect("127.0.0.1", port, timeout_s=WAIT_S) as client:
            await client.hello(hello_request(), timeout_s=WAIT_S)
            (accepted,) = server._context.connections
            sock = accepted._transport.get_extra_info("socket")  # type: ignore[union-attr]
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await server.close(drain_s=1)


async def test_input_of_a_refused_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Input on a refused connection is skipped, so that its end is noticed."""
    monkeypatch.setattr(connection, "_LINGER_S", 10 * WAIT_S)
    async with serve(limits=dataclasses.replace(LIMITS, max_connections=1)) as served, await served.connect():
        async with dial(served, client="") as raw:
            await raw.send(call_frame("hello", 2, hello_request()))
        await served.service.wait_gone(1)


async def test_ipv4_peers_of_a_dual_stack_socket(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An IPv4 peer has its plain address, not the mapped one."""
    server = ThriftServer(FakeService(), limits=LIMITS)
    sock = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    await server.start(sock)
    reader, writer = await asyncio.open_connection("127.0.0.1", sock.getsockname()[1])
    port = writer.get_extra_info("sockname")[1]
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(WAIT_S):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.transport.abort()
    await server.close(drain_s=WAIT_S)
    assert f"127.0.0.1:{port}: malformed: " in caplog.text
    assert "::ffff:" not in caplog.text


async def test_without_descriptors_the_server_tries_again(caplog: pytest.LogCaptureFixture) -> None:
    """Without free file descriptors, new connections wait and are accepted later."""

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


async def test_close_answers_what_is_in_flight() -> None:
    """A drain answers running requests, refuses new and waiting ones as unavailable, and accepts nobody."""
    async with serve() as served:
        client = await served.connect()
        slow, gate = await served.slow_read(client)
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
    limits = dataclasses.replace(LIMITS, max_client_requests=1)
    async with serve(limits=limits) as served:
        client = await served.connect()
        slow, gate = await served.slow_read(client)
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
    """After the drain's deadline the rest is cancelled and every connection closed. A server that never started closes,
    and a cancelled `close` goes on by itself."""
    async with serve() as served:
        client = await served.connect()
        slow, _ = await served.slow_read(client)
        await asyncio.gather(*(served.server.close(drain_s=0.05) for _ in range(3)))
        with pytest.raises(UnavailableError):
            await slow
        assert served.service.num_running == 0
        assert served.server.num_connections == 0
        assert served.server.inflight_requests == 0
        await client.close()
    assert "1 requests unanswered" in caplog.text
    async with serve() as served:
        client = await served.connect()
        slow, gate = await served.slow_read(client)
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
