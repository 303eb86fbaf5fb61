"""Frames into a transport: one at a time, long columns as they lie in memory, never more than the peer takes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from headrace.paramserver.frames import PREFIX
from headrace.schemas.errors import UnavailableError
from headrace.schemas.messages import Segment, size_of_segments

__all__ = ["FrameWriter"]

# What is not longer is joined with its neighbours, which costs less than a system call.
_JOIN_BYTES = 16 * 2**10
# Long segments are written in pieces of this size. Python 3.11's transport copies what the kernel does not take at once
# into a bytearray: with pieces, and a wait for the kernel between them, that is at most one piece.
_PIECE_BYTES = 256 * 2**10


class FrameWriter:
    """Writes frames to one connection, in the order in which `send` was called.

    The transport's buffer is kept empty: a frame's next piece is written when the kernel has taken the last one.

    Thread: the loop's.
    """

    def __init__(self, *, timeout_s: float | None) -> None:
        """Wait for `attach`.

        Args:
            timeout_s: A peer that does not take a frame within this time, seconds, is cut off; None leaves the
                deadline to the callers of `send`.
        """
        self._timeout_s = timeout_s
        self._transport: asyncio.WriteTransport | None = None
        self._lock = asyncio.Lock()
        self._drained: asyncio.Future[None] | None = None  # while the transport's buffer holds something

    def attach(self, transport: asyncio.WriteTransport) -> None:
        """Begin to write to `transport`, whose protocol calls `pause`, `resume` and `detach`."""
        # At 0 the TLS transport would report a full buffer for good, since it compares with ≥.
        transport.set_write_buffer_limits(high=1 if transport.get_extra_info("sslcontext") else 0, low=0)
        self._transport = transport

    def detach(self) -> None:
        """Note that the connection is lost; whoever waits is told."""
        self._transport = None
        self.resume()

    def pause(self) -> None:
        """Note that the transport has bytes that the kernel does not take."""
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_future()

    def resume(self) -> None:
        """Note that the kernel has taken everything."""
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    async def send(self, segments: Sequence[Segment]) -> None:
        """Write one frame; return when its bytes have left this process, so that its segments may change.

        Args:
            segments: The message, from `encode_message`.

        Raises:
            UnavailableError: The connection is lost, or the peer took too long and has been cut off.

        Cancellation: before the frame's first byte nothing has happened; later the connection is aborted.
        """
        async with self._lock:
            transport = self._transport
            if transport is None or transport.is_closing():
                raise UnavailableError("the connection is closed")
            try:
                await self._write(transport, segments)
            except TimeoutError as exc:
                transport.abort()
                raise UnavailableError(f"the peer did not take a frame within {self._timeout_s} s") from exc
            except BaseException:
                transport.abort()
                raise

    async def _write(self, transport: asyncio.WriteTransport, segments: Sequence[Segment]) -> None:
        deadline_s: float | None = None
        for piece in _pieces(segments):
            transport.write(piece)
            if self._drained is not None:
                loop = asyncio.get_running_loop()
                if deadline_s is None and self._timeout_s is not None:
                    deadline_s = loop.time() + self._timeout_s
                async with asyncio.timeout_at(deadline_s):
                    await self._drained
            if transport.is_closing():
                raise UnavailableError("the connection was lost")


def _pieces(segments: Sequence[Segment]) -> Iterator[Segment | bytearray]:
    """Yield a frame's bytes: its length and short segments joined, long ones as views of bounded length."""
    short = bytearray(PREFIX.pack(size_of_segments(segments)))
    for segment in segments:
        if len(segment) <= _JOIN_BYTES:
            short += segment
            if len(short) > _JOIN_BYTES:
                yield short
                short = bytearray()  # a new one: the transport may still hold the other
            continue
        if short:
            yield short
            short = bytearray()
        view = memoryview(segment)
        for start in range(0, len(view), _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]
    if short:
        yield short
