"""Pass samples from a shard process to the supervisor over a socket pair, inherited like the listening socket.

Only these two have an end of it, so it needs no port, file name or token. The supervisor writes one byte; the shard
replies with a length and that much JSON, or with length 0 if it has no sample. One request at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

from headrace.paramserver.observe.sample import ShardSample
from headrace.paramserver.system.event_loop import background_task
from headrace.paramserver.system.log_lines import fact
from headrace.schemas.errors import HeadraceError, ProtocolError, UnavailableError

__all__ = ["SampleReceiver", "receive_samples", "send_samples"]

_log = logging.getLogger(__name__)

_ASK = b"?"
_LENGTH = struct.Struct("<I")
_MAX_SAMPLE_BYTES = 64 << 20


@contextlib.asynccontextmanager
async def send_samples(sock: socket.socket, sample: Callable[[], Awaitable[ShardSample]]) -> AsyncIterator[None]:
    """Reply on the shard's end with what `sample` returns, while the block lasts; closes the socket at the end."""
    reader, writer = await asyncio.open_connection(sock=sock)
    async with background_task(_send(sample, reader, writer), name="headrace-metrics"):
        yield


async def _send(
    sample: Callable[[], Awaitable[ShardSample]], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        while await reader.read(1):
            try:
                text = json.dumps((await sample()).to_json()).encode()
            except (HeadraceError, OSError) as exc:  # OSError: file descriptors may have run out, for a while
                fact(_log, logging.WARNING, "no sample for metrics", error=str(exc))
                text = b""
            writer.write(_LENGTH.pack(len(text)) + text)
            await writer.drain()
    except ConnectionError:
        pass  # the supervisor is gone; the end of stdin says so too
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def receive_samples(sock: socket.socket, *, timeout_s: float = 5.0) -> AsyncIterator[SampleReceiver]:
    """Yield a receiver on the supervisor's end of one shard process; closes the socket at the end.

    A reply that is later than `timeout_s` answers the next request, as only one is under way.
    """
    reader, writer = await asyncio.open_connection(sock=sock)
    receiver = SampleReceiver(writer, timeout_s)
    async with background_task(receiver.read(reader), name="headrace-metrics-read") as receiver.reading:
        yield receiver


class SampleReceiver:
    """The supervisor's end of one shard process, on the event loop; made by `receive_samples`."""

    def __init__(self, writer: asyncio.StreamWriter, timeout_s: float) -> None:
        self.reading: asyncio.Task[None] | None = None
        self._writer = writer
        self._timeout_s = timeout_s
        self._reply: asyncio.Future[bytes] | None = None

    async def ask(self) -> ShardSample:
        """Return a sample; concurrent calls share one request.

        Raises:
            UnavailableError: The shard is gone, is late or has no sample.
            ProtocolError: The reply is not a sample.

        Cancellation: harmless; the request goes on for other callers.
        """
        assert self.reading is not None
        if self.reading.done():
            raise UnavailableError("the shard process has closed its metrics socket")
        if self._reply is None or self._reply.done():
            self._reply = asyncio.get_running_loop().create_future()
            self._writer.write(_ASK)
        try:
            async with asyncio.timeout(self._timeout_s):
                text = await asyncio.shield(self._reply)
        except TimeoutError as exc:
            raise UnavailableError(f"no metrics from the shard process within {self._timeout_s:g} s") from exc
        if not text:
            raise UnavailableError("the shard process could not make a sample; its log says why")
        try:
            return ShardSample.from_json(json.loads(text))
        except ValueError as exc:
            raise ProtocolError(f"not a sample: {exc}") from exc

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Take replies until the shard process is gone or breaks the protocol; run by `receive_samples`."""
        try:
            while True:
                (size_bytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                if size_bytes > _MAX_SAMPLE_BYTES:
                    return
                text = await reader.readexactly(size_bytes)
                if self._reply is not None and not self._reply.done():
                    self._reply.set_result(text)
        except (OSError, EOFError):
            pass
        finally:
            self._writer.transport.abort()
            if self._reply is not None and not self._reply.done():
                self._reply.set_result(b"")
