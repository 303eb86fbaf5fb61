"""A server that follows a script, byte by byte, for tests of the client."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fake_service import WAIT_S, batch

from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.idl import idl
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
