"""The first bytes of a stranger's first frame."""

from __future__ import annotations

import struct

import pytest

from headrace.paramserver.rpc.first_frame import FIRST_BYTES, FirstFrame
from headrace.paramserver.rpc.frames import new_scratch
from headrace.schemas.errors import ProtocolError


class _Seen:
    def __init__(self, max_frame_bytes: int = 2**20) -> None:
        self.judged: list[tuple[int, bytes]] = []
        self.first = FirstFrame(
            max_frame_bytes=max_frame_bytes,
            scratch=new_scratch(),
            judge=lambda length, head: self.judged.append((length, bytes(head))),
        )

    def receive(self, data: bytes, size: int) -> None:
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            self.first.get_buffer()[: len(piece)] = piece
            self.first.buffer_updated(len(piece))


@pytest.mark.parametrize("size", [1, 3, 1000, 32 * 2**10])
@pytest.mark.parametrize("length", [1, 500, FIRST_BYTES - 1, FIRST_BYTES, FIRST_BYTES + 1, 200_000])
def test_judged_once_by_the_first_bytes(length: int, size: int) -> None:
    """However the bytes are cut, the frame is judged once, as soon as its first bytes are here, and nothing is lost."""
    data = struct.pack(">I", length) + (b"frame" * length)[:length]
    head = data[: 4 + FIRST_BYTES]
    seen = _Seen()
    seen.receive(head[:-1], size)
    assert not seen.judged and seen.first.is_mid_frame
    seen.receive(head[-1:] + b"next", 10)
    assert seen.judged == [(length, head[4:])]
    assert bytes(seen.first.take()) == head + b"next"
    seen.receive(b"more", 4)
    assert len(seen.judged) == 1


def test_an_announced_length_is_checked() -> None:
    """One out of bounds is an error, and what was stopped is not judged."""
    seen = _Seen()
    seen.receive(struct.pack(">I", 2**20), 4)
    assert not seen.judged
    for length in (0, 2**20 + 1, 2**31):
        with pytest.raises(ProtocolError):
            _Seen().receive(struct.pack(">I", length), 4)
    seen.first.stop()
    seen.receive(bytes(2 * FIRST_BYTES), 30_000)
    assert not seen.judged and not seen.first.is_mid_frame
