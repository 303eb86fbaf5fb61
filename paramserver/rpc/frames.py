"""Frames out of a stream of bytes: Thrift's framed transport, four bytes of length (big-endian) and the message.

`FrameReader` is the whole of it and touches no socket. It hands out buffers for `recv_into` and calls back with frames:

- Frames that arrive whole in the scratch buffer, many at a time, are copied out: one system call reads them all.
- A frame that arrives in parts gets a buffer of its own, into which the rest of it is received directly. Nothing is
  ever joined.
- A long frame is read only after `admit` has granted its bytes; until then the connection must not be read.
- A refused frame is read past, never kept; its head is, for an answer that names its seqid.

The scratch buffer is shared by all connections of one loop: asyncio fills it and has it parsed in one step. What is
left in it when a connection has to stop is copied aside, at most `SCRATCH_BYTES` a connection.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from headrace.paramserver.rpc.buffer_pool import BufferPool
from headrace.schemas.errors import HeadraceError, ProtocolError

__all__ = [
    "MAX_HEAD_BYTES",
    "PREFIX",
    "PROGRESS_BYTES",
    "SCRATCH_BYTES",
    "SMALL_FRAME_BYTES",
    "Frame",
    "FrameReader",
    "new_scratch",
]

# ON THE WIRE: a frame's length, which does not count itself.
PREFIX = struct.Struct(">I")
SCRATCH_BYTES = 32 * 2**10
# Up to here a frame is copied out of the scratch buffer, is not pooled, and needs no grant before it is read.
SMALL_FRAME_BYTES = 16 * 2**10
# Enough for a message's header: 12 bytes and a name of at most 128.
MAX_HEAD_BYTES = 140
# A peer that moves so much of a long frame within a deadline is slow and not stuck, and the deadline begins anew.
PROGRESS_BYTES = 64 * 2**10

# How other protocols begin. As lengths they are beyond any bound that makes sense.
_HTTP_HEADS = frozenset({b"HTTP", b"<!DO", b"<htm", b"GET ", b"HEAD", b"POST", b"PUT "})
_TLS_HEADS = frozenset({b"\x15\x03", b"\x16\x03"})

Grant = TypeVar("Grant")


def new_scratch(size_bytes: int = SCRATCH_BYTES) -> memoryview:
    """Return a scratch buffer, uint8[size_bytes], for all readers of one event loop."""
    return np.empty(size_bytes, np.uint8).data


class Frame(Generic[Grant]):
    """One frame that was read.

    Attributes:
        data: uint8, read-only, without the length; valid until `release`.
        grant: What `admit` returned for it.
    """

    __slots__ = ("_buffer", "_pool", "data", "grant")

    def __init__(self, data: memoryview, grant: Grant, buffer: memoryview | None, pool: BufferPool | None) -> None:
        """Own `buffer`, which goes back to `pool`, or nothing when it is None."""
        self.data = data
        self.grant = grant
        self._buffer = buffer
        self._pool = pool

    def release(self) -> None:
        """Give the buffer back; again is harmless. Views into `data` must not be used any more."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None and self._pool is not None:
            self._pool.give(buffer)


class FrameReader(Generic[Grant]):
    """Turns received bytes into frames.

    Drive it from an `asyncio.BufferedProtocol`: `get_buffer` and `buffer_updated` are that class's methods. Callbacks
    run inside `buffer_updated` and `resume`, in the order of the bytes, and may call `pause` and `stop`.

    Attributes:
        max_frame_bytes: Longest frame that is taken from now on.
        num_begun: Frames whose length has been read.
        num_moved: Bytes of long frames that have come, but for the first ones of each.
        is_paused: A frame waits for its grant, or `pause` was called: receive nothing until `resume`.
    """

    def __init__(
        self,
        *,
        max_frame_bytes: int,
        scratch: memoryview,
        pool: BufferPool | None,
        admit: Callable[[int], Grant | HeadraceError | None],
        deliver: Callable[[Frame[Grant]], None],
        refuse: Callable[[memoryview, HeadraceError], None],
        small_frame_bytes: int = SMALL_FRAME_BYTES,
    ) -> None:
        """Start between two frames.

        Args:
            max_frame_bytes: Longest frame, bytes, > 0.
            scratch: From `new_scratch`; may be shared by all readers of a loop.
            pool: Where buffers for long frames come from; None makes fresh ones that live as long as their views.
            admit: Asked with each frame's length: before a long one is read, and when a small one is complete. Returns
                the grant; an error to refuse the frame with; or None to wait until `resume` is called with one of
                the two.
            deliver: Gets each complete frame, and owns it.
            refuse: Gets the first bytes of each refused frame, at most `MAX_HEAD_BYTES`, and the error.
            small_frame_bytes: Up to here a frame is copied out of the scratch buffer.
        """
        self.max_frame_bytes = max_frame_bytes
        self.num_begun = self.num_moved = 0
        self.is_paused = False
        self._scratch = scratch
        self._pool = pool
        self._admit = admit
        self._deliver = deliver
        self._refuse = refuse
        self._small_frame_bytes = small_frame_bytes
        self._is_stopped = False
        self._rest = b""  # received and not parsed: a cut length, or all that came after a frame that waits
        self._verdict: Grant | HeadraceError | None = None  # of the frame at the start of `_rest`
        self._length = 0  # of the frame being read in parts
        self._body: memoryview | None = None  # what of it is kept, exactly as long
        self._filled = 0
        self._buffer: memoryview | None = None  # the pool's buffer under `_body`
        self._grant: Grant | None = None
        self._refusal: HeadraceError | None = None
        self._num_to_skip = 0  # bytes of a refused frame still to be read past

    @property
    def is_mid_frame(self) -> bool:
        """A part of a frame has arrived, and the rest has not."""
        return bool(self._rest or self._body is not None or self._num_to_skip)

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """Return where to receive the next bytes."""
        if self._body is not None and self._filled < len(self._body):
            return self._body[self._filled :]
        rest = len(self._rest)
        self._scratch[:rest] = self._rest
        return self._scratch[rest:]

    def buffer_updated(self, nbytes: int) -> None:
        """Take note that `nbytes` were received into the buffer that `get_buffer` returned last.

        Raises:
            ProtocolError: A frame's length is out of bounds; the connection cannot be used any more.
        """
        if self._is_stopped:
            return
        if self._body is not None and self._filled < len(self._body):
            self._filled += nbytes
            if self._length > self._small_frame_bytes:
                self.num_moved += nbytes
            if self._filled == len(self._body):
                self._finish()
            return
        data = self._scratch[: len(self._rest) + nbytes]
        self._rest = b""
        self._parse(data)

    def pause(self) -> None:
        """Call back no more until `resume`, though bytes may be left."""
        self.is_paused = True

    def resume(self, verdict: Grant | HeadraceError | None = None) -> None:
        """Go on.

        Args:
            verdict: For the frame that waits, its grant or the error to refuse it with; None after `pause`.

        Raises:
            ProtocolError: As for `buffer_updated`.
        """
        assert self.is_paused
        self.is_paused = False
        if self._is_stopped:
            return
        self._verdict = verdict
        if self._body is not None and self._filled == len(self._body):
            self._finish()
        if self._rest and not self.is_paused:
            rest, self._rest = memoryview(self._rest), b""
            self._parse(rest)

    def stop(self) -> Grant | None:
        """Take no more bytes: drop what is unfinished and give its buffer back. Again is harmless.

        Returns:
            The grant of the frame that was being read, if there was one: it is the caller's again.
        """
        self._is_stopped = True
        self._rest = b""
        grant, self._grant = self._grant, None
        self._body = self._refusal = None
        self._num_to_skip = 0
        buffer, self._buffer = self._buffer, None
        if buffer is not None and self._pool is not None:
            self._pool.give(buffer)
        return grant

    def _parse(self, data: memoryview) -> None:
        pos, end = 0, len(data)
        while pos < end and not self._is_stopped and not self.is_paused:
            if self._body is not None:
                step = min(end - pos, len(self._body) - self._filled)
                self._body[self._filled : self._filled + step] = data[pos : pos + step]
                self._filled += step
                pos += step
                if self._filled == len(self._body):
                    self._finish()
            elif self._num_to_skip:
                step = min(end - pos, self._num_to_skip)
                self._num_to_skip -= step
                self.num_moved += step
                pos += step
            elif end - pos < PREFIX.size:
                break
            else:
                pos = self._begin(data, pos)
        if not self._is_stopped:
            self._rest = bytes(data[pos:])

    def _begin(self, data: memoryview, pos: int) -> int:
        """Read the length at `pos`, and the frame too when all of it is there; return the position after that."""
        length: int = PREFIX.unpack_from(data, pos)[0]
        if self._verdict is None:
            if not 0 < length <= self.max_frame_bytes:
                raise ProtocolError(_describe_bad_length(length, self.max_frame_bytes))
            self.num_begun += 1
        start = pos + PREFIX.size
        is_here = len(data) - start >= length
        if length <= self._small_frame_bytes and not is_here:
            self._length, self._body, self._filled = length, memoryview(bytearray(length)), 0
            return start
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            verdict = self._admit(length)
        if verdict is None:
            self.is_paused = True
            return pos
        if isinstance(verdict, HeadraceError):
            self._length, self._refusal = length, verdict
            self._body, self._filled = memoryview(bytearray(min(length, MAX_HEAD_BYTES))), 0
            return start
        if length <= self._small_frame_bytes:
            frame = memoryview(bytes(data[start : start + length]))
            self._deliver(Frame(frame, verdict, None, None))
            return start + length
        self._buffer = self._pool.take(length) if self._pool else np.empty(length, np.uint8).data
        self._length, self._grant = length, verdict
        self._body, self._filled = self._buffer[:length], 0
        return start

    def _finish(self) -> None:
        """Hand over the frame, or the refused frame's head, that `_body` now holds whole."""
        body, grant, refusal = self._body, self._grant, self._refusal
        assert body is not None
        if refusal is None and grant is None:  # a small frame, which is admitted when it is complete
            verdict, self._verdict = self._verdict, None
            if verdict is None:
                verdict = self._admit(self._length)
            if verdict is None:
                self.is_paused = True
                return
            if isinstance(verdict, HeadraceError):
                refusal, body = verdict, body[:MAX_HEAD_BYTES]
            else:
                grant = verdict
        buffer, self._buffer = self._buffer, None
        self._num_to_skip = self._length - len(body) if self._refusal is not None else 0
        self._body = self._grant = self._refusal = None
        if refusal is not None:
            self._refuse(body, refusal)
        else:
            assert grant is not None
            self._deliver(Frame(body.toreadonly(), grant, buffer, self._pool))


def _describe_bad_length(length: int, max_frame_bytes: int) -> str:
    """Say what a length that no frame has may be instead; the peer may be on either side."""
    head = PREFIX.pack(length)
    if head in _HTTP_HEADS:
        return "the peer speaks HTTP, not framed Thrift: metrics and health have ports of their own"
    if head[:2] in _TLS_HEADS:
        return "the peer speaks TLS and this side does not: turn it on or off on both"
    return f"a frame of {length} bytes; the limit is {max_frame_bytes}"
