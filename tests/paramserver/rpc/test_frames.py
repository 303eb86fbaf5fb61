"""Frames cut from a stream of bytes, whatever its portions; and the pool of buffers that they take."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.paramserver.rpc.frames import (
    MAX_HEAD_BYTES,
    SCRATCH_BYTES,
    SMALL_FRAME_BYTES,
    BufferPool,
    Frame,
    FrameReader,
    new_scratch,
)
from headrace.schemas.errors import HeadraceError, OverloadedError, ProtocolError

MAX_FRAME_BYTES = 300_000
PATTERN = bytes(range(251)) + bytes(range(7, 251)) + bytes(range(3))  # of a period that divides no buffer's length
REFUSAL = OverloadedError("full")


@dataclass
class Driver:
    """A reader, and a transport that gives it bytes in chosen portions and obeys its pauses."""

    verdicts: dict[int, HeadraceError | None] = field(default_factory=dict)  # by number of the frame asked about
    frames: list[bytes] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    kept: list[Frame[int]] = field(default_factory=list)
    keeps: bool = False
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self.pool = BufferPool(max_buffer_bytes=MAX_FRAME_BYTES, max_idle_bytes=MAX_FRAME_BYTES, poison=0xDD)
        self.reader: FrameReader[int] = FrameReader(
            max_frame_bytes=MAX_FRAME_BYTES,
            scratch=new_scratch(),
            pool=self.pool,
            admit=self.admit,
            deliver=self.deliver,
            refuse=lambda head, error: self.heads.append(bytes(head)),
        )

    def admit(self, length: int) -> int | HeadraceError | None:
        self.asked.append(length)
        return self.verdicts.get(len(self.asked) - 1, len(self.asked))

    def deliver(self, frame: Frame[int]) -> None:
        self.frames.append(bytes(frame.data))
        if self.keeps:
            self.kept.append(frame)
        else:
            frame.release()

    def feed(self, data: bytes, portions: list[int] | None = None) -> int:
        """Receive until all is read or the reader pauses; return how much was read."""
        pos, turn = 0, 0
        while pos < len(data) and not self.reader.is_paused:
            buffer = self.reader.get_buffer()
            portion = portions[turn % len(portions)] if portions else len(data)
            step = min(len(buffer), portion, len(data) - pos)
            assert step > 0
            self.most_at_once = max(self.most_at_once, step)
            buffer[:step] = data[pos : pos + step]
            self.reader.buffer_updated(step)
            pos, turn = pos + step, turn + 1
        return pos


def framed(*bodies: bytes) -> bytes:
    """Return the bodies with their lengths before them."""
    return b"".join(struct.pack(">I", len(body)) + body for body in bodies)


def body(length: int, salt: int = 0) -> bytes:
    """Return bytes that differ from place to place and from salt to salt."""
    start = salt * 31 % len(PATTERN)
    return (PATTERN * (length // len(PATTERN) + 2))[start : start + length]


LENGTHS = st.one_of(
    st.integers(1, 40),
    st.sampled_from([SMALL_FRAME_BYTES - 1, SMALL_FRAME_BYTES, SMALL_FRAME_BYTES + 1, SCRATCH_BYTES]),
    st.integers(1, 100_000),
)
PORTIONS = st.lists(st.one_of(st.integers(1, 5), st.integers(1, 50_000)), min_size=1, max_size=8)


@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=6),
    portions=PORTIONS,
    fates=st.lists(st.sampled_from(["take", "refuse", "wait, take", "wait, refuse"]), min_size=6, max_size=6),
)
def test_refusals_and_waits_touch_only_their_own_frame(
    lengths: list[int], portions: list[int], fates: list[str]
) -> None:
    """A refused frame is read past, one that waits is read later, and the frames around them arrive whole."""
    driver = Driver()
    for number, fate in enumerate(fates):
        if fate != "take":
            driver.verdicts[number] = REFUSAL if fate == "refuse" else None
    bodies = [body(length, salt) for salt, length in enumerate(lengths)]
    data, pos = framed(*bodies), 0
    while pos < len(data) or driver.reader.is_paused:
        if driver.reader.is_paused:
            # Asked once about each frame, so the last one asked about is the one that waits.
            waits = len(driver.asked) - 1
            driver.reader.resume(REFUSAL if fates[waits] == "wait, refuse" else 1)
        else:
            pos += driver.feed(data[pos:], portions)
    refused = [fate.endswith("refuse") for fate in fates]
    assert driver.frames == [b for b, no in zip(bodies, refused, strict=False) if not no]
    assert driver.heads == [b[:MAX_HEAD_BYTES] for b, no in zip(bodies, refused, strict=False) if no]
    assert not driver.reader.is_mid_frame
    assert driver.asked == lengths
    assert driver.pool.lent_bytes == 0


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 2**31, 2**32 - 1])
def test_length_out_of_bounds_is_refused_before_anything_is_allocated(length: int) -> None:
    """An empty frame and one over the limit are errors, and nothing is asked for or lent."""
    driver = Driver()
    with pytest.raises(ProtocolError, match=str(length)):
        driver.feed(struct.pack(">I", length))
    assert (driver.asked, driver.pool.lent_bytes) == ([], 0)


def test_receives() -> None:
    """Small frames in the scratch buffer cost one receive; the rest of a long one is one, into what is handed over."""
    driver = Driver(keeps=True)
    bodies = [body(100, salt) for salt in range(200)]
    buffer, data = driver.reader.get_buffer(), framed(*bodies)
    buffer[: len(data)] = data
    driver.reader.buffer_updated(len(data))
    assert driver.frames == bodies
    data = framed(body(200_000))
    driver.feed(data)
    assert driver.most_at_once == len(data) - SCRATCH_BYTES
    driver.feed(framed(body(50_000, 1), body(10, 2), body(50_000, 3)), [30_000])
    assert [bytes(frame.data) for frame in driver.kept] == driver.frames, "what follows does not overwrite what is kept"
    frame = driver.kept[200]
    assert frame.data.readonly
    lent_bytes = driver.pool.lent_bytes
    for _ in range(2):
        frame.release()
        assert driver.pool.lent_bytes == lent_bytes - driver.pool.capacity_of(200_000)


def test_what_is_lent() -> None:
    """A long frame without room yet is read no further than the scratch buffer; what was lent for one that never ends
    is given back by `stop`, after which bytes are ignored."""
    driver = Driver(verdicts={0: None})
    data = framed(body(200_000))
    assert driver.feed(data) <= SCRATCH_BYTES
    assert driver.reader.is_paused
    assert driver.pool.lent_bytes == 0
    driver = Driver()
    driver.feed(framed(body(200_000))[:50_000])
    assert driver.pool.lent_bytes > 0
    assert driver.reader.stop() == 1
    assert driver.pool.lent_bytes == 0
    driver.feed(framed(body(10)))
    assert driver.reader.stop() is None
    assert driver.frames == []


def test_what_has_moved_is_told_of_long_frames_alone() -> None:
    """Small frames never count, in however many parts they come; a long one does, also one that is refused."""
    driver = Driver(verdicts={31: REFUSAL})
    driver.feed(framed(*[body(SMALL_FRAME_BYTES)] * 30), [1000])
    assert driver.reader.num_moved == 0
    driver.feed(framed(body(200_000)), [10_000])
    assert 200_000 - SCRATCH_BYTES <= driver.reader.num_moved <= 200_000
    driver.feed(framed(body(200_000)), [10_000])
    assert driver.heads == [body(MAX_HEAD_BYTES)]
    assert 400_000 - 2 * SCRATCH_BYTES <= driver.reader.num_moved <= 400_000


def test_pause_keeps_what_is_left_for_later() -> None:
    """Frames behind a pause come with the next resume."""
    driver = Driver(verdicts={0: REFUSAL})
    driver.reader = FrameReader(
        max_frame_bytes=100,
        scratch=new_scratch(),
        pool=None,
        admit=driver.admit,
        deliver=driver.deliver,
        refuse=lambda head, error: driver.reader.pause(),
    )
    driver.feed(framed(b"one", b"two", b"three"))
    assert driver.frames == []
    driver.reader.resume()
    assert driver.frames == [b"two", b"three"]


@given(data=st.binary(max_size=2000), portions=PORTIONS)
def test_any_bytes_are_frames_or_a_protocol_error(data: bytes, portions: list[int]) -> None:
    """Garbage raises nothing else, and lends no more than one frame's buffer."""
    driver = Driver()
    with contextlib.suppress(ProtocolError):
        driver.feed(data, portions)
    assert driver.pool.lent_bytes <= MAX_FRAME_BYTES
    driver.reader.stop()
    assert driver.pool.lent_bytes == 0


MIB = 2**20


def test_idle_buffers() -> None:
    """The same memory comes back for a size of the same class; the least recently used capacity makes room."""
    pool = BufferPool(max_buffer_bytes=MIB, max_idle_bytes=MIB)
    first = pool.take(100_000)
    pool.give(first)
    assert pool.take(100_001) is first
    assert pool.idle_bytes == 0
    pool = BufferPool(max_buffer_bytes=MIB, max_idle_bytes=MIB)
    large, small = pool.take(MIB // 2), pool.take(MIB // 4)
    pool.give(large)
    pool.give(small)
    pool.give(pool.take(MIB // 4))
    pool.give(pool.take(MIB))  # alone as long as all that may be kept
    assert pool.idle_bytes == MIB
    assert pool.take(MIB // 2) is not large
    assert pool.take(MIB // 4) is not small


@given(size=st.integers(1, 64 * MIB), limit=st.integers(1, 64 * MIB))
def test_a_buffer_is_long_enough_and_not_a_quarter_longer(size: int, limit: int) -> None:
    """Capacity is at least the size, at most 5/4 of it, and never above the longest; without idle room none is kept."""
    limit = max(size, limit)
    pool = BufferPool(max_buffer_bytes=limit, max_idle_bytes=0)
    assert size <= pool.capacity_of(size) <= min(max(size * 5 // 4, size), limit)
    pool.give(pool.take(min(size, 100)))
    assert (pool.idle_bytes, pool.lent_bytes) == (0, 0)
