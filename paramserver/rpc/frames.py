"""Read frames from a stream of bytes: Thrift's framed transport, four bytes of length (big-endian) and the message.

`FrameReader` touches no socket. It hands out buffers for `recv_into` and calls back with frames:

- Frames that arrive whole in the scratch buffer are copied out; one system call can read many.
- A frame that arrives in parts gets a buffer of its own, and the rest is received directly into it. Nothing is joined.
- A long frame is read only after `admit` has granted its bytes; until then the connection must not be read.
- A refused frame is skipped; only its head is kept, for a reply with its seqid.

All connections of one loop share the scratch buffer: asyncio fills it and has it parsed in one step. If a connection
has to stop, the unparsed rest is copied aside, at most `SCRATCH_BYTES` per connection.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

from headrace.schemas.errors import HeadraceError, ProtocolError

__all__ = [
    "MAX_HEAD_BYTES",
    "PREFIX",
    "PROGRESS_BYTES",
    "SCRATCH_BYTES",
    "SMALL_FRAME_BYTES",
    "BufferPool",
    "Frame",
    "FrameReader",
    "check_length",
    "ignore",
    "new_scratch",
]

# ON THE WIRE: a frame's length, which does not count itself.
PREFIX = struct.Struct(">I")
SCRATCH_BYTES = 32 * 2**10
# Up to here a frame is copied out of the scratch buffer, is not pooled, and needs no grant before it is read.
SMALL_FRAME_BYTES = 16 * 2**10
# Enough for a message's header: 12 bytes and a name of at most 128.
MAX_HEAD_BYTES = 140
# A peer that moves this much of a long frame within a deadline is slow but not stuck, and the deadline restarts.
PROGRESS_BYTES = 64 * 2**10

# How other protocols begin. Read as lengths, all are above any sensible limit.
_HTTP_HEADS = frozenset(
    {b"HTTP", b"<!DO", b"<htm", b"GET ", b"HEAD", b"POST", b"PUT ", b"DELE", b"OPTI", b"PATC", b"CONN", b"PRI "}
)
_TLS_HEADS = frozenset({b"\x15\x03", b"\x16\x03"})
_THRIFT_HEADS = frozenset({b"\x80\x01", b"\x82\x21", b"\x82\x41", b"\x82\x81"})  # strict binary and compact
# Capacities per doubling: a buffer is at most a quarter longer than requested.
_STEPS = 4

Grant = TypeVar("Grant")


def new_scratch(size_bytes: int = SCRATCH_BYTES) -> memoryview:
    """Return a scratch buffer, uint8[size_bytes], for the readers of one event loop."""
    return np.empty(size_bytes, np.uint8).data


class BufferPool:
    """Lends buffers, and keeps returned ones for the next frame of about their size.

    A fresh buffer of megabytes would cost a page fault for every 4 KiB received.

    Idle buffers are bounded by `max_idle_bytes`; the borrower bounds lent ones. Fresh buffers are not zeroed, so they
    take memory only as they are filled. After `give`, the contents belong to the next borrower.

    Thread: one at a time.
    """

    def __init__(self, *, max_buffer_bytes: int, max_idle_bytes: int, poison: int | None = None) -> None:
        """Start with no buffer; `poison` fills returned buffers, so that tests notice a use after the return."""
        self._max_buffer_bytes, self._max_idle_bytes, self._poison = max_buffer_bytes, max_idle_bytes, poison
        # By capacity; the least recently used capacity first.
        self._idle: dict[int, list[memoryview]] = {}
        self.idle_bytes = self.lent_bytes = 0  # capacity of idle and of lent buffers

    def capacity_of(self, size_bytes: int) -> int:
        """Return the length of the buffer that `take` lends for `size_bytes`, 1 to `max_buffer_bytes`."""
        step = max((1 << (size_bytes - 1).bit_length()) // (2 * _STEPS), 1)
        return min(-(-size_bytes // step) * step, self._max_buffer_bytes)

    def take(self, size_bytes: int) -> memoryview:
        """Lend an uninitialized, writable buffer, uint8[`capacity_of(size_bytes)`]; give this very view back."""
        assert 0 < size_bytes <= self._max_buffer_bytes
        capacity = self.capacity_of(size_bytes)
        self.lent_bytes += capacity
        idle = self._idle.pop(capacity, None)
        if idle is None:
            return np.empty(capacity, np.uint8).data
        buffer = idle.pop()
        if idle:
            self._idle[capacity] = idle
        self.idle_bytes -= capacity
        return buffer

    def give(self, buffer: memoryview) -> None:
        """Take back a lent buffer; keep it if it fits, and drop buffers of the least recently used capacities."""
        capacity = buffer.nbytes
        self.lent_bytes -= capacity
        if self._poison is not None:
            buffer[:] = bytes([self._poison]) * capacity
        if capacity > self._max_idle_bytes:
            return
        self._idle[capacity] = [*self._idle.pop(capacity, ()), buffer]
        self.idle_bytes += capacity
        while self.idle_bytes > self._max_idle_bytes:
            oldest = next(iter(self._idle))
            self._idle[oldest].pop()
            self.idle_bytes -= oldest
            if not self._idle[oldest]:
                del self._idle[oldest]


class Frame(Generic[Grant]):
    """One received frame: `data`, uint8, read-only, is valid until `release`; `grant` is what `admit` returned."""

    __slots__ = ("_buffer", "_pool", "data", "grant")

    def __init__(self, data: memoryview, grant: Grant, buffer: memoryview | None, pool: BufferPool | None) -> None:
        """Own `buffer` of `pool`, or nothing if it is None."""
        self.data, self.grant, self._buffer, self._pool = data, grant, buffer, pool

    def release(self) -> None:
        """Give the buffer back; views into `data` become invalid. Idempotent."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None and self._pool is not None:
            self._pool.give(buffer)


class FrameReader(Generic[Grant]):
    """Turns received bytes into frames.

    Drive it from an `asyncio.BufferedProtocol`: `get_buffer` and `buffer_updated` are that class's methods. Callbacks
    run inside `buffer_updated` and `resume`, in the order of the bytes, and may call `pause` and `stop`.

    Attributes:
        max_frame_bytes: Longest frame accepted from now on.
        num_begun: Frames whose length has been read.
        num_moved: Received bytes of long frames, except the first part of each.
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
            scratch: From `new_scratch`; all readers of a loop may share it.
            pool: Source of buffers for long frames; None allocates fresh ones that live as long as their views.
            admit: Called with each frame's length: before a long one is read, and when a small one is complete. Returns
                the grant; or an error to refuse the frame with; or None to wait for `resume` with one of the two.
            deliver: Called with each complete frame, which it then owns.
            refuse: Called with the head of each refused frame, at most `MAX_HEAD_BYTES`, and the error.
            small_frame_bytes: Longest frame that is copied out of the scratch buffer.
        """
        self.max_frame_bytes = max_frame_bytes
        self.num_begun = self.num_moved = 0
        self.is_paused = False
        self._scratch, self._pool, self._small_frame_bytes = scratch, pool, small_frame_bytes
        self._admit, self._deliver, self._refuse = admit, deliver, refuse
        self._is_stopped = False
        self._rest = b""  # received and not parsed: a part of a length, or everything after a frame that waits
        self._verdict: Grant | HeadraceError | None = None  # of the frame at the start of `_rest`
        self._length = 0  # of the frame being read in parts
        self._body: memoryview | None = None  # the part of it that is kept, exactly as long
        self._filled = 0
        self._buffer: memoryview | None = None  # the pool's buffer under `_body`
        self._grant: Grant | None = None
        self._refusal: HeadraceError | None = None
        self._num_to_skip = 0  # bytes of a refused frame to skip

    @property
    def is_mid_frame(self) -> bool:
        """Whether a frame has arrived in part."""
        return bool(self._rest or self._body is not None or self._num_to_skip)

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """Return where to receive the next bytes."""
        if self._body is not None and self._filled < len(self._body):
            return self._body[self._filled :]
        rest = len(self._rest)
        self._scratch[:rest] = self._rest
        return self._scratch[rest:]

    def buffer_updated(self, nbytes: int) -> None:
        """Process `nbytes` received into the buffer that `get_buffer` returned last.

        Raises:
            ProtocolError: A frame's length is out of bounds; the connection is unusable.
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

    def feed(self, data: memoryview) -> None:
        """Process bytes that another reader has received, before any of its own. Raises as `buffer_updated` does."""
        self._parse(data)

    def pause(self) -> None:
        """Stop callbacks until `resume`, even if bytes are left."""
        self.is_paused = True

    def resume(self, verdict: Grant | HeadraceError | None = None) -> None:
        """Continue, with the verdict on a waiting frame; None after `pause`. Raises as `buffer_updated` does."""
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
        """Accept no more bytes and drop an unfinished frame; return its grant to the caller. Idempotent."""
        self._is_stopped = True
        self._admit = self._deliver = self._refuse = ignore  # so that nothing refers to the owner any more
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
        """Read the length at `pos`, and the frame if it is complete; return the position after that."""
        length: int = PREFIX.unpack_from(data, pos)[0]
        if self._verdict is None:
            if not 0 < length <= self.max_frame_bytes:
                check_length(length, self.max_frame_bytes)
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
        """Deliver the complete frame in `_body`, or refuse with the complete head there."""
        body, grant, refusal = self._body, self._grant, self._refusal
        assert body is not None
        if refusal is None and grant is None:  # a small frame is admitted when it is complete
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


def ignore(*args: object) -> Any:
    """Do nothing: in place of the callbacks of what has ended, which would keep their owner until a collection."""


def check_length(length: int, max_frame_bytes: int) -> None:
    """Raise ProtocolError if a frame's length is out of bounds, with what the peer seems to speak."""
    if not 0 < length <= max_frame_bytes:
        raise ProtocolError(_describe_bad_length(length, max_frame_bytes))


def _describe_bad_length(length: int, max_frame_bytes: int) -> str:
    """Guess what the peer speaks, on either side, from an impossible length."""
    head = PREFIX.pack(length)
    if head in _HTTP_HEADS:
        return "the peer speaks HTTP, not framed Thrift: metrics and health have ports of their own"
    if head[:2] in _TLS_HEADS:
        return "the peer speaks TLS and this side does not: turn it on or off on both"
    if head[:2] in _THRIFT_HEADS:
        return "the peer speaks Thrift without frames: give it the framed transport and the strict binary protocol"
    return f"a frame of {length} bytes; the limit is {max_frame_bytes}"
