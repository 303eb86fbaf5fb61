"""Deadlines of calls: postponed while long frames move on, and always reached in the end."""

from __future__ import annotations

import asyncio

import pytest
from fake_service import WAIT_S, read, serve
from loop_clock import Clock
from raw_peer import frame_of
from scripted_server import MIB, next_seqid, reply_frame, scripted, stalled

from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.errors import (
    OverloadedError,
    UnavailableError,
)
from headrace.schemas.idl import error_to_idl, idl
from headrace.schemas.messages import REPLY, decode_header, encode_message


async def test_deadline_leaves_the_connection_usable() -> None:
    """A call without a reply in time fails alone, and its late reply is dropped."""
    async with serve() as served, await served.connect() as client:
        served.service.gates["slow"] = gate = asyncio.Event()
        with pytest.raises(UnavailableError, match=r"getEmbeddings to .*: no answer within 0\.05 s$"):
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


@pytest.mark.parametrize("piece_bytes", [90 * 2**10, 1])
async def test_a_long_reply_that_moves_on(piece_bytes: int) -> None:
    """A slow link fails no call, nor the calls behind it; single bytes do not count as progress."""
    go_on, first_bytes = asyncio.Event(), 320 * 2**10  # more than what is read before a frame is known

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seqids = [await next_seqid(reader) for _ in range(2)]
        frame, at = reply_frame(seqids[0], b"x" * MIB), first_bytes
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
            await heard.wait(first_bytes + turn * piece_bytes)
            heard.clock.advance(9)
            go_on.set()
        if piece_bytes > 1:
            assert [len((await call).weights) for call in calls] == [MIB, len("behind")]
            assert client.moved_s == heard.clock.now_s
        else:
            async with asyncio.timeout(WAIT_S):
                for call in calls:
                    with pytest.raises(UnavailableError, match="no answer within 10 s"):
                        await call
            await client.close()
            go_on.set()


async def test_a_long_request_that_moves_on() -> None:
    """A request may take long while the peer reads it; it fails if nothing is read for long."""
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


@pytest.mark.parametrize("takes", [True, False], ids=["the server takes it", "the server refuses it and stops reading"])
async def test_a_long_request_without_a_reply(takes: bool) -> None:
    """It fails at the deadline. Once it was sent, only its reply was awaited, and the connection outlives the call; a
    frame of which the rest is not read is the connection's end, also if the reply came before."""
    take, has_taken, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def takes_or_refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b"" if takes else await reader.readexactly(4096)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        if takes:
            await take.wait()
            reader._transport.resume_reading()  # type: ignore[attr-defined]
            await next_seqid(reader)
            has_taken.set()
        else:
            error = error_to_idl(OverloadedError("full", retry_after_s=1))
            refusal = idl.ParameterServer.setEmbeddings_result(error=error)
            seqid = decode_header(memoryview(head)[4:]).seqid
            writer.write(frame_of(encode_message("setEmbeddings", REPLY, seqid, refusal)))
        await done.wait()

    async with scripted(takes_or_refuses) as client:
        heard = Heard(client)
        call = await stalled(client)
        take.set()
        async with asyncio.timeout(WAIT_S):
            if takes:
                await has_taken.wait()
                while client._protocol._writer._num_waiting:  # noqa: ASYNC110 (it belongs to the code under test)
                    await asyncio.sleep(0)
            else:
                await heard.wait(40)
        assert not call.done()
        heard.clock.advance(70)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(UnavailableError, match="no answer within 60 s"):
                await call
        assert client.is_closed != takes
        done.set()
