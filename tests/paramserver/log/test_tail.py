"""The tail of a log in memory: whole blocks for the disk; readers get what was written, or nothing."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_files import ROOMY, body_of, check_records, fill, opened_log, segments_of

from headrace.paramserver.log import tail as log_tail
from headrace.paramserver.log.tail import LogTail
from headrace.paramserver.system.direct_file import copy_bytes
from headrace.schemas.errors import CorruptionError

_SEGMENT, _OTHER = object(), object()


class _Disk:
    """A segment's file, and what it should hold."""

    def __init__(self) -> None:
        self.data, self.wanted = bytearray(), bytearray()

    def put(self, tail: LogTail, buffers: list[bytes], *, back: int = 0) -> None:
        """Write like a log, from `back` bytes before the end, as over a checkpoint."""
        del self.wanted[len(self.wanted) - back :]
        for offset, blocks in tail.put(buffers, len(self.wanted)):
            assert not offset % 4096 and not any(len(block) % 4096 for block in blocks)
            piece = b"".join(blocks)
            assert piece
            self.data[offset : offset + len(piece)] = piece
        self.wanted += b"".join(buffers)


_SIZES = st.one_of(
    st.integers(0, 60),
    st.integers(4000, 4200),
    st.integers(0, 30_000),
    st.builds(lambda blocks, more: blocks * 4096 + more, st.integers(1, 12), st.integers(-1, 1)),
)


@given(
    num_blocks=st.integers(2, 6),
    puts=st.lists(st.tuples(st.lists(_SIZES, max_size=4), st.integers(0, 50)), max_size=12),
    seed=st.integers(0, 2**32),
)
def test_disk_and_readers_get_what_was_put(num_blocks: int, puts: list[tuple[list[int], int]], seed: int) -> None:
    """The file has all that is put, then zeros; a reader gets it as long as the ring can have it."""
    size_bytes, rng = num_blocks * 4096, random.Random(seed)
    tail, disk = LogTail(size_bytes), _Disk()
    tail.begin(_SEGMENT)
    for sizes, back in puts:
        disk.put(tail, [rng.randbytes(size) for size in sizes], back=min(back, len(disk.wanted)))
        end = len(disk.wanted)
        assert disk.data[:end] == disk.wanted
        assert not any(disk.data[end : -(-end // 4096) * 4096])
        for _ in range(5):
            begin = rng.randint(0, end)
            until = rng.randint(begin, end)
            data = tail.read(_SEGMENT, begin, until - begin)
            assert data is None or data == disk.wanted[begin:until]
            assert data is not None or begin < len(disk.data) - size_bytes
            assert tail.read(_OTHER, begin, until - begin) is None


@pytest.mark.parametrize("by", ["more of the same", "another segment"])
def test_what_is_overwritten_while_it_is_read_is_not_given_out(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """A reader that the writer overtakes gets nothing, instead of a mixture."""
    tail, disk = LogTail(8192), _Disk()
    tail.begin(_SEGMENT)
    disk.put(tail, [b"a" * 8192])
    copied: list[bytes] = []

    def overtaken(target: memoryview, data: memoryview) -> None:
        monkeypatch.undo()
        if by == "another segment":
            tail.begin(_OTHER)
            _Disk().put(tail, [b"b" * 8000])
        else:
            disk.put(tail, [b"b" * 100])
        copy_bytes(target, data)
        copied.append(bytes(target))

    monkeypatch.setattr(log_tail, "copy_bytes", overtaken)
    assert tail.read(_SEGMENT, 0, 8000) is None
    assert b"b" in copied[0]


def test_what_is_read_is_a_copy_of_at_most_the_ring() -> None:
    """Bytes that were read are a read-only copy, which later records leave alone; a larger read returns nothing."""
    tail, disk = LogTail(8192), _Disk()
    tail.begin(_SEGMENT)
    disk.put(tail, [b"a" * 100])
    assert tail.read(_SEGMENT, 0, 8192) is not None and tail.read(_SEGMENT, 0, 8193) is None
    disk.put(tail, [b"a" * 8092])
    data = tail.read(_SEGMENT, 0, 8000)
    disk.put(tail, [b"b" * 8192])
    assert data == b"a" * 8000 and data.readonly


@pytest.mark.parametrize("shape", [(0, 4), (300, 4), ()])
def test_buffers_of_any_shape_and_kind_are_bytes(shape: tuple[int, ...]) -> None:
    """A column of numbers is put as its bytes, even without rows."""
    tail, column = LogTail(8192), np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    tail.begin(_SEGMENT)
    pieces = [bytes(view) for _, views in tail.put([b"head", column.data, b"tail"], 0) for view in views]
    wanted = b"head" + column.tobytes() + b"tail"
    assert b"".join(pieces) == wanted.ljust(-(-len(wanted) // 4096) * 4096, b"\0")


class _WatchedTail(LogTail):
    """Calls `changed` whenever the writer has changed an attribute."""

    @staticmethod
    def changed() -> None:
        """Replaced by the test."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        self.changed()


def test_whatever_the_writer_is_at_readers_get_what_was_put_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte is wrong between any two steps of the writer, also within a copy and at the start of a segment."""
    tail, disk = _WatchedTail(12_288), _Disk()
    tail.begin(_SEGMENT)
    disk.put(tail, [random.Random(1).randbytes(15_000)])
    reading: list[int] = []
    num_right = 0

    def check() -> None:
        nonlocal num_right
        if reading:  # called by the reader's own copies
            return
        for begin in range(0, len(disk.wanted), 500):
            reading.append(begin)
            data = tail.read(_SEGMENT, begin, min(500, len(disk.wanted) - begin))
            reading.pop()
            assert data is None or data == disk.wanted[begin : begin + 500]
            num_right += data is not None

    def copy_in_steps(target: memoryview, data: memoryview) -> None:
        for start in range(0, len(data), 700):
            copy_bytes(target[start : start + 700], data[start : start + 700])
            check()

    monkeypatch.setattr(_WatchedTail, "changed", staticmethod(check))
    monkeypatch.setattr(log_tail, "copy_bytes", copy_in_steps)
    # The zeros of the last block overwrite bytes that must stay out of reach.
    disk.put(tail, [random.Random(2).randbytes(200), random.Random(3).randbytes(6000)])
    assert num_right
    tail.begin(_OTHER)
    _Disk().put(tail, [random.Random(4).randbytes(10_000)])


async def test_followers_read_the_newest_records_from_memory(path: Path) -> None:
    """Records in the tail are not read from the file, which is damaged here; older ones are."""
    async with opened_log(path, ROOMY) as log:
        await fill(log, 30)
        segment = segments_of(path)[0]
        data = segment.read_bytes()
        first = data.index(body_of(1))
        segment.write_bytes(data[:first] + b"x" * 40 + data[first + 40 :])
        check_records(log, 30)
        await fill(log, 100)
        with pytest.raises(CorruptionError, match="record 1 is wrong"):
            check_records(log, 130)
        assert next(iter(log.read(130))).seq == 130
