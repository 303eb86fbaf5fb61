"""Buffers are reused, and idle ones bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.paramserver.rpc.buffer_pool import BufferPool

MIB = 2**20


def test_a_returned_buffer_serves_the_next_frame_of_its_size() -> None:
    """The same memory comes back for a size of the same class."""
    pool = BufferPool(max_buffer_bytes=MIB, max_idle_bytes=MIB)
    first = pool.take(100_000)
    pool.give(first)
    assert pool.take(100_001) is first
    assert pool.idle_bytes == 0


def test_idle_buffers_are_bounded_and_the_oldest_go() -> None:
    """The least recently used capacity makes room."""
    pool = BufferPool(max_buffer_bytes=MIB, max_idle_bytes=MIB)
    large, small = pool.take(MIB // 2), pool.take(MIB // 4)
    pool.give(large)
    pool.give(small)
    pool.give(pool.take(MIB // 4))
    pool.give(pool.take(MIB))  # alone as long as all that may be kept
    assert pool.idle_bytes == MIB
    assert pool.take(MIB // 2) is not large
    assert pool.take(MIB // 4) is not small


def test_a_pool_without_idle_room() -> None:
    """Without room for idle buffers each returned one is dropped."""
    pool = BufferPool(max_buffer_bytes=MIB, max_idle_bytes=0)
    pool.give(pool.take(1))
    assert (pool.idle_bytes, pool.lent_bytes) == (0, 0)


def test_poison_shows_a_use_after_the_return() -> None:
    """A poisoned pool overwrites returned buffers."""
    pool = BufferPool(max_buffer_bytes=MIB, max_idle_bytes=MIB, poison=0xDD)
    buffer = pool.take(10)
    buffer[:10] = b"0123456789"
    pool.give(buffer)
    assert bytes(buffer[:10]) == b"\xdd" * 10


@given(size=st.integers(1, 64 * MIB), limit=st.integers(1, 64 * MIB))
def test_a_buffer_is_long_enough_and_not_a_quarter_longer(size: int, limit: int) -> None:
    """Capacity is at least the size, at most 5/4 of it, and never above the longest."""
    limit = max(size, limit)
    capacity = BufferPool(max_buffer_bytes=limit, max_idle_bytes=0).capacity_of(size)
    assert size <= capacity <= min(max(size * 5 // 4, size), limit)
