"""The two buffers of a flusher, and who waits for one."""

from __future__ import annotations

import threading
import weakref

import pytest

from headrace.streamer.flush.staging import StagingPool


@pytest.mark.parametrize("timeout_s", [0.0, 60.0])
def test_one_buffer_is_used_as_long_as_it_comes_back(timeout_s: float) -> None:
    """The memory of the second buffer is not touched before both are needed."""
    pool = StagingPool(2**16)
    first = pool.reserve(timeout_s)
    assert first is not None
    pool.remove(first)
    pool.release(first)
    again = pool.reserve(timeout_s)
    assert again is first
    pool.remove(first)
    second = pool.reserve(timeout_s)
    assert second is not None
    assert second is not first


def test_closed_pool_wakes_who_waits() -> None:
    """A pool that is closed ends the wait for a buffer at once."""
    pool = StagingPool(2**16)
    for _ in range(2):
        buffer = pool.reserve()
        assert buffer is not None
        pool.remove(buffer)
    closer = threading.Thread(target=pool.close)
    closer.start()
    assert pool.reserve(60.0) is None
    closer.join()


def test_discarded_pool_gives_its_memory_up() -> None:
    """A pool that is discarded keeps no buffer: none that is free, being filled, or released later."""
    pool = StagingPool(2**16)
    sent = pool.reserve()
    assert sent is not None
    pool.remove(sent)
    filled = pool.reserve()
    assert filled is not None
    pool.discard()
    pool.remove(filled)
    for buffer in (sent, filled):
        pool.release(buffer)
    assert pool.reserve(60.0) is None
    gone = [weakref.ref(sent), weakref.ref(filled)]
    del sent, filled, buffer
    assert [buffer() for buffer in gone] == [None, None]
