"""A peer of a server that sends whatever bytes it likes."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from typing import Any

from fake_service import WAIT_S, Served, hello_request

from headrace.paramserver.rpc.admission import ServerLimits
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


@contextlib.asynccontextmanager
async def dial(served: Served, *, client: str | None = None) -> AsyncIterator[Raw]:
    """Open a raw connection, with a hello of that client if one is given."""
    raw = Raw(*await asyncio.open_connection(served.host, served.port))
    if client is not None:
        await raw.send(call_frame("hello", 0, hello_request(client=client)))
        await raw.frame()
    try:
        yield raw
    finally:
        await raw.close()


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
