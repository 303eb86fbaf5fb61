"""Write frames to a transport: one at a time, long columns without copies, and never more than the peer takes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence

from headrace.paramserver.rpc.frames import PREFIX
from headrace.paramserver.system.text import format_seconds
from headrace.schemas.errors import UnavailableError
from headrace.schemas.messages import Segment, size_of_segments

__all__ = ["FrameWriter"]

# A frame up to here is copied into one piece, which costs less than a second system call.
_JOIN_BYTES = 64 * 2**10
# In a longer frame, segments up to here are joined with their neighbours.
_SHORT_SEGMENT_BYTES = 16 * 2**10
# Long segments are written in pieces of this size. Python 3.11's transport copies into a bytearray what the kernel does
# not take at once: with a wait between pieces, that is at most one piece.
_PIECE_BYTES = 256 * 2**10


class FrameWriter:
    """Writes frames to one connection, in the order in which `send` was called.

    The transport's buffer stays empty: a frame's next piece is written when the kernel has taken the last one. Of the
    short frames sent within one turn of the event loop, the first goes out at once, so that a single call does not
    wait, and the others together when the turn ends.

    Holds at most 128 KiB of short frames; the transport holds as much again, or one piece.

    Thread: the loop's.

    Attributes:
        moved_s: When the kernel last took a piece of a frame that did not go out at once, on the loop's clock; -inf
            before.
    """

    def __init__(self, *, timeout_s: float | None) -> None:
        """Wait for `attach`.

        A peer must take a short frame, or the next 256 KiB of a long one, within `timeout_s` seconds, or the connection
        is aborted; None leaves deadlines to the callers of `send`.
        """
        self.moved_s = -math.inf
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._lock = asyncio.Lock()
        self._num_waiting = 0  # senders that hold the lock or wait for it
        self._drained: asyncio.Future[None] | None = None  # while the transport's buffer holds something
        self._corked = bytearray()  # whole short frames that go out when this turn of the loop ends
        self._is_corking = False  # a short frame has been written in this turn
        self._has_ended = False

    def attach(self, transport: asyncio.WriteTransport) -> None:
        """Write to `transport` from now on; its protocol calls `pause`, `resume` and `detach`."""
        # At 0 the TLS transport would report a full buffer forever, since it compares with ≥.
        transport.set_write_buffer_limits(high=1 if transport.get_extra_info("sslcontext") else 0, low=0)
        self._transport = transport

    def detach(self) -> None:
        """Note that the connection is lost; waiting senders fail."""
        self._transport = None
        self._corked.clear()
        self.resume()

    def pause(self) -> None:
        """Note that the transport holds bytes that the kernel does not take."""
        if self._drained is None:
            self._drained = self._loop.create_future()

    def resume(self) -> None:
        """Note that the kernel has taken everything."""
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def end(self) -> None:
        """Flush, and refuse further frames; call it before the transport's end."""
        self.flush()
        self._has_ended = True

    def flush(self) -> None:
        """Hand waiting short frames to the transport."""
        if self._corked and self._transport is not None:
            corked, self._corked = self._corked, bytearray()
            self._write_short(self._transport, corked)

    async def send(self, segments: Sequence[Segment]) -> None:
        """Write one frame, from `encode_message`; return when its segments may change, copied or sent.

        Raises:
            UnavailableError: The connection is lost, or was aborted because the peer took too long.

        Cancellation: before the frame's first byte nothing has happened; later the connection is aborted.
        """
        if self.try_send(segments):
            return
        self._num_waiting += 1
        try:
            async with self._lock:
                await self._send_in_turn(segments)
        finally:
            self._num_waiting -= 1

    def try_send(self, segments: Sequence[Segment]) -> bool:
        """Write a frame if it is short and need not wait; otherwise return False. Raises as `send` does."""
        size_bytes = size_of_segments(segments)
        if size_bytes > _JOIN_BYTES or self._num_waiting or self._drained is not None:
            return False
        transport = self._open_transport()
        if self._is_corking:
            self._corked += PREFIX.pack(size_bytes)
            for segment in segments:
                self._corked += segment
            if len(self._corked) > _JOIN_BYTES:
                self.flush()
        else:
            self._is_corking = True
            self._loop.call_soon(self._end_turn)
            self._write_short(transport, b"".join((PREFIX.pack(size_bytes), *segments)))
        return True

    def _end_turn(self) -> None:
        self._is_corking = False
        self.flush()

    def _write_short(self, transport: asyncio.WriteTransport, frames: bytes | bytearray) -> None:
        transport.write(frames)
        if self._drained is not None and self._timeout_s is not None:
            self._loop.call_later(self._timeout_s, self._check_drained, self._drained)

    def _check_drained(self, drained: asyncio.Future[None]) -> None:
        if not drained.done():
            self._abort()

    async def _send_in_turn(self, segments: Sequence[Segment]) -> None:
        """Write a frame after all earlier ones; the caller holds the lock."""
        self.flush()
        await self._drain()
        transport = self._open_transport()
        is_tls = transport.get_extra_info("sslcontext") is not None
        try:
            for piece in _pieces(segments, size_of_segments(segments)):
                self._open_transport().write(piece)
                await self._drain()
                self.moved_s = self._loop.time()
                if is_tls:
                    # Python 3.11's TLS transport learns one turn of the loop later that the socket is lost, and warns
                    # of each write until then.
                    await asyncio.sleep(0)
                if transport.is_closing() or self._transport is None:
                    raise UnavailableError("the connection was lost")
        except BaseException:
            self._abort()
            raise

    async def _drain(self) -> None:
        if self._drained is None:
            return
        try:
            # A deadline per piece: on a slow link a long frame would never fit one deadline, and be resent for ever.
            async with asyncio.timeout(self._timeout_s):
                # Shielded: a cancelled sender must not end the wait of later ones.
                await asyncio.shield(self._drained)
        except TimeoutError as exc:
            self._abort()
            assert self._timeout_s is not None
            raise UnavailableError(f"the peer took nothing for {format_seconds(self._timeout_s)}") from exc

    def _abort(self) -> None:
        # Not when it is lost: after a peer's end of file, asyncio's transport raises AttributeError then.
        if self._transport is not None:
            self._transport.abort()

    def _open_transport(self) -> asyncio.WriteTransport:
        transport = self._transport
        if transport is None or transport.is_closing() or self._has_ended:
            raise UnavailableError("the connection is closed")
        return transport


def _pieces(segments: Sequence[Segment], size_bytes: int) -> Iterator[Segment | bytearray]:
    """Yield a frame's bytes: length and short segments joined, long segments as views of bounded length."""
    short = bytearray(PREFIX.pack(size_bytes))
    longest = _JOIN_BYTES if size_bytes <= _JOIN_BYTES else _SHORT_SEGMENT_BYTES
    for segment in segments:
        is_short = len(segment) <= longest
        if is_short:
            short += segment
        if short and (not is_short or len(short) > _JOIN_BYTES + PREFIX.size):
            yield short
            short = bytearray()  # a new one: the transport may still hold the other
        if is_short:
            continue
        view = memoryview(segment)
        for start in range(0, len(view), _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]
    if short:
        yield short
