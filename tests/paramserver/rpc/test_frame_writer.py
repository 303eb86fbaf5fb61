from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest
from loop_clock import Clock

from headrace.paramserver.rpc import frame_writer
from headrace.paramserver.rpc.frame_writer import FrameWriter
from headrace.schemas.errors import UnavailableError

KIB = 2**10
WAIT_S = 10.0


class Pipe:
    """A transport whose kernel takes everything, or nothing while it is `stuck`."""

    def __init__(self, writer: FrameWriter) -> None:
        self.writer = writer
        self.writes: list[bytes] = []
        self.stuck = False
        self.is_aborted = False
        self.aborted = asyncio.Event()
        self.written = asyncio.Event()

    def write(self, data: Any) -> None:
        """Take bytes as asyncio's transport does: all of them, with a word when they wait."""
        self.writes.append(bytes(data))
        self.written.set()
        if self.stuck:
            self.writer.pause()

    def unstick(self) -> None:
        """Let the kernel take what waits, and all that follows."""
        self.stuck = False
        self.writer.resume()

    def abort(self) -> None:
        """Lose the connection."""
        self.is_aborted = True
        self.aborted.set()

    def is_closing(self) -> bool:
        """Whether the connection is lost."""
        return self.is_aborted

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        """Ignore them."""

    def get_extra_info(self, name: str) -> Any:
        """Know nothing."""

    def frames(self) -> list[bytes]:
        """Return the frames that were written."""
        data, frames = b"".join(self.writes), []
        while data:
            (length,) = struct.unpack_from(">I", data)
            assert len(data) >= 4 + length, "a frame is cut"
            frames.append(data[4 : 4 + length])
            data = data[4 + length :]
        return frames


def attached(*, timeout_s: float | None = None) -> tuple[FrameWriter, Pipe]:
    writer = FrameWriter(timeout_s=timeout_s)
    pipe = Pipe(writer)
    writer.attach(pipe)  # type: ignore[arg-type]
    return writer, pipe


async def test_a_single_short_frame_goes_out_at_once() -> None:
    """Nobody waits for a turn of the loop to end when there is nothing to join a frame with."""
    writer, pipe = attached()
    await writer.send([b"ab", memoryview(b"cd")])
    assert pipe.writes == [b"\0\0\0\4abcd"]


async def test_short_frames_of_one_turn_are_joined_in_their_order() -> None:
    """Sixteen answers that are ready together cost two writes."""
    writer, pipe = attached()
    sent = [bytes([number]) * number for number in range(1, 17)]
    await asyncio.gather(*(writer.send([frame]) for frame in sent))
    await asyncio.sleep(0)
    assert pipe.frames() == sent
    assert len(pipe.writes) == 2


async def test_long_frames_keep_their_place_among_short_ones() -> None:
    """A short frame that waits for the end of the turn leaves before the long one sent after it."""
    writer, pipe = attached()
    sent = [b"a", b"b", bytes(300 * KIB), b"c", bytes(70 * KIB), b"d", b"e"]
    await asyncio.gather(*(writer.send([frame]) for frame in sent))
    await asyncio.sleep(0)
    assert pipe.frames() == sent
    assert max(map(len, pipe.writes)) <= 256 * KIB


async def test_a_frame_of_many_segments_is_not_gathered_whole() -> None:
    """Short segments of a long frame are joined, but never to more than some 64 KiB."""
    writer, pipe = attached()
    await writer.send([bytes(15 * KIB)] * 40)
    assert pipe.frames() == [bytes(600 * KIB)]
    assert 2 < len(pipe.writes) < 20
    assert max(map(len, pipe.writes)) <= 80 * KIB


async def test_while_the_peer_does_not_read_nothing_more_is_written() -> None:
    """Behind a write that the kernel does not take everybody waits, and goes on in order."""
    writer, pipe = attached()
    pipe.stuck = True
    await writer.send([b"first"])
    sends = [asyncio.create_task(writer.send([frame])) for frame in (b"second", bytes(100 * KIB), b"fourth")]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert pipe.frames() == [b"first"]
    pipe.unstick()
    await asyncio.gather(*sends)
    assert pipe.frames() == [b"first", b"second", bytes(100 * KIB), b"fourth"]


@pytest.mark.parametrize("size_bytes", [10, 300 * KIB])
async def test_a_peer_that_takes_nothing_is_cut_off(size_bytes: int) -> None:
    """Frames of any length have to be taken in time, the last one too."""
    writer, pipe = attached(timeout_s=0.01)
    pipe.stuck = True
    send = asyncio.create_task(writer.send([bytes(size_bytes)]))
    async with asyncio.timeout(WAIT_S):
        await pipe.aborted.wait()
    if size_bytes > 64 * KIB:
        with pytest.raises(UnavailableError, match="took nothing"):
            await send
    else:
        await send  # it was copied
    with pytest.raises(UnavailableError):
        await writer.send([b"more"])


async def test_a_long_frame_that_a_slow_peer_takes_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the whole frame but each piece of it has the deadline, or it would be begun anew for ever."""
    deadlines_s: list[float] = []
    timeout = asyncio.timeout

    def noted(delay_s: float) -> asyncio.Timeout:
        deadlines_s.append(delay_s)
        return timeout(delay_s)

    writer, pipe = attached(timeout_s=30.0)
    pipe.stuck = True
    monkeypatch.setattr(frame_writer.asyncio, "timeout", noted)
    send = asyncio.create_task(writer.send([bytes(2048 * KIB)]))
    for _ in range(9):  # the frame's length, and eight pieces
        await pipe.written.wait()
        pipe.written.clear()
        pipe.writer.resume()
    await send
    assert deadlines_s == [30.0] * 9
    assert 0 <= writer._loop.time() - writer.moved_s < WAIT_S


async def test_what_moves_on_is_what_the_peer_has_taken() -> None:
    """A piece counts when the kernel has taken it, the last one of a frame too."""
    writer, pipe = attached()
    clock = Clock()
    writer._loop = clock  # type: ignore[assignment]
    pipe.stuck = True
    send = asyncio.create_task(writer.send([bytes(300 * KIB)]))
    for _ in range(3):  # the frame's length, and two pieces
        await pipe.written.wait()
        pipe.written.clear()
        clock.advance(5)
        pipe.writer.resume()
    await send
    assert writer.moved_s == clock.time()


async def test_a_lost_connection_is_told() -> None:
    """After `detach` a sender that waits and one that comes are told so."""
    writer, pipe = attached()
    pipe.stuck = True
    await writer.send([b"a"])
    waiting = asyncio.create_task(writer.send([b"b"]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    writer.detach()
    with pytest.raises(UnavailableError):
        await waiting
    with pytest.raises(UnavailableError):
        await writer.send([b"c"])


@pytest.mark.parametrize("size", [10, 300 * KIB])
async def test_after_its_end_nothing_is_written(size: int) -> None:
    """What was sent before leaves; what comes later is refused, as a transport takes no more after its end."""
    writer, pipe = attached()
    await asyncio.gather(writer.send([b"one"]), writer.send([b"two"]))
    writer.end()
    with pytest.raises(UnavailableError, match="closed"):
        await writer.send([bytes(size)])
    assert pipe.frames() == [b"one", b"two"]


async def test_a_frame_amid_which_it_ends_is_cut() -> None:
    """Whoever waits for the rest of a long frame is told, and the peer loses the connection."""
    writer, pipe = attached()
    pipe.stuck = True
    sending = asyncio.create_task(writer.send([bytes(600 * KIB)]))
    await asyncio.wait_for(pipe.written.wait(), WAIT_S)
    writer.end()
    pipe.unstick()
    with pytest.raises(UnavailableError, match="closed"):
        await sending
    assert pipe.is_aborted
