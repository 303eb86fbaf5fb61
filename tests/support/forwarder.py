"""Connections forwarded to another address of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_CHUNK_BYTES = 1 << 18


class Forwarder:
    """Forwards connections to another address of this machine, and counts the bytes that come back.

    Attributes:
        received_bytes: Bytes that the target has sent so far.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.received_bytes = 0
        self._target = target

    @asynccontextmanager
    async def listening(self, host: str) -> AsyncIterator[None]:
        """Listen at the target's port of another address during the block."""
        async with await asyncio.start_server(self._forward, host, self._target[1]):
            yield

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            their_reader, their_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        try:
            await asyncio.gather(
                self._pump(reader, their_writer, is_counted=False), self._pump(their_reader, writer, is_counted=True)
            )
        except asyncio.CancelledError:
            pass  # the loop ends; streams log the exception of a connection's task
        finally:
            for each in (writer, their_writer):
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_counted: bool) -> None:
        try:
            while data := await reader.read(_CHUNK_BYTES):
                if is_counted:
                    self.received_bytes += len(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # the other direction ends by itself
        finally:
            writer.transport.abort()
