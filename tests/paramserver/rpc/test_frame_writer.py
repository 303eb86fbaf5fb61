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
WAIT_S = 60.0


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


@pytest.mark.parametrize(
    ("frames", "most_writes", "longest"),
    [
        ([[bytes([number]) * number] for number in range(1, 17)], 2, KIB),  # answers that are ready together
        ([[bytes(size)] for size in (1, 2, 300 * KIB, 1, 70 * KIB, 2, 3)], 20, 256 * KIB),
        ([[bytes(15 * KIB)] * 40], 19, 80 * KIB),  # short segments are joined, but not all of them
    ],
    ids=["short ones", "long ones among short ones", "many segments"],
)
async def test_frames_keep_their_order(frames: list[list[bytes]], most_writes: int, longest: int) -> None:
    """Short frames of one turn are joined, a long frame keeps its place, and none is gathered whole."""
    writer, pipe = attached()
    await asyncio.gather(*(writer.send(list(segments)) for segments in frames))
    await asyncio.sleep(0)
    assert pipe.frames() == [b"".join(segments) for segments in frames]
    assert len(pipe.writes) <= most_writes and max(map(len, pipe.writes)) <= longest


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
    """Each piece has the deadline, not the frame; a piece has moved when the kernel has taken it, the last too."""
    deadlines_s: list[float] = []
    timeout = asyncio.timeout

    def noted(delay_s: float) -> asyncio.Timeout:
        deadlines_s.append(delay_s)
        return timeout(delay_s)

    writer, pipe = attached(timeout_s=30.0)
    writer._loop = clock = Clock()  # type: ignore[assignment]
    pipe.stuck = True
    monkeypatch.setattr(frame_writer.asyncio, "timeout", noted)
    send = asyncio.create_task(writer.send([bytes(2048 * KIB)]))
    for _ in range(9):  # the frame's length, and eight pieces
        await pipe.written.wait()
        pipe.written.clear()
        clock.advance(5)
        pipe.writer.resume()
    await send
    assert deadlines_s == [30.0] * 9
    assert writer.moved_s == clock.time()


async def test_a_lost_connection_is_told() -> None:
    """After `detach` a sender that waits and one that comes are told so; `end` amid a long frame cuts it."""
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
    writer, pipe = attached()
    pipe.stuck = True
    sending = asyncio.create_task(writer.send([bytes(600 * KIB)]))
    await asyncio.wait_for(pipe.written.wait(), WAIT_S)
    writer.end()
    pipe.unstick()
    with pytest.raises(UnavailableError, match="closed"):
        await sending
    assert pipe.is_aborted


@pytest.mark.parametrize("size", [10, 300 * KIB])
async def test_after_its_end_nothing_is_written(size: int) -> None:
    """What was sent before leaves; what comes later is refused, as a transport takes no more after its end."""
    writer, pipe = attached()
    await asyncio.gather(writer.send([b"one"]), writer.send([b"two"]))
    writer.end()
    with pytest.raises(UnavailableError, match="closed"):
        await writer.send([bytes(size)])
    assert pipe.frames() == [b"one", b"two"]
