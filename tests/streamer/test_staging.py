"""The two buffers of a flusher, and who waits for one."""

from __future__ import annotations

import threading

import pytest

from headrace.streamer.staging import StagingPool


@pytest.mark.parametrize("timeout_s", [0.0, 60.0])
def test_one_buffer_is_used_as_long_as_it_comes_back(timeout_s: float) -> None:
    """The memory of the second buffer is not touched before both are needed."""
    pool = StagingPool(2**16)
    first = pool.acquire(timeout_s)
    assert first is not None
    pool.release(first)
    again = pool.acquire(timeout_s)
    assert again is first
    second = pool.acquire(timeout_s)
    assert second is not None
    assert second is not first


def test_closed_pool_wakes_who_waits() -> None:
    """A pool that is closed ends the wait for a buffer at once."""
    pool = StagingPool(2**16)
    assert pool.acquire() is not None
    assert pool.acquire() is not None
    closer = threading.Thread(target=pool.close)
    closer.start()
    assert pool.acquire(60.0) is None
    closer.join()
