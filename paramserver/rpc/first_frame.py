"""Receive a stranger's first frame, as it comes and no further than its first bytes.

Nothing is allocated for a length that is only announced. Once the frame is here, or as much of it as says who sends it,
`judge` decides; with a frame that is let in, a `FrameReader` goes on where this one stopped.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.paramserver.rpc.frames import PREFIX, check_length, ignore

__all__ = ["FIRST_BYTES", "FirstFrame"]

# Of a stranger's first frame. If the server asks for a token, it must be in them.
FIRST_BYTES = 64 * 2**10


class FirstFrame:
    """Collects the beginning of a connection's first frame; an `asyncio.BufferedProtocol` drives it.

    Attributes:
        num_begun: Frames whose length has been read: 0 or 1.
        num_moved: Always 0: no frame is long here.
        num_reads: How often bytes have come.
        is_paused: The frame was judged; receive nothing more with this.
        is_mid_frame: A part of the frame is here.
    """

    __slots__ = (
        *("_data", "_judge", "_length", "_max_frame_bytes", "_scratch"),
        *("is_mid_frame", "is_paused", "num_begun", "num_reads"),
    )
    num_moved = 0

    def __init__(
        self,
        *,
        max_frame_bytes: int,
        scratch: memoryview,
        judge: Callable[[int, memoryview], None],
    ) -> None:
        """Start before the first byte.

        Args:
            max_frame_bytes: Longest frame.
            scratch: From `new_scratch`; all readers of a loop may share it.
            judge: Called once, with the frame's length and its first bytes: the whole frame or `FIRST_BYTES` of it.
        """
        self.num_begun = self.num_reads = 0
        self.is_paused = self.is_mid_frame = False
        self._max_frame_bytes, self._scratch, self._judge = max_frame_bytes, scratch, judge
        self._data = bytearray()
        self._length = 0

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """Return where to receive the next bytes."""
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Process `nbytes` received into the buffer that `get_buffer` returned last.

        Raises:
            ProtocolError: The frame's length is out of bounds; the connection is unusable.
        """
        if self.is_paused:
            return
        data = self._data
        data += self._scratch[:nbytes]
        self.is_mid_frame = True
        self.num_reads += 1
        if not self.num_begun and len(data) >= PREFIX.size:
            self._length = PREFIX.unpack_from(data)[0]
            check_length(self._length, self._max_frame_bytes)
            self.num_begun = 1
        first_bytes = PREFIX.size + min(self._length, FIRST_BYTES)
        if self.num_begun and len(data) >= first_bytes:
            self.is_paused, self.is_mid_frame = True, False
            self._judge(self._length, memoryview(data)[PREFIX.size : first_bytes])

    def take(self) -> memoryview:
        """Return all that was received, for the reader that goes on."""
        data, self._data = self._data, bytearray()
        return memoryview(data)

    def stop(self) -> None:
        """Accept no more bytes and drop what is here. Idempotent."""
        self._judge = ignore
        self.is_paused, self.is_mid_frame = True, False
        self._data = bytearray()
