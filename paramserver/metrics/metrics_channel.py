"""How the supervisor asks a shard process for samples: a socket pair, inherited like the listening socket.

No port, no file name, no token: nobody else has an end of it. The supervisor writes one byte, the shard answers with a
length and that much JSON; or with a length of 0 when it cannot say. One question at a time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Self

from headrace.paramserver.metrics.metrics_sample import ShardSample
from headrace.paramserver.process.log_format import fact
from headrace.schemas.errors import HeadraceError, ProtocolError, UnavailableError

__all__ = ["SampleAsker", "SampleTeller"]

_log = logging.getLogger(__name__)

_ASK = b"?"
_LENGTH = struct.Struct("<I")
_MAX_SAMPLE_BYTES = 64 << 20


class SampleTeller:
    """The shard's end. Use it with `async with`.

    Thread: the event loop's.
    """

    def __init__(self, sock: socket.socket, sample: Callable[[], Awaitable[ShardSample]]) -> None:
        """Answer on a connected socket, which is closed at the end, with what a function returns."""
        self._sock = sock
        self._sample = sample
        self._telling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        reader, writer = await asyncio.open_connection(sock=self._sock)
        self._telling = asyncio.create_task(self._tell(reader, writer), name="headrace-metrics")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._telling is not None
        self._telling.cancel()
        await asyncio.wait([self._telling])

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(1):
                try:
                    text = json.dumps((await self._sample()).to_json()).encode()
                except (HeadraceError, OSError) as exc:  # the latter also for want of a file descriptor, which passes
                    fact(_log, logging.WARNING, "no sample for metrics", error=str(exc))
                    text = b""
                writer.write(_LENGTH.pack(len(text)) + text)
                await writer.drain()
        except ConnectionError:
            pass  # the supervisor is gone; the end of stdin says so too
        finally:
            writer.transport.abort()


class SampleAsker:
    """The supervisor's end of one shard process. Use it with `async with`.

    Thread: the event loop's.
    """

    def __init__(self, sock: socket.socket, *, timeout_s: float = 5.0) -> None:
        """Ask on a connected socket, which is closed at the end.

        Args:
            sock: The other end is the shard's.
            timeout_s: How long an answer may take, seconds. What comes later answers the next question: there is never
                more than one on its way.
        """
        self._sock = sock
        self._timeout_s = timeout_s
        self._answer: asyncio.Future[bytes] | None = None
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        reader, self._writer = await asyncio.open_connection(sock=self._sock)
        self._reading = asyncio.create_task(self._read(reader), name="headrace-metrics-read")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._reading is not None
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def ask(self) -> ShardSample:
        """Return a sample. Who asks while a question is on its way gets the same answer.

        Raises:
            UnavailableError: The shard does not answer in time, cannot, or is gone.
            ProtocolError: It answers with something else.

        Cancellation: harmless; the question goes on for whoever else waits.
        """
        assert self._reading is not None
        if self._reading.done():
            raise UnavailableError("the shard process tells no figures any more")
        if self._answer is None or self._answer.done():
            self._answer = asyncio.get_running_loop().create_future()
            self._writer.write(_ASK)
        try:
            async with asyncio.timeout(self._timeout_s):
                text = await asyncio.shield(self._answer)
        except TimeoutError as exc:
            raise UnavailableError(f"the shard process tells no figures within {self._timeout_s:g} s") from exc
        if not text:
            raise UnavailableError("the shard process cannot tell its figures; its log says why")
        try:
            return ShardSample.from_json(json.loads(text))
        except ValueError as exc:
            raise ProtocolError(f"not a sample: {exc}") from exc

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Take answers until the shard process is gone or says what is none."""
        try:
            while True:
                (size_bytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                if size_bytes > _MAX_SAMPLE_BYTES:
                    return
                text = await reader.readexactly(size_bytes)
                if self._answer is not None and not self._answer.done():
                    self._answer.set_result(text)
        except (OSError, EOFError):
            pass
        finally:
            self._writer.transport.abort()
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(b"")
